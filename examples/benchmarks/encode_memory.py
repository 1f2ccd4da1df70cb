"""How much memory encoding takes: prompts of several large photographs that are given by their paths.

    python examples/benchmarks/encode_memory.py
    python examples/benchmarks/encode_memory.py --prompts 40 --width 2000 --height 1500

Makes JPEG files that all differ in a temporary folder (1.4 GB with the defaults, removed at the end), and encodes them
in four ways, each in a process of its own with one thread:

- `encode, all`: one call of `encode` for all prompts, and all of them kept, with few pixels a picture;
- `encode, rounds`: rounds of 8 prompts as in training, each let go after use, with more pixels a picture;
- `plain, all` and `plain, rounds`: the processor of transformers, with the pictures of all prompts or of a round opened
  before it is called on each prompt; fewer prompts, since four pictures of 12 megapixels take about 200 MB.

Memory is anonymous resident memory in MB (10^6 bytes) above the baseline, which is taken when the processor is loaded
and has encoded one small picture; pages of files, such as libraries, come and go by themselves and are left out. It is
read after each prompt: what is held then, and the peak so far, which is the kernel's own and misses nothing in between
(from /proc, so Linux only). The exit status is 1 when a peak of `encode` is over 1,000 MB.
"""

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from timeit import timeit
from typing import Any

# Read when torch and transformers are imported.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

from PIL import Image, ImageDraw  # noqa: E402

from vlmroll_processors import load_adapter  # noqa: E402
from vlmroll_processors.families.base import Sized  # noqa: E402
from vlmroll_processors.images import open_image, read_picture  # noqa: E402

MODEL_DIR = Path(__file__).resolve().parents[2] / "assets" / "tiny-vl"
CHAT = [{"role": "user", "content": "Which picture shows the largest digit?"}]
LIMIT, ROUND, PLAIN_ALL, PLAIN_ROUNDS = 1000, 8, 16, 64

Row = Mapping[str, Any]


@dataclass(kw_only=True)
class Curve:
    """MB held after each prompt and highest MB so far; and what else was measured."""

    points: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    tensors: float = 0.0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def peak(self) -> float:
        """MB above the baseline."""
        return self.points[-1][1] - self.points[0][0]

    def mark(self) -> None:
        """Read the memory; before the first prompt, which gives the baseline, and after each."""
        lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        held, resident, highest = (int(lines[name].split()[0]) * 1024 / 1e6 for name in ("RssAnon", "VmRSS", "VmHWM"))
        files = resident - held
        self.points.append((held, max(self.points[-1][1], highest - files) if self.points else held))
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here


class Watched(list[Row]):
    """Rows that mark a curve when the one after them is asked for."""

    curve: Curve

    def __iter__(self) -> Iterator[Row]:
        for row in super().__iter__():
            yield row
            self.curve.mark()


def measure(work: Callable[[Sequence[Row], Curve], list[Any]], rows: Sequence[Row], size: int) -> Curve:
    """Rounds of `size` prompts through `work`, which returns the tensors that are kept until the end of the round."""
    with tempfile.NamedTemporaryFile(suffix=".png") as small:
        Image.new("RGB", (32, 32)).save(small.name)
        work([{"prompt": CHAT, "images": [small.name]}], Curve())
    gc.collect()
    curve, started = Curve(), time.perf_counter()
    curve.mark()
    for start in range(0, len(rows), size):
        kept = sum(tensor.nbytes for tensor in work(rows[start : start + size], curve))
        curve.tensors = max(curve.tensors, kept / 1e6)
    curve.seconds = time.perf_counter() - started
    return curve


def encode(rows: Sequence[Row], size: int, max_pixels: int) -> Curve:
    """The way of the library; also how long the steps of reading a picture take."""
    adapter = load_adapter(MODEL_DIR, max_pixels=max_pixels)

    def work(rows: Sequence[Row], curve: Curve) -> list[Any]:
        watched = Watched(rows)
        watched.curve = curve
        prompts = adapter.encode(watched)
        pictures = [picture.sha256 for prompt in prompts for picture in prompt.images]
        assert len(pictures) == len(set(pictures)), "two pictures are alike"
        return [tensor for prompt in prompts for tensor in prompt.forward_kwargs.values()]

    def clock(step: Callable[[Any], Any], items: Sequence[Any]) -> float:
        return timeit(lambda: deque(map(step, items), maxlen=0), number=1) / len(items)

    curve = measure(work, rows, size)
    paths = [path for row in rows[:2] for path in row["images"]]
    sized = [Sized(image=read_picture(path, where="")[1], own={}, budget=adapter.budget) for path in paths]
    decode = clock(lambda path: open_image(path, where="").load(), paths)
    read = clock(lambda path: read_picture(path, where=""), paths)
    process = clock(lambda picture: adapter.family.read(adapter.family, adapter.processor, [picture]), sized)
    curve.parts = {"decode": decode, "normalise and hash": read - decode, "process": process}
    return curve


def plain(rows: Sequence[Row], size: int, max_pixels: int) -> Curve:
    """The way of a usual trainer."""
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(MODEL_DIR)
    pixels = {"shortest_edge": 256, "longest_edge": max_pixels}

    def work(rows: Sequence[Row], curve: Curve) -> list[Any]:
        opened = [[Image.open(path).convert("RGB") for path in row["images"]] for row in rows]
        tensors: list[Any] = []
        for images in opened:
            content = [*({"type": "image"} for _ in images), {"type": "text", "text": CHAT[0]["content"]}]
            chat = [{"role": "user", "content": content}]
            text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            output = processor(text=[text], images=[images], images_kwargs={"size": pixels}, return_tensors="pt")
            tensors += output.values()
            curve.mark()
        return tensors

    return measure(work, rows, size)


def make_pictures(folder: Path, count: int, width: int, height: int) -> list[str]:
    """JPEG files of the same shapes, each with its number as a row of black and white squares in the corner."""
    rng = random.Random(0)
    image = Image.linear_gradient("L").resize((width, height)).convert("RGB")
    draw = ImageDraw.Draw(image)
    for _ in range(60):
        x, y, side = rng.randrange(width), rng.randrange(height), rng.randrange(height // 50, height // 5)
        draw.ellipse((x, y, x + side, y + side), fill=f"hsl({rng.randrange(360)}, 70%, 50%)")
    paths = [str(folder / f"{number}.jpg") for number in range(count)]
    for number, path in enumerate(paths):
        for bit in range(16):
            draw.rectangle((16 * bit, 0, 16 * bit + 15, 15), fill="white" if number >> bit & 1 else "black")
        image.save(path, quality=75)
    return paths


def show(curves: Mapping[str, Curve], num_pictures: int) -> None:
    """What each way took, and the curves side by side."""
    print(f"{'':16}{'prompts':>9}{'baseline':>10}{'peak MB':>9}{'tensors MB':>12}{'ms a picture':>14}")
    for way, curve in curves.items():
        count = len(curve.points) - 1
        figures = f"{curve.points[0][0]:10.0f}{curve.peak:9.0f}{curve.tensors:12.0f}"
        each = f"{1000 * curve.seconds / count / num_pictures:14.0f}"
        parts = ", ".join(f"{part} {1000 * seconds:.0f}" for part, seconds in curve.parts.items())
        print(f"{way:16}{count:9}{figures}{each}  {parts}")
    print("\nMB held and highest so far\nprompts" + "".join(f"{way:>16}" for way in curves))
    last = max(len(curve.points) for curve in curves.values()) - 1
    for mark in sorted({mark for mark in (1, 2, 4, 8, 16, 64, *(last * n // 10 for n in range(11))) if mark <= last}):
        found = [(curve.points[mark : mark + 1], curve.points[0][0]) for curve in curves.values()]
        cells = ["".join(f"{mb - baseline:6.0f}" for point in points for mb in point) for points, baseline in found]
        print(f"{mark:7}" + "".join(f"{cell:>16}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in {"prompts": 1000, "pictures": 4, "width": 4000, "height": 3000, "repeats": 1}.items():
        parser.add_argument(f"--{option}", type=int, default=default, help=f"default {default}")
    pixels = "of a picture in `all` and in `rounds`; default 64*64 and 448*448"
    parser.add_argument("--max-pixels", type=int, nargs=2, default=(64 * 64, 448 * 448), help=pixels)
    args = parser.parse_args()
    few, many = args.max_pixels
    ways = {  # how, prompts, prompts of a round, pixels of a picture
        "encode, all": (encode, args.prompts, args.prompts, few),
        "encode, rounds": (encode, args.prompts, ROUND, many),
        "plain, all": (plain, PLAIN_ALL, PLAIN_ALL, few),
        "plain, rounds": (plain, PLAIN_ROUNDS, ROUND, many),
    }
    curves: dict[str, Curve] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = make_pictures(Path(folder), args.prompts * args.pictures, args.width, args.height)
        disk = sum(Path(path).stat().st_size for path in paths) / 1e6
        print(f"{len(paths)} pictures of {args.width} x {args.height}, {disk:.0f} MB on disk", flush=True)
        rows = [{"prompt": CHAT, "images": paths[i : i + args.pictures]} for i in range(0, len(paths), args.pictures)]
        for way, (work, prompts, *options) in ways.items():
            runs: list[Curve] = []
            for _ in range(args.repeats):  # the run with the highest peak is shown
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    runs.append(process.submit(work, rows[:prompts], *options).result())
            curves[way] = max(runs, key=lambda curve: curve.peak)
    show(curves, args.pictures)
    highest = max(curve.peak for way, curve in curves.items() if way.startswith("encode"))
    print(f"highest peak of encode: {highest:.0f} MB above the baseline; at most {LIMIT} are allowed")
    sys.exit(highest > LIMIT)


if __name__ == "__main__":
    main()
