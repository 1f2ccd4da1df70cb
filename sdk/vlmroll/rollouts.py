"""Rollouts of one round: scores, masks, rewards to advantages, and the weight of each token.

All of it works on lists of `Rollout` and on plain numbers gathered from all processes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vlmroll.losses import token_weights
from vlmroll.types import Rollout

_MOST_FOR_QUANTILE = 2**24
"""torch.quantile takes no more values."""

Gather = Callable[[list[Any]], list[Any]]


def with_scores(rollouts: Sequence[Rollout], **scores: torch.Tensor | None) -> list[Rollout]:
    """The rollouts with scores [B, C] by field name, each cut to its completion's length."""
    given = {name: values.tolist() for name, values in scores.items() if values is not None}
    lengths = [len(rollout.completion.completion_ids) for rollout in rollouts]
    return [
        replace(rollout, **{name: tuple(rows[i][:length]) for name, rows in given.items()})
        for i, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True))
    ]


def rescored(
    pieces: Sequence[Sequence[Rollout]], score: Callable[[Sequence[Rollout]], Mapping[str, torch.Tensor | None]]
) -> list[Rollout]:
    """The rollouts of all pieces with the scores that `score` gives of a piece; see `with_scores`."""
    return [rollout for piece in pieces for rollout in with_scores(piece, **score(piece))]


def sequence_kl(rollout: Rollout) -> float:
    """The log ratio of policy and reference (k1), summed over counted tokens; 0 without a reference."""
    if rollout.old_logprobs is None or rollout.ref_logprobs is None:
        return 0.0
    scores = zip(rollout.old_logprobs, rollout.ref_logprobs, rollout.counted, strict=True)
    return sum(old - ref for old, ref, counts in scores if counts)


def with_advantages(rollouts: Sequence[Rollout], rewards: torch.Tensor, advantages: torch.Tensor) -> list[Rollout]:
    """The rollouts with their reward and advantage, both [number of rollouts]."""
    return [
        replace(rollout, reward=reward, advantage=advantage)
        for rollout, reward, advantage in zip(rollouts, rewards.tolist(), advantages.tolist(), strict=True)
    ]


def leave_out(rollouts: Sequence[Rollout], which: Sequence[bool]) -> list[Rollout]:
    """Take the rollouts that `which` marks out of the loss and of its normaliser."""
    return [
        replace(rollout, loss_mask=(0,) * len(rollout.completion.completion_ids)) if out else rollout
        for rollout, out in zip(rollouts, which, strict=True)
    ]


def weigh(
    micro_batches: Sequence[Sequence[Rollout]], *, loss_type: str, max_completion_length: int, gather: Gather
) -> list[list[Rollout]]:
    """Give every rollout of an optimizer step its share in the step's loss, over all processes."""
    mine = [rollout.num_loss_tokens for batch in micro_batches for rollout in batch]
    everyone: list[list[int]] = gather([mine])
    lengths = [length for part in everyone for length in part]
    by_length = dict(zip(lengths, token_weights(loss_type, lengths, max_completion_length), strict=True))
    return [[replace(r, loss_weight=by_length[r.num_loss_tokens]) for r in batch] for batch in micro_batches]


def keep_high_entropy(
    micro_batches: Sequence[Sequence[Rollout]], quantile: float, gather: Gather
) -> list[list[Rollout]]:
    """Keep the policy term on the share `quantile` of the step's tokens with the highest entropy (arXiv:2506.01939)."""
    mine = [
        entropy
        for batch in micro_batches
        for rollout in batch
        for entropy, counts in zip(rollout.entropies or (), rollout.counted, strict=True)
        if counts
    ]
    everyone: list[list[float]] = gather([mine])
    values = torch.tensor([entropy for part in everyone for entropy in part])
    if not len(values):
        return [list(batch) for batch in micro_batches]
    if len(values) < _MOST_FOR_QUANTILE:
        threshold = float(values.quantile(1 - quantile))
    else:
        threshold = float(values.sort().values[math.ceil((1 - quantile) * (len(values) - 1))])
    return [
        [replace(r, entropy_mask=tuple(int(entropy >= threshold) for entropy in r.entropies or ())) for r in batch]
        for batch in micro_batches
    ]
