"""The formats in which models write tool calls, as a table, and one scanner for all of them.

A format is recognised by markers in the text of the chat template, which shows the model how to call. It is read by a
reader of its own (`readers.py`). What models think, in the tags of `THINKING`, is no place for calls.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmroll.tools import readers
from vlmroll.tools.readers import Reader
from vlmroll.tools.types import ToolCall
from vlmroll.tools.values import cast_call


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One way of writing calls.

    Attributes:
        markers: stand all in a chat template of this format.
        opening: a pattern of where a call may open.
        tags: what readers look for; kept in the text even where it is a special token.
        read: reads the calls from there on.
        casts: the arguments are texts, made into values by the schema of the tool.
    """

    markers: tuple[str, ...]
    opening: str
    tags: tuple[str, ...]
    read: Reader
    casts: bool = False


_TAGS = ("<tool_call>", "</tool_call>")

# The first whose markers are all there is taken, so the plainest come last.
FORMATS: dict[str, Format] = {
    "xml_function": Format(
        markers=("<tool_call>", "<function=", "<parameter="),
        opening=r"<tool_call>|<function=",
        tags=_TAGS,
        read=readers.xml_function,
        casts=True,
    ),
    "key_value": Format(
        markers=("<tool_call>", "<arg_key>", "<arg_value>"),
        opening=r"<tool_call>",
        tags=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        read=readers.key_value,
        casts=True,
    ),
    "braced": Format(
        markers=("<|tool_call>call:", "<tool_call|>"),
        opening=r"<\|tool_call>",
        tags=("<|tool_call>", "<tool_call|>", '<|"|>'),
        read=readers.braced,
    ),
    "python_calls": Format(
        markers=("<|tool_call_start|>", "<|tool_call_end|>"),
        opening=r"<\|tool_call_start\|>",
        tags=("<|tool_call_start|>", "<|tool_call_end|>"),
        read=readers.python_calls,
    ),
    "bracketed": Format(
        markers=("[TOOL_CALLS]",),
        opening=r"\[TOOL_CALLS\]",
        tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        read=readers.bracketed,
    ),
    "json_tagged": Format(
        markers=("<tool_call>", "</tool_call>"),
        opening=r"<tool_call>",
        tags=_TAGS,
        read=readers.json_tagged,
    ),
    "json_object": Format(
        markers=('{"name": ', '"parameters": ', "<|start_header_id|>"),
        opening=r"<\|python_tag\|>|\{",
        tags=("<|python_tag|>",),
        read=readers.json_object,
    ),
}

# Opening and closing tag; the texts of a chat template say nothing reliable about them.
THINKING: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
THINKING_TOKENS = tuple({*(tag for pair in THINKING for tag in pair), "<|channel>"})
_THINK = re.compile("|".join(re.escape(opening) for opening, _ in THINKING))
_THOUGHT = re.compile("|".join(re.escape(close) for _, close in THINKING))


def recognised(templates: Iterable[str]) -> str | None:
    """The name of the format that one of the texts of chat templates shows, or None."""
    texts = list(templates)
    return next((name for name, f in FORMATS.items() if any(all(m in text for m in f.markers) for text in texts)), None)


@dataclass(frozen=True, slots=True)
class Scanned:
    """A turn taken apart.

    Attributes:
        content: spans of the text, in order: all but thoughts and calls that were understood.
        thoughts: spans inside of thinking tags.
        calls: in the order of the text.
    """

    content: list[tuple[int, int]]
    thoughts: list[tuple[int, int]]
    calls: list[ToolCall]

    @property
    def plain(self) -> bool:
        """Whether there are neither thoughts nor calls."""
        return not self.thoughts and not self.calls


def opens_thinking(text: str) -> bool:
    """Whether thinking that was opened in the text goes on at its end."""
    opened = max((text.rfind(opening) for opening, _ in THINKING), default=-1)
    return opened >= 0 and opened > max(text.rfind(close) for _, close in THINKING)


def scan(text: str, form: Format, *, thinking: bool, schemas: Sequence[Mapping[str, Any]]) -> Scanned:
    """Take a turn apart.

    Args:
        text: the turn, with the special tokens that are tags of the format or of thinking.
        form: how calls are written.
        thinking: the prompt has opened a thinking block.
        schemas: of the tools.
    """
    scanned = Scanned([], [], [])
    at = 0
    if thinking or _unopened(text, form):
        at = _think(text, 0, scanned)
    openings = re.compile(f"{_THINK.pattern}|{form.opening}")
    place = at
    while (found := openings.search(text, place)) is not None:
        if _THINK.match(text, found.start()):
            scanned.content.append((at, found.start()))
            at = place = _think(text, found.end(), scanned)
            continue
        alone = not scanned.calls and not _written(text, [*scanned.content, (at, found.start())])
        read = form.read(text, found.start(), found.end(), alone)
        if read is None:
            place = found.start() + 1
            continue
        calls = [cast_call(call, schemas) if form.casts else call for call in read.calls]
        scanned.calls.extend(calls)
        # What was not understood stays to be seen.
        understood = not any(call.error for call in calls)
        scanned.content.append((at, found.start() if understood else read.end))
        at = place = read.end
    scanned.content.append((at, len(text)))
    return scanned


def _unopened(text: str, form: Format) -> bool:
    """Whether a thought ends that was opened in a prompt which nobody gave us.

    A closing tag behind the opening of a call says nothing: it may stand in an argument.
    """
    close = _THOUGHT.search(text)
    if close is None or _THINK.search(text, 0, close.start()) is not None:
        return False
    begin = len(text) - len(text.lstrip())
    openings = re.compile(form.opening).finditer(text, 0, close.start())
    return all(form.read(text, o.start(), o.end(), o.start() <= begin) is None for o in openings)


def _think(text: str, start: int, scanned: Scanned) -> int:
    close = _THOUGHT.search(text, start)
    scanned.thoughts.append((start, close.start() if close else len(text)))
    return close.end() if close else len(text)


def _written(text: str, spans: Sequence[tuple[int, int]]) -> bool:
    return any(text[start:end].strip() for start, end in spans)
