"""The rows that the kit tries, and what an adapter makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.messages import read_row
from vlmroll_processors.reading import Reader
from vlmroll_processors.types import Prompt, Row

SIZES = {"A": (64, 48), "B": (120, 40), "C": (40, 100), "D": (64, 64), "E": (96, 64), "F": (48, 48)}
"""Pictures by letter: width and height."""

VIDEOS = {"v": (4, 48, 32), "w": (5, 32, 48)}
"""Videos by letter: number of frames, width and height."""

KINDS: Mapping[str, Sequence[str]] = {
    "text only": ("",),
    "one picture": ("A",),
    "many pictures": ("BCD", "EF", "AA"),
    "video": ("v", "AvBw"),
}
"""Kinds of prompts, with the pictures and videos of each."""


def noise(width: int, height: int, seed: int) -> Image.Image:
    """A picture of random pixels."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def row_of(letters: str, *, chat: bool) -> Row:
    """A row with some of the pictures and videos."""
    images = [noise(*SIZES[letter], seed=ord(letter)) for letter in letters if letter in SIZES]
    videos = [
        # Few pixels, so that a tiny model's test stays tiny: qwen-vl-utils would enlarge them.
        {"video": [noise(*VIDEOS[letter][1:], seed=i) for i in range(VIDEOS[letter][0])], "max_pixels": 4096}
        for letter in letters
        if letter in VIDEOS
    ]
    columns = {"images": images, **({"videos": videos} if videos else {})}
    text = f"compare the {len(letters)} of them and count" if letters else "how many seconds are in two minutes"
    kinds = ["image" if letter in SIZES else "video" for letter in letters]
    if not chat:
        return {"prompt": "".join(f"<{kind}>" for kind in kinds) + text, **columns}
    parts = [{"type": kind} for kind in kinds]
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], **columns}


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A row and its prompt.

    Attributes:
        kind: see `KINDS`.
        row: the row.
        prompt: what the adapter made of it.
        media: "image" or "video" for each slot.
        texts: what the processor writes in the place of each slot.
    """

    kind: str
    row: Row
    prompt: Prompt
    media: tuple[str, ...]
    texts: tuple[str, ...]


def probe(adapter: FamilyAdapter, kind: str, letters: str) -> Probe:
    """Encode a row alone."""
    row = row_of(letters, chat=bool(getattr(adapter.processor, "chat_template", None)))
    (prompt,) = adapter.encode([row])
    reader = Reader(adapter.family, adapter.processor, adapter.budget)
    media = read_row(row, where="row 0").media
    texts = tuple(text for unit in reader.read(media) for text in unit.features.texts)
    return Probe(kind=kind, row=row, prompt=prompt, media=tuple(medium.kind for medium in media), texts=texts)


def processor_output(adapter: FamilyAdapter, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What the processor itself makes of the rendered prompts, as one left-padded batch."""
    options: dict[str, Any] = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
    images = [[picture.image for picture in prompt.images] for prompt in prompts]
    if any(images):
        options["images"] = images
    if clips := [video.clip for prompt in prompts for video in prompt.videos]:
        metadata = [clip.metadata for clip in clips]
        options["videos"] = [clip.frames for clip in clips]
        options["videos_kwargs"] = {"do_sample_frames": False, "do_resize": False, "video_metadata": metadata}
        if hasattr(adapter.processor.video_processor, "cap_pixels_per_frame"):
            options["videos_kwargs"]["cap_pixels_per_frame"] = False
    bos = adapter.tokenizer.bos_token
    if bos is not None and prompts[0].text.startswith(bos):
        options["add_special_tokens"] = False  # as `apply_chat_template` does when the template has written it
    return dict(adapter.processor(text=[prompt.text for prompt in prompts], **options))
