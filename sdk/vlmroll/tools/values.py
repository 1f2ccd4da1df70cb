"""Values of arguments that a format writes as plain text, made into what the tool's schema asks for."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from vlmroll.tools.types import ToolCall, checked_call, fault_of


def cast_call(call: ToolCall, schemas: Sequence[Mapping[str, Any]]) -> ToolCall:
    """The call with its arguments, all of them strings, cast by the schema of the tool that it names.

    An argument that does not fit is an error of the call. What no schema knows stays as it is.
    """
    found = next((s for s in schemas if _function(s).get("name") == call.name), None)
    if found is None or call.error:
        return call
    properties: Mapping[str, Any] = _function(found).get("parameters", {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for name, text in call.arguments.items():
        try:
            arguments[name] = cast_value(text, properties[name]) if name in properties else text
        except ValueError as error:
            return ToolCall(call.name, error=f"argument {name!r} {error}")
    return checked_call(call.name, arguments)


def cast_value(text: str, schema: Mapping[str, Any]) -> Any:
    """A text as a value of one of the types of a JSON schema; a schema without types takes JSON, or else the text.

    Raises:
        ValueError: it is of none of them.

    Example:
        >>> cast_value("7", {"type": "integer"}), cast_value("7", {"type": "string"})
        (7, '7')
    """
    types = _types(schema)
    if not types:
        try:
            value = _json(text)
        except ValueError:
            return text
        return text if fault_of(value) else value  # such as NaN, which JSON does not have
    for kind in types:
        reader = _READERS.get(kind)
        if reader is None:
            continue
        try:
            return reader(text.strip())
        except ValueError:
            continue
    if all(kind in _READERS for kind in types):
        raise ValueError(f"must be of type {' or '.join(types)}, got {text[:100]!r}")
    return text  # a string, or a type that JSON does not have


def _function(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema.get("function", schema)


def _types(schema: Mapping[str, Any]) -> list[str]:
    """The names of the types that a schema allows."""
    declared = schema.get("type", [])
    types: list[str] = [declared] if isinstance(declared, str) else list(cast("list[str]", declared))
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types += _types(choice)
    # That is how transformers marks an argument that may be None. First, since "null" would do as a string, too.
    return ["null", *types] if schema.get("nullable") else types


def _null(text: str) -> None:
    if text not in ("null", "None"):
        raise ValueError


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


def _integer(text: str) -> int:
    number = _number(text)
    if number != int(number):
        raise ValueError
    return int(number)


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _of_type(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = _json(text)
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "array": _of_type(list),
    "object": _of_type(dict),
}
