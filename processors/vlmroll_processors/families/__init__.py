"""One row of data for each model family; `family_of` finds the row of a processor."""

from typing import Any

from vlmroll_processors.families.base import Family
from vlmroll_processors.families.cohere import AYA_VISION, COHERE2_VISION
from vlmroll_processors.families.gemma import GEMMA3, GEMMA4
from vlmroll_processors.families.glm_v import GLM_V
from vlmroll_processors.families.idefics import IDEFICS2, IDEFICS3, SMOLVLM
from vlmroll_processors.families.internvl import INTERNVL
from vlmroll_processors.families.kimi import KIMI
from vlmroll_processors.families.lfm2_vl import LFM2_VL
from vlmroll_processors.families.llava import LLAVA, LLAVA_NEXT, LLAVA_ONEVISION
from vlmroll_processors.families.mllama import MLLAMA
from vlmroll_processors.families.paligemma import PALIGEMMA
from vlmroll_processors.families.pixtral import PIXTRAL
from vlmroll_processors.families.qwen_vl import QWEN2_5_VL, QWEN_VL
from vlmroll_processors.families.text import TEXT

FAMILIES: tuple[Family, ...] = (
    AYA_VISION,
    COHERE2_VISION,
    GEMMA3,
    GEMMA4,
    GLM_V,
    IDEFICS2,
    IDEFICS3,
    INTERNVL,
    KIMI,
    LFM2_VL,
    LLAVA,
    LLAVA_NEXT,
    LLAVA_ONEVISION,
    MLLAMA,
    PALIGEMMA,
    PIXTRAL,
    QWEN_VL,
    QWEN2_5_VL,
    SMOLVLM,
)


def family_of(processor: Any) -> Family | None:
    """The family of a processor or tokenizer of transformers; None for a processor with pictures that has no row."""
    name = type(processor).__name__
    for family in FAMILIES:
        if name in family.processors:
            return family
    takes_text_only = getattr(processor, "image_processor", None) is None and not hasattr(processor, "tokenizer")
    return TEXT if takes_text_only else None


__all__ = ["FAMILIES", "TEXT", "Family", "family_of"]
