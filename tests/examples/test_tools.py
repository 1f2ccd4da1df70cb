"""The tiny model that calls tools: its chat template and tokens, the tasks, the tools, and the two examples."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils.chat_template_utils import get_json_schema

import tool_tasks
from digits import MODEL_DIR as TINY_VL
from digits import draw, read_sheet
from example_runs import run_example
from tool_tasks import MAX_PIXELS, MODEL_DIR, OPERATORS, PLACES, answer_reward, close_up, compose
from tools_text import calculate
from tools_zoom import Zoom
from vlmroll_processors import collate, load_adapter

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>\n{"name": "zoom", "arguments": {"x": 1, "y": 0}}\n</tool_call>'
SCHEMAS = [get_json_schema(Zoom().zoom), get_json_schema(calculate)]


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "Which digit is at the top left?"}
ZOOM = {"role": "assistant", "content": "", "tool_calls": [called("zoom", x=1, y=0)]}
SEEN = {"role": "tool", "name": "zoom", "content": [{"type": "image"}]}
ANSWER = {"role": "assistant", "content": "7"}


@pytest.fixture(scope="module")
def processor() -> Any:
    return AutoProcessor.from_pretrained(MODEL_DIR)


def rendered(processor: Any, *messages: dict[str, Any], **options: Any) -> str:
    return processor.apply_chat_template(list(messages), **options)


def test_a_conversation_is_rendered_as_the_qwen_models_write_it(processor: Any) -> None:
    text = rendered(processor, USER, ZOOM, SEEN, ANSWER, tools=SCHEMAS)
    assert text == (
        "<|im_start|>system\nTools: zoom(x, y) calculate(expression)<|im_end|>\n"
        "<|im_start|>user\nWhich digit is at the top left?<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n"
    )


@pytest.mark.parametrize("tools", [None, SCHEMAS])
def test_a_longer_conversation_begins_with_the_shorter_one(processor: Any, tools: Any) -> None:
    said = {
        **ZOOM,
        "content": "I look closer.",
        "tool_calls": [called("zoom", x=1, y=0), called("calculate", expression="1")],
    }
    parts = {"role": "tool", "name": "zoom", "content": [{"type": "text", "text": "Here: "}, {"type": "image"}]}
    text = {"role": "tool", "name": "calculate", "content": "1"}
    messages = [USER, ZOOM, SEEN, said, parts, text, ANSWER, USER, ANSWER]
    for end in (1, 2, 4, 7, 8):  # where the assistant's turn begins or ends
        start = rendered(processor, *messages[:end], tools=tools)
        assert rendered(processor, *messages, tools=tools).startswith(start)
    for end in (1, 3, 6, 8):
        start = rendered(processor, *messages[:end], tools=tools, add_generation_prompt=True)
        assert rendered(processor, *messages, tools=tools).startswith(start)


def test_results_side_by_side_share_a_user_turn(processor: Any) -> None:
    text = rendered(processor, {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, USER)
    assert text == (
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nWhich digit is at the top left?<|im_end|>\n"
    )


def test_calls_and_text_stand_on_lines_of_their_own(processor: Any) -> None:
    two = {"role": "assistant", "content": "So:", "tool_calls": [called("zoom", x=1, y=0)] * 2}
    assert rendered(processor, two) == f"<|im_start|>assistant\nSo:\n{CALL}\n{CALL}<|im_end|>\n"
    text = {"type": "function", "function": {"name": "zoom", "arguments": '{"x": 1, "y": 0}'}}
    written = {"role": "assistant", "content": "", "tool_calls": [text]}
    assert rendered(processor, written) == f"<|im_start|>assistant\n{CALL}<|im_end|>\n"


def test_without_tools_prompts_are_those_of_tiny_vl(processor: Any) -> None:
    other = AutoProcessor.from_pretrained(TINY_VL)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit is this?"}]},
        ANSWER,
    ]
    assert rendered(processor, *messages) == rendered(other, *messages)


@pytest.mark.parametrize(
    ("text", "most"),
    [(CALL, 7), ('<tool_call>\n{"name": "calculate", "arguments": {"expression": "45*37"}}\n</tool_call>', 9)],
)
def test_a_call_is_few_tokens_and_comes_back_as_it_was(text: str, most: int) -> None:
    adapter = load_adapter(MODEL_DIR)
    ids = adapter.tokenizer(text)["input_ids"]
    assert len(ids) <= most
    assert adapter.decode(ids) == text


def test_pieces_of_a_conversation_are_tokenised_as_the_whole(processor: Any) -> None:
    """So the warm-up, which tokenises whole conversations, learns from the ids that a run makes turn by turn."""
    whole = rendered(processor, USER, ZOOM, SEEN, ANSWER, tools=SCHEMAS)
    first = rendered(processor, USER, tools=SCHEMAS, add_generation_prompt=True)
    second = rendered(processor, USER, ZOOM, SEEN, tools=SCHEMAS, add_generation_prompt=True)
    turn = f"{CALL}<|im_end|>"
    pieces = [first, turn, second.removeprefix(first + turn), whole.removeprefix(second)]
    ids = [processor.tokenizer(piece)["input_ids"] for piece in pieces]
    assert sum(ids, []) == processor.tokenizer(whole)["input_ids"]


def test_scenes_show_each_digit_in_its_quarter() -> None:
    rng = random.Random(0)
    for _ in range(20):
        side = rng.choice(tool_tasks.DIGIT_SIDES)
        white = Image.new("RGB", (side, side), "white")
        scene, cells = compose([white] * 4, rng)
        assert [(x // 2, y // 2) for x, y in cells] == [(0, 0), (1, 0), (0, 1), (1, 1)]
        total = sum(scene.convert("L").tobytes())
        seen = [sum(close_up(scene, x, y).convert("L").tobytes()) for x, y in cells]
        assert sum(seen) == total == 4 * 255 * side * side  # nothing of a digit is outside of its close-up
        assert not any(close_up(scene, 3 - x, y).getbbox() for x, y in cells if (3 - x, y) not in cells)


def test_zoom_rows_are_checkable_and_depend_on_the_seed_alone() -> None:
    rows, again = (tool_tasks.make_zoom_rows("train", 40, seed=1) for _ in range(2))
    assert [row["images"][0].tobytes() for row in rows] == [row["images"][0].tobytes() for row in again]
    other = tool_tasks.make_zoom_rows("train", 40, seed=2)
    assert [row["answer"] for row in rows] != [row["answer"] for row in other]
    assert {row["task"] for row in rows} == set(PLACES)
    assert all(row["images"][0].size == (192, 192) and row["task"] in row["prompt"][0]["content"] for row in rows)


def test_an_answer_is_the_digit_at_its_place() -> None:
    """What the close-ups of a quarter hold is compared with all glyphs of the split, drawn in the same way."""
    drawn = {
        digit: {draw(glyph, (side, side)).tobytes() for glyph in group for side in tool_tasks.DIGIT_SIDES}
        for digit, group in read_sheet("heldout").items()
    }
    for row in tool_tasks.make_zoom_rows("heldout", 20, seed=0):
        right, down = divmod(PLACES.index(row["task"]), 2)[::-1]
        views = [close_up(row["images"][0], 2 * right + x, 2 * down + y) for x in range(2) for y in range(2)]
        (view,) = [view for view in views if view.getbbox()]
        assert any(
            view.crop((x, y, x + side, y + side)).tobytes() in drawn[int(row["answer"])]
            for side in tool_tasks.DIGIT_SIDES
            for x in range(17 - side)
            for y in range(17 - side)
        )


def test_pairs_of_numbers_belong_to_one_split() -> None:
    pairs: dict[str, set[tuple[int, ...]]] = {}
    for split in ("warmup", "train", "heldout"):
        rows = tool_tasks.make_calculator_rows(split, 300, seed=0)
        pairs[split] = {tuple(map(int, re.findall(r"\d+", row["prompt"][0]["content"]))) for row in rows}
        for row in rows:
            first, second = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
            assert row["answer"] == str(calculate(f"{first}{OPERATORS[row['task']]}{second}"))
            assert first >= second
    assert len(set.union(*pairs.values())) == sum(map(len, pairs.values()))


@pytest.mark.parametrize(
    ("text", "number"), [("45+37", 82), ("45-37", 8), ("45*37", 1665), ("2 * (3 + 4)", 14), ("7", 7)]
)
def test_the_calculator_computes(text: str, number: int) -> None:
    assert calculate(text) == number


@pytest.mark.parametrize("text", ["2**9", "__import__('os')", "1.5+1", "-3", "a+1", "'a'+'b'", "[1]", "1+", ""])
def test_the_calculator_refuses_what_it_does_not_compute(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculate(text)


def test_the_zoom_shows_the_full_picture_of_its_row() -> None:
    first, second = tool_tasks.make_zoom_rows("train", 2, seed=0)
    zoom = Zoom()
    zoom.reset(**first)
    assert zoom.zoom(1, 0).tobytes() == close_up(first["images"][0], 1, 0).tobytes()
    zoom.reset(**second)
    assert zoom.zoom(2, 3).tobytes() == close_up(second["images"][0], 2, 3).tobytes()
    assert zoom.zoom(2, 3).size == (16, 16)


@pytest.mark.parametrize(("x", "y"), [(4, 0), (0, 4), (-1, 0), (0, -1), ("a", 0)])
def test_there_is_no_cell_outside_of_the_grid(x: Any, y: Any) -> None:
    with pytest.raises(ValueError, match="x and y are 0 to 3"):
        close_up(Image.new("RGB", (192, 192)), x, y)


def test_only_an_answer_at_the_end_is_rewarded() -> None:
    completions = [[ZOOM, SEEN, ANSWER], [ANSWER], [ZOOM], [ZOOM, SEEN], [ZOOM, SEEN, {**ANSWER, "content": "17"}]]
    completions += [[ZOOM, SEEN, {**ZOOM, "content": "7"}]]
    assert answer_reward(completions, ["7"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_model_has_the_template_of_the_warm_up() -> None:
    template = MODEL_DIR.parent / "tools_template.jinja"
    assert (MODEL_DIR / "chat_template.jinja").read_text() == template.read_text()


def test_the_model_is_small() -> None:
    model = AutoModelForImageTextToText.from_pretrained(MODEL_DIR)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert model.dtype == torch.float16
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) < 8_000_000


def test_the_model_cannot_read_the_picture_without_the_tool() -> None:
    """Of the ten digits it prefers the right one about as often as by chance."""
    adapter = load_adapter(MODEL_DIR, max_pixels=MAX_PIXELS)
    model = AutoModelForImageTextToText.from_pretrained(MODEL_DIR, dtype=torch.float32)
    rows = tool_tasks.make_zoom_rows("heldout", 300, seed=0)
    prompts = adapter.encode([{**row, "chat_template_kwargs": {"tools": SCHEMAS[:1]}} for row in rows])
    assert {len(prompt.images) for prompt in prompts} == {1}
    assert {prompt.num_image_tokens for prompt in prompts} == {4}
    numerals = adapter.tokenizer.convert_tokens_to_ids(list("0123456789"))
    batch = collate(prompts, pad_token_id=adapter.pad_token_id).model_inputs()
    with torch.no_grad():
        logits = model(**batch).logits[:, -1, numerals]
    right = [str(guess) == row["answer"] for guess, row in zip(logits.argmax(dim=-1).tolist(), rows, strict=True)]
    assert sum(right) / len(right) < 0.25


@pytest.mark.parametrize(("script", "algorithm"), [("tools_zoom", "rloo"), ("tools_text", "grpo")])
def test_an_example_ends_with_a_line_of_json(script: str, algorithm: str, tmp_path: Path) -> None:
    result = run_example(script, "--algorithm", algorithm, folder=tmp_path)
    assert set(result) == {"accuracy_before", "accuracy_after", "seconds", "steps", "seed"}
    assert 0.4 < result["accuracy_before"] < 0.7
