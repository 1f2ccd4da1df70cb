"""Every picture of a row ends in exactly one slot, or the row is refused by name."""

import base64
import copy
import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Features, Image, List, Value  # pyright: ignore[reportMissingTypeStubs]
from PIL import Image as PILImage
from qwen_vl_utils import fetch_image  # pyright: ignore[reportMissingTypeStubs]

from tiny_models import picture, tiny, tokenizer, user
from vlmroll_processors import Prompt, load_adapter
from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.images import read_picture
from vlmroll_processors.messages import read_row

Row = dict[str, Any]
RED, GREEN, BLUE = (PILImage.new("RGB", (32, 32), colour) for colour in ("red", "green", "blue"))
COLOURS = {read_picture(image, where="")[0].sha256: name for name, image in zip("RGB", (RED, GREEN, BLUE), strict=True)}
SLOT = "<|vision_start|><|image_pad|><|vision_end|>"
EMPTY = {"type": "image"}
FILM = [GREEN] * 4
FILM_SLOT = "<|vision_start|><|video_pad|><|vision_end|>"
ROW_ID = 41


@cache
def adapter(name: str = "qwen2_5_vl") -> FamilyAdapter:
    return load_adapter(tiny(name).processor, config=tiny(name).model.config)


def encode(row: Row, name: str = "qwen2_5_vl") -> Prompt:
    return adapter(name).encode([row], [ROW_ID])[0]


def colours(prompt: Prompt) -> str:
    """The prompt's pictures as letters, in slot order."""
    return "".join(COLOURS[image.sha256] for image in prompt.images)


def shown(row: Row) -> str:
    """The rendered prompt with each slot as its picture's letter in braces."""
    prompt = encode(row)
    text = prompt.text
    for letter in colours(prompt):
        text = text.replace(SLOT, f"{{{letter}}}", 1)
    assert SLOT not in text
    return text


def refusal(row: Row, name: str = "qwen2_5_vl") -> str:
    """The message with which the row is refused, which must name the row and a column."""
    with pytest.raises(
        ValueError, match=f"^row {ROW_ID}\\b.*'(prompt|images?|videos?|chat_template_kwargs)'"
    ) as caught:
        encode(row, name)
    return str(caught.value)


def turns(*contents: Any) -> list[Row]:
    """User and assistant messages in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def png(image: PILImage.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: PILImage.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


# Columns


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"image": RED}, "R"),
        ({"images": RED}, "R"),
        ({"image": [RED]}, "R"),
        ({"image": [RED, GREEN]}, "RG"),
        ({"images": [RED, GREEN, RED]}, "RGR"),
        ({"images": (RED, GREEN)}, "RG"),
        ({"image": None, "images": [BLUE]}, "B"),
        ({"image": BLUE, "images": []}, "B"),
        ({"image": np.asarray(RED)}, "R"),
        ({"image": {"bytes": png(GREEN), "path": None}}, "G"),
        ({"image": {"image": GREEN}}, "G"),
        ({"image": data_url(BLUE)}, "B"),
    ],
)
def test_both_columns_take_one_picture_or_a_list(columns: Row, expected: str) -> None:
    prompt = encode({"prompt": "".join("<image>" for _ in expected) + "which", **columns})
    assert colours(prompt) == expected
    chat = encode({"prompt": user("which"), **columns})
    assert colours(chat) == expected
    assert chat.text.startswith("<|im_start|>user\n" + SLOT * len(expected) + "which")


NOTHING: list[Any] = [None, [], (), [None], [None, None]]


@pytest.mark.parametrize("columns", [{}, *({column: value} for column in ("image", "images") for value in NOTHING)])
def test_no_picture_has_many_forms(columns: Row) -> None:
    bare = {"prompt": user("which")}
    prompt, twin = adapter().encode([{**bare, **columns}, bare])
    assert prompt is twin
    assert prompt.images == ()
    assert "pixel_values" not in prompt.forward_kwargs


def test_pictures_in_both_columns_are_refused() -> None:
    assert "both columns" in refusal({"prompt": user("which"), "image": RED, "images": [GREEN]})


def test_a_null_beside_pictures_is_refused_with_its_place() -> None:
    assert "'images'[1]" in refusal({"prompt": user("which"), "images": [RED, None]})


def test_a_broken_picture_is_refused_with_its_place() -> None:
    assert "column 'images'[1]" in refusal({"prompt": user("which"), "images": [RED, b"broken"]})
    assert "message 0, part 1" in refusal({"prompt": turns(["which", {"type": "image", "path": "missing.png"}])})


@pytest.mark.parametrize("column", ["video", "videos"])
def test_null_videos_are_none(column: str) -> None:
    for nothing in NOTHING:
        prompt = encode({"prompt": user("which"), column: nothing})
        assert prompt.images == prompt.videos == ()
        assert set(prompt.forward_kwargs) == {"mm_token_type_ids", "position_ids"}


@pytest.mark.parametrize("column", ["video", "videos"])
def test_videos_are_refused_by_families_without(column: str) -> None:
    for film in (FILM, [FILM], np.zeros((4, 8, 8, 3), np.uint8), [b"film"], "a.mp4"):
        row = {"prompt": user("which"), column: film}
        assert "the family LLaVA takes no videos" in refusal(row, "llava")
        assert "a video, but the model takes text only" in refusal(row, "text")
    assert "takes no videos" in refusal({"prompt": turns([{"type": "video", "video": FILM}])}, "llava")
    assert "takes no videos" in refusal({"prompt": "<video> which", column: [FILM]}, "llava")


@pytest.mark.parametrize("value", [np.zeros((4, 8, 8, 3)), [b"film"]], ids=["floats", "bytes"])
@pytest.mark.parametrize("column", ["video", "videos"])
def test_broken_videos_are_refused_with_their_place(column: str, value: Any) -> None:
    assert f"column {column!r}" in refusal({"prompt": user("which"), column: value})


def test_text_models_refuse_pictures_by_column() -> None:
    assert "text only" in refusal({"prompt": user("which"), "image": RED}, "text")
    assert "text only" in refusal({"prompt": "which <image>", "images": [RED]}, "text")
    assert "message 0, part 0" in refusal({"prompt": user("which", RED)}, "text")


# Slots in the messages


def test_empty_slots_are_filled_in_order_over_all_turns() -> None:
    prompt = turns([EMPTY, "first", EMPTY], "ok", [{"type": "text", "text": "last"}, EMPTY])
    row = {"prompt": prompt, "images": [BLUE, RED, GREEN]}
    assert shown(row) == (
        "<|im_start|>user\n{B}first{R}<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nlast{G}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_slots_with_a_source_of_their_own_leave_the_column_to_the_others() -> None:
    row = {"prompt": turns([{"type": "image", "image": RED}, EMPTY, "which"]), "images": [GREEN]}
    assert "user\n{R}{G}which" in shown(row)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": RED},
        {"type": "image", "image": {"bytes": png(RED), "path": None}},
        {"type": "image", "bytes": png(RED)},
        {"type": "image", "url": data_url(RED)},
        {"type": "image", "base64": data_url(RED).partition(",")[2]},
        {"type": "image_url", "image_url": {"url": data_url(RED)}},
        {"type": "image_url", "image_url": {"url": data_url(RED), "detail": "low"}},
        {"type": "image_url", "image_url": data_url(RED)},
        {"type": "image", "image_url": {"url": data_url(RED)}},
        {"type": "image", "image_url": data_url(RED), "image": None, "text": None},
    ],
)
def test_an_image_part_takes_its_picture_under_every_usual_key(part: Row) -> None:
    assert colours(encode({"prompt": turns([part, "which"])})) == "R"
    assert "1 pictures" in refusal({"prompt": turns([part, "which"]), "image": GREEN}), "it must not count as empty"


def test_an_image_part_takes_a_path(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png(RED))
    assert colours(encode({"prompt": turns([{"type": "image", "path": str(tmp_path / "red.png")}])})) == "R"


def test_parts_with_null_keys_are_empty_slots() -> None:
    nulls = dict.fromkeys(("text", "image", "url", "image_url", "max_pixels"))
    for part in ({"type": "image", **nulls}, {"type": "image_url", **nulls, "image_url": {"url": None}}):
        assert "user\n{R}which" in shown({"prompt": turns([part, "which"]), "image": RED})


@pytest.mark.parametrize(
    ("slots", "pictures"), [(1, 0), (2, 1), (1, 2), (3, 2)], ids=["1 of 0", "2 of 1", "1 of 2", "3 of 2"]
)
def test_more_or_fewer_slots_than_pictures_are_refused(slots: int, pictures: int) -> None:
    message = refusal({"prompt": turns([*[EMPTY] * slots, "which"]), "images": [RED] * pictures})
    assert f"{pictures} pictures" in message
    assert f"{slots} empty" in message


# Markers


def test_markers_in_a_chat_are_slots_over_all_turns() -> None:
    row = {"prompt": turns("first <image> then", "ok", "<image><image> end"), "images": [RED, GREEN, BLUE]}
    assert shown(row) == (
        "<|im_start|>user\nfirst {R} then<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\n{G}{B} end<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_marker_leaves_no_empty_text_beside_its_slot() -> None:
    messages = read_row({"prompt": turns("<image>"), "image": RED}, where="row 0").messages
    assert messages == ({"role": "user", "content": [EMPTY]},)


def test_markers_count_in_every_role() -> None:
    messages = [{"role": "system", "content": "as in <image>"}, {"role": "user", "content": "which"}]
    assert "system\nas in {R}<|im_end|>" in shown({"prompt": messages, "image": RED})


def test_markers_in_a_plain_string_are_slots() -> None:
    row = {"prompt": "first <image> then <image>", "images": [RED, GREEN]}
    slot = encode({"prompt": "<image>", "image": BLUE}).prompt_ids
    first, then = (tuple(tokenizer()(text)["input_ids"]) for text in ("first ", " then "))
    assert shown(row) == "first {R} then {G}"
    assert encode(row).prompt_ids == (*first, *slot, *then, *slot)


def test_markers_beside_image_parts_stay_text() -> None:
    assert "user\n{R}the word <image>" in shown({"prompt": turns([EMPTY, "the word <image>"]), "image": RED})


@pytest.mark.parametrize("prompt", ["the tag <image>", turns("the tag <image>")], ids=["plain", "chat"])
def test_markers_without_pictures_stay_text(prompt: Any) -> None:
    assert "the tag <image>" in encode({"prompt": prompt}).text


@pytest.mark.parametrize("num_pictures", [1, 3])
@pytest.mark.parametrize("chat", [False, True])
def test_a_wrong_number_of_markers_is_refused(chat: bool, num_pictures: int) -> None:
    text = "first <image> then <image>"
    message = refusal({"prompt": turns(text) if chat else text, "images": [RED] * num_pictures})
    assert f"{num_pictures} pictures but 2 <image> markers" in message


def test_a_plain_string_without_markers_refuses_pictures() -> None:
    assert "0 <image> markers" in refusal({"prompt": "which", "image": RED})


def test_without_slots_and_markers_pictures_go_before_the_first_user_text() -> None:
    messages = [{"role": "system", "content": "be brief"}, *turns("first", "ok", "last")]
    text = shown({"prompt": messages, "images": [RED, GREEN]})
    assert "user\n{R}{G}first<|im_end|>" in text
    assert "user\nlast<|im_end|>" in text


def test_a_chat_without_user_turn_refuses_pictures() -> None:
    assert "no user message" in refusal({"prompt": [{"role": "system", "content": "hi"}], "image": RED})


def test_a_template_that_drops_a_picture_is_refused() -> None:
    messages = [{"role": "tool", "content": [{"type": "image", "image": RED}]}, *turns("which")]
    processor = copy.copy(tiny("qwen2_5_vl").processor)
    processor.chat_template = "{% for m in messages %}{% if m.role != 'tool' %}" + SLOT + "hi{% endif %}{% endfor %}"
    with_one = load_adapter(processor)
    assert len(with_one.encode([{"prompt": messages}])[0].images) == 1
    with pytest.raises(ValueError, match=r"^row 0, column 'prompt': .* rendered 0 picture slots for 1 pictures"):
        with_one.encode([{"prompt": messages[:1]}])


# Videos


def films(prompt: Prompt) -> list[str]:
    """The frames of the prompt's videos as letters, in slot order."""
    sources = [video.source for video in prompt.videos]
    return ["".join(COLOURS[frame.sha256] for frame in source) for source in sources if isinstance(source, tuple)]


def test_pictures_and_videos_keep_their_places() -> None:
    film = {"type": "video"}
    pairs = {"images": [RED, BLUE], "videos": [FILM, [RED, RED]]}
    parts = encode({"prompt": turns([film, EMPTY, "which", EMPTY, film]), **pairs})
    marked = encode({"prompt": turns("<video><image>which<image><video>"), **pairs})
    plain = encode({"prompt": "<video><image>which<image><video>", **pairs})
    order = FILM_SLOT + SLOT + "which" + SLOT + FILM_SLOT
    for prompt in (parts, marked, plain):
        assert order in prompt.text
        assert (colours(prompt), films(prompt)) == ("RB", ["GGGG", "RR"])
        first, last = prompt.video_spans
        one, two = prompt.image_spans
        assert first.offset < one.offset < two.offset < last.offset
    assert parts.prompt_ids == marked.prompt_ids
    bare = encode({"prompt": turns("which"), **pairs})
    assert "user\n" + SLOT * 2 + FILM_SLOT * 2 + "which" in bare.text, "pictures stand before videos"


@pytest.mark.parametrize("prompt", ["the tag <video>", turns("the tag <video>")], ids=["plain", "chat"])
def test_video_markers_without_videos_stay_text(prompt: Any) -> None:
    assert "the tag <video>" in encode({"prompt": prompt}).text
    assert encode({"prompt": "<image> the tag <video>", "image": RED}).text == SLOT + " the tag <video>"


@pytest.mark.parametrize("num_videos", [1, 3])
@pytest.mark.parametrize("chat", [False, True])
def test_a_wrong_number_of_video_markers_is_refused(chat: bool, num_videos: int) -> None:
    text = "first <video> then <video>"
    message = refusal({"prompt": turns(text) if chat else text, "videos": [FILM] * num_videos})
    assert f"{num_videos} videos but 2 <video> markers" in message


def test_more_or_fewer_video_slots_than_videos_are_refused() -> None:
    film = {"type": "video"}
    assert "1 videos" in refusal({"prompt": turns([film, film]), "video": FILM})
    assert "2 empty video slots" in refusal({"prompt": turns([film, film]), "video": FILM})
    assert "0 videos" in refusal({"prompt": turns([film, EMPTY]), "image": RED}), "a picture fills no video's slot"
    assert "both columns" in refusal({"prompt": user("which"), "video": FILM, "videos": [FILM]})
    assert "0 <video> markers" in refusal({"prompt": "which <image>", "video": FILM})


def test_a_video_that_needs_the_config_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"^row 7.*tokens_per_second"):
        load_adapter(tiny("qwen2_5_vl").processor).encode([{"prompt": user("which"), "video": FILM}], [7])


# Prompts of a wrong shape


@pytest.mark.parametrize(
    "prompt", [None, [], (), 3, 0, b"bytes", {"role": "user", "content": "which"}, "", np.zeros(2)]
)
def test_a_prompt_of_a_wrong_type_or_empty_is_refused(prompt: Any) -> None:
    refusal({"prompt": prompt})
    refusal({"prompt": prompt}, "text")


def test_a_row_without_prompt_is_refused() -> None:
    assert "is missing" in refusal({})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "robot", "content": "which"}, "unknown role 'robot'"),
        ({"content": "which"}, "unknown role None"),
        ({"role": "user", "content": None}, "'content' must be"),
        ({"role": "user"}, "'content' must be"),
        ({"role": "user", "tool_calls": [{"name": "look"}]}, "'content' must be"),
        ({"role": "user", "content": 3}, "got int"),
        ({"role": "user", "content": "which", "images": [RED]}, "carries a picture or video under 'images'"),
        ("which", "got str"),
        (None, "got NoneType"),
    ],
)
def test_a_message_of_a_wrong_shape_is_refused(message: Any, reason: str) -> None:
    text = refusal({"prompt": [{"role": "user", "content": "hi"}, message]})
    assert "message 1" in text
    assert reason in text


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "audio", "audio": "a.wav"}, "unknown part type 'audio'"),
        ({"type": "video", "video": "a.mp4"}, "no video file at"),
        ({"type": "video", "video": FILM, "path": "a.mp4"}, "several sources (video, path)"),
        ({"type": "video", "video": FILM, "text": "which"}, "carries text"),
        ({"type": "video", "image": RED}, "unknown key 'image'"),
        ({"type": "image", "image": RED, "fps": 2}, "unknown key 'fps'"),
        ({"text": "which"}, "unknown part type None"),
        ({"type": "text"}, "needs a string"),
        ({"type": "text", "text": 3}, "needs a string"),
        ({"type": "text", "text": "which", "image": RED}, "carries a picture under 'image'"),
        ({"type": "text", "text": "which", "image_url": {"url": data_url(RED)}}, "carries a picture under 'image_url'"),
        ({"type": "image", "image": RED, "text": "which"}, "carries text"),
        ({"type": "image", "image": RED, "path": "red.png"}, "several sources (image, path)"),
        ({"type": "image_url", "image_url": data_url(RED), "image": RED}, "several sources (image, image_url)"),
        (3, "got int"),
        (None, "got NoneType"),
    ],
)
def test_a_part_of_a_wrong_shape_is_refused(part: Any, reason: str) -> None:
    text = refusal({"prompt": turns(["hi", part])})
    assert "message 0, part 1" in text
    assert reason in text


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"])
def test_reserved_tokens_in_the_text_are_refused(token: str) -> None:
    text = f"an {token} here"
    for prompt in (text, turns(text), turns([text]), turns(["hi"], text)):
        assert token in refusal({"prompt": prompt})


def test_reserved_tokens_put_together_from_two_parts_are_refused() -> None:
    refusal({"prompt": turns(["an <|vision_", "start|> here"])})


def test_reserved_tokens_of_other_families_are_only_text_to_a_text_model() -> None:
    assert encode({"prompt": "an <|image_pad|>"}, "text").num_tokens > 1


# Size keys


@pytest.mark.parametrize(
    "keys",
    [
        {"max_pixels": 2048},
        {"min_pixels": 3000},
        {"min_pixels": 2048, "max_pixels": 4096},
        {"resized_height": 48, "resized_width": 80},
        {"resized_height": 40, "resized_width": 70, "max_pixels": 1024},
    ],
)
@pytest.mark.parametrize("place", ["part", "slot", "column"])
def test_size_keys_resize_as_qwen_vl_utils_does(place: str, keys: dict[str, int]) -> None:
    image = picture(90, 70, 3)
    row: Row = {
        "part": {"prompt": turns([{"type": "image", "image": image, **keys}, "which"])},
        "slot": {"prompt": turns([{**EMPTY, **keys}, "which"]), "image": image},
        "column": {"prompt": turns("which"), "image": {"image": image, **keys}},
    }[place]
    processor = tiny("qwen2_5_vl").processor
    size = processor.image_processor.size
    bounds = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}  # those of the run
    request: Row = {"image": image, **bounds, **keys}
    resized = fetch_image(request, image_patch_size=processor.image_processor.patch_size)
    expected = processor.image_processor(images=[resized], do_resize=False, return_tensors="pt")
    found = encode(row).forward_kwargs
    assert found["image_grid_thw"].tolist() == [[1, resized.height // 8, resized.width // 8]]
    assert found["image_grid_thw"].equal(expected["image_grid_thw"])
    assert found["pixel_values"].equal(expected["pixel_values"])


def test_sizes_hold_for_their_own_picture_alone() -> None:
    image = picture(90, 70, 3)
    row = {"prompt": turns([{"type": "image", "image": image, "max_pixels": 1024}, EMPTY]), "image": image}
    small, usual = encode(row).forward_kwargs["image_grid_thw"].tolist()
    assert small[1] * small[2] * 64 <= 1024
    assert [usual] == encode({"prompt": user("which", image)}).forward_kwargs["image_grid_thw"].tolist()


@pytest.mark.parametrize(
    "keys",
    [
        {"max_pixels": 0},
        {"max_pixels": 100.0},
        {"min_pixels": "100"},
        {"min_pixels": True},
        {"resized_height": 48},
        {"resized_width": 48},
        {"min_pixels": 4096, "max_pixels": 2048},
        {"max_pixels": 10},
    ],
)
def test_impossible_sizes_are_refused_with_their_place(keys: Row) -> None:
    assert "message 0, part 1" in refusal({"prompt": turns(["which", {"type": "image", "image": RED, **keys}])})
    assert "column 'image'" in refusal({"prompt": turns("which"), "image": {"image": RED, **keys}})


# Template


@pytest.mark.parametrize("name", ["qwen2_5_vl", "text"])
@pytest.mark.parametrize("last", ["the sum is ", "the sum", [{"type": "text", "text": "the "}, "sum"]])
def test_a_conversation_that_ends_in_an_assistant_turn_is_continued(name: str, last: Any) -> None:
    prompt = encode({"prompt": turns("what is the sum", last)}, name)
    start = "<|im_start|>user\nwhat is the sum<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == start + (last if isinstance(last, str) else "the sum")


@pytest.mark.parametrize(
    "last", [{"content": []}, {"content": [{"type": "image", "image": RED}]}, {"tool_calls": [{"name": "look"}]}]
)
def test_an_assistant_turn_without_text_cannot_be_continued(last: Row) -> None:
    refusal({"prompt": [*turns("which"), {"role": "assistant", **last}]})


def templated(template: str, name: str = "qwen2_5_vl", **options: Any) -> FamilyAdapter:
    """An adapter whose processor has another chat template."""
    processor = copy.copy(tiny(name).processor)
    processor.chat_template = template
    return load_adapter(processor, **options)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "text"])
def test_the_row_s_template_kwargs_win_over_the_adapter_s(name: str) -> None:
    template = "{{ style }}-{{ tone if tone is defined else 'none' }}"
    with_kwargs = templated(template, name, chat_template_kwargs={"style": "short"})
    rows = [{"prompt": turns("which")}, {"prompt": turns("which"), "chat_template_kwargs": {"style": "long"}}]
    rows += [{"prompt": turns("which"), "chat_template_kwargs": {"style": None, "tone": "dry"}}]
    assert [prompt.text for prompt in with_kwargs.encode(rows)] == ["short-none", "long-none", "short-dry"]


@pytest.mark.parametrize("value", ["short", {"tokenize": True}, {"add_generation_prompt": False}])
def test_impossible_template_kwargs_are_refused(value: Any) -> None:
    assert "'chat_template_kwargs'" in refusal({"prompt": turns("which"), "chat_template_kwargs": value})


@pytest.mark.parametrize("name", ["qwen2_5_vl", "text"])
def test_a_template_s_own_refusal_names_the_row(name: str) -> None:
    strict = templated("{{ raise_exception('no system role here') }}", name)
    with pytest.raises(ValueError, match=r"^row 7, column 'prompt': .*no system role here"):
        strict.encode([{"prompt": turns("which")}], [7])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "text"])
def test_without_chat_template_only_plain_strings_are_taken(name: str) -> None:
    processor = copy.copy(tiny(name).processor)
    processor.chat_template = None
    bare = load_adapter(processor)
    with pytest.raises(ValueError, match=r"^row 7, column 'prompt': .*no chat template"):
        bare.encode([{"prompt": turns("which")}], [7])
    assert bare.encode([{"prompt": "which"}])[0].text == "which"


def test_tool_calls_reach_the_template_without_arrow_s_nulls() -> None:
    call = {"name": "look", "arguments": {"at": "left", "zoom": None}}
    messages = [*turns("which"), {"role": "assistant", "content": None, "tool_calls": [call], "name": None}]
    prompt = templated("{{ messages | tojson }}").encode([{"prompt": [*messages, {"role": "tool", "content": "ok"}]}])[
        0
    ]
    assert '"arguments": {"at": "left"}' in prompt.text
    assert "null" not in prompt.text


# Rows as datasets gives them


def snapshot(value: Any) -> Any:
    """A deep copy that compares by value, with pictures as their bytes."""
    if isinstance(value, PILImage.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, str | bytes):
        return value
    return [snapshot(item) for item in value] if isinstance(value, Sequence) else copy.deepcopy(value)


def kinds_of_rows() -> list[Row]:
    return [
        {"prompt": user("which", RED, GREEN), "answer": "7"},
        {"prompt": turns([EMPTY, "which"], "ok", "<image>"), "images": [RED], "chat_template_kwargs": {"a": None}},
        {"prompt": turns("a <image> b", "the"), "images": [{"image": RED, "max_pixels": 2048}]},
        {"prompt": turns([{"type": "image_url", "image_url": {"url": data_url(RED)}}, "which"])},
        {"prompt": "a <image> b", "image": RED},
        {"prompt": turns("which"), "image": [RED, GREEN]},
        {"prompt": [*turns("which"), {"role": "assistant", "tool_calls": [{"a": None}]}, *turns("so")], "image": None},
    ]


def test_rows_are_never_changed() -> None:
    rows = kinds_of_rows()
    before = snapshot(rows)
    first = adapter().encode(rows)
    assert snapshot(rows) == before
    assert [prompt.prompt_ids for prompt in adapter().encode(rows)] == [prompt.prompt_ids for prompt in first]


def test_reading_a_row_shares_no_list_with_it() -> None:
    row = {"prompt": turns([EMPTY, "which"]), "image": RED}
    for message in read_row(row, where="row 0").messages or ():
        message["content"].clear()
    assert row["prompt"] == turns([EMPTY, "which"])


@pytest.mark.parametrize("decode", [True, False], ids=["decoded", "bytes and path"])
def test_rows_survive_a_round_trip_through_arrow(decode: bool, tmp_path: Path) -> None:
    path = tmp_path / "green.png"
    path.write_bytes(png(GREEN))
    part = {"type": Value("string"), "text": Value("string"), "image": Value("string")}
    features = Features(
        prompt=List({"role": Value("string"), "content": List(part)}),
        images=List(Image(decode=decode)),
        image=Image(decode=decode),
    )
    text = {"type": "text", "text": "which"}
    rows: list[Row] = [
        {"prompt": turns([EMPTY, text, EMPTY]), "images": [RED, GREEN], "image": None},
        {"prompt": turns([text]), "images": None, "image": BLUE},
        {"prompt": turns([text]), "images": [], "image": None},
        {"prompt": turns([text]), "images": None, "image": None},
        {"prompt": turns([text], [text], [{"type": "image", "image": str(path)}]), "images": None, "image": None},
    ]
    through_arrow: list[Any] = list(Dataset.from_list(rows, features=features))
    assert through_arrow[0]["prompt"][0]["content"][0] == {"type": "image", "text": None, "image": None}
    assert isinstance(through_arrow[0]["images"][1], PILImage.Image if decode else dict)
    prompts = adapter().encode(through_arrow)
    assert [colours(prompt) for prompt in prompts] == ["RG", "B", "", "", "G"]
    for prompt, direct in zip(prompts, adapter().encode(rows), strict=True):
        assert (prompt.text, prompt.prompt_ids) == (direct.text, direct.prompt_ids)


def test_one_row_with_a_picture_gives_all_rows_its_null_keys() -> None:
    rows: list[Row] = [
        {"prompt": turns([{"type": "image_url", "image_url": {"url": data_url(RED)}}, {"type": "text", "text": "a"}])},
        {"prompt": turns([{"type": "text", "text": "b"}]), "chat_template_kwargs": {"style": "long"}},
    ]
    through_arrow: list[Any] = list(Dataset.from_list(rows))
    assert [colours(prompt) for prompt in adapter().encode(through_arrow)] == ["R", ""]
