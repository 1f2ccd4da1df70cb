"""InternVL in the format of transformers: tiles of all pictures, one row each."""

from vlmroll_processors.families.base import QWEN_TOKENS, Family
from vlmroll_processors.types import Join, JoinKind

INTERNVL = Family(
    name="InternVL",
    processors=("InternVLProcessor",),
    slot="<IMG_CONTEXT>",
    vision_tokens=f"<img>|</img>|<IMG_CONTEXT>|<video>|{QWEN_TOKENS}",
    join={"pixel_values": Join(kind=JoinKind.ROWS)},
)
