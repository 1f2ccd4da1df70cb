"""Every family against its own processor and model in transformers, and what the library promises of all of them."""

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vlmroll_processors.families
from tiny_models import QWEN_FAMILIES, VISION_FAMILIES, mixed_rows, picture, tiny, user
from vlmroll_processors import PaddedBatch, Prompt, collate, load_adapter
from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.conformance import CHECKS, check
from vlmroll_processors.families import FAMILIES, TEXT, family_of
from vlmroll_processors.images import resized

Row = dict[str, Any]
Tensors = dict[str, torch.Tensor]

TOLERANCE = 1e-4  # float32, logits of size 1 to 10
NEEDS_A_PICTURE = ("paligemma", "paligemma2")
GRIDS = (*QWEN_FAMILIES, "glm4v", "glm46v")  # positions on three axes
SLOTS = ("smolvlm", "idefics3", "idefics2", "idefics2_split")  # pictures on an axis of their own
WRITTEN = {
    **dict.fromkeys(QWEN_FAMILIES, "<|vision_start|><|image_pad|><|vision_end|>"),
    **dict.fromkeys(("gemma3", "gemma3_panscan"), "<start_of_image>"),
    **dict.fromkeys(("pixtral", "mistral3"), "[IMG]"),
    **dict.fromkeys(("glm4v", "glm46v"), "<|begin_of_image|><|image|><|end_of_image|>"),
    **dict.fromkeys(("gemma4", "mllama"), "<|image|>"),
    "internvl": "<IMG_CONTEXT>",
    "kimi_k25": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    "cohere2_vision": "<|IMG_PATCH|>",
}
"""What stands for a picture in a text for the processor, where it is not `<image>`."""

families = pytest.mark.parametrize("name", VISION_FAMILIES)


@cache
def adapter(name: str) -> FamilyAdapter:
    return load_adapter(tiny(name).processor)


def rows_of(name: str) -> list[Row]:
    """Rows with 1, 3, 0 and 2 pictures, without the text where the family takes none."""
    return [row for i, row in enumerate(mixed_rows()) if i != 2 or name not in NEEDS_A_PICTURE]


def groups_of(name: str, rows: Sequence[Row]) -> list[list[Row]]:
    """The rows that the processor takes as one batch; Llama's takes no text beside pictures, and mixes numbers up."""
    return [[row] for row in rows] if name == "mllama" else [list(rows)]


def templated(name: str, rows: Sequence[Row], **options: Any) -> Tensors:
    """What `apply_chat_template` makes of the rows in one call; it changes messages in place."""
    return dict(
        tiny(name).processor.apply_chat_template(
            [copy.deepcopy(row["prompt"]) for row in rows],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            add_generation_prompt=True,
            processor_kwargs={"padding": True, "padding_side": "left", **options},
        )
    )


def processed(name: str, text: str, images: Sequence[Image.Image], **options: Any) -> Tensors:
    """What the processor itself makes of one text."""
    return dict(tiny(name).processor(text=[text], images=[list(images)], return_tensors="pt", **options))


def batch_of(name: str, rows: Sequence[Row], completions: Sequence[Sequence[int]] | None = None) -> PaddedBatch:
    own = adapter(name)
    return collate(own.encode(rows), completions, pad_token_id=own.pad_token_id)


def encode(name: str, row: Row, **options: Any) -> Prompt:
    own = load_adapter(tiny(name).processor, **options) if options else adapter(name)
    return own.encode([row], [7])[0]


def assert_equal(found: Prompt, expected: Prompt) -> None:
    assert found.prompt_ids == expected.prompt_ids
    assert found.forward_kwargs.keys() == expected.forward_kwargs.keys()
    for key, tensor in expected.forward_kwargs.items():
        assert found.forward_kwargs[key].equal(tensor), key


def changed(found: Prompt, usual: Prompt) -> bool:
    """Whether the tensors of the pictures differ."""
    pairs = [(found.forward_kwargs[key], usual.forward_kwargs[key]) for key in usual.forward_kwargs]
    return any(one.shape != other.shape or not one.equal(other) for one, other in pairs)


def logits_of(name: str, batch: PaddedBatch) -> list[torch.Tensor]:
    """[tokens, V] of each row's own tokens."""
    found: dict[int, torch.Tensor] = {}
    for piece in batch.pieces:
        with torch.no_grad():
            logits = tiny(name).model(**batch.model_inputs(piece)).logits
        for row, part in zip(piece.rows, logits, strict=True):
            found[row] = part[batch.attention_mask[row].bool()]
    return [found[row] for row in range(len(batch.input_ids))]


# The conformance kit


@families
def test_the_kit_passes(name: str) -> None:
    report = check(adapter(name), tiny(name).model)
    assert not report.failures, report
    assert [(outcome.name, outcome.result) for outcome in report.outcomes] == [(each, "passed") for each in CHECKS]
    assert {kind: word.partition(":")[0] for kind, word in report.abilities.items() if kind != "mixed batch"} == {
        "text only": "no" if name in NEEDS_A_PICTURE else "yes",
        "one picture": "yes",
        "many pictures": "yes",
        "video": "yes" if name in QWEN_FAMILIES else "no",
    }
    mixed = {"mllama": "yes, with a forward pass for each number of pictures"}
    if name in NEEDS_A_PICTURE:
        mixed[name] = report.abilities["text only"]
    assert report.abilities["mixed batch"] == mixed.get(name, "yes")
    assert "takes no videos" in report.abilities["video"] or name in QWEN_FAMILIES
    assert "takes no prompt without a picture" in report.abilities["text only"] or name not in NEEDS_A_PICTURE


# Tensors


@families
def test_a_mixed_batch_equals_the_processors(name: str) -> None:
    for rows in groups_of(name, rows_of(name)):
        found, expected = batch_of(name, rows).model_inputs(), templated(name, rows)
        expected.pop("labels", None)  # the prompt itself, by PaliGemma
        assert found.keys() == {*expected, "position_ids"}
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype, key
            assert found[key].equal(tensor), key


@families
def test_positions_equal_the_models(name: str) -> None:
    rows = rows_of(name)
    batch = batch_of(name, rows, [(20, 21), (22,), (23, 24, 25), ()][: len(rows)])
    if name in GRIDS:
        inputs = batch.model_inputs()
        found = inputs.pop("position_ids")
        del inputs["pixel_values"]
        expected, _ = tiny(name).model.model.get_rope_index(**inputs)
        real = batch.attention_mask.bool().expand_as(expected)
        assert found[real].equal(expected[real])
        assert found.shape == (3, *batch.input_ids.shape)
        return
    for piece in batch.pieces:
        for row, positions in zip(piece.rows, piece.forward_kwargs["position_ids"], strict=True):
            mask = batch.attention_mask[row].tolist()
            assert [place for place, real in zip(positions.tolist(), mask, strict=True) if real] == list(
                range(sum(mask))
            )


@families
def test_logits_equal_those_of_the_processors_output(name: str) -> None:
    for rows in groups_of(name, rows_of(name)):
        expected = templated(name, rows)
        expected.pop("labels", None)
        with torch.no_grad():
            theirs = tiny(name).model(**expected).logits
        mask = expected["attention_mask"].bool()
        assert theirs[mask].std() > 0.1, "the logits must depend on something"
        for found, row, real in zip(logits_of(name, batch_of(name, rows)), theirs, mask, strict=True):
            torch.testing.assert_close(found, row[real], rtol=0, atol=TOLERANCE)


PICTURES = [picture(*size, seed) for seed, size in enumerate([(64, 48), (120, 40), (40, 100), (16, 16), (150, 20)])]
PIECES = ("which digit ?", "a", " ", "\n", "  x  ", "<", "> .", "7\n\n8", "日本 é", "image", "Assistant:")


def draw_chat(data: st.DataObject, name: str) -> list[Row]:
    """Turns of text and pictures in any order; the last text is not blank, which some templates would drop."""
    text: st.SearchStrategy[Row] = st.sampled_from(PIECES).map(lambda text: {"type": "text", "text": text})
    image: st.SearchStrategy[Row] = st.sampled_from(PICTURES).map(lambda image: {"type": "image", "image": image})
    turns = [data.draw(st.lists(text | image, min_size=1, max_size=5))]
    if data.draw(st.booleans()):
        turns += [[data.draw(text)], data.draw(st.lists(text | image, min_size=1, max_size=3))]
    if name in NEEDS_A_PICTURE:
        turns[0].append({"type": "image", "image": PICTURES[0]})
    turns[-1].append({"type": "text", "text": "which ?"})
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(turns)]


@families
@settings(max_examples=4)
@given(data=st.data())
def test_any_chat_equals_apply_chat_template(name: str, data: st.DataObject) -> None:
    row = {"prompt": draw_chat(data, name)}
    found, expected = batch_of(name, [row]).model_inputs(), templated(name, [row])
    expected.pop("labels", None)
    assert found.keys() == {*expected, "position_ids"}
    for key, tensor in expected.items():
        assert found[key].shape == tensor.shape, key
        assert found[key].equal(tensor), key


@families
def test_an_assistant_turn_at_the_end_is_continued(name: str) -> None:
    turns = [
        *user("which digit ?", PICTURES[0]),
        {"role": "assistant", "content": [{"type": "text", "text": "it is "}]},
    ]
    prompt = encode(name, {"prompt": turns})
    text = tiny(name).processor.apply_chat_template(copy.deepcopy(turns), continue_final_message=True)
    assert prompt.text == text
    assert text.endswith("it is ")
    bos = tiny(name).tokenizer.bos_token
    options = {"add_special_tokens": False} if bos is not None and text.startswith(bos) else {}
    assert list(prompt.prompt_ids) == processed(name, text, PICTURES[:1], **options)["input_ids"][0].tolist()


# Plain strings and the begin token


@families
@pytest.mark.parametrize("text", ["<image>which <image> digit ?", "see <image><image>", "what<image>? <image>word <b"])
def test_markers_in_a_plain_string_equal_the_processors(name: str, text: str) -> None:
    images = PICTURES[:2]
    found = encode(name, {"prompt": text, "images": images})
    expected = processed(name, text.replace("<image>", WRITTEN.get(name, "<image>")), images)
    ids = expected["input_ids"][0].tolist()
    if name == "mllama":  # its processor writes a begin token, and its tokenizer a second one
        bos = tiny(name).tokenizer.bos_token_id
        assert ids.count(bos) == 2
        ids = [bos, *(token for token in ids if token != bos)]
    assert list(found.prompt_ids) == ids
    assert found.forward_kwargs["pixel_values"].equal(expected["pixel_values"])


@families
def test_a_plain_string_without_pictures_equals_the_tokenizers(name: str) -> None:
    if name in NEEDS_A_PICTURE:
        with pytest.raises(ValueError, match="^row 7: PaliGemma takes no prompt without a picture"):
            encode(name, {"prompt": "how many dots ?"})
        return
    expected = tiny(name).processor(text=["how many dots ?"])["input_ids"][0]
    bos = tiny(name).tokenizer.bos_token_id
    expected = [bos, *expected[2:]] if name == "mllama" else expected
    assert list(encode(name, {"prompt": "how many dots ?"}).prompt_ids) == list(expected)


@families
def test_a_chat_has_exactly_one_begin_token(name: str) -> None:
    """Whoever writes it, template or tokenizer; Qwen and its kin have none, and Kimi's template writes none."""
    bos = tiny(name).tokenizer.bos_token_id
    wanted = 0 if bos is None or name == "kimi_k25" else 1
    for prompt in adapter(name).encode(rows_of(name)):
        assert prompt.prompt_ids.count(bos) == prompt.engine_ids.count(bos) == wanted  # pyright: ignore
        assert wanted == 0 or name in NEEDS_A_PICTURE or prompt.prompt_ids[0] == prompt.engine_ids[0] == bos


@pytest.mark.parametrize("name", ["gemma3", "gemma3_panscan", "gemma4", "mllama", "llava", "pixtral", "aya_vision"])
def test_a_plain_string_starts_with_the_begin_token(name: str) -> None:
    bos = tiny(name).tokenizer.bos_token_id
    for row in ({"prompt": "how many"}, {"prompt": "<image> how many", "image": PICTURES[0]}):
        prompt = encode(name, row)
        assert prompt.prompt_ids[0] == prompt.engine_ids[0] == bos
        assert prompt.prompt_ids.count(bos) == 1


# Order, repeats and sizes


@families
def test_order_and_neighbours_change_no_prompt(name: str) -> None:
    rows = rows_of(name)
    alone = [encode(name, row) for row in rows]
    for order in ([*range(len(rows))], [*range(len(rows))][::-1], [1, 0, *range(2, len(rows)), 1]):
        for i, prompt in zip(order, adapter(name).encode([rows[i] for i in order]), strict=True):
            assert_equal(prompt, alone[i])


@families
def test_equal_rows_share_one_prompt_and_equal_pictures_their_tensors(name: str) -> None:
    image = picture(64, 48, 1)
    one, two = {"prompt": user("which", image)}, {"prompt": user("what", image.copy())}
    first, other, again = adapter(name).encode([one, two, {"prompt": user("which"), "image": image}])
    assert first is again
    assert first is not other
    assert first.forward_kwargs["pixel_values"] is other.forward_kwargs["pixel_values"]


KEYS: tuple[dict[str, int], ...] = (
    {"max_pixels": 1500},
    {"min_pixels": 9000},
    {"min_pixels": 1000, "max_pixels": 2000},
    {"resized_height": 40, "resized_width": 30},
    {"resized_height": 40, "resized_width": 30, "max_pixels": 800},
)
NOT_QWEN = tuple(name for name in VISION_FAMILIES if name not in QWEN_FAMILIES)  # those resize by other rules


@pytest.mark.parametrize("name", NOT_QWEN)
@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_size_keys_of_a_picture_resize_it_beforehand(name: str, keys: dict[str, int]) -> None:
    first, second = picture(90, 70, 3), picture(64, 48, 1)
    parts: list[Any] = [{"type": "image", "image": first, **keys}, {"type": "image", "image": second}, "which"]
    row: Row = {"prompt": [{"role": "user", "content": parts}]}
    usual, found, again = adapter(name).encode([{"prompt": user("which", first, second)}, row, row])
    assert_equal(found, encode(name, {"prompt": user("which", resized(first, keys), second)}))
    assert found is again
    assert changed(found, usual), "the keys must matter"
    column = encode(name, {"prompt": user("which"), "images": [{"image": first, **keys}, second]})
    assert_equal(column, found)


@pytest.mark.parametrize("name", NOT_QWEN)
@pytest.mark.parametrize(
    "budget", [{"max_pixels": 1500}, {"min_pixels": 4000}, {"min_pixels": 2000, "max_pixels": 3000}]
)
def test_the_runs_budget_resizes_every_picture_beforehand(name: str, budget: dict[str, int]) -> None:
    first, second = picture(90, 70, 3), picture(40, 30, 1)
    found = encode(name, {"prompt": user("which", first, second)}, **budget)
    assert_equal(found, encode(name, {"prompt": user("which", resized(first, budget), resized(second, budget))}))
    assert changed(found, encode(name, {"prompt": user("which", first, second)})), "the budget must matter"
    own = {"max_pixels": 800, "min_pixels": 1}
    first_alone = encode(name, {"prompt": user("which"), "images": [{"image": first, **own}, second]}, **budget)
    twin = encode(name, {"prompt": user("which", resized(first, own), resized(second, budget))})
    assert_equal(first_alone, twin)


@pytest.mark.parametrize("name", QWEN_FAMILIES)
@pytest.mark.parametrize(
    "budget", [{"max_pixels": 1500}, {"min_pixels": 4000}, {"min_pixels": 2000, "max_pixels": 3000}]
)
def test_the_runs_budget_is_the_processors_own_size_in_qwen(name: str, budget: dict[str, int]) -> None:
    images, processor = [picture(90, 70, 3), picture(40, 30, 1)], tiny(name).processor
    low, high = (processor.image_processor.size[f"{edge}_edge"] for edge in ("shortest", "longest"))
    size = {"shortest_edge": budget.get("min_pixels", low), "longest_edge": budget.get("max_pixels", high)}
    expected = templated(name, [{"prompt": user("which", *images)}], images_kwargs={"size": size})
    prompt = encode(name, {"prompt": user("which", *images)}, **budget)
    assert list(prompt.prompt_ids) == expected["input_ids"][0].tolist()
    assert prompt.forward_kwargs["pixel_values"].equal(expected["pixel_values"])
    assert prompt.forward_kwargs["image_grid_thw"].equal(expected["image_grid_thw"])
    assert changed(prompt, encode(name, {"prompt": user("which", *images)})), "the budget must matter"


# Ids that are never sampled


@families
def test_vision_ids_never_decode_into_text(name: str) -> None:
    own, tokenizer = adapter(name), tiny(name).tokenizer
    words = tokenizer("seven dots", add_special_tokens=False)["input_ids"]
    for vision_id in own.vision_ids:
        assert own.decode([vision_id]) == ""
        assert own.decode([*words, vision_id, *words]) == "seven dotsseven dots"
    assert own.decode([*words, *own.vision_ids, *own.stop_ids]) == "seven dots"


@families
def test_vision_ids_are_those_of_pictures_and_no_others(name: str) -> None:
    own, tokenizer = adapter(name), tiny(name).tokenizer
    shown = {id for prompt in own.encode(rows_of(name)[:2]) for id in prompt.prompt_ids} & own.vision_ids
    assert shown, "some stand in the prompts"
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, *own.stop_ids}
    assert not own.vision_ids & ends
    assert all(tokenizer.added_tokens_decoder[id].special for id in own.vision_ids)
    texts = tokenizer("which picture shows 7 dots ? <image> tile", add_special_tokens=False)["input_ids"]
    image = tokenizer.get_vocab().get("<image>")
    assert not own.vision_ids & {id for id in texts if id != image}


@families
def test_reserved_tokens_in_the_text_of_a_row_are_refused(name: str) -> None:
    image = PICTURES[0]
    for token in tiny(name).tokenizer.convert_ids_to_tokens(sorted(adapter(name).vision_ids)):
        text = f"the sign {token} here"
        chats: list[Any] = [
            user(text, image),
            [{"role": "user", "content": text}],
            [*user("which", image), {"role": "assistant", "content": text}],
            [{"role": "system", "content": text}, *user("which", image)],
        ]
        for prompt in (*chats, text):
            with pytest.raises(
                ValueError, match=r"^row 7, column 'prompt': the text holds the reserved (.+);"
            ) as caught:
                encode(name, {"prompt": prompt})
            named = str(caught.value).partition("the reserved ")[2].partition(";")[0]
            assert named == token or (name == "aya_vision" and token.startswith(named)), "TILE is part of TILE_1"


@families
def test_a_placeholder_put_together_from_two_parts_is_refused(name: str) -> None:
    slot = adapter(name).family.slot
    feature = adapter(name).family.feature_of("image")
    for token in {slot, feature}:
        parts = [{"type": "image", "image": PICTURES[0]}, token[:2], token[2:], " which"]
        with pytest.raises(ValueError, match="^row 7, column 'prompt'"):
            encode(name, {"prompt": [{"role": "user", "content": parts}]})


# What is special in some of them


def test_llamas_batches_come_in_pieces_by_number_of_pictures() -> None:
    rows = [*mixed_rows(), *mixed_rows()[::-1]]
    completions = [[20 + i, 30, 31][: 1 + i % 3] for i in range(len(rows))]
    batch = batch_of("mllama", rows, completions)
    assert [piece.rows for piece in batch.pieces] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    text = batch.pieces[2].forward_kwargs
    assert text.keys() == {"position_ids"}
    assert all(len(piece.forward_kwargs["pixel_values"]) == 2 for i, piece in enumerate(batch.pieces) if i != 2)
    together = logits_of("mllama", batch)
    for row, completion, found in zip(rows, completions, together, strict=True):
        (alone,) = logits_of("mllama", batch_of("mllama", [row], [completion]))
        torch.testing.assert_close(found, alone, rtol=0, atol=TOLERANCE)


def test_llamas_completions_see_what_the_prompts_last_token_sees() -> None:
    batch = batch_of("mllama", mixed_rows()[1:2], [[20, 21, 22]])
    mask = batch.forward_kwargs["cross_attention_mask"][0]
    assert mask.shape == (batch.input_ids.shape[1], 3, 4)
    assert (mask[-4:] == mask[-4]).all()
    assert mask[-1].any(dim=-1).all(), "all three pictures, which stand side by side"


@pytest.mark.parametrize("name", NEEDS_A_PICTURE)
def test_paligemmas_completions_are_causal_and_its_prompts_are_not(name: str) -> None:
    batch = batch_of(name, rows_of(name), [[20, 21], [22], [23, 24, 25]])
    types = batch.forward_kwargs["token_type_ids"]
    real = batch.attention_mask.bool()
    width = batch.completion_mask.shape[1]
    assert (types[:, -width:] == 1)[batch.completion_mask.bool()].all()
    assert (types[:, :-width] == 0).all()
    assert types[real].sum() == batch.completion_mask.sum()
    # The next token leaves the logits of those before it alone, and would not if it were of the prompt's block.
    (short,) = logits_of(name, batch_of(name, rows_of(name)[:1], [[20, 21]]))
    (long,) = logits_of(name, batch_of(name, rows_of(name)[:1], [[20, 21, 40]]))
    torch.testing.assert_close(long[:-1], short, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", SLOTS)
def test_slots_without_a_picture_are_exactly_zero(name: str) -> None:
    prompts = adapter(name).encode(rows_of(name))
    batch = collate(prompts, pad_token_id=0)
    pixels, mask = (batch.forward_kwargs[key] for key in ("pixel_values", "pixel_attention_mask"))
    tiles = [prompt.forward_kwargs["pixel_values"].shape[1] if prompt.images else 0 for prompt in prompts]
    assert tiles[2] == 0
    assert max(tiles) > min(tiles[:2]) > 0
    assert pixels.shape[1] == mask.shape[1] == max(tiles)
    for row, count in enumerate(tiles):
        assert not pixels[row, count:].any(), "the model takes a slot for padding if all of it is exactly 0"
        assert not mask[row, count:].any()
        assert pixels[row, :count].flatten(1).any(dim=1).all()


@pytest.mark.parametrize("name", ["gemma3", "gemma3_panscan", "gemma4"])
def test_gemmas_pictures_are_marked_and_completions_are_not(name: str) -> None:
    key = "mm_token_type_ids" if name == "gemma4" else "token_type_ids"
    batch = batch_of(name, rows_of(name), [[20, 21], [22], [23], []])
    feature = tiny(name).tokenizer.convert_tokens_to_ids("<|image|>" if name == "gemma4" else "<image_soft_token>")
    marks = batch.forward_kwargs[key]
    assert marks.equal((batch.input_ids == feature).long())
    assert marks.any(dim=1).tolist() == [True, True, False, True]


def test_onevision_cuts_tiles_for_the_only_picture_of_a_prompt() -> None:
    image = PICTURES[1]
    one, two = adapter("llava_onevision").encode(
        [{"prompt": user("which", image)}, {"prompt": user("which", image, image)}]
    )
    assert one.forward_kwargs["pixel_values"].shape[:2] == (1, 4)
    assert two.forward_kwargs["batch_num_images"].tolist() == [2]
    assert one.image_spans[0].length > two.image_spans[0].length == two.image_spans[1].length


# A row's own numbers in any batch


@cache
def prompts(name: str) -> tuple[Prompt, ...]:
    """Rows with 0 to 3 pictures, chats and plain strings."""
    rows = [*rows_of(name), {"prompt": "red <image> dots", "image": picture(40, 40, 7)}]
    if name not in NEEDS_A_PICTURE:
        rows += [{"prompt": "7"}]
    return tuple(adapter(name).encode(rows))


@pytest.mark.parametrize("name", NOT_QWEN)  # test_invariance.py has Qwen and text, at more length
@settings(max_examples=4)
@given(data=st.data())
def test_a_row_has_the_same_logits_in_any_batch(name: str, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(prompts(name)), min_size=2, max_size=4))
    usable = sorted(set(range(len(tiny(name).tokenizer))) - adapter(name).vision_ids)
    completion = st.lists(st.sampled_from(usable), max_size=5)
    tails = [data.draw(completion) for _ in chosen]
    multiple = data.draw(st.sampled_from([None, 8, 32]))
    together = logits_of(
        name, collate(chosen, tails, pad_token_id=data.draw(st.sampled_from(usable)), pad_to_multiple_of=multiple)
    )
    for found, prompt, tail in zip(together, chosen, tails, strict=True):
        (alone,) = logits_of(name, collate([prompt], [tail], pad_token_id=0))
        torch.testing.assert_close(found, alone, rtol=0, atol=TOLERANCE)


# The table itself


def test_each_processor_is_one_of_transformers_and_has_one_family() -> None:
    names = [name for family in FAMILIES for name in family.processors]
    assert len(names) == len(set(names))
    for name in names:
        assert isinstance(getattr(transformers, name), type)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_the_tiny_models_show_every_family() -> None:
    shown = {adapter(name).family.name for name in VISION_FAMILIES}
    assert shown == {family.name for family in FAMILIES}
    assert all(type(tiny(name).processor).__name__ in adapter(name).family.processors for name in VISION_FAMILIES)
    assert not any(adapter(name).family.inferred for name in VISION_FAMILIES)


def test_a_tokenizer_is_of_the_text_family_and_an_unknown_processor_of_none() -> None:
    class OtherProcessor:
        tokenizer = tiny("llava").tokenizer

    assert family_of(tiny("text").processor) is TEXT
    assert family_of(tiny("llava").tokenizer) is TEXT
    assert family_of(OtherProcessor()) is None


FOLDER = Path(vlmroll_processors.families.__file__).parent
SHARED = ("__init__.py", "base.py", "generic.py", "positions.py", "qwen_reading.py")
ROWS_OF_DATA = sorted(path.name for path in FOLDER.glob("*.py") if path.name not in SHARED)


@pytest.mark.parametrize("file", ROWS_OF_DATA)
def test_a_family_is_one_short_file(file: str) -> None:
    assert len((FOLDER / file).read_text(encoding="utf-8").splitlines()) <= 60
