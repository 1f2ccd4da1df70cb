"""Short real training runs that several test files share."""

import copy
import gc
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tiny_models import VISION_FAMILIES, mixed_rows, tiny, user
from vlmroll import GRPOConfig, GRPOTrainer, PolicyTrainer, RLOOConfig, RLOOTrainer
from vlmroll_processors import Prompt, load_adapter
from vlmroll_processors.adapter import FamilyAdapter

# Every run ends with a full garbage collection: 0.4 s of its 0.5 s, spent on what the imports left behind.
gc.freeze()

ALGORITHMS = ("grpo", "rloo")
TRAINER_ARGUMENTS = (
    *("peft_config", "eval_dataset", "callbacks", "generator", "processing_class"),
    *("tools", "environment_factory", "rollout_func"),
)
FAMILIES = (*VISION_FAMILIES, "janus", "ovis2", "llama4", "video_llama_3")
"""Families with pictures: those that the library names, and some that the generic rule serves."""


def variety(completions: Sequence[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """Reward: share of distinct characters, so that random completions differ."""
    return [len(set(completion[0]["content"])) / 10 for completion in completions]


def short_words(completions: Sequence[list[dict[str, str]]], n: Sequence[int]) -> list[float | None]:
    """Reward from a column of the row, None for some rows."""
    return [None if i % 5 == 4 else -len(c[0]["content"]) / 50 for c, i in zip(completions, n, strict=True)]


def rows(count: int, name: str = "qwen2_5_vl") -> list[dict[str, Any]]:
    """Rows with 1, 3, 0 and 2 pictures in turn, numbered in the column `n`.

    The text model gets text alone, and PaliGemma, which takes no prompt without a picture, rows with 1, 3 and 2.
    """
    if name == "text":
        return [{"prompt": user(f"how many dots ? {i}"), "n": i} for i in range(count)]
    kinds = mixed_rows()
    kinds = [kinds[0], kinds[1], kinds[3]] if name.startswith("paligemma") else kinds
    return [{**kinds[i % len(kinds)], "n": i} for i in range(count)]


@cache
def adapter(name: str) -> FamilyAdapter:
    """The adapter of a family's tiny model."""
    made = tiny(name)
    return load_adapter(made.processor, config=made.model.config)


@cache
def prompts(name: str) -> tuple[Prompt, ...]:
    """Of `rows`: 1, 3, 0 and 2 pictures; of PaliGemma 1, 3, 2 and 1, the last prompt being the first."""
    return tuple(adapter(name).encode(rows(4, name)))


def make_trainer(
    algorithm: str, folder: Path, *, model: str = "qwen2_5_vl", reward: Any = variety, data: Any = None, **options: Any
) -> PolicyTrainer:
    """A trainer on a fresh copy of a tiny model, with small defaults; `wrap` changes the model before.

    What the trainer itself takes (`TRAINER_ARGUMENTS`) stands among the options.
    """
    config, trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[algorithm]
    extra = {name: options.pop(name) for name in TRAINER_ARGUMENTS if name in options}
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "use_cpu": True,
    }
    made = tiny(model)
    base: Any = copy.deepcopy(made.model)
    if "wrap" in options:
        base = options.pop("wrap")(base)
    return trainer(
        base,
        reward,
        config(**(defaults | options)),
        train_dataset=rows(16, model) if data is None else data,
        **({"processing_class": made.processor} | extra),
    )


class GradientRecorder(TrainerCallback):
    """Keeps the gradients of every optimizer step, before clipping has no effect (`max_grad_norm=0`)."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def gradients(algorithm: str, folder: Path, **options: Any) -> list[dict[str, torch.Tensor]]:
    """The gradients of each step of a run."""
    recorder = GradientRecorder()
    make_trainer(algorithm, folder, callbacks=[recorder], max_grad_norm=0.0, **options).train()
    return recorder.steps


def relative_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of the first."""
    assert one.keys() == other.keys()
    squares = [((one[n] - other[n]).double().pow(2).sum(), one[n].double().pow(2).sum()) for n in one]
    difference, norm = (sum(values) for values in zip(*squares, strict=True))
    assert norm > 0
    return float((difference / norm) ** 0.5)
