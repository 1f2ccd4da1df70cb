"""Dataset row -> clean chat with every picture in its slot.

Columns read: `prompt` (a string, or a list of chat messages) and `image` / `images` (one picture or a list). Pictures
may also stand in the messages themselves. Each picture ends in exactly one slot or the row is refused; the rule:

1. Empty image parts in the messages, `{"type": "image"}`, are filled from the columns in order, over all turns.
2. Without image parts, `<image>` markers in the text are the slots when their number is the number of pictures.
3. Without either, a chat gets its pictures before the text of its first user turn; a plain string is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vlmroll_processors.images import RESIZE_KEYS, Picture, load_picture
from vlmroll_processors.types import Row

MARKER = "<image>"
"""Stands for one picture in a string."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_SOURCE_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
_STRAY_KEYS = (*_SOURCE_KEYS, "images", "video", "videos")
_EMPTY = {"type": "image"}

Part = dict[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A row's prompt, cleaned.

    Attributes:
        messages: for a chat, messages whose content is a list of text parts and `{"type": "image"}` slots; None for a
            plain string.
        segments: for a plain string, the text around its pictures: one segment more than there are pictures.
        pictures: in slot order.
        spots: row and column of each picture, for error messages.
    """

    messages: tuple[Message, ...] | None = None
    segments: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    spots: tuple[str, ...] = ()

    def texts(self) -> Iterator[str]:
        """Every piece of text that came from the row."""
        yield from self.segments
        for message in self.messages or ():
            yield from (part["text"] for part in message.get("content", ()) if part["type"] == "text")


def read_row(row: Row, *, where: str) -> Chat:
    """The row's prompt with its pictures loaded and in their slots.

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
    for column in ("video", "videos"):
        if any(item is not None for item in _items(row.get(column))):
            raise ValueError(f"{where}, column {column!r}: videos are not offered yet; give frames as pictures")
    prompt = row.get("prompt")
    sources = _column_sources(row, where=where)
    if isinstance(prompt, str):
        return _plain(prompt, sources, where=where)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        found = "is missing" if prompt is None else f"is {type(prompt).__name__}"
        found = "is empty" if isinstance(prompt, list | tuple) else found
        raise ValueError(
            f"{where}, column 'prompt': it {found}; give a string, or a list of messages such as "
            "[{'role': 'user', 'content': 'Hi'}]"
        )
    spot = f"{where}, column 'prompt'"
    messages = [_clean_message(message, where=f"{spot}, message {i}") for i, message in enumerate(prompt)]
    _place_column_pictures(messages, sources, where=where)
    pictures = list(_take_pictures(messages, where=spot))
    return Chat(
        messages=tuple(messages),
        pictures=tuple(picture for _, picture in pictures),
        spots=tuple(found for found, _ in pictures),
    )


def _items(value: Any) -> list[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else [value]


def _column_sources(row: Row, *, where: str) -> list[tuple[str, Any]]:
    """(where, source) of each picture in the columns `image` and `images`; null and empty mean none."""
    found: list[tuple[str, Any]] = []
    for column in ("image", "images"):
        value = row.get(column)
        items = _items(value)
        if all(item is None for item in items):
            continue
        if found:
            raise ValueError(f"{where}: both columns 'image' and 'images' hold pictures; keep one of them")
        for i, item in enumerate(items):
            spot = f"{where}, column {column!r}" + (f"[{i}]" if isinstance(value, list | tuple) else "")
            if item is None:
                raise ValueError(f"{spot}: the picture is null beside pictures that are not; remove it or fill it")
            found.append((spot, item))
    return found


def _plain(text: str, sources: list[tuple[str, Any]], *, where: str) -> Chat:
    if not sources:
        return Chat(segments=(text,))
    segments = tuple(text.split(MARKER))
    if len(segments) - 1 != len(sources):
        raise ValueError(
            f"{where}, column 'prompt': {len(sources)} pictures but {len(segments) - 1} {MARKER} markers in a plain "
            f"string; write {MARKER} where each picture goes, or give chat messages"
        )
    return Chat(
        segments=segments,
        pictures=tuple(_picture(source, where=spot) for spot, source in sources),
        spots=tuple(spot for spot, _ in sources),
    )


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
            f"{where}: a message carries a picture under {stray[0]!r}; put it into the column 'images' or into an "
            "image part of the content"
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
    kind = clean.get("type")
    given = [key for key in _SOURCE_KEYS if key in clean]
    if kind in ("text", "image", "image_url"):
        known = ("type", "text", *_SOURCE_KEYS, *RESIZE_KEYS)
        if strange := [key for key in clean if key not in known]:
            raise ValueError(f"{where}: unknown key {strange[0]!r} in a part of type {kind!r}; it holds {known}")
    if kind == "text":
        if not isinstance(clean.get("text"), str):
            raise ValueError(f"{where}: a text part needs a string under 'text'")
        if given:
            raise ValueError(f"{where}: a text part carries a picture under {given[0]!r}; make it a part of type image")
        return {"type": "text", "text": clean["text"]}
    if kind not in ("image", "image_url"):
        hint = "videos are not offered yet" if kind == "video" else "use 'text' or 'image'"
        raise ValueError(f"{where}: unknown part type {kind!r}; {hint}")
    if clean.get("text"):
        raise ValueError(f"{where}: an image part carries text; make it a part of type text")
    if len(given) > 1:
        raise ValueError(f"{where}: an image part has several sources ({', '.join(given)}); keep one")
    return {"type": "image", **{key: clean[key] for key in (*given, *RESIZE_KEYS) if key in clean}}


def _place_column_pictures(messages: list[Message], sources: list[tuple[str, Any]], *, where: str) -> None:
    """Fill the empty image parts from the columns, or make slots by rules 2 and 3."""
    parts = [part for message in messages for part in message.get("content", ()) if part["type"] == "image"]
    empty = [part for part in parts if not any(key in part for key in _SOURCE_KEYS)]
    if not parts and sources:
        empty = _make_slots(messages, len(sources), where=where)
    if len(empty) != len(sources):
        raise ValueError(
            f"{where}: {len(sources)} pictures in the columns 'image'/'images' but {len(empty)} empty image slots in "
            "the messages; give one picture for each {'type': 'image'} part"
        )
    for part, (spot, source) in zip(empty, sources, strict=True):
        part["image"], part["where"] = source, spot


def _make_slots(messages: list[Message], num_pictures: int, *, where: str) -> list[Part]:
    users = [message for message in messages if message["role"] == "user"]
    if not users:
        raise ValueError(f"{where}, column 'prompt': no user message to put {num_pictures} pictures into; add one")
    markers = sum(part["text"].count(MARKER) for message in messages for part in message.get("content", ()))
    if markers not in (0, num_pictures):
        raise ValueError(
            f"{where}, column 'prompt': {num_pictures} pictures but {markers} {MARKER} markers; write as many markers "
            "as there are pictures, or use {'type': 'image'} parts"
        )
    if markers == 0:
        slots = [dict(_EMPTY) for _ in range(num_pictures)]
        users[0]["content"] = [*slots, *users[0]["content"]]
        return slots
    slots = []
    for message in (message for message in messages if "content" in message):
        content: list[Part] = []
        for part in message["content"]:
            for i, text in enumerate(part["text"].split(MARKER)):
                if i:
                    slots.append(dict(_EMPTY))
                    content.append(slots[-1])
                if text:
                    content.append({"type": "text", "text": text})
        message["content"] = content
    return slots


def _take_pictures(messages: list[Message], *, where: str) -> Iterator[tuple[str, Picture]]:
    """Load the picture of every image part, in order, with its spot, and leave a bare slot in its place."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.get("content", ())):
            if part["type"] != "image":
                continue
            spot = part.get("where", f"{where}, message {i}, part {j}")
            key = next(key for key in _SOURCE_KEYS if key in part)
            source = f"data:image/unknown;base64,{part[key]}" if key == "base64" else part[key]
            yield spot, _picture(source, where=spot, size=part)
            message["content"][j] = dict(_EMPTY)


def _picture(source: Any, *, where: str, size: Mapping[str, Any] | None = None) -> Picture:
    """The picture with its size keys, which may stand beside the source in a part or in the column's item."""
    resize = {key: size[key] for key in RESIZE_KEYS if size and key in size}
    if isinstance(source, Mapping):
        item = cast("Mapping[str, Any]", source)
        resize |= {key: item[key] for key in RESIZE_KEYS if item.get(key) is not None}
        source = item["image"] if item.get("image") is not None else item
    for key, value in resize.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{where}: {key} must be a whole number of pixels above 0, got {value!r}")
    if ("resized_height" in resize) != ("resized_width" in resize):
        raise ValueError(f"{where}: give both resized_height and resized_width, or neither")
    return load_picture(source, where=where, resize=resize)
