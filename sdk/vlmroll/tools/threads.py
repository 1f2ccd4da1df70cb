"""Threads for sync tools: daemons, which are used again, and left behind where a tool hangs.

An executor of the standard library would wait for a hanging tool when Python ends.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable

MAX_THREADS = 64
"""Sync functions that run at the same time; those left behind do not count."""


class _Worker:
    """A thread that runs what it is handed, one after the other, and is idle in between."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="vlmroll-tool", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.work.get()()
            _idle.append(self)


_idle: deque[_Worker] = deque()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_idle.clear)  # a child has no copies of the threads


def run_in_thread(work: Callable[[], None]) -> None:
    """Run something, which must not raise, in a thread of its own, without waiting for it.

    Raises:
        RuntimeError: there is no room for one more thread.
    """
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.work.put(work)
