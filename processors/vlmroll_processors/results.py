"""Where the results of tools stand among the messages: templates differ in what they take."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Literal

from vlmroll_processors.media import Message, Part

Way = Literal["as given", "pictures apart", "one user turn"]
WAYS: Mapping[Way, str] = {
    "as given": "results stand in messages of the role tool",
    "pictures apart": "results stand in messages of the role tool, and their pictures in a user message behind them",
    "one user turn": "results stand in a user message",
}
"""Where the results of tools go."""
MARK = re.compile(r"Zq7text\d+x")
"""The texts of `marked` messages."""


def ways_for(messages: Sequence[Message]) -> Iterator[Way]:
    """The ways that differ for these messages."""
    yield "as given"
    roles = [message["role"] for message in messages]
    if not {"tool", "user"}.issuperset(roles):
        return
    tools_first = roles == sorted(roles)
    pictures = any(part["type"] != "text" for message in _tools(messages) for part in message["content"])
    if pictures and tools_first:
        yield "pictures apart"
    if "tool" in roles or len(roles) > 1:
        yield "one user turn"


def _tools(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == "tool"]


def arranged(messages: Sequence[Message], way: Way) -> list[Message]:
    """The messages in one of the ways."""
    if way == "as given":
        return [{**message, "content": merged(message["content"])} for message in messages]
    kept: list[Message] = []
    user: list[Part] = []
    for message in messages:
        content, name = message["content"], message.get("name", "the tool")
        media = [part for part in content if part["type"] != "text"]
        if message["role"] != "tool":
            user += [*_gap(user), *content]
        elif way == "one user turn":
            user += [*_gap(user), text_part(f"{name} returned:\n"), *content]
        else:
            texts = merged([part for part in content if part["type"] == "text"])
            kept.append({**message, "content": texts or [text_part("A picture, which follows." if media else "")]})
            user += [*_gap(user), text_part(f"Returned by {name}:\n"), *media] if media else []
    return [*kept, {"role": "user", "content": merged(user)}] if user else kept


def _gap(parts: Sequence[Part]) -> list[Part]:
    return [text_part("\n")] if parts else []


def text_part(text: str) -> Part:
    """A part of a message's content."""
    return {"type": "text", "text": text}


def merged(parts: Sequence[Part]) -> list[Part]:
    """Texts that stand side by side as one."""
    found: list[Part] = []
    for part in parts:
        if part["type"] == "text" and found and found[-1]["type"] == "text":
            found[-1] = text_part(found[-1]["text"] + part["text"])
        else:
            found.append(part)
    return found


def marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with marks for texts."""
    marks = count()
    return [
        {
            **message,
            "content": [
                text_part(f"Zq7text{next(marks)}x") if part["type"] == "text" else part
                for part in merged(message["content"])
            ],
        }
        for message in messages
    ]
