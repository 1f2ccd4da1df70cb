"""Any picture source becomes upright 8-bit RGB over white, or a `ValueError` that names its row."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tiny_models import picture, tiny, user
from vlmroll_processors import Picture, load_adapter
from vlmroll_processors.images import read_picture, resized

WHERE = "row 7, column 'image'"
WHITE = (255, 255, 255)
RED = (200, 10, 30)


def load(source: Any) -> Picture:
    return read_picture(source, where=WHERE)[0]


def pixels(source: Any) -> np.ndarray:
    return np.asarray(load(source).image)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def refusal(source: Any) -> str:
    """The message with which `source` is refused, which must name the row."""
    with pytest.raises(ValueError, match="row 7, column 'image'") as caught:
        load(source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("1", (4, 3), 1), WHITE),
        (Image.new("L", (4, 3), 77), (77, 77, 77)),
        (Image.new("LA", (4, 3), (77, 255)), (77, 77, 77)),
        (Image.new("LA", (4, 3), (77, 0)), WHITE),
        (Image.new("RGB", (4, 3), RED), RED),
        (Image.new("RGBA", (4, 3), (*RED, 255)), RED),
        (Image.new("RGBA", (4, 3), (*RED, 0)), WHITE),
        (Image.new("RGBA", (4, 3), (0, 0, 0, 128)), (127, 127, 127)),
        (Image.new("RGBa", (4, 3), (0, 0, 0, 0)), WHITE),
        (Image.new("PA", (4, 3)), WHITE),
        (Image.new("CMYK", (4, 3), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.new("YCbCr", (4, 3), (128, 128, 128)), (128, 128, 128)),
        (Image.new("HSV", (4, 3), (0, 255, 255)), (255, 0, 0)),
        (Image.new("I;16", (4, 3), 257 * 90), (90, 90, 90)),
        (Image.new("I;16B", (4, 3), 257 * 90), (90, 90, 90)),
        (Image.new("I", (4, 3), 257 * 90), (90, 90, 90)),
        (Image.new("F", (4, 3), 0.2), (51, 51, 51)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else str(value),
)
def test_every_mode_becomes_rgb(image: Image.Image, expected: tuple[int, int, int]) -> None:
    result = load(image).image
    assert (result.mode, result.size) == ("RGB", (4, 3))
    assert (np.asarray(result) == expected).all()


def test_palette_pictures_keep_their_colours() -> None:
    colours = Image.new("P", (2, 1))
    colours.putpalette([*RED, 0, 0, 255])
    colours.putdata([0, 1])
    assert pixels(colours).tolist() == [[list(RED), [0, 0, 255]]]


def test_the_transparent_palette_entry_becomes_white() -> None:
    colours = Image.new("P", (2, 1))
    colours.putpalette([*RED, 0, 0, 255])
    colours.putdata([0, 1])
    assert pixels(encoded(colours, transparency=0)).tolist() == [[list(WHITE), [0, 0, 255]]]


@pytest.mark.parametrize(
    ("image", "transparency"),
    [
        (Image.new("L", (4, 3), 50), 50),
        (Image.new("RGB", (4, 3), RED), RED),
        (Image.fromarray(np.full((3, 4), 1000, np.uint16)), 1000),
    ],
    ids=["L", "RGB", "I;16"],
)
def test_the_transparent_colour_of_a_png_becomes_white(image: Image.Image, transparency: Any) -> None:
    assert (pixels(encoded(image, transparency=transparency)) == WHITE).all()
    assert (pixels(encoded(image)) != WHITE).all()


def test_16_bits_are_scaled_and_not_clipped() -> None:
    ramp = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    assert pixels(encoded(Image.fromarray(ramp)))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_floats_outside_0_to_1_are_refused(value: float) -> None:
    assert "0 to 1" in refusal(Image.new("F", (2, 2), value))


@pytest.mark.parametrize("value", [-1, 65536])
def test_32_bit_values_beyond_16_bits_are_refused(value: int) -> None:
    assert "65535" in refusal(Image.new("I", (2, 2), value))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int, kind: str) -> None:
    # One bright quadrant, top left as stored; where EXIF puts it: https://exiftool.org/TagNames/EXIF.html
    stored = np.zeros((16, 32, 3), np.uint8)
    stored[:8, :16] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = pixels(encoded(Image.fromarray(stored), kind, exif=exif))
    assert upright.shape == ((16, 32, 3) if orientation < 5 else (32, 16, 3))
    height, width = upright.shape[0] // 2, upright.shape[1] // 2
    quadrants = [upright[:height, :width], upright[:height, width:], upright[height:, :width], upright[height:, width:]]
    bright = {1: 0, 2: 1, 3: 3, 4: 2, 5: 0, 6: 1, 7: 3, 8: 2}[orientation]
    assert [i for i, quadrant in enumerate(quadrants) if quadrant.mean() > 128] == [bright]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_pictures_with_several_frames_are_refused(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), WHITE)]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert "2 frames" in refusal(content)
    assert "2 frames" in refusal(Image.open(io.BytesIO(content)))


def test_one_frame_taken_from_several_is_accepted() -> None:
    frames = [Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), (0, 0, 255))]
    several = Image.open(io.BytesIO(encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])))
    several.seek(1)
    assert (pixels(several.copy()) == (0, 0, 255)).all()


def test_multi_picture_jpegs_count_as_one_picture() -> None:
    both = [Image.new("RGB", (16, 16), WHITE), Image.new("RGB", (16, 16), (0, 0, 0))]
    content = encoded(both[0], "MPO", save_all=True, append_images=both[1:])
    assert Image.open(io.BytesIO(content)).format == "MPO"
    assert (pixels(content) == 255).all()


def test_files_are_read_by_content_and_not_by_extension(tmp_path: Path) -> None:
    path = tmp_path / "really_a_png.jpg"
    path.write_bytes(encoded(picture(8, 6, 0)))
    assert (pixels(path) == np.asarray(picture(8, 6, 0))).all()


def forms(content: bytes, folder: Path) -> list[Any]:
    """One picture in every form that a source may have."""
    path = folder / "picture.png"
    path.write_bytes(content)
    image = Image.open(io.BytesIO(content))
    array = np.asarray(image.convert("RGB"))
    return [
        *(image, array, np.asfortranarray(array), path, str(path), f"file://{path}"),
        *(content, bytearray(content), memoryview(content), data_url(content)),
        *({"bytes": content, "path": None}, {"bytes": None, "path": str(path)}, {"bytes": content, "path": "gone.png"}),
    ]


def test_equal_pictures_from_different_sources_have_equal_hashes(tmp_path: Path) -> None:
    images = [load(form) for form in forms(encoded(picture(8, 6, 0)), tmp_path)]
    assert {image.sha256 for image in images} == {load(picture(8, 6, 0)).sha256}
    assert load(picture(8, 6, 1)).sha256 != images[0].sha256


def test_the_hash_covers_the_size_as_well_as_the_pixels() -> None:
    assert load(Image.new("RGB", (2, 3))).sha256 != load(Image.new("RGB", (3, 2))).sha256


def test_equal_pictures_are_processed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = load_adapter(tiny("qwen2_5_vl").processor)
    kind = type(adapter.processor.image_processor)
    real, seen = kind.__call__, list[int]()

    def counting(self: Any, images: list[Any], **options: Any) -> Any:
        seen.append(len(images))
        return real(self, images=images, **options)

    monkeypatch.setattr(kind, "__call__", counting)
    sources = forms(encoded(picture(32, 32, 0)), tmp_path)
    prompts = adapter.encode([{"prompt": user("which"), "image": source} for source in sources])
    assert seen == [1]
    assert len({id(prompt) for prompt in prompts}) == 1


@pytest.mark.parametrize(
    "array", [np.full((5, 4), 9, np.uint8), np.full((5, 4, 1), 9, np.uint8), np.full((5, 4, 3), 9, np.uint8)]
)
def test_uint8_arrays_are_pictures(array: np.ndarray) -> None:
    assert pixels(array).shape == (5, 4, 3)
    assert (pixels(array) == 9).all()


def test_the_fourth_channel_of_an_array_is_its_alpha() -> None:
    assert (pixels(np.zeros((5, 4, 4), np.uint8)) == 255).all()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((5, 4, 3), np.float32),
        np.zeros((5, 4, 3), np.int64),
        np.zeros((5, 4), bool),
        np.zeros((3, 5, 6), np.uint8),
        np.zeros((5, 4, 2), np.uint8),
        np.zeros((1, 5, 4, 3), np.uint8),
        np.zeros(5, np.uint8),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_other_arrays_are_refused_with_dtype_and_shape(array: np.ndarray) -> None:
    message = refusal(array)
    assert str(array.dtype) in message
    assert str(list(array.shape)) in message


@pytest.mark.parametrize(
    "source", [Image.new("RGB", (0, 3)), np.zeros((0, 3, 3), np.uint8), np.zeros((3, 0), np.uint8)]
)
def test_pictures_without_pixels_are_refused(source: Any) -> None:
    assert "no pixels" in refusal(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"", "cannot be read"),
        (b"not a picture", "cannot be read"),
        ("missing/picture.png", "no picture file"),
        (Path("missing/picture.png"), "no picture file"),
        ("/", "no picture file"),
        ("", "no picture file"),
        ("nul\0byte.png", "no picture file"),
        ("x" * 5000, "cannot be read"),
        ("http://example.org/a.png", "not fetched"),
        ("HTTPS://example.org/a.png", "not fetched"),
        ("s3://bucket/a.png", "not fetched"),
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,a", "broken"),
        ("data:image/png;base64,é", "broken"),
        ("data:image/png;base64,", "cannot be read"),
        (data_url(b"not a picture"), "cannot be read"),
        ({"bytes": None, "path": None}, "neither"),
        ({}, "neither"),
        ({"bytes": b"", "path": "picture.png"}, "cannot be read"),
        (None, "NoneType"),
        (3, "int"),
        ([1, 2], "list"),
        (Image.new("La", (2, 2)), "cannot be read"),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_sources_that_are_no_picture_are_refused(source: Any, reason: str) -> None:
    message = refusal(source)
    assert reason in message
    assert len(message) < 500


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_truncated_files_are_refused(kind: str) -> None:
    content = encoded(picture(40, 40, 0), kind)
    assert "cannot be read" in refusal(content[: len(content) // 2])


def test_a_closed_picture_is_refused() -> None:
    image = Image.open(io.BytesIO(encoded(picture(4, 4, 0))))
    image.close()
    assert "cannot be read" in refusal(image)


BROKEN_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "JPEG2000", "AVIF")


@pytest.mark.filterwarnings("ignore")  # Pillow warns of much before it gives up
@pytest.mark.parametrize("kind", BROKEN_FORMATS)
@given(data=st.data())
def test_broken_files_are_read_or_refused_with_the_row(kind: str, data: st.DataObject) -> None:
    content = bytearray(encoded(picture(12, 9, 0), kind))
    for at in data.draw(st.lists(st.integers(0, min(120, len(content) - 1)), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    try:
        assert load(bytes(content)).image.mode == "RGB"
    except ValueError as error:
        assert str(error).startswith(WHERE)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize(
    "make",
    [
        lambda: picture(8, 6, 0),
        lambda: Image.new("RGBA", (8, 6), (*RED, 0)),
        lambda: Image.open(io.BytesIO(encoded(Image.new("P", (8, 6)), transparency=0))),
        lambda: Image.open(io.BytesIO(encoded(Image.new("L", (8, 6)), transparency=0))),
    ],
    ids=["RGB", "RGBA", "P", "L"],
)
def test_the_callers_picture_is_never_the_result_and_never_changed(make: Callable[[], Image.Image]) -> None:
    image = make()
    before = (image.mode, image.size, image.tobytes(), dict(image.info))
    result = load(image).image
    result.paste((1, 2, 3), (0, 0, 8, 6))
    assert result is not image
    assert (image.mode, image.size, image.tobytes(), dict(image.info)) == before


def test_an_array_is_never_shared_with_the_result() -> None:
    array = np.full((5, 4, 3), 9, np.uint8)
    result = load(array).image
    array[:] = 0
    assert (np.asarray(result) == 9).all()


def test_resize_keys_are_part_of_the_cache_key() -> None:
    usual, _ = read_picture(picture(8, 6, 0), where=WHERE)
    small, _ = read_picture(picture(8, 6, 0), where=WHERE, resize={"max_pixels": 4, "min_pixels": 1})
    assert usual.sha256 == small.sha256
    assert usual.key != small.key
    assert small.key == read_picture(picture(8, 6, 0), where="", resize={"min_pixels": 1, "max_pixels": 4})[0].key


# Sizes


@given(width=st.integers(8, 300), height=st.integers(8, 300), high=st.integers(400, 20_000), low=st.integers(1, 20_000))
def test_bounds_keep_the_shape(width: int, height: int, high: int, low: int) -> None:
    image = Image.new("RGB", (width, height))
    for keys in ({"max_pixels": high}, {"min_pixels": low}):
        found = resized(image, keys)
        pixels = found.width * found.height
        assert pixels <= keys.get("max_pixels", pixels)
        assert pixels >= keys.get("min_pixels", 0)
        if keys.get("min_pixels", 0) <= width * height <= keys.get("max_pixels", width * height):
            assert found is image
            continue
        # Both sides by one factor, rounded to whole pixels, and no more than needed.
        scale = (high if "max_pixels" in keys else low) / (width * height)
        assert abs(found.width - width * scale**0.5) < 1
        assert abs(found.height - height * scale**0.5) < 1


def test_the_size_of_a_picture_may_be_given() -> None:
    image = picture(60, 40, 0)
    found = resized(image, {"resized_height": 30, "resized_width": 50})
    assert found.size == (50, 30)
    assert found.tobytes() == image.resize((50, 30), Image.Resampling.BICUBIC).tobytes()
    assert resized(image, {"resized_height": 30, "resized_width": 50, "max_pixels": 100}).size == (50, 30)
    assert resized(image, {}) is image
    assert resized(image, {"resized_height": 40, "resized_width": 60}) is image


def test_the_size_that_a_picture_has_may_be_given() -> None:
    keys = {"resized_height": 40, "resized_width": 60}
    assert resized(picture(60, 40, 0), {**keys, "max_pixels": 100}).size == (60, 40)


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="min_pixels=200 is above max_pixels=100"):
        resized(picture(60, 40, 0), {"min_pixels": 200, "max_pixels": 100})
