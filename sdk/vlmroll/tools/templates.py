"""Reading a turn by the `response_template` of its tokenizer, which transformers interprets."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from vlmroll.tools.types import Reply, ToolCall, checked_call, clean, reply_of

# What transformers' reader raises for a turn that does not follow the template: a region that is no JSON, a missing
# key, a value of another type, thousands of brackets.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def parse_with_template(
    tokenizer: Any,
    template: Mapping[str, Any],
    ids: Sequence[int],
    prefix_ids: Sequence[int],
    schemas: Sequence[Mapping[str, Any]],
) -> Reply | ToolCall | None:
    """The turn; where the template cannot read it, a call with an error if it tries to call, or else None."""
    tools = [dict(schema) for schema in schemas]
    try:
        # An empty list of ids would be taken for an empty batch, and an array for a batch of its items.
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        prefix = tokenizer.decode(list(prefix_ids), skip_special_tokens=False)
        parsed = tokenizer.parse_response(text, dict(template), prefix=prefix, tools=tools)
        return _reply(parsed, tokenizer)
    except _UNREADABLE as error:
        tries = _tries_to_call(template, tokenizer.decode(list(ids), skip_special_tokens=False))
        return ToolCall("", error=clean(f"the call cannot be read: {error}")) if tries else None


def _reply(parsed: Mapping[str, Any], tokenizer: Any) -> Reply:
    calls = [_call(item) for item in parsed.get("tool_calls") or []]
    content = parsed.get("content") or ""
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    thoughts = next((str(parsed[name]) for name in _THOUGHTS if parsed.get(name)), "")
    return reply_of(content.removesuffix(tokenizer.eos_token or ""), thoughts, calls)


def _call(item: Any) -> ToolCall:
    function: Any = cast("Mapping[str, Any]", item).get("function", item) if isinstance(item, Mapping) else item
    if not isinstance(function, Mapping):
        return checked_call(None, None)
    found = cast("Mapping[str, Any]", function)
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some templates leave it as text
        arguments = json.loads(arguments)
    return checked_call(found.get("name"), arguments)


def _tries_to_call(template: Mapping[str, Any], text: str) -> bool:
    region: Mapping[str, Any] = template.get("fields", {}).get("tool_calls", {})
    openings = region.get("open", [])
    literals: list[str] = [openings] if isinstance(openings, str) else list(openings)
    patterns = [*map(re.escape, literals), *([region["open_pattern"]] if "open_pattern" in region else [])]
    return any(re.search(pattern, text, re.DOTALL) for pattern in patterns)
