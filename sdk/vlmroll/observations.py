"""What environments say at the start of a rollout, in the chat messages of its prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, cast


def is_chat(prompt: Any) -> bool:
    """Whether a row's prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and all(isinstance(message, Mapping) for message in cast("Any", prompt))


def with_observation(
    messages: Sequence[Any], observation: Sequence[Mapping[str, Any]], *, where: str = "prompt"
) -> list[Any]:
    """Chat messages with an observation at the end of the last user message.

    Raises:
        ValueError: there is no user message.
    """
    changed = list(messages)
    last = next((i for i in reversed(range(len(changed))) if changed[i].get("role") == "user"), None)
    if last is None:
        raise ValueError(f"{where}: no user message to add the environment's observation to; add one")
    content = changed[last].get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    changed[last] = {**changed[last], "content": [*parts, *observation]}
    return changed
