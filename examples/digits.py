"""Questions about several pictures of handwritten digits, with answers that can be checked.

A prompt shows two to four digits in pictures of different sizes and asks one of three things: which picture shows a
given digit (`find`), which picture shows the largest digit (`larger`), or what two digits add up to (`sum`). Pictures
are called A, B, C and D in the order of `images`. Every split has digits of its own, see `assets/README.md`.

    rows = make_rows("train", num_rows=8, seed=0)
    rows[0]["prompt"]   # [{"role": "user", "content": "Which picture shows the digit 7?"}]
    rows[0]["answer"]   # "B"

The model in assets/ reads before it answers, as in `5A7B:7B`; the reward looks at the answer alone.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ASSETS = Path(__file__).resolve().parent.parent / "assets"
MODEL_DIR = ASSETS / "tiny-vl"
GLYPH = 8
"""Side of a digit on its sheet, in pixels."""
SIZES = ((16, 16), (24, 16), (16, 24), (24, 24), (32, 16), (16, 32))
"""Widths and heights of the pictures, in pixels; the sizes within a prompt are all different."""
LETTERS = "ABCD"
MAX_TOKENS = 13
"""Of a reply: four digits with their letters, a colon, the answer, the end of the turn."""
TASKS = ("find", "larger", "sum")
TASK_WEIGHTS = (0.4, 0.3, 0.3)

Split = Literal["warmup", "train", "heldout"]
Glyph = NDArray[np.uint8]


class Row(TypedDict):
    """One question: chat messages without image parts, the pictures in order, the answer and the task's name."""

    prompt: list[dict[str, str]]
    images: list[Image.Image]
    answer: str
    task: str


@cache
def read_sheet(split: Split) -> dict[int, list[Glyph]]:
    """The glyphs (8, 8) of a split's sheet, grouped by the digit that they show."""
    labels: str = json.loads((ASSETS / "digits" / "labels.json").read_text())[split]
    sheet = np.asarray(Image.open(ASSETS / "digits" / f"{split}.png"), dtype=np.uint8)
    rows, columns = sheet.shape[0] // GLYPH, sheet.shape[1] // GLYPH
    cells = sheet.reshape(rows, GLYPH, columns, GLYPH).transpose(0, 2, 1, 3).reshape(-1, GLYPH, GLYPH)
    glyphs: dict[int, list[Glyph]] = {digit: [] for digit in range(10)}
    for label, cell in zip(labels, cells, strict=False):  # the last cells of a sheet may be unused
        glyphs[int(label)].append(cell)
    return glyphs


def draw(glyph: Glyph, size: tuple[int, int]) -> Image.Image:
    """Stretch a glyph (8, 8) to an RGB picture of `size` (width, height) pixels."""
    return Image.fromarray(glyph).resize(size, Image.Resampling.BICUBIC).convert("RGB")


def reading(digits: Sequence[int], only: int | None = None) -> str:
    """How the model names what it sees: every digit with its letter, or the first that shows `only`."""
    pairs = [f"{digit}{letter}" for digit, letter in zip(digits, LETTERS, strict=False)]
    return "".join(pairs) if only is None else pairs[digits.index(only)]


def ask_find(digits: Sequence[int], rng: random.Random) -> tuple[str, str]:
    """Question and answer: which picture shows a digit that is drawn from `digits` (all different)."""
    wanted = rng.choice(digits)
    return f"Which picture shows the digit {wanted}?", LETTERS[digits.index(wanted)]


def ask_larger(digits: Sequence[int], rng: random.Random) -> tuple[str, str]:
    """Question and answer: which picture shows the largest of `digits` (all different)."""
    word = "larger" if len(digits) == 2 else "largest"
    return f"Which picture shows the {word} digit?", LETTERS[digits.index(max(digits))]


def ask_sum(digits: Sequence[int], rng: random.Random) -> tuple[str, str]:
    """Question and answer: the sum of two digits."""
    return "What is the sum of the two digits?", str(sum(digits))


QUESTIONS: Mapping[str, Callable[[Sequence[int], random.Random], tuple[str, str]]] = {
    "find": ask_find,
    "larger": ask_larger,
    "sum": ask_sum,
}


def draw_digits(task: str, rng: random.Random) -> list[int]:
    """Digits for a question: two, possibly equal, for a sum; else two to four different ones."""
    if task == "sum":
        return [rng.randrange(10), rng.randrange(10)]
    return rng.sample(range(10), rng.choice((2, 3, 4)))


def make_rows(split: Split, num_rows: int, seed: int) -> list[Row]:
    """`num_rows` questions over the digits of `split`; the same arguments give the same rows."""
    rng = random.Random(f"{split}-{seed}")
    sheet = read_sheet(split)
    rows: list[Row] = []
    for task in rng.choices(TASKS, TASK_WEIGHTS, k=num_rows):
        digits = draw_digits(task, rng)
        text, answer = QUESTIONS[task](digits, rng)
        sizes = rng.sample(SIZES, len(digits))
        images = [draw(rng.choice(sheet[digit]), size) for digit, size in zip(digits, sizes, strict=True)]
        rows.append({"prompt": [{"role": "user", "content": text}], "images": images, "answer": answer, "task": task})
    return rows


def accuracy_reward(
    completions: Sequence[Sequence[Mapping[str, str]]], answer: Sequence[str], **kwargs: Any
) -> list[float]:
    """1.0 where a completion ends in its answer, else 0.0; one value per completion."""
    texts = [completion[-1]["content"] for completion in completions]
    return [float(last_answer(text) == expected) for text, expected in zip(texts, answer, strict=True)]


def last_answer(text: str) -> str:
    """The letter or number at the end of a reply, after its last colon: "B" of "5A7B:7B", "12" of "5A7B:12"."""
    found = re.search(r"([A-D]|\d+)$", text.strip().rpartition(":")[2])
    return found.group() if found else ""
