"""One training step whose gradients are written to a file: started alone or by torchrun, with the same global batch.

python tests/distributed_run.py ALGORITHM MODEL FILE [TOKENS OF A MICRO-BATCH] [tools]

With `tools`, prompts with one picture call a tool that returns another one: of two processes the first alone does so.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tool_runs import Forced, call, ids_of, look, processor
from training_runs import GradientRecorder, make_trainer, rows
from vlmroll import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import Prompt


class ByPrompt:
    """A generator whose completions depend on the prompt alone, so that every process count samples the same."""

    banned_ids: frozenset[int] = frozenset()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        """Pseudo-random ids of the text part of the vocabulary, of different lengths."""
        completions: list[tuple[Completion, ...]] = []
        for prompt in prompts:
            generator = torch.Generator().manual_seed(sum(prompt.prompt_ids))
            group: list[Completion] = []
            for i in range(num_generations):
                ids = torch.randint(0, 250, (3 + i,), generator=generator).tolist()
                group.append(Completion(completion_ids=tuple(ids), logprobs=(-1.0,) * len(ids), finish_reason="length"))
            completions.append(tuple(group))
        return GenerationOutput(
            prompts=tuple(prompts),
            prompt_ids=tuple(prompt.prompt_ids for prompt in prompts),
            completions=tuple(completions),
        )

    def sync_weights(self, policy: Any) -> None:
        """Nothing to take over."""

    def close(self) -> None:
        """Nothing to free."""


class OneLook(Forced):
    """Prompts with one picture call a tool; all others, and later turns, say a word of their own."""

    def __init__(self) -> None:
        super().__init__([])

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        owners = [(prompt, i) for prompt in prompts for i in range(num_generations)]
        words = [f"{sum(prompt.prompt_ids) + i}<|im_end|>" for prompt, i in owners]
        looks = [call("look", size=32 + 8 * i) if len(prompt.images) == 1 else "" for prompt, i in owners]
        self._so_far = [prompt.prompt_ids for prompt, _ in owners]
        self._script = [[ids_of(look or word)] for look, word in zip(looks, words, strict=True)]
        return super().generate(prompts, sampling, num_generations)


def main(algorithm: str, model: str, file: str, tokens: str = "", tools: str = "") -> None:
    import os

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    recorder = GradientRecorder()
    with_tools = {"tools": [look], "processing_class": processor(model), "max_completion_length": 200}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            algorithm,
            Path(folder),
            model=model,
            callbacks=[recorder],
            generator=OneLook() if tools else ByPrompt(),
            max_grad_norm=0.0,
            max_steps=1,
            shuffle_dataset=False,
            per_device_train_batch_size=8 // world_size,
            beta=0.1,
            micro_batch_max_tokens=int(tokens) if tokens else None,
            data=rows(4, model),
            **(with_tools if tools else {}),
        )
        trainer.train()
    log = next(log for log in trainer.state.log_history if "reward" in log)
    if trainer.is_world_process_zero():
        names = ("reward", "reward_std", "completions/mean_length", "kl", "num_tokens", "tools/call_frequency")
        numbers = {name: log[name] for name in names if name in log}
        torch.save({"gradients": recorder.steps[0], "numbers": numbers}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
