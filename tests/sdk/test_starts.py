"""What a process opens of a round: its shares, rows in the place of others, and what is sampled for them."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmroll import data, episodes
from vlmroll import starts as so
from vlmroll.generators import ScriptedGenerator
from vlmroll.types import Completion, SamplingParams
from vlmroll_processors import Prompt, PromptTooLong

PROMPTS = [Prompt(prompt_ids=(5, i), engine_ids=(5, i)) for i in range(8)]


def opened(prompts: Sequence[Prompt], row_ids: Sequence[int], shares: Sequence[so.Share] = ()) -> so.Opened:
    rows = tuple({"prompt": row_id - 10} for row_id in row_ids)
    shares = shares or [so.Share(group=i, count=1) for i in range(len(prompts))]
    starts = tuple(
        tuple(so.Start(prompt=prompt) for _ in range(share.count))
        for prompt, share in zip(prompts, shares, strict=True)
    )
    return so.Opened(shares=tuple(shares), starts=starts, rows=rows, row_ids=tuple(row_ids))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_shares_cover_each_group_once_and_in_order(num_prompts: int, num_generations: int, world_size: int) -> None:
    shares = [so.share_of(num_prompts, num_generations, rank, world_size) for rank in range(world_size)]
    owners = [share.group for part in shares for share in part for _ in range(share.count)]
    assert owners == [group for group in range(num_prompts) for _ in range(num_generations)]
    sizes = [sum(share.count for share in part) for part in shares]
    assert max(sizes) == -(-num_prompts * num_generations // world_size)
    if num_prompts * num_generations % world_size == 0:
        assert len(set(sizes)) == 1


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
def test_shares_are_generated_in_their_own_order(num_prompts: int, num_generations: int, world_size: int) -> None:
    """Each rollout has a completion of its own share's prompt, though prompts go to the generator by their counts."""
    for rank in range(world_size):
        shares = so.share_of(num_prompts, num_generations, rank, world_size)
        prompts = [PROMPTS[share.group] for share in shares]
        engine = ScriptedGenerator([[i] for i in range(100)])
        found = opened(prompts, [share.group + 10 for share in shares], shares)
        completions = episodes.generate_shares(found, episodes.sample_from(engine), SamplingParams())
        assert [len(group) for group in completions] == [share.count for share in shares]
        asked = [
            (prompt, count)
            for given_prompts, _, count in engine.requests
            for prompt in given_prompts
            for _ in range(count)
        ]
        for one in episodes.assemble(found, completions):
            owner, _ = asked[one.completion.completion_ids[0]]
            assert one.prompt is owner is PROMPTS[one.group]
            assert one.row == {"prompt": one.group}
            assert one.row_id == one.group + 10


class Measured:
    """An adapter that takes prompts of up to three words."""

    pad_token_id = 0
    stop_ids = vision_ids = frozenset[int]()

    def decode(self, ids: Sequence[int]) -> str:
        return str(ids)

    def next_turn(self, *given: Any, **options: Any) -> Prompt:
        raise NotImplementedError

    def encode(self, rows: Sequence[Any], row_ids: Sequence[int] | None = None) -> list[Prompt]:
        for index, row in enumerate(rows):
            if len(row["prompt"].split()) > 3:
                raise PromptTooLong(f"row {(row_ids or [])[index]}: too long")
        return [PROMPTS[len(row["prompt"].split())] for row in rows]


LONG, SHORT = {"prompt": "a b c d"}, {"prompt": "a"}


DATASET = [SHORT, LONG, LONG, {"prompt": "a b"}, LONG, SHORT, SHORT, LONG]


TOO_LONG = {1, 2, 4, 7}


def skipping(row_ids: Sequence[int], shares: Sequence[so.Share], rows: Any = None, **options: Any) -> so.Opened:
    chosen = data.ChosenRows(DATASET, row_ids) if rows is None else rows
    options = {"skip": True, **options}
    return so.open_shares(so.Opener(Measured()), chosen, row_ids, shares, **options)  # pyright: ignore[reportArgumentType]


def test_another_row_takes_the_place_of_one_that_is_too_long() -> None:
    # The rows that are not in the round are 2, 3, 6, 7, 0: the first place may have 2 and 7, the second 3 and 0.
    shares = [so.Share(group=i, count=2) for i in range(3)]
    found = skipping([1, 5, 4], shares)
    assert found.row_ids == (5, 5, 6), "2 and 7 are too long as well, so the round's own rows come next"
    assert [row["prompt"] for row in found.rows] == ["a", "a", "a"]
    assert {start.prompt for starts in found.starts for start in starts} == {PROMPTS[1]}
    assert (found.shares, found.num_skipped) == (tuple(shares), 4)


@given(st.permutations(range(8)), st.integers(1, 4), st.integers(1, 5))
def test_all_processes_skip_alike_and_count_once(order: list[int], num_generations: int, world_size: int) -> None:
    row_ids = order[:4]
    alone = skipping(row_ids, so.share_of(4, num_generations, 0, 1))
    assert not TOO_LONG.intersection(alone.row_ids)
    new = [row_id for row_id in alone.row_ids if row_id not in row_ids]
    assert len(set(new)) == len(new), "no two places take the same"
    total = 0
    for rank in range(world_size):
        shares = so.share_of(4, num_generations, rank, world_size)
        found = skipping(row_ids, shares)
        assert list(found.row_ids) == [alone.row_ids[share.group] for share in shares]
        total += found.num_skipped
    assert total == alone.num_skipped


def test_in_a_stream_another_row_of_the_round_takes_the_place() -> None:
    found = skipping([10, 11, 12], [so.Share(group=1, count=1)], rows=(SHORT, LONG, LONG))
    assert (found.row_ids, found.num_skipped) == ((10,), 2)


def test_without_a_stand_in_the_share_is_left_out() -> None:
    shares = [so.Share(group=0, count=1), so.Share(group=1, count=3)]
    found = skipping([10, 11], shares, rows=(LONG, SHORT), replace=False)
    assert (found.shares, found.row_ids, found.num_skipped) == ((shares[1],), (11,), 1)
    nothing = skipping([10], shares[:1], rows=(LONG,), replace=False)
    assert (nothing.shares, nothing.starts, nothing.num_skipped) == ((), (), 1)


def test_nothing_is_skipped_when_all_rows_are_too_long_or_it_is_not_asked_for() -> None:
    shares = [so.Share(group=0, count=1)]
    with pytest.raises(PromptTooLong, match="row 11: too long"):
        skipping([10, 11], shares, rows=(LONG, LONG))
    with pytest.raises(PromptTooLong, match="row 1: too long"):
        skipping([1], shares, skip=False)


def test_a_completion_with_a_banned_id_is_refused_by_its_row() -> None:
    completion = Completion(completion_ids=(7, 7), logprobs=(-1.0,) * 2, finish_reason="stop")
    with pytest.raises(ValueError, match="row 17: the generator sampled the id"):
        episodes.assemble(opened(PROMPTS[:1], [17]), [(completion,)], {7})


def test_calls_of_one_round_draw_different_random_numbers() -> None:
    generator = ScriptedGenerator([[7]])
    shares = [so.Share(group=0, count=2), so.Share(group=1, count=3)]
    found = opened(PROMPTS[:2], [0, 1], shares)
    episodes.generate_shares(found, episodes.sample_from(generator), SamplingParams(seed=5))
    seeds = [sampling.seed for _, sampling, _ in generator.requests]
    assert len(set(seeds)) == 2
