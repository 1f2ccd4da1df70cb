"""Turns and observations as JSON, for checkpoints, and back.

Tensors are not stored: later turns are encoded again from what was sampled and from their messages, which gives the
same values. Pictures are stored in their normalised form, as PNG.
"""

import base64
import io
import json
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
    return [
        {"png" if key == "image" else key: _png(value) if key == "image" else value for key, value in part.items()}
        for part in parts
    ]


def parts_from_json(parts: Parts) -> tuple[dict[str, Any], ...]:
    """The content parts again."""
    return tuple(
        {"image" if key == "png" else key: _image(value) if key == "png" else value for key, value in part.items()}
        for part in parts
    )


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
    made: dict[Any, Continuation],
) -> Turns:
    """The turns of a completion again.

    Args:
        prompt: the one that the completion began with.
        adapter: encodes what tools returned.
        options: the row's own arguments for the chat template.
        made: continuations that were made again before, which siblings that did the same share.

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
    told = json.dumps([message for message in saved["messages"] if message["role"] != "assistant"])
    key = id(prompt), tuple(completion_ids[:count]), told, repr(sorted(options.items()))
    if key not in made:
        for sampled, answer in zip(runs[::2], answers, strict=False):
            later = adapter.next_turn(later, sampled, answer, template_kwargs=options)
        if later.prompt_ids != (*prompt.prompt_ids, *completion_ids[:count]):
            raise ValueError("its later turns cannot be made again; resume from a checkpoint at the end of a round")
        made[key] = Continuation(start=prompt, prompt=later)
    return Turns(
        sampled=tuple(saved["sampled"]),
        continuation=made[key],
        messages=tuple(messages),
        **{name: saved[name] for name in _COUNTS},
    )
