"""Gemma 3 and Gemma 4: a constant number of soft tokens for each crop, or as many as the picture's shape needs."""

from vlmroll_processors.families.base import Family
from vlmroll_processors.types import Join, JoinKind

# Without the marks both models fall back to causal attention over pictures, without an error.
_MARKS = Join(kind=JoinKind.TOKENS, pad=0, completion=0, prompt="marks")

GEMMA3 = Family(
    name="Gemma 3",
    processors=("Gemma3Processor",),
    slot="<start_of_image>",
    feature="<image_soft_token>",
    vision_tokens="<start_of_image>|<end_of_image>|<image_soft_token>",
    join={"pixel_values": Join(kind=JoinKind.ROWS), "token_type_ids": _MARKS},
)

GEMMA4 = Family(
    name="Gemma 4",
    processors=("Gemma4Processor",),
    slot="<|image|>",
    vision_tokens=r"<\|image\|>|<\|image>|<image\|>|<\|video\|>|<\|audio\|>|<\|audio>|<audio\|>",
    join={
        "pixel_values": Join(kind=JoinKind.ROWS),
        "image_position_ids": Join(kind=JoinKind.ROWS),
        "mm_token_type_ids": _MARKS,
    },
)
