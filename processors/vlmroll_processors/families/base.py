"""What a family is: data, and functions only where a table cannot say it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vlmroll_processors.images import Picture
from vlmroll_processors.types import ImageSpan, Join

PictureKwargs = dict[str, torch.Tensor]
"""The forward kwargs that one picture brings."""


def _no_pictures(processor: Any, pictures: Sequence[Picture], budget: Mapping[str, int]) -> list[PictureKwargs]:
    raise ValueError("the model takes no pictures")


def _no_tokens(processor: Any, kwargs: PictureKwargs) -> int:
    raise ValueError("the model takes no pictures")


def _no_kwargs(
    processor: Any, num_tokens: int, spans: Sequence[ImageSpan], pictures: Sequence[PictureKwargs]
) -> PictureKwargs:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family's facts.

    Attributes:
        name: for messages.
        processors: class names of the transformers processors it serves.
        placeholder: the token that is repeated for each picture; empty for text models.
        picture_slot: how one picture is written in a plain string.
        vision_tokens: tokens that a model must never sample.
        vision_modules: names of the submodules that turn pixels into features.
        join: how each forward kwarg joins a batch.
        process: (processor, distinct pictures, pixel budget) -> the forward kwargs of each picture alone.
        count_tokens: (processor, kwargs of one picture) -> its number of placeholder tokens.
        token_kwargs: (processor, P, spans, kwargs of each picture) -> the per-token kwargs of the whole prompt.
    """

    name: str
    processors: tuple[str, ...] = ()
    placeholder: str = ""
    picture_slot: str = ""
    vision_tokens: tuple[str, ...] = ()
    vision_modules: tuple[str, ...] = ()
    join: Mapping[str, Join] = field(default_factory=dict[str, Join])
    process: Callable[[Any, Sequence[Picture], Mapping[str, int]], list[PictureKwargs]] = _no_pictures
    count_tokens: Callable[[Any, PictureKwargs], int] = _no_tokens
    token_kwargs: Callable[[Any, int, Sequence[ImageSpan], Sequence[PictureKwargs]], PictureKwargs] = _no_kwargs
