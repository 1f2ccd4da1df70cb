"""The next turn of a conversation against the whole conversation encoded at once, and what templates do with tools."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tiny_models import QWEN_FAMILIES, VISION_FAMILIES, picture, tiny, user
from vlmroll_processors import JoinKind, Prompt, collate, load_adapter
from vlmroll_processors.adapter import FamilyAdapter

Message = dict[str, Any]

NEEDS_A_PICTURE = ("paligemma", "paligemma2")
IN_A_USER_TURN = ("pixtral", "mistral3", "aya_vision", "cohere2_vision", *NEEDS_A_PICTURE)
"""Tiny templates that write the role tool as they would any word."""
GRIDS = (*QWEN_FAMILIES, "glm4v", "glm46v")
NEW = (picture(120, 40, 11), picture(40, 72, 12))
TOLERANCE = 1e-4

every = pytest.mark.parametrize("name", ["text", *VISION_FAMILIES])
families = pytest.mark.parametrize("name", VISION_FAMILIES)


@cache
def adapter(name: str) -> FamilyAdapter:
    return load_adapter(tiny(name).processor)


def templated(template: str, name: str = "qwen2_5_vl", **options: Any) -> FamilyAdapter:
    """An adapter whose processor has another chat template."""
    processor = copy.copy(tiny(name).processor)
    processor.chat_template = template
    return load_adapter(processor, **options)


def content(text: str, *pictures: Image.Image) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}, *({"type": "image", "image": each} for each in pictures)]


def result(text: str, *pictures: Image.Image, name: str = "zoom") -> Message:
    return {"role": "tool", "name": name, "content": content(text, *pictures)}


def ids_of(own: FamilyAdapter, text: str) -> list[int]:
    return own.tokenizer(text, add_special_tokens=False)["input_ids"]


def start_of(name: str, count: int) -> list[Message]:
    """A user message with 0 or 1 pictures, where the family takes as many."""
    count = max(count, int(name in NEEDS_A_PICTURE))
    return user("which digit ?", *([picture(64, 48, 1)] * count if name != "text" else []))


def encode(own: FamilyAdapter, messages: Sequence[Message], **columns: Any) -> Prompt:
    return own.encode([{"prompt": list(messages), **columns}])[0]


def said(name: str, words: str = "the larger") -> list[int]:
    """What the model says: tiny LLaVA writes a space before it, which its header does not."""
    return ids_of(adapter(name), f" {words}" if name in ("llava", "llava_next") else words)


def assert_same(found: Prompt, expected: Prompt, skipped: Sequence[str] = ()) -> None:
    assert found.prompt_ids == expected.prompt_ids
    assert found.engine_ids == expected.engine_ids
    assert [one.key for one in found.images] == [one.key for one in expected.images]
    assert found.image_spans == expected.image_spans
    assert found.batch_key == expected.batch_key
    assert found.join == expected.join
    assert found.forward_kwargs.keys() == expected.forward_kwargs.keys()
    for key, tensor in expected.forward_kwargs.items():
        if key not in skipped:
            assert found.forward_kwargs[key].equal(tensor), key
            assert found.forward_kwargs[key].dtype == tensor.dtype, key


# The whole conversation is the oracle


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 2])
@every
def test_the_next_turn_is_the_whole_conversation(name: str, count: int, before: int, role: str) -> None:
    if count and name in ("text", *NEEDS_A_PICTURE):
        pytest.skip("no pictures behind the first turn")
    own, first = adapter(name), start_of(name, before)
    new = result("the sum is 4", *NEW[:count])
    given = new if role == "tool" else {"role": "user", "content": new["content"]}
    written = given
    if role == "tool" and name in IN_A_USER_TURN:
        text = {**new["content"][0], "text": "zoom returned:\nthe sum is 4"}
        written = {"role": "user", "content": [text, *new["content"][1:]]}
    whole = encode(own, [*first, {"role": "assistant", "content": "the larger"}, written])
    start = encode(own, first)
    found = own.next_turn(start, said(name), [given])
    if name == "llava_onevision" and before and count:  # see below
        assert found.num_tokens > start.num_tokens
        return
    # Behind a completion PaliGemma's text sees what is before it alone, as the completion does.
    assert_same(found, whole, ("token_type_ids",) if name in NEEDS_A_PICTURE else ())


@every
def test_several_turns_are_the_whole_conversation(name: str) -> None:
    own, messages = adapter(name), start_of(name, 1)
    pictures = [] if name in ("text", *NEEDS_A_PICTURE) else list(NEW)
    found, whole = encode(own, messages), list(messages)
    for i, words in enumerate(("the larger", "and how many")):
        new = {"role": "user", "content": content("dots ?", *pictures[i : i + 1])}
        whole += [{"role": "assistant", "content": words}, new]
        found = own.next_turn(found, said(name, words), [new])
    if name != "llava_onevision":
        assert_same(found, encode(own, whole), ("token_type_ids",) if name in NEEDS_A_PICTURE else ())
    assert len(found.units) == len(found.images) == (1 + len(pictures) if name != "text" else 0)


@every
def test_a_sampled_stop_token_is_not_written_again(name: str) -> None:
    own = adapter(name)
    start = encode(own, start_of(name, 0))
    words, new = said(name), [{"role": "user", "content": "how many"}]
    plain = own.next_turn(start, words, new)
    rest = plain.prompt_ids[start.num_tokens + len(words) :]
    added = own.tokenizer.added_tokens_decoder
    if rest[0] not in added:  # the template ends a turn with text
        stop = own.tokenizer.eos_token_id
        found = own.next_turn(start, [*words, stop], new)
        assert found.prompt_ids == (*start.prompt_ids, *words, stop, *rest)
        return
    found = own.next_turn(start, [*words, rest[0]], new)
    assert_same(found, plain)


@pytest.mark.parametrize("name", GRIDS)
def test_positions_are_the_model_s(name: str) -> None:
    own = adapter(name)
    prompt = encode(own, start_of(name, 1))
    for i in range(2):
        prompt = own.next_turn(prompt, said(name), [result("4", *NEW[: i + 1])])
    inputs = collate([prompt], pad_token_id=own.pad_token_id).model_inputs()
    found = inputs.pop("position_ids")
    del inputs["pixel_values"]
    expected, _ = tiny(name).model.model.get_rope_index(**inputs)
    assert found.equal(expected)


# The model takes what comes of it


def logits_of(name: str, prompt: Prompt, completion: Sequence[int] = ()) -> torch.Tensor:
    """[tokens, V]"""
    batch = collate([prompt], [completion], pad_token_id=adapter(name).pad_token_id)
    with torch.no_grad():
        return tiny(name).model(**batch.model_inputs()).logits[0]


@pytest.mark.parametrize("count", [0, 1, 2])
@every
def test_a_turn_leaves_the_logits_of_what_was_before(name: str, count: int) -> None:
    if count and name in ("text", *NEEDS_A_PICTURE):
        pytest.skip("no pictures behind the first turn")
    own = adapter(name)
    start = encode(own, start_of(name, 1))
    words = said(name)
    found = own.next_turn(start, words, [result("4", *NEW[:count])])
    before, after = logits_of(name, start, words), logits_of(name, found)
    assert after.isfinite().all()
    difference = (after[: len(before)] - before).abs().max()
    if name == "mllama" and count:
        # Its text before the first picture attends to all pictures that there are.
        assert difference > TOLERANCE
    else:
        assert difference < TOLERANCE


@families
def test_the_first_values_of_a_token_stay(name: str) -> None:
    own = adapter(name)
    for before in (0, 1):
        start = encode(own, start_of(name, before))
        pictures = () if name in NEEDS_A_PICTURE else NEW
        found = own.next_turn(start, said(name), [result("4", *pictures)])
        for key, tensor in found.forward_kwargs.items():
            rule = found.join[key]
            if name == "mllama" and key == "cross_attention_mask":  # new pictures make it wider
                assert not tensor[: start.num_tokens, before:].any()
                tensor = tensor[:, :before]
            if rule.kind is JoinKind.TOKENS and key in start.forward_kwargs:
                assert tensor.narrow(rule.token_axis, 0, start.num_tokens).equal(start.forward_kwargs[key]), key


@every
def test_without_new_pictures_the_tensors_are_the_prompt_s(name: str) -> None:
    own = adapter(name)
    start = encode(own, start_of(name, 1))
    found = own.next_turn(start, said(name), [result("4")])
    media = [key for key, rule in found.join.items() if rule.kind is not JoinKind.TOKENS]
    for key in media:
        assert found.forward_kwargs.get(key) is start.forward_kwargs.get(key)
    assert found.images == start.images
    assert found.units == start.units


@pytest.mark.parametrize("name", NEEDS_A_PICTURE)
def test_what_follows_a_completion_sees_what_is_before_it_alone(name: str) -> None:
    own = adapter(name)
    start = encode(own, start_of(name, 1))
    found = own.next_turn(start, said(name), [result("4")])
    kinds = found.forward_kwargs["token_type_ids"].tolist()
    assert kinds == [0] * start.num_tokens + [1] * (found.num_tokens - start.num_tokens)


def test_pictures_of_a_turn_are_processed_with_one_another() -> None:
    """The picture of each turn is cut into tiles, which only a picture that is alone in its turn is."""
    name = "llava_onevision"
    own = adapter(name)
    start = encode(own, start_of(name, 1))
    found = own.next_turn(start, said(name), [result("4", NEW[0])])
    assert found.forward_kwargs["batch_num_images"].tolist() == [1, 1]
    alone = encode(own, user("4", NEW[0]))
    assert found.units[1] == alone.units[0]
    assert found.units[1].num_features > encode(own, user("4", *NEW)).units[0].num_features / 2
    assert logits_of(name, found).isfinite().all()
    two = own.next_turn(start, said(name), [result("4", *NEW)])
    assert two.forward_kwargs["batch_num_images"].tolist() == [1, 2]
    assert [span.length for span in two.image_spans[1:]] == [
        span.length for span in encode(own, user("4", *NEW)).image_spans
    ]
    assert logits_of(name, two).isfinite().all()


# Sampled ids stay


@given(data=st.data())
def test_sampled_ids_are_never_read_again(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["text", "qwen2_5_vl", "llava", "idefics3"]))
    own = adapter(name)
    ordinary = sorted(set(range(len(own.tokenizer))) - set(own.tokenizer.added_tokens_decoder))
    lossy = [own.tokenizer.convert_tokens_to_ids(letter) for letter in "which"]
    assert ids_of(own, "which") != lossy
    prompt = encode(own, start_of(name, data.draw(st.integers(0, 1))))
    expected = list(prompt.prompt_ids), list(prompt.engine_ids)
    for _ in range(data.draw(st.integers(1, 3))):
        sampled = data.draw(st.just(lossy) | st.lists(st.sampled_from(ordinary), max_size=8))
        pictures = NEW[: data.draw(st.integers(0, 2))] if name != "text" else ()
        later = own.next_turn(prompt, sampled, [result("4", *pictures)])
        for before, found in zip(expected, (later.prompt_ids, later.engine_ids), strict=True):
            before += sampled
            assert found[: len(before)] == tuple(before)
            before[:] = found
        assert len(later.images) == len(prompt.images) + len(pictures)
        feature = own.tokenizer.convert_tokens_to_ids(own.family.feature_of("image")) if pictures else -1
        assert all(feature in later.prompt_ids[s.offset : s.offset + s.length] for s in later.image_spans if pictures)
        slot = own.tokenizer.convert_tokens_to_ids(own.family.slot) if own.family.slot else -1
        assert later.engine_ids.count(slot) == len(later.images)
        prompt = later


# Templates in the styles that there are

CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "\n</tool_call>{% endfor %}"
)
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)
TEXTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content if p.type == 'text' %}"
    "{{ p.text }}{% endfor %}{% endif %}"
)
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WRAPPED = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\\n' }}<tool_response>\n"
    + PARTS
    + "{{ '\\n' }}"
    "</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    + PARTS
    + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + GENERATION
)
"""Results in a user's turn; thoughts in the last turn alone, as in Qwen 3."""
DROPPED = WRAPPED.replace("<tool_response>\n" + PARTS, "<tool_response>\n" + TEXTS)
"""The role tool has texts alone."""
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('single tool-calls only') }}{% endif %}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{% elif m.role == 'tool' %}{{ m.content | tojson }}"
    "{% elif m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|image|>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Results as JSON, whatever they are; one call alone, as in Llama 3."""
ORDERED = (
    "{{ bos_token }}{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST]{% for p in m.content %}{{ '[IMG]' if p.type == 'image' else p.text }}{% endfor %}"
    "[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content if m.content is string else m.content[0].text }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}"
    "{% endif %}[TOOL_CALLS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ m.content if m.content is string else m.content[0].text }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Order and the ids of calls are checked, as in Mistral's."""
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for p in m.content %}{{ '<start_of_image>' if p.type == 'image' else p.text | trim }}"
    "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""User and assistant alternate and there is no other role, as in Gemma's."""
SAME_TURN = (
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if m.role == 'user' or messages[loop.index0 - 1].role == 'user' %}<|turn>{{ m.role }}\n{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "{% set next = namespace(any=false) %}{% if m.tool_calls %}"
    "{% for r in messages[loop.index0 + 1:] if r.role == 'tool' %}{% set next.any = true %}"
    "<result>{{ r.name }}={{ r.content[0].text }}{% for p in r.content if p.type == 'image' %}<|image|>{% endfor %}"
    "</result>{% endfor %}{% if not next.any %}<result>{% endif %}{% endif %}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{{ '<|image|>' if p.type == 'image' else p.text }}{% endfor %}"
    "{% endif %}{% if not m.tool_calls %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
"""Results go into the turn of the calls, before its text, as in Gemma 4's."""
PRINTED = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[A] {% endif %}"
)
IN_ROLE = "results stand in messages of the role tool"
APART = "results stand in messages of the role tool, and their pictures in a user message behind them"
IN_USER = "results stand in a user message"


def added(own: FamilyAdapter, messages: Sequence[Message], completion: Sequence[int] = (), **options: Any) -> str:
    """What a turn adds behind the sampled one; engine ids have as many slots as there are pictures."""
    start = encode(own, user("x"))
    later = own.next_turn(start, completion, messages, **options)
    if own.family.slot:
        slot = own.tokenizer.convert_tokens_to_ids(own.family.slot)
        parts = [part for message in messages for part in message["content"] if not isinstance(part, str)]
        assert later.engine_ids.count(slot) == sum(part["type"] == "image" for part in parts) == len(later.images)
    return later.text[len(start.text + own.tokenizer.decode(list(completion))) :]


SLOT = "<|vision_start|><|image_pad|><|vision_end|>"
TWO = [result("one", NEW[0]), result("two", NEW[1], name="crop")]


def test_results_are_wrapped_and_earlier_thoughts_dropped() -> None:
    own = templated(WRAPPED, "qwen3_vl")
    assert own.check_tools(pictures=False) == own.check_tools(pictures=True) == IN_ROLE
    text = (
        f"<|im_start|>user\n<tool_response>\none{SLOT}\n</tool_response>\n<tool_response>\ntwo{SLOT}\n</tool_response>"
    )
    text += "<|im_end|>\n<|im_start|>assistant\n"
    assert added(own, TWO) == f"<|im_end|>\n{text}"
    assert added(own, TWO, [own.tokenizer.eos_token_id]) == f"\n{text}"
    assert added(own, [{"role": "user", "content": "why"}]) == (
        "<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    )


def test_pictures_that_the_role_tool_loses_go_into_a_user_turn() -> None:
    own = templated(DROPPED, "qwen3_vl")
    assert own.check_tools(pictures=False) == IN_ROLE
    assert own.check_tools(pictures=True) == APART
    assert added(own, [*TWO, {"role": "user", "content": content("why")}]) == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
        f"<|im_end|>\n<|im_start|>user\nReturned by zoom:\n{SLOT}\nReturned by crop:\n{SLOT}\nwhy<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    bare = [{"role": "tool", "name": "zoom", "content": content("", NEW[0])[1:]}]
    assert f"Returned by zoom:\n{SLOT}<|im_end|>" in added(own, bare)
    assert "<tool_response>\nA picture, which follows.\n" in added(own, bare)


def test_results_in_json() -> None:
    own = templated(HEADERS, "mllama")
    assert own.check_tools(pictures=False) == IN_ROLE
    with pytest.raises(ValueError, match="a later picture changes what was said before it"):
        own.check_tools(pictures=True)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert added(own, [result('say "7"'), result("8")]) == (
        f'<|eot_id|>{header.format("ipython")}"say \\"7\\""<|eot_id|>{header.format("ipython")}"8"<|eot_id|>'
        + header.format("assistant")
    )
    assert added(own, [result("7", NEW[0])], [own.tokenizer.eos_token_id]) == (
        f'{header.format("ipython")}"7"<|eot_id|>{header.format("user")}Returned by zoom:<|image|><|eot_id|>'
        + header.format("assistant")
    )


def test_order_and_ids_of_calls() -> None:
    own = templated(ORDERED, "pixtral")
    assert own.check_tools(pictures=False) == IN_ROLE
    assert own.check_tools(pictures=True) == APART
    assert added(own, [result("7"), result("8")]) == (
        "</s>[TOOL_RESULTS]7[/TOOL_RESULTS][TOOL_RESULTS]8[/TOOL_RESULTS]"
    )
    assert added(own, [result("7", *NEW)], [own.tokenizer.eos_token_id]) == (
        "[TOOL_RESULTS]7[/TOOL_RESULTS][INST]Returned by zoom:\n[IMG][IMG][/INST]"
    )
    assert added(own, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == "</s>[INST]a\nb[/INST]"


def test_roles_that_alternate() -> None:
    own = templated(ALTERNATING, "gemma3")
    assert own.check_tools(pictures=False) == own.check_tools(pictures=True) == IN_USER
    stop = own.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    turn = "<start_of_turn>user\nzoom returned:\none<start_of_image>crop returned:\ntwo<start_of_image><end_of_turn>\n"
    assert added(own, TWO, [stop]) == f"\n{turn}<start_of_turn>model\n"
    assert added(own, TWO, [own.tokenizer.eos_token_id]) == f"<end_of_turn>\n{turn}<start_of_turn>model\n"
    assert encode(own, user("x")).prompt_ids.count(own.tokenizer.bos_token_id) == 1
    later = own.next_turn(encode(own, user("x")), [stop], TWO)
    assert later.prompt_ids.count(own.tokenizer.bos_token_id) == 1


def test_results_in_the_turn_of_the_calls() -> None:
    processor = copy.deepcopy(tiny("gemma4").processor)
    processor.chat_template = SAME_TURN
    processor.tokenizer.add_tokens(["</call>", "<result>"], special_tokens=True)
    own = load_adapter(processor)
    assert own.check_tools(pictures=False) == own.check_tools(pictures=True) == IN_ROLE
    opened, closed = own.tokenizer.convert_tokens_to_ids(["<result>", "</call>"])
    results = "zoom=one<|image|></result><result>crop=two<|image|></result>"
    assert added(own, TWO, [closed, opened]) == results
    assert added(own, TWO, [closed]) == f"<result>{results}"
    assert added(own, TWO) == f"<result>{results}"


def test_a_turn_that_ends_where_the_next_role_is_named() -> None:
    own = adapter("glm4v")
    stop = own.tokenizer.convert_tokens_to_ids("<|user|>")
    assert added(own, [{"role": "user", "content": "a"}], [stop]) == "\na<|assistant|>\n"


def test_calls_with_arguments_in_json() -> None:
    assert CALLS in WRAPPED
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments + '!' }}{% endfor %}"
    own = templated(WRAPPED.replace(CALLS, calls), "text")
    assert added(own, [result("7")]).endswith("\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ["text", "qwen2_5_vl"])
def test_contents_that_must_be_strings(name: str) -> None:
    own = templated(
        "{% for m in messages %}{{ '[' + m.role + '] ' + m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[A] {% endif %}",
        name,
    )
    assert own.check_tools(pictures=False) == IN_ROLE
    assert added(own, [result("a"), result("b")]) == "</s>[tool] a</s>[tool] b</s>[A] "


def test_lists_that_are_printed_are_no_text() -> None:
    own = templated(PRINTED)
    assert added(own, [result("a")]) == "</s>[tool] a</s>[A] "
    with pytest.raises(ValueError, match="takes no tools' results with pictures"):
        own.check_tools(pictures=True)


def test_string_results_beside_lists() -> None:
    """A template that takes results as strings alone, and other contents as lists."""
    template = WRAPPED.replace(f"{PARTS}{{{{ '\\n' }}}}</tool", "{{ m.content if m.content is string }}\n</tool")
    assert template != WRAPPED
    own = templated(template)
    assert own.check_tools(pictures=False) == IN_ROLE
    assert "<tool_response>\nseven\n</tool_response>" in added(own, [result("seven")])
    row = [*user("x"), {"role": "assistant", "content": "y"}, result("seven")]
    assert "<tool_response>\nseven\n</tool_response>" in encode(own, row).text


# Refusals


def refused(own: FamilyAdapter, message: Message, words: str, completion: Sequence[int] = ()) -> None:
    start = encode(own, user("x"))
    with pytest.raises(ValueError, match=words):
        own.next_turn(start, completion, [message], where="tool zoom")


def test_what_a_turn_cannot_hold_is_named(tmp_path: Any) -> None:
    own = adapter("qwen2_5_vl")
    refused(own, result("<|image_pad|>"), r"^tool zoom: the text holds the reserved <\|image_pad\|>")
    refused(own, result("a\ud800"), r"^tool zoom: the text cannot be tokenised")
    refused(own, result("a", tmp_path / "none.png"), r"^tool zoom, message 0, part 1: .*there is no picture file")
    refused(own, result("a", picture(1, 600, 1)), r"^tool zoom, message 0, part 1: the processor refuses .*1x600")
    refused(own, {"role": "assistant", "content": "a"}, r"^tool zoom: .* got the roles \['assistant'\]")
    refused(own, {"role": "tool", "content": 7}, r"^tool zoom, message 0: 'content' must be a string")
    pad = own.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    refused(own, result("a"), rf"^tool zoom: the sampled ids hold the reserved id {pad}", [pad])
    refused(adapter("text"), result("a", NEW[0]), r"^tool zoom, message 0, part 1: .*takes text only; drop the picture")
    with pytest.raises(ValueError, match="got the roles"):
        own.next_turn(encode(own, user("x")), [], [])


def test_what_no_template_takes_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="takes text only"):
        adapter("text").check_tools(pictures=True)
    with pytest.raises(ValueError, match="takes no tools' results with pictures .* writes 0 slots for 1 pictures"):
        adapter("paligemma").check_tools(pictures=True)
    for template in ("{{ messages[0].content }}", "{{ raise_exception('no') }}"):
        own = templated(template)
        with pytest.raises(ValueError, match="takes no tools' results behind a turn"):
            own.check_tools(pictures=False)
    processor = copy.deepcopy(tiny("qwen2_5_vl").processor)
    processor.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        load_adapter(processor).check_tools(pictures=False)


def test_a_turn_may_be_longer_than_a_prompt() -> None:
    own = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=20)
    later = own.next_turn(encode(own, user("x")), said("qwen2_5_vl"), [result("a", *NEW)])
    assert later.num_tokens > 20


def test_pictures_of_tools_keep_the_pixel_budget() -> None:
    own = load_adapter(tiny("qwen2_5_vl").processor, max_pixels=32 * 32)
    later = own.next_turn(encode(own, user("x")), said("qwen2_5_vl"), [result("a", NEW[0])])
    assert later.forward_kwargs["image_grid_thw"].equal(encode(own, user("x", NEW[0])).forward_kwargs["image_grid_thw"])
    assert len(later.forward_kwargs["pixel_values"]) < len(
        encode(adapter("qwen2_5_vl"), user("x", NEW[0])).forward_kwargs["pixel_values"]
    )


# Tools in the first prompt

SCHEMAS = [
    {"type": "function", "function": {"name": "zoom", "description": "Zooms.", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize("name", ["text", "qwen2_5_vl"])
def test_tools_are_written_where_the_template_does(name: str) -> None:
    own = templated(WRAPPED, name)
    assert own.shows_tools(SCHEMAS)
    assert not adapter(name).shows_tools(SCHEMAS)
    for prompt in (
        encode(templated(WRAPPED, name, chat_template_kwargs={"tools": SCHEMAS}), user("x")),
        encode(own, user("x"), chat_template_kwargs={"tools": SCHEMAS}),
    ):
        assert prompt.text.startswith('<|im_start|>system\n{"type": "function"')
        assert prompt.text.count("zoom") == 1
    later = templated(WRAPPED, name, chat_template_kwargs={"tools": SCHEMAS})
    assert added(later, [result("a")]) == added(own, [result("a")])


def test_the_row_s_template_kwargs_reach_the_next_turn() -> None:
    template = WRAPPED.replace(GENERATION, GENERATION + "{% if quick %}<think></think>{% endif %}")
    own = templated(template)
    assert added(own, [result("a")], template_kwargs={"quick": True}).endswith("assistant\n<think></think>")
    assert added(own, [result("a")]).endswith("assistant\n")


NEEDS_CONTENT = {
    "as it is": WRAPPED,
    "a list": WRAPPED.replace("<|im_start|>{{ m.role }}", "<|im_start|>{{ m.role }}{{ m.content[0].type[:0] }}"),
    "none": WRAPPED.replace(
        "<|im_start|>{{ m.role }}",
        "<|im_start|>{{ m.role }}{% if m.content is none %}{% else %}{{ '' + m.content }}{% endif %}",
    ),
}


@pytest.mark.parametrize("style", NEEDS_CONTENT)
@pytest.mark.parametrize("lacking", [{}, {"content": None}])
def test_rows_may_hold_calls_and_results_with_pictures(style: str, lacking: Message) -> None:
    assert len(set(NEEDS_CONTENT.values())) == len(NEEDS_CONTENT)
    own = templated(NEEDS_CONTENT[style])
    call = {"type": "function", "function": {"name": "zoom", "arguments": {"x": 1, "y": None}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call], **lacking},
        result("seven", *(NEW if style != "none" else ())),
    ]
    prompt = encode(own, messages)
    assert '<tool_call>\nzoom {"x": 1' in prompt.text
    assert "seven" in prompt.text
    assert len(prompt.images) == len(prompt.image_spans) == (2 if style != "none" else 0)
