"""One normalisation of pictures, done before any backend, so that every backend sees the same pixels.

A picture from any source becomes a `Picture`: RGB, 8 bits for each channel, turned as its EXIF data says, transparency
laid over white, and a content hash that serves as cache key. Pictures with several frames are refused, since taking
one silently would drop the others.

A picture that comes from a file or from bytes is not kept decoded: `Picture.image` decodes it again. So a prompt of ten
large photographs holds ten paths.
"""

import base64
import hashlib
import io
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

BACKGROUND = (255, 255, 255)
"""The colour under transparent pixels."""

RESIZE_KEYS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Per-picture size keys of a content part, as qwen-vl-utils reads them."""

# What Pillow's decoders raise for broken files: OSError for cut ones, and any of the others by format.
_UNREADABLE = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    Image.DecompressionBombError,
)
_BAND = 64  # rows of pixels
_REMOTE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)

ImageSource = Any
"""A PIL image, path, bytes, data URL, `{"bytes": ..., "path": ...}` as datasets stores it, or an array [H, W(, C)]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One normalised picture.

    Attributes:
        source: the normalised picture, or the path or bytes that it is decoded from when it is asked for.
        sha256: hex digest of size and pixels; equal pictures have equal digests, whatever their source.
        size: width and height in pixels.
        resize: per-picture size keys (`RESIZE_KEYS`), empty when the processor's own budget applies.
    """

    source: Image.Image | Path | bytes = field(repr=False, compare=False)
    sha256: str
    size: tuple[int, int]
    resize: tuple[tuple[str, int], ...] = ()

    @property
    def image(self) -> Image.Image:
        """The picture: RGB, 8 bits for each channel. From a file it is decoded anew each time.

        Raises:
            ValueError: the file has changed since the picture was read.
        """
        if isinstance(self.source, Image.Image):
            return self.source
        name = f"the picture {self.source}" if isinstance(self.source, Path) else "a picture from bytes"
        found, image = read_picture(self.source, where=name)
        if found.sha256 != self.sha256:
            raise ValueError(f"{name} has changed since it was encoded; keep the files of a run as they are")
        return image

    @property
    def kind(self) -> Literal["image"]:
        """Tells it from a video."""
        return "image"

    @property
    def key(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        """Cache key: content and requested size."""
        return self.sha256, self.resize


def read_picture(
    source: ImageSource, *, where: str, resize: Mapping[str, int] | None = None
) -> tuple[Picture, Image.Image]:
    """Read and normalise one picture; also the decoded picture itself, which the first does not keep.

    Args:
        source: see `ImageSource`.
        where: row and column, for error messages, such as "row 3, column 'images'[1]".
        resize: per-picture size keys.

    Raises:
        ValueError: the source is missing, unreadable, of an unknown type, has several frames, or is a remote address.

    Example:
        >>> read_picture(Image.new("L", (4, 4), 255), where="row 0")[1].mode
        'RGB'
    """
    source = _innermost(source, where=where)
    try:
        image = normalise(open_image(source, where=where), where=where)
    except _UNREADABLE as error:
        if str(error).startswith(where):  # our own words, not Pillow's
            raise
        unknown = isinstance(error, UnidentifiedImageError)  # its own words name an address in memory
        reason = "no format that is known" if unknown else f"{type(error).__name__}: {error!s:.200}"
        raise ValueError(f"{where}: the picture cannot be read ({reason}); replace the file or drop the row") from error
    kept = source if isinstance(source, Path | bytes) else image
    keys = tuple(sorted((resize or {}).items()))
    return Picture(source=kept, sha256=_digest(image), size=image.size, resize=keys), image


def _digest(image: Image.Image) -> str:
    """Of size and pixels, a band at a time: the bytes of a whole photograph would be two more copies of it."""
    digest = hashlib.sha256(f"{image.size}".encode())
    for top in range(0, image.height, _BAND):
        digest.update(image.crop((0, top, image.width, min(top + _BAND, image.height))).tobytes())
    return digest.hexdigest()


def resized(image: Image.Image, keys: Mapping[str, int]) -> Image.Image:
    """The picture in the size that `RESIZE_KEYS` ask for, with its shape kept by `min_pixels` and `max_pixels`.

    Raises:
        ValueError: `min_pixels` is above `max_pixels`.
    """
    pixels = image.width * image.height
    low, high = keys.get("min_pixels", 1), keys.get("max_pixels", max(pixels, keys.get("min_pixels", 1)))
    if low > high:
        raise ValueError(f"min_pixels={low} is above max_pixels={high}")
    size = keys.get("resized_width", image.width), keys.get("resized_height", image.height)
    if "resized_width" not in keys and not low <= pixels <= high:
        scale = math.sqrt((high if pixels > high else low) / pixels)
        whole = math.floor if pixels > high else math.ceil
        size = max(1, whole(image.width * scale)), max(1, whole(image.height * scale))
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


def _innermost(source: ImageSource, *, where: str) -> ImageSource:
    """The picture, path or bytes inside the forms that `ImageSource` allows for them."""
    if isinstance(source, Mapping):
        content, path = source.get("bytes"), source.get("path")
        if content is None and path is None:
            raise ValueError(f"{where}: the picture has neither 'bytes' nor 'path'; give one of them")
        return _innermost(content if content is not None else path, where=where)
    if isinstance(source, bytearray | memoryview):
        return bytes(source)
    if isinstance(source, str) and source.startswith("data:"):
        return _data_url_bytes(source, where=where)
    if isinstance(source, str) and _REMOTE.match(source):
        raise ValueError(f"{where}: remote pictures are not fetched ({source!r:.200}); download it and give its path")
    return Path(source.removeprefix("file://")).absolute() if isinstance(source, str) else source


def open_image(source: ImageSource, *, where: str) -> Image.Image:
    """The picture as Pillow opens it, not yet normalised; see `ImageSource` for what `source` may be."""
    source = _innermost(source, where=where)
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source))
    if isinstance(source, np.ndarray):
        return _from_array(source, where=where)
    if isinstance(source, Path):
        if not source.is_file():
            raise ValueError(f"{where}: there is no picture file at {str(source)!r:.200}; check the path")
        return Image.open(io.BytesIO(source.read_bytes()))
    raise ValueError(
        f"{where}: a picture cannot be made from {type(source).__name__}; give a PIL image, a path, bytes, "
        "a data URL, {'bytes': ...} or an array"
    )


def normalise(image: Image.Image, *, where: str) -> Image.Image:
    """RGB, 8 bits, upright, over `BACKGROUND`; always a picture of its own, never the caller's object.

    Raises:
        ValueError: the picture has several frames (a multi-picture JPEG counts as one) or no pixels.
    """
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        frames = getattr(image, "n_frames", 1)
        raise ValueError(f"{where}: the picture has {frames} frames; give one frame (image.seek(i); image.copy())")
    if 0 in image.size:
        raise ValueError(f"{where}: the picture has no pixels (size {image.size})")
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = _to_8_bits(image, where=where)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        flat = Image.new("RGBA", image.size, (*BACKGROUND, 255))
        image = Image.alpha_composite(flat, image)
    rgb = image.convert("RGB")
    rgb.info.clear()  # a stale "transparency" entry would be read again by whoever converts next
    return rgb.copy() if rgb is image else rgb


def _to_8_bits(image: Image.Image, *, where: str) -> Image.Image:
    """Scale 16-bit greys to 8 bits; Pillow itself would clip them to white."""
    values = np.asarray(image)
    if values.dtype.kind == "f":
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise ValueError(f"{where}: a picture of floats must hold values from 0 to 1; scale it first")
        return Image.fromarray((values * 255).round().astype(np.uint8))
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"{where}: a 32-bit picture must hold values from 0 to 65535; scale it first")
    grey = Image.fromarray((values.astype(np.float64) / 257).round().astype(np.uint8))
    if "transparency" not in image.info:
        return grey
    # A 16-bit PNG names one grey value that is transparent.
    alpha = Image.fromarray(np.where(values == image.info["transparency"], 0, 255).astype(np.uint8))
    return Image.merge("LA", (grey, alpha))


def _from_array(values: np.ndarray, *, where: str) -> Image.Image:
    channels_ok = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (1, 3, 4))
    if not channels_ok or values.dtype != np.uint8:
        raise ValueError(
            f"{where}: an array picture must be uint8 of shape [H, W], [H, W, 1], [H, W, 3] or [H, W, 4], "
            f"got {values.dtype} {list(values.shape)}"
        )
    return Image.fromarray(values[:, :, 0] if values.ndim == 3 and values.shape[2] == 1 else values)


def _data_url_bytes(url: str, *, where: str) -> bytes:
    header, _, payload = url.partition(",")
    if not header.endswith(";base64"):
        raise ValueError(f"{where}: a data URL must be base64 ('data:image/png;base64,...'), got {header!r}")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:  # binascii.Error is one; so is the refusal of characters beyond ASCII
        raise ValueError(f"{where}: the data URL's base64 is broken ({error})") from error
