"""A cleaned chat -> the text of the prompt, by the chat template, with one slot for each picture and video."""

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from vlmroll_processors.families import TEXT, Family
from vlmroll_processors.media import Message
from vlmroll_processors.messages import Chat, without_nulls
from vlmroll_processors.types import Row

OWN_TEMPLATE_KWARGS = ("messages", "conversation", "tokenize", "add_generation_prompt", "continue_final_message")
"""Arguments of a chat template that are set here."""
_PARTS = ("{'type': 'text'", '{"type": "text"')
_REFUSALS = (TemplateError, ValueError, TypeError, KeyError, AttributeError)


def render(
    family: Family,
    processor: Any,
    chat: Chat,
    template_kwargs: Mapping[str, Any],
    *,
    reserved: Collection[str],
    closed: bool = False,
    where: str,
) -> str:
    """The prompt as text, with one slot for each picture and video.

    Args:
        template_kwargs: passed to the chat template.
        reserved: tokens that the row's own text may not hold.
        closed: the conversation ends with its last message; else the next token is one of the assistant's.
        where: names the row and the column in error messages.

    Raises:
        ValueError: the text holds a reserved token, or the chat template is missing or refuses the messages.
    """
    for text in chat.texts():
        if held := [token for token in reserved if token in text]:
            raise ValueError(
                f"{where}: the text holds the reserved {held[0]}; write <image> or an image part where a picture goes, "
                "or remove it"
            )
    if chat.messages is None:
        written = [family.written_as(medium.kind) for medium in chat.media]
        return "".join(piece for pair in zip(chat.segments, [*written, ""], strict=True) for piece in pair)
    if getattr(processor, "chat_template", None) is None:
        raise ValueError(
            f"{where}: the tokenizer has no chat template; give plain strings, or set processing_class.chat_template"
        )
    goes_on = chat.messages[-1]["role"] == "assistant" and not closed
    if goes_on and not any(part["type"] == "text" for part in chat.messages[-1].get("content", ())):
        raise ValueError(f"{where}: it ends in an assistant message without text, which cannot be continued; drop it")
    # Some processors warn of arguments of their own that they add themselves, unless they find some here.
    quiet = {} if not hasattr(processor, "tokenizer") else {"processor_kwargs": {"padding": False}}
    options = {"tokenize": False, "add_generation_prompt": not (goes_on or closed), "continue_final_message": goes_on}
    refusal: Exception | None = None
    incomplete: str | None = None
    for messages in _forms(family, chat.messages):
        try:
            text: str = processor.apply_chat_template(messages, **options, **quiet, **template_kwargs)
        except _REFUSALS as error:
            # Templates refuse roles and orders in words of their own, or trip over values that they do not expect.
            refusal = refusal or error
            continue
        if any(part in text and not any(part in piece for piece in chat.texts()) for part in _PARTS):
            # A template that writes the list of parts as it stands where it expects a string, as for system messages.
            refusal = refusal or ValueError("it writes the parts of a message instead of their text")
        elif _holds_results(chat, text):
            return text
        else:
            incomplete = incomplete or text
    if incomplete is not None:
        return incomplete  # it may write results in a way of its own
    raise ValueError(f"{where}: the chat template refuses the messages: {refusal}") from refusal


def _forms(family: Family, messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The messages in the forms that templates expect, the most usual one first.

    Some want strings where a message is text alone, or only there where the others have lists; some do not take a
    message without content, which calls of tools alone may be.
    """
    plain = [_text_only(message) if _is_text(message) else message for message in messages]
    forms = [plain] if family is TEXT or plain == list(messages) else [list(messages), plain]
    yield from forms
    if all("content" in message for message in messages):
        return
    for form, empty in itertools.product(forms, ("", [{"type": "text", "text": ""}], None)):
        yield [message if "content" in message else {**message, "content": empty} for message in form]


def _holds_results(chat: Chat, text: str) -> bool:
    """Whether the text of every tool's result is there, as it is or escaped as in JSON."""
    tools = Chat(messages=tuple(message for message in chat.messages or () if message["role"] == "tool"))
    results = [result.strip() for result in tools.texts()]
    return all(result in text or json.dumps(result)[1:-1] in text for result in results)


def adds_special_tokens(family: Family, processor: Any, chat: Chat, text: str) -> bool:
    """Whether the tokenizer adds its special tokens: by the processor's rule, but never a second one in front."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if chat.messages is not None and (processor is tokenizer or family is TEXT):
        return False  # a tokenizer's template writes them itself
    rules = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {})
    adds = rules.get("text_kwargs", {}).get("add_special_tokens", True)
    bos = tokenizer.bos_token
    return adds and not (chat.messages is not None and bos is not None and text.startswith(bos))


def template_kwargs_of(row: Row, *, where: str) -> dict[str, Any]:
    """The arguments that a row has for the chat template."""
    value = row.get("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}, column 'chat_template_kwargs': give a mapping, got {type(value).__name__}")
    kwargs = without_nulls(value)  # Arrow gives every row the keys of all rows
    if own := [name for name in OWN_TEMPLATE_KWARGS if name in kwargs]:
        raise ValueError(f"{where}, column 'chat_template_kwargs': {own[0]} is set by the adapter; remove it")
    return kwargs


def _is_text(message: Mapping[str, Any]) -> bool:
    return all(part["type"] == "text" for part in message.get("content", ()))


def _text_only(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text parts joined to a string, as templates of text models expect."""
    if "content" not in message:
        return dict(message)
    return {**message, "content": "".join(part["text"] for part in message["content"])}
