"""The work that vlmroll and TRL are compared on, and one side of it as a script.

    python examples/benchmarks/workloads.py --workload w1 --side vlmroll --seed 0
    python examples/benchmarks/workloads.py --workload w1 --side trl --seed 0

Models have random weights, pictures are noise, both made here from the seed and the same for both sides. A side is
nothing but its public `GRPOConfig` and `GRPOTrainer`, given the same folder with the model, the same rows, the same
reward and the same options. No completion can stop early, so that each side samples and trains on the same number of
tokens; the logs of each say how many.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Read when torch and vLLM are imported.
for name, value in {
    **{"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
    **{"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_AOT_COMPILE": "0"},  # the latter does not work without dynamo
}.items():
    os.environ.setdefault(name, value)

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from random_models import OVERHEAD, Shape, save_model  # noqa: E402

SIDES = ("vlmroll", "trl")
Sizes = tuple[tuple[int, int], ...]
Row = dict[str, Any]
SMALL = 56
"""Width and height of the pictures of the first round, which warms up and is not measured."""


def _options() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One comparison.

    Attributes:
        prompts: for each prompt of a step, the widths and heights of its pictures.
        text_tokens: tokens of each prompt that are not of a picture.
        num_generations: completions of a prompt, G.
        new_tokens: length of each completion.
        iterations: optimizer steps on each round of generation.
        options: further options of both `GRPOConfig`.
        ours, theirs: further options of one side alone, where the table below says why.
    """

    name: str
    shape: Shape
    prompts: tuple[Sizes, ...]
    text_tokens: int
    num_generations: int
    new_tokens: int = 64
    iterations: int = 1
    vllm: bool = False
    options: Mapping[str, Any] = field(default_factory=_options)
    ours: Mapping[str, Any] = field(default_factory=_options)
    theirs: Mapping[str, Any] = field(default_factory=_options)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts and completions of a round, as both sides count them: each prompt G times."""
        pictures = sum(width * height // 28**2 for sizes in self.prompts for width, height in sizes)
        return self.num_generations * (pictures + len(self.prompts) * (self.text_tokens + self.new_tokens))

    @property
    def warmup(self) -> "Workload":
        """The same with small pictures: the first round, which is not measured."""
        return replace(self, prompts=tuple(tuple((SMALL, SMALL) for _ in sizes) for sizes in self.prompts))


VISION = Shape(vocabulary=4096, layers=8, mlp=1408, tower=(4, 256))
TEXT = Shape(vocabulary=32_000, layers=7, mlp=1024)
W1 = Workload(name="w1", shape=VISION, prompts=(((448, 448),) * 2,), text_tokens=20, num_generations=8)
VARIED: tuple[Sizes, ...] = (
    ((224, 224),),
    ((448, 336), (224, 448)),
    ((336, 336), (672, 448), (224, 224)),
    ((448, 448), (224, 336), (336, 224), (224, 224)),
)
_ENGINE = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 2048}


def _pictures(number: int, num_generations: int = 8, **more: Any) -> Workload:
    """W1 with another number of pictures; the letters of the prompt stay."""
    name = f"w5-p{number}" + ("" if num_generations == 8 else f"-g{num_generations}")
    prompts = (((448, 448),) * number,)
    text = W1.text_tokens + 2 * (number - 2)
    return replace(W1, name=name, prompts=prompts, text_tokens=text, num_generations=num_generations, **more)


_ALL = (
    W1,
    Workload(name="w2", shape=TEXT, prompts=((),), text_tokens=256, num_generations=8),
    replace(W1, name="w3", prompts=VARIED, text_tokens=36, num_generations=4, iterations=2, options={"beta": 0.04}),
    # TRL leaves the engine's dtype to vLLM, which takes bfloat16 for a float32 model; so does ours here. TRL 1.16 also
    # hands it prompts in which pictures have their tokens already, and vLLM adds them again: 1042 tokens for 532.
    replace(W1, name="w4", vllm=True, options=_ENGINE, ours={"vllm_engine_kwargs": {"dtype": "bfloat16"}}),
    *(replace(W1, name=f"w5-g{g}", num_generations=g) for g in (2, 4, 16, 32)),
    *(_pictures(number) for number in (1, 4, 8)),
    # Whole, this step would take TRL seven times the activations of W1, about 30 GB; in four micro-batches it fits.
    _pictures(8, 16, theirs={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
"""By name. `w5-g*` are W1 with other groups, `w5-p*` with other numbers of pictures."""


def tiny(workload: Workload) -> Workload:
    """The same kind of work in about a second: for tests."""
    shape = replace(workload.shape, vocabulary=300, layers=2, mlp=96, hidden=64)
    shape = replace(shape, tower=None if shape.tower is None else (2, 32))
    prompts = tuple(tuple((w // 112 * 28, h // 112 * 28) for w, h in sizes[:2]) for sizes in workload.prompts[:2])
    generations = min(workload.num_generations, 4)
    theirs = {name: 2 for name in workload.theirs}
    return replace(workload, shape=shape, prompts=prompts, num_generations=generations, new_tokens=4, theirs=theirs)


# Rows, reward, options.


def make_rows(workload: Workload, rounds: int, seed: int) -> list[Row]:
    """The rows of some rounds of generation, each with pictures of its own."""
    rng = np.random.default_rng(seed)

    def row(sizes: Sizes) -> Row:
        letters = workload.text_tokens - OVERHEAD - 2 * len(sizes)
        text = "".join(chr(code) for code in rng.integers(ord("a"), ord("z") + 1, letters))
        found: Row = {"prompt": [{"role": "user", "content": text}]}
        if workload.shape.tower is not None:
            noise = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]
            found["images"] = [Image.fromarray(values) for values in noise]
        return found

    return [row(sizes) for sizes in workload.prompts * rounds]


def variety(completions: Sequence[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Reward: share of distinct letters, which differs between random completions and costs nothing."""
    return [len(set(completion[0]["content"])) / 64 for completion in completions]


def options_of(workload: Workload, side: str, *, steps: int, seed: int, folder: str) -> Row:
    """The options of a side's `GRPOConfig`; only `Workload.ours` differs between the sides."""
    completions = len(workload.prompts) * workload.num_generations
    generation: Row = {"min_new_tokens": workload.new_tokens}
    if workload.vllm:
        # Ours lets no engine sample the token of a picture; of TRL it has to be asked, or its next forward fails.
        generation = {"ignore_eos": True, **({} if side == "vlmroll" else {"bad_words": ["<|image_pad|>"]})}
    return {
        "output_dir": folder,
        "seed": seed,
        "max_steps": steps,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": completions,
        "num_generations": workload.num_generations,
        "num_iterations": workload.iterations,
        "max_completion_length": workload.new_tokens,
        "generation_kwargs": generation,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **workload.options,
        **(workload.ours if side == "vlmroll" else workload.theirs),
    }


# A side as a script.

PASS = "training_pass_seconds"


def timed(base: Any) -> Any:
    """The trainer, which also logs how long its training pass took: from entering `compute_loss` to the gradients.

    Both trainers inherit `training_step`, and TRL's generates inside it; `compute_loss` is the first thing after that.
    """

    class Timed(base):
        _started: float | None = None
        _seconds: float = 0.0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self._started = time.perf_counter() if self._started is None else self._started
            return super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            assert self._started is not None
            self._seconds += time.perf_counter() - self._started
            self._started = None
            return loss

        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            if self._seconds:
                logs[PASS], self._seconds = self._seconds, 0.0
            super().log(logs, start_time)

    Timed.__name__ = base.__name__
    return Timed


def make_trainer(workload: Workload, side: str, *, steps: int, seed: int, folder: str) -> Any:
    """A side's `GRPOTrainer`, ready to train; the model and what the run writes are in `folder`."""
    from datasets import Dataset

    library = importlib.import_module(side)
    model = Path(folder) / "model"
    save_model(workload.shape, model, seed)
    rounds = -(-steps // workload.iterations)
    return timed(library.GRPOTrainer)(
        model=str(model),
        reward_funcs=variety,
        args=library.GRPOConfig(**options_of(workload, side, steps=steps, seed=seed, folder=folder)),
        train_dataset=Dataset.from_list([*make_rows(workload.warmup, 1, seed), *make_rows(workload, rounds - 1, seed)]),
    )


def hide_vllm() -> None:
    """Make vLLM look absent to what is imported from now on: where it is there, TRL loads it, needed or not."""
    sys.modules["vllm"] = None  # pyright: ignore[reportArgumentType]


def leave_weights_unpacked() -> None:
    """On a CPU, keep vLLM from packing weights for oneDNN, on both sides.

    TRL loads new weights tensor by tensor into vLLM's model, and packed ones have no place to go: it would end with
    `AttributeError: 'Parameter' object has no attribute 'weight_loader'`. vLLM has no option for this.
    """
    import vllm._custom_ops as ops  # pyright: ignore[reportMissingImports]

    ops._supports_onednn = False  # pyright: ignore[reportPrivateUsage]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of weights, pictures, order and sampling")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps, those of the first round to warm up")
    parser.add_argument("--tiny", action="store_true", help="the same kind of work, very small")
    args = parser.parse_args(arguments)
    workload = tiny(WORKLOADS[args.workload]) if args.tiny else WORKLOADS[args.workload]
    if workload.vllm:
        leave_weights_unpacked()
    else:
        hide_vllm()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workload, args.side, steps=args.steps, seed=args.seed, folder=folder)
        trainer.train()


if __name__ == "__main__":
    main()
