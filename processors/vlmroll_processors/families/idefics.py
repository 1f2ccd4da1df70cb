"""Idefics2, Idefics3 and SmolVLM: tiles side by side on an axis of their own, padded with zeros over the batch.

The models take a tile whose values are all exactly 0 for padding.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlmroll_processors.families.base import Family, Features, Sized, run_image_processor
from vlmroll_processors.types import Join, JoinKind

_TILES = {"pixel_values": Join(kind=JoinKind.SAMPLES), "pixel_attention_mask": Join(kind=JoinKind.SAMPLES)}

IDEFICS3 = Family(
    name="Idefics3",
    processors=("Idefics3Processor",),
    slot="<image>",
    vision_tokens=r"<image>|<video>|<fake_token_around_image>|<global-img>|<row_\d+_col_\d+>",
    join=_TILES,
)
SMOLVLM = replace(IDEFICS3, name="SmolVLM", processors=("SmolVLMProcessor",))


def read(family: Family, processor: Any, pictures: Sequence[Sized]) -> Features:
    """This processor does not tell what it writes for a picture: its features between two tokens, once per tile."""
    images = [picture.resized for picture in pictures]
    fake, features = processor.fake_image_token, processor.image_token * processor.image_seq_len
    times = 5 if processor.image_processor.do_image_splitting else 1
    text = f"{fake}{features}{fake}" * times
    return run_image_processor(family, processor, images, [text] * len(images))


def tidy(processor: Any, text: str) -> str:
    """One token between neighbouring tiles, and a space between a picture and a word."""
    fake = processor.fake_image_token
    return re.sub(rf"{re.escape(fake)}(?=[^\s<])", f"{fake} ", text.replace(fake * 2, fake))


IDEFICS2 = Family(
    name="Idefics2",
    processors=("Idefics2Processor",),
    slot="<image>",
    vision_tokens="<image>|<fake_token_around_image>",
    join=_TILES,
    read=read,
    tidy=tidy,
)
