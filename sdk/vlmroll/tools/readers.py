"""One reader for each way of writing a call: from where a call opens to where it ends.

A reader never raises: what it cannot read is a `ToolCall` with an error, and ends where the next call opens, or with
the text.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from vlmroll.tools.types import ToolCall, checked_call


class Found(NamedTuple):
    """Where a call ends in the text, and the calls read up to there."""

    end: int
    calls: list[ToolCall]


Reader = Callable[[str, int, int, bool], Found | None]
"""Of the text, where an opening starts and ends, and whether only blanks stand before it. None: it opens no call."""

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks inside strings
_NAMED = re.compile(r'\{\s*"name"\s*:')


def json_tagged(text: str, start: int, at: int, alone: bool) -> Found:
    """`<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`."""
    value, end, error = _decoded(text, at)
    if not error and text.startswith("</tool_call>", end := _skip(text, end)):
        return Found(end + len("</tool_call>"), calls_of_json(value))
    _, closed, stop = _body(text, at, "<tool_call>", "</tool_call>")
    if not closed:
        error = "the call is not closed; end it with </tool_call>"
    return Found(stop, [ToolCall(_name_in(text[at:stop]), error=error or "more than one JSON object in one call")])


def xml_function(text: str, start: int, at: int, alone: bool) -> Found:
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`; all values are strings."""
    opened = re.compile(r"\s*<function=([^>\n]*)>").match(text, start if text.startswith("<function=", start) else at)
    if opened is None:
        _, closed, stop = _body(text, at, "<tool_call>", "</tool_call>")
        return Found(stop, [ToolCall("", error="a call is written <function=NAME> ... </function>")])
    name, at = opened[1], opened.end()
    arguments: dict[str, str] = {}
    parameter = re.compile(
        r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>(?=\s*<(?:parameter=|/function>))", re.DOTALL
    )
    while (found := parameter.match(text, at)) is not None:
        arguments[found[1]], at = found[2], found.end()
    closed = re.compile(r"\s*</function>(?:\s*</tool_call>)?").match(text, at)
    if closed is None:
        stop = _until(text, at, ("<tool_call>", "<function="))
        return Found(stop, [ToolCall(name, error="a parameter or the function is not closed; end it with </function>")])
    return Found(closed.end(), [checked_call(name, arguments)])


def key_value(text: str, start: int, at: int, alone: bool) -> Found:
    """`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`; all values are strings."""
    name = re.compile(r"[^<]*").match(text, at)
    assert name is not None
    at = name.end()
    arguments: dict[str, str] = {}
    pair = re.compile(
        r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*<(?:arg_key>|/tool_call>))", re.DOTALL
    )
    while (found := pair.match(text, at)) is not None:
        arguments[found[1].strip()], at = found[2], found.end()
    if text.startswith("</tool_call>", end := _skip(text, at)):
        return Found(end + len("</tool_call>"), [checked_call(name[0], arguments)])
    _, closed, stop = _body(text, at, "<tool_call>", "</tool_call>")
    error = "the arguments are not pairs of <arg_key> and <arg_value>" if closed else "the call is not closed"
    return Found(stop, [ToolCall(name[0].strip()[:100], error=f"{error}; end it with </tool_call>")])


def json_object(text: str, start: int, at: int, alone: bool) -> Found | None:
    """`{"name": "f", "parameters": {"a": 1}}` at the beginning of the turn; several may follow each other."""
    marked = text.startswith("<|python_tag|>", start)
    if not (alone or marked):
        return None
    end = at if marked else start
    calls: list[ToolCall] = []
    while (at := _skip(text, end, r"\s*;?\s*")) < len(text):
        value, ended, error = _decoded(text, at)
        if error and ((marked and not calls) or _NAMED.match(text, at)):
            return Found(len(text), [*calls, ToolCall(_name_in(text[at:]), error=error)])
        if error or not (marked or _is_call(value)):
            break  # text, or an answer that happens to be JSON
        calls += calls_of_json(value)
        end = ended
    if not calls and marked:
        calls = [ToolCall("", error="no call follows; give a JSON object with a name and parameters")]
    return Found(end, calls) if calls else None


def bracketed(text: str, start: int, at: int, alone: bool) -> Found:
    """`[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`, or `[TOOL_CALLS]f[ARGS]{"a": 1}` for each call."""
    at = _skip(text, at)
    named = None
    if text[at : at + 1] not in ("[", "{"):
        named = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?").match(text, at)
        if named is None:
            return Found(_until(text, at, ("[TOOL_CALLS]",)), [ToolCall("", error="the call names no tool")])
    value, end, error = _decoded(text, named.end() if named else at)
    if error:
        stop = _until(text, at, ("[TOOL_CALLS]",))
        return Found(stop, [ToolCall(named[1] if named else _name_in(text[at:stop]), error=error)])
    return Found(end, [checked_call(named[1], value)] if named else calls_of_json(value))


def python_calls(text: str, start: int, at: int, alone: bool) -> Found:
    """`<|tool_call_start|>[f(a=1), g(b='x')]<|tool_call_end|>`; values are Python or JSON literals."""
    body, closed, stop = _body(text, at, "<|tool_call_start|>", "<|tool_call_end|>")
    if not closed:
        return Found(stop, [ToolCall("", error="the calls are not closed; end them with <|tool_call_end|>")])
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes such as "\\d"
            parsed = ast.parse(body.strip(), mode="eval").body
        nodes = parsed.elts if isinstance(parsed, ast.List | ast.Tuple) else [parsed]
        return Found(stop, [_python_call(node) for node in nodes] or [ToolCall("", error="the list of calls is empty")])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        words = (
            f"the calls cannot be read ({getattr(error, 'msg', type(error).__name__)}); write [name(argument=value)]"
        )
        return Found(stop, [ToolCall("", error=words)])


def braced(text: str, start: int, at: int, alone: bool) -> Found:
    """`<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`."""
    _, closed, stop = _body(text, at, "<|tool_call>", "<tool_call|>")
    named = re.compile(r"\s*call:\s*([^\s{}]+)\s*(?=\{)").match(text, at)
    if named is None:
        return Found(stop, [ToolCall("", error="a call is written call:NAME{argument:value}")])
    try:
        value, end = _brace_value(text, named.end(), 0)
    except ValueError as error:
        words = (
            f"the arguments cannot be read: {error}" if closed else "the call is not closed; end it with <tool_call|>"
        )
        return Found(stop, [ToolCall(named[1], error=words)])
    if not text.startswith("<tool_call|>", end := _skip(text, end)):
        words = "more than one object of arguments" if closed else "the call is not closed; end it with <tool_call|>"
        return Found(stop, [ToolCall(named[1], error=words)])
    return Found(end + len("<tool_call|>"), [checked_call(named[1], value)])


def calls_of_json(value: Any) -> list[ToolCall]:
    """The calls in a decoded JSON value: one object, or a list of them."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [call for item in items for call in calls_of_json(item) if not isinstance(item, list)] or [
            ToolCall("", error="the list of calls is empty, or holds other lists")
        ]
    if not isinstance(value, dict):
        return [ToolCall("", error="a call is a JSON object with a name and arguments")]
    found = cast("dict[str, Any]", value)
    arguments = found.get("arguments", found.get("parameters", {}))
    return [checked_call(found.get("name"), arguments)]


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and not {"arguments", "parameters"}.isdisjoint(value)


def _skip(text: str, at: int, pattern: str = r"\s*") -> int:
    """The place behind what the pattern, which may match nothing, finds there."""
    found = re.compile(pattern).match(text, at)
    return found.end() if found else at


def _until(text: str, at: int, openings: tuple[str, ...]) -> int:
    """Where the next call opens, or the end of the text."""
    places = [text.find(opening, at) for opening in openings]
    return min((place for place in places if place >= 0), default=len(text))


def _body(text: str, at: int, opening: str, close: str) -> tuple[str, bool, int]:
    """What stands up to the closing tag, whether there is one before the next opening, and where it all ends."""
    limit = _until(text, at, (opening,))
    place = text.find(close, at, limit)
    return (text[at:limit], False, limit) if place < 0 else (text[at:place], True, place + len(close))


def _decoded(text: str, at: int) -> tuple[Any, int, str]:
    """The JSON value that starts there, its end, and what is wrong with it."""
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, at))
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 20, at) : error.pos + 20]
        return None, at, f"the call is no valid JSON: {error.msg} near {near!r}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        return None, at, f"the call is no valid JSON: {type(error).__name__}"
    return value, end, ""


def _name_in(text: str) -> str:
    """The name in a call that is no valid JSON, as far as it can be seen."""
    found = re.search(r'"name"\s*:\s*"([^"\\]{1,100})"', text)
    return found[1] if found else ""


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        return ToolCall("", error="the list must hold calls such as name(argument=value)")
    name = ast.unparse(node.func)[:100]
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ToolCall(name, error="give every argument by name: name(argument=value)")
    try:
        arguments = {cast("str", keyword.arg): _literal(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError) as error:  # TypeError: a list as a key
        return ToolCall(name, error=f"an argument is no plain value: {error}")
    return checked_call(name, arguments)


def _literal(node: ast.expr) -> Any:
    """A value of Python, with the names that JSON uses for three of them."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_literal(cast("ast.expr", key)): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case _:
            raise ValueError(ast.unparse(node)[:60])


_QUOTE = '<|"|>'
_PLAIN = {"true": True, "false": False, "null": None, "None": None, "none": None}


def _brace_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """A value of the braced format and where it ends."""
    at = _skip(text, at)
    if depth > 50:
        raise ValueError("nested too deep")
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise ValueError("a string is not closed")
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text.startswith("{", at) or text.startswith("[", at):
        return _brace_items(text, at, depth)
    if text.startswith('"', at):
        value, end, error = _decoded(text, at)
        if error:
            raise ValueError("a string is not closed")
        return value, end
    plain = re.compile(r"[^,\[\]{}<\s]+").match(text, at)
    word = plain[0] if plain else ""
    if word in _PLAIN:
        return _PLAIN[word], at + len(word)
    value, end, error = _decoded(text, at)
    if error or end != at + len(word):
        raise ValueError(f"{text[at : at + 20]!r} is no value; write text between {_QUOTE} and {_QUOTE}")
    return value, end


def _brace_items(text: str, at: int, depth: int) -> tuple[Any, int]:
    mapping, close = text[at] == "{", {"{": "}", "[": "]"}[text[at]]
    names: list[str] = []
    values: list[Any] = []
    at = _skip(text, at + 1)
    while not text.startswith(close, at):
        if mapping:
            key = re.compile(r'(?:<\|"\|>(.*?)<\|"\|>|"([^"]*)"|([^{}\[\],:<"]*))\s*:', re.DOTALL).match(text, at)
            if key is None:
                raise ValueError("a name without ':'")
            names.append(next(name for name in key.groups() if name is not None).strip())
            at = key.end()
        value, at = _brace_value(text, at, depth + 1)
        values.append(value)
        at = _skip(text, at)
        if text.startswith(",", at):
            at = _skip(text, at + 1)
        elif not text.startswith(close, at):
            raise ValueError(f"{close!r} is missing")
    return (dict(zip(names, values, strict=True)) if mapping else values), at + 1
