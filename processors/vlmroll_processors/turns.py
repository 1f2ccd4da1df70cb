"""The text of a conversation's next turn: what the chat template writes behind a turn that the model has sampled.

The template renders a made-up conversation with and without the new messages, and what is new behind the assistant's
turn is taken. Templates differ in where they take the results of tools, so the ways of `WAYS` are tried in order; that
the pictures and texts are really there is seen by rendering messages whose texts are marks that can be found again.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from vlmroll_processors.families import Family
from vlmroll_processors.media import KINDS, Message, Part
from vlmroll_processors.messages import Chat
from vlmroll_processors.rendering import render
from vlmroll_processors.results import MARK, WAYS, Way, arranged, marked, merged, text_part, ways_for

_CONTENT, _CALL = "Zq7contentx", "Zq7call{}x"
_STRANGE = "zq7role"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turn:
    """A made-up turn of the assistant: with text, and with calls whose arguments are a mapping or a string."""

    text: bool = True
    calls: Literal["mapping", "string", ""] = ""


_PLAIN = _Turn()
# Some templates drop the text of a turn with calls, or write it behind the results; others do not take a turn without.
_TURNS = (
    _Turn(calls="mapping"),
    _Turn(calls="string"),
    _Turn(text=False, calls="mapping"),
    _Turn(text=False, calls="string"),
    _PLAIN,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """How one kind of new messages is rendered."""

    way: Way
    turn: _Turn


class NextTurns:
    """Renders what follows a sampled turn, for one processor.

    Args:
        family, processor: whose chat template it is.
        reserved: tokens that the new texts may not hold.
    """

    def __init__(self, family: Family, processor: Any, reserved: Collection[str]) -> None:
        self._family, self._processor, self._reserved = family, processor, reserved
        self._shapes: dict[Any, _Shape] = {}

    def text(self, chat: Chat, last: str, template_kwargs: Mapping[str, Any], *, where: str) -> str:
        """The text from the end of a sampled turn to the start of the next one, with a slot for each picture.

        Args:
            chat: the new messages.
            last: the special token that the sampled turn ended with; empty where it ended with none.
            template_kwargs: passed to the chat template.
            where: names the messages in error messages.

        Raises:
            ValueError: the chat template takes the messages in none of the ways, or a text holds a reserved token.
        """
        messages = chat.messages or ()
        roles = [message["role"] for message in messages]
        if not messages or "assistant" in roles:
            raise ValueError(
                f"{where}: the model's turn is followed by messages of tools or of the user, got the roles {roles}"
            )
        shape = self._shape(messages, template_kwargs, where=where)
        return self._behind(arranged(messages, shape.way), shape.turn, last, template_kwargs, where=where)

    def check_tools(self, template_kwargs: Mapping[str, Any], *, pictures: bool) -> str:
        """In which of the ways the chat template takes the results of tools, in words.

        Raises:
            ValueError: in none.
        """
        if pictures and not self._family.slot:
            raise ValueError("a tool returns pictures, but the model takes text only; take a tool that returns text")
        if pictures and any(rule.completion == "repeat" for rule in self._family.join.values()):
            raise ValueError(
                f"a tool returns pictures, but in {self._family.name} a later picture changes what was said before it; "
                "take a tool that returns text"
            )
        content = [text_part("x"), *([{"type": "image"}] if pictures else [])]
        result: Message = {"role": "tool", "name": "look", "content": content}
        return WAYS[self._shape([result], template_kwargs, where="tools").way]

    def shows(self, schemas: Sequence[Any], template_kwargs: Mapping[str, Any]) -> bool:
        """Whether the chat template writes the tools into the prompt."""
        try:
            without, given = (
                self._render([], {**template_kwargs, **tools}, where="a prompt with tools")
                for tools in ({"tools": None}, {"tools": list(schemas)})
            )
        except ValueError:
            return False
        return given != without

    def _shape(self, messages: Sequence[Message], template_kwargs: Mapping[str, Any], *, where: str) -> _Shape:
        """The first shape in which messages of this kind keep their texts and pictures."""
        kinds = tuple(
            (message["role"], tuple(part["type"] for part in merged(message["content"]))) for message in messages
        )
        key = kinds, repr(sorted(template_kwargs.items()))
        if key in self._shapes:
            return self._shapes[key]
        refusals: list[str] = []
        for way, turn in product(ways_for(messages), _TURNS):
            shape = _Shape(way=way, turn=turn)
            try:
                self._try(arranged(marked(messages), way), shape, template_kwargs, where=where)
            except ValueError as error:
                refusals.append(f"{error}".removeprefix(f"{where}: "))
                continue
            self._shapes[key] = shape
            return shape
        pictures = any(kind != "text" for _, content in kinds for kind in content)
        noun = ("tools' results" if "tool" in dict(kinds) else "messages") + (" with pictures" if pictures else "")
        raise ValueError(
            f"{where}: the chat template takes no {noun} behind a turn of the assistant ({refusals[-1]}); set a chat "
            "template that does" + (", or return text alone" if pictures else "")
        )

    def _try(
        self, messages: Sequence[Message], shape: _Shape, template_kwargs: Mapping[str, Any], *, where: str
    ) -> None:
        text = self._behind(messages, shape.turn, "", template_kwargs, where=where)
        strange = [{**message, "role": _STRANGE} if message["role"] == "tool" else message for message in messages]
        if strange != messages and self._writes(strange, text, shape, template_kwargs):
            raise ValueError(f"{where}: it knows no role tool")
        parts = [part for message in messages for part in message["content"]]
        marks = [mark for part in parts if part["type"] == "text" for mark in MARK.findall(part["text"])]
        if MARK.findall(text) != marks:
            raise ValueError(f"{where}: it leaves out or moves texts")
        slots = {slot: kind for kind in KINDS if (slot := self._family.slot_of(kind))}
        found = [slots[slot] for slot in re.findall("|".join(map(re.escape, slots)), text)] if slots else []
        if found != (wanted := [part["type"] for part in parts if part["type"] != "text"]):
            raise ValueError(f"{where}: it writes {len(found)} slots for {len(wanted)} pictures")

    def _writes(
        self, messages: Sequence[Message], text: str, shape: _Shape, template_kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether the template writes this text for messages of a role that there is not."""
        try:
            return self._behind(messages, shape.turn, "", template_kwargs, where="") == text
        except ValueError:
            return False

    def _behind(
        self,
        messages: Sequence[Message],
        kind: _Turn,
        last: str,
        template_kwargs: Mapping[str, Any],
        *,
        where: str,
    ) -> str:
        """What the template writes behind an assistant's turn that ended with `last`."""
        turn, messages = _assistant(messages, kind)
        closed = self._render([turn], template_kwargs, closed=True, where=where)
        whole = self._render([turn, *messages], template_kwargs, where=where)
        ends = _end(turn, closed), _end(turn, whole)
        closing, rest = closed[ends[0] :], whole[ends[1] :]
        if not all(ends):
            raise ValueError(f"{where}: it leaves out the assistant's turn")
        if rest.startswith(closing):
            rest = rest.removeprefix(closing)
        elif kind == _PLAIN:
            closing = ""
        else:
            raise ValueError(f"{where}: it writes an earlier turn anew when another follows")
        if last and last in closing:
            return closing[closing.rfind(last) + len(last) :] + rest
        if last and rest.lstrip().startswith(last):  # a turn that ends where the next role is named
            return rest.lstrip().removeprefix(last)
        if kind.calls:  # the calls end somewhere in it, and the turn as one without calls does
            plain, _ = _assistant((), _PLAIN)
            text = self._render([plain], template_kwargs, closed=True, where=where)
            end = text[_end(plain, text) :]
            closing = end if closing.endswith(end) else self._ending(closing)
        return closing + rest

    def _ending(self, closing: str) -> str:
        """From the last added token on: what ends a turn of calls, or opens their results."""
        tokenizer: Any = getattr(self._processor, "tokenizer", self._processor)
        starts = [closing.rfind(token) for token in tokenizer.get_added_vocab() if token in closing]
        return closing[max(starts) :] if starts else ""

    def _render(
        self, messages: Sequence[Message], template_kwargs: Mapping[str, Any], *, closed: bool = False, where: str
    ) -> str:
        """A made-up user turn and then the messages."""
        parts: list[Part] = [{"type": "image"}] * self._family.min_pictures + [{"type": "text", "text": "x"}]
        chat = Chat(messages=({"role": "user", "content": parts}, *messages))
        options: dict[str, Any] = {"reserved": self._reserved, "closed": closed, "where": where}
        text = render(self._family, self._processor, chat, template_kwargs, **options)
        return self._family.wrap(self._processor, text)


def _end(turn: Message, text: str) -> int:
    """Where the last mark of the made-up turn ends in a text; 0 if it has none."""
    marks = [_CONTENT, *(_CALL.format(i) for i in range(len(turn.get("tool_calls", ()))))]
    return max((text.find(mark) + len(mark) for mark in marks if mark in text), default=0)


def _assistant(messages: Sequence[Message], kind: _Turn) -> tuple[Message, list[Message]]:
    """A made-up turn that calls the tools whose results follow, and these results with the ids of the calls."""
    turn: Message = {"role": "assistant", "content": [{"type": "text", "text": _CONTENT}]}
    numbered: list[Message] = []
    calls: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] not in ("tool", _STRANGE):
            numbered.append(message)
            continue
        # Nine letters and digits, since there are templates that take no other ids.
        name, call = message.get("name", "tool"), message.get("tool_call_id", f"call{len(calls):05}")
        numbered.append({"name": name, "tool_call_id": call, **message})
        mark = _CALL.format(len(calls))
        given: Any = {"a": mark} if kind.calls == "mapping" else f'{{"a": "{mark}"}}'
        calls.append({"type": "function", "id": call, "function": {"name": name, "arguments": given}})
    if kind.calls and calls:
        turn = {**(turn if kind.text else {"role": "assistant"}), "tool_calls": calls}
    return turn, numbered
