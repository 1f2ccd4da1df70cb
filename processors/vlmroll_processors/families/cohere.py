"""Aya Vision and Cohere2 Vision (Command A Vision): tiles of all pictures, one row each."""

from vlmroll_processors.families.base import Family
from vlmroll_processors.types import Join, JoinKind

_TILES = {"pixel_values": Join(kind=JoinKind.ROWS)}
_MARKERS = r"<\|(START_OF_IMG|END_OF_IMG|IMG_PATCH|IMG_LINE_BREAK)\|>"

AYA_VISION = Family(
    name="Aya Vision",
    processors=("AyaVisionProcessor",),
    slot="<image>",
    feature="<|IMG_PATCH|>",
    vision_tokens=rf"<image>|{_MARKERS}|TILE|TILE_GLOBAL|TILE_\d+",
    join=_TILES,
)

COHERE2_VISION = Family(
    name="Cohere2 Vision",
    processors=("Cohere2VisionProcessor",),
    slot="<|IMG_PATCH|>",
    vision_tokens=_MARKERS,
    join=_TILES,
)
