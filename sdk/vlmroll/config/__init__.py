"""The options of vlmroll: flat, familiar names, checked when a config is made.

    from vlmroll.config import GRPOConfig

    config = GRPOConfig(output_dir="out", num_generations=8, temperature=0.9)

docs/options.md lists every option; `python -m vlmroll.config.table` prints that list.
"""

from .grpo import GRPOConfig
from .policy import PolicyConfig
from .rloo import RLOOConfig

__all__ = ["GRPOConfig", "PolicyConfig", "RLOOConfig"]
