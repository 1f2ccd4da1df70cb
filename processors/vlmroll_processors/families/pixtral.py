"""Pixtral and Mistral 3: one row for each picture, its height and width padded over the batch."""

from vlmroll_processors.families.base import Family
from vlmroll_processors.types import Join, JoinKind

PIXTRAL = Family(
    name="Pixtral",
    processors=("PixtralProcessor",),
    slot="[IMG]",
    vision_tokens=r"\[IMG\]|\[IMG_BREAK\]|\[IMG_END\]",
    join={"pixel_values": Join(kind=JoinKind.ROWS, pad_axes=(2, 3)), "image_sizes": Join(kind=JoinKind.ROWS)},
)
