"""How the Qwen families read a picture and a video."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from vlmroll_processors.families.base import Family, Features, Sized, run_image_processor
from vlmroll_processors.videos import Clip


def read_picture(family: Family, processor: Any, pictures: Sequence[Sized]) -> Features:
    """Pictures with size keys of their own are resized by qwen-vl-utils, the others by the processor."""
    (picture,) = pictures
    if picture.own:
        return run_image_processor(family, processor, [_fetch(processor, picture)], do_resize=False)
    return run_image_processor(family, processor, [picture.image], size=_bounds(processor, picture.budget))


def _bounds(processor: Any, budget: Mapping[str, int]) -> dict[str, int]:
    """The least and the most pixels of a picture, under the processor's names."""
    own = processor.image_processor.size
    high = budget.get("max_pixels", own["longest_edge"])
    low = budget.get("min_pixels", min(own["shortest_edge"], high))
    if low > high:
        raise ValueError(f"min_pixels={low} is above the processor's own limit of {high} pixels; set max_pixels too")
    return {"shortest_edge": low, "longest_edge": high}


def engine_picture(processor: Any, picture: Sized) -> Image.Image:
    """The picture in its final size, which a processor leaves as it is."""
    if picture.own:
        return _fetch(processor, picture)
    from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
    from transformers.image_utils import SizeDict

    like = processor.image_processor
    size = SizeDict(**_bounds(processor, picture.budget))
    factor = like.patch_size * like.merge_size
    tensor = pil_to_tensor(picture.image)[None]
    return to_pil_image(like.resize(tensor, size=size, resample=like.resample, factor=factor)[0])


def engine_processor(processor: Any, budget: Mapping[str, int]) -> Any:
    """A processor that takes every picture of its final size, also those below its own least number of pixels."""
    changed = copy.deepcopy(processor)
    like = changed.image_processor
    most = max(_bounds(processor, budget)["longest_edge"], like.size["longest_edge"])
    like.size = {"shortest_edge": (like.patch_size * like.merge_size) ** 2, "longest_edge": most}
    return changed


def _fetch(processor: Any, picture: Sized) -> Image.Image:
    """The picture by its own size keys, resized by qwen-vl-utils; a bound that it does not set is the run's."""
    from qwen_vl_utils import fetch_image  # pyright: ignore[reportMissingTypeStubs]

    bounds, patch_size = _bounds(processor, picture.budget), processor.image_processor.patch_size
    low, high = bounds["shortest_edge"], bounds["longest_edge"]
    if "min_pixels" not in picture.budget:  # the processor's own lower bound gives way to the picture's upper one
        low = min(low, picture.own.get("max_pixels", low))
    request: dict[str, Any] = {"image": picture.image, "min_pixels": low, "max_pixels": high, **picture.own}
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
