"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: patch rows with a (t, h, w) grid for each picture, M-RoPE positions.

The grids of a prompt decide its positions, so they are worked out here, once for each prompt, and travel with it; the
model's own `get_rope_index` gives the same numbers and is the oracle in the tests.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlmroll_processors.families.base import Family, PictureKwargs
from vlmroll_processors.images import Picture
from vlmroll_processors.types import ImageSpan, Join, JoinKind


def process(processor: Any, pictures: Sequence[Picture], budget: Mapping[str, int]) -> list[PictureKwargs]:
    """Patches and grid of each picture. Pictures with size keys of their own are resized by qwen-vl-utils."""
    image_processor = processor.image_processor
    results: list[PictureKwargs] = [{}] * len(pictures)
    own_size = [i for i, picture in enumerate(pictures) if picture.resize]
    usual = [i for i, picture in enumerate(pictures) if not picture.resize]
    high = budget.get("max_pixels", image_processor.size["longest_edge"])
    low = budget.get("min_pixels", min(image_processor.size["shortest_edge"], high))
    if low > high:
        raise ValueError(f"min_pixels={low} is above the processor's own limit of {high} pixels; set max_pixels too")
    size = {"shortest_edge": low, "longest_edge": high}
    for chosen, options in ((usual, {"size": size}), (own_size, {"do_resize": False})):
        if not chosen:
            continue
        images = [_resized(pictures[i], image_processor.patch_size, size) for i in chosen]
        features = image_processor(images=images, return_tensors="pt", **options)
        grids: torch.Tensor = features["image_grid_thw"]
        patches = features["pixel_values"].split(grids.prod(-1).tolist())
        for i, patch, grid in zip(chosen, patches, grids, strict=True):
            results[i] = {"pixel_values": patch, "image_grid_thw": grid[None]}
    return results


def _resized(picture: Picture, patch_size: int, size: Mapping[str, int]) -> Any:
    """The picture by its own size keys; a bound that it does not set is the run's."""
    if not picture.resize:
        return picture.image
    from qwen_vl_utils import fetch_image  # pyright: ignore[reportMissingTypeStubs]

    bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    request: dict[str, Any] = {"image": picture.image, **bounds, **dict(picture.resize)}
    try:
        return fetch_image(request, image_patch_size=patch_size)
    except AssertionError as error:  # its check of min_pixels, 4 tokens by default, against max_pixels
        raise ValueError(str(error)) from error


def count_tokens(processor: Any, kwargs: PictureKwargs) -> int:
    """Patches / merge_size^2."""
    return int(kwargs["image_grid_thw"].prod()) // processor.image_processor.merge_size**2


def token_kwargs(
    processor: Any, num_tokens: int, spans: Sequence[ImageSpan], pictures: Sequence[PictureKwargs]
) -> PictureKwargs:
    """Token types [P] (1 on pictures) and M-RoPE positions [3, P] (time, height, width).

    Text counts 1 by 1 on all three axes; a picture of h x w merged patches spans h and w positions, and the text after
    it goes on from the larger of both (Qwen2-VL, arXiv:2409.12191, section 2.1).
    """
    merge = processor.image_processor.merge_size
    types = torch.zeros(num_tokens, dtype=torch.long)
    positions = torch.empty(3, num_tokens, dtype=torch.long)
    cursor = start = 0
    for span, kwargs in zip(spans, pictures, strict=True):
        text = span.offset - cursor
        positions[:, cursor : span.offset] = torch.arange(start, start + text)
        start += text
        t, h, w = (kwargs["image_grid_thw"][0] // torch.tensor([1, merge, merge])).tolist()
        grid = torch.stack(torch.meshgrid(torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij"))
        cursor = span.offset + span.length
        positions[:, span.offset : cursor] = grid.flatten(1) + start
        types[span.offset : cursor] = 1
        start += max(t, h, w)
    positions[:, cursor:] = torch.arange(start, start + num_tokens - cursor)
    return {"mm_token_type_ids": types, "position_ids": positions}


QWEN_VL = Family(
    name="Qwen-VL",
    processors=("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor"),
    placeholder="<|image_pad|>",
    picture_slot="<|vision_start|><|image_pad|><|vision_end|>",
    vision_tokens=("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    vision_modules=("visual",),
    join={
        "pixel_values": Join(kind=JoinKind.ROWS),
        "image_grid_thw": Join(kind=JoinKind.ROWS),
        "mm_token_type_ids": Join(kind=JoinKind.TOKENS, pad=0, completion=0),
        "position_ids": Join(kind=JoinKind.TOKENS, pad=0, completion="count_on", token_axis=1),
    },
    process=process,
    count_tokens=count_tokens,
    token_kwargs=token_kwargs,
)
