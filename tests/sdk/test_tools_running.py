"""Running calls with real threads and a real event loop: whatever a tool does, each call has its answer in time."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlmroll.tools import Toolbox, ToolCall, ToolResult, jobs, run_calls, threads
from vlmroll.tools.jobs import Job, run_jobs
from vlmroll.tools.threads import MAX_THREADS

LIMIT = 0.5  # seconds, where one is passed; others are far away
released = threading.Event()


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    """Lets what was left behind end with its test."""
    released.clear()
    yield
    released.set()


class BrokenError(Exception):
    """Cannot even say what is wrong."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def add(a: int, b: int = 2) -> int:
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def nap(seconds: float) -> float:
    """Sleeps.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return seconds


async def rest(seconds: float) -> float:
    """Sleeps without a thread.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return seconds


def hang() -> None:
    """Never comes back."""
    released.wait(30)


async def block() -> None:
    """Stops the event loop."""
    released.wait(30)


async def stubborn() -> None:
    """Does not let itself be cancelled."""
    while not released.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


def fail(kind: str) -> None:
    """Raises.

    Args:
        kind: What.
    """
    raise KINDS[kind]


async def fail_later(kind: str) -> None:
    """Raises.

    Args:
        kind: What.
    """
    raise KINDS[kind]


KINDS: dict[str, BaseException] = {
    "value": ValueError("no such thing"),
    "empty": ZeroDivisionError(),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "base": BaseException("bare"),
    "cancelled": asyncio.CancelledError(),
    "words": BrokenError(),
    "long": ValueError("x" * 3000),
    "surrogate": ValueError("\ud800"),
}


def nothing() -> None:
    """Returns None."""


def many() -> list[float]:
    """Returns 1,000 numbers."""
    return [i / 3 for i in range(1000)]


def cmyk() -> Image.Image:
    """Returns a picture of printing inks."""
    return Image.new("CMYK", (8, 8), (0, 255, 255, 0))


def crops() -> list[Any]:
    """Returns text and pictures."""
    return ["two", Image.new("L", (4, 4)), np.zeros((4, 4, 3), np.uint8)]


async def picture_later() -> Image.Image:
    """Returns a picture."""
    return Image.new("RGB", (4, 4))


def empty_picture() -> Image.Image:
    """Returns a picture without pixels."""
    return Image.new("RGB", (0, 4))


def nonsense() -> object:
    """Returns what nobody can read."""
    return object()


def deferred(a: int) -> Awaitable[int]:
    """Is sync, and returns something to wait for.

    Args:
        a: Comes back.
    """

    async def later() -> int:
        await asyncio.sleep(0.01)
        return a

    return later()


TOOLS: list[Callable[..., Any]] = [
    *(add, nap, rest, hang, block, stubborn, fail, fail_later),
    *(nothing, many, cmyk, crops, picture_later, empty_picture, nonsense, deferred),
]


def run(
    *calls: tuple[str, dict[str, Any]], seconds: float | None = 30, toolbox: Toolbox | None = None
) -> list[ToolResult]:
    """The results of one turn."""
    (results,) = run_calls([(toolbox or Toolbox(TOOLS), [ToolCall(*call) for call in calls])], seconds=seconds)
    return results


def told(result: ToolResult) -> str:
    (part,) = result.content
    return part["text"]


def error_of(result: ToolResult) -> str:
    assert result.failed
    message = json.loads(told(result))
    assert list(message) == ["error"]
    return message["error"]


def test_results_stand_in_the_order_of_the_calls() -> None:
    results = run(("nap", {"seconds": 0.1}), ("add", {"a": 1}), ("rest", {"seconds": 0.05}), ("add", {"a": 1, "b": 5}))
    assert [told(result) for result in results] == ["0.1", "3", "0.05", "6"]
    assert not any(result.failed or result.timed_out for result in results)


def test_every_rollout_has_its_own_answers() -> None:
    other = Toolbox([nothing])
    calls = [[ToolCall("add", {"a": i})] * i for i in range(4)]
    results = run_calls([*((Toolbox(TOOLS), c) for c in calls), (other, [ToolCall("add", {"a": 1})])], seconds=30)
    assert [[told(r) for r in row] for row in results[:4]] == [[], ["3"], ["4"] * 2, ["5"] * 3]
    assert error_of(results[4][0]) == "there is no tool 'add'; the tools are: nothing"
    assert run_calls([], seconds=30) == []


@pytest.mark.parametrize("name", ["hang", "stubborn", "block"])
def test_a_tool_that_passes_its_limit(name: str) -> None:
    started = time.monotonic()
    late, good, also_good = run((name, {}), ("add", {"a": 1}), ("rest", {"seconds": 0.01}), seconds=LIMIT)
    assert late.timed_out
    assert error_of(late) == f"{name} did not finish within 0.5 seconds"
    assert (told(good), told(also_good)) == ("3", "0.01")
    assert time.monotonic() - started < 4
    # And what comes later is not touched.
    assert told(run(("rest", {"seconds": 0.01}))[0]) == "0.01"


def test_an_async_tool_that_blocks_does_not_take_the_others_along() -> None:
    """Those that wait for the blocked loop run on a new one; each runs once."""
    seen: list[int] = []

    async def note(number: int) -> int:
        """Notes.

        Args:
            number: What.
        """
        seen.append(number)
        return number

    toolbox = Toolbox([block, note])
    work = [(toolbox, [ToolCall("block"), ToolCall("block"), *(ToolCall("note", {"number": i}) for i in range(5))])]
    (results,) = run_calls(work, seconds=LIMIT)
    assert [result.timed_out for result in results] == [True, True, *[False] * 5]
    assert [told(result) for result in results[2:]] == list("01234")
    released.set()
    time.sleep(0.1)  # the old loops go on, and find nothing to do
    assert sorted(seen) == list(range(5))


def test_without_a_limit_everything_is_waited_for() -> None:
    assert told(run(("nap", {"seconds": 0.5}), seconds=None)[0]) == "0.5"


@pytest.mark.parametrize("name", ["fail", "fail_later"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("value", "ValueError: no such thing"),
        ("empty", "ZeroDivisionError"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("base", "BaseException: bare"),
        ("cancelled", "CancelledError"),
        ("words", "BrokenError"),
        ("surrogate", "ValueError: ?"),
    ],
)
def test_a_tool_that_raises(name: str, kind: str, words: str) -> None:
    failed, good = run((name, {"kind": kind}), ("rest", {"seconds": 0.01}))
    assert error_of(failed).startswith(words)
    assert not failed.timed_out
    assert told(good) == "0.01"


def test_long_errors_are_cut() -> None:
    words = error_of(run(("fail", {"kind": "long"}))[0])
    assert len(words) == 500
    assert words.endswith("x ... (cut, 3012 characters)")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall("sub", {}), "there is no tool 'sub'; the tools are: add, "),
        (ToolCall("add", {}), "add: missing a required argument: 'a'; it takes a, b"),
        (ToolCall("add", {"a": 1, "c": 1}), "add: got an unexpected keyword argument 'c'; it takes a, b"),
        (ToolCall("add", {"a": "x"}), "TypeError: can only concatenate"),
        (ToolCall("add", {"a": 1}, error="not closed"), "not closed"),
        (ToolCall("", error="names no tool"), "names no tool"),
    ],
)
def test_calls_that_cannot_be_run(call: ToolCall, words: str) -> None:
    ((result,),) = run_calls([(Toolbox(TOOLS), [call])], seconds=30)
    assert error_of(result).startswith(words)


def test_what_tools_return() -> None:
    names = ("nothing", "many", "cmyk", "crops", "picture_later", "deferred", "empty_picture", "nonsense")
    results = run(*((name, {"a": 7} if name == "deferred" else {}) for name in names), seconds=5)
    none, numbers, ink, several, later, awaited, empty, unknown = results
    assert told(none) == "null"
    assert json.loads(told(numbers)) == many()
    assert ink.content[0]["image"].mode == "RGB"
    assert [part["type"] for part in several.content] == ["text", "image", "image"]
    assert later.content[0]["image"].size == (4, 4)
    assert told(awaited) == "7"
    assert "no pixels" in error_of(empty)
    assert "type object, which cannot be told; return text" in error_of(unknown)


def test_a_picture_that_takes_too_long_to_read() -> None:
    """The limit holds for all of it."""

    class Slow(list[int]):
        def __iter__(self) -> Iterator[int]:
            released.wait(30)
            return super().__iter__()

    async def slow() -> list[int]:
        """Returns what takes long to read."""
        return Slow([1])

    started = time.monotonic()
    assert run(("slow", {}), seconds=LIMIT, toolbox=Toolbox([slow]))[0].timed_out
    assert time.monotonic() - started < 4 * LIMIT


def test_sync_tools_run_at_the_same_time_up_to_a_number() -> None:
    """200 that sleep take as long as the rounds of `MAX_THREADS` they need, and time counts from when each starts."""
    rounds = -(-200 // MAX_THREADS)
    started = time.monotonic()
    results = run(*[("nap", {"seconds": 0.3})] * 200, seconds=0.9)
    taken = time.monotonic() - started
    assert not any(result.timed_out for result in results)
    assert rounds * 0.3 <= taken < rounds * 0.3 + 2


def test_async_tools_all_run_at_the_same_time() -> None:
    started = time.monotonic()
    assert not any(result.failed for result in run(*[("rest", {"seconds": 0.2})] * 200, seconds=5))
    assert 0.2 <= time.monotonic() - started < 3


def test_those_left_behind_make_room() -> None:
    results = run(*[("hang", {})] * MAX_THREADS, ("add", {"a": 1}), seconds=LIMIT)
    assert [result.timed_out for result in results] == [True] * MAX_THREADS + [False]


def test_a_process_without_room_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    monkeypatch.setattr(jobs, "_current", None)  # the loop that others have started
    monkeypatch.setattr(threads, "_idle", deque[Any](maxlen=0))
    for result in run(("add", {"a": 1}), ("rest", {"seconds": 0.01})):
        assert error_of(result) == "RuntimeError: can't start new thread"


def test_tools_may_change_their_arguments() -> None:
    def change(things: list[int]) -> int:
        """Changes.

        Args:
            things: Them.
        """
        things.append(1)
        return len(things)

    call = ToolCall("change", {"things": []})
    assert [told(r) for r in run_calls([(Toolbox([change]), [call, call])], seconds=30)[0]] == ["1", "1"]
    assert call.arguments == {"things": []}


class Box:
    """A state."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.busy = 0

    def put(self, number: int) -> str:
        """Puts a number in.

        Args:
            number: It.
        """
        self.busy += 1
        assert self.busy == 1
        time.sleep(0.01)
        self.seen.append(number)
        self.busy -= 1
        return str(self.seen)

    async def put_later(self, number: int) -> str:
        """Puts a number in.

        Args:
            number: It.
        """
        self.busy += 1
        assert self.busy == 1
        await asyncio.sleep(0.01)
        self.seen.append(number)
        self.busy -= 1
        return str(self.seen)

    def hang(self) -> None:
        """Never comes back."""
        released.wait(30)

    async def hang_later(self) -> None:
        """Never comes back."""
        await asyncio.sleep(30)


def test_tools_with_a_state_run_in_order() -> None:
    boxes = [Box() for _ in range(8)]
    toolboxes = [Toolbox([b.put, b.put_later], in_order=True) for b in boxes]
    calls = [ToolCall("put" if i % 2 else "put_later", {"number": i}) for i in range(6)]
    results = run_calls([(toolbox, calls) for toolbox in toolboxes], seconds=5)
    assert all(box.seen == list(range(6)) for box in boxes)
    assert [told(result) for result in results[3]] == [str(list(range(i + 1))) for i in range(6)]


def test_a_failure_does_not_end_the_order() -> None:
    box = Box()
    results = run(
        ("put", {}),
        ("put", {"number": 1}),
        ("no", {}),
        ("put", {"number": 2}),
        toolbox=Toolbox([box.put], in_order=True),
    )
    assert [result.failed for result in results] == [True, False, True, False]
    assert box.seen == [1, 2]


@pytest.mark.parametrize("name", ["hang", "hang_later"])
def test_after_a_time_out_the_state_is_left_alone(name: str) -> None:
    box = Box()
    toolbox = Toolbox([add]).joined(Toolbox([box.put, box.hang, box.hang_later], in_order=True))
    turn = [("put", {"number": 1}), (name, {}), ("put", {"number": 2}), ("put", {"number": 3}), ("add", {"a": 1})]
    results = run(*turn, seconds=LIMIT, toolbox=toolbox)
    assert [result.timed_out for result in results] == [False, True, False, False, False]
    assert error_of(results[2]).startswith("put was not run: an earlier call passed its time limit")
    assert (told(results[4]), box.seen, toolbox.stuck) == ("3", [1], True)
    later, plain = run(("put", {"number": 4}), ("add", {"a": 1}), toolbox=toolbox)
    assert "was not run" in error_of(later)
    assert (told(plain), box.seen) == ("3", [1])


def test_partials_are_called_with_what_they_bind() -> None:
    toolbox = Toolbox([functools.partial(add, b=40), functools.partial(rest, 0.01)])
    assert [told(result) for result in run(("add", {"a": 2}), ("rest", {}), toolbox=toolbox)] == ["42", "0.01"]


def test_it_may_be_called_inside_of_a_running_loop() -> None:
    async def notebook() -> str:
        return told(run(("rest", {"seconds": 0.01}))[0])

    assert asyncio.run(notebook()) == "0.01"


def test_clients_of_async_tools_live_on() -> None:
    """All calls share one loop, so that a connection made in one call can be used in the next."""
    loops: list[Any] = []

    async def note() -> None:
        """Notes the loop."""
        loops.append(asyncio.get_running_loop())

    toolbox = Toolbox([note])
    run(("note", {}), toolbox=toolbox)
    run(("note", {}), ("note", {}), toolbox=toolbox)
    assert len(set(map(id, loops))) == 1


def python(code: str, **kwargs: Any) -> "subprocess.Popen[str]":
    """An interpreter of its own with the tools of this file."""
    text = f"import sys\nsys.path[:0] = {sys.path!r}\n{textwrap.dedent(code)}"
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


HANGING = '''
    import asyncio, time
    from vlmroll.tools import Toolbox, ToolCall, run_calls

    def hang() -> None:
        """Never comes back."""
        time.sleep(600)

    async def block() -> None:
        """Never comes back, and stops the event loop."""
        time.sleep(600)

    async def wait() -> None:
        """Never comes back."""
        await asyncio.sleep(600)
'''


def test_what_hangs_does_not_keep_the_interpreter() -> None:
    process = python(
        HANGING
        + """
    calls = [ToolCall("hang"), ToolCall("wait"), ToolCall("block"), ToolCall("wait")]
    (results,) = run_calls([(Toolbox([hang, block, wait]), calls)], seconds=0.2)
    print([result.failed for result in results], flush=True)
    """
    )
    out, err = process.communicate(timeout=60)
    assert (out.strip(), process.returncode, err) == ("[True, True, True, True]", 0, "")


@pytest.mark.parametrize("tool", ["hang", "wait"])
def test_an_interrupt_by_the_user_goes_through(tool: str) -> None:
    process = python(
        HANGING
        + f'''
    print("ready", flush=True)
    try:
        run_calls([(Toolbox([hang, wait]), [ToolCall("{tool}")])], seconds=None)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    '''
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (out, process.returncode, err) == ("interrupted\n", 0, "")


@pytest.mark.parametrize("name", ["hang", "hang_later"])
def test_an_interrupt_leaves_states_alone(name: str) -> None:
    """What was running goes on, so its instance is not to be used again."""

    def interrupt() -> str:
        raise KeyboardInterrupt

    box = Box()
    stuck, other = (Toolbox([box.put, box.hang, box.hang_later], in_order=True) for _ in range(2))
    left = Job(
        function=stuck.tools[name].function, is_async=stuck.tools[name].is_async, refused=str, on_left=stuck.stick
    )
    done = Job(function=partial(nap, 0.2), on_left=other.stick)
    with pytest.raises(KeyboardInterrupt):
        run_jobs([[left], [done, Job(function=nothing, refused=interrupt, on_left=other.stick)]], None)
    assert (stuck.stuck, other.stuck) == (True, False)
    assert "was not run" in error_of(run(("put", {"number": 1}), toolbox=stuck)[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_makes_its_own_loop() -> None:
    process = python(
        HANGING
        + '''
    import os
    async def quick() -> int:
        """Quick."""
        return 3
    def once() -> None:
        print(run_calls([(Toolbox([quick]), [ToolCall("quick")])], seconds=5)[0][0].content[0]["text"], flush=True)
    once()
    child = os.fork()
    if child == 0:
        once()
        os._exit(0)
    os.waitpid(child, 0)
    '''
    )
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("3\n3\n", 0)


def test_threads_are_used_again_but_those_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_idle", deque[Any]())
    box = Toolbox([where, hang])
    first = told(run(("where", {}), toolbox=box)[0])
    assert first.endswith("True"), "a thread that Python does not wait for"
    idle_soon()
    assert told(run(("where", {}), toolbox=box)[0]) == first
    idle_soon()
    assert run(("hang", {}), toolbox=box, seconds=0.1)[0].timed_out
    assert not threads._idle  # pyright: ignore[reportPrivateUsage]
    assert told(run(("where", {}), toolbox=box)[0]) != first


def where() -> str:
    """Says in which thread it runs."""
    return f"{threading.get_ident()} {threading.current_thread().daemon}"


def idle_soon() -> None:
    """Waits until a thread is idle, which it is a moment after its answer."""
    deadline = time.monotonic() + 5
    while not threads._idle and time.monotonic() < deadline:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.001)


FORKED = """
import os
from vlmroll.tools import Toolbox, ToolCall, run_calls

def one() -> int:
    'Says one.'
    return 1

def answer():
    return run_calls([(Toolbox([one]), [ToolCall("one", {})])], seconds=5)[0][0].content[0]["text"]

assert answer() == "1"
child = os.fork()
if child == 0:
    os._exit(0 if answer() == "1" else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
