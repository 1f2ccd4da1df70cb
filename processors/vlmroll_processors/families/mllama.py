"""Llama 3.2 Vision: pictures enter by cross-attention, one placeholder each.

Text before the first picture attends to all slots of the batch, padding included, and text alone would skip the
cross-attention that it has in a mixed batch. So only prompts with equally many pictures go into one batch, and then a
row depends on itself alone.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vlmroll_processors.families.base import Family, Features, Sized, Tensors, Whole, run_image_processor
from vlmroll_processors.types import Join, JoinKind

_SLOT = "<|image|>"
_SAMPLES = Join(kind=JoinKind.SAMPLES)


def read(family: Family, processor: Any, pictures: Sequence[Sized]) -> Features:
    """Tiles of the pictures; the prompt holds one token for each picture, whatever its tiles."""
    images = [picture.resized for picture in pictures]
    return run_image_processor(family, processor, images, [_SLOT] * len(images))


def cross_attention(whole: Whole) -> Tensors:
    """Which tiles [P, pictures, tiles] a token sees: those of the last picture, or run of pictures, before it."""
    from transformers.models.mllama import processing_mllama as mllama

    if not whole.media:
        return {}
    ids = [0] * whole.num_tokens
    for (place,) in whole.places:
        ids[place] = 1
    mask = mllama.convert_sparse_cross_attention_mask_to_dense(
        [mllama.get_cross_attention_token_mask(ids, 1)],
        num_tiles=[[int(part["aspect_ratio_mask"].sum()) for part in whole.media]],
        max_num_tiles=whole.processor.image_processor.max_image_tiles,
        length=whole.num_tokens,
    )
    return {"cross_attention_mask": torch.from_numpy(mask[0])}


MLLAMA = Family(
    name="Llama 3.2 Vision",
    processors=("MllamaProcessor",),
    slot=_SLOT,
    vision_tokens=r"<\|image\|>",
    join={
        "pixel_values": _SAMPLES,
        "aspect_ratio_ids": _SAMPLES,
        "aspect_ratio_mask": _SAMPLES,
        "cross_attention_mask": Join(kind=JoinKind.TOKENS, pad=0, completion="repeat"),
    },
    drop=("num_tiles",),
    alike=True,
    read=read,
    more=cross_attention,
)
