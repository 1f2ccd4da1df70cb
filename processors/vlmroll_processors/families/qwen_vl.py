"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: patch rows with a (t, h, w) grid for each picture, M-RoPE positions."""

from dataclasses import replace

from vlmroll_processors.families.base import QWEN_TOKENS, Family
from vlmroll_processors.families.positions import PATCHES, grid_positions
from vlmroll_processors.families.qwen_reading import engine_picture, engine_processor, read_picture, read_video
from vlmroll_processors.types import Join, JoinKind

QWEN_VL = Family(
    name="Qwen-VL",
    processors=("Qwen2VLProcessor", "Qwen3VLProcessor"),
    slot="<|image_pad|>",
    video_slot="<|video_pad|>",
    written="<|vision_start|><|image_pad|><|vision_end|>",
    video_written="<|vision_start|><|video_pad|><|vision_end|>",
    vision_tokens=QWEN_TOKENS,
    join={**PATCHES, "pixel_values_videos": Join(kind=JoinKind.ROWS), "video_grid_thw": Join(kind=JoinKind.ROWS)},
    drop=("video_metadata", "second_per_grid_ts"),
    read=read_picture,
    read_video=read_video,
    most_pixels=lambda processor: processor.image_processor.size["longest_edge"],
    more=grid_positions,
    engine_picture=engine_picture,
    engine_processor=engine_processor,
)

QWEN2_5_VL = replace(
    QWEN_VL,
    name="Qwen2.5-VL",
    processors=("Qwen2_5_VLProcessor",),
    join={**QWEN_VL.join, "second_per_grid_ts": Join(kind=JoinKind.ROWS)},
    drop=("video_metadata",),
)
