"""Reading calls: every format back from what its template writes, and nothing the model writes raises."""

import copy
import json
import keyword
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import tokenizer as tiny_tokenizer
from vlmroll.tools import FORMATS, ResponseParser, ToolCall
from vlmroll.tools.formats import THINKING, recognised

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


@cache
def tokenizer(special: bool = True, added: bool = True) -> Any:
    """The tiny tokenizer, with the tags as tokens: special ones or plain ones, or as ordinary text."""
    copied = copy.deepcopy(tiny_tokenizer())
    if added:
        copied.add_tokens(list(TAGS), special_tokens=special)
    return copied


def schema(name: str, **types: Any) -> dict[str, Any]:
    """The description of a tool with arguments of these JSON types."""
    properties = {key: kind if isinstance(kind, dict) else {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def brace(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{brace(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(brace, value)) + "]" if isinstance(value, list) else dumps(value)


def xml_function(name: str, arguments: Mapping[str, Any]) -> str:
    inner = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def key_value(name: str, arguments: Mapping[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def python_calls(name: str, arguments: Mapping[str, Any]) -> str:
    inner = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({inner})]<|tool_call_end|>"


WRITERS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "json_tagged": lambda n, a: f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>",
    "xml_function": xml_function,
    "key_value": key_value,
    "python_calls": python_calls,
    "bracketed": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}",
    "braced": lambda n, a: f"<|tool_call>call:{n}{brace(dict(a))}<tool_call|>",
    "json_object": lambda n, a: dumps({"name": n, "parameters": a}),
}


def parse(text: str, format: str, schemas: Any = (), prefix: str = "", with_tokenizer: Any = None) -> Any:
    found = with_tokenizer or tokenizer()
    parser = ResponseParser(found, format=format)
    return parser.parse(found(text)["input_ids"], found(prefix)["input_ids"] if prefix else [], schemas)


def calls_of(reply: Any) -> list[tuple[str, Any, bool]]:
    return [(call.name, dict(call.arguments), bool(call.error)) for call in reply.calls]


# What no format can hold in a string that is not quoted: its own tags, blanks at the ends.
words = st.text(st.characters(codec="utf-8", exclude_characters="<|>[]◁▷", exclude_categories=["Cc", "Cs", "Zl", "Zp"]))
keys = st.from_regex(r"[a-z][a-z_]{0,7}", fullmatch=True).filter(
    lambda key: key not in ("name", "in", "is", "if", "or")
)
leaves = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(-1e9, 1e9) | words
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))
arguments = st.dictionaries(keys, values, max_size=4)


def test_every_format_has_a_writer() -> None:
    assert set(WRITERS) == set(FORMATS)


@pytest.mark.parametrize("format", WRITERS)
@given(given_arguments=arguments)
def test_what_is_written_is_read(format: str, given_arguments: dict[str, Any]) -> None:
    given_arguments = {key: value for key, value in given_arguments.items() if not keyword.iskeyword(key)}
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    types = {key: kinds.get(type(value), "null") for key, value in given_arguments.items()}
    text = WRITERS[format]("look", given_arguments)
    reply = parse(text + "<|im_end|>", format, [schema("look", **types)])
    assert calls_of(reply) == [("look", given_arguments, False)]
    assert [type(v) for v in reply.calls[0].arguments.values()] == [type(v) for v in given_arguments.values()]
    assert reply.message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": given_arguments}}],
    }


@pytest.mark.parametrize("format", [name for name in WRITERS if name != "json_object"])
@pytest.mark.parametrize("tokens", [{"special": True}, {"special": False}, {"added": False}], ids=str)
def test_text_calls_and_thoughts(format: str, tokens: dict[str, bool]) -> None:
    """Several calls, text around them, and a call that is only thought of."""
    write = WRITERS[format]
    inner = write("never", {})
    text = f"<think>\nshall I {inner}?\n</think>\n\nI look. {write('a', {'x': 'y'})}\n{write('b', {})}<|im_end|>"
    reply = parse(text, format, [schema("a", x="string")], with_tokenizer=tokenizer(**tokens))
    assert calls_of(reply) == [("a", {"x": "y"}, False), ("b", {}, False)]
    assert reply.message["content"] == "I look."
    assert reply.message["reasoning_content"].replace(" ", "").startswith("shallI")


def test_json_object_may_be_several_and_stands_first() -> None:
    first, second = WRITERS["json_object"]("a", {"x": 1}), WRITERS["json_object"]("b", {})
    assert [c[0] for c in calls_of(parse(f"<think>so</think>{first}; {second}", "json_object"))] == ["a", "b"]
    assert [c[0] for c in calls_of(parse(f"<|python_tag|>{first}<|im_end|>", "json_object"))] == ["a"]
    assert not parse(f"I look. {first}", "json_object").calls
    assert not parse('{"name": "Bob", "age": 3}', "json_object").calls
    cut = parse(f'{first}; {{"name": "b", "para', "json_object")
    assert calls_of(cut) == [("a", {"x": 1}, False), ("b", {}, True)]
    assert parse(f"{first} That is it.", "json_object").message["content"] == "That is it."


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("bracketed", '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "q"}, {"name": "b", "arguments": {}}]'),
        ("bracketed", '[TOOL_CALLS]a[CALL_ID]q1[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}'),
        ("bracketed", '[TOOL_CALLS]a{"x": 1}[TOOL_CALLS]b{}'),
        ("python_calls", "<|tool_call_start|>[a(x=1), b()]<|tool_call_end|>"),
        ("json_tagged", '<tool_call>[{"name":"a","arguments":{"x":1}},{"name":"b"}]</tool_call>'),
        (
            "xml_function",
            "<function=a><parameter=x>1</parameter></function><tool_call><function=b></function></tool_call>",
        ),
        ("key_value", "<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><tool_call>b</tool_call>"),
        ("braced", "<|tool_call>call:a{x: 1}<tool_call|><|tool_call>call:b{}<tool_call|>"),
    ],
)
def test_other_ways_of_writing(format: str, text: str) -> None:
    reply = parse(text + "<|im_end|>", format, [schema("a", x="integer")])
    assert calls_of(reply) == [("a", {"x": 1}, False), ("b", {}, False)]


WRONG = [
    ("json_tagged", '<tool_call>{"name": "a", "arguments": {"x": 1}', "closed"),
    ("json_tagged", '<tool_call>{"name": "a", "arguments": {"x": }}</tool_call>', "JSON"),
    ("json_tagged", '<tool_call>{"arguments": {"x": 1}}</tool_call>', "names no tool"),
    ("json_tagged", '<tool_call>{"name": 3}</tool_call>', "names no tool"),
    ("json_tagged", '<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "a string"),
    ("json_tagged", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "a list"),
    ("json_tagged", '<tool_call>{"name": "a", "arguments": null}</tool_call>', "null"),
    ("json_tagged", '<tool_call>{"name": "a"} {"name": "b"}</tool_call>', "more than one"),
    ("json_tagged", "<tool_call>[]</tool_call>", "empty"),
    ("json_tagged", "<tool_call>7</tool_call>", "JSON object"),
    ("json_tagged", "<tool_call></tool_call>", "JSON"),
    ("json_tagged", '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "Unicode"),
    ("json_tagged", '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", "JSON"),
    ("json_tagged", '<tool_call>{"name": "a", "arguments": {"x": ' + "[" * 60 + "]" * 60 + "}}</tool_call>", "deeper"),
    ("json_tagged", "<tool_call>" + "[" * 5000, "closed"),
    *(
        ("json_tagged", f'<tool_call>{{"name": "a", "arguments": {{"x": [{value}]}}}}</tool_call>', "finite")
        for value in ("NaN", "Infinity", "-Infinity", "1e999")
    ),
    ("json_object", '{"name": "a", "parameters": {"x": NaN}}', "finite"),
    ("bracketed", '[TOOL_CALLS]a[ARGS]{"x": NaN}', "finite"),
    ("braced", "<|tool_call>call:a{x:Infinity}<tool_call|>", "finite"),
    ("python_calls", "<|tool_call_start|>[a(x=-1e999)]<|tool_call_end|>", "finite"),
    ("python_calls", f"<|tool_call_start|>[a(x=0x{'f' * 5000})]<|tool_call_end|>", "a thousand digits"),
    ("json_tagged", '<tool_call>{"name": "' + "a" * 300 + '"}</tool_call>', "300 characters"),
    ("xml_function", '<tool_call>{"name": "a"}</tool_call>', "function=NAME"),
    ("xml_function", "<tool_call><function=a><parameter=x>1</function></tool_call>", "closed"),
    ("xml_function", "<tool_call><function=a><parameter=x>one</parameter></function></tool_call>", "integer"),
    ("key_value", "<tool_call>a<arg_key>x</arg_key></tool_call>", "pairs"),
    ("key_value", "<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value>", "closed"),
    ("key_value", "<tool_call></tool_call>", "names no tool"),
    ("python_calls", "<|tool_call_start|>[a(x=1)", "closed"),
    ("python_calls", "<|tool_call_start|>[a(1)]<|tool_call_end|>", "by name"),
    ("python_calls", "<|tool_call_start|>[a(**{})]<|tool_call_end|>", "by name"),
    ("python_calls", "<|tool_call_start|>[a(x=open('f'))]<|tool_call_end|>", "no plain value"),
    ("python_calls", "<|tool_call_start|>[a(x={[]: 1})]<|tool_call_end|>", "no plain value"),
    ("python_calls", "<|tool_call_start|>[a(x={1: 1})]<|tool_call_end|>", "no strings"),
    ("python_calls", "<|tool_call_start|>[a(x=]<|tool_call_end|>", "cannot be read"),
    ("python_calls", "<|tool_call_start|>[]<|tool_call_end|>", "empty"),
    ("python_calls", "<|tool_call_start|>7<|tool_call_end|>", "calls such as"),
    ("python_calls", f"<|tool_call_start|>[a(x={'(' * 900}{')' * 900})]<|tool_call_end|>", "cannot be read"),
    ("python_calls", f"<|tool_call_start|>[a{'.b' * 5000}()]<|tool_call_end|>", "cannot be read"),
    ("bracketed", "[TOOL_CALLS]", "no tool"),
    ("bracketed", "[TOOL_CALLS]a[ARGS]{", "JSON"),
    ("bracketed", "[TOOL_CALLS]a[ARGS][1]", "a list"),
    ("braced", "<|tool_call>call:a{x:1", "closed"),
    ("braced", "<|tool_call>call:a{x:one}<tool_call|>", "no value"),
    ("braced", "<|tool_call>call:a{x}<tool_call|>", "cannot be read"),
    ("braced", "<|tool_call>a{}<tool_call|>", "call:NAME"),
    ("braced", f"<|tool_call>call:a{{x:{'[' * 100}{']' * 100}}}<tool_call|>", "too deep"),
    ("json_object", '{"name": "a", "parameters": {"x": }}', "JSON"),
    ("json_object", "<|python_tag|>print(1)", "JSON"),
    ("json_object", "<|python_tag|>", "no call follows"),
]


@pytest.mark.parametrize(("format", "text", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_calls_are_calls_with_an_error(format: str, text: str, words: str) -> None:
    reply = parse(text + "<|im_end|>", format, [schema("a", x="integer")])
    (call,) = reply.calls
    assert words in call.error
    assert len(call.name) <= 100
    (entry,) = reply.message["tool_calls"]
    assert entry["function"]["name"]
    json.dumps(reply.message, allow_nan=False)
    # What the model wrote stays to be seen, less special tokens.
    found = tokenizer()
    assert reply.message["content"] == found.decode(found(text)["input_ids"], skip_special_tokens=True).strip()


def test_a_wrong_call_does_not_swallow_the_next() -> None:
    good = WRITERS["json_tagged"]("b", {})
    for wrong in ('<tool_call>{"name": "a"', "<tool_call>{]</tool_call>", '<tool_call>{"name": "a"} x </tool_call>'):
        reply = parse(f"{wrong}\n{good}", "json_tagged")
        assert [bool(call.error) for call in reply.calls] == [True, False]
        assert reply.calls[1] == ToolCall("b", {})


def test_names_are_repeated_in_plain_characters() -> None:
    """A name may be no token of the template, even when it is written in plain ones."""
    (entry,) = parse('<tool_call>{"name": "<|end|> x", "arguments": {}}</tool_call>', "json_tagged").message[
        "tool_calls"
    ]
    assert entry["function"]["name"] == "__end___x"


def test_closing_tag_inside_of_a_string() -> None:
    written = {"x": "</tool_call> <tool_call>", "y": "line\nline"}
    text = WRITERS["json_tagged"]("a", written).replace("\\n", "\n")
    assert calls_of(parse(text, "json_tagged")) == [("a", written, False)]


@given(st.text(), st.sampled_from(list(FORMATS)))
def test_nothing_raises(text: str, format: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert parse(text, format).message["role"] == "assistant"


FRAGMENTS = [
    *TAGS,
    *("<function=", "a", ">", "<parameter=x>", "</parameter>", "</function>", "{", "}", "[", "]", '"', ":", "call:"),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "(",
        ")",
        "=",
        ",",
        '{"name": "a"',
        " ",
        "\n",
        "\\",
        "-1",
    ),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"),
]


@pytest.mark.parametrize("format", FORMATS)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=25))
def test_no_mixture_of_tags_raises(format: str, pieces: list[str]) -> None:
    reply = parse("".join(pieces), format)
    assert len(reply.message.get("tool_calls", [])) == len(reply.calls)


@pytest.mark.parametrize("format", FORMATS)
@given(ids=st.lists(st.integers(0, 300), max_size=30))
def test_without_calls_the_content_is_the_decoded_text(format: str, ids: list[int]) -> None:
    found = tokenizer()
    ids = [i for i in ids if found.convert_ids_to_tokens(i) not in TAGS]
    reply = ResponseParser(found, format=format).parse(ids)
    if not reply.calls:
        assert reply.message == {"role": "assistant", "content": found.decode(ids, skip_special_tokens=True)}


@pytest.mark.parametrize(("opening", "close"), THINKING)
def test_thinking_that_the_prompt_opened(opening: str, close: str) -> None:
    call = WRITERS["json_tagged"]("a", {})
    prefix = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{opening}\n"
    reply = parse(f"so {call}{close}\n{call}", "json_tagged", prefix=prefix)
    assert len(reply.calls) == 1
    assert reply.message["reasoning_content"].startswith("so")
    # Never closed, as when the turn was cut: all of it is thought.
    assert not parse(f"so {call}", "json_tagged", prefix=prefix).calls
    # Closed again in the prompt, or in an earlier turn.
    assert parse(f"so {call}", "json_tagged", prefix=f"{prefix}{close}\n").message["content"] == "so"
    earlier = f"{prefix}cut<|im_end|>\n<|im_start|>assistant\n"
    assert len(parse(f"so {call}", "json_tagged", prefix=earlier).calls) == 1


def test_thinking_without_an_opening_tag() -> None:
    reply = parse("so it is</think>\n\nYes.", "json_tagged")
    assert reply.message == {"role": "assistant", "content": "Yes.", "reasoning_content": "so it is"}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("opening", "close"), THINKING)
def test_a_closing_tag_in_an_argument_ends_no_thought(format: str, opening: str, close: str) -> None:
    written = {"x": f"say {close} now"}
    text = f" {WRITERS[format]('a', written)}<|im_end|>"
    schemas = [schema("a", x="string")]
    assert calls_of(parse(text, format, schemas)) == [("a", written, False)]
    # A thought that was opened in the prompt may hold what a call could begin with, but no call.
    reply = parse(f"is {{it}} so{close}{text}", format, schemas)
    assert calls_of(reply) == [("a", written, False)]
    assert reply.message["reasoning_content"] == "is {it} so"


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        ("7", {"type": "integer"}, 7),
        (" 7.0 ", {"type": "integer"}, 7),
        ("7", {"type": "string"}, "7"),
        ("7.5", {"type": "number"}, 7.5),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": "string", "nullable": True}, None),
        ("None", {"type": "integer", "nullable": True}, None),
        ("x", {"type": ["integer", "string"]}, "x"),
        ("[1]", {"anyOf": [{"type": "object"}, {"type": "array", "items": {}}]}, [1]),
        ('{"a": 1}', {}, {"a": 1}),
        ("{a}", {}, "{a}"),
        ("NaN", {}, "NaN"),
        ("[1e999]", {}, "[1e999]"),
        ("x", {"type": "image"}, "x"),
        ("nan", {"type": "number"}, None),
        ("1e400", {"type": "number"}, None),
        ("7.5", {"type": "integer"}, None),
        ("yes", {"type": "boolean"}, None),
        ("[1]", {"type": "object"}, None),
        ("[" * 9000, {"type": "array"}, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_plain_text_is_cast_by_the_schema(value: str, kind: dict[str, Any], wanted: Any) -> None:
    reply = parse(key_value("a", {"x": value}), "key_value", [schema("a", x=kind)])
    (call,) = reply.calls
    if wanted is None and not kind.get("nullable"):
        assert "argument 'x' must be" in call.error
    else:
        assert call == ToolCall("a", {"x": wanted})
        assert type(call.arguments["x"]) is type(wanted)
    # An unknown tool and an unknown argument are for whoever runs the call to refuse.
    assert parse(key_value("b", {"x": value}), "key_value", [schema("a", x=kind)]).calls == (
        ToolCall("b", {"x": value}),
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [("[NaN]", "finite"), ("[1e999]", "finite"), ('["\\ud800"]', "Unicode"), ("[" * 60 + "]" * 60, "deeper")],
)
def test_cast_values_are_checked_like_others(value: str, words: str) -> None:
    (call,) = parse(key_value("a", {"x": value}), "key_value", [schema("a", x="array")]).calls
    assert call == ToolCall("a", error=call.error)
    assert words in call.error


MARKERS = {
    "json_tagged": '{{ "<tool_call>" }} {"name": } </tool_call>',
    "xml_function": "<tool_call><function=x><parameter=y></parameter></function></tool_call>",
    "key_value": "<tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
    "python_calls": "<|tool_call_start|>[f()]<|tool_call_end|>",
    "bracketed": "[TOOL_CALLS]",
    "braced": "'<|tool_call>call:' + name + '<tool_call|>'",
    "json_object": '<|start_header_id|> {"name": function name, "parameters": dictionary of arguments}',
}


@pytest.mark.parametrize("format", FORMATS)
def test_formats_are_recognised_by_the_template(format: str) -> None:
    assert recognised([MARKERS[format]]) == format
    found = copy.deepcopy(tiny_tokenizer())
    found.chat_template = {"default": "{{ messages }}", "tool_use": MARKERS[format]}
    assert ResponseParser(found).format == format
    assert ResponseParser(found, format="bracketed").format == "bracketed"
    assert ResponseParser(found, chat_template=MARKERS["key_value"]).format == "key_value"


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tool_call_format .*json_tagged"):
        ResponseParser(tiny_tokenizer())
    with pytest.raises(ValueError, match=r"tool_call_format='hermes'.*json_tagged"):
        ResponseParser(tiny_tokenizer(), format="hermes")


TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def with_template(template: dict[str, Any], chat_template: str | None = None) -> Any:
    found = copy.deepcopy(tokenizer(special=False))
    found.response_template, found.chat_template = template, chat_template
    return found


def test_the_tokenizers_response_template_is_used() -> None:
    found = with_template(TEMPLATE)
    parser = ResponseParser(found)
    call = WRITERS["json_tagged"]("a", {"x": 1})
    prefix = found("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")["input_ids"]
    reply = parser.parse(found(f"so</think>I look. {call}<|im_end|>")["input_ids"], prefix, [schema("a", x="integer")])
    assert reply.calls == (ToolCall("a", {"x": 1}),)
    assert (reply.message["content"], reply.message["reasoning_content"]) == ("I look.", "so")
    assert parser.parse([], prefix).message["content"] == ""
    # What it cannot read: a call with an error where it tries to call, or else plain text.
    (wrong,) = parser.parse(found('Hm <tool_call>{"name": }</tool_call>')["input_ids"]).calls
    assert "cannot be read" in wrong.error
    for arguments, words in (("[1]", "a list"), ('"{}"', ""), ('"{"', "cannot be read")):
        text = f'<tool_call>{{"name": "a", "arguments": {arguments}}}</tool_call>'
        (wrong,) = parser.parse(found(text)["input_ids"]).calls
        assert words in wrong.error
        assert bool(words) == bool(wrong.error)
    (wrong,) = parser.parse(found("<tool_call>[1]</tool_call>")["input_ids"]).calls
    assert "names no tool" in wrong.error


def test_what_a_response_template_cannot_read_goes_to_the_known_format() -> None:
    found = with_template(TEMPLATE, MARKERS["json_tagged"])
    text = WRITERS["json_tagged"]("a", {}) + "<tool_call>{</tool_call>"
    reply = ResponseParser(found).parse(found(text)["input_ids"])
    assert [bool(call.error) for call in reply.calls] == [False, True]


def test_a_response_template_that_demands_a_field() -> None:
    template = {
        **TEMPLATE,
        "fields": {**TEMPLATE["fields"], "thinking": {**TEMPLATE["fields"]["thinking"], "optional": False}},
    }
    found = with_template(template)
    reply = ResponseParser(found).parse(found("Yes.<|im_end|>")["input_ids"])
    assert reply.message == {"role": "assistant", "content": "Yes."}
