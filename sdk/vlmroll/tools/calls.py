"""Reading tool calls out of the ids that a model has sampled."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, cast

from vlmroll.tools.formats import FORMATS, THINKING_TOKENS, opens_thinking, recognised, scan
from vlmroll.tools.templates import parse_with_template
from vlmroll.tools.types import Reply, ToolCall, reply_of

logger = logging.getLogger(__name__)
_PREFIX = 512  # ids; what a template writes at the opening of a turn is short


class ResponseParser:
    """Reads model turns: by the tokenizer's `response_template` where it has one, or else in one of `FORMATS`.

    Args:
        tokenizer: of transformers.
        format: the name of a format, which then goes before everything else. None finds it by itself.
        chat_template: where it is not the tokenizer's, such as a processor's: its text, or a dict of named ones.

    Raises:
        ValueError: there is no such format, or none can be found.
    """

    def __init__(self, tokenizer: Any, *, format: str | None = None, chat_template: Any = None) -> None:
        self._tokenizer = tokenizer
        self._template = getattr(tokenizer, "response_template", None) if format is None else None
        if format is not None and format not in FORMATS:
            raise ValueError(f"tool_call_format={format!r} is no known format; choose from {', '.join(FORMATS)}")
        templates = chat_template if chat_template is not None else getattr(tokenizer, "chat_template", None)
        shown = recognised(_texts(templates))
        if format is not None and shown not in (None, format):
            logger.warning("tool_call_format=%r, but the chat template shows calls in the format %r", format, shown)
        self.format = format or shown
        if self.format is None and self._template is None:
            raise ValueError(
                "how this model writes tool calls cannot be told: its tokenizer has no response_template, and its chat "
                f"template shows no known format; set tool_call_format to one of {', '.join(FORMATS)}, or use a model "
                "that was trained to call tools"
            )

    def parse(
        self, ids: Sequence[int], prefix_ids: Sequence[int] = (), schemas: Sequence[Mapping[str, Any]] = ()
    ) -> Reply:
        """A turn as a message and its calls; whatever the model wrote, this does not raise.

        Args:
            ids: the sampled ids of the turn.
            prefix_ids: what stands before them; may open a thinking block.
            schemas: of the tools the model may call; formats that write values as plain text need them.
        """
        if self._template is not None:
            reply = parse_with_template(self._tokenizer, self._template, ids, prefix_ids, schemas)
            if isinstance(reply, Reply):
                return reply
            if self.format is None:
                return reply_of(self._plain(ids), "", [reply] if reply is not None else [])
        return self._read(ids, prefix_ids, schemas)

    def _read(self, ids: Sequence[int], prefix_ids: Sequence[int], schemas: Sequence[Mapping[str, Any]]) -> Reply:
        assert self.format is not None
        form = FORMATS[self.format]
        text, hidden = self._text(ids, (*form.tags, *THINKING_TOKENS))
        scanned = scan(text, form, thinking=self._thinking(prefix_ids), schemas=schemas)
        if scanned.plain:
            return reply_of(self._plain(ids), "", [])
        content = "".join(_shown(text, span, hidden) for span in scanned.content).strip()
        thoughts = "\n".join(_shown(text, span, hidden).strip() for span in scanned.thoughts)
        return reply_of(content, thoughts, scanned.calls)

    def _plain(self, ids: Sequence[int]) -> str:
        return cast("str", self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def _special(self) -> frozenset[int]:
        """Every id that `skip_special_tokens` leaves out."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return frozenset(self._tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}

    def _text(self, ids: Sequence[int], tags: tuple[str, ...]) -> tuple[str, list[tuple[int, int]]]:
        """The text with those special tokens that are tags, and the spans of these."""
        pieces: list[str] = []
        hidden: list[tuple[int, int]] = []
        length = 0
        for special, run in groupby(ids, key=lambda i: i in self._special):
            for group in [[i] for i in run] if special else [list(run)]:
                piece = self._tokenizer.decode(group, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                if special and piece.strip() not in tags:
                    continue
                if special:
                    hidden.append((length, length + len(piece)))
                pieces.append(piece)
                length += len(piece)
        return "".join(pieces), hidden

    def _thinking(self, prefix_ids: Sequence[int]) -> bool:
        """Whether the turn's opening in the prompt, behind its last special token, leaves a thinking block open."""
        tail = list(prefix_ids[-_PREFIX:])
        tags = {self._tokenizer.convert_tokens_to_ids(tag) for tag in THINKING_TOKENS}
        cut = next((place for place in range(len(tail), 0, -1) if tail[place - 1] in self._special - tags), 0)
        return cut < len(tail) and opens_thinking(self._tokenizer.decode(tail[cut:], skip_special_tokens=False))


def _shown(text: str, span: tuple[int, int], hidden: Sequence[tuple[int, int]]) -> str:
    """The text of a span without the special tokens in it."""
    start, end = span
    inside = [(a, b) for a, b in hidden if start <= a and b <= end]
    borders = [start, *(place for pair in inside for place in pair), end]
    return "".join(text[a:b] for a, b in zip(borders[::2], borders[1::2], strict=True))


def _texts(templates: Any) -> Iterable[str]:
    """The texts of a chat template: one, several by name, or none."""
    if isinstance(templates, Mapping):
        return [text for text in cast("Mapping[str, Any]", templates).values() if isinstance(text, str)]
    return [templates] if isinstance(templates, str) else []


__all__ = ["Reply", "ResponseParser", "ToolCall"]
