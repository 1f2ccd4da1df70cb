"""The conformance kit finds what is wrong: each check fails for rules that are wrong on purpose, and says why."""

import copy
import dataclasses
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import vlmroll_processors
from tiny_models import QWEN_FAMILIES, UNKNOWN_FAMILIES, VISION_FAMILIES, mixed_rows, picture, tiny, user
from vlmroll_processors import Join, JoinKind, PaddedBatch, collate, load_adapter
from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.assembly import assemble
from vlmroll_processors.collate import Piece
from vlmroll_processors.conformance import CHECKS, ConformanceError, Outcome, Report, check
from vlmroll_processors.conformance.__main__ import main
from vlmroll_processors.families import Family
from vlmroll_processors.families.base import Features, Sized, as_it_is, no_more
from vlmroll_processors.families.generic import infer_family
from vlmroll_processors.types import ImageSpan

ROWS, SAMPLES, TOKENS = JoinKind.ROWS, JoinKind.SAMPLES, JoinKind.TOKENS
Row = dict[str, Any]


def family(name: str) -> Family:
    return load_adapter(tiny(name).processor).family


@cache
def checked(name: str) -> Report:
    """The report of a family as it is."""
    return check(load_adapter(tiny(name).processor), tiny(name).model)


def failures(name: str, broken: Family | None = None, model: Any = None) -> dict[str, str]:
    """The checks that fail and what they say."""
    adapter = FamilyAdapter(tiny(name).processor, broken or family(name))
    report = check(adapter, tiny(name).model if model is None else model)
    return {outcome.name: outcome.detail for outcome in report.failures}


def assert_fails(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Just these checks fail, with these words."""
    assert found.keys() == expected.keys(), found
    for name, words in expected.items():
        assert words in found[name]


def with_join(name: str, **rules: Join) -> Family:
    """The family with other join rules for some kwargs."""
    own = family(name)
    assert rules.keys() <= own.join.keys()
    return replace(own, join={**own.join, **rules})


def dropped(name: str, *kwargs: str, **changes: Any) -> Family:
    """The family without some kwargs, which it declares to be of no use."""
    own = family(name)
    assert set(kwargs) <= own.join.keys()
    join = {key: rule for key, rule in own.join.items() if key not in kwargs}
    return replace(own, join=join, drop=(*own.drop, *kwargs), **changes)


def without_ids(name: str, *tokens: str) -> Family:
    """The family without some of its vision tokens."""
    own = family(name)
    known = own.vision_ids(tiny(name).tokenizer.get_vocab())
    assert set(tokens) <= known.keys()
    kept = [re.escape(token) for token in known if token not in tokens]
    return replace(own, vision_tokens="|".join(kept) or "(?!)")


# Wrong tables


MOVED = "logits of a row with"
ENCODED = "rows are encoded"
JOINED, SPLIT, ORDER = "joined equals processor", "split gives back", "order changes nothing"
SPANS, ENGINE, VISION = "spans cover features", "engine ids expand", "vision ids are complete"
CONFIG, BATCH, GENERATED, PIXELS = "config ids are banned", "batch changes nothing", "as generated", "pixels matter"

WRONG_JOINS: dict[str, tuple[str, Callable[[], Family], Mapping[str, str]]] = {
    "the pad of a padded picture": (
        "pixtral",
        lambda: with_join("pixtral", pixel_values=Join(kind=ROWS, pad_axes=(2, 3), pad=1)),
        {JOINED: "pixel_values has other values than the processor's"},
    ),
    "the pad of a slot": (
        "smolvlm",
        lambda: with_join("smolvlm", pixel_values=Join(kind=SAMPLES, pad=1)),
        {JOINED: "pixel_values has other values than the processor's", BATCH: "logits of a row with 1 pictures move"},
    ),
    "the pad of a token type": (
        "gemma3",
        lambda: with_join("gemma3", token_type_ids=Join(kind=TOKENS, prompt="marks", pad=1)),
        {JOINED: "token_type_ids has other values than the processor's"},
    ),
    "samples for rows": (
        "gemma3",
        lambda: with_join("gemma3", pixel_values=Join(kind=SAMPLES)),
        {
            JOINED: "pixel_values has the shape [5, 9, 32, 32], the processor's [8, 3, 32, 32]",
            **dict.fromkeys((BATCH, GENERATED, PIXELS), "RuntimeError"),
        },
    ),
    "nothing for a per-token kwarg": (
        "gemma3",
        lambda: with_join("gemma3", token_type_ids=Join(kind=TOKENS, prompt="zeros")),
        {JOINED: "token_type_ids has other values than the processor's", GENERATED: "with 1 pictures differ by"},
    ),
    "token types that are dropped": (
        "gemma3",
        lambda: dropped("gemma3", "token_type_ids"),
        {GENERATED: "with 1 pictures differ by"},
    ),
    "token types that are dropped, under the other name": (
        "gemma4",
        lambda: dropped("gemma4", "mm_token_type_ids"),
        {GENERATED: "with 1 pictures differ by"},
    ),
    "token types and positions that are dropped": (
        "qwen2_5_vl",
        lambda: dropped("qwen2_5_vl", "mm_token_type_ids", "position_ids", more=no_more),
        {GENERATED: "with 1 pictures differ by"},
    ),
    "positions of one axis": (
        "qwen2_5_vl",
        lambda: dropped("qwen2_5_vl", "position_ids", more=no_more),
        {GENERATED: "with 1 pictures differ by"},
    ),
    "positions of one axis in a family with grids": (
        "glm4v",
        lambda: dropped("glm4v", "position_ids", more=no_more),
        {GENERATED: "with 1 pictures differ by"},
    ),
    "positions that stand still": (
        "qwen3_vl",
        lambda: with_join("qwen3_vl", position_ids=Join(kind=TOKENS, token_axis=1)),
        {GENERATED: "with 0 pictures differ by"},
    ),
    "completions in the prompt's block": (
        "paligemma",
        lambda: with_join("paligemma", token_type_ids=Join(kind=TOKENS, prompt="zeros", completion=0)),
        {GENERATED: "with 1 pictures differ by"},
    ),
    "completions that are pictures": (
        "gemma4",
        lambda: with_join("gemma4", mm_token_type_ids=Join(kind=TOKENS, prompt="marks", completion=1)),
        {GENERATED: "with 0 pictures differ by"},
    ),
    "completions that see no picture": (
        "mllama",
        lambda: with_join("mllama", cross_attention_mask=Join(kind=TOKENS, completion=0)),
        {GENERATED: "with 1 pictures differ by"},
    ),
    "pixels that are dropped": (
        "llava",
        lambda: dropped("llava", "pixel_values"),
        {GENERATED: "with 1 pictures differ by", PIXELS: "the pixels of a row with 1 pictures change nothing"},
    ),
    "a kwarg that nobody makes": (
        "llava",
        lambda: replace(family("llava"), join={**family("llava").join, "extra": Join(kind=TOKENS, prompt="zeros")}),
        {JOINED: "extra is not made by the processor"},
    ),
    "a mask that is not made": (
        "mllama",
        lambda: replace(family("mllama"), more=no_more),
        {
            JOINED: "cross_attention_mask of the processor is not passed on",
            BATCH: "logits of a row with 1 pictures move",
            GENERATED: "with 1 pictures differ by",
        },
    ),
}
OTHER_FACTS: dict[str, tuple[str, Callable[[], Family], Mapping[str, str]]] = {
    "rows that depend on their batch": (
        "mllama",
        lambda: replace(family("mllama"), alike=False),
        dict.fromkeys((JOINED, SPLIT, BATCH), "lacks the per-token input cross_attention_mask"),
    ),
    "pictures that depend on each other, read alone": (
        "llava_onevision",
        lambda: replace(family("llava_onevision"), together=False),
        {JOINED: "input_ids has the shape", GENERATED: "with 3 pictures differ by"},
    ),
    "what the processor tidies": (
        "idefics2_split",
        lambda: replace(family("idefics2_split"), tidy=as_it_is),
        {JOINED: "input_ids has the shape", GENERATED: "with 1 pictures differ by"},
    ),
    "what the processor puts around the text": (
        "paligemma2",
        lambda: replace(family("paligemma2"), wrap=as_it_is),
        {JOINED: "input_ids has the shape", GENERATED: "with 1 pictures differ by"},
    ),
    "a slot in the place of the features": (
        "gemma3",
        lambda: replace(family("gemma3"), feature="<start_of_image>"),
        {JOINED: "token_type_ids has other values", GENERATED: "with 1 pictures differ by"},
    ),
    "text for a family that needs a picture": (
        "paligemma",
        lambda: replace(family("paligemma"), min_pictures=0),
        {GENERATED: "`images` are expected"},
    ),
}
CANNOT: dict[str, tuple[str, Callable[[], Family], Mapping[str, str]]] = {
    "an axis that differs and is not padded": (
        "llava_next",
        lambda: with_join("llava_next", pixel_values=Join(kind=ROWS)),
        {ENCODED: "many pictures: no: RuntimeError: Sizes of tensors must match"},
    ),
    "one of two axes that differ": (
        "pixtral",
        lambda: with_join("pixtral", pixel_values=Join(kind=ROWS, pad_axes=(2,))),
        {ENCODED: "many pictures: no: RuntimeError: Sizes of tensors must match"},
    ),
    "rows that are samples": (
        "internvl",
        lambda: with_join("internvl", pixel_values=Join(kind=SAMPLES)),
        {ENCODED: "one picture: no: pixel_values has (7, 3, 32, 32); axis 0 of a per-sample input is 1"},
    ),
    "no rule": ("llava", lambda: replace(family("llava"), join={}), {ENCODED: "has no rule for pixel_values"}),
    "another slot": (
        "aya_vision",
        lambda: replace(family("aya_vision"), slot="<|IMG_PATCH|>"),
        {ENCODED: "one picture: no: row 0, column 'prompt': the chat template rendered 0 picture slots for 1 pictures"},
    ),
    "no rule for a per-token kwarg": (
        "gemma3",
        lambda: replace(family("gemma3"), join={"pixel_values": Join(kind=ROWS)}),
        {ENCODED: "has no rule for token_type_ids"},
    ),
}
"""Rows that cannot be encoded."""
IDS: dict[str, tuple[str, Callable[[], Family], Mapping[str, str]]] = {
    "the repeated one": (
        "llava_onevision",
        lambda: without_ids("llava_onevision", "<image>"),
        {VISION: "may be sampled: <image>", CONFIG: "image_token_index="},
    ),
    "the end marker": (
        "gemma3",
        lambda: without_ids("gemma3", "<end_of_image>"),
        {VISION: "may be sampled: <end_of_image>", CONFIG: "eoi_token_index="},
    ),
    "a marker that the config does not name": (
        "qwen3_vl",
        lambda: without_ids("qwen3_vl", "<|vision_pad|>"),
        {VISION: "may be sampled: <|vision_pad|>"},
    ),
    "the placeholder of videos": (
        "kimi_k25",
        lambda: without_ids("kimi_k25", "<|kimi_k25_video_placeholder|>"),
        {VISION: "<|kimi_k25_video_placeholder|>", CONFIG: "video_token_id="},
    ),
    "a marker of tiles": (
        "lfm2_vl",
        lambda: without_ids("lfm2_vl", "<|img_row_2_col_1|>"),
        {VISION: "may be sampled: <|img_row_2_col_1|>"},
    ),
    "a marker around a picture": (
        "idefics2",
        lambda: without_ids("idefics2", "<fake_token_around_image>"),
        {VISION: "may be sampled: <fake_token_around_image>"},
    ),
    "row breaks": ("pixtral", lambda: without_ids("pixtral", "[IMG_BREAK]"), {VISION: "may be sampled: [IMG_BREAK]"}),
}


WRONG = {**WRONG_JOINS, **OTHER_FACTS, **CANNOT, **IDS}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_table_is_found(case: str) -> None:
    name, broken, expected = WRONG[case]
    assert_fails(failures(name, broken()), expected)


# Wrong code


def drifting(name: str) -> Family:
    """A family whose pixels depend on how many pictures were read before."""
    own, calls = family(name), itertools.count()

    def read(family: Family, processor: Any, pictures: Sequence[Sized]) -> Features:
        found = own.read(family, processor, pictures)
        return replace(found, kwargs={**found.kwargs, "pixel_values": found.kwargs["pixel_values"] + next(calls)})

    return replace(own, read=read)


def growing(name: str) -> Family:
    """A family whose text depends on it."""
    own, calls = family(name), itertools.count(1)

    def read(family: Family, processor: Any, pictures: Sequence[Sized]) -> Features:
        found = own.read(family, processor, pictures)
        return replace(found, texts=tuple(text * next(calls) for text in found.texts))

    return replace(own, read=read)


def test_rows_that_depend_on_those_before_are_found() -> None:
    found = failures("llava", drifting("llava"))
    assert_fails(found, {JOINED: "pixel_values", ORDER: "pixel_values of a prompt with 1 pictures", GENERATED: MOVED})
    assert "depends on the rows around it" in found[ORDER]
    report = check(FamilyAdapter(tiny("llava").processor, growing("llava")))
    words = {outcome.name: outcome.detail for outcome in report.failures}
    assert "the ids of a prompt with 1 pictures depend on the rows around it" in words[ORDER]


def test_a_marker_that_no_name_gives_away_is_found() -> None:
    own = family("gemma3")

    def read(family: Family, processor: Any, pictures: Sequence[Sized]) -> Features:
        found = own.read(family, processor, pictures)
        return replace(found, texts=tuple(f"<end_of_turn>{text}" for text in found.texts))

    report = check(FamilyAdapter(tiny("gemma3").processor, replace(own, read=read)))
    words = {outcome.name: outcome.detail for outcome in report.failures}
    assert_fails(words, {JOINED: "input_ids has the shape", VISION: "may be sampled: <end_of_turn>"})


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "smolvlm", "mllama"])
def test_rows_swapped_in_a_batch_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapping(*arguments: Any, **options: Any) -> PaddedBatch:
        batch = collate(*arguments, **options)
        turned = [
            replace(
                piece,
                forward_kwargs={k: t.flip(0) if k == "pixel_values" else t for k, t in piece.forward_kwargs.items()},
            )
            for piece in batch.pieces
        ]
        return replace(batch, pieces=tuple(turned))

    monkeypatch.setattr("vlmroll_processors.conformance.checks.collate", swapping)
    found = failures(name)
    assert_fails(found, {JOINED: "pixel_values has other values", SPLIT: "pixel_values of a prompt with"})
    assert "changes in a batch" in found[SPLIT]


def test_values_of_tokens_moved_by_completions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def moving(prompts: Any, completions: Any = None, **options: Any) -> PaddedBatch:
        batch = collate(prompts, completions, **options)
        moved = {
            name: tensor.roll(1, 1) if name == "token_type_ids" and completions else tensor
            for name, tensor in batch.forward_kwargs.items()
        }
        return replace(batch, pieces=(Piece(rows=batch.pieces[0].rows, forward_kwargs=moved),))

    monkeypatch.setattr("vlmroll_processors.conformance.checks.collate", moving)
    assert_fails(failures("gemma3"), {SPLIT: "token_type_ids of a prompt with 1 pictures changes in a batch"})


@pytest.mark.parametrize(
    ("name", "shift", "stretch"),
    [
        *((name, *by) for name in ("llava", "qwen3_vl") for by in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1))),
        *((name, *by) for name in ("gemma3", "smolvlm", "mllama") for by in ((1, 0), (-1, 0))),
    ],
)
def test_spans_off_by_one_are_found(name: str, shift: int, stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(*, offset: int, length: int) -> ImageSpan:
        return ImageSpan(offset=offset + shift, length=length + stretch)

    monkeypatch.setattr("vlmroll_processors.assembly.ImageSpan", moved)
    report = check(load_adapter(tiny(name).processor))
    found = {outcome.name: outcome.detail for outcome in report.failures}
    assert_fails(found, {SPANS: "image spans [("})
    given, wanted = (text.partition(")")[0] for text in found[SPANS].split("[(")[1:3])
    (offset, length), (right, size) = (map(int, text.split(", ")) for text in (given, wanted))
    assert (offset - right, length - size) == (shift, stretch)


def expanded(prompt: Any) -> Any:
    return replace(prompt, engine_ids=prompt.prompt_ids)


def without_slots(prompt: Any) -> Any:
    features = {prompt.prompt_ids[span.offset] for span in prompt.image_spans}
    return replace(prompt, engine_ids=tuple(token for token in prompt.engine_ids if token not in features))


def one_less(prompt: Any) -> Any:
    return replace(prompt, engine_ids=prompt.engine_ids[:-1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (expanded, "image slots in engine_ids for 1"),
        (without_slots, "0 image slots in engine_ids for 1"),
        (one_less, "engine_ids with 0 pictures expand to other ids"),
    ],
)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "pixtral"])
def test_wrong_engine_ids_are_found(
    name: str, change: Callable[[Any], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(*arguments: Any, **options: Any) -> Any:
        return change(assemble(*arguments, **options))

    monkeypatch.setattr("vlmroll_processors.adapter.assemble", changing)
    assert_fails(failures(name), {ENGINE: words})


@contextmanager
def hooked(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Generator[None]:
    """The model with other logits."""

    def hook(module: Any, arguments: Any, output: Any) -> Any:
        output.logits = change(output.logits)
        return output

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_a_model_that_mixes_rows_is_found() -> None:
    with hooked(tiny("llava").model, lambda logits: logits + logits.mean(0, keepdim=True) * (len(logits) > 1)):
        assert_fails(failures("llava"), {BATCH: "logits of a row with 0 pictures move"})


def test_a_model_blind_to_pictures_is_found() -> None:
    with hooked(tiny("llava").model, lambda logits: logits * 0 + torch.arange(logits.shape[-1])):
        assert_fails(failures("llava"), {PIXELS: "the pixels of a row with 1 pictures change nothing"})


@pytest.mark.parametrize("key", ["video_token_id", "vision_start_token_id", "boi_token_index"])
def test_an_id_that_the_config_alone_names_is_found(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny("llava").model.config, key, 40, raising=False)
    assert_fails(failures("llava"), {CONFIG: f"{key}=40 ("})


def test_each_check_has_failed_above() -> None:
    """What the tables expect, and the tests of wrong code."""
    tables = [expected for _, _, expected in WRONG.values()]
    assert {name for expected in tables for name in expected} | {ORDER, SPANS, ENGINE} == set(CHECKS)


# The report


def test_the_report_is_data() -> None:
    report = checked("llava")
    assert (report.family, report.processor) == ("LLaVA", "LlavaProcessor")
    assert list(report.abilities) == ["text only", "one picture", "many pictures", "video", "mixed batch"]
    assert report.outcomes == tuple(Outcome(name=name, result="passed") for name in CHECKS)
    assert report.failures == ()
    report.raise_for_failures()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.family = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_without_a_model_its_checks_are_not_run() -> None:
    report = check(load_adapter(tiny("llava").processor))
    results = {outcome.name: (outcome.result, outcome.detail) for outcome in report.outcomes}
    for name in CHECKS:
        needs_model = name in (CONFIG, BATCH, GENERATED, PIXELS)
        assert results[name] == (("not run", "needs a model") if needs_model else ("passed", ""))
    report.raise_for_failures()


def test_the_report_prints_as_a_table() -> None:
    broken = without_ids("gemma3", "<end_of_image>")
    report = check(FamilyAdapter(tiny("gemma3").processor, broken))
    title, *lines = str(report).splitlines()
    assert title == "Gemma 3 (Gemma3Processor)"
    width = max(map(len, [*report.abilities, *CHECKS]))
    table = {line[2 : 2 + width].rstrip(): line[2 + width :] for line in lines}
    assert list(table) == [*report.abilities, *CHECKS]
    assert all(
        line.startswith("  ") and value.startswith("  ") for line, value in zip(lines, table.values(), strict=True)
    )
    cells = {name: value.strip() for name, value in table.items()}
    assert cells["one picture"] == "yes"
    assert cells["video"].startswith("no: row 0, column 'videos'[0]: the family Gemma 3 takes no videos")
    assert cells[JOINED] == "passed"
    assert cells[VISION] == "failed: may be sampled: <end_of_image>"
    assert cells[GENERATED] == "not run: needs a model"


def test_failures_are_raised_by_name() -> None:
    report = check(
        FamilyAdapter(tiny("gemma3").processor, without_ids("gemma3", "<end_of_image>")), tiny("gemma3").model
    )
    with pytest.raises(
        ConformanceError, match="^Gemma3Processor does not keep the contract of the family Gemma 3: "
    ) as caught:
        report.raise_for_failures()
    for failure in report.failures:
        assert f"{failure.name}: {failure.detail}" in str(caught.value)
    assert [failure.name for failure in report.failures] == [VISION, CONFIG]
    assert isinstance(caught.value, ValueError)


def test_a_detail_stays_readable() -> None:
    found = failures("lfm2_vl", replace(family("lfm2_vl"), vision_tokens="<image>", read=lambda *_: 1 / 0))  # pyright: ignore
    assert all(len(words) < 1000 for words in found.values())


# Options


def test_the_budget_and_the_limit_of_the_adapter_are_left_aside() -> None:
    tight = load_adapter(tiny("pixtral").processor, max_pixels=300, max_prompt_length=5)
    assert check(tight) == check(load_adapter(tiny("pixtral").processor))


def test_the_model_runs_in_eval_mode_and_is_left_as_it_was() -> None:
    model = copy.deepcopy(tiny("llava").model).train()
    model.model.vision_tower.eval()
    before = [module.training for module in model.modules()]
    seen = set[bool]()

    def look(module: Any, arguments: Any, output: Any) -> None:
        seen.update(each.training for each in model.modules())

    model.register_forward_hook(look)
    assert not check(load_adapter(tiny("llava").processor), model).failures
    assert seen == {False}
    assert [module.training for module in model.modules()] == before
    assert {True, False} == set(before)


@pytest.mark.parametrize("name", ["smolvlm", "gemma3"])
def test_the_tolerance_lets_bfloat16_pass(name: str) -> None:
    half = copy.deepcopy(tiny(name).model).bfloat16()
    own = load_adapter(tiny(name).processor)
    assert not check(own, half, tolerance=5e-2).failures
    assert {outcome.name for outcome in check(own, half).failures} <= {BATCH, GENERATED}


def test_a_processor_that_takes_nothing_fails() -> None:
    processor = copy.copy(tiny("llava").processor)
    processor.chat_template = "{{ raise_exception('not today') }}"
    report = check(FamilyAdapter(processor, family("llava")), tiny("llava").model)
    assert all("not today" in word for name, word in report.abilities.items() if name not in ("video", "mixed batch"))
    (encoded,) = report.failures
    others = [outcome for outcome in report.outcomes if outcome is not encoded]
    assert [outcome.result for outcome in others] == ["not run"] * (len(CHECKS) - 1)
    assert encoded.detail.startswith("text only: no: row 0, column 'prompt': the chat template refuses the messages")
    assert {outcome.detail for outcome in others} == {"no row with pictures could be encoded"}


def test_what_a_tokenizer_cannot_tell_is_not_said_to_have_passed() -> None:
    processor = copy.copy(tiny("llava").processor)
    processor.tokenizer = copy.copy(processor.tokenizer)
    kind = type(processor.tokenizer)
    processor.tokenizer.__class__ = type("Slow", (kind,), {"is_fast": False})
    report = check(FamilyAdapter(processor, family("llava")), tiny("llava").model)
    results = {outcome.name: outcome.result for outcome in report.outcomes}
    assert results.pop(SPANS) == "not run"
    assert set(results.values()) == {"passed"}, report


def test_a_processor_without_chat_template_is_tried_on_plain_strings() -> None:
    processor = copy.copy(tiny("qwen2_5_vl").processor)
    processor.chat_template = None
    report = check(FamilyAdapter(processor, family("qwen2_5_vl")), tiny("qwen2_5_vl").model)
    assert not report.failures
    assert set(report.abilities.values()) == {"yes"}


def test_a_text_model_passes() -> None:
    report = check(load_adapter(tiny("text").processor), tiny("text").model)
    assert report.abilities["text only"] == "yes"
    assert not report.failures, report


# Families without a row of their own

INFERRED: dict[str, tuple[str, str, dict[str, Join]]] = {
    "janus": ("<image_placeholder>", "<image_placeholder>", {"pixel_values": Join(kind=ROWS)}),
    "deepseek_vl": ("<image_placeholder>", "<image_placeholder>", {"pixel_values": Join(kind=ROWS)}),
    "ovis2": ("<image>", "<IMG_ATOM>", {"pixel_values": Join(kind=ROWS)}),
    "video_llama_3": (
        "<|image_pad|>",
        "<|image_pad|>",
        {key: Join(kind=ROWS) for key in ("pixel_values", "image_grid_thw", "image_merge_sizes")},
    ),
    "llama4": ("<|image|>", "<|patch|>", {"pixel_values": Join(kind=ROWS)}),
}
"""Slot, feature and join rules."""


@cache
def inferred(name: str) -> FamilyAdapter:
    return load_adapter(tiny(name).processor)


def test_every_unknown_family_is_told_of() -> None:
    assert {*INFERRED, "phi4_multimodal"} == set(UNKNOWN_FAMILIES)


@pytest.mark.parametrize("name", INFERRED)
def test_an_unknown_family_gets_rules_that_pass_with_its_model(name: str) -> None:
    own = inferred(name).family
    assert (own.slot, own.feature, dict(own.join)) == INFERRED[name]
    assert own.inferred
    report = check(inferred(name), tiny(name).model)
    assert not report.failures, report
    assert {outcome.result for outcome in report.outcomes} == {"passed"}
    assert [report.abilities[kind] for kind in ("text only", "one picture", "many pictures", "mixed batch")] == [
        "yes"
    ] * 4


@pytest.mark.parametrize("name", INFERRED)
def test_an_unknown_family_is_encoded_as_by_its_processor(name: str) -> None:
    batch = collate(inferred(name).encode(mixed_rows()), pad_token_id=inferred(name).pad_token_id).model_inputs()
    expected = tiny(name).processor.apply_chat_template(
        [copy.deepcopy(row["prompt"]) for row in mixed_rows()],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        processor_kwargs={"padding": True, "padding_side": "left"},
    )
    assert batch.keys() == {*expected, "position_ids"}
    for key, tensor in expected.items():
        assert batch[key].equal(tensor), key


def test_an_inferred_family_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    load_adapter(tiny("janus").processor)
    assert "JanusProcessor has no family of its own" in caplog.text
    caplog.clear()
    load_adapter(tiny("llava").processor)
    assert not caplog.text


def test_a_processor_that_tells_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="Phi4MultimodalProcessor has no family") as caught:
        load_adapter(tiny("phi4_multimodal").processor)
    message = str(caught.value)
    assert "Phi4MultimodalProcessor does not say what it writes for a picture" in message
    assert all(kind in message for kind in ("LlavaProcessor", "Qwen3VLProcessor", "CONTRIBUTING.md"))


def by_known_rules(name: str) -> Family | None:
    """What the generic rule makes of a family that has a row; None where it refuses."""
    try:
        return infer_family(tiny(name).processor)
    except ValueError:
        return None


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_the_generic_rule_is_right_or_refuses(name: str) -> None:
    """On families that have a row, which it does not know of."""
    guess = by_known_rules(name)
    if guess is None:
        three_axes = (*QWEN_FAMILIES, "glm4v", "glm46v")
        assert name in (*three_axes, "idefics2", "idefics2_split", "paligemma", "paligemma2", "mllama")
        return
    guessed = FamilyAdapter(tiny(name).processor, guess)
    rows = mixed_rows()
    ours, theirs = (collate(own.encode(rows), [[20]] * 4, pad_token_id=0) for own in (guessed, inferred(name)))
    assert ours.input_ids.equal(theirs.input_ids)
    assert ours.forward_kwargs.keys() == theirs.forward_kwargs.keys()
    assert all(tensor.equal(theirs.forward_kwargs[key]) for key, tensor in ours.forward_kwargs.items())
    assert guessed.vision_ids >= {inferred(name).tokenizer.convert_tokens_to_ids(guess.feature)}


def test_a_family_with_positions_on_three_axes_is_not_guessed() -> None:
    kind = type(tiny("qwen2_5_vl").processor)
    with pytest.raises(ValueError, match="generic rule does not fit"):
        load_adapter(posing_as(kind, "NewVLProcessor", "qwen2_5_vl"))


def posing_as(kind: Any, name: str, family: str) -> Any:
    """The family's processor under another class."""
    made = type(name, (kind,), {})
    copied = made.__new__(made)
    copied.__dict__.update(tiny(family).processor.__dict__)
    return copied


def pretending(change: Callable[[Any, Any], None]) -> Any:
    """A processor of an unknown name, DeepSeek-VL's with other outputs."""
    parent: Any = type(tiny("deepseek_vl").processor)

    class Pretender(parent):
        def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
            output = parent.__call__(self, images=images, text=text, **options)
            if images is not None:
                change(output, images)
            return output

    return posing_as(Pretender, "PretendingProcessor", "deepseek_vl")


def by_batch(output: Any, images: Any) -> None:
    output["pixel_values"] = output["pixel_values"] + len(images)


def by_mean(output: Any, images: Any) -> None:
    output["pixel_values"] = output["pixel_values"] - output["pixel_values"].mean()


def backwards(output: Any, images: Any) -> None:
    output["pixel_values"] = output["pixel_values"].flip(0)


def taller(output: Any, images: Any) -> None:
    if max(image.height for row in images for image in row) > 64:  # no picture that the rule looks at is so high
        output["pixel_values"] = torch.nn.functional.pad(output["pixel_values"], (0, 0, 0, 32))


def counting(output: Any, images: Any) -> None:
    output["num_images"] = torch.tensor([len(output["pixel_values"])])


def stepping(output: Any, images: Any) -> None:
    output["token_type_ids"] = torch.arange(output["input_ids"].shape[1]).expand(output["input_ids"].shape)


def in_a_list(output: Any, images: Any) -> None:
    output["sizes"] = [[1, 2]]


def squeezed(output: Any, images: Any) -> None:
    if len(output["pixel_values"]) == 1:
        output["pixel_values"] = output["pixel_values"][0]


def third(output: Any, images: Any) -> None:
    if max(map(len, images)) > 2:
        output["extra"] = torch.ones(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (by_batch, "joined equals processor: pixel_values has other values"),
        (by_mean, "joined equals processor: pixel_values has other values"),
        (backwards, "joined equals processor: pixel_values has other values"),
        (taller, "joined equals processor: RuntimeError: Sizes of tensors must match"),
        (counting, "joined equals processor: num_images has the shape"),
        (stepping, "token_type_ids has values for each token that are not known here"),
        (in_a_list, "sizes of the processor is no tensor but list"),
        (squeezed, "pixel_values has the shapes"),
        (third, "rows are encoded: many pictures: no: row 0, column 'images'[0]: the processor refuses a picture"),
    ],
)
def test_a_processor_that_the_generic_rule_gets_wrong_is_refused_at_load(
    change: Callable[[Any, Any], None], words: str
) -> None:
    with pytest.raises(
        ValueError, match="PretendingProcessor has no family, and the generic rule does not fit"
    ) as caught:
        load_adapter(pretending(change))
    assert words in str(caught.value)


def test_the_pretender_itself_is_taken() -> None:
    rows = [{"prompt": user("which", picture(64, 48, 1), picture(40, 100, 2))}]
    (found,) = load_adapter(pretending(lambda output, images: None)).encode(rows)
    (expected,) = inferred("deepseek_vl").encode(rows)
    assert found.prompt_ids == expected.prompt_ids
    assert found.forward_kwargs["pixel_values"].equal(expected.forward_kwargs["pixel_values"])


# On the command line and as tests


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny LLaVA."""
    path = tmp_path_factory.mktemp("llava")
    tiny("llava").model.save_pretrained(path)
    copy.deepcopy(tiny("llava").processor).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one more special token, which the family does not know."""
    path = tmp_path_factory.mktemp("faulty")
    tiny("llava").model.save_pretrained(path)
    processor = copy.deepcopy(tiny("llava").processor)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<image_end>"]})
    processor.save_pretrained(path)
    return path


def test_the_command_prints_the_table(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(saved)]) == 0
    assert capsys.readouterr().out == f"{check(load_adapter(tiny('llava').processor))}\n"
    assert main([str(saved), "--weights"]) == 0
    assert capsys.readouterr().out == f"{checked('llava')}\n"


def test_the_command_fails_when_a_check_does(faulty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(faulty)]) == 1
    assert "failed: may be sampled: <image_end>" in capsys.readouterr().out


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own in an empty folder, as a user of the package would start it."""
    source = str(Path(vlmroll_processors.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CONFORMANCE_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_module_is_a_command(faulty: Path, tmp_path: Path) -> None:
    done = run("vlmroll_processors.conformance", str(faulty), folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("LLaVA (LlavaProcessor)\n")
    assert "failed: may be sampled: <image_end>" in done.stdout


@pytest.mark.slow
def test_the_kit_runs_as_tests(faulty: Path, tmp_path: Path) -> None:
    named = {"CONFORMANCE_MODEL": str(faulty), "CONFORMANCE_WEIGHTS": "1"}
    done = run("pytest", "-q", "--pyargs", "vlmroll_processors.conformance", folder=tmp_path, **named)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"1 failed, {len(CHECKS) - 1} passed" in done.stdout
    assert "test_contract[vision ids are complete]" in done.stdout
    assert "may be sampled: <image_end>" in done.stdout
