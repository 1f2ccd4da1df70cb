"""The tiny model and the digits: sizes, licence, disjoint sets, and the accuracy that training starts from."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForImageTextToText

from digits import LETTERS, MAX_TOKENS, MODEL_DIR, accuracy_reward, last_answer, make_rows, read_sheet, reading
from vlmroll import SamplingParams, TransformersGenerator
from vlmroll_processors import load_adapter

SPLITS: tuple[Literal["warmup", "train", "heldout"], ...] = ("warmup", "train", "heldout")


def glyphs(split: Literal["warmup", "train", "heldout"]) -> Iterator[bytes]:
    yield from (glyph.tobytes() for group in read_sheet(split).values() for glyph in group)


def test_the_sets_hold_all_digits_and_share_none() -> None:
    sets = [set(glyphs(split)) for split in SPLITS]
    assert sum(len(list(glyphs(split))) for split in SPLITS) == 1797
    assert len(set.union(*sets)) == sum(map(len, sets))


def test_the_sheets_are_those_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    source = sklearn.load_digits()
    known = {(image * 255 / 16).round().astype("uint8").tobytes() for image in source.images}
    assert {glyph for split in SPLITS for glyph in glyphs(split)} == known


def test_rows_are_checkable_and_depend_on_the_seed_alone() -> None:
    rows = make_rows("train", 60, seed=3)
    again = make_rows("train", 60, seed=3)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in again]
    assert [row["prompt"] for row in rows] != [row["prompt"] for row in make_rows("train", 60, seed=4)]
    assert {row["task"] for row in rows} == {"find", "larger", "sum"}
    assert {len(row["images"]) for row in rows} == {2, 3, 4}
    for row in rows:
        assert len({image.size for image in row["images"]}) == len(row["images"])
        expected = LETTERS[: len(row["images"])] if row["task"] != "sum" else "0123456789"
        assert set(row["answer"]) <= set(expected)
    replies = [[{"role": "assistant", "content": f"{reading([5, 3])}:{row['answer']}"}] for row in rows]
    assert accuracy_reward(replies, [row["answer"] for row in rows]) == [1.0] * 60


@pytest.mark.parametrize(
    ("text", "answer"),
    [("5A3B:5A", "A"), ("5A3B:8", "8"), ("5A9B:14", "14"), ("B", "B"), ("5A3B:", ""), ("", ""), ("5A3B:5A ", "A")],
)
def test_the_answer_is_read_from_the_end_of_a_reply(text: str, answer: str) -> None:
    assert last_answer(text) == answer


def test_the_model_is_small_and_states_its_licence() -> None:
    model = AutoModelForImageTextToText.from_pretrained(MODEL_DIR)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert model.dtype == torch.float16
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 8_000_000
    assert "CC BY 4.0" in (Path(MODEL_DIR).parent / "README.md").read_text()


def test_the_warmed_up_model_answers_about_half() -> None:
    adapter = load_adapter(MODEL_DIR)
    generator = TransformersGenerator(
        AutoModelForImageTextToText.from_pretrained(MODEL_DIR, dtype=torch.float32), adapter
    )
    rows = make_rows("heldout", 300, seed=0)
    output = generator.generate(adapter.encode(rows), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), 1)
    texts = [adapter.decode(ids) for ids in output.completion_ids]
    replies = [[{"role": "assistant", "content": text}] for text in texts]
    right = accuracy_reward(replies, [row["answer"] for row in rows])
    assert 0.40 <= sum(right) / len(right) <= 0.65
    # It reads before it answers: every picture's digit with its letter.
    read = [re.fullmatch(r"(\d[A-D]){2,4}:(\d[A-D]|\d+)", text) is not None for text in texts]
    assert sum(read) / len(read) > 0.98
