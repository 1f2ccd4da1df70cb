"""The completions table: printed in the console and written as parquet, with the pictures."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmroll.types import Rollout

_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>")

TABLE_COLUMNS = ("step", "row_id", "prompt", "completion", "advantage", "images")
"""The columns that every table has; rewards and extras are named otherwise."""


def table_rows(
    rollouts: Sequence[Rollout], texts: Sequence[str], extras: Mapping[str, Sequence[Any]], *, with_images: bool
) -> list[dict[str, Any]]:
    """One row for each rollout: row_id, prompt, completion, each reward, extras, advantage, pictures (PNG).

    Raises:
        ValueError: an extra column does not have one value for each rollout.
    """
    for column, values in extras.items():
        if len(values) != len(rollouts):
            raise ValueError(
                f"log_extra: column {column!r} has {len(values)} values for {len(rollouts)} completions; log one each"
            )
    prompts = {id(prompt): prompt for rollout in rollouts for prompt in rollout.shown} if with_images else {}
    pictures = {
        key: [{"bytes": _png(picture.image), "path": None} for picture in prompt.images]
        for key, prompt in prompts.items()
    }
    rows: list[dict[str, Any]] = []
    for i, (rollout, text) in enumerate(zip(rollouts, texts, strict=True)):
        row: dict[str, Any] = {"row_id": rollout.row_id, "prompt": rollout.prompt.text, "completion": text}
        row |= rollout.rewards
        row |= {column: _plain(values[i]) for column, values in extras.items()}
        row["advantage"] = rollout.advantage
        if with_images:
            row["images"] = [picture for prompt in rollout.shown for picture in pictures[id(prompt)]]
        rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """Python values for those of numpy and torch."""
    return value.tolist() if hasattr(value, "tolist") else value


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def write_parquet(rows: Sequence[Mapping[str, Any]], folder: Path, step: int) -> Path:
    """Write `completions_{step}.parquet`; its `images` column loads as pictures with `datasets`."""
    import datasets
    import pyarrow.parquet

    columns = list(dict.fromkeys(column for row in rows for column in row))
    data = {column: _one_type([row.get(column) for row in rows]) for column in columns}
    data = {"step": [step] * len(rows), **data}
    features = dict(datasets.Dataset.from_dict(data).features)
    for column, values in data.items():
        if all(value is None for value in values):
            # Without a type, this file could not be loaded together with those of other steps.
            features[column] = datasets.Value("float64")
    if "images" in data:
        features["images"] = datasets.List(datasets.Image())
    table = datasets.Dataset.from_dict(data, features=datasets.Features(features))
    path = folder / f"completions_{step:05d}.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    # Written by pyarrow itself: the writer of datasets shows a progress bar in the middle of the run's.
    pyarrow.parquet.write_table(table.data.table, path)
    return path


def _one_type(values: list[Any]) -> list[Any]:
    """The values as they are where Arrow finds a type that holds all of them, else as text."""
    import pyarrow

    try:
        pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        return [None if value is None else str(value) for value in values]
    return values


def print_table(rows: Sequence[Mapping[str, Any]], title: str, *, limit: int | None, unique_prompts: bool) -> None:
    """Print some of the rows: a prompt once for its group, without special tokens, and pictures by their sizes."""
    from PIL import Image
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if unique_prompts:
        rows = list({row["row_id"]: row for row in reversed(rows)}.values())[::-1]
    table = Table(title=title, show_lines=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column, overflow="fold")
    last: Any = None
    for row in rows if limit is None else rows[:limit]:
        sibling, last = row["row_id"] == last, row["row_id"]
        cells: list[Text] = []
        for column in columns:
            value: Any = row.get(column)
            if column == "prompt":
                value = "" if sibling else _SPECIAL_TOKEN.sub("", value).strip()
            if column == "images":
                sizes = [Image.open(io.BytesIO(image["bytes"])).size for image in value or []]
                value = ", ".join(f"{width}x{height}" for width, height in sizes)
            cells.append(Text("" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)))
        table.add_row(*cells)
    console = Console()
    console.print()  # the progress bar ends without a line feed
    console.print(table)
