"""The values that an adapter hands out: `Prompt`, and the rules by which its tensors join a batch.

Shapes: P prompt tokens, R rows of one prompt's image tensors (patches, tiles or images).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch

from vlmroll_processors.images import Picture
from vlmroll_processors.videos import Video

# What a per-token tensor holds over the completion: a constant, positions that go on from the prompt's largest one, or
# the prompt's last entry again.
CompletionRule = int | Literal["count_on", "repeat"]


class JoinKind(Enum):
    """How the forward kwarg of one prompt meets those of the others."""

    ROWS = "rows"
    """Axis 0 counts patches, tiles or images: concatenate; a prompt without pictures brings no rows."""
    SAMPLES = "samples"
    """Axis 0 is 1 for each prompt, axis 1 counts its tiles or images: pad all trailing axes to the batch's maximum,
    then concatenate. A prompt without pictures becomes padding, unless no prompt of the batch has any."""
    TOKENS = "tokens"
    """One value for each token: padded like the ids, and continued over the completion."""


JOINED_ON = {JoinKind.ROWS: 0, JoinKind.SAMPLES: 1, JoinKind.TOKENS: 0}
"""The axis on which the media of one prompt join: its tiles lie side by side on axis 1 where axis 0 counts prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """How one forward kwarg joins a batch.

    Attributes:
        kind: see `JoinKind`.
        pad: the value of padding.
        completion: TOKENS only; what a completion token gets: a constant, "count_on" for positions, which continue
            from the prompt's largest position, or "repeat" for the entry of the prompt's last token. What is repeated
            belongs to every token, so engines that decode step by step pass it at each step.
        prompt: TOKENS only; what the prompt's own tensor holds, where a word can say it: "zeros", or "marks", which is
            1 on the features of pictures, 2 on those of videos and 0 elsewhere.
        token_axis: TOKENS only; the axis of one prompt's tensor that counts tokens. The batch axis is put before it,
            so position ids of shape [3, P] join to [3, B, T].
        pad_axes: ROWS only; trailing axes whose size differs between prompts and is padded to the batch's maximum.

    Example:
        >>> Join(kind=JoinKind.TOKENS, pad=0, completion=0).kind
        <JoinKind.TOKENS: 'tokens'>
    """

    kind: JoinKind
    pad: int | float = 0
    completion: CompletionRule = 0
    token_axis: int = 0
    pad_axes: tuple[int, ...] = ()
    prompt: Literal["", "zeros", "marks"] = ""

    def __post_init__(self) -> None:
        if self.token_axis < 0 or any(axis < 1 for axis in self.pad_axes):
            raise ValueError(f"axes count from the front, and axis 0 of rows is not padded; got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpan:
    """Where one picture or video sits in `Prompt.prompt_ids`: `length` tokens from `offset` on.

    The first and the last of them are features of the picture; between them may stand what the family writes between
    tiles, rows or frames.
    """

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise ValueError(f"an image span needs offset >= 0 and length >= 1, got {self.offset} and {self.length}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaUnit:
    """One picture or video of a prompt, or all that were processed together: its share of the prompt's tensors.

    Attributes:
        num_features: how many tokens of the prompt hold its features.
        rows: for each forward kwarg that it brings, how many rows are its own (SAMPLES: places on axis 1). The rows of
            a prompt's units follow each other in the order of the units.
    """

    num_features: int
    rows: Mapping[str, int]


def _no_tensors() -> Mapping[str, torch.Tensor]:
    return {}


def _no_joins() -> Mapping[str, Join]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class Prompt:
    """One prompt, encoded once: what every generator samples from and the trainer trains on.

    The siblings of a group share one `Prompt` object; prompts are compared by identity. It checks itself: every kwarg
    has a join rule, per-token kwargs have one value for each token, and the spans lie inside the ids, in order, one for
    each picture and video.

    Attributes:
        prompt_ids: [P] token ids with the placeholders expanded, as the model's forward eats them.
        engine_ids: token ids with one placeholder for each picture, for engines that expand placeholders themselves.
        text: the rendered prompt, for logs.
        images: the pictures in prompt order, normalised and hashed.
        image_spans: one span for each picture, in the same order.
        videos, video_spans: the same for videos.
        units: which rows of the forward kwargs each picture and video brought; empty where that is not known.
        forward_kwargs: the model's other inputs for this prompt alone (TOKENS without batch axis, ROWS and SAMPLES
            with their axis 0).
        join: the join rule of each forward kwarg.
        batch_key: prompts with different keys do not go into one forward pass, since the model would mix them up.

    Example:
        >>> Prompt(prompt_ids=(5, 6), engine_ids=(5, 6), text="hi there").num_tokens
        2
    """

    prompt_ids: tuple[int, ...]
    engine_ids: tuple[int, ...]
    text: str = ""
    images: tuple[Picture, ...] = ()
    image_spans: tuple[ImageSpan, ...] = ()
    videos: tuple[Video, ...] = ()
    video_spans: tuple[ImageSpan, ...] = ()
    units: tuple[MediaUnit, ...] = ()
    forward_kwargs: Mapping[str, torch.Tensor] = field(default_factory=_no_tensors)
    join: Mapping[str, Join] = field(default_factory=_no_joins)
    batch_key: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a prompt needs at least one token; the rendered prompt was empty")
        for media, spans, kind in (
            (self.images, self.image_spans, "picture"),
            (self.videos, self.video_spans, "video"),
        ):
            if len(media) != len(spans):
                raise ValueError(f"{len(media)} {kind}s but {len(spans)} {kind} spans")
            end = 0
            for span in spans:
                if span.offset < end or span.offset + span.length > len(self.prompt_ids):
                    raise ValueError(f"{kind} span {span} overlaps another or leaves the {len(self.prompt_ids)} ids")
                end = span.offset + span.length
        if missing := sorted(set(self.forward_kwargs) - set(self.join)):
            raise ValueError(f"forward kwargs without a join rule: {', '.join(missing)}")
        for name, tensor in self.forward_kwargs.items():
            rule = self.join[name]
            if rule.kind is JoinKind.TOKENS and tensor.shape[rule.token_axis] != len(self.prompt_ids):
                raise ValueError(f"{name} has {tuple(tensor.shape)} for {len(self.prompt_ids)} prompt tokens")
            if rule.kind is JoinKind.SAMPLES and tensor.shape[0] != 1:
                raise ValueError(f"{name} has {tuple(tensor.shape)}; axis 0 of a per-sample input is 1")
        for name in {name for unit in self.units for name in unit.rows}:
            shape, counts = self.forward_kwargs[name].shape, [unit.rows.get(name, 0) for unit in self.units]
            if sum(counts) != shape[JOINED_ON[self.join[name].kind]]:
                raise ValueError(f"{name} has {tuple(shape)}, but its units bring {counts} rows")
        object.__setattr__(self, "forward_kwargs", MappingProxyType(dict(self.forward_kwargs)))
        object.__setattr__(self, "join", MappingProxyType(dict(self.join)))

    def __repr__(self) -> str:
        media = f"{len(self.images)} pictures" + (f", {len(self.videos)} videos" if self.videos else "")
        return f"Prompt({self.num_tokens} tokens, {media}, text={self.text[:40]!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only views cannot be pickled, and loader workers and processes exchange prompts.
        values = {name.name: getattr(self, name.name) for name in fields(self)}
        plain = {"forward_kwargs": dict(self.forward_kwargs), "join": dict(self.join)}
        return partial(Prompt, **{**values, **plain}), ()

    def unit_kwargs(self) -> list[dict[str, torch.Tensor]]:
        """For each unit the forward kwargs that it brought, as views of the prompt's."""
        found: list[dict[str, torch.Tensor]] = []
        ends = dict.fromkeys(self.forward_kwargs, 0)
        for unit in self.units:
            found.append({})
            for name, count in unit.rows.items():
                found[-1][name] = self.forward_kwargs[name].narrow(JOINED_ON[self.join[name].kind], ends[name], count)
                ends[name] += count
        return found

    @property
    def num_tokens(self) -> int:
        """P, the number of tokens with the placeholders expanded."""
        return len(self.prompt_ids)

    @property
    def num_image_tokens(self) -> int:
        """How many of the tokens lie in the spans of pictures and videos."""
        return sum(span.length for span in (*self.image_spans, *self.video_spans))


Row = Mapping[str, Any]
"""A dataset row: column name to value."""
