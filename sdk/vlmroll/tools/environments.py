"""Environments: an instance with a state for each rollout, whose public methods are tools.

An environment is any class like this one:

    class Maze:
        def reset(self, size, **row):  # columns of the row, by name
            ...
            return "You stand in the north-west."  # text, pictures, a list of message parts, or None

        def walk(self, direction: str) -> str:
            '''Takes a step.

            Args:
                direction: north, east, south or west.
            '''

        def get_reward(self) -> float: ...  # if it gives one

        def close(self): ...  # if there is something to close
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from PIL import Image

from vlmroll.tools.jobs import Job, Outcome, run_jobs
from vlmroll.tools.results import content_of, is_part, is_picture
from vlmroll.tools.toolbox import Toolbox
from vlmroll.tools.types import Part


class Environment:
    """One instance with the tools that a rollout in it may call.

    Attributes:
        kind: of the pool.
        instance: the user's object.
        toolbox: its methods, and the tools that all share.
    """

    def __init__(self, kind: str, instance: object, toolbox: Toolbox) -> None:
        self.kind = kind
        self.instance = instance
        self.toolbox = toolbox

    @property
    def name(self) -> str:
        """The name of its class, which its rewards are logged under."""
        return type(self.instance).__name__

    @property
    def gives_rewards(self) -> bool:
        """Whether it has `get_reward`."""
        return callable(getattr(self.instance, "get_reward", None))


def reset_all(
    environments: Sequence[Environment],
    rows: Sequence[Mapping[str, Any]],
    *,
    seconds: float | None = None,
    where: Sequence[str] | None = None,
) -> list[tuple[Part, ...]]:
    """Reset environments for their rows, all at the same time.

    Args:
        environments: one for each row.
        rows: `reset` gets the columns that it names, or all where it takes `**row`. Each gets copies of its own of
            lists, dicts, arrays and PIL pictures, decoded; of a picture with several frames, the one it stands at.
        seconds: for each; None for no limit.
        where: names the rows in errors.

    Returns:
        What each returned, as message parts; none where it returned None.

    Raises:
        ValueError: a reset asks for a column that is not there, takes longer than `seconds` (TimeoutError), or returns
            anything but text, pictures or None.
    """
    places = [""] * len(rows) if where is None else [f"{place}: " for place in where]
    jobs = [
        Job(
            function=partial(_reset_of(environment), **_accepted(environment, row, place)),
            is_async=inspect.iscoroutinefunction(_reset_of(environment)),
            convert=partial(_first_content, environment.name, place),
            on_left=environment.toolbox.stick,
        )
        for environment, row, place in zip(environments, rows, places, strict=True)
    ]
    run_jobs([[job] for job in jobs], seconds)
    for environment, job, place in zip(environments, jobs, places, strict=True):
        raise_for(job.outcome, f"{place}reset() of environment {environment.name!r}", seconds)
    return [job.outcome.value for job in jobs]


def get_rewards(
    environments: Sequence[Environment], *, seconds: float | None = None, where: Sequence[str] | None = None
) -> list[float | None]:
    """The rewards of environments, all asked at the same time.

    None for one without `get_reward`, for one that gives None or NaN, and for one that is stuck: its state is not to
    be relied on.

    Args:
        seconds: for each; None for no limit.
        where: names the rows in errors.

    Raises:
        ValueError: a reward is no finite number.
        TimeoutError: one takes longer than `seconds`; its environment is stuck.
    """
    places = [""] * len(environments) if where is None else [f"{place}: " for place in where]
    asked = [e if e.gives_rewards and not e.toolbox.stuck else None for e in environments]
    jobs = [None if e is None else _reward_job(e) for e in asked]
    run_jobs([[job] for job in jobs if job is not None], seconds)
    rewards: list[float | None] = []
    for environment, job, place in zip(environments, jobs, places, strict=True):
        what = f"{place}get_reward() of environment {environment.name!r}"
        if job is not None:
            raise_for(job.outcome, what, seconds)
        rewards.append(None if job is None else _reward(job.outcome.value, what))
    return rewards


def _reward_job(environment: Environment) -> Job:
    function = cast("Any", environment.instance).get_reward
    return Job(function=function, is_async=inspect.iscoroutinefunction(function), on_left=environment.toolbox.stick)


def raise_for(outcome: Outcome, what: str, seconds: float | None) -> None:
    """Raise what went wrong in the user's code, with a note of where that was."""
    if outcome.timed_out:
        raise TimeoutError(f"{what} did not finish within {seconds:g} seconds")
    if outcome.error is not None:
        outcome.error.add_note(f"in {what}")
        raise outcome.error


def _reset_of(environment: Environment) -> Callable[..., Any]:
    return cast("Any", environment.instance).reset


def _accepted(environment: Environment, row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The columns of a row that `reset` takes."""
    what = f"{place}reset() of environment {environment.name!r}"
    parameters = inspect.signature(_reset_of(environment)).parameters.values()
    if positional := [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]:
        raise ValueError(f"{what} takes {positional[0].name!r} by position, but columns are given by name; name them")
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    if missing := [p.name for p in named if p.default is p.empty and p.name not in row]:
        raise ValueError(f"{what} asks for {missing[0]!r}, which is no column of the row; there are {', '.join(row)}")
    everything = len(named) < len(parameters)
    copies: dict[int, Any] = {}
    arguments: dict[str, Any] = {}
    for name in row:
        if everything or any(p.name == name for p in named):
            with Outcome() as copied:  # a picture whose file is broken raises
                copied.value = _own(row[name], copies)
            raise_for(copied, f"column {name!r} for {what}", None)
            arguments[name] = copied.value
    return arguments


def _own(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of a value of the dataset that an environment may change, and that no other thread reads or decodes.

    Args:
        copies: of pictures and arrays by their identity, so that one that stands in two places stays one.
    """
    if isinstance(value, Mapping):
        return {key: _own(item, copies) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list) or type(value) is tuple:
        items = [_own(item, copies) for item in cast("Sequence[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Image.Image | np.ndarray | torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = value.clone() if isinstance(value, torch.Tensor) else value.copy()
        return copies[id(value)]
    return value


def _first_content(name: str, place: str, value: Any) -> tuple[Part, ...]:
    """What `reset` returned, as message parts."""
    if value is None:
        return ()
    items = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str) or is_picture(item) or is_part(item) for item in items):
        raise ValueError(
            f"{place}reset() of environment {name!r} returned {value!r:.100}; return None, text, pictures, or a list "
            "of message parts"
        )
    return tuple(part for item in items for part in content_of(item))


def _reward(value: Any, what: str) -> float | None:
    value = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} returned {value!r:.100}; return a finite number or None")
    return float(value)
