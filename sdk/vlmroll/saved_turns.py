"""Turns and observations as JSON, for checkpoints, and back.

Tensors are not stored: later turns are encoded again from what was sampled and from their messages, which gives the
same values. Pictures are stored in their normalised form, as PNG.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from PIL import Image

from vlmroll.types import Turns
from vlmroll_processors import Continuation, ProcessorAdapter, Prompt
from vlmroll_processors.images import read_picture

_COUNTS = ("num_calls", "num_failed", "num_timed_out", "num_rolled_back")
Parts = Sequence[Mapping[str, Any]]


def parts_to_json(parts: Parts) -> list[dict[str, Any]]:
    """Content parts with their pictures as base64 of PNG."""
    return [{"type": "image", "png": _png(part["image"])} if part["type"] == "image" else dict(part) for part in parts]


def parts_from_json(parts: Parts) -> tuple[dict[str, Any], ...]:
    """The content parts again."""
    return tuple({"type": "image", "image": _image(part["png"])} if "png" in part else dict(part) for part in parts)


def _png(source: Any) -> str:
    buffer = io.BytesIO()
    read_picture(source, where="a picture of a tool")[1].save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _image(png: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(png)))


def turns_to_json(turns: Turns) -> dict[str, Any]:
    """What is needed to make the turns again; values for reward functions have done their work and are left out."""
    messages: list[dict[str, Any]] = []
    for message in turns.messages:
        content = message.get("content")
        parts = isinstance(content, list | tuple)
        messages.append({**message, "content": parts_to_json(content)} if parts else dict(message))  # pyright: ignore
    added = turns.continuation.added
    return {
        "sampled": turns.sampled,
        "num_added": 0 if added is None else added.num_tokens,
        "messages": messages,
        **{name: getattr(turns, name) for name in _COUNTS},
    }


def turns_from_json(
    saved: Mapping[str, Any],
    prompt: Prompt,
    completion_ids: Sequence[int],
    adapter: ProcessorAdapter,
    options: Mapping[str, Any],
) -> Turns:
    """The turns of a completion again.

    Args:
        prompt: the one that the completion began with.
        adapter: encodes what tools returned.
        options: the row's own arguments for the chat template.

    Raises:
        ValueError: the messages give other ids now.
    """
    messages: list[dict[str, Any]] = []
    for message in saved["messages"]:
        content = message.get("content")
        messages.append(
            {**message, "content": list(parts_from_json(content))} if isinstance(content, list) else message
        )
    later, count = prompt, int(saved["num_added"])
    answers = [
        list(group) for own, group in groupby(messages, key=lambda message: message["role"] == "assistant") if not own
    ]
    runs = [
        [ids for _, ids in group]
        for _, group in groupby(zip(saved["sampled"][:count], completion_ids, strict=False), key=lambda pair: pair[0])
    ]
    for sampled, answer in zip(runs[::2], answers, strict=False):
        later = adapter.next_turn(later, sampled, answer, template_kwargs=options)
    if later.prompt_ids != (*prompt.prompt_ids, *completion_ids[:count]):
        raise ValueError("its later turns cannot be made again; resume from a checkpoint at the end of a round")
    return Turns(
        sampled=tuple(saved["sampled"]),
        continuation=Continuation(start=prompt, prompt=later),
        messages=tuple(messages),
        **{name: saved[name] for name in _COUNTS},
    )
