"""Pictures and videos -> what they bring to a prompt, each distinct one read and processed once.

One picture is decoded at a time, processed at once and let go, so a thousand prompts of large photographs need no more
memory than their processed tensors (families whose pictures depend on each other hold those of one prompt).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vlmroll_processors.families.base import Family, Features, Sized, Tensors
from vlmroll_processors.images import Picture, read_picture
from vlmroll_processors.media import NOUNS, Medium
from vlmroll_processors.types import JOINED_ON, Prompt
from vlmroll_processors.videos import Video, read_video

_FEWEST_PIXELS = 28 * 28
Result = TypeVar("Result")
# What processors raise for pictures in shapes that they cannot take.
_REFUSALS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Media that were processed together: one, or all pictures of a prompt in families where they depend on each other.

    Attributes:
        media: the pictures or videos, in slot order.
        features: what they bring.
    """

    media: tuple[Picture | Video, ...]
    features: Features

    @property
    def key(self) -> tuple[Any, ...]:
        """Tells it from others: content and sizes."""
        return tuple(medium.key for medium in self.media)


class Reader:
    """Reads the media of one call of `encode`.

    Args:
        family, processor: whose they are.
        budget: `min_pixels` and `max_pixels` of the run, where they are set.
    """

    def __init__(self, family: Family, processor: Any, budget: Mapping[str, int]) -> None:
        self._family, self._processor, self._budget = family, processor, budget
        self._features: dict[Any, Features] = {}
        self._files: dict[Any, Picture | Video] = {}

    def check(self, media: Sequence[Medium]) -> None:
        """Refuse media that the family does not take.

        Raises:
            ValueError: names their row and column.
        """
        for medium in media:
            if not self._family.slot:
                noun = "picture" if medium.kind == "image" else medium.kind
                raise ValueError(f"{medium.where}: a {noun}, but the model takes text only; drop the {noun}")
            if not self._family.slot_of(medium.kind):
                raise ValueError(
                    f"{medium.where}: the family {self._family.name} takes no {NOUNS[medium.kind]}; give frames as "
                    "pictures"
                )

    def read(self, media: Sequence[Medium]) -> list[Unit]:
        """The units of one prompt, in slot order.

        Raises:
            ValueError: names the row and column of a medium that cannot be read.
        """
        if self._family.together and media:
            return [self._unit(media)]
        return [self._unit([medium]) for medium in media]

    def share(self, units: Sequence[Unit], kwargs: Tensors) -> None:
        """From now on the media of a prompt are views of its joined tensors, so that no pixel is held twice."""
        ends: dict[str, int] = {}
        for unit in units if len(units) > 1 else ():
            views = dict(unit.features.kwargs)
            for name, part in views.items():
                axis = JOINED_ON[self._family.join[name].kind]
                start, ends[name] = ends.get(name, 0), ends.get(name, 0) + part.shape[axis]
                view = kwargs[name].narrow(axis, start, part.shape[axis])
                views[name] = view if view.shape == part.shape else part  # another shape is padded
            self._features[unit.key] = replace(unit.features, kwargs=views)

    def forget(self, units: Sequence[Unit]) -> None:
        """Let go of what these units bring."""
        for unit in units:
            self._features.pop(unit.key, None)

    def _unit(self, group: Sequence[Medium]) -> Unit:
        """Read media that are processed together; what was read before in this call is not decoded again."""
        known = [self._files.get(_place(medium)) for medium in group]
        found = tuple(medium for medium in known if medium is not None)
        if len(found) < len(group) or tuple(medium.key for medium in found) not in self._features:
            decoded = [self._decode(medium) for medium in group]
            found = tuple(medium for medium, _ in decoded)
            key = tuple(medium.key for medium in found)
            if key not in self._features:
                self._features[key] = _named(partial(self._process, decoded), group[0], found[0].size)
        return Unit(media=found, features=self._features[tuple(medium.key for medium in found)])

    def _decode(self, medium: Medium) -> tuple[Picture | Video, Any]:
        """The medium and its pixels."""
        if medium.kind == "video":
            like = self._processor.video_processor
            keys = {**self._budget, **medium.keys}
            factor = like.patch_size * like.merge_size
            decoded = read_video(medium.source, where=medium.where, keys=keys, factor=factor)
        else:
            keys = {key: int(value) for key, value in medium.keys.items()}
            decoded = read_picture(medium.source, where=medium.where, resize=keys)
        if (place := _place(medium)) is not None:
            self._files[place] = decoded[0]
        return decoded

    def _process(self, decoded: Sequence[tuple[Picture | Video, Any]]) -> Features:
        if self._family.read_video is not None and isinstance(decoded[0][0], Video):
            return self._family.read_video(self._family, self._processor, decoded[0][1])
        pictures = [
            Sized(image=image, own=dict(p.resize), budget=self._budget) for p, image in decoded if p.kind == "image"
        ]
        return self._family.read(self._family, self._processor, pictures)


def _place(medium: Medium) -> Any:
    """What tells a file with its keys from another; None for what is no file."""
    source = medium.source
    is_file = isinstance(source, Path) or (isinstance(source, str) and not source.startswith("data:"))
    return (medium.kind, source, tuple(medium.keys.items())) if is_file else None


def _upper(medium: Medium, most: float) -> float:
    """The bound on a medium's pixels that it is read with."""
    return medium.keys.get("max_pixels", most if medium.kind == "image" else math.inf)


def pixels_of(medium: Medium, found: Picture | Video, most: float) -> float:
    """How many pixels of a medium (of a frame, in a video) a model sees at most.

    Args:
        most: the run's `max_pixels`, or the processor's own limit of pictures.
    """
    if "resized_height" in medium.keys:
        return medium.keys["resized_height"] * medium.keys["resized_width"]
    return min(found.size[0] * found.size[1], _upper(medium, most))


def smaller(media: Sequence[Medium], max_pixels: float, *, most: float, min_pixels: int | None) -> list[Medium]:
    """The media with at most so many pixels each (each frame, in a video); none gets more than it had.

    Args:
        most: as in `pixels_of`.
        min_pixels: the run's own bound, which a smaller `max_pixels` takes along.
    """

    def keys(medium: Medium) -> Mapping[str, float]:
        given = medium.keys
        if "resized_height" in given:
            names = ("resized_height", "resized_width")
            scale = min(1.0, math.sqrt(max_pixels / math.prod(given[name] for name in names)))
            return {**given, **{name: max(1, int(given[name] * scale)) for name in names}}
        high = max(1, int(min(max_pixels, _upper(medium, most))))
        low = given.get("min_pixels", min_pixels)
        return {**given, "max_pixels": high} | ({} if low is None else {"min_pixels": min(low, high)})

    return [replace(medium, keys=keys(medium)) for medium in media]


def fitting(
    media: Sequence[Medium],
    prompt: Prompt,
    made: Callable[[Sequence[Medium]], Prompt],
    *,
    limit: int,
    bounds: tuple[int | None, float],
) -> Prompt | None:
    """The prompt with fewer pixels for its media, as many as fit; None when none are few enough.

    Args:
        made: encodes the prompt with other media.
        limit: most tokens.
        bounds: the run's `min_pixels` or None, and `most` of `pixels_of`.
    """
    low, most = bounds
    if limit <= prompt.num_tokens - prompt.num_image_tokens:
        return None

    def attempt(pixels: float) -> Prompt | None:
        try:
            return made(smaller(media, pixels, most=most, min_pixels=low))
        except ValueError:  # too few for the processor
            return None

    least = attempt(_FEWEST_PIXELS)  # in many families pixels do not decide how many tokens there are
    if least is not None and least.num_tokens > limit:
        return None
    shown = {"image": iter(prompt.images), "video": iter(prompt.videos)}
    pixels = max(pixels_of(medium, next(shown[medium.kind]), most) for medium in media)
    while (pixels := _fewer_pixels(prompt, limit, pixels)) > _FEWEST_PIXELS:
        found = attempt(pixels)
        if found is None or found.num_tokens <= limit:
            return found or least
        prompt = found
    return least


def _fewer_pixels(prompt: Prompt, limit: int, pixels: float) -> float:
    """The next pixel budget to try for a prompt over the limit."""
    room = limit - (prompt.num_tokens - prompt.num_image_tokens)
    return pixels * min(max(room, 1) / prompt.num_image_tokens, 0.8)


def _named(work: Callable[[], Result], medium: Medium, size: tuple[int, int]) -> Result:
    """Run a processor; what it refuses is told with row, column and size, which it does not know."""
    try:
        return work()
    except _REFUSALS as error:
        noun, shape = "video" if medium.kind == "video" else "picture", "x".join(map(str, size))
        raise ValueError(f"{medium.where}: the processor refuses a {noun} of {shape} pixels: {error}") from error
