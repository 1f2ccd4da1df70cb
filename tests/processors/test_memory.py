"""Large pictures given by path are decoded one at a time and let go, so prompts hold paths and processed tensors."""

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tiny_models import tiny
from vlmroll_processors import load_adapter, reading

ROOT = Path(__file__).parents[2]
WIDTH, HEIGHT = 1600, 1250
# Pillow takes four bytes for a pixel of RGB: 8 MB for each of these pictures.
MEGABYTES = WIDTH * HEIGHT * 4 / 1e6
PEAK = """
import sys
from pathlib import Path

from vlmroll_processors import load_adapter


def peak():
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024 / 1e6


model, *paths = sys.argv[1:]
adapter = load_adapter(model, max_pixels=64 * 64)
rows = [{"prompt": [{"role": "user", "content": "Which digit?"}], "images": [path]} for path in paths]
first = adapter.encode(rows[:1])
before = peak()
prompts = adapter.encode(rows[1:])
print(peak() - before)
"""


def files(folder: Path, count: int) -> list[str]:
    """Pictures of one colour each, all different."""
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        Image.new("RGB", (WIDTH, HEIGHT), (6 * number, 40, 90)).save(path)
    return [str(path) for path in paths]


def row(paths: list[str]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "which digit ?"}], "images": paths}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_the_peak_does_not_grow_with_the_pictures(tmp_path: Path) -> None:
    """The peak is that of a process of its own: earlier tests may have gone higher."""
    paths = files(tmp_path, 41)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "processors")}
    command = [sys.executable, "-c", PEAK, str(ROOT / "assets" / "tiny-vl"), *paths]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    # Less than ten decoded pictures beside the first prompt's; 40 would be kept.
    assert float(run.stdout) < 10 * MEGABYTES


def test_one_picture_is_decoded_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[weakref.ref[Image.Image]] = []
    read = reading.read_picture

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not [found for found in decoded if found() is not None], "an earlier picture is still decoded"
        picture, image = read(*args, **kwargs)
        decoded.append(weakref.ref(image))
        return picture, image

    monkeypatch.setattr(reading, "read_picture", watched)
    paths = files(tmp_path, 6)
    prompts = load_adapter(tiny("qwen2_5_vl").processor).encode([row(paths[:3]), row(paths[3:])])
    assert len(decoded) == 6
    assert not [found for found in decoded if found() is not None]
    assert [picture.source for prompt in prompts for picture in prompt.images] == [Path(path) for path in paths]
