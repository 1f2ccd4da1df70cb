"""What a tool has returned, as parts of a message: text and pictures."""

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import threading
import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
from PIL import Image

from vlmroll.tools.types import MAX_DEPTH, Part, clean
from vlmroll_processors.images import RESIZE_KEYS, read_picture

MAX_CHARACTERS = 200_000
"""Of all texts of a result: some 50,000 tokens. More would be tokenised for seconds, to be dropped as too long."""

RETURN = "return text, numbers, lists, dicts or pictures"
# Several calls may return the same picture, and Pillow decodes a file at first use, which two threads cannot do at a
# time. By the identity of the picture; there are so many that two pictures seldom share one.
_READING = tuple(threading.Lock() for _ in range(61))
_TEXTS = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, pathlib.PurePath, uuid.UUID)


def content_of(value: Any) -> tuple[Part, ...]:
    """The parts of the message that tells the model about a value.

    A string stands as it is, None as `null`. Numbers, lists, dicts, dataclasses, sets, arrays, dates, enums and paths
    become JSON, in which NaN and infinities stand as `NaN` and `Infinity`. A PIL picture of any mode is a picture, and
    so is an array of uint8 [H, W, 3] or [H, W, 4]. A list with pictures or message parts in it gives its items in
    order. A picture anywhere else leaves its name in the JSON, `"picture 1"`, and follows it.

    Raises:
        ValueError: it is nothing that can be told, a picture cannot be read, or there are more than `MAX_CHARACTERS` of
            text; the message says what to return.

    Example:
        >>> content_of({"found": True})
        ({'type': 'text', 'text': '{"found": true}'},)
    """
    writer = _Writer()
    if isinstance(value, list | tuple) and any(is_part(item) or is_picture(item) for item in cast("Any", value)):
        writer.mixed(cast("Sequence[Any]", value))
    else:
        writer.item(value)
    length = sum(len(part["text"]) for part in writer.parts if part["type"] == "text")
    if length > MAX_CHARACTERS:
        raise ValueError(f"the result has {length} characters, and at most {MAX_CHARACTERS} are shown; return less")
    return tuple(writer.parts)


def is_picture(value: Any) -> bool:
    """Whether a value is a picture by its type."""
    if isinstance(value, Image.Image):
        return True
    return (
        _is_array(value)
        and str(value.dtype) in ("uint8", "torch.uint8")
        and value.ndim == 3
        and value.shape[2] in (3, 4)
    )


class _Writer:
    """Collects parts; pictures are numbered in the order in which they come."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._num_pictures = 0
        self._inside: list[int] = []  # ids of the containers around the value, against cycles

    def mixed(self, items: Sequence[Any]) -> None:
        """Items in order; those that are neither parts nor pictures stand on lines of their own."""
        lines: list[str] = []
        for item in items:
            whole = is_picture(item) or is_part(item)
            pictures: list[Part] = []
            if not whole:
                lines.append(self._told(item, pictures))
            if lines and (whole or pictures):
                self.parts.append(_text_part("\n".join(lines)))
                lines.clear()
            if whole:
                self.item(item)
            self.parts += pictures
        if lines:
            self.parts.append(_text_part("\n".join(lines)))

    def item(self, value: Any) -> None:
        """One value that stands for itself."""
        if is_picture(value):
            self.parts.append(self._picture(value))
        elif not is_part(value):
            pictures: list[Part] = []
            self.parts.append(_text_part(self._told(value, pictures)))
            self.parts += pictures
        elif value["type"] == "text":
            self.parts.append(_text_part(value["text"]))
        else:
            self.parts.append(self._picture(value["image"], {key: value[key] for key in RESIZE_KEYS if key in value}))

    def _told(self, value: Any, pictures: list[Part]) -> str:
        """The value as text; `pictures` receives those in it."""
        return str(value) if isinstance(value, str) else json.dumps(self._plain(value, pictures), ensure_ascii=False)

    def _picture(self, value: Any, keys: Mapping[str, int] | None = None) -> Part:
        self._num_pictures += 1
        source = np.asarray(value.cpu()) if hasattr(value, "cpu") else value
        with _READING[id(value) % len(_READING)]:
            _, image = read_picture(source, where=f"picture {self._num_pictures} of the result")
        return {"type": "image", "image": image, **(keys or {})}

    def _plain(self, value: Any, pictures: list[Part]) -> Any:
        """The value as JSON holds it."""
        if is_picture(value):
            pictures.append(self._picture(value))
            return f"picture {self._num_pictures}"
        if _is_array(value):
            return self._plain(value.tolist(), pictures)
        if isinstance(value, enum.Enum):
            return self._plain(value.value, pictures)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, _TEXTS):
            return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)
        if id(value) in self._inside or len(self._inside) > MAX_DEPTH:
            raise ValueError(f"the result holds itself, or is nested deeper than {MAX_DEPTH} levels; {RETURN}")
        self._inside.append(id(value))
        plain = self._container(value, pictures)
        self._inside.pop()
        return plain

    def _container(self, value: Any, pictures: list[Part]) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {_key(key): self._plain(item, pictures) for key, item in items}
        if isinstance(value, Set):
            plain = [self._plain(item, pictures) for item in cast("Set[Any]", value)]
            return sorted(plain, key=lambda item: (type(item).__name__, json.dumps(item)))  # sets have no order
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            return [self._plain(item, pictures) for item in cast("Sequence[Any]", value)]
        raise ValueError(f"the tool returned a value of type {type(value).__name__}, which cannot be told; {RETURN}")


def _key(key: Any) -> Any:
    key = key.value if isinstance(key, enum.Enum) else key.tolist() if _is_array(key) else key
    if key is None or isinstance(key, bool | int | float | str):
        return key
    if isinstance(key, _TEXTS):
        return str(key)
    raise ValueError(f"the result has a key of type {type(key).__name__}; use strings as keys")


def _text_part(text: str) -> Part:
    if clean(text) != text:
        raise ValueError("the result holds text that is not valid Unicode; decode bytes before you return them")
    return {"type": "text", "text": text}


def is_part(value: Any) -> bool:
    """Whether a value is written as a part of a message."""
    if not isinstance(value, Mapping):
        return False
    found = cast("Mapping[Any, Any]", value)
    if found.get("type") == "image":
        return "image" in found and set(found) <= {"type", "image", *RESIZE_KEYS}
    return found.get("type") == "text" and set(found) == {"type", "text"} and isinstance(found["text"], str)


def _is_array(value: Any) -> bool:
    """An array, a number of one, or a tensor."""
    return hasattr(value, "dtype") and hasattr(value, "tolist") and hasattr(value, "ndim")
