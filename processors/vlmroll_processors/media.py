"""Pictures and videos of a row: which there are, and the slot that each of them goes into.

The columns are `image` / `images` and `video` / `videos`; pictures and videos may also stand in the messages. Each ends
in exactly one slot or the row is refused; the rule, for pictures and videos alike:

1. Empty parts in the messages, `{"type": "image"}`, are filled from the columns in order, over all turns.
2. Without such parts, `<image>` markers in the text are the slots when their number is the number of pictures.
3. Without either, a chat gets its pictures before the text of its first user turn; a plain string is refused.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from vlmroll_processors.images import RESIZE_KEYS
from vlmroll_processors.types import Row
from vlmroll_processors.videos import VIDEO_KEYS

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = ("image", "video")
NOUNS: Mapping[str, str] = {"image": "pictures", "video": "videos"}
SOURCE_KEYS: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "image_url", "url", "path", "base64", "bytes"),
    "video": ("video", "path", "bytes"),
}
SIZE_KEYS: Mapping[str, tuple[str, ...]] = {"image": RESIZE_KEYS, "video": VIDEO_KEYS}
_MARKER = re.compile("<(image|video)>")

Part = dict[str, Any]
Message = dict[str, Any]


def _no_keys() -> Mapping[str, float]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """A picture or video that is not read yet.

    Attributes:
        kind: "image" or "video".
        source: what the row holds.
        keys: size keys that stand beside it (`SIZE_KEYS`).
        where: row and column, for error messages.
    """

    kind: Kind
    source: Any = field(repr=False)
    keys: Mapping[str, float] = field(default_factory=_no_keys)
    where: str


def column_media(row: Row, *, where: str) -> dict[Kind, list[Medium]]:
    """What the columns of the row hold; null and empty mean none."""
    found: dict[Kind, list[Medium]] = {"image": [], "video": []}
    for kind in KINDS:
        for column in (kind, f"{kind}s"):
            value = row.get(column)
            # The one value of `video` may be a list of frames.
            several = isinstance(value, list | tuple) and column != "video"
            items = list(cast("Sequence[Any]", value)) if several else [value]
            if all(item is None for item in items) or (column == "video" and _is_empty(value)):
                continue
            if found[kind]:
                raise ValueError(f"{where}: both columns '{kind}' and '{kind}s' hold {NOUNS[kind]}; keep one of them")
            for i, item in enumerate(items):
                spot = f"{where}, column {column!r}" + (f"[{i}]" if several else "")
                if item is None:
                    raise ValueError(f"{spot}: it is null beside {NOUNS[kind]} that are not; remove it or fill it")
                found[kind].append(_medium(kind, item, where=spot))
    return found


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(item is None for item in cast("Sequence[Any]", value))


def split_plain(text: str, columns: Mapping[Kind, list[Medium]], *, where: str) -> tuple[list[str], list[Medium]]:
    """A plain string cut at its markers: the texts around the media, and the media in their order."""
    for kind, media in columns.items():
        markers = text.count(f"<{kind}>")
        if media and markers != len(media):
            raise ValueError(
                f"{where}, column 'prompt': {len(media)} {NOUNS[kind]} but {markers} <{kind}> markers in a plain "
                f"string; write <{kind}> where each of them goes, or give chat messages"
            )
    waiting = {kind: iter(media) for kind, media in columns.items() if media}
    segments, order = [""], list[Medium]()
    for piece in _pieces(text, [kind for kind in KINDS if kind in waiting]):
        if piece in waiting:
            order.append(next(waiting[piece]))
            segments.append("")
        else:
            segments[-1] += piece
    return segments, order


def _pieces(text: str, kinds: Sequence[Kind]) -> Iterator[Any]:
    """Text, and in the place of each marker of one of the kinds the kind."""
    end = 0
    for match in _MARKER.finditer(text):
        if match[1] in kinds:
            yield from (piece for piece in (text[end : match.start()],) if piece)
            yield match[1]
            end = match.end()
    yield from (piece for piece in (text[end:],) if piece)


def place(messages: list[Message], columns: Mapping[Kind, list[Medium]], *, where: str) -> None:
    """Fill the empty parts of the messages from the columns, or make slots by rules 2 and 3."""
    for kind in reversed(KINDS):  # rule 3 puts slots in front: pictures stand before videos
        media = columns[kind]
        parts = [part for message in messages for part in message.get("content", ()) if part["type"] == kind]
        empty = [part for part in parts if not any(key in part for key in SOURCE_KEYS[kind])]
        if not parts and media:
            empty = _make_slots(kind, messages, len(media), where=where)
        if len(empty) != len(media):
            raise ValueError(
                f"{where}: {len(media)} {NOUNS[kind]} in the columns '{kind}'/'{kind}s' but {len(empty)} empty {kind} "
                f"slots in the messages; give one for each {{'type': '{kind}'}} part"
            )
        for part, medium in zip(empty, media, strict=True):
            part["medium"] = medium


def _make_slots(kind: Kind, messages: list[Message], count: int, *, where: str) -> list[Part]:
    users = [message for message in messages if message["role"] == "user"]
    if not users:
        raise ValueError(f"{where}, column 'prompt': no user message to put {count} {NOUNS[kind]} into; add one")
    texts = [part["text"] for message in messages for part in message.get("content", ()) if part["type"] == "text"]
    markers = sum(text.count(f"<{kind}>") for text in texts)
    if markers not in (0, count):
        raise ValueError(
            f"{where}, column 'prompt': {count} {NOUNS[kind]} but {markers} <{kind}> markers; write as many markers "
            f"as there are {NOUNS[kind]}, or use {{'type': '{kind}'}} parts"
        )
    if markers == 0:
        slots = [{"type": kind} for _ in range(count)]
        users[0]["content"] = [*slots, *users[0]["content"]]
        return slots
    slots = list[Part]()
    for message in (message for message in messages if "content" in message):
        content: list[Part] = []
        for part in message["content"]:
            if part["type"] != "text":
                content.append(part)
                continue
            for piece in _pieces(part["text"], (kind,)):
                if piece == kind:
                    slots.append({"type": kind})
                content.append(slots[-1] if piece == kind else {"type": "text", "text": piece})
        message["content"] = content
    return slots


def take(messages: list[Message], *, where: str) -> Iterator[Medium]:
    """The medium of every slot, in order; a bare slot stays in its place."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.get("content", ())):
            kind = part["type"]
            if kind == "text":
                continue
            if (medium := part.get("medium")) is None:
                key = next(key for key in SOURCE_KEYS[kind] if key in part)
                source = f"data:image/unknown;base64,{part[key]}" if key == "base64" else part[key]
                medium = _medium(kind, source, where=f"{where}, message {i}, part {j}")
            own = {key: part[key] for key in SIZE_KEYS[kind] if key in part}
            keys = _checked(kind, {**own, **medium.keys}, where=medium.where)
            yield Medium(kind=kind, source=medium.source, keys=keys, where=medium.where)
            message["content"][j] = {"type": kind}


def _medium(kind: Kind, source: Any, *, where: str) -> Medium:
    """A medium with the size keys that stand beside its source in the column's item."""
    keys: dict[str, Any] = {}
    if isinstance(source, Mapping):
        item = {key: value for key, value in cast("Mapping[str, Any]", source).items() if value is not None}
        known = (kind, "bytes", "path", *SIZE_KEYS[kind])
        if strange := [key for key in item if key not in known]:
            raise ValueError(f"{where}: unknown key {strange[0]!r} beside a {kind}; there may be {', '.join(known)}")
        keys = {key: item[key] for key in SIZE_KEYS[kind] if key in item}
        source = next((item[key] for key in known[:3] if key in item), None)
        if source is None:
            raise ValueError(f"{where}: it has neither 'bytes' nor 'path' of a {kind}; give one of them")
    return Medium(kind=kind, source=source, keys=_checked(kind, keys, where=where), where=where)


def _checked(kind: Kind, keys: Mapping[str, Any], *, where: str) -> Mapping[str, float]:
    for key, value in keys.items():
        whole, start = key in RESIZE_KEYS, key == "video_start"
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not (0 < value < math.inf or (value == 0 and start)):
            unit = "a whole number of pixels" if whole else "a number"
            raise ValueError(f"{where}: {key} must be {unit}{' of at least' if start else ' above'} 0, got {value!r}")
    if ("resized_height" in keys) != ("resized_width" in keys):
        raise ValueError(f"{where}: give both resized_height and resized_width, or neither")
    return keys
