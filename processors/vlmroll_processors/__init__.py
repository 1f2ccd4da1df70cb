"""Processor adapters: one prompt value for every model family.

A dataset row (text or chat, no picture or many) becomes a `Prompt`: the token ids the model's forward eats, the ids an
engine that expands placeholders by itself eats, the pictures, and the forward kwargs of this prompt alone together with
the rule by which each of them joins a batch. `collate` turns a list of prompts, with or without completions, into
padded tensors; `pack` turns them into one row, in which a prompt stands once for all of its completions. The next turn
of a conversation is a `Prompt` too, with all that came before. The package is useful on its own, for fine-tuning,
evaluation or another RL stack.

Example:
    >>> adapter = load_adapter("Qwen/Qwen2.5-VL-3B-Instruct")  # doctest: +SKIP
    >>> prompts = adapter.encode([{"prompt": "What is 2 + 2?"}])  # doctest: +SKIP
    >>> batch = collate(prompts, pad_token_id=adapter.pad_token_id)  # doctest: +SKIP
"""

from vlmroll_processors import conformance
from vlmroll_processors.adapter import FamilyAdapter, ProcessorAdapter, PromptTooLong
from vlmroll_processors.collate import PaddedBatch, collate
from vlmroll_processors.continuation import Continuation
from vlmroll_processors.images import Picture
from vlmroll_processors.loading import load_adapter
from vlmroll_processors.packing import PackedBatch, pack
from vlmroll_processors.types import ImageSpan, Join, JoinKind, Prompt
from vlmroll_processors.videos import Video

__all__ = [
    "Continuation",
    "FamilyAdapter",
    "ImageSpan",
    "Join",
    "JoinKind",
    "PackedBatch",
    "PaddedBatch",
    "Picture",
    "ProcessorAdapter",
    "PromptTooLong",
    "Prompt",
    "Video",
    "collate",
    "conformance",
    "load_adapter",
    "pack",
]
