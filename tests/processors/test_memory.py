"""Large pictures given by path are decoded one at a time and let go: prompts hold paths and processed tensors."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tiny_models import tiny
from vlmroll_processors import load_adapter, reading
from vlmroll_processors.families.base import Features

WIDTH, HEIGHT = 1600, 1250
DECODED = WIDTH * HEIGHT * 4 / 1e6
"""MB of one picture: Pillow takes four bytes for a pixel of RGB."""
STATUS = Path("/proc/self/status")


def rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Prompts of two pictures, each of one colour and different from all others."""
    paths = [folder / f"{number}.jpg" for number in range(2 * count)]
    for number, path in enumerate(paths):
        Image.new("RGB", (WIDTH, HEIGHT), (number % 16 * 16, number // 16 * 16, 90)).save(path)
    chat = [{"role": "user", "content": "which digit ?"}]
    return [{"prompt": chat, "images": [str(path) for path in paths[i : i + 2]]} for i in range(0, 2 * count, 2)]


class Weighed(list[dict[str, Any]]):
    """Rows that note the memory of the process in MB, without pages of files, when one of them is asked for."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        super().__init__(items)
        self.megabytes: list[float] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in super().__iter__():
            lines = dict(line.split(":") for line in STATUS.read_text().splitlines())
            self.megabytes.append(int(lines["RssAnon"].split()[0]) * 1024 / 1e6)
            yield row


@pytest.mark.skipif(not STATUS.exists(), reason="the memory of the process is read from /proc")
def test_memory_does_not_grow_with_the_pictures(tmp_path: Path) -> None:
    weighed = Weighed(rows(tmp_path, 20))
    prompts = load_adapter(tiny("qwen2_5_vl").processor).encode(weighed)
    assert len({picture.sha256 for prompt in prompts for picture in prompt.images}) == 40
    # From the second row on, when the buffers of reading are there. 38 pictures follow; none of them is kept decoded.
    assert max(weighed.megabytes) - weighed.megabytes[1] < 10 * DECODED


def test_one_picture_is_decoded_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[weakref.ref[Image.Image]] = []
    read = reading.read_picture

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not any(image() for image in decoded), "an earlier picture is still decoded"
        picture, image = read(*args, **kwargs)
        decoded.append(weakref.ref(image))
        return picture, image

    monkeypatch.setattr(reading, "read_picture", watched)
    prompts = load_adapter(tiny("qwen2_5_vl").processor).encode(rows(tmp_path, 3))
    assert len(decoded) == 6
    assert not any(image() for image in decoded)
    sources = [picture.source for prompt in prompts for picture in prompt.images]
    assert sources == [tmp_path / f"{number}.jpg" for number in range(6)]


def test_tensors_of_a_picture_are_held_once(tmp_path: Path) -> None:
    """What a picture of several brings is part of its prompt's tensors; alone in a later prompt, it is a copy."""
    adapter = load_adapter(tiny("qwen2_5_vl").processor)
    family, brought = adapter.family, list[weakref.ref[torch.Tensor]]()

    def read(*args: Any) -> Features:
        features = family.read(*args)
        brought.extend(weakref.ref(tensor) for tensor in features.kwargs.values())
        return features

    class Checked(list[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for row in super().__iter__():
                assert not any(tensor() is not None for tensor in brought), "held beside the prompt's tensors"
                yield row

    adapter.family = replace(family, read=read)
    several, others = rows(tmp_path, 2)
    one, none = ({**several, "images": several["images"][:count]} for count in (1, 0))
    prompts = adapter.encode(Checked([several, others, one, none]))
    assert len(brought) == 4 * len(family.keep(prompts[0].forward_kwargs))  # each of the four files is processed once
    alone = family.keep(prompts[2].forward_kwargs)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in alone.values())
