"""LFM2-VL: tiles of patches, one row each."""

from vlmroll_processors.families.base import Family
from vlmroll_processors.types import Join, JoinKind

_ROWS = Join(kind=JoinKind.ROWS)

LFM2_VL = Family(
    name="LFM2-VL",
    processors=("Lfm2VlProcessor",),
    slot="<image>",
    vision_tokens=r"<image>|<\|image_(start|end)\|>|<\|img_thumbnail\|>|<\|img_row_\d+_col_\d+\|>",
    join={"pixel_values": _ROWS, "pixel_attention_mask": _ROWS, "spatial_shapes": _ROWS},
)
