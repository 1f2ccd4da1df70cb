"""What is measured of rollouts and of losses, under the names that people know from TRL.

Metrics are aggregated by what they are (`vlmroll.metrics`): a mean is weighted by what it is the mean of, a minimum is
the minimum over all steps and processes between two log lines.
"""

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from vlmroll.advantages import nan_std, zero_variance
from vlmroll.losses import Mask, PerRow, PerToken, PolicyTerm
from vlmroll.metrics import Metrics
from vlmroll.rollouts import sequence_kl
from vlmroll.types import Batch, Rollout

logger = logging.getLogger(__name__)

Bounds = tuple[float | None, float]

_LARGE_DIFFERENCE = 0.1
"""Nats a token. Rounding to bfloat16 makes about 0.02; at 0.1 a hundred tokens add up to a ratio of e or 1/e."""
_ENOUGH_TOKENS = 32
"""The mean of fewer may be that large by chance."""
_DIFFERENCE = "sampling/sampling_logp_difference"


def report_rollouts(metrics: Metrics, rollouts: Sequence[Rollout], *, kl: bool) -> None:
    """Lengths of prompts and completions, pictures, and missing rewards of this process's rollouts.

    Args:
        kl: whether to report their k1 KL to the reference.
    """
    if not rollouts:
        return
    lengths = [sum(rollout.completion.sampled) for rollout in rollouts]
    ended = [n for n, r in zip(lengths, rollouts, strict=True) if r.completion.finish_reason == "stop"]
    metrics.add_spread("completions/", [float(length) for length in lengths], "_length")
    metrics.add_spread("completions/", [float(length) for length in ended], "_terminated_length")
    metrics.add_mean("completions/clipped_ratio", 1 - len(ended) / len(lengths), len(lengths))
    metrics.add("sum", "rewards/num_unscored", float(sum(math.isnan(rollout.reward) for rollout in rollouts)))
    if kl and rollouts[0].ref_logprobs is not None:
        metrics.add_mean("kl", sum(map(sequence_kl, rollouts)) / sum(lengths), sum(lengths))
    prompts = {id(rollout.prompt): rollout.prompt for rollout in rollouts}.values()
    metrics.add_spread("prompts/", [float(prompt.num_tokens) for prompt in prompts], "_length")
    shown = sum(len(prompt.images) + len(prompt.videos) for prompt in prompts)
    metrics.add_mean("images/mean_count", shown / len(prompts), len(prompts))
    tokens = sum(prompt.num_tokens for prompt in prompts)
    metrics.add_mean("images/token_share", sum(p.num_image_tokens for p in prompts) / tokens, tokens)
    report_tools(metrics, rollouts)


def report_tools(metrics: Metrics, rollouts: Sequence[Rollout]) -> None:
    """Tool calls of this process's rollouts, where they have turns."""
    turns = [rollout.completion.turns for rollout in rollouts if rollout.completion.turns is not None]
    if not turns:
        return
    calls = sum(its.num_calls for its in turns)
    metrics.add_mean("tools/call_frequency", calls / len(turns), len(turns))
    if calls:
        metrics.add_mean("tools/failure_frequency", sum(its.num_failed for its in turns) / calls, calls)
        metrics.add_mean("tools/timeout_frequency", sum(its.num_timed_out for its in turns) / calls, calls)
    dropped = sum(its.num_rolled_back for its in turns)
    metrics.add("sum", "tools/num_rolled_back", float(dropped))
    if dropped > calls / 2 and metrics.first_time("rolled back"):
        logger.warning(
            "the results of %d of %d tool calls did not fit into max_completion_length, which ended their completions; "
            "raise it, or lower max_pixels where tools return pictures",
            dropped,
            calls,
        )
    added = [len(prompt.images) for rollout in rollouts for prompt in rollout.shown[1:]]
    metrics.add_mean("tools/mean_images", sum(added) / len(turns), len(turns))
    tokens = sum(len(its.sampled) for its in turns)
    metrics.add_mean("tools/token_share", 1 - sum(sum(its.sampled) for its in turns) / tokens, tokens)


def report_rewards(
    metrics: Metrics, names: Sequence[str], each: torch.Tensor, total: torch.Tensor, num_generations: int
) -> None:
    """Mean and standard deviation of each reward function [N, F] and of their weighted sum [N], over all processes."""
    for i, name in enumerate(names):
        metrics.add_mean(f"rewards/{name}/mean", float(each[:, i].nanmean()))
        metrics.add_mean(f"rewards/{name}/std", float(nan_std(each[:, i])))
    metrics.add_mean("reward", float(total.nanmean()))
    metrics.add_mean("reward_std", float(nan_std(total)))
    metrics.add_mean("frac_reward_zero_std", float(zero_variance(total, num_generations).float().mean()))


def report_loss(
    metrics: Metrics, term: PolicyTerm, batch: Batch, bounds: Bounds, extras: Mapping[str, torch.Tensor]
) -> None:
    """Clipping of the ratio, and per-token extras such as entropy and KL, of one micro-batch.

    Args:
        bounds: the ratio is clipped below the first and above the second; without a first it is CISPO's, which only
            has an upper bound and a metric name of its own.
        extras: [B, C] values by metric name.
    """
    mask = batch.loss_mask if term.ratio.shape[1] > 1 else batch.loss_mask.any(1, keepdim=True).long()
    count = float(mask.sum())
    advantages = batch.advantages[:, None]
    low = ((term.ratio < (bounds[0] or 0.0)) & (advantages < 0)).float() * mask
    high = ((term.ratio > bounds[1]) & (advantages > 0)).float() * mask
    counted = mask.any(1)
    if count and bounds[0] is None:
        metrics.add_mean("cispo_clip_ratio", float(high.sum()) / count, count)
    elif count:
        metrics.add_mean("clip_ratio/low_mean", float(low.sum()) / count, count)
        metrics.add_mean("clip_ratio/high_mean", float(high.sum()) / count, count)
        metrics.add_mean("clip_ratio/region_mean", float((low + high).sum()) / count, count)
        lengths = mask[counted].sum(-1)
        metrics.add("min", "clip_ratio/low_min", float((low[counted].sum(-1) / lengths).min()))
        metrics.add("max", "clip_ratio/high_max", float((high[counted].sum(-1) / lengths).max()))
    tokens = float(batch.loss_mask.sum())
    for name, values in extras.items():
        if tokens:
            metrics.add_mean(name, float((values.detach() * batch.loss_mask).sum()) / tokens, tokens)
    positions = batch.inputs.num_positions
    metrics.add_mean("batch/pad_frac", 1 - batch.inputs.num_tokens / positions, positions)


def report_mismatch(
    metrics: Metrics, rollouts: Sequence[Rollout], mask: Mask, gap: PerToken, weights: PerRow | PerToken
) -> None:
    """How far an engine's log-probabilities are from the policy's, also by number of pictures, in one micro-batch.

    Args:
        mask: [B, C] 1 where a token counts in the loss.
        gap: see `mismatch.difference`.
        weights: see `mismatch.importance_weights`.
    """
    counted = mask.bool().cpu()
    known, sizes = counted & ~gap.isnan().cpu(), gap.abs().double().cpu()
    names = ("text_only", "one_image", "many_images")
    shown = [sum(len(prompt.images) + len(prompt.videos) for prompt in rollout.shown) for rollout in rollouts]
    numbers = torch.tensor([min(2, number) for number in shown])
    parts = {_DIFFERENCE: known}
    parts |= {f"{_DIFFERENCE}/{name}": known & (numbers == i)[:, None] for i, name in enumerate(names)}
    for name, part in parts.items():
        if len(values := sizes[part]):
            metrics.add_mean(f"{name}/mean", float(values.mean()), len(values))
            metrics.add("max", f"{name}/max", float(values.max()))
    kept = counted if weights.shape == counted.shape else counted.any(1, keepdim=True)
    metrics.add_spread("sampling/importance_sampling_ratio/", weights.cpu()[kept].tolist())
    if known.any():
        _warn_of_mismatch(metrics)


def _warn_of_mismatch(metrics: Metrics) -> None:
    mean, tokens = metrics.mean_so_far(f"{_DIFFERENCE}/mean")
    if mean > _LARGE_DIFFERENCE and tokens >= _ENOUGH_TOKENS and metrics.first_time("mismatch"):
        logger.warning(
            "log-probabilities of the engine and of the policy differ by %.2g a token, rounding explains about 0.02: "
            "give the engine the policy's dtype, and look for what else differs with `vlmroll check`",
            mean,
        )
