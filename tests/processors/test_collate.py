"""`collate` by hand-written tensors, and the checks that `Join`, `ImageSpan` and `Prompt` make of themselves."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlmroll_processors import ImageSpan, Join, JoinKind, Prompt, collate
from vlmroll_processors.images import read_picture
from vlmroll_processors.videos import read_video

ROWS, SAMPLES, TOKENS = JoinKind.ROWS, JoinKind.SAMPLES, JoinKind.TOKENS


def prompt(num_tokens: int, kwargs: Mapping[str, Any] | None = None, *, key: int = 0, **joins: Join) -> Prompt:
    """A prompt of ids 10, 11, ... with tensors from nested lists."""
    ids = tuple(range(10, 10 + num_tokens))
    tensors = {name: torch.as_tensor(value) for name, value in (kwargs or {}).items()}
    return Prompt(prompt_ids=ids, engine_ids=ids, forward_kwargs=tensors, join=joins, batch_key=key)


def joined(prompts: list[Prompt], completions: list[list[int]] | None = None, **options: Any) -> Any:
    """The joined kwarg `x` as nested lists."""
    return collate(prompts, completions, pad_token_id=0, **options).forward_kwargs["x"].tolist()


# Ids and masks


def test_prompts_are_padded_left_and_completions_right() -> None:
    batch = collate([prompt(1), prompt(3)], [[1, 2], [3]], pad_token_id=99)
    assert batch.input_ids.tolist() == [[99, 99, 10, 1, 2], [10, 11, 12, 3, 99]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.completion_mask.tolist() == [[1, 1], [1, 0]]
    assert batch.completion_ids.tolist() == [[1, 2], [3, 99]]
    assert batch.forward_kwargs["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]
    assert set(batch.model_inputs()) == {"input_ids", "attention_mask", "position_ids"}


def test_prompts_alone_have_no_completion_columns() -> None:
    batch = collate([prompt(1), prompt(2)], pad_token_id=99)
    assert batch.input_ids.tolist() == [[99, 10], [10, 11]]
    assert batch.completion_mask.shape == batch.completion_ids.shape == (2, 0)


def test_a_completion_may_be_empty() -> None:
    batch = collate([prompt(1), prompt(1)], [[], [7]], pad_token_id=99)
    assert batch.input_ids.tolist() == [[10, 99], [10, 7]]
    assert batch.completion_mask.tolist() == [[0], [1]]


@pytest.mark.parametrize(("multiple", "widths"), [(None, (3, 2)), (1, (3, 2)), (2, (4, 2)), (3, (3, 3)), (8, (8, 8))])
def test_both_widths_are_rounded_up_by_themselves(multiple: int | None, widths: tuple[int, int]) -> None:
    plain = collate([prompt(1), prompt(3)], [[1, 2], [3]], pad_token_id=99)
    batch = collate([prompt(1), prompt(3)], [[1, 2], [3]], pad_token_id=99, pad_to_multiple_of=multiple)
    assert batch.input_ids.shape == batch.attention_mask.shape == (2, sum(widths))
    assert batch.completion_ids.shape == (2, widths[1])
    assert batch.completion_ids[:, :2].equal(plain.completion_ids)
    for name, tensor in plain.model_inputs().items():
        assert batch.model_inputs()[name][batch.attention_mask.bool()].equal(tensor[plain.attention_mask.bool()])


def test_no_completions_stay_without_columns_when_rounded() -> None:
    assert collate([prompt(3)], pad_token_id=0, pad_to_multiple_of=4).input_ids.shape == (1, 4)


# ROWS


def test_rows_are_concatenated_and_rows_without_pictures_bring_none() -> None:
    rule = Join(kind=ROWS)
    prompts = [prompt(2, {"x": [[1, 2]]}, x=rule), prompt(1, x=rule), prompt(1, {"x": [[3, 4], [5, 6]]}, x=rule)]
    assert joined(prompts) == [[1, 2], [3, 4], [5, 6]]


def test_a_batch_without_pictures_has_no_key() -> None:
    rule = Join(kind=ROWS)
    assert "x" not in collate([prompt(2, x=rule), prompt(1, x=rule)], pad_token_id=0).forward_kwargs


def test_siblings_bring_their_rows_again() -> None:
    shared = prompt(2, {"x": [[1, 2]]}, x=Join(kind=ROWS))
    assert joined([shared, shared]) == [[1, 2], [1, 2]]


def test_rows_are_padded_on_the_named_axes_only() -> None:
    rule = Join(kind=ROWS, pad=-1, pad_axes=(1,))
    prompts = [prompt(1, {"x": [[[1, 2]]]}, x=rule), prompt(1, {"x": [[[3, 4], [5, 6]]]}, x=rule)]
    assert joined(prompts) == [[[1, 2], [-1, -1]], [[3, 4], [5, 6]]]


def test_rows_are_padded_on_several_axes() -> None:
    rule = Join(kind=ROWS, pad=9, pad_axes=(1, 2))
    prompts = [prompt(1, {"x": [[[1, 2]]]}, x=rule), prompt(1, {"x": [[[3], [4]]]}, x=rule)]
    assert joined(prompts) == [[[1, 2], [9, 9]], [[3, 9], [4, 9]]]


def test_rows_of_different_sizes_on_other_axes_are_an_error() -> None:
    rule = Join(kind=ROWS, pad_axes=(1,))
    with pytest.raises(RuntimeError, match="size"):
        joined([prompt(1, {"x": [[[1, 2]]]}, x=rule), prompt(1, {"x": [[[3]]]}, x=rule)])


# SAMPLES


def test_samples_are_padded_on_every_trailing_axis() -> None:
    rule = Join(kind=SAMPLES, pad=0.5)
    prompts = [prompt(1, {"x": [[[1.0, 2.0]]]}, x=rule), prompt(1, {"x": [[[3.0], [4.0], [5.0]]]}, x=rule)]
    assert joined(prompts) == [[[1, 2], [0.5, 0.5], [0.5, 0.5]], [[3, 0.5], [4, 0.5], [5, 0.5]]]


def test_samples_of_one_number_are_joined() -> None:
    rule = Join(kind=SAMPLES)
    assert joined([prompt(1, {"x": [3]}, x=rule), prompt(1, {"x": [4]}, x=rule)]) == [3, 4]


@pytest.mark.parametrize("pad", [0, 0.5])
def test_a_prompt_without_pictures_becomes_padding_on_the_axis_of_pictures(pad: float) -> None:
    rule = Join(kind=SAMPLES, pad=pad)
    prompts = [prompt(1, x=rule), prompt(1, {"x": [[[3.0, 4.0], [5.0, 6.0]]]}, x=rule)]
    assert joined(prompts) == [[[pad, pad], [pad, pad]], [[3, 4], [5, 6]]]


def test_a_batch_without_samples_has_no_key() -> None:
    rule = Join(kind=SAMPLES)
    assert "x" not in collate([prompt(2, x=rule), prompt(1, x=rule)], pad_token_id=0).forward_kwargs


def test_a_prompt_without_its_sample_is_refused() -> None:
    rule = Join(kind=SAMPLES)
    with pytest.raises(ValueError, match="lacks the per-sample input x"):
        joined([prompt(1, {"x": [3]}, x=rule), prompt(1, x=rule)])


# TOKENS


def test_tokens_are_padded_like_the_ids_and_continued_by_a_constant() -> None:
    rule = Join(kind=TOKENS, pad=-1, completion=7)
    prompts = [prompt(1, {"x": [1]}, x=rule), prompt(3, {"x": [2, 3, 4]}, x=rule)]
    assert joined(prompts, [[5, 5], [6]]) == [[-1, -1, 1, 7, 7], [2, 3, 4, 7, 7]]
    assert joined(prompts) == [[-1, -1, 1], [2, 3, 4]]
    assert joined(prompts, [[5, 5], [6]], pad_to_multiple_of=4) == [[-1, -1, -1, 1, *[7] * 4], [-1, 2, 3, 4, *[7] * 4]]


def test_positions_count_on_from_the_largest() -> None:
    rule = Join(kind=TOKENS, completion="count_on", token_axis=1)
    prompts = [prompt(2, {"x": [[0, 1], [0, 5]]}, x=rule), prompt(1, {"x": [[0], [0]]}, x=rule)]
    assert joined(prompts, [[5], [6, 7]]) == [[[0, 1, 6, 7], [0, 0, 1, 2]], [[0, 5, 6, 7], [0, 0, 1, 2]]]


def test_the_last_entry_is_repeated() -> None:
    rule = Join(kind=TOKENS, pad=-1, completion="repeat")
    prompts = [prompt(1, {"x": [[1, 2]]}, x=rule), prompt(2, {"x": [[3, 4], [5, 6]]}, x=rule)]
    assert joined(prompts, [[7, 7], [8]]) == [[[-1] * 2, [1, 2], [1, 2], [1, 2]], [[3, 4], [5, 6], [5, 6], [5, 6]]]
    assert joined(prompts) == [[[-1] * 2, [1, 2]], [[3, 4], [5, 6]]]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_batch_axis_goes_before_the_token_axis(axis: int) -> None:
    rule = Join(kind=TOKENS, pad=-1, completion=-2, token_axis=axis)
    long, short = (torch.arange(6 * n).reshape(n, 2, 3).movedim(0, axis) for n in (4, 2))
    prompts = [prompt(4, {"x": long}, x=rule), prompt(2, {"x": short}, x=rule)]
    x = collate(prompts, [[1], [1]], pad_token_id=0).forward_kwargs["x"]
    assert x.shape == (*long.shape[:axis], 2, 5, *long.shape[axis + 1 :])
    first, second = (x.select(axis, row).movedim(axis, 0) for row in (0, 1))
    assert first[:4].equal(long.movedim(axis, 0))
    assert second[2:4].equal(short.movedim(axis, 0))
    assert (second[:2] == -1).all()
    assert (x.movedim(axis + 1, 0)[4] == -2).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    for rule, value in ((Join(kind=TOKENS), [1]), (Join(kind=ROWS), [1, 1]), (Join(kind=SAMPLES), [[1]])):
        one, two = (prompt(1, {"x": torch.tensor(value, dtype=dtype)}, x=rule) for _ in "ab")
        assert collate([one, two], [[1], []], pad_token_id=0).forward_kwargs["x"].dtype == dtype


def test_a_prompt_without_its_per_token_values_is_refused() -> None:
    rule = Join(kind=TOKENS)
    with pytest.raises(ValueError, match="lacks the per-token input x"):
        joined([prompt(1, {"x": [3]}, x=rule), prompt(1)])


# Pieces


def test_prompts_of_one_key_share_one_piece() -> None:
    (piece,) = collate([prompt(1), prompt(3), prompt(2)], pad_token_id=0).pieces
    assert piece.rows == (0, 1, 2)


def test_prompts_of_other_keys_go_into_pieces_of_their_own() -> None:
    rule, row = Join(kind=SAMPLES, pad=9), Join(kind=TOKENS, pad=-1, completion=7)
    joins: dict[str, Any] = {"x": rule, "y": row}
    prompts = [
        prompt(1, {"x": [[1, 2]], "y": [5]}, key=2, **joins),
        prompt(3, key=0, **joins),
        prompt(2, {"x": [[3, 4]], "y": [5, 6]}, key=2, **joins),
        prompt(1, {"x": [[5]], "y": [8]}, key=1, **joins),
    ]
    batch = collate(prompts, [[1, 1], [2], [3], []], pad_token_id=99)
    assert [piece.rows for piece in batch.pieces] == [(0, 2), (1,), (3,)]
    assert [piece.forward_kwargs.get("x", torch.empty(0)).tolist() for piece in batch.pieces] == [
        [[1, 2], [3, 4]],
        [],
        [[5]],
    ]
    assert batch.pieces[0].forward_kwargs["y"].tolist() == [[-1, -1, 5, 7, 7], [-1, 5, 6, 7, 7]]
    assert batch.pieces[2].forward_kwargs["y"].tolist() == [[-1, -1, 8, 7, 7]]
    assert batch.input_ids.tolist() == [
        [99, 99, 10, 1, 1],
        [10, 11, 12, 2, 99],
        [99, 10, 11, 3, 99],
        [99, 99, 10, 99, 99],
    ]
    inputs = batch.model_inputs(batch.pieces[0])
    assert inputs["input_ids"].tolist() == [batch.input_ids.tolist()[i] for i in (0, 2)]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]]
    assert inputs["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 2]]
    assert inputs["x"].tolist() == [[1, 2], [3, 4]]


def test_a_batch_in_pieces_has_no_inputs_as_a_whole() -> None:
    batch = collate([prompt(1, key=1), prompt(1)], pad_token_id=0)
    with pytest.raises(ValueError, match="in 2 pieces"):
        _ = batch.forward_kwargs
    with pytest.raises(ValueError, match="in 2 pieces"):
        batch.model_inputs()


@given(keys=st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_every_row_is_in_one_piece_among_its_likes(keys: list[int]) -> None:
    batch = collate([prompt(1 + i, key=key) for i, key in enumerate(keys)], pad_token_id=0)
    assert sorted(row for piece in batch.pieces for row in piece.rows) == list(range(len(keys)))
    assert [{keys[row] for row in piece.rows} for piece in batch.pieces] == [{key} for key in dict.fromkeys(keys)]
    assert all(list(piece.rows) == sorted(piece.rows) for piece in batch.pieces)


def test_numbers_are_cast_and_ids_are_not() -> None:
    rules: dict[str, Any] = {"x": Join(kind=ROWS), "y": Join(kind=ROWS)}
    batch = collate([prompt(1, {"x": [1.5], "y": [True]}, **rules)], pad_token_id=0)
    plain, cast = batch.model_inputs(), batch.model_inputs(dtype=torch.bfloat16)
    assert plain["x"].dtype == torch.float32
    assert cast["x"].dtype == torch.bfloat16
    assert {name: tensor.dtype for name, tensor in cast.items() if name != "x"} == {
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), torch.long),
        "y": torch.bool,
    }


# Errors


def test_prompts_of_different_rules_do_not_mix() -> None:
    one, two = (prompt(1, {"x": [3]}, x=Join(kind=kind)) for kind in (ROWS, SAMPLES))
    with pytest.raises(ValueError, match="two join rules for x"):
        joined([one, two])


@pytest.mark.parametrize(("num_prompts", "completions"), [(0, None), (0, []), (2, [[1]]), (1, [[1], [2]])])
def test_counts_of_prompts_and_completions_must_agree(num_prompts: int, completions: list[list[int]] | None) -> None:
    with pytest.raises(ValueError, match=f"got {num_prompts} and"):
        collate([prompt(1)] * num_prompts, completions, pad_token_id=0)


def test_collate_changes_no_prompt() -> None:
    rule = Join(kind=TOKENS, completion="count_on")
    one = prompt(2, {"x": [0, 1], "y": [[1, 2]]}, x=rule, y=Join(kind=ROWS))
    batch = collate([one, one], [[1], [2, 3]], pad_token_id=0)
    for name in "xy":
        batch.forward_kwargs[name].fill_(9)
    single = collate([one], pad_token_id=0)
    single.forward_kwargs["y"].fill_(9)
    single.forward_kwargs["x"].fill_(9)
    assert one.forward_kwargs["x"].tolist() == [0, 1]
    assert one.forward_kwargs["y"].tolist() == [[1, 2]]


# Values that check themselves


@pytest.mark.parametrize("axes", [{"token_axis": -1}, {"pad_axes": (0,)}, {"pad_axes": (-1,)}])
def test_join_axes_count_from_the_front(axes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="axes"):
        Join(kind=TOKENS, **axes)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 0), (2, -1)])
def test_a_span_lies_at_tokens(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="image span"):
        ImageSpan(offset=offset, length=length)


PICTURE = read_picture(Image.new("RGB", (2, 2)), where="")[0]
VIDEO = read_video([Image.new("RGB", (32, 32))] * 2, where="", keys={}, factor=16)[0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_ids": ()}, "at least one token"),
        ({"images": (PICTURE,)}, "1 pictures but 0 picture spans"),
        ({"image_spans": (ImageSpan(offset=0, length=1),)}, "0 pictures but 1 picture spans"),
        ({"images": (PICTURE,), "image_spans": (ImageSpan(offset=2, length=2),)}, "leaves the 3 ids"),
        (
            {"images": (PICTURE,) * 2, "image_spans": (ImageSpan(offset=0, length=2), ImageSpan(offset=1, length=1))},
            "overlaps",
        ),
        (
            {"images": (PICTURE,) * 2, "image_spans": (ImageSpan(offset=1, length=1), ImageSpan(offset=0, length=1))},
            "overlaps",
        ),
        ({"videos": (VIDEO,)}, "1 videos but 0 video spans"),
        ({"video_spans": (ImageSpan(offset=0, length=1),)}, "0 videos but 1 video spans"),
        ({"videos": (VIDEO,), "video_spans": (ImageSpan(offset=2, length=2),)}, "video span .* leaves the 3 ids"),
        ({"forward_kwargs": {"x": torch.zeros(3), "y": torch.zeros(1)}}, "without a join rule: x, y"),
        ({"forward_kwargs": {"x": torch.zeros(2)}, "join": {"x": Join(kind=TOKENS)}}, "for 3 prompt tokens"),
        ({"forward_kwargs": {"x": torch.zeros(3, 4)}, "join": {"x": Join(kind=TOKENS, token_axis=1)}}, "3 prompt tok"),
        ({"forward_kwargs": {"x": torch.zeros(2, 4)}, "join": {"x": Join(kind=SAMPLES)}}, "axis 0"),
    ],
)
def test_a_prompt_that_does_not_fit_together_is_refused(fields: dict[str, Any], reason: str) -> None:
    fields_of_three: dict[str, Any] = {"prompt_ids": (1, 2, 3), "engine_ids": (1, 2, 3)}
    with pytest.raises(ValueError, match=reason):
        Prompt(**fields_of_three | fields)


def test_a_prompt_counts_its_tokens() -> None:
    spans = (ImageSpan(offset=0, length=1), ImageSpan(offset=1, length=2))
    both = Prompt(prompt_ids=(1, 2, 2, 3), engine_ids=(1, 2, 3), images=(PICTURE,) * 2, image_spans=spans)
    assert (both.num_tokens, both.num_image_tokens) == (4, 3)
    film = dataclasses.replace(both, videos=(VIDEO,), video_spans=(ImageSpan(offset=3, length=1),))
    assert (film.num_tokens, film.num_image_tokens) == (4, 4)


def test_a_prompt_cannot_be_changed() -> None:
    kwargs = {"x": torch.zeros(1)}
    one = prompt(1, kwargs, x=Join(kind=TOKENS))
    kwargs["y"] = torch.zeros(1)
    assert set(one.forward_kwargs) == {"x"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.text = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        one.forward_kwargs["y"] = torch.zeros(1)  # pyright: ignore[reportIndexIssue]
