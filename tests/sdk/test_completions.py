"""The completions table: its columns, the parquet files and what is printed."""

import math
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from tiny_models import picture, tiny, user
from vlmroll.completions import print_table, table_rows, write_parquet
from vlmroll.types import Completion, Rollout
from vlmroll_processors import load_adapter

PICTURES = [[], [picture(64, 48, 1)], [picture(40, 40, 2), picture(33, 57, 3), picture(64, 64, 4)]]


def rollouts() -> list[Rollout]:
    """Three with 0, 1 and 3 pictures."""
    rows = [{"prompt": user(f"question {i}", *images)} for i, images in enumerate(PICTURES)]
    prompts = load_adapter(tiny("qwen3_vl").processor).encode(rows)
    done = Completion(completion_ids=(7,), logprobs=(-1.0,), finish_reason="stop")
    return [
        Rollout(
            prompt=prompt,
            completion=done,
            row=row,
            row_id=i,
            group=i,
            rewards={"right": [1.0, None, 0.5][i], "never": None},
            advantage=i - 1.0,
        )
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]


def table(texts: tuple[str, ...] = ("a", "b", "c"), *, with_images: bool = True, **extras: Any) -> list[dict[str, Any]]:
    return table_rows(rollouts(), texts, extras, with_images=with_images)


def load(*paths: Path) -> Any:
    loaded: Any = datasets.load_dataset("parquet", data_files=[str(path) for path in paths], split="train")
    return loaded


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_pictures_come_back_pixel_by_pixel(tmp_path: Path) -> None:
    path = write_parquet(table(tries=[1, 2, 3]), tmp_path / "made" / "here", 12)
    assert path == tmp_path / "made" / "here" / "completions_00012.parquet"
    for loaded in (load(path), datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "other"))):
        found = cast("list[dict[str, Any]]", list(loaded))  # pyright: ignore
        assert list(found[0]) == [
            "step",
            "row_id",
            "prompt",
            "completion",
            "right",
            "never",
            "tries",
            "advantage",
            "images",
        ]
        assert [row["step"] for row in found] == [12] * 3
        assert [row["completion"] for row in found] == ["a", "b", "c"]
        assert [row["right"] for row in found] == [1.0, None, 0.5]
        assert [row["never"] for row in found] == [None] * 3
        assert [row["advantage"] for row in found] == [-1.0, 0.0, 1.0]
        assert [row["tries"] for row in found] == [1, 2, 3]
        assert "question 2" in found[2]["prompt"]
        for row, images in zip(found, PICTURES, strict=True):
            assert [image.tobytes() for image in row["images"]] == [image.tobytes() for image in images]


def test_files_of_several_steps_load_as_one(tmp_path: Path) -> None:
    """The first has neither a picture nor a reward, so nothing in it shows the types of these columns."""
    first = write_parquet(table()[:1] * 2, tmp_path, 1)
    bare = [{**row, "right": None} for row in table()[:1]]
    found = load(write_parquet(bare, tmp_path, 0), first, write_parquet(table(), tmp_path, 2))
    assert found["step"][:] == [0, 1, 1, 2, 2, 2]
    assert found["right"][:] == [None, 1.0, 1.0, 1.0, None, 0.5]
    assert [len(images) for images in found["images"]] == [0, 0, 0, 0, 1, 3]
    assert isinstance(found[5]["images"][2], Image.Image)


def test_without_pictures_there_is_no_such_column(tmp_path: Path) -> None:
    assert "images" not in load(write_parquet(table(with_images=False), tmp_path, 0)).column_names


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, "two", None], ["1", "two", None]),
        ([True, 2, 0.5], ["True", "2", "0.5"]),
        ([{"a": 1}, {"a": "b"}, None], ["{'a': 1}", "{'a': 'b'}", None]),
        ([2**80, 1, 2], [str(2**80), "1", "2"]),
        ([1, 2.5, None], [1.0, 2.5, None]),
        ([[1], [], [2, 3]], [[1], [], [2, 3]]),
        ([np.float32(0.5), np.int64(2), None], [0.5, 2.0, None]),
        ([torch.tensor(1.5), torch.tensor([1.0, 2.0]), None], ["1.5", "[1.0, 2.0]", None]),
    ],
    ids=str,
)
def test_columns_of_mixed_types_are_written(values: list[Any], expected: list[Any], tmp_path: Path) -> None:
    assert load(write_parquet(table(logged=values), tmp_path, 0))["logged"][:] == expected


def test_a_column_of_the_wrong_length_is_named() -> None:
    with pytest.raises(ValueError, match="log_extra: column 'logged' has 2 values for 3 completions"):
        table(logged=[1, 2])


ODD = "[red] [/] [bold]x[/bold] [link=a]\x00\x1b[31m\u202e\n\ttab 你好 \U0001f642 :smile: {x} %s \\"


def test_odd_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table((ODD, "", "[/red]"), note=["[green]", None, ODD])
    print_table(rows, "Step 3", limit=None, unique_prompts=False)
    printed = capsys.readouterr().out
    assert "Step 3" in printed
    squeezed = "".join(printed.split())
    for text in ("[red]", "[/]", "[/red]", "[green]"):
        assert text in squeezed.replace("│", "") or text in squeezed


def printed_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """The completions of the printed rows of six, two for each prompt, on a wide console."""
    monkeypatch.setenv("COLUMNS", "400")
    rows = [row for one, other in zip(table(), table(("d", "e", "f")), strict=True) for row in (one, other)]
    print_table(rows, "Step 0", **options)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return [cells[3].strip() for cells in lines if cells[3].strip()]


def test_some_rows_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def show(limit: int | None, unique: bool) -> list[str]:
        return printed_rows(capsys, monkeypatch, limit=limit, unique_prompts=unique)

    assert show(None, False) == ["a", "d", "b", "e", "c", "f"]
    assert show(3, False) == ["a", "d", "b"]
    assert show(None, True) == ["a", "b", "c"]
    assert show(2, True) == ["a", "b"]


def test_pictures_are_printed_as_sizes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    print_table(table(), "Step 0", limit=None, unique_prompts=False)
    assert "40x40, 33x57, 64x64" in capsys.readouterr().out


def test_missing_rewards_and_nan_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        [{"row_id": 0, "prompt": "p", "right": None, "advantage": math.nan}], "Step 0", limit=5, unique_prompts=True
    )
    assert "nan" in capsys.readouterr().out


def test_a_prompt_is_printed_once_for_its_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    row = {"row_id": 3, "prompt": "<|im_start|>user\nwhich ?<|im_end|>", "completion": "a"}
    print_table([row, {**row, "completion": "b"}], "Evaluation, step 2", limit=None, unique_prompts=False)
    printed = capsys.readouterr().out
    assert printed.count("which ?") == 1
    assert "<|im_start|>" not in printed
    assert "Evaluation, step 2" in printed


def test_the_console_line_is_short() -> None:
    from vlmroll.console import short_line

    logs = {"loss": -0.00123456, "reward": 0.5, "completions/mean_length": 9.25, "clip_ratio/low_mean": 0.0}
    logs["profiling/Time taken: GRPOTrainer.accuracy_reward"] = 0.1
    assert short_line(3, 9, logs) == "step 3/9  reward 0.5  loss -0.001235  mean_length 9.25"
    logs = {"eval_few_reward": 0.25, "eval_few_loss": 1.0}
    assert short_line(3, 9, logs) == "step 3/9  eval_few  reward 0.25  loss 1"
    assert short_line(9, 9, {"train_runtime": 58.68}) == "step 9/9  finished after 58.7 s"
