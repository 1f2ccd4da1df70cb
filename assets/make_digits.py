"""Write the digit sheets and their labels from the copy of the UCI digits that scikit-learn bundles.

    python assets/make_digits.py            # writes assets/digits/{warmup,train,heldout}.png and labels.json

The split goes by index alone, in blocks of ten consecutive digits: of every five blocks the first three belong to the
warm-up, the fourth to training and the fifth to the held-out set. The three sets are disjoint. Blocks are used because
the source mostly writes 0 to 9 in turn, so that every set gets each digit about equally often.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

FOLDER = Path(__file__).resolve().parent / "digits"
SPLITS = ("warmup", "warmup", "warmup", "train", "heldout")
COLUMNS = 40


def split_of(index: int) -> str:
    """The set that the digit at `index` of the source belongs to."""
    return SPLITS[(index // 10) % len(SPLITS)]


def make_sheet(glyphs: NDArray[np.uint8]) -> Image.Image:
    """Lay out glyphs (N, 8, 8), read row by row, in a sheet with `COLUMNS` glyphs a row; unused cells stay black."""
    rows = -(-len(glyphs) // COLUMNS)
    cells = np.zeros((rows * COLUMNS, 8, 8), dtype=np.uint8)
    cells[: len(glyphs)] = glyphs
    grid = cells.reshape(rows, COLUMNS, 8, 8).transpose(0, 2, 1, 3)
    return Image.fromarray(grid.reshape(rows * 8, COLUMNS * 8))


def main() -> None:
    source: Any = load_digits()
    values = np.asarray(source.images, dtype=np.float64)  # (1797, 8, 8), ink in 0..16
    glyphs = np.rint(values * 255 / 16).astype(np.uint8)
    labels: dict[str, str] = {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for split in dict.fromkeys(SPLITS):
        indices = [index for index in range(len(glyphs)) if split_of(index) == split]
        make_sheet(glyphs[indices]).save(FOLDER / f"{split}.png", optimize=True)
        labels[split] = "".join(str(int(source.target[index])) for index in indices)
    (FOLDER / "labels.json").write_text(json.dumps(labels, indent=1) + "\n")
    print({split: len(text) for split, text in labels.items()})


if __name__ == "__main__":
    main()
