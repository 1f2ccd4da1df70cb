"""What environments say at the start of a rollout, in the chat messages of its prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, cast


def is_chat(prompt: Any) -> bool:
    """Whether a row's prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and all(isinstance(message, Mapping) for message in cast("Any", prompt))


def last_text(prompt: Any) -> str:
    """The text that an observation will stand behind: of the end of a prompt's last user message."""
    if not is_chat(prompt):
        return ""
    contents = [message.get("content") for message in prompt if message.get("role") == "user"]
    content = contents[-1] if contents else ""
    last = content[-1] if isinstance(content, list | tuple) and content else content
    text = cast("Mapping[str, Any]", last).get("text") if isinstance(last, Mapping) else last
    return text if isinstance(text, str) else ""


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
