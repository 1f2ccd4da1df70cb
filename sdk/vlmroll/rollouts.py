"""Rollouts of one round: which part is this process's, masks, rewards to advantages, and the weight of each token.

All of it works on lists of `Rollout` and on plain numbers gathered from all processes.
"""

import logging
import math
from collections.abc import Callable, Container, Mapping, Sequence
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
    """The prompts of some shares, with the rows that they come from; each has one entry for each share.

    Attributes:
        num_skipped: rows that were left out because their prompts were too long.
    """

    shares: tuple[Share, ...]
    prompts: tuple[Prompt, ...]
    rows: tuple[Row, ...]
    row_ids: tuple[int, ...]
    num_skipped: int = 0


def encode(
    adapter: ProcessorAdapter,
    rows: Sequence[Row],
    row_ids: Sequence[int],
    shares: Sequence[Share],
    *,
    skip: bool = False,
    replace: bool = True,
) -> Encoded:
    """Encode the rows of a round that belong to some shares.

    Args:
        skip: leave out rows whose prompts are too long.
        replace: put another row in the place of one that is left out (`data.stand_ins`, the same in all processes);
            else its share is left out.

    Raises:
        PromptTooLong: a prompt is too long, and it is not to be skipped, or there is no other row that fits.
    """
    places = [share.group for share in shares]
    if not skip:
        chosen = [rows[place] for place in places]
        prompts = adapter.encode(chosen, [row_ids[place] for place in places])
        ids = tuple(row_ids[place] for place in places)
        return Encoded(shares=tuple(shares), prompts=tuple(prompts), rows=tuple(chosen), row_ids=ids)
    found: list[tuple[Share, Prompt, Row, int]] = []
    skipped = 0
    for share in shares:
        others = data.stand_ins(rows, row_ids, share.group) if replace else iter(())
        row_id, row = row_ids[share.group], rows[share.group]
        while True:
            try:
                (prompt,) = adapter.encode([row], [row_id])
                found.append((share, prompt, row, row_id))
                break
            except PromptTooLong as error:
                skipped += share.first
                logger.warning("skipped: %s", error)
                other = next(others, None)
                if other is None and replace:
                    raise
            if other is None:
                break
            row_id, row = other
    columns = list(zip(*found, strict=True)) or [(), (), (), ()]
    return Encoded(shares=columns[0], prompts=columns[1], rows=columns[2], row_ids=columns[3], num_skipped=skipped)


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
    generator: Generator,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    shares: Sequence[Share],
    gather: Gather = list,
) -> list[tuple[Completion, ...]]:
    """The completions of each share; prompts that need as many completions go to the generator together.

    Args:
        gather: list -> the concatenated lists of all processes, for generators that all of them have to call together.
    """
    completions: list[tuple[Completion, ...]] = [()] * len(shares)
    counts = [share.count for share in shares]
    for count in sorted(set(gather(counts) if getattr(generator, "collective", False) else counts)):
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
    encoded: Encoded, completions: Sequence[tuple[Completion, ...]], banned_ids: Container[int] = ()
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
            encoded.shares, encoded.prompts, completions, encoded.rows, encoded.row_ids, strict=True
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
