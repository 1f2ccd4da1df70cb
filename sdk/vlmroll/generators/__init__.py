"""Generators: prompts in, sampled ids with their log-probabilities out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vlmroll.generators.base import Generator, ScriptedGenerator
from vlmroll.generators.transformers import TransformersGenerator

if TYPE_CHECKING:
    from vlmroll.generators.continuous_batching import ContinuousBatchingGenerator
    from vlmroll.generators.vllm_colocate import VLLMColocateGenerator
    from vlmroll.generators.vllm_server import VLLMServerGenerator

_LATER = {
    "ContinuousBatchingGenerator": "continuous_batching",
    "VLLMColocateGenerator": "vllm_colocate",
    "VLLMServerGenerator": "vllm_server",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'vlmroll.generators' has no attribute {name!r}")
    return getattr(import_module(f"vlmroll.generators.{_LATER[name]}"), name)


__all__ = [
    "ContinuousBatchingGenerator",
    "Generator",
    "ScriptedGenerator",
    "TransformersGenerator",
    "VLLMColocateGenerator",
    "VLLMServerGenerator",
]
