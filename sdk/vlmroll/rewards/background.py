"""Async reward functions: run together, on one event loop that lives as long as the process, in its own thread.

One loop, since clients that a reward keeps open belong to the loop they were made on; a thread, since the caller may
itself run inside a loop, as notebooks do.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Background:
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    process: int


_background: _Background | None = None


def _loop() -> asyncio.AbstractEventLoop:
    """The loop, made anew in a forked process, which has no copy of the thread."""
    global _background
    known = _background
    if known is None or known.process != os.getpid() or not known.thread.is_alive():
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="vlmroll-rewards", daemon=True)
        thread.start()
        known = _background = _Background(loop, thread, os.getpid())
    return known.loop


class named:  # noqa: N801  (used as a function: `with named("reward"): ...`)
    """Adds the name of a reward function to whatever is raised inside the block."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"in reward function {self._name!r}")


def run_together(waiting: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    """The results of all, by name; the first exception is raised here.

    What would end the loop, SystemExit and KeyboardInterrupt, is carried over as well: the loop goes on, and the caller
    does not wait for ever.
    """

    async def one(name: str, work: Awaitable[Any]) -> Any:
        try:
            with named(name):
                return await work
        except (SystemExit, KeyboardInterrupt) as error:
            return error

    async def together() -> list[Any]:
        return await asyncio.gather(*(one(name, work) for name, work in waiting.items()), return_exceptions=True)

    future = asyncio.run_coroutine_threadsafe(together(), _loop())
    try:
        results = future.result()
    finally:
        future.cancel()  # nothing to cancel unless the wait was interrupted
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return dict(zip(waiting, results, strict=True))
