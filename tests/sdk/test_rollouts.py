"""Shares of processes, masks, and weights over processes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmroll import rollouts as ro
from vlmroll.losses import token_weights
from vlmroll.types import Completion, FinishReason, Rollout
from vlmroll_processors import Prompt

PROMPTS = [Prompt(prompt_ids=(5, i), engine_ids=(5, i)) for i in range(8)]


def rollout(length: int = 2, finish: FinishReason = "stop", **more: Any) -> Rollout:
    completion = Completion(completion_ids=(7,) * length, logprobs=(-1.0,) * length, finish_reason=finish)
    return Rollout(prompt=PROMPTS[0], completion=completion, row={}, row_id=0, group=0, **more)


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
