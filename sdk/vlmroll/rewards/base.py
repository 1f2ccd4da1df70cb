"""Calling reward functions and checking what they return."""

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import torch

from vlmroll.advantages import weighted_sum
from vlmroll.completions import TABLE_COLUMNS
from vlmroll.metrics import Metrics
from vlmroll.rewards.arguments import accepted, columns_of
from vlmroll.rewards.background import named, run_together
from vlmroll.rewards.environment import EnvironmentReward
from vlmroll.tools.environments import Environment
from vlmroll.types import Rollout

logger = logging.getLogger(__name__)

RewardFunc = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]


class RewardSuite:
    """Several reward functions with their names and weights.

    Args:
        functions: see the package's docstring.
        weights: one for each function; None means 1 for all.

    Raises:
        ValueError: no function, something that cannot be called, or weights that do not fit.

    Example:
        >>> def short(completions, **kwargs):
        ...     return [float(len(c) < 4) for c in completions]
        >>> RewardSuite([short]).names
        ['short']
    """

    def __init__(self, functions: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        if not functions:
            raise ValueError("reward_funcs is empty; give at least one reward function")
        for i, function in enumerate(functions):
            if not callable(function) or inspect.isclass(function):
                raise ValueError(f"reward_funcs[{i}] is {function!r}; give a function, a model or a model's id")
        self.functions = list(functions)
        self.weights = _weights(weights, len(functions))
        self.names: list[str] = []
        for function in functions:
            name = _name_of(function)
            numbered = (f"{name}_{number}" if number > 1 else name for number in count(1))
            taken = (*self.names, *TABLE_COLUMNS)
            self.names.append(next(free for free in numbered if free not in taken))

    def total(self, rewards: torch.Tensor) -> torch.Tensor:
        """The weighted sum [N] of rewards [N, F]; NaN where no function gave one."""
        return weighted_sum(rewards, self.weights)

    def score(
        self,
        rollouts: Sequence[Rollout],
        texts: Sequence[str],
        state: Any,
        metrics: Metrics,
        *,
        environments: Sequence[Environment] | None = None,
    ) -> list[Rollout]:
        """The rollouts with their rewards.

        Args:
            rollouts: completions to score.
            texts: their decoded text.
            state: the trainer's state, handed to the functions.
            metrics: receives what the functions log, and their times.
            environments: where each of the rollouts took place; functions get the user's own objects. None without.

        Raises:
            ValueError: a function asks for a column that is not there, or returned a wrong number of rewards or
                something that is not a finite number or None.
        """
        metrics.take_columns()  # what a round that failed has left
        if not rollouts:
            return []  # a process without a share; functions would get no columns
        results: dict[str, Any] = {}
        waiting: dict[str, Awaitable[Any]] = {}
        for name, function in zip(self.names, self.functions, strict=True):
            given: dict[str, Any] = columns_of(rollouts, texts)
            given |= {"trainer_state": state, "log_metric": metrics.log_metric, "log_extra": self._log_extra(metrics)}
            if environments is not None:
                if "environments" in given:
                    raise ValueError("the column 'environments' has the name of an argument of ours; rename the column")
                given["environments"] = [its.instance for its in environments]
            with metrics.timed(name), named(name):
                if isinstance(function, EnvironmentReward):
                    results[name] = function(environments or (), [rollout.row_id for rollout in rollouts])
                else:
                    results[name] = function(**accepted(name, function, given))
            if inspect.isawaitable(results[name]):
                waiting[name] = results[name]
        if waiting:
            with metrics.timed("async_rewards"):
                results |= run_together(waiting)
        checked = {name: _checked(name, results[name], rollouts) for name in self.names}
        return [
            replace(rollout, rewards={name: checked[name][i] for name in self.names})
            for i, rollout in enumerate(rollouts)
        ]

    def _log_extra(self, metrics: Metrics) -> Callable[[str, Any], None]:
        def log_extra(column: str, values: Any) -> None:
            if column in (*TABLE_COLUMNS, *self.names):
                raise ValueError(f"log_extra: the completions table has a column {column!r} of its own; rename yours")
            if isinstance(values, str):
                raise ValueError(f"log_extra: column {column!r} needs a list with a value for each completion")
            metrics.add_column(column, list(values))

        return log_extra


def _weights(given: Any, num_functions: int) -> list[float]:
    if given is None:
        return [1.0] * num_functions
    numbers = list(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else None
    if numbers is None or not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ValueError(f"reward_weights must be a list of finite numbers, got {given!r}")
    if len(numbers) != num_functions:
        raise ValueError(f"reward_weights has {len(numbers)} values for {num_functions} reward functions")
    return [float(number) for number in numbers]


def _name_of(function: RewardFunc) -> str:
    inner: Any = getattr(function, "func", function)  # a functools.partial is named after its function
    return getattr(inner, "__name__", type(inner).__name__)


def _checked(name: str, values: Any, rollouts: Sequence[Rollout]) -> list[float | None]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence):
        kind = type(values).__name__
        raise ValueError(f"reward function {name!r} returned a {kind}; return a list of {len(rollouts)} rewards")
    if len(cast("Sequence[Any]", values)) != len(rollouts):
        given = len(cast("Sequence[Any]", values))
        raise ValueError(f"reward function {name!r} returned {given} for {len(rollouts)} completions; return one each")
    checked: list[float | None] = []
    unclear = 0
    for value, rollout in zip(cast("Sequence[Any]", values), rollouts, strict=True):
        value = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value
        if value is not None and not isinstance(value, int | float):
            raise ValueError(
                f"reward function {name!r} gave {value!r} for row {rollout.row_id}; a reward is a number or None"
            )
        # Rewards end as float32: a number that is infinite there would take the whole group's advantages with it.
        if value is not None and not math.isnan(value) and abs(value) > torch.finfo(torch.float32).max:
            raise ValueError(f"reward function {name!r} gave {value} for row {rollout.row_id}; rewards must be finite")
        unclear += value is not None and math.isnan(value)
        checked.append(None if value is None or math.isnan(value) else float(value))
    if unclear:
        logger.warning("reward function %r gave NaN for %d completions; they count as not scored by it", name, unclear)
    return checked
