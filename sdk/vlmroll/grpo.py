"""GRPO: group-normalised advantages and a clipped objective with KL in the loss (DeepSeekMath, arXiv:2402.03300)."""

from typing import ClassVar

import torch

from vlmroll import advantages, losses
from vlmroll.config import GRPOConfig, PolicyConfig
from vlmroll.losses import PolicyTerm
from vlmroll.reporting import Bounds
from vlmroll.trainer import PolicyTrainer
from vlmroll.types import Batch


class GRPOTrainer(PolicyTrainer):
    """Trains with GRPO and its variants: `loss_type` grpo, dr_grpo, dapo, bnpo or cispo, GSPO's sequence ratios.

    Arguments as in `PolicyTrainer`, options as in `GRPOConfig`; a script for TRL's trainer of this name runs here.

    Example:
        >>> def reward(completions, answer, **kwargs):
        ...     return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]
        >>> GRPOTrainer("model", reward, GRPOConfig(), train_dataset=rows).train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[PolicyConfig]] = GRPOConfig

    def compute_advantages(self, rewards: torch.Tensor, kl: torch.Tensor, num_generations: int) -> torch.Tensor:
        """See `vlmroll.advantages.group_normalised` and `normalise_then_sum`."""
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            return advantages.normalise_then_sum(rewards, self.rewards.weights, num_generations)
        return advantages.group_normalised(self.rewards.total(rewards), num_generations, self.args.scale_rewards)

    def ratio_bounds(self) -> Bounds:
        """Of the clipped surrogate, or CISPO's upper bound, which is a ratio itself."""
        return (None, self.args.clip_range[1]) if self.args.loss_type == "cispo" else super().ratio_bounds()

    def policy_term(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyTerm:
        """The clipped surrogate, or CISPO's."""
        args = self.args
        ratio = losses.importance_ratio(logprobs, old_logprobs, batch.loss_mask, args.importance_sampling_level)
        epsilon, epsilon_high = args.clip_range
        if args.loss_type == "cispo":
            return losses.cispo(ratio, batch.advantages, logprobs, epsilon_high=epsilon_high)
        return losses.clipped_surrogate(
            ratio, batch.advantages, epsilon=epsilon, epsilon_high=epsilon_high, delta=args.delta
        )
