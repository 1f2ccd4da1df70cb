"""Kimi K2.5: patch rows with a (t, h, w) grid for each picture, plain positions."""

from vlmroll_processors.families.base import Family
from vlmroll_processors.types import Join, JoinKind

KIMI = Family(
    name="Kimi",
    processors=("Kimi_K25Processor",),
    slot="<|media_pad|>",
    written="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    vision_tokens=r"<\|media_(begin|content|end|pad)\|>|<\|kimi_k25_video_placeholder\|>",
    join={"pixel_values": Join(kind=JoinKind.ROWS), "image_grid_thw": Join(kind=JoinKind.ROWS)},
)
