"""Dataset row -> clean chat with every picture and video in its slot.

Columns read: `prompt` (a string, or a list of chat messages), `image` / `images` and `video` / `videos`. How pictures
find their slots is told in `vlmroll_processors.media`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, cast

from vlmroll_processors.media import (
    KINDS,
    SIZE_KEYS,
    SOURCE_KEYS,
    Kind,
    Medium,
    Message,
    Part,
    column_media,
    place,
    split_plain,
    take,
)
from vlmroll_processors.types import Row

ROLES = ("system", "developer", "user", "assistant", "tool")
_STRAY_KEYS = tuple(dict.fromkeys(key for kind in KINDS for key in (*SOURCE_KEYS[kind], f"{kind}s")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A row's prompt, cleaned.

    Attributes:
        messages: for a chat, messages whose content is a list of text parts and `{"type": "image"}` slots; None for a
            plain string.
        segments: for a plain string, the text around its media: one segment more than there are media.
        media: pictures and videos in slot order, not read yet.
    """

    messages: tuple[Message, ...] | None = None
    segments: tuple[str, ...] = ()
    media: tuple[Medium, ...] = ()

    def texts(self) -> Iterator[str]:
        """Every run of text that came from the row; parts that stand side by side are one."""
        yield from self.segments
        for message in self.messages or ():
            for kind, parts in groupby(message.get("content", ()), key=itemgetter("type")):
                if kind == "text":
                    yield "".join(part["text"] for part in parts)


def placed_row(row: Row, *, where: str) -> Row:
    """The row with the pictures and videos of its columns in the messages, so that messages may be added to it.

    Args:
        row: with chat messages.
        where: names the row in error messages.

    Raises:
        ValueError: names the row, the column and the fix.

    Example:
        >>> row = {"prompt": [{"role": "user", "content": "See <image>."}], "image": "a.png"}
        >>> [part["type"] for part in placed_row(row, where="row 0")["prompt"][0]["content"]]
        ['text', 'image', 'text']
    """
    columns = column_media(row, where=where)
    if not any(columns.values()):
        return row
    spot = f"{where}, column 'prompt'"
    messages = [_clean_message(message, where=f"{spot}, message {i}") for i, message in enumerate(row["prompt"])]
    place(messages, columns, where=where)
    for message in messages:
        for part in message.get("content", ()):
            medium = part.pop("medium", None)
            part |= {} if medium is None else {part["type"]: medium.source, **medium.keys}
    media = [column for kind in KINDS for column in (kind, f"{kind}s")]
    return {**{name: value for name, value in row.items() if name not in media}, "prompt": messages}


def read_row(row: Row, *, where: str) -> Chat:
    """The row's prompt with its pictures and videos in their slots.

    Args:
        row: column name to value.
        where: names the row in error messages, such as "row 3".

    Raises:
        ValueError: names the row, the column and the fix.

    Example:
        >>> read_row({"prompt": [{"role": "user", "content": "hi"}]}, where="row 0").messages
        ({'role': 'user', 'content': [{'type': 'text', 'text': 'hi'}]},)
    """
    if not isinstance(cast("object", row), Mapping):
        raise ValueError(f"{where}: a row maps column names to values, got {type(row).__name__}")
    prompt = row.get("prompt")
    columns = column_media(row, where=where)
    if isinstance(prompt, str):
        segments, media = split_plain(prompt, columns, where=where)
        return Chat(segments=tuple(segments), media=tuple(media))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        found = "is missing" if prompt is None else f"is {type(prompt).__name__}"
        found = "is empty" if isinstance(prompt, list | tuple) else found
        raise ValueError(
            f"{where}, column 'prompt': it {found}; give a string, or a list of messages such as "
            "[{'role': 'user', 'content': 'Hi'}]"
        )
    return read_messages(prompt, columns, where=f"{where}, column 'prompt'", columns_of=where)


def read_messages(
    messages: Sequence[Any],
    columns: Mapping[Kind, list[Medium]],
    *,
    where: str,
    columns_of: str = "",
) -> Chat:
    """Messages with their pictures and videos in their slots.

    Args:
        messages: as in a row's prompt.
        columns: pictures and videos that do not stand in the messages.
        where: names what holds the messages in error messages.
        columns_of: names what holds the columns.

    Raises:
        ValueError: names the message and the fix.
    """
    clean = [_clean_message(message, where=f"{where}, message {i}") for i, message in enumerate(messages)]
    place(clean, columns, where=columns_of or where)
    media = tuple(take(clean, where=where))
    return Chat(messages=tuple(clean), media=media)


def _clean_message(message: object, *, where: str) -> Message:
    """A copy without Arrow's null keys, with the content as a list of parts."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: a message is a mapping with 'role' and 'content', got {type(message).__name__}")
    clean: Message = {}
    for key, value in cast("Mapping[str, Any]", message).items():
        if value is not None:
            clean[key] = value if key == "content" else without_nulls(value)
    if clean.get("role") not in ROLES:
        raise ValueError(f"{where}: unknown role {clean.get('role')!r}; use one of {', '.join(ROLES)}")
    if stray := [key for key in _STRAY_KEYS if key in clean]:
        raise ValueError(
            f"{where}: a message carries a picture or video under {stray[0]!r}; put it into a column, 'images' or "
            "'videos', or into a part of the content"
        )
    content = clean.get("content")
    if isinstance(content, str):
        clean["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, Sequence):
        clean["content"] = [_clean_part(part, where=f"{where}, part {i}") for i, part in enumerate(content)]
    elif content is not None or clean["role"] != "assistant" or "tool_calls" not in clean:
        raise ValueError(f"{where}: 'content' must be a string or a list of parts, got {type(content).__name__}")
    return clean


def without_nulls(value: Any) -> Any:
    """A copy without the keys that Arrow adds to make all rows alike."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: without_nulls(item) for key, item in items if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in cast("list[Any]", value)]
    return value


def _clean_part(part: object, *, where: str) -> Part:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}: a content part is a mapping with 'type', got {type(part).__name__}")
    clean: Part = {key: value for key, value in cast("Mapping[str, Any]", part).items() if value is not None}
    url = clean.pop("image_url", None)
    url = cast("Mapping[str, Any]", url).get("url") if isinstance(url, Mapping) else url
    if url is not None:
        clean["image_url"] = url
    kind = "image" if clean.get("type") == "image_url" else clean.get("type")
    if kind not in ("text", *KINDS):
        raise ValueError(f"{where}: unknown part type {kind!r}; use 'text', 'image' or 'video'")
    sources = SOURCE_KEYS.get(kind, _STRAY_KEYS)
    known = ("type", "text", *sources, *SIZE_KEYS.get(kind, SIZE_KEYS["image"]))
    if strange := [key for key in clean if key not in known]:
        raise ValueError(f"{where}: unknown key {strange[0]!r} in a part of type {kind!r}; it holds {known}")
    given = [key for key in sources if key in clean]
    if kind == "text":
        if not isinstance(clean.get("text"), str):
            raise ValueError(f"{where}: a text part needs a string under 'text'")
        if given:
            raise ValueError(f"{where}: a text part carries a picture under {given[0]!r}; make it a part of type image")
        return {"type": "text", "text": clean["text"]}
    if clean.get("text"):
        raise ValueError(f"{where}: the {kind} part carries text; make it a part of type text")
    if len(given) > 1:
        raise ValueError(f"{where}: the {kind} part has several sources ({', '.join(given)}); keep one")
    return {"type": kind, **{key: clean[key] for key in (*given, *SIZE_KEYS[kind]) if key in clean}}
