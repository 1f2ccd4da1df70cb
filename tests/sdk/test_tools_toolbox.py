"""How functions are described to the model, and which are refused."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import pytest
from PIL import Image
from transformers.utils.chat_template_utils import get_json_schema

from naming import steady
from vlmroll.tools import Toolbox

if TYPE_CHECKING:
    from nowhere import Unknown  # pyright: ignore[reportMissingImports]


def add(a: int, b: float = 2.0) -> float:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        The sum.
    """
    return a + b


async def wait(seconds: float, unit: Literal["s", "ms"] = "s") -> None:
    """Waits.

    Args:
        seconds: How long.
        unit: Of what.
    """


class Counter:
    """Holds a state."""

    def count(self, step: int | None = None) -> Unknown:  # pyright: ignore[reportUnknownParameterType]
        """Counts on.

        Args:
            step: By how much.
        """

    @staticmethod
    def nothing() -> tuple[str, ...]:
        """Does nothing."""
        return ()


def test_schemas_are_those_of_transformers() -> None:
    assert Toolbox([add, wait]).schemas == [get_json_schema(add), get_json_schema(wait)]
    assert Toolbox([add, wait]).names == ("add", "wait")
    assert len(Toolbox()) == 0


def test_methods_and_partials() -> None:
    box = Toolbox([Counter().count, Counter.nothing, functools.partial(functools.partial(add), b=3.0)])
    count, nothing, adding = (schema["function"] for schema in box.schemas)
    assert count["name"] == "count"
    assert count["parameters"]["properties"] == {
        "step": {"type": "integer", "nullable": True, "description": "By how much."}
    }
    assert nothing == {
        "name": "nothing",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {}},
    }
    assert list(adding["parameters"]["properties"]) == ["a"]
    assert adding["parameters"]["required"] == ["a"]
    assert not box.tools["add"].is_async
    assert Toolbox([functools.partial(wait, 3.0)]).tools["wait"].is_async
    assert list(Toolbox([functools.partial(wait, 3.0)]).schemas[0]["function"]["parameters"]["properties"]) == ["unit"]


def test_a_decorated_function_keeps_its_description() -> None:
    @functools.wraps(add)
    def logged(*args: Any, **kwargs: Any) -> Any:
        return add(*args, **kwargs)

    assert Toolbox([logged]).schemas == [get_json_schema(add)]


def returning(hint: Any) -> Callable[[], Any]:
    def look() -> None:
        """Looks."""

    look.__annotations__["return"] = hint
    return look


@pytest.mark.parametrize("hint", [tuple[str, ...], "Unknown", "list[", Callable[[], int], 3, None, Any])
def test_any_return_type_will_do(hint: Any) -> None:
    assert Toolbox([returning(hint)]).names == ("look",)


class ImageInfo(TypedDict):
    width: int


class Picture(Image.Image):
    """A kind of picture."""


@pytest.mark.parametrize(
    ("hint", "wanted"),
    [
        (Image.Image, True),
        (Picture, True),
        (list[Image.Image], True),
        (tuple[str, dict[str, Image.Image | None]], True),
        (Annotated[Image.Image, "small"], True),
        (Awaitable[Image.Image], True),
        ("Image.Image", True),
        ("list[Image.Image] | None", True),
        (list["Image.Image"], True),
        ("Image", True),
        (Image, True),
        # Of these only the text is known.
        ("PIL.Image.Image", True),
        ("Unknown", False),
        ("list[Unknown]", False),
        (ImageInfo, False),
        ("ImageInfo", False),
        ("UnknownImage", False),
        (Literal["Image", "Image.Image"], False),
        (list[int], False),
        (Any, False),
        (None, False),
        (3, False),
    ],
    ids=steady,
)
def test_whether_a_tool_returns_pictures(hint: Any, wanted: bool) -> None:
    assert Toolbox([add, returning(hint)]).returns_pictures == wanted


@pytest.mark.parametrize(("hint", "wanted"), [("Image", True), ("Image.Image", True), ("ImageInfo", False)])
def test_pictures_that_only_type_checkers_import(hint: str, wanted: bool) -> None:
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef look() -> {hint}:\n    'Looks.'", names)  # noqa: S102
    assert Toolbox([names["look"]]).returns_pictures == wanted


def test_methods_partials_and_async_tools_return_pictures() -> None:
    class Eye:
        def look(self, size: int) -> Image.Image | str:
            """Looks.

            Args:
                size: Of it.
            """
            return ""

        async def wait(self) -> Image.Image:
            """Waits."""
            return Image.new("RGB", (1, 1))

    eye = Eye()
    for tool in (eye.look, eye.wait, functools.partial(eye.look, 3)):
        box = Toolbox([tool], in_order=True)
        assert box.returns_pictures
        assert Toolbox().joined(box).returns_pictures
    assert not Toolbox([Counter().count]).returns_pictures
    assert not Toolbox().returns_pictures


@pytest.mark.parametrize("given", [add, "add", {"add": add}, {add}, 3, None, iter([add])], ids=steady)
def test_tools_are_a_list(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^tools is .*; give a list of functions, such as \["):
        Toolbox(given)


def undocumented(a: int) -> int:
    return a


def undescribed(a: int, b: int) -> int:
    """Adds.

    Args:
        a: The first.
    """
    return a + b


def untyped(a: int, b) -> int:  # noqa: ANN001  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def unresolved(a: int, b: Unknown) -> int:  # pyright: ignore[reportUnknownParameterType]
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a


def odd(a: int, b: tuple[int, ...]) -> int:
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a


def starred(*numbers: int) -> int:
    """Adds.

    Args:
        numbers: All.
    """
    return sum(numbers)


def open_ended(**numbers: int) -> int:
    """Adds.

    Args:
        numbers: All.
    """
    return sum(numbers.values())


def positional(a: int, /) -> int:
    """Gives it back.

    Args:
        a: It.
    """
    return a


def choices(a: int, b: str) -> str:
    """Chooses.

    Args:
        a: The first.
        b: The second (choices: [tea])
    """
    return b


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (undocumented, r"'undocumented' has no docstring.*Args:"),
        (undescribed, r"'undescribed': argument 'b' .*no description.*Args:"),
        (untyped, r"'untyped': argument 'b' has no type"),
        (unresolved, r"'unresolved': argument 'b' .*Unknown.* is not defined"),
        (odd, r"'odd': argument 'b' .*Tuple"),
        (starred, r"'starred': \*numbers.* cannot be given by name"),
        (open_ended, r"'open_ended': \*\*numbers.* cannot be given by name"),
        (positional, r"'positional': a.* cannot be given by name"),
        (choices, r"'choices': argument 'b' .*Expecting value"),
        (lambda: 3, r"tools\[0\] is .*a name and a docstring"),
        (Counter, r"tools\[0\] is .*environment_factory"),
        (Counter(), r"tools\[0\] is .*no function"),
        ("add", r"tools\[0\] is 'add', which is no function"),
        (print, r"tools\[0\] is .*a name and a docstring"),
        (functools.partial(print), r"tools\[0\] is .*a name and a docstring"),
    ],
    ids=steady,
)
def test_what_cannot_be_described_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        Toolbox([function])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools have the name 'add'"):
        Toolbox([add, functools.partial(add, b=1.0)])
    with pytest.raises(ValueError, match="two tools have the name 'add'"):
        Toolbox([add]).joined(Toolbox([add]))


def test_a_bound_toolbox_calls_its_own_instance() -> None:
    first, second = Counter(), Counter()
    box = Toolbox([add]).joined(Toolbox([first.count], in_order=True))
    bound = box.bound_to(second)
    assert bound.tools["count"].function.__self__ is second  # pyright: ignore[reportFunctionMemberAccess]
    assert bound.tools["add"].function is add
    assert [tool.in_order for tool in bound.tools.values()] == [False, True]
    assert bound.schemas == box.schemas


def test_wrong_arguments_are_named() -> None:
    tool = Toolbox([add]).tools["add"]
    assert tool.fault({"a": 1}) == ""
    assert tool.fault({}) == "add: missing a required argument: 'a'; it takes a, b"
    assert tool.fault({"a": 1, "c": 2}) == "add: got an unexpected keyword argument 'c'; it takes a, b"
    assert Toolbox([Counter.nothing]).tools["nothing"].fault({"c": 2}).endswith("it takes no arguments")
