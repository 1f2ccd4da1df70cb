"""Calling reward functions and checking what they return."""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import torch

from vlmroll.advantages import weighted_sum
from vlmroll.metrics import Metrics
from vlmroll.types import Rollout

_CONTEXT = ("trainer_state", "log_metric", "log_extra")
RewardFunc = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]


class RewardSuite:
    """Several reward functions with their names and weights.

    Args:
        functions: see the package's docstring.
        weights: one for each function; None means 1 for all.

    Raises:
        ValueError: no function, or as many weights as there are functions are not given.

    Example:
        >>> def short(completions, **kwargs):
        ...     return [float(len(c) < 4) for c in completions]
        >>> RewardSuite([short]).names
        ['short']
    """

    def __init__(self, functions: Sequence[RewardFunc], weights: Sequence[float] | None = None) -> None:
        if not functions:
            raise ValueError("reward_funcs is empty; give at least one reward function")
        if weights is not None and len(weights) != len(functions):
            raise ValueError(f"reward_weights has {len(weights)} values for {len(functions)} reward functions")
        self.functions = list(functions)
        self.weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        self.names: list[str] = []
        for function in functions:
            name = _name_of(function)
            numbered = (f"{name}_{number}" if number > 1 else name for number in count(1))
            self.names.append(next(free for free in numbered if free not in self.names))

    def total(self, rewards: torch.Tensor) -> torch.Tensor:
        """The weighted sum [N] of rewards [N, F]; NaN where no function gave one."""
        return weighted_sum(rewards, self.weights)

    def score(self, rollouts: Sequence[Rollout], texts: Sequence[str], state: Any, metrics: Metrics) -> list[Rollout]:
        """The rollouts with their rewards.

        Args:
            rollouts: completions to score.
            texts: their decoded text.
            state: the trainer's state, handed to the functions.
            metrics: receives what the functions log, and their times.

        Raises:
            ValueError: a function returned a wrong number of rewards, or something that is not a finite number or None.
        """
        if not rollouts:
            return []  # a process without a share; functions would get no columns

        def log_metric(name: str, value: Any) -> None:
            metrics.add_mean(name, float(value))

        def log_extra(column: str, values: Any) -> None:
            metrics.add_column(column, list(values))

        columns = _columns(rollouts, texts)
        for name, function in zip(self.names, self.functions, strict=True):
            if missing := _missing(function, columns):
                raise ValueError(
                    f"reward function {name!r} asks for {missing[0]!r}, which is no column of the rows; there are "
                    f"{', '.join(sorted(columns))}"
                )
        columns |= {"trainer_state": state, "log_metric": log_metric, "log_extra": log_extra}
        results: dict[str, Sequence[float | None]] = {}
        waiting: dict[str, Awaitable[Any]] = {}
        for name, function in zip(self.names, self.functions, strict=True):
            with metrics.timed(name):
                result: Any = function(**_accepted(function, columns))
            if inspect.isawaitable(result):
                waiting[name] = result
            else:
                results[name] = result
        if waiting:
            with metrics.timed("async_rewards"):
                results |= _run(_gather(waiting))
        checked = {name: _checked(name, results[name], rollouts) for name in self.names}
        return [
            replace(rollout, rewards={name: checked[name][i] for name in self.names})
            for i, rollout in enumerate(rollouts)
        ]


def _columns(rollouts: Sequence[Rollout], texts: Sequence[str]) -> dict[str, Any]:
    names = {name for rollout in rollouts for name in rollout.row} - {"prompt", "completion", "completion_ids"}
    columns: dict[str, Any] = {name: [rollout.row.get(name) for rollout in rollouts] for name in sorted(names)}
    columns["prompts"] = [rollout.row["prompt"] for rollout in rollouts]
    columns["completions"] = [completion_of(r.row["prompt"], text) for r, text in zip(rollouts, texts, strict=True)]
    columns["completion_ids"] = [list(rollout.completion.completion_ids) for rollout in rollouts]
    columns["images"] = [[picture.image for picture in rollout.prompt.images] for rollout in rollouts]
    return columns


def completion_of(prompt: Any, text: str) -> str | list[dict[str, str]]:
    """A completion in the form of its prompt: a string, or one assistant message.

    When the prompt ends in an assistant message, the completion carries that message on and holds its text too.
    """
    if isinstance(prompt, str):
        return text
    last = prompt[-1]
    if last["role"] == "assistant":
        content = last["content"]
        said = content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
        text = said + text
    return [{"role": "assistant", "content": text}]


def _name_of(function: RewardFunc) -> str:
    inner: Any = getattr(function, "func", function)  # a functools.partial is named after its function
    return getattr(inner, "__name__", type(inner).__name__)


def _accepted(function: RewardFunc, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that the function names, or all when it takes `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(columns)
    return {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}


def _missing(function: RewardFunc, columns: Mapping[str, Any]) -> list[str]:
    """Arguments without a default that no column gives."""
    given = {*columns, *_CONTEXT}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in named and parameter.default is inspect.Parameter.empty and parameter.name not in given
    ]


def _checked(name: str, values: Any, rollouts: Sequence[Rollout]) -> list[float | None]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or len(cast("Sequence[Any]", values)) != len(rollouts):
        given = len(cast("Sequence[Any]", values)) if isinstance(values, Sequence) else type(values).__name__
        raise ValueError(f"reward function {name!r} returned {given} for {len(rollouts)} completions; return one each")
    checked: list[float | None] = []
    for value, rollout in zip(cast("Sequence[Any]", values), rollouts, strict=True):
        value = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value
        if value is not None and not isinstance(value, int | float):
            raise ValueError(
                f"reward function {name!r} gave {value!r} for row {rollout.row_id}; a reward is a number or None"
            )
        if value is not None and math.isinf(value):
            raise ValueError(f"reward function {name!r} gave {value} for row {rollout.row_id}; rewards must be finite")
        checked.append(None if value is None or math.isnan(value) else float(value))
    return checked


async def _gather(waiting: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    return dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))


_loop: asyncio.AbstractEventLoop | None = None


def _run(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Run on one event loop that lives as long as the process, in its own thread.

    One loop, since clients that a reward keeps open belong to the loop they were made on; a thread, since the caller
    may itself run inside a loop, as notebooks do.
    """
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, name="vlmroll-rewards", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _loop).result()
