"""The adapter's prompts against the processors and models of transformers, bit for bit."""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from tiny_models import QWEN_FAMILIES, TEMPLATE, mixed_rows, picture, tiny, tokenizer, user
from vlmroll_processors import Prompt, PromptTooLong, collate, load_adapter
from vlmroll_processors.adapter import FamilyAdapter

VISION = ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")
ALL = (*QWEN_FAMILIES, "text")
qwen = pytest.mark.parametrize("name", QWEN_FAMILIES)


@cache
def adapter(name: str) -> FamilyAdapter:
    return load_adapter(tiny(name).processor)


def pictures(row: dict[str, Any]) -> list[Image.Image]:
    return [part["image"] for message in row["prompt"] for part in message["content"] if part["type"] == "image"]


def encode(name: str) -> list[Prompt]:
    return adapter(name).encode(mixed_rows())


def oracle(name: str) -> dict[str, torch.Tensor]:
    """The processor's own output for the whole batch."""
    processor, rows = tiny(name).processor, mixed_rows()
    texts = [processor.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    images = [pictures(row) for row in rows]
    return dict(processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt"))


@qwen
def test_a_mixed_batch_equals_the_processors(name: str) -> None:
    batch = collate(encode(name), pad_token_id=adapter(name).pad_token_id).model_inputs()
    expected = oracle(name)
    assert set(batch) == {*expected, "position_ids"}
    for key, tensor in expected.items():
        assert batch[key].dtype == tensor.dtype, key
        assert batch[key].equal(tensor), key


@qwen
def test_positions_equal_the_models(name: str) -> None:
    expected = oracle(name)
    found = collate(encode(name), pad_token_id=adapter(name).pad_token_id).forward_kwargs["position_ids"]
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    positions, _ = tiny(name).model.model.get_rope_index(**{key: expected[key] for key in keys})
    real = expected["attention_mask"].bool().expand_as(positions)
    assert found.shape == positions.shape
    assert found[real].equal(positions[real])


@qwen
def test_completion_positions_go_on_as_in_the_model(name: str) -> None:
    prompts, tails = encode(name), [(270, 280), (290,), (300, 301, 302), ()]
    batch = collate(prompts, tails, pad_token_id=adapter(name).pad_token_id)
    inputs = batch.model_inputs()
    found = inputs.pop("position_ids")
    del inputs["pixel_values"]
    positions, _ = tiny(name).model.model.get_rope_index(**inputs)
    real = batch.attention_mask.bool().expand_as(positions)
    assert found[real].equal(positions[real])


@qwen
def test_logits_equal_those_of_the_processors_output(name: str) -> None:
    model, expected = tiny(name).model, oracle(name)
    with torch.no_grad():
        theirs = model(**expected).logits
        ours = model(**collate(encode(name), pad_token_id=adapter(name).pad_token_id).model_inputs()).logits
    real = expected["attention_mask"].bool()
    assert theirs[real].std() > 0.1, "the logits must depend on something"
    torch.testing.assert_close(ours[real], theirs[real], rtol=0, atol=1e-5)


@qwen
def test_logits_depend_on_the_pixels(name: str) -> None:
    row = {"prompt": user("which", picture(64, 48, 1))}
    other = {"prompt": user("which", picture(64, 48, 2))}
    batch = collate(adapter(name).encode([row, other]), pad_token_id=0)
    with torch.no_grad():
        logits = tiny(name).model(**batch.model_inputs()).logits[:, -1]
    assert (logits[0] - logits[1]).abs().max() > 1e-2


@qwen
def test_engine_ids_expand_to_prompt_ids_at_the_spans(name: str) -> None:
    for prompt, row in zip(encode(name), mixed_rows(), strict=True):
        placeholder = tokenizer().convert_tokens_to_ids("<|image_pad|>")
        spans = iter(prompt.image_spans)
        expanded = [[id] * next(spans).length if id == placeholder else [id] for id in prompt.engine_ids]
        assert sum(expanded, []) == list(prompt.prompt_ids)
        assert prompt.engine_ids == tuple(tokenizer()(prompt.text)["input_ids"])
        inside = [i for span in prompt.image_spans for i in range(span.offset, span.offset + span.length)]
        assert inside == [i for i, id in enumerate(prompt.prompt_ids) if id == placeholder]
        assert [span.length for span in prompt.image_spans] == prompt_features(prompt)
        assert prompt.num_image_tokens == sum(prompt_features(prompt))
        assert [image.image.tobytes() for image in prompt.images] == [image.tobytes() for image in pictures(row)]


def prompt_features(prompt: Prompt) -> list[int]:
    """Patches / merge_size^2 of each picture, from the grids."""
    if not prompt.images:
        assert set(prompt.forward_kwargs) == {"mm_token_type_ids", "position_ids"}
        return []
    grids = prompt.forward_kwargs["image_grid_thw"]
    assert len(prompt.forward_kwargs["pixel_values"]) == int(grids.prod(-1).sum())
    return [int(grid.prod()) // 4 for grid in grids]


@qwen
def test_placeholders_equal_the_models_features(name: str) -> None:
    prompts = [prompt for prompt in encode(name) if prompt.images]
    inputs = collate(prompts, pad_token_id=0).forward_kwargs
    with torch.no_grad():
        output = tiny(name).model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
        )
    lengths = [span.length for prompt in prompts for span in prompt.image_spans]
    assert [len(features) for features in output.pooler_output] == lengths


@qwen
def test_adjacent_pictures_have_spans_of_their_own(name: str) -> None:
    (prompt,) = adapter(name).encode([{"prompt": user("which", picture(64, 48, 1), picture(40, 40, 2))}])
    first, second = prompt.image_spans
    assert second.offset == first.offset + first.length + 2  # vision_end, vision_start
    types = prompt.forward_kwargs["mm_token_type_ids"]
    assert types.sum() == first.length + second.length


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (1, 3), (3, 64), (64, 3), (1, 150), (1000, 10)])
def test_thin_and_tiny_pictures_equal_the_processors(size: tuple[int, int]) -> None:
    image = picture(*size, 0)
    expected = tiny("qwen3_vl").processor.image_processor(images=[image], return_tensors="pt")
    found = adapter("qwen3_vl").encode([{"prompt": user("which", image)}])[0].forward_kwargs
    assert found["image_grid_thw"].equal(expected["image_grid_thw"])
    assert found["pixel_values"].equal(expected["pixel_values"])


@pytest.mark.parametrize("size", [(1, 201), (402, 2)])
def test_a_refused_picture_is_named_by_row_column_and_size(size: tuple[int, int]) -> None:
    rows = [{"prompt": user("which"), "images": [picture(64, 48, 1), picture(*size, 0)]}]
    with pytest.raises(ValueError, match=rf"^row 7, column 'images'\[1\]: .* {size[0]}x{size[1]} pixels"):
        adapter("qwen2_5_vl").encode([*mixed_rows(), *rows], [3, 4, 5, 6, 7])


@pytest.mark.parametrize("budget", [{"max_pixels": 1024}, {"min_pixels": 8192, "max_pixels": 16384}])
def test_the_pixel_budget_equals_the_processors(budget: dict[str, Any]) -> None:
    image, processor = picture(80, 60, 0), tiny("qwen2_5_vl").processor
    size = {"shortest_edge": budget.get("min_pixels", 512), "longest_edge": budget["max_pixels"]}
    expected = processor.image_processor(images=[image], size=size, return_tensors="pt")
    (prompt,) = load_adapter(processor, **budget).encode([{"prompt": user("which", image)}])
    assert prompt.forward_kwargs["pixel_values"].equal(expected["pixel_values"])
    assert len(expected["pixel_values"]) != len(
        adapter("qwen2_5_vl").encode([{"prompt": user("", image)}])[0].prompt_ids
    )


def test_text_prompts_equal_the_tokenizers() -> None:
    rows: list[dict[str, Any]] = [{"prompt": user("how many dots ?")}, {"prompt": "how many dots ?"}]
    chat, plain = adapter("text").encode(rows)
    messages = [{"role": "user", "content": "how many dots ?"}]
    expected: Any = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert chat.prompt_ids == chat.engine_ids == tuple(expected["input_ids"])
    assert plain.prompt_ids == plain.engine_ids == tuple(tokenizer()("how many dots ?")["input_ids"])
    assert not chat.forward_kwargs
    padded = tokenizer()([chat.text, plain.text], padding=True, return_tensors="pt")
    batch = collate([chat, plain], pad_token_id=adapter("text").pad_token_id)
    assert batch.input_ids.equal(padded["input_ids"])
    assert batch.attention_mask.equal(padded["attention_mask"])


def test_text_parts_reach_text_templates_as_one_string() -> None:
    parts = [{"role": "user", "content": ["how many ", {"type": "text", "text": "dots ?"}]}]
    whole = [{"role": "user", "content": "how many dots ?"}]
    first, second = adapter("text").encode([{"prompt": parts}, {"prompt": whole}])
    assert first is second


def with_bos(template: str) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a rule that puts <bos> before every text."""
    inner = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    inner.add_special_tokens([AddedToken("<bos>", normalized=False, special=True)])
    bos = inner.token_to_id("<bos>")
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def test_a_template_that_writes_bos_gives_exactly_one() -> None:
    own = with_bos("<bos>" + TEMPLATE)
    (prompt,) = load_adapter(own).encode([{"prompt": user("how many")}])
    assert prompt.prompt_ids[0] == own.bos_token_id
    assert prompt.prompt_ids.count(own.bos_token_id) == 1


def test_a_template_without_bos_gives_none() -> None:
    own = with_bos(TEMPLATE)
    (prompt,) = load_adapter(own).encode([{"prompt": user("how many")}])
    assert own.bos_token_id not in prompt.prompt_ids


def test_a_plain_string_follows_the_tokenizers_bos_rule() -> None:
    own = with_bos(TEMPLATE)
    (prompt,) = load_adapter(own).encode([{"prompt": "how many"}])
    assert prompt.prompt_ids == (own.bos_token_id, *tokenizer()("how many")["input_ids"])
    assert prompt.prompt_ids == tuple(own("how many")["input_ids"])


def test_a_plain_string_and_a_chat_of_equal_text_stay_apart() -> None:
    own = with_bos("{{ messages[0].content }}")
    plain, chat = load_adapter(own).encode([{"prompt": "how many"}, {"prompt": user("how many")}])
    assert plain.text == chat.text
    assert plain.prompt_ids == (own.bos_token_id, *chat.prompt_ids)


@pytest.mark.parametrize("name", ALL)
def test_equal_rows_share_one_prompt_and_others_do_not(name: str) -> None:
    rows = [{"prompt": user("which")}, {"prompt": user("what")}, {"prompt": user("which"), "answer": "7"}]
    first, other, again = adapter(name).encode(rows)
    assert first is again
    assert first is not other


def test_equal_texts_with_different_pictures_stay_apart() -> None:
    image = picture(64, 48, 1)
    parts = [{"type": "image", "image": image, "max_pixels": 1024}, "which"]
    rows = [{"prompt": user("which", image)}, {"prompt": user("which", picture(64, 48, 2))}]
    prompts = adapter("qwen2_5_vl").encode([*rows, {"prompt": [{"role": "user", "content": parts}]}, rows[0]])
    assert len({id(prompt) for prompt in prompts}) == 3
    assert prompts[0] is prompts[3]


def by_pickle(prompt: Prompt) -> Prompt:
    return pickle.loads(pickle.dumps(prompt))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, by_pickle])
def test_prompts_can_be_copied_and_sent_to_other_processes(copied: Callable[[Prompt], Prompt], name: str) -> None:
    prompts = encode(name) if name != "text" else adapter(name).encode([{"prompt": "which"}])
    expected = collate(prompts, pad_token_id=0).model_inputs()
    found = collate([copied(prompt) for prompt in prompts], pad_token_id=0).model_inputs()
    assert all(found[key].equal(tensor) for key, tensor in expected.items())
    assert [image.key for image in copied(prompts[0]).images] == [image.key for image in prompts[0].images]


def test_no_rows_give_no_prompts() -> None:
    assert adapter("text").encode([]) == []


@pytest.mark.parametrize("name", ALL)
def test_ids_of_the_tokenizer(name: str) -> None:
    vocabulary, own = tokenizer().get_vocab(), adapter(name)
    vision = {vocabulary[f"<|{token}|>"] for token in VISION}
    assert own.pad_token_id == vocabulary["<|endoftext|>"]
    assert own.stop_ids == {vocabulary["<|im_end|>"]}
    assert own.vision_ids == (set() if name == "text" else vision)
    assert own.decode([*tokenizer()("seven dots")["input_ids"], vocabulary["<|im_end|>"], *vision]) == "seven dots"


def test_padding_falls_back_on_the_end_of_sequence() -> None:
    own = with_bos(TEMPLATE)
    own.pad_token = None
    assert load_adapter(own).pad_token_id == own.eos_token_id
    own.eos_token = None
    assert load_adapter(own).stop_ids == frozenset()
    with pytest.raises(ValueError, match="pad"):
        _ = load_adapter(own).pad_token_id


def test_an_ordinary_token_that_is_called_like_a_mark_is_only_text() -> None:
    """Aya's tiles are called TILE, which is a word too."""
    inner = Tokenizer(
        models.BPE(
            {"T": 0, "I": 1, "TI": 2, "L": 3, "E": 4, "LE": 5, "TILE": 6}, [("T", "I"), ("L", "E"), ("TI", "LE")]
        )
    )
    inner.add_special_tokens(["<image>", "<|IMG_PATCH|>", "TILE_1"])
    aya = FamilyAdapter(
        PreTrainedTokenizerFast(tokenizer_object=inner), load_adapter(tiny("aya_vision").processor).family
    )
    assert aya.vision_ids == set(inner.encode("<image><|IMG_PATCH|>TILE_1").ids)
    assert aya.encode([{"prompt": "TILE"}])[0].prompt_ids == (6,)
    with pytest.raises(ValueError, match="reserved TILE_1"):
        aya.encode([{"prompt": "TILE_1"}])


def test_a_tokenizer_without_the_placeholder_is_refused() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match=r"lacks the token <\|image_pad\|>"):
        FamilyAdapter(bare, adapter("qwen2_5_vl").family)


def test_a_processor_of_an_unknown_family_is_refused_by_name() -> None:
    class OtherProcessor:
        image_processor = tiny("qwen2_vl").processor.image_processor
        tokenizer = tokenizer()

    with pytest.raises(ValueError, match="OtherProcessor.*Qwen2VLProcessor"):
        load_adapter(OtherProcessor())


def test_a_saved_processor_is_loaded_by_path(tmp_path: Path) -> None:
    copy.deepcopy(tiny("qwen2_5_vl").processor).save_pretrained(tmp_path)  # saving marks the tokenizer
    (loaded,) = load_adapter(tmp_path).encode(mixed_rows()[:1])
    assert loaded.prompt_ids == encode("qwen2_5_vl")[0].prompt_ids
    assert loaded.forward_kwargs["pixel_values"].equal(encode("qwen2_5_vl")[0].forward_kwargs["pixel_values"])


def test_a_saved_tokenizer_is_loaded_by_path(tmp_path: Path) -> None:
    own = with_bos(TEMPLATE)
    own.save_pretrained(tmp_path)
    tiny("text").model.config.save_pretrained(tmp_path)
    loaded, here = load_adapter(str(tmp_path)), load_adapter(own)
    rows: list[dict[str, Any]] = [{"prompt": user("which")}, {"prompt": "which"}]
    assert [p.prompt_ids for p in loaded.encode(rows)] == [p.prompt_ids for p in here.encode(rows)]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"min_pixels": 2000, "max_pixels": 1000}, "min_pixels=2000 is above max_pixels=1000"),
        ({"max_pixels": -5}, "max_pixels must be a whole number"),
    ],
    ids=str,
)
def test_a_pixel_budget_that_cannot_be_kept_is_refused(budget: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_adapter(tiny("qwen2_5_vl").processor, **budget)


def test_a_pixel_budget_is_kept_against_the_processors_own_bounds() -> None:
    """The tiny processor takes 512 to 4096 pixels."""
    row = {"prompt": user("which", picture(200, 200, 1))}
    (prompt,) = load_adapter(tiny("qwen2_5_vl").processor, max_pixels=300).encode([row])
    assert int(prompt.forward_kwargs["image_grid_thw"].prod()) * 8 * 8 <= 300
    (prompt,) = load_adapter(tiny("qwen2_5_vl").processor, min_pixels=20_000, max_pixels=60_000).encode([row])
    assert int(prompt.forward_kwargs["image_grid_thw"].prod()) * 8 * 8 >= 20_000
    with pytest.raises(ValueError, match="row 0.*min_pixels=20000 is above the processor's own limit of 4096"):
        load_adapter(tiny("qwen2_5_vl").processor, min_pixels=20_000).encode([row])


LONG = {"prompt": user("which", picture(64, 64, 1), picture(64, 48, 2))}


def num_patches(prompt: Prompt) -> list[int]:
    return prompt.forward_kwargs["image_grid_thw"].prod(-1).tolist()


def test_a_prompt_of_just_the_longest_length_is_taken() -> None:
    length = adapter("qwen2_5_vl").encode([LONG])[0].num_tokens
    (prompt,) = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=length).encode([LONG])
    assert prompt.num_tokens == length
    with pytest.raises(
        PromptTooLong, match=rf"^row 7, column 'prompt': it has {length} tokens \(28 of pictures and videos\)"
    ):
        load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=length - 1).encode([LONG], [7])


def test_a_prompt_that_is_too_long_tells_its_place_among_the_rows() -> None:
    limited = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=30)
    with pytest.raises(PromptTooLong, match=r"^row 9, .* at most 30 "):
        limited.encode([{"prompt": "hi"}, {"prompt": user("which")}, LONG], [3, 4, 9])


@qwen
@pytest.mark.parametrize("room", [1, 8, 20])
@pytest.mark.parametrize("low", [256, 2000], ids="min_pixels={}".format)
def test_pictures_shrink_until_the_prompt_fits(name: str, room: int, low: int) -> None:
    """Also below the least that the run asks for: what must fit comes first."""
    (usual,) = adapter(name).encode([LONG])
    limit = usual.num_tokens - room
    shrinking = load_adapter(tiny(name).processor, max_prompt_length=limit, min_pixels=low, long_prompts="shrink")
    (prompt,) = shrinking.encode([LONG])
    assert prompt.num_tokens <= limit
    # What is left is the same prompt with its pictures at fewer pixels.
    texts = (usual.num_tokens - usual.num_image_tokens, prompt.num_tokens - prompt.num_image_tokens)
    assert texts[0] == texts[1]
    assert prompt.engine_ids == usual.engine_ids
    assert 0 < sum(num_patches(prompt)) < sum(num_patches(usual))
    assert [image.sha256 for image in prompt.images] == [image.sha256 for image in usual.images]
    assert all(dict(image.resize)["max_pixels"] for image in prompt.images), "an engine is to shrink them as well"


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ({"max_pixels": 600}, {"max_pixels": 600}),
        ({"resized_height": 32, "resized_width": 16}, {"resized_height": 32, "resized_width": 16}),
        ({"resized_height": 80, "resized_width": 96}, None),
        ({"min_pixels": 3000}, None),
    ],
    ids=str,
)
def test_shrinking_gives_no_picture_more_than_it_asks_for(own: dict[str, int], kept: dict[str, int] | None) -> None:
    pictures = [{"image": picture(64, 64, 1), **own}, picture(64, 64, 2), picture(64, 64, 3)]
    row = {"prompt": user("which"), "images": pictures}
    length = adapter("qwen2_5_vl").encode([row])[0].num_tokens
    shrinking = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=length - 4, long_prompts="shrink")
    (prompt,) = shrinking.encode([row])
    first, second, third = (dict(image.resize) for image in prompt.images)
    assert second == third
    assert prompt.num_tokens <= length - 4
    if "resized_height" in own and kept is None:  # what it asks for is too much
        sides = first["resized_height"], first["resized_width"]
        assert sides[0] * sides[1] < 80 * 96
        assert abs(sides[0] / sides[1] - 80 / 96) < 0.02
    elif kept is None:
        assert first["max_pixels"] == second["max_pixels"]
        assert first.get("min_pixels", 0) <= first["max_pixels"]
    else:
        assert first == kept


def test_shrinking_lets_no_picture_grow() -> None:
    """The second is over the processor's own limit, and the bound that makes the first one fit is not."""
    pictures = [{"image": picture(64, 64, 1), "resized_height": 80, "resized_width": 96}, picture(200, 200, 2)]
    row = {"prompt": user("which"), "images": pictures}
    (usual,) = adapter("qwen2_5_vl").encode([row])
    limit = usual.num_tokens - 1
    (prompt,) = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=limit, long_prompts="shrink").encode([row])
    assert prompt.num_tokens <= limit
    for found, before in zip(prompt.image_spans, usual.image_spans, strict=True):
        assert found.length <= before.length


def test_shrinking_gives_up_where_the_text_alone_is_too_long() -> None:
    shrinking = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=12, long_prompts="shrink")
    with pytest.raises(PromptTooLong, match="cannot be shrunk enough"):
        shrinking.encode([{"prompt": user("which " * 20, picture(64, 64, 1))}])
    with pytest.raises(PromptTooLong, match="cannot be shrunk enough"):
        shrinking.encode([{"prompt": user("which " * 20)}])


def test_short_prompts_are_left_as_they_are() -> None:
    shrinking = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=1000, long_prompts="shrink")
    for found, usual in zip(shrinking.encode(mixed_rows()), encode("qwen2_5_vl"), strict=True):
        assert found.prompt_ids == usual.prompt_ids
        assert [image.key for image in found.images] == [image.key for image in usual.images]


def test_a_pixel_budget_for_a_text_model_is_refused() -> None:
    with pytest.raises(ValueError, match="max_pixels is set, but the model takes no pictures"):
        load_adapter(tokenizer(), max_pixels=1000)
