"""Rewards -> advantages. Pure functions over one round's rewards; NaN marks a completion without a reward.

Shapes: N rewards in group order, G generations (N = groups x G), F reward functions. Completions without a reward
leave the statistics of their group and get advantage 0. Statistics are taken in float64, where the mean of equal
float32 rewards is that very reward: a rounding error would be divided by a standard deviation of 0 (plus EPSILON).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float

Rewards = Float[torch.Tensor, " N"]
EPSILON = 1e-4
"""Added to a standard deviation before dividing by it."""


def nan_std(values: Float[torch.Tensor, "*batch G"]) -> Float[torch.Tensor, "*batch"]:
    """Sample standard deviation (divisor n - 1) over the last axis without its NaN; 0 with fewer than two values."""
    count = (~values.isnan()).sum(-1)
    exact = values.double()
    variance = ((exact - exact.nanmean(-1, keepdim=True)) ** 2).nansum(-1) / (count - 1).clamp(min=1)
    return variance.sqrt().to(values.dtype)


def weighted_sum(rewards: Float[torch.Tensor, "N F"], weights: Sequence[float]) -> Rewards:
    """Sum over the reward functions that gave a reward; NaN where none did."""
    total = (rewards * torch.tensor(weights, dtype=rewards.dtype)).nansum(-1)
    return total.masked_fill(rewards.isnan().all(-1), float("nan"))


def group_normalised(rewards: Rewards, num_generations: int, scale: str = "group") -> Rewards:
    """GRPO: reward minus the group's mean, over a standard deviation (DeepSeekMath, arXiv:2402.03300, section 4.1).

    Args:
        rewards: siblings side by side.
        num_generations: G.
        scale: divide by the standard deviation of the "group", of the "batch", or by nothing ("none", as Dr. GRPO,
            arXiv:2503.20783, argues).

    Example:
        >>> group_normalised(torch.tensor([1.0, 0.0]), 2, scale="none").tolist()
        [0.5, -0.5]
    """
    groups = rewards.double().view(-1, num_generations)
    centred = groups - groups.nanmean(-1, keepdim=True)
    return scaled(centred.flatten(), rewards, num_generations, scale)


def scaled(advantages: Rewards, rewards: Rewards, num_generations: int, scale: str) -> Rewards:
    """Advantages over a standard deviation of rewards (see `group_normalised`); 0 where there is no reward."""
    if scale == "group":
        spread = nan_std(rewards.view(-1, num_generations)).repeat_interleave(num_generations)
        advantages = advantages / (spread + EPSILON)
    elif scale == "batch":
        advantages = advantages / (nan_std(rewards) + EPSILON)
    elif scale != "none":
        raise ValueError(f"scale must be 'group', 'batch' or 'none', got {scale!r}")
    return advantages.nan_to_num(0.0).to(rewards.dtype)


def normalise_then_sum(rewards: Float[torch.Tensor, "N F"], weights: Sequence[float], num_generations: int) -> Rewards:
    """GDPO: each reward function is normalised in its group, then summed, then normalised over the batch."""
    groups = rewards.double().view(-1, num_generations, rewards.shape[-1])
    each = (groups - groups.nanmean(1, keepdim=True)) / (nan_std(groups.movedim(1, -1))[:, None] + EPSILON)
    total = weighted_sum(each.flatten(0, 1), weights)
    return ((total - total.nanmean()) / (nan_std(total) + EPSILON)).nan_to_num(0.0).to(rewards.dtype)


def leave_one_out(rewards: Rewards, num_generations: int) -> Rewards:
    """RLOO: reward minus the mean reward of the siblings that have one (arXiv:2402.14740, equation 8).

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5]), 3).tolist()
        [0.75, -0.75, 0.0]
    """
    groups = rewards.double().view(-1, num_generations)
    siblings = (~groups.isnan()).sum(-1, keepdim=True) - 1
    baseline = (groups.nansum(-1, keepdim=True) - groups) / siblings
    return (groups - baseline).flatten().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).to(rewards.dtype)


def batch_normalised(advantages: Rewards, scorable: Bool[torch.Tensor, " N"]) -> Rewards:
    """Mean 0 and standard deviation 1 over the completions that have a reward; 0 for the others."""
    values = advantages.masked_fill(~scorable, float("nan"))
    return ((values - values.nanmean()) / (nan_std(values) + EPSILON)).nan_to_num(0.0)


def zero_variance(rewards: Rewards, num_generations: int) -> Bool[torch.Tensor, " N"]:
    """True for completions whose whole group has one and the same reward, or none: nothing can be learned there."""
    spread = nan_std(rewards.view(-1, num_generations))
    return torch.isclose(spread, torch.zeros_like(spread)).repeat_interleave(num_generations)
