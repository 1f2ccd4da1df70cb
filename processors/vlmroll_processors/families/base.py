"""What a family is: data, and functions only where a table cannot say it."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from vlmroll_processors.images import resized
from vlmroll_processors.types import Join, JoinKind
from vlmroll_processors.videos import Clip

Tensors = Mapping[str, torch.Tensor]
QWEN_TOKENS = r"<\|(vision|image|video|audio)_(start|end|pad)\|>"
"""Tokens for media in Qwen's vocabularies, which models of other families took over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What pictures (usually one) or a video bring to a prompt.

    Attributes:
        texts: for each of them what takes the place of its slot in the rendered prompt.
        kwargs: their forward kwargs.
    """

    texts: tuple[str, ...]
    kwargs: Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """A decoded picture with the size keys that apply to it: its own, else those of the run."""

    image: Image.Image
    own: Mapping[str, int]
    budget: Mapping[str, int]

    @property
    def resized(self) -> Image.Image:
        """The picture in the size that the keys ask for."""
        return resized(self.image, {**self.budget, **self.own})


def read_pictures(family: "Family", processor: Any, pictures: Sequence[Sized]) -> Features:
    """Pictures through the processor, as a prompt of nothing but their slots."""
    return run_processor(family, processor, [picture.resized for picture in pictures])


def run_image_processor(
    family: "Family", processor: Any, images: Sequence[Image.Image], texts: Sequence[str] | None = None, **options: Any
) -> Features:
    """Call the image processor alone, which is faster; for families whose processor sets no options for it.

    Args:
        texts: what takes the place of each picture's slot, where the processor does not tell it.
    """
    output = processor.image_processor(images=list(images), return_tensors="pt", **options)
    if texts is None:
        texts = [processor.replace_image_token(output, i) for i in range(len(images))]
    return Features(texts=tuple(texts), kwargs=family.keep(output))


def run_processor(family: "Family", processor: Any, images: Sequence[Image.Image], **options: Any) -> Features:
    """Call the processor and keep what the family has a rule for.

    Raises:
        ValueError: the processor returns a tensor that the family has no rule for.
    """
    output = processor(
        text=[family.slot * len(images)],
        images=[list(images)],
        return_tensors="pt",
        add_special_tokens=False,
        return_text_replacement_offsets=True,
        **options,
    )
    texts = tuple(found["replacement"] for found in output.pop("text_replacement_offsets")[0])
    return Features(texts=texts, kwargs=family.keep(output))


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A whole prompt, for forward kwargs that depend on where its pictures stand.

    Attributes:
        processor: its processor.
        config: the model's config, if it was given.
        num_tokens: P.
        places: for each medium the positions of its features among the tokens.
        media: for each medium its forward kwargs.
    """

    processor: Any
    config: Any
    num_tokens: int
    places: Sequence[Sequence[int]]
    media: Sequence[Tensors]


def as_resized(processor: Any, picture: Sized) -> Image.Image:
    """The picture in the size that its keys ask for."""
    return picture.resized


def same_processor(processor: Any, budget: Mapping[str, int]) -> Any:
    """The processor itself."""
    return processor


def no_more(whole: Whole) -> Tensors:
    """No kwargs beside those that the table says."""
    return {}


def no_limit(processor: Any) -> float:
    """Pictures of any size are taken as they are, or brought to one size."""
    return math.inf


def as_it_is(processor: Any, text: str) -> str:
    """The text unchanged."""
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model family's facts.

    Attributes:
        name: for messages.
        processors: class names of the transformers processors it serves.
        slot: the token that stands for one picture in the rendered chat template and in `engine_ids`; empty for text
            models.
        video_slot: the same for one video; empty where the family takes none.
        feature: the token that stands in the expanded prompt once for each feature; `slot` unless given.
        video_feature: the same for videos; `video_slot` unless given.
        written: how one picture is written in a plain string; `slot` unless given.
        video_written: the same for videos.
        vision_tokens: regular expression; added tokens of the tokenizer that match it fully are never sampled, and
            refused in texts.
        join: how each forward kwarg joins a batch.
        drop: names that the processor returns and the model does not need.
        vision_modules: names of the submodules that turn pixels into features.
        min_pictures: fewest pictures of a prompt.
        alike: prompts with different numbers of pictures do not go into one batch.
        inferred: the facts were read off a processor that has no row of its own.
        together: pictures of one prompt are processed together, since they depend on each other's number.
        read: (family, processor, pictures) -> what they bring.
        read_video: (family, processor, video) -> what it brings.
        most_pixels: (processor) -> how many pixels of a picture it keeps at most.
        more: (whole prompt) -> forward kwargs that need it.
        wrap: (processor, rendered text with slots) -> the text that the processor makes of it.
        tidy: (processor, text with features) -> the text that is tokenised.
        engine_picture: (processor, picture) -> the picture for an engine that runs the processor by itself, such that
            it makes the same of it as `read`.
        engine_processor: (processor, pixel budget) -> the processor that such an engine has to run.
    """

    name: str
    processors: tuple[str, ...] = ()
    slot: str = ""
    video_slot: str = ""
    feature: str = ""
    video_feature: str = ""
    written: str = ""
    video_written: str = ""
    vision_tokens: str = ""
    join: Mapping[str, Join] = field(default_factory=dict[str, Join])
    drop: tuple[str, ...] = ()
    vision_modules: tuple[str, ...] = ("visual", "vision_tower", "vision_model")
    min_pictures: int = 0
    alike: bool = False
    inferred: bool = False
    together: bool = False
    read: Callable[["Family", Any, Sequence[Sized]], Features] = read_pictures
    read_video: Callable[["Family", Any, Clip], Features] | None = None
    most_pixels: Callable[[Any], float] = no_limit
    more: Callable[[Whole], Tensors] = no_more
    wrap: Callable[[Any, str], str] = as_it_is
    tidy: Callable[[Any, str], str] = as_it_is
    engine_picture: Callable[[Any, Sized], Image.Image] = as_resized
    engine_processor: Callable[[Any, Mapping[str, int]], Any] = same_processor

    def slot_of(self, kind: str) -> str:
        """The token that stands for one medium of a kind in the rendered prompt."""
        return self.slot if kind == "image" else self.video_slot

    def feature_of(self, kind: str) -> str:
        """The token that stands for one feature of a kind in the expanded prompt."""
        return (self.feature if kind == "image" else self.video_feature) or self.slot_of(kind)

    def written_as(self, kind: str) -> str:
        """How one medium of a kind is written in a plain string."""
        return (self.written if kind == "image" else self.video_written) or self.slot_of(kind)

    def vision_ids(self, added: Mapping[str, int]) -> dict[str, int]:
        """Of a tokenizer's added tokens, with their ids, those that no completion may hold."""
        pattern = re.compile(self.vision_tokens)
        return {token: i for token, i in added.items() if self.vision_tokens and pattern.fullmatch(token)}

    def keep(self, output: Mapping[str, Any]) -> Tensors:
        """Of a processor's output what belongs to the pictures themselves.

        Raises:
            ValueError: a tensor that the family has no rule for.
        """
        of_text = ("input_ids", "attention_mask", *self.drop)
        if unknown := [name for name in output if name not in self.join and name not in of_text]:
            raise ValueError(
                f"the family {self.name} has no rule for {unknown[0]}, which the processor returns; add it to join or "
                "drop"
            )
        return {
            name: tensor
            for name, tensor in output.items()
            if name in self.join and self.join[name].kind is not JoinKind.TOKENS
        }
