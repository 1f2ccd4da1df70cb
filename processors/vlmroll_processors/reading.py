"""Pictures and videos -> what they bring to a prompt, each distinct one read and processed once.

One picture is decoded at a time, processed at once and let go, so a thousand prompts of large photographs need no more
memory than their processed tensors (families whose pictures depend on each other hold those of one prompt).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vlmroll_processors.families.base import Family, Features, Sized
from vlmroll_processors.images import Picture, read_picture
from vlmroll_processors.media import NOUNS, Medium
from vlmroll_processors.videos import Video, read_video

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Media that were processed together: one, or all pictures of a prompt in families where they depend on each other.

    Attributes:
        media: the pictures or videos, in slot order.
        features: what they bring.
    """

    media: tuple[Picture | Video, ...]
    features: Features


class Reader:
    """Reads the media of one call of `encode`.

    Args:
        family, processor: whose they are.
        budget: `min_pixels` and `max_pixels` of the run, where they are set.
    """

    def __init__(self, family: Family, processor: Any, budget: Mapping[str, int]) -> None:
        self._family, self._processor, self._budget = family, processor, budget
        self._features: dict[Any, Features] = {}
        self._files: dict[Any, Picture] = {}

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
            return [self._together(media)]
        return [self._video(medium) if medium.kind == "video" else self._picture(medium) for medium in media]

    def _picture(self, medium: Medium) -> Unit:
        place = (medium.source, tuple(medium.keys.items())) if isinstance(medium.source, str | Path) else None
        picture, image = self._files.get(place), None
        if picture is None:
            picture, image = read_picture(medium.source, where=medium.where, resize=_whole(medium.keys))
            if place is not None:
                self._files[place] = picture
        if picture.key not in self._features:
            sized = Sized(image=image or picture.image, own=dict(picture.resize), budget=self._budget)
            self._features[picture.key] = _named(
                lambda: self._family.read(self._family, self._processor, [sized]), medium, picture.size
            )
        return Unit(media=(picture,), features=self._features[picture.key])

    def _together(self, media: Sequence[Medium]) -> Unit:
        found = [read_picture(medium.source, where=medium.where, resize=_whole(medium.keys)) for medium in media]
        pictures = tuple(picture for picture, _ in found)
        key = tuple(picture.key for picture in pictures)
        if key not in self._features:
            sized = [Sized(image=image, own=dict(picture.resize), budget=self._budget) for picture, image in found]
            self._features[key] = _named(
                lambda: self._family.read(self._family, self._processor, sized), media[0], pictures[0].size
            )
        return Unit(media=pictures, features=self._features[key])

    def _video(self, medium: Medium) -> Unit:
        assert self._family.read_video is not None
        read = self._family.read_video
        like = self._processor.video_processor
        factor = like.patch_size * like.merge_size
        video, clip = read_video(medium.source, where=medium.where, keys={**self._budget, **medium.keys}, factor=factor)
        if video.key not in self._features:
            self._features[video.key] = _named(lambda: read(self._family, self._processor, clip), medium, video.size)
        return Unit(media=(video,), features=self._features[video.key])


def smaller(media: Sequence[Medium], max_pixels: int, min_pixels: int | None) -> list[Medium]:
    """The media with at most so many pixels each (each frame, in a video).

    Args:
        min_pixels: the run's own bound, which a smaller `max_pixels` takes along.
    """
    fixed = ("resized_height", "resized_width", "max_pixels", "total_pixels")

    def keys(medium: Medium) -> dict[str, float]:
        kept = {key: value for key, value in medium.keys.items() if key not in fixed}
        low = kept.get("min_pixels", min_pixels)
        bounds = {"max_pixels": max_pixels} | ({} if low is None else {"min_pixels": min(low, max_pixels)})
        return kept | bounds

    return [replace(medium, keys=keys(medium)) for medium in media]


def _whole(keys: Mapping[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in keys.items()}


def _named(work: Callable[[], Result], medium: Medium, size: tuple[int, int]) -> Result:
    """Run a processor; what it refuses is told with row, column and size, which it does not know."""
    try:
        return work()
    except ValueError as error:
        noun, shape = "video" if medium.kind == "video" else "picture", "x".join(map(str, size))
        raise ValueError(f"{medium.where}: the processor refuses a {noun} of {shape} pixels: {error}") from error
