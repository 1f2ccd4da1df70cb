"""One row of data for each model family; `family_of` finds the row of a processor."""

from typing import Any

from vlmroll_processors.families.base import Family
from vlmroll_processors.families.qwen_vl import QWEN_VL
from vlmroll_processors.families.text import TEXT

FAMILIES: tuple[Family, ...] = (QWEN_VL,)


def family_of(processor: Any) -> Family:
    """The family of a processor or tokenizer of transformers.

    Raises:
        ValueError: a processor with pictures of a family that has no row yet.
    """
    name = type(processor).__name__
    for family in FAMILIES:
        if name in family.processors:
            return family
    if getattr(processor, "image_processor", None) is None and not hasattr(processor, "tokenizer"):
        return TEXT
    known = ", ".join(sorted(known for family in FAMILIES for known in family.processors))
    raise ValueError(f"no adapter for the processor {name} yet; families with pictures so far: {known}")


__all__ = ["FAMILIES", "TEXT", "Family", "family_of"]
