"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: one row for each picture, with tiles on axis 1 in the later two."""

from vlmroll_processors.families.base import Family
from vlmroll_processors.types import Join, JoinKind

_ROWS = Join(kind=JoinKind.ROWS)
_ANY_RESOLUTION = {"pixel_values": Join(kind=JoinKind.ROWS, pad_axes=(1,)), "image_sizes": _ROWS}

LLAVA = Family(
    name="LLaVA",
    processors=("LlavaProcessor",),
    slot="<image>",
    vision_tokens="<image>",
    join={"pixel_values": _ROWS},
)

LLAVA_NEXT = Family(
    name="LLaVA-NeXT",
    processors=("LlavaNextProcessor",),
    slot="<image>",
    vision_tokens="<image>",
    join=_ANY_RESOLUTION,
)

LLAVA_ONEVISION = Family(
    name="LLaVA-OneVision",
    processors=("LlavaOnevisionProcessor",),
    slot="<image>",
    vision_tokens="<image>|<video>",
    join={**_ANY_RESOLUTION, "batch_num_images": _ROWS},
    together=True,  # tiles only for the picture of a prompt that has one
)
