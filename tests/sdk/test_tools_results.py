"""What tools return, as message parts: every JSON value and every kind of picture, and words for all else."""

import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import time
import uuid
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from naming import steady
from vlmroll.tools import Part, Toolbox, content_of, defused, run_calls
from vlmroll.tools.types import MAX_ERROR, ToolCall, ToolResult, failure


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Box:
    left: int
    label: str


class Point(NamedTuple):
    x: int
    y: int


texts = st.text(st.characters(codec="utf-8"))
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4)
)


def text_of(value: Any) -> str:
    (part,) = content_of(value)
    assert part["type"] == "text"
    return part["text"]


def is_message_part(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"type", "text"}


@given(json_values)
def test_every_json_value_comes_back(value: Any) -> None:
    if not isinstance(value, str):
        assert json.loads(text_of(value)) == value


@given(texts)
def test_text_stands_as_it_is(text: str) -> None:
    assert text_of(text) == text


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, "null"),
        (True, "true"),
        (float("nan"), "NaN"),
        (-math.inf, "-Infinity"),
        ("", ""),
        ([], "[]"),
        ((1, "ä"), '[1, "ä"]'),
        (range(3), "[0, 1, 2]"),
        ({"b", "a", 3}, '[3, "a", "b"]'),
        (frozenset(), "[]"),
        (OrderedDict(a=1), '{"a": 1}'),
        ({1: "x", None: "y"}, '{"1": "x", "null": "y"}'),
        ({Colour.RED: np.int64(3), np.int64(2): Colour.RED}, '{"red": 3, "2": "red"}'),
        (Box(3, "x"), '{"left": 3, "label": "x"}'),
        ([Box(3, "x")], '[{"left": 3, "label": "x"}]'),
        (Point(1, 2), "[1, 2]"),
        (datetime.datetime(2024, 2, 29, 12), '"2024-02-29T12:00:00"'),
        ({datetime.date(2024, 2, 29): datetime.time(12)}, '{"2024-02-29": "12:00:00"}'),
        (datetime.timedelta(hours=1), '"1:00:00"'),
        (decimal.Decimal("1.50"), '"1.50"'),
        (pathlib.PurePosixPath("a/b"), '"a/b"'),
        (uuid.UUID(int=0), '"00000000-0000-0000-0000-000000000000"'),
        (np.float32(0.5), "0.5"),
        (np.array([[1, 2], [3, 4]]), "[[1, 2], [3, 4]]"),
        (np.zeros((2, 2), np.uint8), "[[0, 0], [0, 0]]"),
        (np.array("2024-02-29", "datetime64[D]"), '"2024-02-29"'),
        (np.str_("x"), "x"),
        (torch.tensor([1.5, 2.0], requires_grad=True), "[1.5, 2.0]"),
        (torch.tensor(3), "3"),
        (["a", "b"], '["a", "b"]'),
        ({"type": "text", "text": "plain"}, "plain"),
        ({"type": "text", "text": "not", "of": "ours"}, '{"type": "text", "text": "not", "of": "ours"}'),
        ([{"type": "text", "text": 3}], '[{"type": "text", "text": 3}]'),
    ],
    ids=steady,
)
def test_values_become_text(value: Any, wanted: str) -> None:
    assert text_of(value) == wanted


def test_a_thousand_numbers() -> None:
    numbers = [i / 7 for i in range(1000)]
    assert json.loads(text_of(numbers)) == numbers
    assert json.loads(text_of(np.array(numbers))) == numbers


def grey(mode: str) -> Image.Image:
    """A picture of this mode, all of one colour that is grey 128 in RGB, or nearly."""
    if mode == "I;16":
        return Image.fromarray(np.full((4, 6), 128 * 257, np.uint16))
    colour: Any = {"L": 128, "LA": (128, 255), "RGB": (128,) * 3, "RGBA": (128, 128, 128, 255), "CMYK": (0, 0, 0, 127)}
    colour |= {"P": 128, "1": 1, "F": 128 / 255, "I": 128 * 257, "YCbCr": (128, 128, 128), "HSV": (0, 0, 128)}
    picture = Image.new(mode, (6, 4), colour.get(mode, (128, 128, 128)))
    if mode == "P":
        picture.putpalette([i for i in range(256) for _ in range(3)])
    return picture


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK", "P", "F", "I", "I;16", "YCbCr", "HSV"])
def test_pictures_of_every_mode(mode: str) -> None:
    (part,) = content_of(grey(mode))
    assert part["type"] == "image"
    assert (part["image"].mode, part["image"].size) == ("RGB", (6, 4))
    assert abs(np.asarray(part["image"]).astype(int) - 128).max() <= 2


def test_pictures_are_copies() -> None:
    picture = Image.new("RGB", (2, 2))
    (part,) = content_of(picture)
    picture.putpixel((0, 0), (255, 0, 0))
    assert part["image"].getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("channels", [3, 4])
def test_arrays_of_pixels_are_pictures(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, channels), dtype=np.uint8)
    pixels[..., 3:] = 255
    for value in (pixels, torch.from_numpy(pixels)):
        (part,) = content_of(value)
        assert np.array_equal(np.asarray(part["image"]), pixels[..., :3])


def kinds(value: Any) -> list[Any]:
    """The parts in short: texts, and the red value of the first pixel of pictures."""
    return [part["text"] if part["type"] == "text" else part["image"].getpixel((0, 0))[0] for part in content_of(value)]


def red(value: int) -> Image.Image:
    return Image.new("RGB", (2, 2), (value, 0, 0))


def image(value: int, **keys: int) -> dict[str, Any]:
    return {"type": "image", "image": red(value), **keys}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ([red(1)], [1]),
        ((red(1), red(2)), [1, 2]),
        ([red(1), "between", red(2)], [1, "between", 2]),
        (["a", 3, red(1), None, {"x": 1}], ["a\n3", 1, 'null\n{"x": 1}']),
        ([image(1), {"type": "text", "text": "a"}, {"type": "text", "text": "b"}], [1, "a", "b"]),
        (image(1), [1]),
        ({"crop": red(1), "score": 0.5}, ['{"crop": "picture 1", "score": 0.5}', 1]),
        ({"a": [red(1), {"b": red(2)}]}, ['{"a": ["picture 1", {"b": "picture 2"}]}', 1, 2]),
        ([red(1), {"a": red(2)}, "end", red(3)], [1, '{"a": "picture 2"}', 2, "end", 3]),
        ([[red(1), "x"]], ['[["picture 1", "x"]]', 1]),
        ({"type": "image", "url": "x"}, ['{"type": "image", "url": "x"}']),
    ],
    ids=steady,
)
def test_pictures_among_other_things(value: Any, wanted: list[Any]) -> None:
    assert kinds(value) == wanted


def test_sizes_that_a_part_asks_for_stay() -> None:
    (part,) = content_of([image(1, max_pixels=64)])
    assert part["max_pixels"] == 64


def test_parts_may_name_files(tmp_path: pathlib.Path) -> None:
    red(7).save(tmp_path / "a.png")
    (part,) = content_of([{"type": "image", "image": str(tmp_path / "a.png")}])
    assert part["image"].getpixel((0, 0)) == (7, 0, 0)


def cyclic() -> list[Any]:
    loop: list[Any] = []
    loop.append({"again": loop})
    return loop


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(60):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "type object"),
        (Box, "type type"),
        ((i for i in range(3)), "type generator"),
        (b"bytes", "type bytes"),
        (3j, "type complex"),
        ([lambda: 3], "type function"),
        (cyclic(), "holds itself"),
        (deep(), "nested deeper"),
        ({(1, 2): 3}, "key of type tuple"),
        ("\ud800", "not valid Unicode"),
        (["\ud800"], "not valid Unicode"),
        ({"\ud800": 1}, "not valid Unicode"),
        ("x" * 200_001, "has 200001 characters, and at most 200000 are shown; return less"),
        (["x" * 150_000, red(1), "x" * 50_001], "has 200001 characters"),
        (list(range(50_000)), "return less"),
        (10**5000, "digits"),
        (Image.new("RGB", (0, 4)), "no pixels"),
        ([red(1), Image.new("RGB", (4, 0))], "picture 2 of the result"),
        (np.zeros((0, 4, 3), np.uint8), "picture 1"),
        ([{"type": "image", "image": "/nowhere.png"}], "no picture file"),
        ([{"type": "image", "image": None}], "cannot be made from"),
        ([{"type": "image", "image": b"broken"}], "cannot be read"),
        (np.array([object()]), "type object"),
    ],
    ids=lambda value: str(type(value).__name__ if not isinstance(value, str) else value)[:30],
)
def test_what_cannot_be_told_says_what_to_return(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        content_of(value)


def test_a_cut_file_is_refused(tmp_path: pathlib.Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(tmp_path / "a.jpg")
    cut = (tmp_path / "a.jpg").read_bytes()[:900]
    (tmp_path / "a.jpg").write_bytes(cut)
    with Image.open(tmp_path / "a.jpg") as lazy, pytest.raises(ValueError, match="cannot be read"):
        content_of(lazy)


def test_the_same_thing_twice_is_no_cycle() -> None:
    shared = {"a": 1}
    assert text_of([shared, shared]) == '[{"a": 1}, {"a": 1}]'


def test_messages() -> None:
    call = ToolCall("look", {})
    assert ToolResult(content_of("x")).message(call) == {"role": "tool", "name": "look", "content": "x"}
    mixed = ToolResult(content_of([red(1), "x"])).message(call)
    assert [part["type"] for part in mixed["content"]] == ["image", "text"]
    assert ToolResult(content_of(red(1))).message(ToolCall("", error="?"))["name"] == "unknown"


@given(st.text(max_size=2000))
def test_failures_are_short_json(words: str) -> None:
    result = failure(words, timed_out=True)
    message = json.loads(result.content[0]["text"])
    assert list(message) == ["error"]
    assert len(message["error"]) <= MAX_ERROR
    assert result.failed
    assert result.timed_out
    if len(words) > MAX_ERROR:
        assert message["error"].endswith(f"(cut, {len(words)} characters)")
    result.content[0]["text"].encode()


def test_special_tokens_in_results_are_taken_apart() -> None:
    result = ToolResult(content_of([red(1), "a<|x|><|x|>|> b<|xy|>"])).defused(["<|x|>", "<|xy|>", "", "a"])
    assert result.content[1]["text"] == "a< |x|>< |x|>|> b< |xy|>"
    assert ToolResult(content_of("<|x|>")).defused([]).content == content_of("<|x|>")


def texts_of(*texts: str) -> list[Part]:
    return [{"type": "text", "text": text} for text in texts]


def test_special_tokens_in_pieces_are_taken_apart() -> None:
    """Templates write neighbouring parts without anything between them."""
    tokens = ["<|x|>"]
    given = texts_of("<|", "x|>")
    assert ToolResult(tuple(given)).defused(tokens).content == tuple(texts_of("< |x|>"))
    assert given == texts_of("<|", "x|>")
    apart = [*texts_of("a<|"), image(1), *texts_of("x|>", "")]
    assert [part.get("text") for part in defused(apart, tokens)] == ["a<|", None, "x|>"]
    # What stands before is not changed; only what ends behind it is broken.
    assert defused(texts_of("|", "> <|x|>"), tokens, before="<|x|> <|x") == tuple(texts_of(" |> < |x|>"))
    assert defused(texts_of("x|>"), tokens, before="<| ") == tuple(texts_of("x|>"))
    assert defused([image(1), *texts_of("x|>")], tokens, before="<|")[1]["text"] == "x|>"
    assert defused([], tokens, before="<|x|>") == ()


short = st.text("<|a ", max_size=6)


@given(st.lists(short, max_size=4), st.sets(short, max_size=4), short)
def test_no_token_ends_in_a_defused_text(pieces: list[str], tokens: set[str], before: str) -> None:
    """Tokens may overlap, hold each other and hold blanks."""
    (text,) = [part["text"] for part in defused(texts_of(*pieces), tokens, before)] or [""]
    assert text.replace(" ", "") == "".join(pieces).replace(" ", "")
    cores = [token.strip() for token in tokens]
    for core in [core for core in cores if len(core) > 1]:
        assert core not in (before + text)[max(0, len(before) - len(core) + 1) :]
    if not any(core in before + "".join(pieces) for core in cores):
        assert text == "".join(pieces)


def test_thousands_of_tokens_and_a_long_text() -> None:
    tokens = frozenset(f"<unused{i}>" for i in range(6000))
    started = time.monotonic()
    (part,) = defused(texts_of("<b>text<unused7> " * 10_000), tokens)
    assert part["text"] == "<b>text< unused7> " * 10_000
    assert time.monotonic() - started < 5


def test_pictures_that_are_only_opened_may_be_returned_by_many(tmp_path: pathlib.Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (900, 900, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    opened = Image.open(tmp_path / "a.png")

    def look() -> Image.Image:
        """Looks."""
        return opened

    results = run_calls([(Toolbox([look]), [ToolCall("look")])] * 8, seconds=None)
    assert all(np.array_equal(np.asarray(result.content[0]["image"]), noise) for (result,) in results)
