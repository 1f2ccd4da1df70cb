"""Videos: a file, or a list of frames, becomes a clip of sampled frames in one size.

Which frames and which size is the arithmetic of qwen-vl-utils; files are decoded by PyAV, which it brings along. As
with pictures, a video that comes from a file is decoded again when its frames are asked for.
"""

import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image

from vlmroll_processors.images import RESIZE_KEYS, Picture, read_picture

SAMPLING_KEYS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
VIDEO_KEYS = (*SAMPLING_KEYS, "sample_fps", "total_pixels", *RESIZE_KEYS)
"""Keys that may stand beside a video, as qwen-vl-utils reads them; pixels are those of one frame."""
_FRAME_FACTOR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """The frames of a video that a model sees.

    Attributes:
        frames: uint8 [F, 3, H, W].
        fps: frames for each second of the file, or of the list.
        indices: which frame of the file each one is.
        total: number of frames of the part of the file that was sampled.
    """

    frames: torch.Tensor
    fps: float
    indices: tuple[int, ...]
    total: float

    @property
    def sampled_fps(self) -> float:
        """Frames of the clip for each second."""
        return len(self.indices) / self.total * self.fps

    @property
    def metadata(self) -> dict[str, Any]:
        """The same for a video processor of transformers."""
        return {"fps": self.fps, "frames_indices": list(self.indices), "total_num_frames": self.total}


@dataclass(frozen=True, kw_only=True, slots=True)
class Video:
    """One video as it was read.

    Attributes:
        source: its file or its bytes, or its frames as pictures.
        sha256: hex digest of the clip: size, pixels and times.
        size: width and height of its frames in pixels, after resizing.
        num_frames: number of sampled frames.
        keys: the keys that it was read with (`VIDEO_KEYS`).
        factor: height and width are multiples of it.
    """

    source: Path | bytes | tuple[Picture, ...] = field(repr=False, compare=False)
    sha256: str
    size: tuple[int, int]
    num_frames: int
    keys: tuple[tuple[str, float], ...] = ()
    factor: int

    @property
    def kind(self) -> Literal["video"]:
        """Tells it from a picture."""
        return "video"

    @property
    def key(self) -> tuple[str, tuple[tuple[str, float], ...]]:
        """Cache key."""
        return self.sha256, self.keys

    @property
    def clip(self) -> Clip:
        """The frames; from a file they are decoded anew each time.

        Raises:
            ValueError: the file has changed since the video was read.
        """
        frames = isinstance(self.source, tuple)
        source = [picture.image for picture in self.source] if frames else self.source  # pyright: ignore
        found, clip = read_video(source, where="a video of the prompt", keys=dict(self.keys), factor=self.factor)
        if found.sha256 != self.sha256:
            raise ValueError("a video has changed since it was encoded; keep the files of a run as they are")
        return clip


def read_video(source: Any, *, where: str, keys: Mapping[str, float], factor: int) -> tuple[Video, Clip]:
    """Read one video; also its frames, which the first does not keep when they come from a file.

    Args:
        source: a path, bytes, a list of frames (each as a picture may be given) or an array [F, H, W, 3].
        where: row and column, for error messages.
        keys: see `VIDEO_KEYS`. Of a list of frames all are taken, so it has no sampling keys but `fps` (or
            `sample_fps`), the rate at which they were taken.
        factor: height and width are rounded to multiples of it.

    Raises:
        ValueError: the source cannot be read, or a key does not go with it.
    """
    file = _file(source, where=where)
    if file is not None:
        if "sample_fps" in keys:
            raise ValueError(f"{where}: sample_fps is the rate of a list of frames; give a file's sampling as fps")
        kept: Path | bytes | tuple[Picture, ...] = file
        frames, fps, indices, total = _decode(file, keys, where=where)
    else:
        kept, frames = _frames(source, where=where)
        if given := [key for key in SAMPLING_KEYS[1:] if key in keys]:
            raise ValueError(f"{where}: {given[0]} does not go with a list of frames, which are all taken; drop it")
        if "fps" in keys and "sample_fps" in keys:
            raise ValueError(f"{where}: both fps and sample_fps are given for a list of frames; keep one")
        fps = float(keys.get("sample_fps", keys.get("fps", 2.0)))
        indices, total = list(range(len(frames))), len(frames)
    frames = _resized(frames, keys, factor, where=where)
    clip = Clip(frames=frames, fps=fps, indices=tuple(indices), total=total)
    digest = hashlib.sha256(repr((tuple(frames.shape), fps, clip.indices, total)).encode())
    digest.update(frames.numpy().tobytes())
    size = frames.shape[3], frames.shape[2]
    sorted_keys = tuple(sorted(keys.items()))
    name = digest.hexdigest()
    return Video(source=kept, sha256=name, size=size, num_frames=len(frames), keys=sorted_keys, factor=factor), clip


def _file(source: Any, *, where: str) -> Path | bytes | None:
    """The file of a video, or its bytes; None for frames."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str | Path):
        return None
    if "://" in str(source) and not str(source).startswith("file://"):
        raise ValueError(f"{where}: remote videos are not fetched ({source!r:.200}); download it and give its path")
    path = Path(str(source).removeprefix("file://")).absolute()
    try:
        found = path.is_file()
    except OSError:  # a name that no file can have
        found = False
    if not found:
        raise ValueError(f"{where}: there is no video file at {str(path)!r:.200}; check the path")
    return path


def _frames(source: Any, *, where: str) -> tuple[tuple[Picture, ...], torch.Tensor]:
    """The frames of a list, uint8 [F, 3, H, W], an even number of them."""
    if isinstance(source, np.ndarray | torch.Tensor) and source.ndim == 4:
        source = list(np.asarray(source))
    if isinstance(source, Image.Image):
        raise ValueError(f"{where}: a picture in a video's place; a list of frames is one video: videos=[[...]]")
    if not isinstance(source, Sequence) or not source:
        found = "an empty list" if isinstance(source, Sequence) else type(source).__name__
        raise ValueError(
            f"{where}: a video cannot be made from {found}; give a path, bytes, a list of frames or an array "
            "[F, H, W, 3]"
        )
    items = cast("Sequence[Any]", source)
    read = [read_picture(frame, where=f"{where}, frame {i}") for i, frame in enumerate(items)]
    if len(sizes := {picture.size for picture, _ in read}) > 1:
        raise ValueError(f"{where}: its frames have different sizes ({sorted(sizes)}); make them alike")
    frames = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for _, image in read]
    frames += frames[-1:] * (-len(frames) % _FRAME_FACTOR)  # two frames make one patch in time
    return tuple(picture for picture, _ in read), torch.stack(frames)


def _decode(file: Path | bytes, keys: Mapping[str, float], *, where: str) -> tuple[torch.Tensor, float, list[int], int]:
    """The sampled frames of a file, their rate, indices and number in the file."""
    import av
    from av.error import FFmpegError
    from qwen_vl_utils import vision_process as qwen  # pyright: ignore[reportMissingTypeStubs]

    def opened() -> Any:
        return av.open(io.BytesIO(file) if isinstance(file, bytes) else str(file))

    try:
        with opened() as container:
            stream = container.streams.video[0]
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            # Counted: some containers do not tell, and others count frames that were cut off.
            shown = sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)
        start, end, count = qwen.calculate_video_frame_range(dict(keys), shown, rate)
        wanted = qwen.smart_nframes(dict(keys), total_frames=count, video_fps=rate)
        indices: list[int] = torch.linspace(start, end, wanted).round().long().tolist()
        found: dict[int, torch.Tensor] = {}
        with opened() as container:
            container.streams.video[0].thread_type = "AUTO"
            for i, frame in enumerate(container.decode(video=0)):
                if i in set(indices):
                    pixels = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
                    found[i] = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
                if i >= indices[-1]:
                    break
    except (FFmpegError, LookupError, OSError, ValueError, AssertionError) as error:
        picture = isinstance(file, Path) and file.suffix.lower() in Image.registered_extensions()
        hint = "; it is a picture, and a list of frames is one video: videos=[[...]]" if picture else ""
        raise ValueError(f"{where}: the video cannot be read ({type(error).__name__}: {error!s:.200}){hint}") from error
    if missing := [i for i in indices if i not in found]:
        raise ValueError(f"{where}: the video ends before frame {missing[0]} of {count}; replace the file")
    return torch.stack([found[i] for i in indices]), rate, indices, count


def _resized(frames: torch.Tensor, keys: Mapping[str, float], factor: int, *, where: str) -> torch.Tensor:
    """The frames in the size that qwen-vl-utils gives them, resized once."""
    from qwen_vl_utils import vision_process as qwen  # pyright: ignore[reportMissingTypeStubs]
    from torchvision.transforms import InterpolationMode, functional

    count, _, height, width = frames.shape
    if keys.get("min_pixels", 0) > keys.get("max_pixels", math.inf):
        raise ValueError(f"{where}: min_pixels={keys['min_pixels']} is above max_pixels={keys['max_pixels']}")
    try:
        if "resized_height" in keys:
            size = qwen.smart_resize(int(keys["resized_height"]), int(keys["resized_width"]), factor=factor)
        else:
            low = int(keys.get("min_pixels", qwen.VIDEO_MIN_TOKEN_NUM * factor**2))
            total = keys.get("total_pixels", qwen.MODEL_SEQ_LEN * factor**2 * 0.9)
            most = max(min(qwen.VIDEO_MAX_TOKEN_NUM * factor**2, total / count * _FRAME_FACTOR), int(low * 1.05))
            high = int(min(keys.get("max_pixels", most), most))
            size = qwen.smart_resize(height, width, factor=factor, min_pixels=min(low, high), max_pixels=high)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{where}: a video of {width}x{height} pixels cannot be resized: {error}") from error
    size = [max(factor, side) for side in size]  # a long strip would lose its short side
    return functional.resize(frames, size, interpolation=InterpolationMode.BICUBIC, antialias=True)
