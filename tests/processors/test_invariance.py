"""A row's log-probabilities are its own: cut, permute, pad or mix its batch, and they stay."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import QWEN_FAMILIES, mixed_rows, picture, tiny, tokenizer, user
from vlmroll_processors import PaddedBatch, Prompt, collate, load_adapter
from vlmroll_processors.collate import Piece

TOLERANCE = 1e-5  # float32, logits of size 1
FAMILIES = (*QWEN_FAMILIES, "text")
families = pytest.mark.parametrize("name", FAMILIES)


@cache
def prompts(name: str) -> tuple[Prompt, ...]:
    """Rows with 0 to 3 pictures, short and long, chats and plain strings."""
    rows: list[dict[str, Any]] = [
        {"prompt": "7"},
        {"prompt": user("how many dots ? " * 5)},
        {"prompt": [*user("what is the sum"), {"role": "assistant", "content": "the sum is"}]},
    ]
    if name != "text":
        rows += [*mixed_rows(), {"prompt": "red <image> dots", "image": picture(40, 40, 7)}]
    return tuple(load_adapter(tiny(name).processor).encode(rows))


@cache
def sampleable(name: str) -> tuple[int, ...]:
    """Every id that a generator may sample."""
    banned = load_adapter(tiny(name).processor).vision_ids
    return tuple(sorted(set(range(len(tokenizer()))) - banned))


def logprobs(name: str, batch: PaddedBatch) -> list[torch.Tensor]:
    """[length] of each row's completion: log softmax, written out, of the logits before each token."""
    with torch.no_grad():
        logits = tiny(name).model(**batch.model_inputs()).logits
    num_tokens, num_completion = batch.input_ids.shape[1], batch.completion_mask.shape[1]
    logits = logits[:, num_tokens - num_completion - 1 : num_tokens - 1].double()
    shifted = logits - logits.max(-1, keepdim=True).values
    normalised = shifted - shifted.exp().sum(-1, keepdim=True).log()
    chosen = normalised.gather(-1, batch.completion_ids[:, :, None])[:, :, 0]
    return [row[mask.bool()] for row, mask in zip(chosen, batch.completion_mask, strict=True)]


def score(
    name: str, rows: Sequence[int], completions: Sequence[Sequence[int]], multiple: int | None = None
) -> list[torch.Tensor]:
    """The completions' log-probabilities when the rows share one batch."""
    chosen = [prompts(name)[row] for row in rows]
    return logprobs(name, collate(chosen, completions, pad_token_id=0, pad_to_multiple_of=multiple))


def draw_batch(data: st.DataObject, name: str) -> tuple[list[int], list[list[int]]]:
    """Rows, in any order and with repeats, and a completion of sampleable ids for each."""
    rows = data.draw(st.lists(st.integers(0, len(prompts(name)) - 1), min_size=1, max_size=5))
    completion = st.lists(st.sampled_from(sampleable(name)), min_size=1, max_size=6)
    return rows, [data.draw(completion) for _ in rows]


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=TOLERANCE)


@families
@given(data=st.data())
def test_a_row_scores_in_any_batch_as_it_does_alone(name: str, data: st.DataObject) -> None:
    rows, completions = draw_batch(data, name)
    together = score(name, rows, completions, data.draw(st.sampled_from([None, 2, 8, 32])))
    alone = [score(name, [row], [tail])[0] for row, tail in zip(rows, completions, strict=True)]
    assert_same(together, alone)


@families
@given(data=st.data())
def test_cutting_and_permuting_a_batch_changes_no_row(name: str, data: st.DataObject) -> None:
    rows, completions = draw_batch(data, name)
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [
        score(name, [rows[i] for i in part], [completions[i] for i in part])
        for part in (order[:cut], order[cut:])
        if part
    ]
    whole = score(name, rows, completions)
    assert_same([row for part in parts for row in part], [whole[i] for i in order])


@families
@given(data=st.data())
def test_a_longer_neighbour_changes_no_row(name: str, data: st.DataObject) -> None:
    rows, completions = draw_batch(data, name)
    alone = score(name, rows, completions)
    longest = max(range(len(prompts(name))), key=lambda i: prompts(name)[i].num_tokens)
    assert_same(score(name, [*rows, longest], [*completions, [300] * 20])[:-1], alone)


@families
def test_padding_by_itself_changes_no_row(name: str) -> None:
    rows = range(len(prompts(name)))
    completions = [[300 + row, 310, 305] for row in rows]
    expected = score(name, rows, completions)
    for multiple in (1, 7, 64):
        assert_same(score(name, rows, completions, multiple), expected)


@families
def test_the_pad_token_changes_no_row(name: str) -> None:
    chosen = prompts(name)
    completions = [[300 + row] * (1 + row) for row in range(len(chosen))]
    first, second = (collate(chosen, completions, pad_token_id=pad) for pad in (0, 290))
    assert not first.input_ids.equal(second.input_ids)
    assert_same(logprobs(name, first), logprobs(name, second))


@families
def test_the_logprobs_are_those_of_a_distribution(name: str) -> None:
    """Over all ids as completion of one token, the probabilities sum to 1, and they differ between rows."""
    every = [[id] for id in range(len(tokenizer())) if id in sampleable(name)]
    totals = [torch.cat(score(name, [row] * len(every), every)).exp() for row in (0, 1)]
    for total in totals:
        assert 0.9 < float(total.sum()) < 1 + 1e-6, "all but the vision ids and the ids beyond the tokenizer's"
    assert (totals[0] - totals[1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", QWEN_FAMILIES)
@pytest.mark.parametrize("broken", ["pixel_values", "position_ids", "attention_mask", "image_grid_thw"])
def test_the_tolerance_tells_a_wrong_input_from_rounding(name: str, broken: str) -> None:
    chosen = [prompt for prompt in prompts(name) if prompt.images]
    batch = collate(chosen, [[300, 310, 305]] * len(chosen), pad_token_id=0)
    kwargs = dict(batch.forward_kwargs)
    mask = batch.attention_mask
    if broken == "attention_mask":
        mask = torch.ones_like(mask)
    elif broken == "position_ids":
        kwargs[broken] = (mask.cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)
    elif broken == "image_grid_thw":
        kwargs[broken] = kwargs[broken][:, [0, 2, 1]]
    else:
        kwargs[broken] = kwargs[broken].flip(0)
    wrong = replace(batch, attention_mask=mask, pieces=(Piece(rows=batch.pieces[0].rows, forward_kwargs=kwargs),))
    right, other = torch.cat(logprobs(name, batch)), torch.cat(logprobs(name, wrong))
    assert (right - other).abs().max() > 10 * TOLERANCE
