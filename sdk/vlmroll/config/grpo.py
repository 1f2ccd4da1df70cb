"""Options of GRPO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .options import refuse_unknown_names
from .policy import PolicyConfig


@refuse_unknown_names
@dataclass(repr=False)
class GRPOConfig(PolicyConfig):
    """Options of `GRPOTrainer`: all of `PolicyConfig`, with GRPO's defaults.

    `GRPOConfig(output_dir="out", num_generations=8, loss_type="dapo", beta=0.0)`
    """

    _names_elsewhere: ClassVar[Mapping[str, str]] = {
        "normalize_advantages": "belongs to RLOOConfig; GRPO normalises with scale_rewards='group' or 'batch'",
        "reward_clip_range": "belongs to RLOOConfig; with GRPO, clip inside the reward function",
    }
