"""Generators: prompts in, sampled ids with their log-probabilities out."""

from vlmroll.generators.base import Generator, ScriptedGenerator
from vlmroll.generators.transformers import TransformersGenerator

__all__ = ["Generator", "ScriptedGenerator", "TransformersGenerator"]
