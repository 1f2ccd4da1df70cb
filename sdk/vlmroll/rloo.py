"""RLOO: leave-one-out advantages, the ratio of whole sequences, and KL in the reward (arXiv:2402.14740)."""

from typing import ClassVar, cast

import torch

from vlmroll import advantages, losses
from vlmroll.config import PolicyConfig, RLOOConfig
from vlmroll.losses import PolicyTerm
from vlmroll.trainer import PolicyTrainer
from vlmroll.types import Batch


class RLOOTrainer(PolicyTrainer):
    """Trains with RLOO. Arguments as in `PolicyTrainer`, options as in `RLOOConfig`.

    Example:
        >>> RLOOTrainer("model", reward, RLOOConfig(num_generations=4), train_dataset=rows).train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[PolicyConfig]] = RLOOConfig
    kl_in_loss: ClassVar[bool] = False

    def compute_advantages(self, rewards: torch.Tensor, kl: torch.Tensor, num_generations: int) -> torch.Tensor:
        """Reward, clipped, less beta times KL, less the mean of the siblings."""
        args = cast("RLOOConfig", self.args)
        total = self.rewards.total(rewards)
        if args.reward_clip_range is not None:
            total = total.clamp(*args.reward_clip_range)
        total = total - args.beta * kl
        result = advantages.scaled(
            advantages.leave_one_out(total, num_generations), total, num_generations, args.scale_rewards
        )
        return advantages.batch_normalised(result, ~total.isnan()) if args.normalize_advantages else result

    def policy_term(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyTerm:
        """The clipped surrogate with one ratio for a sequence, or one for each token when asked."""
        args = self.args
        level = "sum" if args.importance_sampling_level == "sequence" else "token"
        ratio = losses.importance_ratio(logprobs, old_logprobs, batch.loss_mask, level)
        epsilon, epsilon_high = args.clip_range
        return losses.clipped_surrogate(
            ratio, batch.advantages, epsilon=epsilon, epsilon_high=epsilon_high, delta=args.delta
        )
