"""vlmroll trains vision-language models, and plain language models, with GRPO and RLOO.

A prompt is encoded once into one value, every generator takes that value and answers with the ids it really used, and
the trainer trains on exactly those ids and exactly those pixels.

Example:
    >>> from vlmroll import GRPOConfig, GRPOTrainer  # doctest: +SKIP
    >>> trainer = GRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(), train_dataset=rows)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmroll import advantages, losses, rewards, tools
    from vlmroll.config import GRPOConfig, PolicyConfig, RLOOConfig
    from vlmroll.generators import (
        ContinuousBatchingGenerator,
        Generator,
        ScriptedGenerator,
        TransformersGenerator,
        VLLMColocateGenerator,
        VLLMServerGenerator,
    )
    from vlmroll.grpo import GRPOTrainer
    from vlmroll.rloo import RLOOTrainer
    from vlmroll.trainer import PolicyTrainer
    from vlmroll.turns import ToolLoop
    from vlmroll.types import Batch, Completion, GenerationOutput, Rollout, SamplingParams, Turns

# Where each public name lives. Resolved on first use: `import vlmroll` loads neither transformers nor an engine.
_HOME = {
    "Batch": "types",
    "Completion": "types",
    "ContinuousBatchingGenerator": "generators",
    "GRPOConfig": "config",
    "GRPOTrainer": "grpo",
    "GenerationOutput": "types",
    "Generator": "generators",
    "PolicyConfig": "config",
    "PolicyTrainer": "trainer",
    "RLOOConfig": "config",
    "RLOOTrainer": "rloo",
    "Rollout": "types",
    "SamplingParams": "types",
    "ScriptedGenerator": "generators",
    "ToolLoop": "turns",
    "TransformersGenerator": "generators",
    "Turns": "types",
    "VLLMColocateGenerator": "generators",
    "VLLMServerGenerator": "generators",
    "advantages": "",
    "losses": "",
    "rewards": "",
    "tools": "",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vlmroll' has no attribute {name!r}")
    if not _HOME[name]:
        return import_module(f"vlmroll.{name}")
    return getattr(import_module(f"vlmroll.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__all__ = [
    "Batch",
    "Completion",
    "ContinuousBatchingGenerator",
    "GRPOConfig",
    "GRPOTrainer",
    "GenerationOutput",
    "Generator",
    "PolicyConfig",
    "PolicyTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "Rollout",
    "SamplingParams",
    "ScriptedGenerator",
    "ToolLoop",
    "TransformersGenerator",
    "Turns",
    "VLLMColocateGenerator",
    "VLLMServerGenerator",
    "advantages",
    "losses",
    "rewards",
    "tools",
]
