"""What the example scripts share: their options, greedy evaluation and the JSON line at the end."""

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# One thread for each core that really works: spinning barriers of idle threads make small models many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from digits import MAX_TOKENS, Row, accuracy_reward  # noqa: E402
from vlmroll import (  # noqa: E402
    Generator,
    GRPOConfig,
    GRPOTrainer,
    PolicyTrainer,
    RLOOConfig,
    RLOOTrainer,
    SamplingParams,
)
from vlmroll_processors import ProcessorAdapter  # noqa: E402

GENERATORS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vllm-colocate": {"use_vllm": True, "vllm_engine_kwargs": {"enforce_eager": True}},
    "vllm-server": {"use_vllm": True, "vllm_mode": "server"},
}
"""What generates, and the options of a config that say so. A server is started by `vlmroll serve MODEL`."""

ALGORITHMS: dict[str, tuple[type[Any], type[PolicyTrainer]]] = {
    "grpo": (GRPOConfig, GRPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer),
}
"""What trains: the class of its config and of its trainer."""


def parse_options(
    description: str, *, steps: int, output_dir: str, choose_generator: bool = False
) -> argparse.ArgumentParser:
    """A parser with the options that all examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of data order, sampling and new weights")
    parser.add_argument("--steps", type=positive, default=steps, help="optimizer steps")
    parser.add_argument("--output-dir", default=output_dir, help="where logs and checkpoints go")
    if choose_generator:
        parser.add_argument("--generator", choices=GENERATORS, default="transformers", help="what generates")
        parser.add_argument("--dense", action="store_true", help="run prompts again for each completion, to compare")
    return parser


def positive(text: str) -> int:
    """A whole number above 0."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


def greedy_accuracy(generator: Generator, adapter: ProcessorAdapter, rows: Sequence[Row]) -> float:
    """Share of rows that the most likely answer gets right."""
    right = 0.0
    for start in range(0, len(rows), 50):
        part = rows[start : start + 50]
        output = generator.generate(adapter.encode(part), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), 1)
        answers = [[{"role": "assistant", "content": adapter.decode(ids)}] for ids in output.completion_ids]
        right += sum(accuracy_reward(answers, [row["answer"] for row in part]))
    return right / len(rows)


def rollout_accuracy(
    trainer: PolicyTrainer, rows: Sequence[Mapping[str, Any]], reward: Callable[..., list[float]], *, max_tokens: int
) -> float:
    """Mean reward of the most likely rollout of each row, tool calls included; `max_tokens` are for all its turns."""
    right = 0.0
    for start in range(0, len(rows), 50):
        part = rows[start : start + 50]
        rollouts = trainer.roll_out(part, SamplingParams(temperature=0.0, max_tokens=max_tokens), 1)
        completions = [turns.messages for rollout in rollouts if (turns := rollout.completion.turns) is not None]
        right += sum(reward(completions=completions, answer=[row["answer"] for row in part]))
    return right / len(rows)


def print_result(started: float, args: Any, **numbers: float) -> None:
    """The last line of an example: its result as JSON. `started` is from `time.perf_counter()`."""
    values = {name: round(value, 4) for name, value in numbers.items()}
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({**values, "seconds": seconds, "steps": args.steps, "seed": args.seed}))
