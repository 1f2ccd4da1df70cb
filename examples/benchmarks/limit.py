"""vlmroll against the limit: a bare loop over the same model that shares what can be shared, and does nothing else.

    python examples/benchmarks/limit.py
    python examples/benchmarks/limit.py --workload w5-g32 --repeats 3

The bare loop processes the pictures once; prefills the prompt once and decodes all completions from repeats of its
cache; for the training pass runs the prompt once with gradient, repeats its cache, runs the completions behind it,
applies the head to them alone and goes back through the loss of GRPO. It has no entropy, no metrics, no checks.

Both run in turn in this process: a step of `GRPOTrainer.train`, then the bare loop on rollouts of the same sizes. First
the gradients of both are compared on the same rollouts. Printed are medians in seconds, and for each pair the ratios
ours / bare of the training pass and of the whole step (median, least and most).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

# It sets what has to be set before torch is imported.
from workloads import PASS, WORKLOADS, Workload, hide_vllm, make_rows, make_trainer, tiny  # isort: skip

import torch
from jaxtyping import Float, Int
from transformers import TrainerCallback

from decoding import bare as bare_generation
from vlmroll import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What the bare loop runs on: one prompt and its completions.

    Attributes:
        row: of the data, with its pictures.
        rollouts: of vlmroll, for its own loss.
        completion_ids: all of one length.
        advantages: as vlmroll computed them.
        banned_ids: ids that could not be sampled.
    """

    row: dict[str, Any]
    rollouts: Sequence[Rollout]
    completion_ids: Int[torch.Tensor, "G C"]
    advantages: Float[torch.Tensor, " G"]
    banned_ids: Sequence[int]


def make_round(trainer: Any, workload: Workload, seed: int) -> Round:
    """One round, sampled by vlmroll."""
    (row,) = make_rows(workload, 1, seed + 1)
    (rollouts,) = trainer.weigh([trainer.collect([row], [0], (seed,), "train")])
    return Round(
        row=row,
        rollouts=rollouts,
        completion_ids=torch.tensor([rollout.completion.completion_ids for rollout in rollouts]),
        advantages=torch.tensor([rollout.advantage for rollout in rollouts]),
        banned_ids=sorted(trainer.generator.banned_ids),
    )


class Bare:
    """The bare loop over a model.

    Args:
        model: Qwen2.5-VL, or a text model.
        processor: its processor, or tokenizer.
    """

    def __init__(self, model: Any, processor: Any, found: Round) -> None:
        self.model, self._processor, self._round = model, processor, found
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        self.inputs = self.process()

    def process(self) -> dict[str, Any]:
        """Pictures and text to the model's inputs."""
        row = self._round.row
        images = [{"type": "image", "image": image} for image in row.get("images", ())]
        content = [*images, {"type": "text", "text": row["prompt"][0]["content"]}]
        inputs = self._processor.apply_chat_template(
            [[{"role": "user", "content": content}]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return {**inputs}

    def generate(self) -> None:
        """One prefill without gradient, then token by token."""
        groups = len(self._round.completion_ids)
        self.model.eval()
        bare_generation(self.model, [self._round.rollouts[0].prompt], groups, self._round.completion_ids.shape[1])
        self.model.train()

    def loss(self) -> Float[torch.Tensor, ""]:
        """The loss of GRPO on the policy that sampled, with the prompt run once."""
        ids = self._round.completion_ids
        groups, length = ids.shape
        positions = self._positions()
        prompt = self.model.model(**self.inputs, position_ids=positions, use_cache=True)
        cache = prompt.past_key_values
        cache.batch_repeat_interleave(groups)
        later = positions.max() + 1 + torch.arange(length - 1)
        behind = self.model.model(
            input_ids=ids[:, :-1],
            position_ids=later.expand(*positions.shape[:-2], groups, -1),
            past_key_values=cache,
            use_cache=True,
        )
        first = prompt.last_hidden_state[:, -1:].expand(groups, -1, -1)
        logits = self.model.lm_head(torch.cat([first, behind.last_hidden_state], dim=1)).float()
        logits[..., list(self._round.banned_ids)] = float("-inf")
        logprobs = logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        return -(ratio * self._round.advantages[:, None]).mean()

    def _positions(self) -> torch.Tensor:
        if "image_grid_thw" not in self.inputs:
            return torch.arange(self.inputs["input_ids"].shape[1])[None]
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        return self.model.model.get_rope_index(**{name: self.inputs[name] for name in names})[0]

    def training_pass(self) -> None:
        """Forward and backward."""
        self.loss().backward()

    def optimize(self) -> None:
        """Clip, and a step that changes nothing but costs the same."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.model.zero_grad()

    def parts(self) -> dict[str, Callable[[], Any]]:
        """What a step consists of, in order."""
        return {
            "processing": self.process,
            "generation": self.generate,
            "training pass": self.training_pass,
            "optimizer": self.optimize,
        }


def gradient_difference(trainer: Any, bare: Bare, rollouts: Sequence[Rollout]) -> float:
    """Norm of the difference between vlmroll's and the bare loop's gradients, over the norm of the latter."""
    parameters = dict(bare.model.named_parameters())

    def gradients(losses: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        for loss in losses:
            loss.backward()
        found = {name: cast("torch.Tensor", p.grad).clone() for name, p in parameters.items()}
        bare.model.zero_grad()
        return found

    bare.model.train()
    ours = gradients([trainer.compute_loss(bare.model, piece) for piece in trainer.cut(rollouts)])
    theirs = gradients([bare.loss()])
    squares = [((ours[n] - theirs[n]).double().pow(2).sum(), theirs[n].double().pow(2).sum()) for n in parameters]
    difference, norm = (torch.stack(values).sum().sqrt() for values in zip(*squares, strict=True))
    return float(difference / norm)


class InTurn(TrainerCallback):
    """Runs the bare loop after each step of the trainer, and keeps the seconds of both."""

    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self._started = 0.0
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock of our step, which lasts from one step's end to the next."""
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop it, run the bare loop, start it again."""
        seconds = {"ours, whole step": time.perf_counter() - self._started}
        for name, part in self._bare.parts().items():
            started = time.perf_counter()
            part()
            seconds[f"bare, {name}"] = time.perf_counter() - started
        self.steps.append(seconds)
        self._started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The training pass is in the log of the step that ended."""
        if PASS in (logs or {}):
            self.steps[-1]["ours, training pass"] = logs[PASS]


def ratios(steps: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Ours / bare of each pair; the whole step with and without the optimizer's part on the bare side."""
    found: dict[str, list[float]] = {"training pass": [], "whole step": [], "whole step, bare without optimizer": []}
    for step in steps:
        shared = sum(step[f"bare, {name}"] for name in ("processing", "generation", "training pass"))
        whole = step["ours, whole step"]
        found["training pass"].append(step["ours, training pass"] / step["bare, training pass"])
        found["whole step"].append(whole / (shared + step["bare, optimizer"]))
        found["whole step, bare without optimizer"].append(whole / shared)
    return found


def measure(workload: Workload, *, repeats: int, seed: int) -> dict[str, Any]:
    """Compare gradients, then run both in turn; one more pair of steps than `repeats`, the first, warms up."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workload, "vlmroll", steps=repeats + 1, seed=seed, folder=folder)
        found = make_round(trainer, workload, seed)
        bare = Bare(trainer.model, trainer.processing_class, found)
        difference = gradient_difference(trainer, bare, found.rollouts)
        turns = InTurn(bare)
        trainer.add_callback(turns)
        trainer.train()
    steps = turns.steps[1:]
    return {
        "gradients, relative difference": difference,
        "seconds": {name: statistics.median(step[name] for step in steps) for name in steps[0]},
        "ours / bare": {
            name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
            for name, values in ratios(steps).items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    single = [name for name, workload in WORKLOADS.items() if len(workload.prompts) == 1 and not workload.vllm]
    parser.add_argument("--workload", choices=single, default="w1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="the same kind of work, very small")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args(arguments)
    hide_vllm()
    workload = tiny(WORKLOADS[args.workload]) if args.tiny else WORKLOADS[args.workload]
    text = json.dumps(measure(workload, repeats=args.repeats, seed=args.seed), indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
