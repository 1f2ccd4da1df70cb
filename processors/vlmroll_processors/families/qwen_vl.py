"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: patch rows with a (t, h, w) grid for each picture, M-RoPE positions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image

from vlmroll_processors.families.base import Family, Features, Sized, run_processor
from vlmroll_processors.families.positions import PATCHES, grid_positions
from vlmroll_processors.types import Join, JoinKind
from vlmroll_processors.videos import Clip


def read(family: Family, processor: Any, pictures: Sequence[Sized]) -> Features:
    """Pictures with size keys of their own are resized by qwen-vl-utils, the others by the processor."""
    (picture,) = pictures
    image_processor = processor.image_processor
    high = picture.budget.get("max_pixels", image_processor.size["longest_edge"])
    low = picture.budget.get("min_pixels", min(image_processor.size["shortest_edge"], high))
    if low > high:
        raise ValueError(f"min_pixels={low} is above the processor's own limit of {high} pixels; set max_pixels too")
    if picture.own:
        image = _fetch(picture, image_processor.patch_size, {"min_pixels": low, "max_pixels": high})
        return run_processor(family, processor, [image], images_kwargs={"do_resize": False})
    size = {"shortest_edge": low, "longest_edge": high}
    return run_processor(family, processor, [picture.image], images_kwargs={"size": size})


def _fetch(picture: Sized, patch_size: int, bounds: Mapping[str, int]) -> Image.Image:
    """The picture by its own size keys; a bound that it does not set is the run's."""
    from qwen_vl_utils import fetch_image  # pyright: ignore[reportMissingTypeStubs]

    request: dict[str, Any] = {"image": picture.image, **bounds, **picture.own}
    try:
        return fetch_image(request, image_patch_size=patch_size)
    except AssertionError as error:  # its check of min_pixels, 4 tokens by default, against max_pixels
        raise ValueError(str(error)) from error


def read_video(family: Family, processor: Any, clip: Clip) -> Features:
    """Sampled and resized frames; the text of Qwen3-VL holds the times of the frames."""
    output = processor.video_processor(
        videos=[clip.frames],
        video_metadata=[clip.metadata],
        do_sample_frames=False,
        do_resize=False,
        input_data_format="channels_first",
        return_metadata=True,
        return_tensors="pt",
    )
    text = processor.replace_video_token(output, 0)
    seconds = processor.video_processor.temporal_patch_size / clip.sampled_fps
    output["second_per_grid_ts"] = torch.tensor([seconds], dtype=torch.float32)
    return Features(texts=(text,), kwargs=family.keep(output))


QWEN_VL = Family(
    name="Qwen-VL",
    processors=("Qwen2VLProcessor", "Qwen3VLProcessor"),
    slot="<|image_pad|>",
    video_slot="<|video_pad|>",
    written="<|vision_start|><|image_pad|><|vision_end|>",
    video_written="<|vision_start|><|video_pad|><|vision_end|>",
    vision_tokens=r"<\|(vision_start|vision_end|vision_pad|image_pad|video_pad)\|>",
    join={**PATCHES, "pixel_values_videos": Join(kind=JoinKind.ROWS), "video_grid_thw": Join(kind=JoinKind.ROWS)},
    drop=("video_metadata", "second_per_grid_ts"),
    read=read,
    read_video=read_video,
    more=grid_positions,
)

QWEN2_5_VL = replace(
    QWEN_VL,
    name="Qwen2.5-VL",
    processors=("Qwen2_5_VLProcessor",),
    join={**QWEN_VL.join, "second_per_grid_ts": Join(kind=JoinKind.ROWS)},
    drop=("video_metadata",),
)
