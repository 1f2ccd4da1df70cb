"""How the Qwen families read a picture and a video."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from vlmroll_processors.families.base import Family, Features, Sized, run_image_processor
from vlmroll_processors.videos import Clip


def read_picture(family: Family, processor: Any, pictures: Sequence[Sized]) -> Features:
    """Pictures with size keys of their own are resized by qwen-vl-utils, the others by the processor."""
    (picture,) = pictures
    image_processor = processor.image_processor
    high = picture.budget.get("max_pixels", image_processor.size["longest_edge"])
    low = picture.budget.get("min_pixels", min(image_processor.size["shortest_edge"], high))
    if low > high:
        raise ValueError(f"min_pixels={low} is above the processor's own limit of {high} pixels; set max_pixels too")
    if picture.own:
        if "min_pixels" not in picture.budget:  # the processor's own lower bound gives way to the picture's upper one
            low = min(low, picture.own.get("max_pixels", low))
        image = _fetch(picture, image_processor.patch_size, {"min_pixels": low, "max_pixels": high})
        return run_image_processor(family, processor, [image], do_resize=False)
    size = {"shortest_edge": low, "longest_edge": high}
    return run_image_processor(family, processor, [picture.image], size=size)


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
    known = hasattr(
        processor.video_processor, "cap_pixels_per_frame"
    )  # else it warns of a size that it does not choose
    output = processor.video_processor(
        **({"cap_pixels_per_frame": False} if known else {}),
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
