"""Environments: what makes one, their tools and rewards, and how instances are handed out, reused and closed."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from naming import steady
from vlmroll.tools import Environment, EnvironmentPool, Toolbox, ToolCall, get_rewards, reset_all, run_calls

LIMIT = 0.2


def shared(a: int) -> int:
    """Doubles.

    Args:
        a: It.
    """
    return 2 * a


class Base:
    """What several environments have in common."""

    made: list["Base"]

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.closed = 0
        self.total = 0

    def reset(self, **row: Any) -> Any:
        self.given, self.total = row, 0
        return row.get("first")

    def add(self, number: int) -> str:
        """Adds.

        Args:
            number: What.
        """
        self.total += number
        return f"now {self.total}"


class Sum(Base):
    """Gives rewards."""

    def get_reward(self) -> float:
        return float(self.total)

    def close(self) -> None:
        self.closed += 1

    @property
    def state(self) -> int:
        raise AssertionError("a property is no tool, and is not to be asked")

    def _helper(self) -> None:
        raise AssertionError


class Later(Base):
    """All of it async."""

    async def reset(self, start: int, label: str = "x") -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0.05)
        self.total = start
        return f"{label}{start}"

    async def double(self) -> int:
        """Doubles the total."""
        await asyncio.sleep(0.01)
        self.total *= 2
        return self.total

    async def get_reward(self) -> float:
        await asyncio.sleep(0.05)
        return float(self.total)

    async def close(self) -> None:
        self.closed += 1


def test_tools_are_the_public_methods_of_the_class() -> None:
    pool = EnvironmentPool({"sum": Sum, "later": Later}, tools=[shared])
    assert pool.kinds == ("sum", "later")
    names = {kind: [schema["function"]["name"] for schema in pool.schemas_of(kind)] for kind in pool.kinds}
    assert names == {"sum": ["shared", "add"], "later": ["shared", "add", "double"]}
    assert pool.reward_names == ("Sum", "Later")
    assert EnvironmentPool(Sum).kinds == ("Sum",)


def test_instances_have_states_of_their_own() -> None:
    pool = EnvironmentPool(Sum, tools=[shared])
    first, second = pool.take("Sum"), pool.take("Sum")
    assert first.instance is not second.instance
    calls = [ToolCall("add", {"number": 1}), ToolCall("shared", {"a": 4}), ToolCall("add", {"number": 2})]
    results = run_calls([(first.toolbox, calls), (second.toolbox, calls[:1])], seconds=5)
    assert [[r.content[0]["text"] for r in row] for row in results] == [["now 1", "8", "now 3"], ["now 1"]]
    assert get_rewards([second, first]) == [1.0, 3.0]


def test_instances_are_used_again() -> None:
    made: list[Sum] = []

    def factory() -> Sum:
        made.append(Sum())
        return made[-1]

    pool = EnvironmentPool(factory)
    for _ in range(3):
        taken = [pool.take("Sum") for _ in range(4)]
        reset_all(taken, [{"first": str(i)} for i in range(4)])
        for environment in taken:
            pool.give_back(environment)
    assert len(made) == 4
    stuck = pool.take("Sum")
    stuck.toolbox.stuck = True
    pool.give_back(stuck)
    taken = [pool.take("Sum") for _ in range(4)]
    assert stuck.instance not in [environment.instance for environment in taken]
    assert len(made) == 5
    pool.close()
    pool.close()
    assert [instance.closed for instance in made] == [1] * 5


def test_closing_goes_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    class Broken(Base):
        def close(self) -> None:
            raise ValueError("will not close")

    class Good(Later):
        async def close(self) -> None:
            done.append("good")

    class Plain(Base):
        """Has nothing to close."""

    pool = EnvironmentPool({"broken": Broken, "good": Good, "plain": Plain})
    with caplog.at_level(logging.WARNING):
        pool.close()
    assert done == ["good"]
    assert [record.message for record in caplog.records] == [
        "environment 'broken': close() failed (ValueError: will not close)"
    ]


def test_what_was_made_before_an_error_is_closed() -> None:
    made: list[Sum] = []

    def factory() -> Sum:
        made.append(Sum())
        return made[-1]

    class Unfit(Sum):
        def shared(self) -> None: ...

    with pytest.raises(ValueError, match="no docstring"):
        EnvironmentPool({"good": factory, "unfit": lambda: made.append(Unfit()) or made[-1]})
    assert [type(instance) for instance in made] == [Sum, Unfit]
    assert [instance.closed for instance in made] == [1, 1]


def test_a_finalizer_closes_when_the_interpreter_ends() -> None:
    """No thread can be started then."""
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import builtins, logging, os
from vlmroll.tools import EnvironmentPool
logging.basicConfig(stream=sys.stdout, format="%(message)s")

class Plain:
    def reset(self, **row): ...
    def close(self):
        os.write(1, b"closed\\n")

class Failing(Plain):
    def close(self):
        raise KeyError("door")

class Later(Plain):
    async def close(self): ...

class Keeper:
    def __del__(self, stdout=sys.stdout):
        os.write(1, f"ends {{sys.is_finalizing()}}\\n".encode())
        self.pool.close()
        self.pool.close()

builtins.keeper = Keeper()
builtins.keeper.pool = EnvironmentPool({{"plain": Plain, "failing": Failing, "later": Later}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ends True",
        "closed",
        "environment 'failing': close() failed (KeyError: 'door')",
        "environment 'later': close() failed (it is async, and the interpreter ends)",
    ]


def test_reset_gets_what_it_names() -> None:
    row: dict[str, Any] = {"prompt": "p", "start": 3, "things": [1, {"a": 2}], "first": None}
    later, everything = Environment("later", Later(), Toolbox()), Environment("sum", Sum(), Toolbox())
    (text,), nothing = reset_all([later, everything], [row, row])
    assert (text["text"], nothing) == ("x3", ())
    given: Any = everything.instance.given  # pyright: ignore[reportAttributeAccessIssue]
    assert given == row
    assert given["things"][1] is not row["things"][1]
    assert reset_all([later], [{"start": 1, "label": "y"}])[0][0]["text"] == "y1"


class Painter(Base):
    """Changes all that it is given."""

    def reset(self, **row: Any) -> None:
        self.given = row
        self.pictures: list[Image.Image] = [row["picture"], row["prompt"][0]["content"][0]["image"], row["pair"][1]]
        for image in self.pictures:
            image.paste((255, 0, 0), (0, 0, 1, 1))
        row["frames"][0][...] = 7
        row["tensor"].zero_()


def test_environments_share_no_pictures(tmp_path: Path) -> None:
    """Siblings get one row; files that were only opened are decoded before the threads start."""
    noise = np.random.default_rng(0).integers(0, 255, (600, 600, 3), dtype=np.uint8)
    for ending in ("png", "jpg"):
        Image.fromarray(noise).save(tmp_path / f"a.{ending}")
        opened = Image.open(tmp_path / f"a.{ending}")
        plain = Image.new("RGB", (2, 2))
        row: dict[str, Any] = {
            "picture": opened,
            "prompt": [{"role": "user", "content": [{"type": "image", "image": opened}]}],
            "pair": (1, plain),
            "frames": [np.zeros((2, 2), np.uint8)],
            "tensor": torch.ones(2),
        }
        painters = [Environment("painter", Painter(), Toolbox()) for _ in range(8)]
        reset_all(painters, [row] * 8)
        wanted = np.asarray(Image.open(tmp_path / f"a.{ending}"))
        assert np.array_equal(np.asarray(opened), wanted)
        assert (plain.getpixel((0, 0)), row["frames"][0].max(), row["tensor"].tolist()) == ((0, 0, 0), 0, [1, 1])
        instances: list[Any] = [environment.instance for environment in painters]
        for instance in instances:
            assert np.array_equal(np.asarray(instance.given["picture"])[1:], wanted[1:])
            assert instance.pictures[0] is instance.pictures[1]  # as in the row
        assert len({id(image) for instance in instances for image in instance.pictures}) == 16


def test_a_broken_picture_of_a_row_is_named(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (99, 99, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:2000])
    with Image.open(tmp_path / "cut.png") as cut, pytest.raises(OSError, match="truncated") as caught:
        reset_all([Environment("sum", Sum(), Toolbox())], [{"images": [cut]}], where=["row 2"])
    assert caught.value.__notes__ == ["in column 'images' for row 2: reset() of environment 'Sum'"]


def picture(value: int) -> Image.Image:
    return Image.new("CMYK", (4, 4), (0, 0, 0, value))


@pytest.mark.parametrize(
    ("returned", "kinds"),
    [
        (None, []),
        ("", ["text"]),
        ([], []),
        (picture(0), ["image"]),
        ((picture(0), picture(1)), ["image", "image"]),
        (["a", picture(0), {"type": "text", "text": "b"}], ["text", "image", "text"]),
        ({"type": "image", "image": picture(0)}, ["image"]),
        (np.zeros((4, 4, 3), np.uint8), ["image"]),
    ],
    ids=steady,
)
def test_what_reset_may_return(returned: Any, kinds: list[str]) -> None:
    (parts,) = reset_all([Environment("sum", Sum(), Toolbox())], [{"first": returned}])
    assert [part["type"] for part in parts] == kinds
    assert all(part["image"].mode == "RGB" for part in parts if part["type"] == "image")


@pytest.mark.parametrize(
    "returned", [3, {"a": 1}, [1], object(), [[picture(0)]], Image.new("RGB", (0, 1)), "\ud800"], ids=steady
)
def test_what_reset_may_not_return(returned: Any) -> None:
    with pytest.raises(ValueError, match="return|pixels|Unicode") as caught:
        reset_all([Environment("sum", Sum(), Toolbox())], [{"first": returned}], where=["row 7"])
    assert "row 7: reset() of environment 'Sum'" in "\n".join([str(caught.value), *caught.value.__notes__])


def test_resets_run_at_the_same_time() -> None:
    environments = [Environment("later", Later(), Toolbox()) for _ in range(50)]
    started = time.monotonic()
    parts = reset_all(environments, [{"start": i} for i in range(50)], seconds=5)
    assert [part["text"] for (part,) in parts] == [f"x{i}" for i in range(50)]
    assert get_rewards(environments) == list(map(float, range(50)))
    assert time.monotonic() - started < 1.5


def test_errors_of_a_reset_are_the_users() -> None:
    class Broken(Base):
        def reset(self, **row: Any) -> None:
            raise KeyError("map")

    class Hanging(Base):
        def reset(self, **row: Any) -> None:
            threading.Event().wait(2)

    with pytest.raises(KeyError, match="map") as caught:
        reset_all([Environment("broken", Broken(), Toolbox())], [{}])
    assert caught.value.__notes__ == ["in reset() of environment 'Broken'"]
    hanging = Environment("hanging", Hanging(), Toolbox())
    with pytest.raises(
        TimeoutError, match=r"row 3: reset\(\) of environment 'Hanging' did not finish within 0.2 seconds"
    ):
        reset_all([hanging], [{}], seconds=LIMIT, where=["row 3"])
    assert hanging.toolbox.stuck
    # Also behind one that stops the run before it.
    later = [Environment("broken", Broken(), Toolbox()), Environment("hanging", Hanging(), Toolbox())]
    with pytest.raises(KeyError):
        reset_all(later, [{}, {}], seconds=LIMIT)
    assert [environment.toolbox.stuck for environment in later] == [False, True]
    with pytest.raises(ValueError, match=r"reset\(\) of environment 'Later' asks for 'start'.*there are a, b"):
        reset_all([Environment("later", Later(), Toolbox())], [{"a": 1, "b": 2}])


def test_reset_is_called_by_names() -> None:
    class Positional(Base):
        def reset(self, start: int, /) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    class Starred(Base):
        def reset(self, *columns: int) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    for kind in (Positional, Starred):
        with pytest.raises(ValueError, match="by position, but columns are given by name"):
            reset_all([Environment("kind", kind(), Toolbox())], [{"start": 1}])


def rewarding(value: Any) -> Environment:
    class Giving(Base):
        def get_reward(self) -> Any:
            return value

    return Environment("giving", Giving(), Toolbox())


def test_rewards() -> None:
    given = [0.5, 2, True, None, float("nan"), np.float32(0.25), torch.tensor(3), np.array([4.0])]
    assert get_rewards(list(map(rewarding, given))) == [0.5, 2.0, 1.0, None, None, 0.25, 3.0, 4.0]
    assert get_rewards([Environment("base", Base(), Toolbox()), rewarding(1.0)]) == [None, 1.0]
    stuck = rewarding(1.0)
    stuck.toolbox.stuck = True
    assert get_rewards([stuck]) == [None]
    assert get_rewards([]) == []


@pytest.mark.parametrize("value", ["1", float("inf"), [1.0, 2.0], torch.ones(2), object()], ids=steady)
def test_what_is_no_reward(value: Any) -> None:
    with pytest.raises(ValueError, match=r"get_reward\(\) of environment 'Giving' returned .*finite number or None"):
        get_rewards([rewarding(value)])


def test_errors_of_a_reward_are_the_users() -> None:
    class Broken(Base):
        async def get_reward(self) -> float:
            raise ZeroDivisionError

    class Hanging(Base):
        def get_reward(self) -> None:
            threading.Event().wait(2)

    broken, hanging = (Environment(kind.__name__, kind(), Toolbox()) for kind in (Broken, Hanging))
    with pytest.raises(ZeroDivisionError) as caught:
        get_rewards([rewarding(1.0), broken])
    assert caught.value.__notes__ == ["in get_reward() of environment 'Broken'"]
    with pytest.raises(TimeoutError, match=r"^get_reward\(\) of environment 'Hanging'"):
        get_rewards([hanging], seconds=LIMIT)
    assert hanging.toolbox.stuck
    hanging.toolbox.stuck = False
    with pytest.raises(ZeroDivisionError) as caught:
        get_rewards([broken, hanging], seconds=LIMIT, where=["row 3", "row 4"])
    assert caught.value.__notes__ == ["in row 3: get_reward() of environment 'Broken'"]
    assert hanging.toolbox.stuck
    hanging.toolbox.stuck = False
    with pytest.raises(TimeoutError, match=r"^row 4: get_reward\(\) of environment 'Hanging'"):
        get_rewards([hanging], seconds=LIMIT, where=["row 4"])
    with pytest.raises(ValueError, match=r"^row 5: get_reward\(\) of environment 'Giving' returned 'x'"):
        get_rewards([rewarding("x")], where=["row 5"])


def test_rows_choose_by_their_column() -> None:
    pool = EnvironmentPool({"maze": Sum, "digits": Later})
    assert pool.kind_of({"environment": "digits"}) == "digits"
    with pytest.raises(ValueError, match="row 3 has no column 'environment'.*'maze', 'digits'"):
        pool.kind_of({"prompt": "x"}, where="row 3")
    with pytest.raises(
        ValueError, match="row 3: there is no environment 'mace'; did you mean 'maze'.*'maze', 'digits'"
    ):
        pool.kind_of({"environment": "mace"}, where="row 3")
    with pytest.raises(ValueError, match="there is no environment 7; There are"):
        pool.kind_of({"environment": 7})
    # One alone needs no column, and does not look at it.
    assert EnvironmentPool(Sum).kind_of({"environment": "anything"}) == "Sum"


class NoReset:
    """No environment."""


class BadTool(Base):
    """A method without types."""

    def look(self, where) -> None:  # noqa: ANN001  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
        """Looks.

        Args:
            where: There.
        """


class Clash(Base):
    """A method with the name of a shared tool."""

    def shared(self) -> None:
        """Shares."""


def failing() -> Base:
    raise ConnectionError("no server")


@pytest.mark.parametrize(
    ("factory", "kind", "words"),
    [
        ({}, ValueError, "environment_factory is empty"),
        (Sum(), ValueError, "environment_factory is .*a class, or a function"),
        ({"a": 3}, ValueError, r"environment_factory\['a'\] is 3"),
        ({3: Sum}, ValueError, r"environment_factory\[3\] is"),
        (NoReset, ValueError, "environment_factory makes a NoReset, which has no method reset"),
        ({"a": BadTool}, ValueError, "'look': argument 'where' has no type"),
        (Clash, ValueError, "two tools have the name 'shared'"),
        (failing, ConnectionError, "no server"),
    ],
    ids=steady,
)
def test_what_is_no_environment(factory: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        EnvironmentPool(factory, tools=[shared])
    if factory is failing:
        assert caught.value.__notes__ == ["in environment_factory"]


def test_a_factory_makes_one_kind() -> None:
    made = iter([Sum(), Later()])
    pool = EnvironmentPool(lambda: next(made))
    pool.take("Sum")
    with pytest.raises(ValueError, match="its factory made a Sum first and then a Later"):
        pool.take("Sum")
