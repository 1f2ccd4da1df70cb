"""PaliGemma 1 and 2: pictures, then the text as one block that attends to all of itself, then causal completions."""

from typing import Any

from vlmroll_processors.families.base import Family
from vlmroll_processors.types import Join, JoinKind


def wrap(processor: Any, text: str) -> str:
    """BOS between the last picture and the text, and a line break at the end."""
    slot, bos = processor.image_token, processor.tokenizer.bos_token
    cut = text.rfind(slot) + len(slot)
    return f"{text[:cut]}{bos}{text[cut:]}\n"


PALIGEMMA = Family(
    name="PaliGemma",
    processors=("PaliGemmaProcessor",),
    slot="<image>",
    vision_tokens="<image>",
    join={
        "pixel_values": Join(kind=JoinKind.ROWS),
        # 0 is the block in which every token sees all others; a completion of zeros would see its own future.
        "token_type_ids": Join(kind=JoinKind.TOKENS, pad=0, completion=1, prompt="zeros"),
    },
    drop=("labels",),
    min_pictures=1,
    wrap=wrap,
)
