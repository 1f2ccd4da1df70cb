"""Questions that a model answers with a tool, and what checks the answers.

`zoom`: a picture of 192 x 192 pixels shows four digits, one in each quarter, in cells of a grid of 4 x 4. A question
asks for one of them. The runs give the model the picture in 16 x 16 pixels, where a digit is a spot of about one
pixel: the model can see which cell has a digit, and has to look closer to read it.

`calculate`: sums, differences and products of two numbers of two digits, as text alone.

    rows = make_zoom_rows("train", num_rows=8, seed=0)
    rows[0]["prompt"]   # [{"role": "user", "content": "Which digit is at the bottom left?"}]
    rows[0]["answer"]   # "7"

The digits of the three splits are those of `digits.py`. The pairs of numbers are split in the same way, by what is left
when `first + 3 * second` is divided by five.
"""

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from PIL import Image

from digits import ASSETS, Split, draw, read_sheet

MODEL_DIR = ASSETS / "tiny-tools"
GRID = 4
"""Columns and rows of a scene; a cell is named by its column and its row, from 0 at the top left."""
CELL = 48
"""Side of a cell, in pixels."""
CLOSE_UP = 16
"""Side of what `close_up` shows, the middle of a cell, in pixels."""
DIGIT_SIDES = (12, 13, 14)
"""Sides of a digit in a scene, in pixels."""
MAX_PIXELS = 16 * 16
"""What a run leaves of every picture; a close-up has no more."""
MAX_TOKENS = 40
"""Of a completion: a call (at most 10), the answer of the tool (at most 19), the answer (at most 5), and some room."""
PLACES = ("top left", "top right", "bottom left", "bottom right")
"""The quarters of a scene, in the order in which `compose` takes their digits."""
OPERATORS: Mapping[str, str] = {"plus": "+", "minus": "-", "times": "*"}
SPLIT_OF_FIVE: tuple[Split, ...] = ("warmup", "warmup", "warmup", "train", "heldout")
"""The split of a pair of numbers, by the remainder."""
_RESULTS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class TextRow(TypedDict):
    """One question: chat messages, the answer and what the question is about (a place or an operation)."""

    prompt: list[dict[str, str]]
    answer: str
    task: str


class PictureRow(TextRow):
    """One question about pictures."""

    images: list[Image.Image]


def compose(digits: Sequence[Image.Image], rng: random.Random) -> tuple[Image.Image, list[tuple[int, int]]]:
    """A scene with a picture of a digit in each quarter, and the cells (column, row) of the digits.

    Which of the four cells of its quarter a digit takes, and where in its close-up it is, is random.
    """
    scene = Image.new("RGB", (GRID * CELL, GRID * CELL))
    cells: list[tuple[int, int]] = []
    for quarter, digit in enumerate(digits):
        x = GRID // 2 * (quarter % 2) + rng.randrange(GRID // 2)
        y = GRID // 2 * (quarter // 2) + rng.randrange(GRID // 2)
        left, top = (
            cell * CELL + (CELL - CLOSE_UP) // 2 + rng.randint(0, CLOSE_UP - side)
            for cell, side in zip((x, y), digit.size, strict=True)
        )
        scene.paste(digit, (left, top))
        cells.append((x, y))
    return scene, cells


def close_up(scene: Image.Image, x: int, y: int) -> Image.Image:
    """The middle of the cell in column `x` and row `y`, 16 x 16 pixels.

    Raises:
        ValueError: the scene has no such cell.
    """
    if not (x in range(GRID) and y in range(GRID)):
        raise ValueError(f"x and y are 0 to {GRID - 1}")
    left, top = (cell * CELL + (CELL - CLOSE_UP) // 2 for cell in (x, y))
    return scene.crop((left, top, left + CLOSE_UP, top + CLOSE_UP))


def ask_place(place: str) -> str:
    """The question for the digit of a quarter."""
    return f"Which digit is at the {place}?"


def make_zoom_rows(split: Split, num_rows: int, seed: int) -> list[PictureRow]:
    """`num_rows` scenes of digits of `split`, with a question each; the same arguments give the same rows."""
    rng = random.Random(f"zoom-{split}-{seed}")
    sheet = read_sheet(split)
    rows: list[PictureRow] = []
    for _ in range(num_rows):
        digits = rng.sample(range(10), len(PLACES))
        sides = [rng.choice(DIGIT_SIDES) for _ in digits]
        glyphs = [rng.choice(sheet[digit]) for digit in digits]
        scene, _ = compose([draw(glyph, (side, side)) for glyph, side in zip(glyphs, sides, strict=True)], rng)
        quarter = rng.randrange(len(PLACES))
        prompt = [{"role": "user", "content": ask_place(PLACES[quarter])}]
        rows.append({"prompt": prompt, "images": [scene], "answer": str(digits[quarter]), "task": PLACES[quarter]})
    return rows


def draw_numbers(split: Split, rng: random.Random) -> tuple[int, int]:
    """Two numbers of two digits, the larger one first, from the pairs of `split`."""
    while True:
        second, first = sorted((rng.randint(10, 99), rng.randint(10, 99)))
        if SPLIT_OF_FIVE[(first + 3 * second) % len(SPLIT_OF_FIVE)] == split:
            return first, second


def result(first: int, sign: str, second: int) -> int:
    """What `first sign second` comes to; the sign is one of + - *."""
    return _RESULTS[sign](first, second)


def make_calculator_rows(split: Split, num_rows: int, seed: int) -> list[TextRow]:
    """`num_rows` questions such as "What is 45 plus 37?"; the same arguments give the same rows."""
    rng = random.Random(f"calculator-{split}-{seed}")
    rows: list[TextRow] = []
    for _ in range(num_rows):
        (first, second), word = draw_numbers(split, rng), rng.choice(list(OPERATORS))
        prompt = [{"role": "user", "content": f"What is {first} {word} {second}?"}]
        rows.append({"prompt": prompt, "answer": str(result(first, OPERATORS[word], second)), "task": word})
    return rows


def answer_reward(
    completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **kwargs: Any
) -> list[float]:
    """1.0 where the last message of a completion is the answer alone, else 0.0; one value per completion."""
    return [float(last_text(completion) == expected) for completion, expected in zip(completions, answer, strict=True)]


def last_text(completion: Sequence[Mapping[str, Any]]) -> str:
    """What the model says at last; nothing where its last message calls a tool or the tool has the last word."""
    last = completion[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return ""
    return str(last["content"]).strip()
