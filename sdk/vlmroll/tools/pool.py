"""Making environments, handing them out and closing them."""

import difflib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from vlmroll.tools.environments import Environment, raise_for
from vlmroll.tools.jobs import Job, NotRun, Outcome, run_jobs
from vlmroll.tools.running import words_of
from vlmroll.tools.toolbox import Toolbox

logger = logging.getLogger(__name__)

COLUMN = "environment"
"""Of a row: the kind it wants, where there are several."""
_OWN = ("reset", "get_reward", "close")
_CLOSE_SECONDS = 30.0


class EnvironmentPool:
    """Makes environments, and keeps them for use again.

    Args:
        factory: makes an instance when it is called without arguments; or several by name, among which the rows choose
            by their column `environment`.
        tools: a list of functions that every rollout may call as well.

    Attributes:
        kinds: the names; of a lone factory the name of its class.

    Raises:
        ValueError: a factory or what it makes is no environment, or a method of it is no tool.
    """

    def __init__(self, factory: Any, *, tools: Any = ()) -> None:
        self._shared = Toolbox(tools)
        self._several = isinstance(factory, Mapping)
        self._made: list[tuple[str, object]] = []
        self._idle: dict[str, list[Environment]] = {}
        self._factories: dict[str, Callable[[], object]] = {}
        self._toolboxes: dict[str, Toolbox] = {}
        self._classes: dict[str, type] = {}
        if self._several and not factory:
            raise ValueError("environment_factory is empty; give at least one environment")
        given: Mapping[Any, Any] = factory if self._several else {None: factory}
        with ExitStack() as undo:
            undo.callback(self.close)
            for name, make in given.items():
                self._probe(name, make)
            undo.pop_all()

    @property
    def kinds(self) -> tuple[str, ...]:
        """In the order in which they were given."""
        return tuple(self._factories)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The classes that give rewards, each once."""
        giving = [c.__name__ for c in self._classes.values() if callable(getattr(c, "get_reward", None))]
        return tuple(dict.fromkeys(giving))

    def schemas_of(self, kind: str) -> list[dict[str, Any]]:
        """The tools that a rollout in this kind may call."""
        return self._toolboxes[kind].schemas

    def kind_of(self, row: Mapping[str, Any], *, where: str = "a row") -> str:
        """The kind that a row wants.

        Raises:
            ValueError: there are several, and the row names none of them.
        """
        if not self._several:
            return self.kinds[0]
        kind = row.get(COLUMN)
        known = ", ".join(map(repr, self.kinds))
        if kind is None:
            raise ValueError(f"{where} has no column {COLUMN!r} to choose its environment by; set it to one of {known}")
        if kind not in self.kinds:
            near = difflib.get_close_matches(str(kind), self.kinds, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where}: there is no environment {kind!r}; {hint}There are {known}")
        return kind

    def take(self, kind: str) -> Environment:
        """An environment of this kind that nobody else has until it is given back."""
        idle = self._idle[kind]
        return idle.pop() if idle else self._make(kind)

    def give_back(self, environment: Environment) -> None:
        """Keep it for use again; one that is stuck is not, since a call may still be changing its state."""
        if not environment.toolbox.stuck:
            self._idle[environment.kind].append(environment)

    def close(self) -> None:
        """Close every instance that was made and has a `close`, each once; what goes wrong is a warning.

        It may be called again, and by a finalizer when the interpreter ends. There may be no threads any more then: so
        sync ones are called directly and without a time limit, and an async one is left with a warning.
        """
        made, self._made = self._made, []
        for idle in self._idle.values():
            idle.clear()
        closing: list[tuple[str, Any]] = [(kind, getattr(instance, "close", None)) for kind, instance in made]
        jobs = [
            (kind, Job(function=close, is_async=inspect.iscoroutinefunction(close)))
            for kind, close in closing
            if callable(close)
        ]
        if not jobs:
            return
        if _threads_start():
            run_jobs([[job] for _, job in jobs], _CLOSE_SECONDS)
        else:
            for _, job in jobs:
                _run_here(job)
        for kind, job in jobs:
            if job.outcome.timed_out:
                logger.warning("environment %r: close() did not finish within %g seconds", kind, _CLOSE_SECONDS)
            elif job.outcome.error is not None:
                logger.warning("environment %r: close() failed (%s)", kind, words_of(job.outcome.error))

    def _probe(self, name: Any, make: Any) -> None:
        where = "environment_factory" if name is None else f"environment_factory[{name!r}]"
        if not (name is None or isinstance(name, str)) or not callable(make):
            raise ValueError(
                f"{where} is {make!r}; give a class, or a function without arguments that makes an instance"
            )
        instance = _called(make, where)
        kind = type(instance).__name__ if name is None else name
        self._made.append((kind, instance))
        if not callable(getattr(instance, "reset", None)):
            raise ValueError(
                f"{where} makes a {type(instance).__name__}, which has no method reset; add reset(self, **row)"
            )
        public = [n for n, _ in inspect.getmembers(type(instance), inspect.isfunction) if not n.startswith("_")]
        try:
            own = Toolbox([getattr(instance, n) for n in public if n not in _OWN], in_order=True)
        except ValueError as error:
            raise ValueError(
                f"{where}: every public method of {type(instance).__name__} is a tool; start the name of one that is "
                f"none with an underscore: {error}"
            ) from error
        self._factories[kind], self._classes[kind] = make, type(instance)
        self._toolboxes[kind] = self._shared.joined(own)
        self._idle[kind] = [Environment(kind, instance, self._toolboxes[kind].bound_to(instance))]

    def _make(self, kind: str) -> Environment:
        instance = _called(self._factories[kind], f"environment {kind!r}")
        self._made.append((kind, instance))
        if type(instance) is not self._classes[kind]:
            made, first = type(instance).__name__, self._classes[kind].__name__
            raise ValueError(f"environment {kind!r}: its factory made a {first} first and then a {made}")
        return Environment(kind, instance, self._toolboxes[kind].bound_to(instance))


def _threads_start() -> bool:
    """Whether a thread can be started: not when the interpreter ends, where starting one raises or never returns."""
    if sys.is_finalizing():
        return False
    try:
        threading.Thread(target=bool, daemon=True).start()
    except RuntimeError:
        return False
    return True


def _run_here(job: Job) -> None:
    with job.outcome:
        if job.is_async:
            raise NotRun("it is async, and the interpreter ends")
        job.function()


def _called(make: Callable[[], object], where: str) -> object:
    with Outcome() as outcome:
        outcome.value = make()
    raise_for(outcome, where, None)
    return outcome.value
