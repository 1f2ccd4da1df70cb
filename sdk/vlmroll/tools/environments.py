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

    def reset(self, row: Mapping[str, Any], *, seconds: float | None = None) -> tuple[Part, ...]:
        """See `reset_all`."""
        return reset_all([self], [row], seconds=seconds)[0]


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
        rows: `reset` gets the columns that it names, or all where it takes `**row`; lists and dicts are copies.
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
        )
        for environment, row, place in zip(environments, rows, places, strict=True)
    ]
    run_jobs([[job] for job in jobs], seconds)
    for environment, job, place in zip(environments, jobs, places, strict=True):
        environment.toolbox.stuck |= job.outcome.timed_out
        raise_for(job.outcome, f"{place}reset() of environment {environment.name!r}", seconds)
    return [job.outcome.value for job in jobs]


def get_rewards(environments: Sequence[Environment], *, seconds: float | None = None) -> list[float | None]:
    """The rewards of environments, all asked at the same time.

    None for one without `get_reward`, for one that gives None or NaN, and for one that is stuck: its state is not to
    be relied on.

    Raises:
        ValueError: a reward is no finite number.
    """
    asked = [e if e.gives_rewards and not e.toolbox.stuck else None for e in environments]
    functions: list[Any] = [cast("Any", e.instance).get_reward if e is not None else None for e in asked]
    jobs = [Job(function=f, is_async=inspect.iscoroutinefunction(f)) if f is not None else None for f in functions]
    run_jobs([[job] for job in jobs if job is not None], seconds)
    rewards: list[float | None] = []
    for environment, job in zip(environments, jobs, strict=True):
        if job is not None:
            raise_for(job.outcome, f"get_reward() of environment {environment.name!r}", seconds)
        rewards.append(None if job is None else _reward(job.outcome.value, environment.name))
    return rewards


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
    from vlmroll.rewards.arguments import own

    what = f"{place}reset() of environment {environment.name!r}"
    parameters = inspect.signature(_reset_of(environment)).parameters.values()
    if positional := [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]:
        raise ValueError(f"{what} takes {positional[0].name!r} by position, but columns are given by name; name them")
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    if missing := [p.name for p in named if p.default is p.empty and p.name not in row]:
        raise ValueError(f"{what} asks for {missing[0]!r}, which is no column of the row; there are {', '.join(row)}")
    everything = len(named) < len(parameters)
    return {name: own(row[name]) for name in row if everything or any(p.name == name for p in named)}


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


def _reward(value: Any, name: str) -> float | None:
    value = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"get_reward() of environment {name!r} returned {value!r:.100}; return a finite number or None"
        )
    return float(value)
