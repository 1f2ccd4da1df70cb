"""The prompts that are asked: text only, one picture and many pictures, as far as the family takes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vlmroll_processors import Prompt
from vlmroll_processors.adapter import FamilyAdapter

TEXT_ONLY, ONE_PICTURE, MANY_PICTURES = KINDS = ("text only", "one picture", "many pictures")
"""Kinds of prompts."""

_SIZES = ((224, 160), (336, 112), (112, 280), (196, 196), (160, 96))  # width and height
_MOST = 4  # pictures in one prompt
_TEXTS = ("What is 17 plus 25? Write the number.", "Name three colours of the rainbow, one after the other.")
_ONE = ("Describe the picture in a few words.", "Which colour is most of it?")
_MANY = ("What is different between these pictures?", "Which one of these is the largest, and which the smallest?")


def kind_of(prompt: Prompt) -> str:
    """Which of `KINDS` a prompt is."""
    return KINDS[min(len(prompt.images), 2)]


def encode_prompts(adapter: FamilyAdapter, images: Sequence[Image.Image] = ()) -> tuple[Prompt, ...]:
    """Two prompts of each kind that the family takes; of one picture, a prompt for each of `images`.

    Args:
        adapter: of the model.
        images: pictures to ask about; none for noise of several sizes.

    Raises:
        ValueError: the model takes no pictures, or a prompt cannot be encoded.
    """
    if images and not adapter.family.slot:
        raise ValueError("the model takes no pictures; leave --images out")
    sets: list[tuple[str, Sequence[Image.Image]]] = []
    if adapter.family.slot:
        shown = list(images) or [_noise(*size, seed=i) for i, size in enumerate(_SIZES)]
        alone = shown if images else (shown[0], shown[-1])
        sets += [(_ONE[i % 2], (picture,)) for i, picture in enumerate(alone)]
        sets.insert(1, (_MANY[0], (shown * 3)[1 : 1 + max(2, min(len(shown), _MOST))]))
        sets.append((_MANY[1], (shown[-1], shown[0])))
    if adapter.family.min_pictures == 0:  # not side by side, so that an answer in another one's place is seen
        sets.insert(1, (_TEXTS[0], ()))
        sets.append((_TEXTS[1], ()))
    chat = bool(getattr(adapter.processor, "chat_template", None))
    return tuple(adapter.encode([_row(text, pictures, chat=chat) for text, pictures in sets]))


def _row(text: str, pictures: Sequence[Image.Image], *, chat: bool) -> dict[str, Any]:
    columns = {"images": list(pictures)} if pictures else {}
    if not chat:
        return {"prompt": "<image>" * len(pictures) + text, **columns}
    parts: list[dict[str, str]] = [{"type": "image"} for _ in pictures]
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], **columns}


def _noise(width: int, height: int, *, seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)
