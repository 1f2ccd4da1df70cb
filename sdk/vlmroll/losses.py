"""The objectives, as pure functions of log-probabilities, and the weight of each token in a step's loss.

Shapes: B rows, C longest completion. An objective returns its loss for each token, [B, C], or for each row, [B, 1]; the
step's loss is `(loss * mask * weights[:, None]).sum()` over all of its rows, so how the rows are cut into micro-batches
never changes the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

PerToken = Float[torch.Tensor, "B C"]
PerRow = Float[torch.Tensor, "B 1"]  # stands first in unions: a check takes the first that fits, and C fits 1
Mask = Int[torch.Tensor, "B C"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTerm:
    """An objective's loss with the ratio that it used, for metrics.

    Attributes:
        loss: [B, C] or [B, 1].
        ratio: probability ratio to the old policy, [B, C] or [B, 1].
    """

    loss: PerRow | PerToken
    ratio: PerRow | PerToken


def importance_ratio(logprobs: PerToken, old_logprobs: PerToken, mask: Mask, level: str = "token") -> PerRow | PerToken:
    """Probability ratio of the current policy to the old one.

    Args:
        level: "token"; "sequence" for the length-normalised ratio of GSPO (arXiv:2507.18071, equation 7); "sum" for
            the plain ratio of whole sequences, as RLOO has it (arXiv:2402.14740).
    """
    log_ratio = logprobs - old_logprobs
    if level == "token":
        return log_ratio.exp()
    total = (log_ratio * mask).sum(-1, keepdim=True)
    if level == "sequence":
        return (total / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
    if level == "sum":
        return total.exp()
    raise ValueError(f"level must be 'token', 'sequence' or 'sum', got {level!r}")


def clipped_surrogate(
    ratio: PerRow | PerToken,
    advantages: Float[torch.Tensor, " B"],
    *,
    epsilon: float,
    epsilon_high: float,
    delta: float | None = None,
) -> PolicyTerm:
    """PPO's clipped objective, negated (arXiv:1707.06347, equation 7), with DAPO's separate bounds (arXiv:2503.14476).

    Args:
        ratio: see `importance_ratio`.
        advantages: one for each row.
        epsilon, epsilon_high: the ratio is clipped to [1 - epsilon, 1 + epsilon_high].
        delta: upper bound of the unclipped ratio too, for negative advantages (INTELLECT-2, arXiv:2505.07291).

    Example:
        >>> term = clipped_surrogate(torch.tensor([[2.0]]), torch.tensor([1.0]), epsilon=0.2, epsilon_high=0.2)
        >>> round(term.loss.item(), 4)
        -1.2
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    scale = advantages[:, None]
    return PolicyTerm(loss=-torch.minimum(bounded * scale, clipped * scale), ratio=ratio)


def cispo(
    ratio: PerRow | PerToken, advantages: Float[torch.Tensor, " B"], logprobs: PerToken, *, epsilon_high: float
) -> PolicyTerm:
    """CISPO: the clipped ratio weighs the log-likelihood and carries no gradient (MiniMax-M1, arXiv:2506.13585).

    `epsilon_high` is the bound of the ratio itself, not of its distance from 1.
    """
    weight = ratio.clamp(max=epsilon_high).detach()
    return PolicyTerm(loss=-weight * advantages[:, None] * logprobs, ratio=ratio)


def k3_kl(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """Per-token estimate of KL(policy || reference), never negative (Schulman, "Approximating KL divergence", k3)."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


def k1_kl(logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    """Per-token log ratio, an unbiased estimate of KL(policy || reference) on sampled tokens (k1)."""
    return logprobs - ref_logprobs


def token_weights(loss_type: str, lengths: Sequence[int], max_completion_length: int) -> list[float]:
    """The share of each counted token of each row in the step's loss.

    Args:
        loss_type: "grpo" and "rloo": mean over sequences of the mean over tokens (DeepSeekMath). "dapo", "bnpo" and
            "cispo": mean over all tokens of the step; `bnpo` differs from `dapo` only in tools that normalise each
            micro-batch by itself, which would let the micro-batch size change the gradient. "dr_grpo": a constant,
            sequences x `max_completion_length`.
        lengths: counted tokens of every row of the optimizer step, over all processes; rows with 0 count nowhere.
        max_completion_length: see "dr_grpo".

    Example:
        >>> token_weights("dapo", [1, 3], max_completion_length=8)
        [0.25, 0.25]
    """
    rows = sum(length > 0 for length in lengths)
    if rows == 0:
        return [0.0] * len(lengths)
    if loss_type in ("grpo", "rloo"):
        return [1 / (rows * length) if length else 0.0 for length in lengths]
    if loss_type in ("dapo", "bnpo", "cispo"):
        return [1 / sum(lengths)] * len(lengths)
    if loss_type == "dr_grpo":
        return [1 / (rows * max_completion_length)] * len(lengths)
    raise ValueError(f"unknown loss_type {loss_type!r}; use grpo, dr_grpo, dapo, bnpo, cispo or rloo")
