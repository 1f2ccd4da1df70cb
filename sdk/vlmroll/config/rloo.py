"""Options of RLOO."""

from dataclasses import dataclass
from typing import ClassVar, cast

from .options import option, refuse, refuse_unknown_names, require
from .policy import PolicyConfig


@refuse_unknown_names
@dataclass(repr=False)
class RLOOConfig(PolicyConfig):
    """Options of `RLOOTrainer`: all of `PolicyConfig` with RLOO's defaults, and two of its own.

    The advantage of a completion is its reward, from which beta times the KL divergence is subtracted, minus the mean
    reward of the others in its group.

    `RLOOConfig(output_dir="out", num_generations=4, reward_clip_range=(-1.0, 1.0))`
    """

    num_generations: int = option(2, help="Completions of each prompt (the size of a group), at least 2.")
    beta: float = option(0.05, help="Weight of the KL divergence that is subtracted from the rewards. 0: none.")
    importance_sampling_level: str = option(
        "sequence", help="One ratio for the whole completion (sequence), or one for each token (token)."
    )
    scale_rewards: str = option("none", help="Divide advantages by a standard deviation: group, batch or none.")
    loss_type: str = option(
        "rloo",
        help="The objective of RLOO, which is the only one.",
        refused="RLOO has one objective, 'rloo'; use GRPOConfig to choose a loss_type",
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        help="Several rewards are added up.",
        refused="RLOO compares the sum of the rewards with that of the siblings; use GRPOConfig for normalize_then_sum",
    )
    use_bias_correction_kl: bool = option(
        False,
        help="Correct the gradient of a KL term in the loss, which RLOO does not have.",
        refused="RLOO subtracts the KL divergence from the rewards, where there is nothing to correct; use GRPOConfig",
    )
    normalize_advantages: bool = option(
        False, help="Bring the advantages of a generation round to mean 0 and standard deviation 1."
    )
    reward_clip_range: tuple[float, float] | None = option(
        None, help="Least and greatest reward; rewards outside are set to these. On the command line: -1,1"
    )

    _loss_types: ClassVar[tuple[str, ...]] = ("rloo",)

    def check_objective(self) -> None:
        """As of every policy, and the range of rewards."""
        super().check_objective()
        self.reward_clip_range = parse_range("reward_clip_range", self.reward_clip_range)


def parse_range(name: str, given: object) -> tuple[float, float] | None:
    """A range from a pair (JSON makes lists of them), or from the text "low,high".

    Raises ValueError unless low < high.
    """
    if given is None:
        return None
    # HfArgumentParser calls tuple() on the text of the command line, which gives its characters.
    if isinstance(given, tuple) and all(isinstance(part, str) for part in given):
        given = "".join(cast("tuple[str, ...]", given))
    parts = given.strip("()[] ").split(",") if isinstance(given, str) else given
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        refuse(name, given, "it must be two numbers (low, high)")
    low, high = (float(part) for part in parts)
    require(low < high, name, (low, high), "the first number must be less than the second")
    return low, high
