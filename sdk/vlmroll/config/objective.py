"""Options of the objective: rewards, advantages and the loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .options import option, refuse, require, require_choice

_NOT_YET = "it is not offered yet"
_LOSSES_ELSEWHERE: Mapping[str, str] = {
    "sapo": _NOT_YET,
    "luspo": _NOT_YET,
    "vespo": _NOT_YET,
    "rloo": "that is the objective of RLOOConfig",
}
_NO_SAPO = "loss_type='sapo' is not offered yet, so nothing would read this option; leave it out"
_NO_VESPO = "loss_type='vespo' is not offered yet, so nothing would read this option; leave it out"
_NO_ENTROPY = "the entropy bonus is not offered yet; leave it out (entropy is logged in every run)"
_NO_SYNC = "a reference model that follows the policy is not offered yet; leave it out, the reference stays as loaded"


@dataclass(repr=False)
class ObjectiveOptions:
    """From rewards to the loss.

    `GRPOConfig(loss_type="dr_grpo", scale_rewards="none", beta=0.01)`
    """

    beta: float = option(
        0.0,
        help="Weight of the KL divergence from the reference model. 0: no reference model is loaded. GRPO adds it to "
        "the loss, RLOO subtracts it from the rewards.",
    )
    num_iterations: int = option(1, help="How often each generation round is trained on.")
    epsilon: float = option(0.2, help="The probability ratio is clipped below 1 - epsilon.")
    epsilon_high: float | None = option(
        None, help="The ratio is clipped above 1 + epsilon_high. None: as epsilon. cispo needs far more, such as 5."
    )
    delta: float | None = option(
        None, help="Bound of the ratio where the advantage is negative; choose it above 1 + epsilon. None: no bound."
    )
    importance_sampling_level: str = option(
        "token",
        help="Ratio of each token (token), or one ratio for the whole completion (sequence). With sequence, loss_type "
        "'grpo' weighs all completions alike, 'dapo' the longer ones more.",
    )
    loss_type: str = option(
        "dapo",
        help="How token losses are summed up. grpo: mean over each completion, then over completions; dr_grpo: divided "
        "by completions times max_completion_length; dapo and bnpo: by the completion tokens of the optimizer step; "
        "cispo: as dapo, with clipped ratios as weights of the log-probabilities. sapo, luspo and vespo are refused: "
        "not offered yet. RLOOConfig takes rloo alone.",
    )
    sapo_temperature_neg: float = option(1.05, help="Gate of SAPO for advantages up to 0.", refused=_NO_SAPO)
    sapo_temperature_pos: float = option(1.0, help="Gate of SAPO for advantages above 0.", refused=_NO_SAPO)
    vespo_k_pos: float = option(2.0, help="Exponent of VESPO's weight, advantage above 0.", refused=_NO_VESPO)
    vespo_lambda_pos: float = option(3.0, help="Decay of VESPO's weight, advantage above 0.", refused=_NO_VESPO)
    vespo_k_neg: float = option(3.0, help="Exponent of VESPO's weight, advantage below 0.", refused=_NO_VESPO)
    vespo_lambda_neg: float = option(2.0, help="Decay of VESPO's weight, advantage below 0.", refused=_NO_VESPO)
    reward_weights: list[float] | None = option(None, help="One weight for each reward function. None: 1 for each.")
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        help="Several rewards: add them up and normalise the sum (sum_then_normalize), or normalise each within its "
        "group, add those up and normalise the sum over the round (normalize_then_sum; it needs scale_rewards group).",
    )
    scale_rewards: str = option(
        "group",
        help="Divide advantages by the standard deviation of the group (group, or True), of the whole round (batch), "
        "or not at all (none, or False).",
    )
    drop_zero_variance_groups: bool = option(
        False,
        help="Leave groups whose rewards are all equal out of the loss and of what it is divided by: they have nothing "
        "to teach.",
        new=True,
    )
    mask_truncated_completions: bool = option(
        False, help="Leave completions that were cut at max_completion_length out of the loss."
    )
    top_entropy_quantile: float = option(
        1.0, help="Share of the tokens, those of highest entropy, that the policy loss keeps. 1: all."
    )
    entropy_coef: float = option(0.0, help="Weight of an entropy bonus in the loss.", refused=_NO_ENTROPY)
    use_adaptive_entropy: bool = option(
        False, help="Let the weight of the bonus follow the measured entropy.", refused=_NO_ENTROPY
    )
    entropy_coef_min: float = option(0.0, help="Least weight of the bonus.", refused=_NO_ENTROPY)
    entropy_coef_max: float = option(1.0, help="Greatest weight of the bonus.", refused=_NO_ENTROPY)
    entropy_coef_delta: float = option(0.005, help="Change of that weight in a step.", refused=_NO_ENTROPY)
    entropy_target: float = option(0.2, help="Entropy below which the bonus acts.", refused=_NO_ENTROPY)
    use_bias_correction_kl: bool = option(
        True, help="Multiply the KL term by the probability ratio, which makes its gradient that of the reverse KL."
    )
    off_policy_mask_threshold: float | None = option(
        None,
        help="Leave completions with a negative advantage out of the loss once the policy has moved this far.",
        refused="it is not offered yet; leave it out",
    )
    sync_ref_model: bool = option(False, help="Move the reference model towards the policy.", refused=_NO_SYNC)
    ref_model_mixup_alpha: float = option(0.6, help="Share of the policy in such a move.", refused=_NO_SYNC)
    ref_model_sync_steps: int = option(512, help="Optimizer steps between two such moves.", refused=_NO_SYNC)

    _loss_types: ClassVar[tuple[str, ...]] = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")

    def check_objective(self) -> None:
        """Raise ValueError for an objective option out of range; True and False of `scale_rewards` become words."""
        written: object = self.scale_rewards
        self.scale_rewards = {"True": "group", "False": "none"}.get(str(written), self.scale_rewards)
        require_choice("scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        require_choice("loss_type", self.loss_type, self._loss_types, _LOSSES_ELSEWHERE)
        require_choice("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        require_choice(
            "multi_objective_aggregation",
            self.multi_objective_aggregation,
            ("sum_then_normalize", "normalize_then_sum"),
        )
        beta, low, high, delta, share = (
            self.beta,
            self.epsilon,
            self.epsilon_high,
            self.delta,
            self.top_entropy_quantile,
        )
        require(beta >= 0, "beta", beta, "it must be at least 0 (0: no reference model)")
        require(self.num_iterations >= 1, "num_iterations", self.num_iterations, "it must be at least 1")
        require(low >= 0, "epsilon", low, "it must be at least 0")
        require(high is None or high >= 0, "epsilon_high", high, "it must be at least 0, or None for epsilon")
        require(delta is None or delta > 0, "delta", delta, "it must be greater than 0, or None for no bound")
        require(
            0 < share <= 1, "top_entropy_quantile", share, "it must be greater than 0 and at most 1 (1: all tokens)"
        )

        self._check_combinations()

    def _check_combinations(self) -> None:
        """Options that the objective chosen by another option would not read."""
        if self.loss_type == "cispo" and self.delta is not None:
            refuse("delta", self.delta, "loss_type='cispo' bounds the ratio by epsilon_high alone; leave delta out")
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards != "group":
            reason = "multi_objective_aggregation='normalize_then_sum' divides by the deviation of the group"
            refuse("scale_rewards", self.scale_rewards, f"{reason}; leave it 'group'")

    @property
    def clip_range(self) -> tuple[float, float]:
        """`epsilon` and the upper epsilon, which is the same unless `epsilon_high` is set."""
        return float(self.epsilon), float(self.epsilon if self.epsilon_high is None else self.epsilon_high)
