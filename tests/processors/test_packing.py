"""Packed rows: every token of every prompt and completion once, with the positions that the padded row gives it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training_runs import FAMILIES, prompts
from vlmroll_processors import PackedBatch, Prompt, collate, pack

Case = tuple[list[int], list[list[int]]]


def text(length: int) -> Prompt:
    ids = tuple(range(100, 100 + length))
    return Prompt(prompt_ids=ids, engine_ids=ids)


def tokens(batch: PackedBatch) -> torch.Tensor:
    return torch.cat([piece.input_ids[0] for piece in batch.pieces])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Which prompt each row has, and its completion."""
    owners = draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
    return owners, [draw(st.lists(st.integers(1, 50), min_size=1, max_size=5)) for _ in owners]


@given(cases(), st.sampled_from([None, 1, 8]))
def test_every_token_is_predicted_from_the_one_before_it(case: Case, multiple: int | None) -> None:
    owners, completions = case
    prompts = [text(n + 1) for n in range(4)]
    batch = pack([prompts[i] for i in owners], completions, pad_token_id=0, pad_to_multiple_of=multiple)
    ids = tokens(batch)
    before = [i for owner, c in zip(owners, completions, strict=True) for i in (prompts[owner].prompt_ids[-1], *c[:-1])]
    assert ids[batch.predictors].tolist() == before
    assert batch.completion_ids[batch.completion_mask.bool()].tolist() == [i for c in completions for i in c]
    used = set(owners)
    assert batch.num_tokens == sum(prompts[i].num_tokens for i in used) + sum(len(c) - 1 for c in completions)
    assert batch.num_positions == ids.numel() == -(-batch.num_tokens // (multiple or 1)) * (multiple or 1)
    assert ids[batch.num_tokens :].tolist() == [0] * (ids.numel() - batch.num_tokens)


def layout(batch: PackedBatch) -> list[list[int]]:
    return [piece.layout.flatten().tolist() for piece in batch.pieces]


def test_the_layout_gives_lengths_of_prompts_and_completions() -> None:
    one, other = text(3), text(2)
    batch = pack([one, other, one], [[7, 8, 9], [7], [8, 9]], pad_token_id=0, pad_to_multiple_of=16)
    assert layout(batch) == [[3, 2, 2, 1, 2, 1, 0, 8, 0]]
    assert batch.pieces[0].prompts == (one, other)
    assert batch.pieces[0].forward_kwargs["position_ids"][0, :8].tolist() == [0, 1, 2, 3, 4, 3, 0, 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_has_the_inputs_that_it_has_in_a_padded_row(name: str) -> None:
    """Per-token kwargs against `collate`, row by row; pixels of a prompt are there once."""
    owners = [prompt for prompt in prompts(name) for _ in range(2)]
    completions: list[Sequence[int]] = [[40 + i] * (1 + i % 3) for i in range(len(owners))]
    batch = pack(owners, completions, pad_token_id=0)
    start = 0
    firsts: dict[int, int] = {}
    for piece in batch.pieces:
        alone = collate(piece.prompts, pad_token_id=0).pieces
        for prompt in piece.prompts:
            members = [i for i, other in enumerate(owners) if other is prompt]
            firsts[id(prompt)], at = start, start + prompt.num_tokens
            for i in members:
                (padded,) = collate([prompt], [completions[i]], pad_token_id=0).pieces
                end = at + len(completions[i]) - 1
                places = [*range(start, start + prompt.num_tokens), *range(at, end)]
                compare(piece.forward_kwargs, padded.forward_kwargs, prompt, places, offset=offset(batch, piece))
                at = end
            start = at
        names = {name for part in alone for name in part.forward_kwargs}
        assert piece.forward_kwargs.keys() == names
    assert firsts.keys() == {id(prompt) for prompt in owners}


def offset(batch: PackedBatch, piece: Any) -> int:
    """Tokens of the pieces before."""
    place = next(i for i, other in enumerate(batch.pieces) if other is piece)
    return sum(other.input_ids.numel() for other in batch.pieces[:place])


def compare(packed: Any, padded: Any, prompt: Prompt, places: Sequence[int], offset: int) -> None:
    for name, tensor in padded.items():
        rule = prompt.join.get(name)
        if rule is not None and rule.kind.value != "tokens":
            continue
        axis = 1 if rule is None else rule.token_axis + 1
        expected = tensor.narrow(axis, 0, len(places))
        found = packed[name].index_select(axis, torch.tensor(places) - offset)
        assert torch.equal(found, expected), name


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="a completion for each prompt"):
        pack([text(2)], [[]], pad_token_id=0)
    with pytest.raises(ValueError, match="a completion for each prompt, got 1 and 2"):
        pack([text(2)], [[1], [2]], pad_token_id=0)
