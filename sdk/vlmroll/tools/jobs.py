"""Running other people's functions: many at once, each with a time limit, and none able to stop the run.

A sync function runs in a daemon thread, an async one on an event loop in a daemon thread. What hangs is left behind:
nothing waits for it, not even the interpreter when it exits. All bookkeeping is done by the thread that waits, so that
an interrupt by the user goes through at once.
"""

import asyncio
import inspect
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from vlmroll.tools.threads import MAX_THREADS, run_in_thread

_ANSWER = 1.0  # seconds that an event loop has to show that it is alive


@dataclass(slots=True)
class Outcome:
    """What a job came to: a value, an error, or neither when its time was up.

    As a context manager it keeps whatever is raised inside, SystemExit and KeyboardInterrupt too: they would end the
    event loop, and in a thread they go nowhere.
    """

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False

    def __enter__(self) -> "Outcome":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True


def _always() -> str:
    return ""


def _nothing() -> None:
    pass


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """One call.

    Attributes:
        function: called without arguments; what it returns is awaited where it can be.
        is_async: its call belongs on the event loop.
        convert: applied to what it returns, within the time limit, in a thread.
        refused: asked when its turn has come; words say why it is not to run, and make its error, a `NotRun`.
        on_left: told when it is left behind and may still be running: its time is up, or the user interrupts.
    """

    function: Callable[[], Any]
    is_async: bool = False
    convert: Callable[[Any], Any] | None = None
    refused: Callable[[], str] = _always
    on_left: Callable[[], None] = _nothing
    outcome: Outcome = field(default_factory=Outcome)


class NotRun(Exception):
    """Why a job was not started."""


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.process = os.getpid()
        self.thread = threading.Thread(target=self.loop.run_forever, name="vlmroll-tools", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            self.loop.close()
            raise

    def answers(self) -> bool:
        """Whether it still turns; something that blocks inside a coroutine stops it."""
        alive = threading.Event()
        self.loop.call_soon_threadsafe(alive.set)
        return alive.wait(_ANSWER)


_current: _Loop | None = None


def _loop() -> _Loop:
    """The loop; one for all calls, since clients that tools keep open belong to the loop they were made on."""
    global _current
    if _current is None or _current.process != os.getpid() or not _current.thread.is_alive():
        _current = _Loop()
    return _current


def _forget(loop: _Loop) -> None:
    global _current
    if _current is loop:
        _current = None


def run_jobs(chains: Sequence[Sequence[Job]], seconds: float | None) -> None:
    """Run chains of jobs: the chains at the same time, the jobs of a chain one after the other.

    Fills the outcome of every job. Nothing that a job does is raised here.

    Args:
        chains: of jobs.
        seconds: for each job, from when it really starts; None for no limit.
    """
    _Run(seconds).finish(chains)


@dataclass(eq=False, slots=True)
class _Step:
    """A job on its way. A job may take several steps: call, await, convert; a report of an earlier step is late."""

    job: Job
    chain: deque[Job]
    deadline: float | None = None
    begun: bool = False
    in_thread: bool = False
    loop: _Loop | None = None
    function: Callable[[], Any] | None = None  # what the loop was handed
    future: Future[Any] | None = None
    turn: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, turn: int) -> bool:
        """Whether the coroutine that was handed to the loop as this turn is the one to run."""
        with self.lock:
            claimed = not self.begun and self.turn == turn
            self.begun = self.begun or claimed
            return claimed

    def take_back(self) -> bool:
        """Whether no loop has begun the job; then none of those it was handed to will."""
        with self.lock:
            self.turn += not self.begun
            return not self.begun


class _Run:
    """All jobs of one call of `run_jobs`."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._ready: deque[tuple[_Step, Callable[[], Any]]] = deque()
        self._threads = 0
        self._active: dict[_Step, None] = {}
        self._reports: queue.SimpleQueue[tuple[_Step, int, Outcome | None]] = queue.SimpleQueue()

    def finish(self, chains: Sequence[Sequence[Job]]) -> None:
        """Until every job has an outcome."""
        try:
            for chain in chains:
                self._next(deque(chain))
            while self._active:
                while self._ready and self._threads < MAX_THREADS:
                    self._start_thread(*self._ready.popleft())
                self._wait()
        finally:
            for step in self._active:  # only after an interrupt
                if step.future is not None:
                    step.future.cancel()
                if step.future is not None or step.in_thread:
                    step.job.on_left()

    def _next(self, chain: deque[Job]) -> None:
        """Start the first job of a chain that may run."""
        while chain:
            job = chain.popleft()
            if words := job.refused():
                job.outcome.error = NotRun(words)
                continue
            step = _Step(job, chain)
            self._active[step] = None
            if job.is_async:
                self._start_on_loop(step, job.function)
            else:
                self._ready.append((step, job.function))
            return

    def _start_thread(self, step: _Step, function: Callable[[], Any]) -> None:
        if step not in self._active:
            return  # its time was up before there was room
        self._set_deadline(step)
        step.in_thread, step.loop, step.function = True, None, None
        step.turn += 1
        self._threads += 1
        turn, convert, report = step.turn, step.job.convert, self._reports.put

        def work() -> None:
            with Outcome() as outcome:
                outcome.value = function()
                if convert is not None and not inspect.isawaitable(outcome.value):
                    outcome.value = convert(outcome.value)
            report((step, turn, outcome))

        try:
            run_in_thread(work)
        except RuntimeError as error:  # too many threads were left behind
            report((step, turn, Outcome(error=error)))

    def _start_on_loop(self, step: _Step, function: Callable[[], Any]) -> None:
        step.begun, step.function = False, function
        step.turn += 1
        turn, report = step.turn, self._reports.put

        async def work() -> None:
            if not step.claim(turn):
                return
            report((step, turn, None))
            with Outcome() as outcome:
                outcome.value = await function()
            report((step, turn, outcome))  # from here, since the loop may be blocked before it tells the future

        try:
            step.loop = _loop()
        except RuntimeError as error:  # no room for the thread of a loop
            report((step, turn, Outcome(error=error)))
            return
        step.future = asyncio.run_coroutine_threadsafe(work(), step.loop.loop)

    def _set_deadline(self, step: _Step) -> None:
        """Time counts from the first thing that really runs."""
        if step.deadline is None and self._seconds is not None:
            step.deadline = time.monotonic() + self._seconds

    def _wait(self) -> None:
        deadlines = [step.deadline for step in self._active if step.deadline is not None]
        left = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        try:
            self._take(*self._reports.get(timeout=left))
            while True:  # what is there already was in time
                self._take(*self._reports.get_nowait())
        except queue.Empty:
            pass
        now = time.monotonic()
        for step in [step for step in self._active if step.deadline is not None and step.deadline <= now]:
            step.job.outcome.timed_out = True
            step.job.on_left()
            self._abandon(step)
            self._done(step)

    def _take(self, step: _Step, turn: int, outcome: Outcome | None) -> None:
        value = outcome.value if outcome is not None else None
        if step not in self._active or turn != step.turn:
            if inspect.iscoroutine(value):
                value.close()
            return
        if outcome is None:
            self._set_deadline(step)
            return
        if step.in_thread:
            step.in_thread = False
            self._threads -= 1
            if inspect.isawaitable(value):
                self._start_on_loop(step, lambda: value)
                return
        elif outcome.error is None and step.job.convert is not None:
            self._ready.append((step, lambda: value))
            return
        step.job.outcome.value, step.job.outcome.error = value, outcome.error
        self._done(step)

    def _done(self, step: _Step) -> None:
        self._active.pop(step)
        self._next(step.chain)

    def _abandon(self, step: _Step) -> None:
        """Leave a job behind. Where it blocks the event loop, the others that wait for this loop go to a new one."""
        if step.in_thread:
            self._threads -= 1
            return
        if step.future is None or step.loop is None:
            return
        step.future.cancel()
        loop, step.loop = step.loop, None
        if loop is _current and loop.answers():
            return
        _forget(loop)
        for other in list(self._active):
            if other.loop is loop and other.function is not None and other.take_back():
                self._start_on_loop(other, other.function)
