"""What travels between a model's turn and the tools that it calls."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

Part = dict[str, Any]
"""A part of a message: `{"type": "text", "text": str}` or `{"type": "image", "image": PIL image}`."""

MAX_NAME = 100
MAX_ERROR = 500
"""Characters of a message about what went wrong: enough to act on, and no way to fill a context."""
MAX_BITS = 4096
"""Of a whole number in a call; Python does not even write one of 4,300 digits."""
MAX_DEPTH = 50
"""Nesting of a call's arguments; no tool needs more, and Python's own limit must stay far away."""

UNNAMED = "unknown"
"""What a call without a name is answered under: many templates write the name of every tool message."""

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it.

    Attributes:
        name: the tool; may be empty when `error` is set.
        arguments: by name; JSON values.
        error: why this is no call that can be run, in words for the model. Empty for a proper call.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's turn, read.

    Attributes:
        message: the turn as a chat message: `role`, `content`, and where there are any `reasoning_content` and
            `tool_calls`. A call with an error has an entry there, too, so that each tool message answers one; what the
            model wrote for it stays in `content`.
        calls: the calls in the order of the text.
    """

    message: Mapping[str, Any]
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to.

    Attributes:
        content: parts of the tool message, at least one.
        failed: the call did not do what it says; `content` is then one text, `{"error": ...}`.
        timed_out: it failed because of the time limit.
    """

    content: tuple[Part, ...]
    failed: bool = False
    timed_out: bool = False

    def defused(self, tokens: Iterable[str]) -> "ToolResult":
        """The result in which none of these texts stands; see the function `defused`.

        Example:
            >>> failure("no <|end|>").defused(["<|end|>"]).content[0]["text"]
            '{"error": "no < |end|>"}'
        """
        return replace(self, content=defused(self.content, tokens))

    def message(self, call: ToolCall) -> dict[str, Any]:
        """The tool message that answers the call; its content is a plain string where it is one text.

        Of a name that is no identifier, which is then no tool's, only plain characters are repeated.
        """
        texts = [part["text"] for part in self.content if part["type"] == "text"]
        plain = len(self.content) == len(texts) == 1
        content: Any = texts[0] if plain else [dict(part) for part in self.content]
        return {"role": "tool", "name": _plain_name(call), "content": content}


def defused(parts: Sequence[Part], tokens: Iterable[str], before: str = "") -> tuple[Part, ...]:
    """Parts of a message with a blank inside of every one of these texts; neighbouring texts become one part.

    For the special tokens of a tokenizer: a model can write the text of one in plain tokens, and a tool or an error
    repeat it, perhaps in pieces, where it would then be tokenised as the real one. A token of one character stays.

    Args:
        before: text that will stand directly in front of the first part. It is not changed, but a token that begins in
            it and ends in the parts is broken, too.

    Example:
        >>> pieces = [{"type": "text", "text": "|end"}, {"type": "text", "text": "|>"}]
        >>> defused(pieces, ["<|end|>"], before="so <")
        ({'type': 'text', 'text': ' |end|>'},)
    """
    joined: list[Part] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1]["text"] += part["text"]
        else:
            joined.append(dict(part))
    found = _any_of(frozenset(tokens))
    for place, part in enumerate(joined):
        if part["type"] == "text":
            part["text"] = _broken(part["text"], found, "" if place else before)
    return tuple(joined)


@lru_cache(maxsize=8)
def _any_of(tokens: frozenset[str]) -> re.Pattern[str]:
    """Finds the longest token at each place; without blanks around it, since only a blank inside breaks it."""
    cores = {token.strip() for token in tokens}
    ordered = sorted((core for core in cores if len(core) > 1), key=lambda core: (-len(core), core))
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _broken(text: str, tokens: re.Pattern[str], before: str) -> str:
    """The text with blanks in all tokens that end in it; they may overlap, and a blank may make a new one."""
    border = len(before)
    whole = before + text
    while True:
        places: set[int] = set()
        at = 0
        while (found := tokens.search(whole, at)) is not None:
            at = found.start() + 1
            if found.end() > border:
                places.add(max(at, border))
        if not places:
            return whole[border:]
        cuts = [0, *sorted(places), len(whole)]
        whole = " ".join(whole[a:b] for a, b in pairwise(cuts))


def reply_of(content: str, thoughts: str, calls: Sequence[ToolCall]) -> Reply:
    """The turn as a message, in the form that chat templates take."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": _plain_name(call), "arguments": dict(call.arguments)}}
            for call in calls
        ]
    return Reply(message, tuple(calls))


def failure(words: str, *, timed_out: bool = False) -> ToolResult:
    """A failed call: `words` as `{"error": ...}`, cut to `MAX_ERROR` characters."""
    words = clean(words)
    if len(words) > MAX_ERROR:
        mark = f" ... (cut, {len(words)} characters)"
        words = words[: MAX_ERROR - len(mark)] + mark
    text = json.dumps({"error": words}, ensure_ascii=False)
    return ToolResult(({"type": "text", "text": text},), failed=True, timed_out=timed_out)


def _plain_name(call: ToolCall) -> str:
    return re.sub(r"[^\w.-]", "_", call.name) or UNNAMED


def clean(text: str) -> str:
    """The text with what is not valid Unicode replaced: a tokenizer refuses lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")


def checked_call(name: object, arguments: object) -> ToolCall:
    """The call, with an error where name or arguments are of no use."""
    if not isinstance(name, str) or not name.strip():
        return ToolCall("", error="the call names no tool; give its name as a string")
    name = clean(name.strip())
    if len(name) > MAX_NAME:
        return ToolCall(
            name[:MAX_NAME], error=f"the name of the tool has {len(name)} characters; no tool has such a name"
        )
    if not isinstance(arguments, Mapping):
        words = f"the arguments are {_kind(arguments)}; give an object with the arguments by name"
        return ToolCall(name, error=words)
    found = cast("Mapping[str, Any]", arguments)
    if fault := fault_of(found):
        return ToolCall(name, error=f"the arguments {fault}")
    return ToolCall(name, dict(found))


def _kind(value: object) -> str:
    kinds = {"NoneType": "null", "str": "a string", "list": "a list", "bool": "a truth value"}
    return kinds.get(type(value).__name__, "a number")


def fault_of(value: object, depth: int = 0) -> str:
    """What keeps the value of an argument from being rendered into a conversation and saved as JSON, or nothing."""
    if depth > MAX_DEPTH:
        return f"are nested deeper than {MAX_DEPTH} levels"
    if isinstance(value, str):
        return "hold text that is not valid Unicode" if clean(value) != value else ""
    if isinstance(value, float) and not math.isfinite(value):
        return "hold NaN or Infinity, or a number too large; give finite numbers"
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return "hold a whole number of more than a thousand digits; give a smaller one"
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        if not all(isinstance(key, str) for key, _ in items):
            return "have names that are no strings"
        inner = [thing for pair in items for thing in pair]
    elif isinstance(value, list):
        inner = cast("list[object]", value)
    else:
        return ""
    return next((fault for item in inner if (fault := fault_of(item, depth + 1))), "")
