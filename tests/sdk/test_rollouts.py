"""Shares of processes, masks, and weights over processes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmroll import data
from vlmroll import rollouts as ro
from vlmroll.generators import ScriptedGenerator
from vlmroll.losses import token_weights
from vlmroll.types import Completion, FinishReason, Rollout, SamplingParams
from vlmroll_processors import Prompt, PromptTooLong

PROMPTS = [Prompt(prompt_ids=(5, i), engine_ids=(5, i)) for i in range(8)]


def encoded(prompts: Sequence[Prompt], row_ids: Sequence[int], shares: Sequence[ro.Share] = ()) -> ro.Encoded:
    rows = tuple({"prompt": row_id - 10} for row_id in row_ids)
    shares = shares or [ro.Share(group=i, count=1) for i in range(len(prompts))]
    return ro.Encoded(shares=tuple(shares), prompts=tuple(prompts), rows=rows, row_ids=tuple(row_ids))


def rollout(length: int = 2, finish: FinishReason = "stop", **more: Any) -> Rollout:
    completion = Completion(completion_ids=(7,) * length, logprobs=(-1.0,) * length, finish_reason=finish)
    return Rollout(prompt=PROMPTS[0], completion=completion, row={}, row_id=0, group=0, **more)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_shares_cover_each_group_once_and_in_order(num_prompts: int, num_generations: int, world_size: int) -> None:
    shares = [ro.share_of(num_prompts, num_generations, rank, world_size) for rank in range(world_size)]
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
        shares = ro.share_of(num_prompts, num_generations, rank, world_size)
        prompts = [PROMPTS[share.group] for share in shares]
        engine = ScriptedGenerator([[i] for i in range(100)])
        completions = ro.generate_shares(engine, prompts, SamplingParams(), shares)
        assert [len(group) for group in completions] == [share.count for share in shares]
        asked = [
            (prompt, count)
            for given_prompts, _, count in engine.requests
            for prompt in given_prompts
            for _ in range(count)
        ]
        found = ro.assemble(encoded(prompts, [share.group + 10 for share in shares], shares), completions)
        for one in found:
            owner, _ = asked[one.completion.completion_ids[0]]
            assert one.prompt is owner is PROMPTS[one.group]
            assert one.row == {"prompt": one.group}
            assert one.row_id == one.group + 10


def test_scores_are_cut_to_the_completion() -> None:
    found = ro.with_scores(
        [rollout(1), rollout(3)], old_logprobs=torch.tensor([[-1.0, 0.0, 0.0], [-2.0, -3.0, -4.0]]), ref_logprobs=None
    )
    assert [one.old_logprobs for one in found] == [(-1.0,), (-2.0, -3.0, -4.0)]
    assert {one.ref_logprobs for one in found} == {None}


def test_scores_are_added_some_rollouts_at_a_time() -> None:
    asked: list[int] = []

    def score(chunk: Sequence[Rollout]) -> dict[str, torch.Tensor | None]:
        asked.append(len(chunk))
        values = torch.tensor([[float(len(row.completion.completion_ids))] * 3 for row in chunk])
        return {"old_logprobs": values, "mismatch": -values, "entropies": None}

    found = ro.rescored([[rollout(1), rollout(3)], [rollout(2)]], score)
    assert asked == [2, 1]
    assert [row.old_logprobs for row in found] == [(1.0,), (3.0,) * 3, (2.0,) * 2]
    assert [row.mismatch for row in found] == [(-1.0,), (-3.0,) * 3, (-2.0,) * 2]
    assert {row.entropies for row in found} == {None}


def test_sequence_kl_is_the_sum_of_log_ratios() -> None:
    assert ro.sequence_kl(rollout(old_logprobs=(-1.0, -2.0), ref_logprobs=(-1.5, -4.0))) == 2.5
    assert ro.sequence_kl(rollout(old_logprobs=(-1.0, -2.0))) == 0


def test_rollouts_that_are_left_out_count_nowhere() -> None:
    kept = ro.leave_out([rollout(2), rollout(3), rollout(1)], [False, True, True])
    assert [one.loss_mask for one in kept] == [None, (0, 0, 0), (0,)]
    assert [one.num_loss_tokens for one in kept] == [2, 0, 0]


def test_the_kl_of_a_sequence_counts_what_the_loss_counts() -> None:
    scores: dict[str, Any] = {"old_logprobs": (-1.0, -2.0), "ref_logprobs": (-1.5, -4.0)}
    assert ro.sequence_kl(rollout(2, loss_mask=(1, 0), **scores)) == 0.5
    (left_out,) = ro.leave_out([rollout(2, **scores)], [True])
    assert ro.sequence_kl(left_out) == 0


class Measured:
    """An adapter that takes prompts of up to three words."""

    pad_token_id = 0
    stop_ids = vision_ids = frozenset[int]()

    def decode(self, ids: Sequence[int]) -> str:
        return str(ids)

    def encode(self, rows: Sequence[Any], row_ids: Sequence[int] | None = None) -> list[Prompt]:
        for index, row in enumerate(rows):
            if len(row["prompt"].split()) > 3:
                raise PromptTooLong(f"row {(row_ids or [])[index]}: too long")
        return [PROMPTS[len(row["prompt"].split())] for row in rows]


LONG, SHORT = {"prompt": "a b c d"}, {"prompt": "a"}
DATASET = [SHORT, LONG, LONG, {"prompt": "a b"}, LONG, SHORT, SHORT, LONG]
TOO_LONG = {1, 2, 4, 7}


def skipping(row_ids: Sequence[int], shares: Sequence[ro.Share], rows: Any = None, **options: Any) -> ro.Encoded:
    chosen = data.ChosenRows(DATASET, row_ids) if rows is None else rows
    options = {"skip": True, **options}
    return ro.encode(Measured(), chosen, row_ids, shares, **options)  # pyright: ignore[reportArgumentType]


def test_another_row_takes_the_place_of_one_that_is_too_long() -> None:
    # The rows that are not in the round are 2, 3, 6, 7, 0: the first place may have 2 and 7, the second 3 and 0.
    shares = [ro.Share(group=i, count=2) for i in range(3)]
    found = skipping([1, 5, 4], shares)
    assert found.row_ids == (5, 5, 6), "2 and 7 are too long as well, so the round's own rows come next"
    assert [row["prompt"] for row in found.rows] == ["a", "a", "a"]
    assert found.prompts == (PROMPTS[1],) * 3
    assert (found.shares, found.num_skipped) == (tuple(shares), 4)


@given(st.permutations(range(8)), st.integers(1, 4), st.integers(1, 5))
def test_all_processes_skip_alike_and_count_once(order: list[int], num_generations: int, world_size: int) -> None:
    row_ids = order[:4]
    alone = skipping(row_ids, ro.share_of(4, num_generations, 0, 1))
    assert not TOO_LONG.intersection(alone.row_ids)
    new = [row_id for row_id in alone.row_ids if row_id not in row_ids]
    assert len(set(new)) == len(new), "no two places take the same"
    total = 0
    for rank in range(world_size):
        shares = ro.share_of(4, num_generations, rank, world_size)
        found = skipping(row_ids, shares)
        assert list(found.row_ids) == [alone.row_ids[share.group] for share in shares]
        total += found.num_skipped
    assert total == alone.num_skipped


def test_in_a_stream_another_row_of_the_round_takes_the_place() -> None:
    found = skipping([10, 11, 12], [ro.Share(group=1, count=1)], rows=(SHORT, LONG, LONG))
    assert (found.row_ids, found.num_skipped) == ((10,), 2)


def test_without_a_stand_in_the_share_is_left_out() -> None:
    shares = [ro.Share(group=0, count=1), ro.Share(group=1, count=3)]
    found = skipping([10, 11], shares, rows=(LONG, SHORT), replace=False)
    assert (found.shares, found.row_ids, found.num_skipped) == ((shares[1],), (11,), 1)
    nothing = skipping([10], shares[:1], rows=(LONG,), replace=False)
    assert (nothing.shares, nothing.prompts, nothing.num_skipped) == ((), (), 1)


def test_nothing_is_skipped_when_all_rows_are_too_long_or_it_is_not_asked_for() -> None:
    shares = [ro.Share(group=0, count=1)]
    with pytest.raises(PromptTooLong, match="row 11: too long"):
        skipping([10, 11], shares, rows=(LONG, LONG))
    with pytest.raises(PromptTooLong, match="row 1: too long"):
        skipping([1], shares, skip=False)


def test_a_completion_with_a_banned_id_is_refused_by_its_row() -> None:
    one = rollout(2)
    banned = {one.completion.completion_ids[0]}
    with pytest.raises(ValueError, match="row 17: the generator sampled the id"):
        ro.assemble(encoded([one.prompt], [17]), [(one.completion,)], banned)


def test_calls_of_one_round_draw_different_random_numbers() -> None:
    generator = ScriptedGenerator([[7]])
    one = rollout(1)
    shares = [ro.Share(group=0, count=2), ro.Share(group=1, count=3)]
    ro.generate_shares(generator, [one.prompt] * 2, SamplingParams(seed=5), shares)
    seeds = [sampling.seed for _, sampling, _ in generator.requests]
    assert len(set(seeds)) == 2


def test_rewards_and_advantages_go_into_their_rollouts() -> None:
    found = ro.with_advantages([rollout(), rollout()], torch.tensor([1.0, 2.0]), torch.tensor([-0.5, 0.5]))
    assert [(one.reward, one.advantage) for one in found] == [(1.0, -0.5), (2.0, 0.5)]


def gathers(parts: Sequence[Any]) -> Callable[[list[Any]], list[Any]]:
    """What every process gets when process i gives `parts[i]`."""

    def gather(mine: list[Any]) -> list[Any]:
        assert mine[0] in parts
        return list(parts)

    return gather


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "cispo", "dr_grpo", "rloo"])
def test_weights_are_of_the_step_over_all_processes(loss_type: str) -> None:
    processes = [
        [[rollout(1), rollout(4)], [rollout(2)]],
        [[rollout(3, loss_mask=(1, 0, 1)), rollout(1, loss_mask=(0,))]],
    ]
    lengths = [[1, 4, 2], [2, 0]]
    expected = token_weights(loss_type, [1, 4, 2, 2, 0], 9)
    found: list[Rollout] = []
    for process in processes:
        batches = ro.weigh(process, loss_type=loss_type, max_completion_length=9, gather=gathers(lengths))
        assert [len(batch) for batch in batches] == [len(batch) for batch in process]
        found += [one for batch in batches for one in batch]
    assert [one.loss_weight for one in found] == expected
    alone = ro.weigh(processes[0], loss_type=loss_type, max_completion_length=9, gather=lambda values: values)
    assert alone[0][0].loss_weight > found[0].loss_weight


def test_the_highest_entropies_of_the_step_are_kept_over_all_processes() -> None:
    processes = [
        [[rollout(2, entropies=(0.1, 0.9))], [rollout(2, entropies=(0.2, 0.8))]],
        [[rollout(2, entropies=(0.7, 5.0), loss_mask=(1, 0)), rollout(1, entropies=(0.3,))]],
    ]
    values = [[0.1, 0.9, 0.2, 0.8], [0.7, 0.3]]
    masks = [
        one.entropy_mask
        for process in processes
        for batch in ro.keep_high_entropy(process, 0.5, gathers(values))
        for one in batch
    ]
    # What the loss mask leaves out has no say in the threshold, and no token of it counts anyway.
    assert masks == [(0, 1), (0, 1), (1, 1), (0,)]


def test_nothing_to_keep() -> None:
    batches = [[rollout(2, entropies=(1.0, 2.0), loss_mask=(0, 0))]]
    assert ro.keep_high_entropy(batches, 0.5, lambda values: values) == batches


@given(st.lists(st.floats(0, 8, width=32), min_size=1, max_size=30, unique=True), st.floats(0.05, 0.95))
def test_about_the_asked_share_is_kept(entropies: list[float], share: float) -> None:
    row = rollout(len(entropies), entropies=tuple(entropies))
    ((found,),) = ro.keep_high_entropy([[row]], share, lambda values: values)
    assert found.entropy_mask is not None
    assert abs(sum(found.entropy_mask) - share * len(entropies)) <= 1
    kept = [entropy for entropy, keep in zip(entropies, found.entropy_mask, strict=True) if keep]
    assert sorted(entropies)[-len(kept) :] == sorted(kept)
