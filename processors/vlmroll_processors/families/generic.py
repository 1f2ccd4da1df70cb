"""The rule for a processor that has no row in the table: its tensors are measured on a few made-up pictures.

What is found this way is a guess, so `load_adapter` hands it to the conformance kit before anything is encoded.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlmroll_processors.families.base import Family
from vlmroll_processors.types import Join, JoinKind

VISION_WORDS = re.compile(
    r"[<\[].*(?<![a-z])(image|img|vision|video|audio|tile|patch|media|col_\d+)(?![a-z]).*[>\]]", re.IGNORECASE
)
"""What the special tokens that stand for pictures are usually called: such a word in brackets."""

Output = Mapping[str, Any]


def infer_family(processor: Any) -> Family:
    """A family whose rules are read off the processor's own outputs.

    Raises:
        ValueError: the processor does not tell its placeholder, or a tensor follows no rule that is known here.
    """
    name = type(processor).__name__
    slot = getattr(processor, "image_token", None)
    if not isinstance(slot, str):
        raise ValueError(f"{name} does not say which token stands for a picture (image_token)")
    pictures = [Image.fromarray(_noise(width, height)) for width, height in ((64, 48), (120, 40))]
    alone, both, other = (_call(processor, slot, part) for part in (pictures[:1], pictures, pictures[1:]))
    replacement = both.pop("text_replacement_offsets", None)
    if not replacement:
        raise ValueError(f"{name} does not say what it writes for a picture")
    texts = [found["replacement"] for found in replacement[0]]
    added = {i: str(token) for i, token in processor.tokenizer.added_tokens_decoder.items()}
    shown = Counter(i for text in texts for i in processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    if not (marked := [i for i, _ in shown.most_common() if i in added]):
        raise ValueError(f"{name} writes no special token for a picture")
    reserved = {
        slot,
        *(added[i] for i in marked),
        *(token for token in added.values() if VISION_WORDS.fullmatch(token)),
    }
    names = both.keys() - {"input_ids", "attention_mask"}
    if "mm_token_type_ids" in names and any(key.endswith("_grid_thw") for key in names):
        raise ValueError("its model may count positions on several axes (M-RoPE), which is not told by its outputs")
    return Family(
        name=name,
        processors=(name,),
        slot=slot,
        feature=added[marked[0]],
        vision_tokens="|".join(re.escape(token) for token in sorted(reserved)),
        join={key: _rule(key, (alone[key], both[key], other[key]), both["input_ids"], marked[0]) for key in names},
        together=True,
        inferred=True,
    )


def _noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _call(processor: Any, slot: str, pictures: Sequence[Image.Image]) -> dict[str, Any]:
    return dict(
        processor(
            text=[slot * len(pictures)],
            images=[list(pictures)],
            return_tensors="pt",
            add_special_tokens=False,
            return_text_replacement_offsets=True,
        )
    )


def _rule(name: str, tensors: tuple[Any, Any, Any], ids: torch.Tensor, feature: int) -> Join:
    """The rule that one picture, two pictures and another picture agree with."""
    alone, both, other = tensors
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ValueError(f"{name} of the processor is no tensor but {type(both).__name__}")
    if both.shape == ids.shape and alone.shape != both.shape:
        if both.any() and not both.equal((ids == feature).long()):
            raise ValueError(f"{name} has values for each token that are not known here")
        return Join(kind=JoinKind.TOKENS, pad=0, completion=0, prompt="marks" if both.any() else "zeros")
    shapes = [tuple(tensor.shape) for tensor in (alone, both, other)]
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(f"{name} has the shapes {shapes} for one, two and one pictures")
    differ = tuple(axis for axis in range(1, both.dim()) if len({shape[axis] for shape in shapes}) > 1)
    if [shape[0] for shape in shapes] == [1, 1, 1] and 1 in differ:
        return Join(kind=JoinKind.SAMPLES)
    return Join(kind=JoinKind.ROWS, pad_axes=differ)
