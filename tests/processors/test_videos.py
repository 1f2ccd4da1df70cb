"""Videos: sampled and resized as qwen-vl-utils does, encoded as the processors do, bit for bit, and refused in words.

The oracles are `qwen_vl_utils.fetch_video` (with a reader of ours that decodes whole files, since the readers it knows
are not installed), the processors of transformers on a whole batch, and the models' `get_rope_index` and `generate`.
"""

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from qwen_vl_utils import vision_process as qwen
from torchvision.transforms import InterpolationMode, functional

from naming import steady
from tiny_models import QWEN_FAMILIES, VISION_FAMILIES, picture, tiny, tokenizer, user
from training_runs import ALGORITHMS, GradientRecorder, make_trainer, relative_difference
from vlmroll import TransformersGenerator
from vlmroll.types import SamplingParams
from vlmroll_processors import Prompt, PromptTooLong, collate, load_adapter
from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.videos import VIDEO_KEYS

Row = dict[str, Any]
Fetched = tuple[torch.Tensor, Row, float]
Fetch = Callable[[Row], Fetched]
PATCH, MERGE = 8, 2
RATE, LENGTH = 10, 24
SLOT = {"image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>"}
SMALL = {"min_pixels": 512, "max_pixels": 2048}
TIMED = ("qwen3_vl", "qwen3_5")  # families that write the time before each frame
families = pytest.mark.parametrize("name", QWEN_FAMILIES)


@cache
def adapter(name: str = "qwen2_5_vl") -> FamilyAdapter:
    return load_adapter(tiny(name).processor, config=tiny(name).model.config)


def noise(count: int, width: int = 32, height: int = 32, seed: int = 0) -> np.ndarray:
    """Frames [F, H, W, 3] of noise."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def pil(frames: np.ndarray) -> list[Image.Image]:
    return [Image.fromarray(frame) for frame in frames]


def shade(i: int) -> int:
    """The grey of frame i of the files."""
    return 20 + 9 * i


def write(path: Path, codec: str, count: int = LENGTH, seed: int = 0, size: tuple[int, int] = (64, 48)) -> Path:
    """A real file of grey frames, each lighter than the one before, with a few boxes of noise."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for i, box in enumerate(noise(count, 8, 8, seed)):
            frame = np.full((size[1], size[0], 3), shade(i), np.uint8)
            frame[8:16, 8:16] = box
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


CODECS = {"mp4": "libx264", "avi": "mpeg4", "mkv": "libx264", "webm": "libvpx"}
COUNTED = {"mp4": True, "avi": True, "mkv": False, "webm": False}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("videos")
    return {kind: write(folder / f"film.{kind}", codec) for kind, codec in CODECS.items()}


def decoded(path: Path) -> np.ndarray:
    """Every frame of a file, [F, H, W, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def whole_file(request: Row) -> Fetched:
    """A reader for qwen-vl-utils, by the words of its own readers."""
    every = decoded(Path(request["video"]))
    start, end, count = qwen.calculate_video_frame_range(request, len(every), float(RATE))
    wanted = qwen.smart_nframes(request, total_frames=count, video_fps=float(RATE))
    indices = torch.linspace(start, end, wanted).round().long().tolist()
    metadata = {"fps": float(RATE), "frames_indices": indices, "total_num_frames": count}
    return torch.from_numpy(every[indices]).permute(0, 3, 1, 2), metadata, wanted / count * RATE


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """`fetch_video`: frames, metadata and sampled rate."""
    monkeypatch.setitem(qwen.VIDEO_READER_BACKENDS, "whole file", whole_file)
    monkeypatch.setattr(qwen, "get_video_reader_backend", lambda: "whole file")
    return fetch_video


def fetch_video(request: Row) -> Fetched:
    found: Any = qwen.fetch_video(request, PATCH, return_video_metadata=True, return_video_sample_fps=True)
    (frames, metadata), rate = found
    return frames, metadata, rate


def encode(row: Row, name: str = "qwen2_5_vl") -> Prompt:
    (prompt,) = adapter(name).encode([row])
    return prompt


def refusal(row: Row, name: str = "qwen2_5_vl") -> str:
    """The message with which the row is refused, which must name it."""
    good = {"prompt": "2"}
    with pytest.raises(ValueError, match="^row 7") as caught:
        adapter(name).encode([good, row], [6, 7])
    return str(caught.value)


# Rows of text, pictures and videos, written in every way, against the processor


@dataclass(frozen=True)
class Film:
    """A video of noise that is left in its size: sides of 16 pixels' steps, and at least 1024 pixels."""

    count: int
    width: int = 32
    height: int = 32
    fps: float = 2.0
    seed: int = 0

    @property
    def item(self) -> Row:
        size = {"resized_height": self.height, "resized_width": self.width}
        return {"video": pil(self.pixels), "sample_fps": self.fps, **size}

    @property
    def pixels(self) -> np.ndarray:
        return noise(self.count, self.width, self.height, self.seed)

    @property
    def fetched(self) -> tuple[torch.Tensor, Row]:
        """The frames, an even number of them, and what `fetch_video` says of their times."""
        _, metadata, _ = fetch_video(self.item)
        frames = np.concatenate([self.pixels, self.pixels[-1:]]) if self.count % 2 else self.pixels
        return torch.from_numpy(frames).permute(0, 3, 1, 2), metadata


Piece = str | Image.Image | Film


def kind_of(piece: Piece) -> str:
    return "text" if isinstance(piece, str) else "video" if isinstance(piece, Film) else "image"


def columns(pieces: Sequence[Piece]) -> Row:
    images = [piece for piece in pieces if isinstance(piece, Image.Image)]
    return {"images": images, "videos": [piece.item for piece in pieces if isinstance(piece, Film)]}


def in_parts(pieces: Sequence[Piece]) -> Row:
    """Everything in the parts of one message."""
    parts: list[Any] = []
    for piece in pieces:
        own = piece.item if isinstance(piece, Film) else {"image": piece} if isinstance(piece, Image.Image) else {}
        parts.append(piece if isinstance(piece, str) else {"type": kind_of(piece), **own})
    return {"prompt": [{"role": "user", "content": parts}]}


def in_columns(pieces: Sequence[Piece]) -> Row:
    """Empty parts, and the media in columns."""
    parts = [piece if isinstance(piece, str) else {"type": kind_of(piece)} for piece in pieces]
    return {"prompt": [{"role": "user", "content": parts}], **columns(pieces)}


def marked(pieces: Sequence[Piece]) -> str:
    return "".join(piece if isinstance(piece, str) else f"<{kind_of(piece)}>" for piece in pieces)


def at_markers(pieces: Sequence[Piece]) -> Row:
    """A chat with markers in its text."""
    return {"prompt": user(marked(pieces)), **columns(pieces)}


def plain(pieces: Sequence[Piece]) -> Row:
    """A plain string with markers."""
    return {"prompt": marked(pieces), **columns(pieces)}


FORMS = (in_parts, in_columns, at_markers)

ROWS: tuple[tuple[Piece, ...], ...] = (
    ("which ", Film(5, 64, 32, 3.0, 1), " is larger ", picture(64, 48, 1), Film(2, 32, 96, 2.0, 2), "?"),
    ("how many dots ?",),
    (picture(40, 100, 2), picture(64, 64, 3), "what is the sum"),
    (Film(8, 32, 64, 29.97, 3), Film(1, 32, 32, 0.5, 4), "7"),
    ("2", picture(32, 32, 4), Film(4, 32, 32, 1.0, 5), picture(96, 32, 5), "3"),
)


def rendered(pieces: Sequence[Piece], *, chat: bool = True) -> str:
    text = "".join(piece if isinstance(piece, str) else SLOT[kind_of(piece)] for piece in pieces)
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" if chat else text


def oracle(name: str, rows: Sequence[Sequence[Piece]], *, chat: bool = True) -> dict[str, torch.Tensor]:
    """The processor's own output for the whole batch, with the videos as qwen-vl-utils hands them over."""
    images = [piece for pieces in rows for piece in pieces if isinstance(piece, Image.Image)]
    films = [piece.fetched for pieces in rows for piece in pieces if isinstance(piece, Film)]
    options: Row = {"images": images} if images else {}
    if films:
        metadata = [found for _, found in films]
        options["videos"] = [frames for frames, _ in films]
        options["videos_kwargs"] = {"do_sample_frames": False, "do_resize": False, "video_metadata": metadata}
    texts = [rendered(pieces, chat=chat) for pieces in rows]
    return dict(tiny(name).processor(text=texts, padding=True, padding_side="left", return_tensors="pt", **options))


def inputs_of(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    return collate(prompts, pad_token_id=adapter().pad_token_id).model_inputs()


def assert_equals_the_processor(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == {*expected, "position_ids"}
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert found[key].equal(tensor), key


@families
def test_a_mixed_batch_equals_the_processors(name: str) -> None:
    found = inputs_of(adapter(name).encode([in_parts(pieces) for pieces in ROWS]))
    assert_equals_the_processor(found, oracle(name, ROWS))
    assert len(found["video_grid_thw"]) == 5


@families
def test_each_row_of_a_mixed_batch_equals_the_processors_row_alone(name: str) -> None:
    for prompt, pieces in zip(adapter(name).encode([in_parts(row) for row in ROWS]), ROWS, strict=True):
        assert_equals_the_processor(inputs_of([prompt]), oracle(name, [pieces]))


@families
@pytest.mark.parametrize("pieces", ROWS, ids=marked)
def test_every_way_to_write_a_row_gives_the_same_prompt(name: str, pieces: tuple[Piece, ...]) -> None:
    first, *others = adapter(name).encode([form(pieces) for form in FORMS])
    assert all(prompt is first for prompt in others)
    assert first.text == rendered(pieces)
    assert_equals_the_processor(inputs_of([encode(plain(pieces), name)]), oracle(name, [pieces], chat=False))


@families
def test_media_without_slots_stand_in_front_with_pictures_before_videos(name: str) -> None:
    pieces = (picture(32, 32, 1), picture(32, 32, 2), Film(2, seed=1), Film(2, seed=2), "which")
    prompt = encode({"prompt": user("which"), **columns(pieces)}, name)
    assert_equals_the_processor(inputs_of([prompt]), oracle(name, [pieces]))


def test_slots_of_several_turns_are_filled_in_order() -> None:
    films = [Film(2, seed=seed) for seed in range(3)]
    turns: list[Row] = [
        {"role": "user", "content": ["first", {"type": "video"}]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [{"type": "video", **films[1].item}, {"type": "video"}, "last"]},
    ]
    prompt = encode({"prompt": turns, "videos": [films[0].item, films[2].item]})
    assert [video.key for video in prompt.videos] == [
        encode({"prompt": user("x"), "video": film.item}).videos[0].key for film in films
    ]
    assert prompt.text.count(SLOT["video"]) == 3


def test_markers_without_videos_stay_text() -> None:
    prompt = encode({"prompt": "a <video> of <image>", "image": picture(32, 32, 0)})
    assert prompt.text == "a <video> of " + SLOT["image"]
    assert prompt.videos == ()


@pytest.mark.parametrize("value", [None, [], (), [None], [None, None]])
@pytest.mark.parametrize("column", ["video", "videos"])
def test_no_video_has_many_forms(column: str, value: Any) -> None:
    bare = {"prompt": user("which")}
    prompt, twin = adapter().encode([{**bare, column: value}, bare])
    assert prompt is twin
    assert prompt.videos == ()
    assert set(prompt.forward_kwargs) == {"mm_token_type_ids", "position_ids"}


@pytest.mark.parametrize("columns", [{"video": None, "videos": [noise(2)]}, {"video": noise(2), "videos": []}])
def test_an_empty_column_beside_the_other_is_none(columns: Row) -> None:
    assert len(encode({"prompt": user("which"), **columns}).videos) == 1


def test_the_nulls_of_arrow_are_not_there(files: dict[str, Path]) -> None:
    path = str(files["mp4"])
    parts = [{"type": "video", "video": path, **SMALL}, *user("what")[0]["content"]]
    rows: list[Row] = [
        {"prompt": user("which"), "videos": None},
        {"prompt": [{"role": "user", "content": parts}]},
        {"prompt": user("x"), "videos": [{"video": path, "fps": 5.0}, {"video": path, "nframes": 4}]},
    ]
    stored: Any = Dataset.from_list(rows)
    assert stored[1]["prompt"][0]["content"][1]["max_pixels"] is None
    assert stored[2]["videos"][0]["nframes"] is None
    found = adapter().encode(list(stored))
    assert [len(prompt.videos) for prompt in found] == [0, 1, 2]
    assert found[1].prompt_ids == encode(rows[1]).prompt_ids
    assert [video.keys for video in found[2].videos] == [(("fps", 5.0),), (("nframes", 4),)]


# Where a video comes from


def forms_of_frames(frames: np.ndarray, folder: Path) -> list[Any]:
    paths = [folder / f"{i}.png" for i in range(len(frames))]
    for path, image in zip(paths, pil(frames), strict=True):
        image.save(path)
    return [
        *(pil(frames), tuple(pil(frames)), frames, torch.from_numpy(frames), list(frames)),
        *(paths, [str(path) for path in paths], [f"file://{path}" for path in paths]),
        *([path.read_bytes() for path in paths], [{"bytes": None, "path": str(path)} for path in paths]),
    ]


def test_frames_in_every_form_are_one_video(tmp_path: Path) -> None:
    frames = noise(4, 48, 32)
    sources = forms_of_frames(frames, tmp_path)
    rows: list[Row] = [{"prompt": user("which"), "video": {"video": source, **SMALL}} for source in sources]
    rows += [{"prompt": user("which"), "videos": [{"video": source, **SMALL}]} for source in sources]
    rows += [{"prompt": [{"role": "user", "content": [{"type": "video", "video": sources[0], **SMALL}, "which"]}]}]
    prompts = adapter().encode(rows)
    assert all(prompt is prompts[0] for prompt in prompts)
    assert prompts[0].videos[0].num_frames == 4


@pytest.mark.parametrize("form", range(10))
@pytest.mark.parametrize("column", ["video", "videos"])
def test_bare_frames_in_a_column_are_one_video(form: int, column: str, tmp_path: Path) -> None:
    source = forms_of_frames(noise(4, 48, 32), tmp_path)[form]
    (video,) = encode({"prompt": user("which"), column: source if column == "video" else [source]}).videos
    assert (video.num_frames, video.keys) == (4, ())
    assert video.clip.fps == 2.0


@pytest.mark.parametrize("kind", CODECS)
def test_a_file_in_every_form_is_one_video(kind: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = files[kind]
    monkeypatch.chdir(path.parent)
    sources: list[Any] = [path, str(path), f"file://{path}", path.name]
    rows: list[Row] = [{"prompt": user("which"), "video": {"video": source, **SMALL}} for source in sources]
    rows += [{"prompt": user("which"), "videos": [{"video": source, **SMALL}]} for source in sources]
    for part in ({"video": path}, {"path": str(path)}):
        rows += [{"prompt": [{"role": "user", "content": [{"type": "video", **part, **SMALL}, "which"]}]}]
    prompts = adapter().encode(rows)
    assert all(prompt is prompts[0] for prompt in prompts)
    assert prompts[0].videos[0].source == path


def test_bare_paths_in_columns_are_videos(files: dict[str, Path]) -> None:
    path = str(files["mp4"])
    rows: list[Row] = [{"prompt": user("which"), **columns} for columns in ({"video": path}, {"videos": [path]})]
    first, second = adapter().encode([*rows])
    assert first is second
    assert len(encode({"prompt": "<video><video>", "videos": [path, path]}).videos) == 2


def test_a_list_of_videos_may_mix_files_and_frames(files: dict[str, Path]) -> None:
    videos = [{"video": str(files["mp4"]), **SMALL}, pil(noise(2)), {"video": noise(6), **SMALL}]
    prompt = encode({"prompt": user("which"), "videos": videos})
    assert [video.num_frames for video in prompt.videos] == [4, 2, 6]


# Sampling and resizing

REQUESTS: tuple[Row, ...] = (
    {},
    {"fps": 5.0},
    {"fps": 0.1},
    {"fps": 100.0},
    {"fps": 3, "max_frames": 6},
    {"fps": 1, "min_frames": 9},
    {"nframes": 7},
    {"nframes": LENGTH},
    {"video_start": 0.5, "video_end": 1.75},
    {"video_start": 1.0, "fps": 4.0},
    {"video_end": 1.0, "nframes": 4},
    {"resized_height": 50, "resized_width": 99},
    {"min_pixels": 32 * 32, "max_pixels": 40 * 40},
    {"min_pixels": 100_000},
    {"min_pixels": 1024, "total_pixels": 4000.0},
    {"min_pixels": 2000, "total_pixels": 100},
    {"max_pixels": 10**7, "nframes": 2},
)


@pytest.mark.parametrize(
    ("kind", "request_"),
    [*(("mp4", request) for request in REQUESTS), *((kind, REQUESTS[i]) for kind in CODECS for i in (1, 8))],
    ids=str,
)
def test_frames_and_sizes_of_files_are_those_of_qwen_vl_utils(
    kind: str, request_: Row, files: dict[str, Path], fetch: Fetch
) -> None:
    frames, metadata, rate = fetch({"video": str(files[kind]), **request_})
    (video,) = encode({"prompt": user("which"), "video": {"video": files[kind], **request_}}).videos
    clip = video.clip
    assert clip.frames.dtype == torch.uint8
    assert clip.frames.float().equal(frames)
    assert clip.metadata == metadata
    assert clip.sampled_fps == pytest.approx(rate, rel=1e-12)
    assert (video.num_frames, video.size) == (len(frames), (frames.shape[3], frames.shape[2]))


@pytest.mark.parametrize("kind", CODECS)
def test_each_sampled_frame_is_the_one_that_its_index_says(kind: str, files: dict[str, Path]) -> None:
    """By its grey, which was drawn into the file."""
    with av.open(str(files[kind])) as container:
        assert bool(container.streams.video[0].frames) == COUNTED[kind], "with and without a count in the file"
    row = {"prompt": user("which"), "video": {"video": files[kind], "nframes": 8, "video_start": 0.5}}
    clip = encode(row).videos[0].clip
    assert clip.indices == (5, 8, 10, 13, 15, 18, 20, 23)
    found = [float(frame.float().median()) for frame in clip.frames]
    assert found == pytest.approx([shade(i) for i in clip.indices], abs=4)


@pytest.mark.parametrize("size", [(64, 64), (128, 32), (96, 160)])  # others qwen-vl-utils resizes twice
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("rate", [None, 0.5, 23.976])
def test_lists_of_frames_are_those_of_qwen_vl_utils(count: int, size: tuple[int, int], rate: float | None) -> None:
    request = {"video": pil(noise(count, *size)), "resized_height": size[1], "resized_width": size[0]}
    request |= {} if rate is None else {"sample_fps": rate}
    frames, metadata, sampled = fetch_video(request)
    (video,) = encode({"prompt": user("which"), "video": request}).videos
    assert video.clip.frames.float().equal(frames)
    assert video.clip.metadata == metadata
    assert video.clip.sampled_fps == pytest.approx(sampled, rel=1e-12)
    if rate is not None:
        named = {("fps" if key == "sample_fps" else key): value for key, value in request.items()}
        assert encode({"prompt": user("which"), "video": named}).videos[0].sha256 == video.sha256


def test_an_odd_frame_is_shown_twice() -> None:
    (prompt,) = adapter().encode([{"prompt": user("which"), "video": Film(5).item}])
    (video,) = prompt.videos
    frames = video.clip.frames
    assert video.num_frames == len(frames) == 6
    assert frames[4].equal(frames[5])
    assert not frames[3].equal(frames[4])
    assert frames[:5].permute(0, 2, 3, 1).equal(torch.from_numpy(noise(5)))
    assert prompt.forward_kwargs["video_grid_thw"].tolist() == [[3, 4, 4]]


def test_frames_are_resized_once() -> None:
    """qwen-vl-utils resizes lists twice, and so blurs them; we take its size and its second resize."""
    frames = noise(2, 100, 70)
    whole = torch.from_numpy(frames).permute(0, 3, 1, 2)
    keys = {"min_pixels": 1024, "max_pixels": 3000}
    height, width = qwen.smart_resize(70, 100, factor=PATCH * MERGE, **keys)
    mode = InterpolationMode.BICUBIC
    expected = functional.resize(whole, [height, width], interpolation=mode, antialias=True)
    (video,) = encode({"prompt": user("which"), "video": {"video": frames, **keys}}).videos
    assert (height, width) != (70, 100)
    assert video.clip.frames.equal(expected)


def test_a_frame_has_at_most_the_tokens_that_qwen_vl_utils_allows() -> None:
    most = qwen.VIDEO_MAX_TOKEN_NUM * (PATCH * MERGE) ** 2
    height, width = qwen.smart_resize(480, 640, factor=PATCH * MERGE, max_pixels=most)
    rows = [
        {"prompt": "<video>", "video": {"video": noise(2, 640, 480), **keys}} for keys in ({}, {"max_pixels": 10**7})
    ]
    assert [prompt.videos[0].size for prompt in adapter().encode(rows)] == [(width, height)] * 2
    assert width * height <= most < 480 * 640


@pytest.mark.parametrize("budget", [{"min_pixels": 300, "max_pixels": 3000}, {"min_pixels": 9000, "max_pixels": 10**5}])
def test_the_runs_pixel_budget_is_that_of_each_frame(budget: Row, files: dict[str, Path], fetch: Fetch) -> None:
    own = load_adapter(tiny("qwen3_vl").processor, **budget)
    frames, _, _ = fetch({"video": str(files["mp4"]), **budget})
    prompts = own.encode(
        [{"prompt": user("which"), "video": source} for source in (files["mp4"], decoded(files["mp4"]))]
    )
    assert [prompt.videos[0].size for prompt in prompts] == [(frames.shape[3], frames.shape[2])] * 2
    assert prompts[0].videos[0].clip.frames.float().equal(frames)


def test_max_pixels_of_the_run_alone_is_kept_and_a_videos_own_key_comes_first() -> None:
    own = load_adapter(tiny("qwen3_vl").processor, max_pixels=1500)
    frames = noise(2, 128, 64)
    rows = [{"prompt": user("which"), "video": video} for video in (frames, {"video": frames, "max_pixels": 5000})]
    run, its_own = (prompt.videos[0].size for prompt in own.encode(rows))
    assert run == (48, 16)
    assert its_own == (96, 48)


# Times


def test_seconds_per_grid_go_to_qwen2_5() -> None:
    rows = [in_parts([Film(4, fps=fps), "which"]) for fps in (0.5, 2.0, 29.97)]
    found = inputs_of(adapter().encode(rows))["second_per_grid_ts"]
    assert found.tolist() == pytest.approx([4.0, 1.0, 2 / 29.97])
    assert found.equal(oracle("qwen2_5_vl", [[Film(4, fps=fps)] for fps in (0.5, 2.0, 29.97)])["second_per_grid_ts"])


def test_seconds_per_grid_of_a_file_are_those_between_its_sampled_frames(files: dict[str, Path]) -> None:
    """6 frames of 2.4 seconds: a grid of two frames takes 0.8 of them."""
    prompt = encode({"prompt": user("which"), "video": {"video": files["mp4"], "nframes": 6}})
    assert prompt.forward_kwargs["second_per_grid_ts"].tolist() == pytest.approx([0.8])


@pytest.mark.parametrize("name", TIMED)
def test_qwen3_reads_the_time_of_each_pair_of_frames(name: str, files: dict[str, Path]) -> None:
    """Frames 0, 5, 9, 14, 18 and 23 at 10 a second; a pair is shown at the mean of its times."""
    prompt = encode({"prompt": "ab<video>cd", "video": {"video": files["mp4"], "nframes": 6, **SMALL}}, name)
    _, height, width = prompt.forward_kwargs["video_grid_thw"][0].tolist()
    pads = "<|video_pad|>" * (height * width // MERGE**2)
    times = "".join(f"<{t} seconds><|vision_start|>{pads}<|vision_end|>" for t in (0.2, 1.1, 2.0))
    found = tokenizer().decode(list(prompt.prompt_ids), skip_special_tokens=False)
    # As in the processor of transformers: the start and end around the slot stay, and each pair has its own.
    assert found == f"ab<|vision_start|>{times}<|vision_end|>cd"
    assert prompt.video_spans[0].length > int(prompt.forward_kwargs["video_grid_thw"].prod()) // MERGE**2


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_no_time_is_written_for_the_others(name: str) -> None:
    prompt = encode({"prompt": "ab<video>cd", "video": Film(6).item}, name)
    assert tokenizer().decode(list(prompt.prompt_ids), skip_special_tokens=True) == "abcd"


@families
def test_spans_hold_the_features_and_engine_ids_one_slot_each(name: str) -> None:
    pad = tokenizer().convert_tokens_to_ids("<|video_pad|>")
    for pieces, prompt in zip(ROWS, adapter(name).encode([in_parts(row) for row in ROWS]), strict=True):
        assert prompt.engine_ids == tuple(tokenizer()(rendered(pieces))["input_ids"])
        assert len(prompt.videos) == len(prompt.video_spans) == sum(isinstance(piece, Film) for piece in pieces)
        grids = prompt.forward_kwargs["video_grid_thw"].tolist() if prompt.videos else []
        inside: list[int] = []
        for span, grid in zip(prompt.video_spans, grids, strict=True):
            places = [i for i in range(span.offset, span.offset + span.length) if prompt.prompt_ids[i] == pad]
            assert (places[0], places[-1] + 1) == (span.offset, span.offset + span.length)
            assert len(places) == int(np.prod(grid)) // MERGE**2
            inside += places
        assert inside == [i for i, token in enumerate(prompt.prompt_ids) if token == pad]


# Positions

SIDES = st.sampled_from([32, 64, 96])
RATES = st.sampled_from([0.25, 1.0, 2.0, 7.3, 23.976, 29.97, 30.0])
PIECES = st.one_of(
    st.tuples(st.just("text"), st.integers(1, 3)),
    st.tuples(st.just("image"), SIDES, SIDES),
    st.tuples(st.just("video"), st.integers(1, 11), SIDES, SIDES, RATES),
)


def made(piece: tuple[Any, ...]) -> Piece:
    if piece[0] == "text":
        return " dots" * piece[1]
    return Film(*piece[1:]) if piece[0] == "video" else picture(piece[1], piece[2], 0)


@cache
def paced(name: str, tokens_per_second: int | None) -> Any:
    """The tiny model with another number of positions for each second."""
    model = copy.deepcopy(tiny(name).model)
    if tokens_per_second is not None:
        model.config.vision_config.tokens_per_second = tokens_per_second
    return model


@pytest.mark.parametrize(
    ("name", "tokens_per_second"),
    [("qwen2_vl", None), ("qwen2_5_vl", 2), ("qwen2_5_vl", 25), ("qwen3_vl", None), ("qwen3_5", None)],
)
@given(data=st.data())
def test_positions_equal_the_models(name: str, tokens_per_second: int | None, data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.lists(PIECES, min_size=1, max_size=4), min_size=1, max_size=3))
    rows = [["7", *(made(piece) for piece in pieces), "2"] for pieces in drawn]
    model = paced(name, tokens_per_second)
    own = load_adapter(tiny(name).processor, config=model.config)
    prompts = own.encode([in_parts(pieces) for pieces in rows])
    expected = oracle(name, rows)
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    known = {key: expected[key] for key in (*keys, "attention_mask") if key in expected}
    positions, _ = model.model.get_rope_index(**known)
    real = expected["attention_mask"].bool().expand_as(positions)
    assert inputs_of(prompts)["position_ids"][real].equal(positions[real])
    # With completions behind the prompts they go on as in the model.
    batch = collate(prompts, [[300 + i] * (i + 1) for i in range(len(prompts))], pad_token_id=0)
    known = {key: value for key, value in batch.model_inputs().items() if key in known}
    positions, _ = model.model.get_rope_index(**known)
    real = batch.attention_mask.bool().expand_as(positions)
    assert batch.forward_kwargs["position_ids"][real].equal(positions[real])


def test_more_positions_a_second_move_frames_apart_and_the_text_not() -> None:
    def positions(tokens_per_second: int) -> torch.Tensor:
        own = load_adapter(tiny("qwen2_5_vl").processor, config=paced("qwen2_5_vl", tokens_per_second).config)
        (prompt,) = own.encode([{"prompt": "a<video>b", "video": Film(6, fps=1.0).item}])
        span = prompt.video_spans[0]
        found = prompt.forward_kwargs["position_ids"]
        assert found[:, span.offset + span.length :].tolist() == [[4, 5]] * 3  # 2 for "a" and start, 2 for the frame
        return found[0, span.offset : span.offset + span.length : 4]

    assert (positions(2).tolist(), positions(25).tolist()) == ([2, 6, 10], [2, 52, 102])


# Logits

LONG: tuple[Piece, ...] = ("how many", picture(64, 48, 1), Film(12, fps=0.5, seed=7), "which", Film(3, seed=8), "sum")
"""Qwen2.5 gives the late frames positions far behind those of the text after them."""


def logits_of(name: str, prompts: Sequence[Prompt], completions: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[length, V] of each completion: the logits before each of its tokens."""
    batch = collate(prompts, completions, pad_token_id=adapter(name).pad_token_id)
    with torch.no_grad():
        logits = tiny(name).model(**batch.model_inputs(), use_cache=False).logits
    width = batch.completion_mask.shape[1]
    shifted = logits[:, logits.shape[1] - width - 1 : -1]
    return [row[: len(completion)] for row, completion in zip(shifted, completions, strict=True)]


@families
@pytest.mark.parametrize("pieces", [ROWS[0], LONG], ids=["short", "long"])
def test_scoring_equals_the_models_own_generation(name: str, pieces: tuple[Piece, ...]) -> None:
    prompt = encode(in_parts(pieces), name)
    model, inputs = copy.deepcopy(tiny(name).model), oracle(name, [pieces])
    banned = sorted(adapter(name).vision_ids)
    output = model.generate(
        **inputs,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        suppress_tokens=banned,
        output_logits=True,
        return_dict_in_generate=True,
    )
    completion = output.sequences[0, -5:].tolist()
    (found,) = logits_of(name, [prompt], [completion])
    torch.testing.assert_close(found, torch.cat(output.logits), rtol=0, atol=1e-5)
    if name == "qwen2_5_vl" and pieces is LONG:
        positions = prompt.forward_kwargs["position_ids"]
        assert positions.max() > positions[:, -1].max() + 20, "the test is about prompts such as this"


@families
def test_our_generator_samples_by_the_logprobs_that_scoring_finds(name: str) -> None:
    prompts = adapter(name).encode([in_parts(pieces) for pieces in (*ROWS, LONG)])
    generator = TransformersGenerator(tiny(name).model, adapter(name))
    output = generator.generate(prompts, SamplingParams(max_tokens=4, temperature=1.0, seed=3), 2)
    flat = [(prompt, one) for prompt, group in zip(prompts, output.completions, strict=True) for one in group]
    scored = logits_of(name, [prompt for prompt, _ in flat], [one.completion_ids for _, one in flat])
    banned = sorted(adapter(name).vision_ids)
    for (_, one), logits in zip(flat, scored, strict=True):
        logits[:, banned] = float("-inf")
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(one.completion_ids)[:, None])[:, 0]
        assert chosen.tolist() == pytest.approx(list(one.logprobs), abs=1e-5)


@families
def test_logits_of_a_row_do_not_depend_on_its_batch(name: str) -> None:
    prompts = adapter(name).encode([in_parts(pieces) for pieces in (*ROWS, LONG)])
    completions = [[300 + i] * (1 + i % 3) for i in range(len(prompts))]
    together = logits_of(name, prompts, completions)
    backwards = logits_of(name, prompts[::-1], completions[::-1])[::-1]
    assert together[0].std() > 0.1, "the logits must depend on something"
    for i, prompt in enumerate(prompts):
        (alone,) = logits_of(name, [prompt], [completions[i]])
        torch.testing.assert_close(together[i], alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(backwards[i], alone, rtol=0, atol=1e-5)


@families
def test_logits_depend_on_the_pixels_and_order_of_frames(name: str) -> None:
    frames = noise(6, 32, 32, 1)
    films = [frames, noise(6, 32, 32, 2), frames[::-1].copy()]
    size = {"resized_height": 32, "resized_width": 32}
    prompts = adapter(name).encode([{"prompt": user("which"), "video": {"video": film, **size}} for film in films])
    assert len({prompt.prompt_ids for prompt in prompts}) == 1
    usual, other, reversed_ = logits_of(name, prompts, [[300]] * 3)
    assert (usual - other).abs().max() > 1e-2
    assert (usual - reversed_).abs().max() > 1e-3


@families
def test_logits_depend_on_the_rate_but_in_qwen2(name: str) -> None:
    prompts = adapter(name).encode([in_parts([Film(6, fps=fps), "which"]) for fps in (0.5, 2.0)])
    slow, fast = logits_of(name, prompts, [[300]] * 2)
    assert ((slow - fast).abs().max() > 1e-3) == (name != "qwen2_vl")


@families
def test_video_ids_are_never_sampled_or_written(name: str) -> None:
    video = tiny(name).model.config.video_token_id
    assert video in adapter(name).vision_ids
    assert "reserved <|video_pad|>" in refusal({"prompt": user("see <|video_pad|>"), "video": Film(2).item}, name)
    model = copy.deepcopy(tiny(name).model)

    def prefer(module: Any, args: Any, output: Any) -> Any:
        output.logits[..., video] += 1000
        return output

    model.register_forward_hook(prefer)
    prompts = adapter(name).encode([in_parts(ROWS[0])])
    output = TransformersGenerator(model, adapter(name)).generate(prompts, SamplingParams(max_tokens=3), 1)
    assert len(output.completions[0][0].completion_ids) == 3
    assert video not in output.completions[0][0].completion_ids


# Read once, kept by path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of videos in each call of the video processor."""
    kind = type(adapter().processor.video_processor)
    real, calls = kind.__call__, list[int]()

    def counting(self: Any, videos: list[Any], **options: Any) -> Any:
        calls.append(len(videos))
        return real(self, videos=videos, **options)

    monkeypatch.setattr(kind, "__call__", counting)
    return calls


def test_equal_videos_are_processed_once(files: dict[str, Path], seen: list[int]) -> None:
    keys = {"fps": float(RATE), **SMALL}
    frames = decoded(files["mp4"])
    sources: list[Any] = [files["mp4"], str(files["mp4"]), frames, pil(frames)]
    rows: list[Row] = [{"prompt": user("which"), "video": {"video": source, **keys}} for source in sources]
    rows += [{"prompt": user("what"), "videos": [{"video": source, **keys} for source in sources]}]
    prompts = adapter().encode(rows)
    assert seen == [1]
    assert len({id(prompt) for prompt in prompts}) == 2
    assert {video.key for prompt in prompts for video in prompt.videos} == {prompts[0].videos[0].key}


@pytest.mark.parametrize(
    "key", [{"fps": 4.0}, {"sample_fps": 4.0}, {"max_pixels": 3000}, {"min_pixels": 600}, {"total_pixels": 10**6}]
)
def test_every_key_changes_the_cache_key(key: Row, seen: list[int]) -> None:
    frames = noise(4, 48, 32)
    rows = [{"prompt": user("which"), "video": {"video": frames, **SMALL, **more}} for more in ({}, key, {}, key)]
    first, other, again, other_again = adapter().encode(rows)
    assert seen == [1, 1]
    assert (first is again, other is other_again, first is other) == (True, True, False)
    assert first.videos[0].key != other.videos[0].key


def test_equal_frames_at_other_times_are_other_videos(seen: list[int]) -> None:
    slow, fast = adapter().encode([in_parts([Film(4, fps=fps), "which"]) for fps in (1.0, 2.0)])
    assert seen == [1, 1]
    assert slow.videos[0].sha256 != fast.videos[0].sha256
    assert slow.forward_kwargs["pixel_values_videos"].equal(fast.forward_kwargs["pixel_values_videos"])


def film_in(folder: Path, kind: str = "mp4", seed: int = 0) -> Path:
    return write(folder / f"film.{kind}", CODECS[kind], seed=seed)


def test_a_file_is_not_kept_decoded(tmp_path: Path) -> None:
    path = film_in(tmp_path)
    (video,) = encode({"prompt": user("which"), "video": {"video": str(path), "nframes": 20}}).videos
    assert video.source == path
    assert len(pickle.dumps(video)) < 1500 < video.clip.frames.numel()
    path.write_bytes(path.read_bytes())
    assert video.clip.frames.equal(video.clip.frames)
    path.unlink()
    with pytest.raises(ValueError, match="no video file"):
        _ = video.clip


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    path = film_in(tmp_path)
    (video,) = encode({"prompt": user("which"), "video": str(path)}).videos
    before = video.clip.frames
    film_in(tmp_path, seed=1)
    with pytest.raises(ValueError, match="a video has changed since it was encoded"):
        _ = video.clip
    film_in(tmp_path)
    assert video.clip.frames.equal(before)


def test_frames_from_files_are_not_kept_decoded_either(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, image in zip(paths, pil(noise(3)), strict=True):
        image.save(path)
    (video,) = encode({"prompt": user("which"), "video": [str(path) for path in paths]}).videos
    assert isinstance(video.source, tuple)
    assert [frame.source for frame in video.source] == paths
    assert len(video.clip.frames) == 4
    picture(32, 32, 9).save(paths[1])
    with pytest.raises(ValueError, match="1.png has changed"):
        _ = video.clip


def test_the_callers_frames_are_not_shared() -> None:
    frames = noise(4)
    (video,) = encode({"prompt": user("which"), "video": frames}).videos
    before = video.clip.frames.clone()
    frames[:] = 0
    assert video.clip.frames.equal(before)


@families
def test_prompts_with_videos_can_be_copied_and_sent_to_other_processes(name: str, files: dict[str, Path]) -> None:
    file = {"prompt": user("which"), "video": {"video": files["mkv"], **SMALL}}
    prompts = adapter(name).encode([*(in_parts(pieces) for pieces in ROWS), file])
    for copied in (pickle.loads(pickle.dumps(prompts)), copy.deepcopy(prompts)):
        expected, found = inputs_of(prompts), inputs_of(copied)
        assert all(found[key].equal(tensor) for key, tensor in expected.items())
        for one, other in zip(prompts, copied, strict=True):
            assert [video.key for video in one.videos] == [video.key for video in other.videos]
            assert all(a.clip.frames.equal(b.clip.frames) for a, b in zip(one.videos, other.videos, strict=True))


def test_a_prompt_tells_how_many_videos_it_has() -> None:
    assert "1 pictures, 2 videos" in repr(encode(in_parts(ROWS[0])))
    assert "videos" not in repr(encode(in_parts(ROWS[2])))


# What is refused

MIXED = [Image.new("RGB", (32, 32)), Image.new("RGB", (48, 32))]


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        ("http://example.org/a.mp4", "remote videos are not fetched"),
        ("HTTPS://example.org/a.mp4", "remote videos are not fetched"),
        ("s3://bucket/a.mp4", "remote videos are not fetched"),
        ("missing.mp4", "no video file"),
        (Path("missing.mp4"), "no video file"),
        ("file:///missing.mp4", "no video file"),
        ("/", "no video file"),
        ("", "no video file"),
        ("nul\0byte.mp4", "no video file"),
        (MIXED, "different sizes ([(32, 32), (48, 32)])"),
        (np.zeros((0, 8, 8, 3), np.uint8), "cannot be made from"),
        (np.zeros((4, 8, 8, 3), np.float32), "frame 0: an array picture must be uint8"),
        (np.zeros((4, 3, 8, 8), np.uint8), "frame 0: an array picture must be uint8"),
        (np.zeros((8, 8, 3), np.uint8), "a video cannot be made from ndarray"),
        (Image.new("RGB", (8, 8)), "a list of frames is one video"),
        (7, "a video cannot be made from int"),
        (iter([Image.new("RGB", (8, 8))]), "a video cannot be made from"),
        ([Image.new("RGB", (8, 8)), None], "frame 1: a picture cannot be made from NoneType"),
        ([Image.new("RGB", (8, 8)), "missing.png"], "frame 1: there is no picture file"),
        ([Image.new("RGB", (8, 8)), b"broken"], "frame 1: the picture cannot be read"),
        ([Image.new("RGB", (2, 900))] * 2, "2x900 pixels cannot be resized"),
        ({"video": noise(2), "fps": 0}, "fps must be a number above 0, got 0"),
        ({"video": noise(2), "fps": -1.0}, "fps must be a number above 0"),
        ({"video": noise(2), "fps": float("nan")}, "fps must be a number above 0"),
        ({"video": noise(2), "fps": True}, "fps must be a number above 0"),
        ({"video": noise(2), "fps": "2"}, "fps must be a number above 0"),
        ({"video": noise(2), "max_pixels": 10.5}, "max_pixels must be a whole number of pixels"),
        ({"video": noise(2), "resized_height": 32}, "give both resized_height and resized_width"),
    ],
    ids=steady,
)
def test_what_is_no_video_is_refused_with_row_and_column(video: Any, reason: str) -> None:
    message = refusal({"prompt": user("which"), "videos": [noise(2), video]})
    assert message.startswith("row 7, column 'videos'[1]")
    assert reason in message
    assert len(message) < 500
    assert refusal({"prompt": user("which"), "video": video}).startswith("row 7, column 'video'")
    if not isinstance(video, dict):
        part = {"type": "video", "video": video}
        message = refusal({"prompt": [{"role": "user", "content": ["which", part]}]})
        assert message.startswith("row 7, column 'prompt', message 0, part 1")
        assert reason in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (b"not a video", "cannot be read"),
        (write, "cannot be read"),
        (Image.new("RGB", (32, 32)), "cannot be read"),
    ],
    ids=["empty", "text", "cut", "picture"],
)
def test_broken_files_are_refused(content: Any, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    if content is write:
        content = film_in(tmp_path).read_bytes()[:900]
    if isinstance(content, Image.Image):
        content.save(path, "PNG")
    else:
        path.write_bytes(content)
    assert reason in refusal({"prompt": user("which"), "video": path})


def test_a_file_that_holds_only_sound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux([*stream.encode(frame), *stream.encode()])
    assert "cannot be read" in refusal({"prompt": user("which"), "video": path})


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"nframes": 100}, "nframes should in interval [2, 24]"),
        ({"nframes": 1, "video_end": 1.0}, "nframes should in interval [2, 11]"),
        ({"fps": 2.0, "nframes": 4}, "Only accept either `fps` or `nframes`"),
        ({"video_start": 9.0}, "Invalid time range"),
        ({"video_start": 2.0, "video_end": 1.0}, "Invalid time range"),
        ({"resized_height": 16, "resized_width": 16 * 300}, "cannot be resized"),
    ],
    ids=str,
)
def test_keys_that_a_file_cannot_follow_are_refused(keys: Row, reason: str, files: dict[str, Path]) -> None:
    message = refusal({"prompt": user("which"), "video": {"video": files["mp4"], **keys}})
    assert message.startswith("row 7, column 'video'")
    assert reason in message


@pytest.mark.parametrize("key", ["nframes", "min_frames", "max_frames", "video_start", "video_end"])
def test_sampling_keys_do_not_go_with_a_list_of_frames(key: str) -> None:
    message = refusal({"prompt": user("which"), "videos": [{"video": noise(4), key: 2}]})
    assert message.startswith("row 7, column 'videos'[0]")
    assert f"{key} does not go with a list of frames" in message


def test_an_unknown_key_of_a_part_is_refused_with_the_known_ones() -> None:
    part = {"type": "video", "video": noise(2), "fsp": 2.0}
    message = refusal({"prompt": [{"role": "user", "content": [part]}]})
    assert "unknown key 'fsp' in a part of type 'video'" in message
    assert all(f"'{key}'" in message for key in VIDEO_KEYS)
    part = {"type": "image", "image": picture(8, 8, 0), "fps": 2.0}
    assert "unknown key 'fps'" in refusal({"prompt": [{"role": "user", "content": [part]}]})


TWO = [noise(2), noise(4)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": user("x"), "video": TWO[0], "videos": TWO}, "both columns 'video' and 'videos' hold videos"),
        ({"prompt": user("x"), "videos": [TWO[0], None]}, "column 'videos'[1]: it is null beside videos"),
        ({"prompt": "<video> x", "videos": TWO}, "2 videos but 1 <video> markers"),
        ({"prompt": "x", "video": TWO[0]}, "1 videos but 0 <video> markers"),
        ({"prompt": "<image> x", "video": TWO[0]}, "1 videos but 0 <video> markers"),
        ({"prompt": user("<video>"), "videos": TWO}, "2 videos but 1 <video> markers"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}], "videos": TWO}, "1 empty video slots"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "0 videos in the columns"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "video": TWO[0]}, "1 empty image slots"),
        ({"prompt": [{"role": "system", "content": "x"}], "video": TWO[0]}, "no user message to put 1 videos into"),
        ({"prompt": [{"role": "user", "content": "x", "videos": TWO}]}, "under 'videos'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "video", "video": TWO[0], "path": "a.mp4"}]}]},
            "several sources (video, path)",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x", "video": TWO[0]}]}]},
            "under 'video'",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "video_url"}]}]}, "use 'text', 'image' or 'video'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "row",
)
def test_videos_and_slots_that_do_not_match_are_refused(row: Row, reason: str) -> None:
    assert reason in refusal(row)


def without_videos() -> list[str]:
    known = [name for name in VISION_FAMILIES if name not in QWEN_FAMILIES]
    return [known[0], known[len(known) // 2], known[-1]]


@pytest.mark.parametrize("name", without_videos())
def test_other_families_refuse_videos_by_name(name: str) -> None:
    own = load_adapter(tiny(name).processor)
    with pytest.raises(ValueError, match=f"row 4, column 'video'.*{own.family.name} takes no videos; give frames as"):
        own.encode([{"prompt": user("which"), "video": noise(2)}], [4])


def test_text_models_refuse_videos_by_column() -> None:
    own = load_adapter(tokenizer())
    with pytest.raises(ValueError, match=r"row 0, column 'videos'\[0\]: a video, but the model takes text only"):
        own.encode([{"prompt": user("which"), "videos": ["a.mp4"]}])


def test_qwen2_5_needs_the_models_config_for_videos_alone(tmp_path: Path) -> None:
    bare = load_adapter(tiny("qwen2_5_vl").processor)
    rows = [in_parts(pieces) for pieces in ROWS]
    with pytest.raises(ValueError, match=r"tokens_per_second.*load_adapter\(processor, config=model.config\)"):
        bare.encode(rows)
    assert len(bare.encode(rows[1:3])) == 2
    model = paced("qwen2_5_vl", 25)
    copy.deepcopy(tiny("qwen2_5_vl").processor).save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    given = load_adapter(tiny("qwen2_5_vl").processor, config=model.config)
    expected, found = inputs_of(given.encode(rows)), inputs_of(load_adapter(tmp_path).encode(rows))
    assert found["position_ids"].equal(expected["position_ids"])
    assert not found["position_ids"].equal(inputs_of(adapter().encode(rows))["position_ids"])


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_the_others_need_no_config(name: str) -> None:
    rows = [in_parts(pieces) for pieces in ROWS]
    found = inputs_of(load_adapter(tiny(name).processor).encode(rows))
    assert found["position_ids"].equal(inputs_of(adapter(name).encode(rows))["position_ids"])


# Long prompts


def limited(name: str, limit: int, long_prompts: Any) -> FamilyAdapter:
    processor, config = tiny(name).processor, tiny(name).model.config
    return load_adapter(processor, config=config, max_prompt_length=limit, long_prompts=long_prompts)


def long_rows(path: Path) -> list[Row]:
    frames = {"video": noise(6, 160, 96), "min_pixels": 9000}
    return [
        {"prompt": user("which"), "video": frames},
        {"prompt": user("which"), "video": {"video": path, "resized_height": 96, "resized_width": 128}},
        {"prompt": user("which", picture(64, 64, 1)), "video": {"video": path, "fps": 5.0}},
    ]


@families
def test_a_prompt_that_videos_make_too_long_is_refused(name: str, files: dict[str, Path]) -> None:
    for row in long_rows(files["mp4"]):
        length = encode(row, name).num_tokens
        assert limited(name, length, "raise").encode([row])[0].num_tokens == length
        with pytest.raises(PromptTooLong, match=rf"row 8.*{length} tokens.*\b{length - 1}\b"):
            limited(name, length - 1, "raise").encode([{"prompt": "2"}, row], [7, 8])


@families
def test_frames_of_long_prompts_are_shrunk(name: str, files: dict[str, Path]) -> None:
    rows = long_rows(files["mp4"])
    usual = adapter(name).encode(rows)
    limit = min(prompt.num_tokens for prompt in usual) - 1
    shrunk = limited(name, limit, "shrink").encode(rows)
    for before, after in zip(usual, shrunk, strict=True):
        assert after.num_tokens <= limit < before.num_tokens
        (large,), (small,) = before.videos, after.videos
        assert small.size[0] * small.size[1] < large.size[0] * large.size[1]
        assert small.num_frames == large.num_frames == len(small.clip.frames)
        assert small.clip.indices == large.clip.indices
        assert len(after.forward_kwargs["pixel_values_videos"]) == after.forward_kwargs["video_grid_thw"].prod()
    short = adapter(name).encode([{"prompt": user("7")}])[0]
    with pytest.raises(PromptTooLong, match="its pictures cannot be shrunk enough"):
        limited(name, short.num_tokens + 5, "shrink").encode(rows[:1])


# Training


def training_rows(path: Path) -> list[Row]:
    rows = [in_parts(["which", Film(5, fps=3.0, seed=1)]), in_parts([picture(32, 48, 1), "what", Film(2, seed=2)])]
    rows += [{"prompt": user("how many")}, in_parts(["sum", picture(64, 32, 3)])]
    return [*rows, {"prompt": user("7"), "video": {"video": str(path), "fps": 4.0, "max_pixels": 4096}}, rows[2]]


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_training_step_is_the_same_however_videos_are_batched(
    algorithm: str, model: str, files: dict[str, Path], tmp_path: Path
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for batch, parts in ((12, 1), (2, 6)):
        recorder = GradientRecorder()
        trainer = make_trainer(
            algorithm,
            tmp_path,
            model=model,
            data=training_rows(files["mp4"]),
            callbacks=[recorder],
            max_grad_norm=0.0,
            max_steps=1,
            num_generations=2,
            max_completion_length=4,
            shuffle_dataset=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=parts,
        )
        trainer.train()
        (step,) = recorder.steps
        found.append(step)
        trained: Any = trainer.model
        before, after = tiny(model).model.state_dict(), trained.state_dict()
        moved = {name for name in step if not before[name].equal(after[name])}
        assert any("visual" in name for name in moved)
        assert any("language_model" in name for name in moved)
    assert relative_difference(*found) < 1e-4


def test_videos_train_the_vision_tower(files: dict[str, Path], tmp_path: Path) -> None:
    """Rows with videos and no pictures; other pixels, other gradients."""

    def gradient(seed: int) -> dict[str, torch.Tensor]:
        recorder = GradientRecorder()
        data = [in_parts(["which", Film(4, seed=seed)]), in_parts(["what", Film(2, seed=seed + 1)])]
        options: Row = {"max_steps": 1, "max_grad_norm": 0.0, "num_generations": 4, "gradient_accumulation_steps": 1}
        make_trainer(
            "grpo", tmp_path, data=data, callbacks=[recorder], per_device_train_batch_size=8, **options
        ).train()
        return {name: value for name, value in recorder.steps[0].items() if "visual" in name}

    first, other = gradient(1), gradient(5)
    assert relative_difference(first, other) > 0.1
    assert all(bool(value.isfinite().all()) for value in first.values())


# Faults that were found once


def trimmed(source: Path, target: Path, start: float) -> Path:
    """A stream copy that begins in the middle, as `ffmpeg -ss ... -c copy` makes it: hidden frames, an edit list."""
    with av.open(str(source)) as read, av.open(str(target), "w") as written:
        stream: Any = read.streams.video[0]
        copied: Any = written.add_stream_from_template(stream)
        offset = int(start / stream.time_base)
        packets: Any = read.demux(stream)
        for packet in packets:
            if packet.dts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - offset, packet.dts - offset, copied
                written.mux(packet)
    return target


def test_a_trimmed_file_has_the_frames_that_it_shows(files: dict[str, Path], tmp_path: Path, fetch: Fetch) -> None:
    path = trimmed(files["mp4"], tmp_path / "trimmed.mp4", 0.5)
    assert len(decoded(path)) == LENGTH - 5
    frames, metadata, _ = fetch({"video": str(path), "fps": 5.0})
    (video,) = encode({"prompt": user("which"), "video": {"video": path, "fps": 5.0}}).videos
    assert video.clip.metadata == metadata
    assert video.clip.frames.float().equal(frames)


def test_a_turned_film_is_shown_upright(files: dict[str, Path], tmp_path: Path) -> None:
    """As phones write portraits: the matrix in the track header says by how much."""
    content = bytearray(files["mp4"].read_bytes())
    start = content.index(b"tkhd") + 4 + 4 + (20 if content[content.index(b"tkhd") + 4] == 0 else 32) + 16
    matrix = (0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)  # a quarter turn clockwise
    content[start : start + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
    path = tmp_path / "turned.mp4"
    path.write_bytes(content)
    keys = {"min_pixels": 3072, "max_pixels": 3072, "nframes": 4}
    (upright,) = encode({"prompt": user("which"), "video": {"video": files["mp4"], **keys}}).videos
    (video,) = encode({"prompt": user("which"), "video": {"video": path, **keys}}).videos
    assert (upright.size, video.size) == ((64, 48), (48, 64))
    assert video.clip.frames.equal(upright.clip.frames.rot90(-1, (2, 3)))


def test_pixels_too_few_for_one_token_make_one() -> None:
    """A side keeps at least the pixels of one token."""
    (least,) = encode({"prompt": user("which"), "video": {"video": noise(2), "max_pixels": 1}}).videos
    assert least.size == (16, 16)
    own = load_adapter(tiny("qwen3_vl").processor, max_pixels=2000)
    (strip,) = own.encode([{"prompt": user("which"), "video": noise(2, 640, 32)}])[0].videos
    assert strip.size == (192, 16)


def test_wide_pictures_shrink_or_are_too_long() -> None:
    with pytest.raises(PromptTooLong):
        limited("qwen2_5_vl", 20, "shrink").encode([{"prompt": user("which", picture(640, 32, 1))}])


@pytest.mark.parametrize("value", [0, 0.0])
def test_a_video_may_start_at_0(value: float, files: dict[str, Path]) -> None:
    keys = {"video_start": value, "video_end": 1.0}
    (video,) = encode({"prompt": user("which"), "video": {"video": files["mp4"], **keys}}).videos
    assert video.clip.indices == (0, 3, 7, 10)


def test_a_rate_of_taken_frames_does_not_go_with_a_file(files: dict[str, Path]) -> None:
    assert "sample_fps" in refusal({"prompt": user("which"), "video": {"video": files["mp4"], "sample_fps": 5.0}})


@pytest.mark.parametrize("column", ["video", "image"])
def test_unknown_keys_beside_a_source_in_a_column_are_refused(column: str) -> None:
    source = {"video": noise(2), "image": picture(32, 32, 0)}[column]
    assert "'fsp'" in refusal({"prompt": user("which"), column: {column: source, "fsp": 5.0}})


def test_a_column_takes_a_mapping_with_a_path(files: dict[str, Path]) -> None:
    """As `datasets.Video(decode=False)` gives it, and as content parts and pictures have it."""
    for item in ({"path": str(files["mp4"])}, {"path": str(files["mp4"]), "bytes": None}):
        assert len(encode({"prompt": user("which"), "video": item}).videos) == 1


def test_a_path_that_is_too_long_is_refused_with_the_row() -> None:
    assert len(refusal({"prompt": user("which"), "video": "x" * 5000})) < 500


def test_contradicting_pixel_bounds_of_a_video_are_refused() -> None:
    keys = {"min_pixels": 9000, "max_pixels": 1000}
    assert "min_pixels=9000" in refusal({"prompt": user("which"), "video": {"video": noise(2), **keys}})
    given = {"video": noise(2), "fps": 1.0, "sample_fps": 9000}
    assert "both fps and sample_fps" in refusal({"prompt": user("which"), "video": given})


def test_a_file_is_decoded_once_for_equal_rows(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = list[str](), av.open

    def counting(path: str) -> Any:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(av, "open", counting)
    adapter().encode([{"prompt": user("which"), "video": files["mp4"]}] * 8)
    assert len(opened) == 2, "once to count, once to decode"


def test_the_words_for_videos_are_not_those_for_pictures() -> None:
    message = refusal({"prompt": [{"role": "user", "content": "x", "videos": ["a.mp4"]}]})
    assert "'images' or 'videos'" in message
    message = refusal({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4", "text": "x"}]}]})
    assert "an video" not in message
    assert "frame 0: a picture cannot be made from int" not in refusal({"prompt": user("x"), "video": b"film"})
