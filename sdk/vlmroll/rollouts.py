"""Rollouts of one round: which part is this process's, masks, rewards to advantages, and the weight of each token.

All of it works on lists of `Rollout` and on plain numbers gathered from all processes.
"""

import logging
import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlmroll import data
from vlmroll.generators.base import Generator
from vlmroll.losses import token_weights
from vlmroll.types import Completion, Rollout, SamplingParams
from vlmroll_processors import ProcessorAdapter, Prompt, PromptTooLong
from vlmroll_processors.types import Row

logger = logging.getLogger(__name__)

_MOST_FOR_QUANTILE = 2**24
"""torch.quantile takes no more values."""

Gather = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one process generates of one prompt: `count` completions for the round's prompt number `group`.

    `first` says whether the first completion of the group is among them.
    """

    group: int
    count: int
    first: bool = True


def share_of(num_prompts: int, num_generations: int, rank: int, world_size: int) -> list[Share]:
    """Cut a round into equal runs of completions, one for each process; a group may lie on two processes.

    Example:
        >>> [(share.group, share.count) for share in share_of(2, 4, rank=0, world_size=2)]
        [(0, 4)]
    """
    total = num_prompts * num_generations
    size = -(-total // world_size)
    first, last = min(rank * size, total), min((rank + 1) * size, total)
    shares: list[Share] = []
    for group in range(num_prompts):
        start, end = group * num_generations, (group + 1) * num_generations
        if (count := min(end, last) - max(start, first)) > 0:
            shares.append(Share(group=group, count=count, first=first <= start))
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The prompts of some shares, with the rows that they come from.

    Attributes:
        num_skipped: rows that were too long, and in whose place the next ones are.
    """

    prompts: tuple[Prompt, ...]
    rows: tuple[Row, ...]
    row_ids: tuple[int, ...]
    num_skipped: int


def encode(
    adapter: ProcessorAdapter, rows: Sequence[Row], row_ids: Sequence[int], shares: Sequence[Share], *, skip: bool
) -> Encoded:
    """Encode the rows of a round that belong to some shares.

    Args:
        skip: put the row that comes next in the dataset (in a stream: in the round) in the place of one whose prompt
            is too long. All processes find the same one.

    Raises:
        PromptTooLong: a prompt is too long, and it is not to be skipped, or all rows are.
    """
    found = [(row_ids[share.group], rows[share.group]) for share in shares]
    next_rows: dict[int, Iterator[tuple[int, Row]]] = {}
    skipped = 0
    while True:
        try:
            prompts = adapter.encode([row for _, row in found], [row_id for row_id, _ in found])
        except PromptTooLong as error:
            share = shares[error.index]
            following = next_rows.setdefault(share.group, data.rows_after(rows, row_ids, share.group))
            replacement = next(following, None) if skip else None
            if replacement is None:
                raise
            logger.warning("%s; skipped, and row %d takes its place", error, replacement[0])
            found[error.index] = replacement
            skipped += share.first
            continue
        ids, kept = tuple(row_id for row_id, _ in found), tuple(row for _, row in found)
        return Encoded(prompts=tuple(prompts), rows=kept, row_ids=ids, num_skipped=skipped)


def check_lengths(encoded: Encoded, max_new: int, context: int | None) -> None:
    """Refuse prompts that leave no room for the longest completion in the model's context.

    Args:
        max_new: `max_completion_length`.
        context: positions that the model has; None for models without a limit.

    Raises:
        ValueError: names the row.
    """
    for prompt, row_id in zip(encoded.prompts, encoded.row_ids, strict=True):
        if context is not None and prompt.num_tokens + max_new > context:
            raise ValueError(
                f"row {row_id}: its prompt has {prompt.num_tokens} tokens ({prompt.num_image_tokens} of pictures), and "
                f"with max_completion_length={max_new} that is more than the model's {context} positions; shorten the "
                "row, lower max_pixels or max_completion_length, or leave the row out"
            )


def generate_shares(
    generator: Generator, prompts: Sequence[Prompt], sampling: SamplingParams, shares: Sequence[Share]
) -> list[tuple[Completion, ...]]:
    """The completions of each share; prompts that need as many completions go to the generator together."""
    completions: list[tuple[Completion, ...]] = [()] * len(shares)
    for count in sorted({share.count for share in shares}):
        chosen = [i for i, share in enumerate(shares) if share.count == count]
        # Calls of one round must not draw the same random numbers.
        seed = None if sampling.seed is None else sampling.seed + count
        output = generator.generate([prompts[i] for i in chosen], replace(sampling, seed=seed), count)
        for i, group in zip(chosen, output.completions, strict=True):
            if len(group) != count:
                raise ValueError(
                    f"the generator returned {len(group)} completions for a prompt where {count} were asked for; "
                    "`generate` must return `num_generations` for each"
                )
            completions[i] = group
    return completions


def assemble(
    shares: Sequence[Share],
    encoded: Encoded,
    completions: Sequence[tuple[Completion, ...]],
    banned_ids: Container[int] = (),
) -> list[Rollout]:
    """One rollout for each completion, siblings side by side.

    Raises:
        ValueError: a completion holds an id that must not be sampled.
    """
    for group, row_id in zip(completions, encoded.row_ids, strict=True):
        if found := [i for completion in group for i in completion.completion_ids if i in banned_ids]:
            raise ValueError(
                f"row {row_id}: the generator sampled the id {found[0]}, which stands for a picture or is banned; it "
                "must forbid the adapter's vision_ids"
            )
    return [
        Rollout(prompt=prompt, completion=completion, row=row, row_id=row_id, group=share.group)
        for share, prompt, group, row, row_id in zip(
            shares, encoded.prompts, completions, encoded.rows, encoded.row_ids, strict=True
        )
        for completion in group
    ]


def with_scores(rollouts: Sequence[Rollout], **scores: torch.Tensor | None) -> list[Rollout]:
    """The rollouts with scores [B, C] by field name, each cut to its completion's length."""
    given = {name: values.tolist() for name, values in scores.items() if values is not None}
    lengths = [len(rollout.completion.completion_ids) for rollout in rollouts]
    return [
        replace(rollout, **{name: tuple(rows[i][:length]) for name, rows in given.items()})
        for i, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True))
    ]


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
