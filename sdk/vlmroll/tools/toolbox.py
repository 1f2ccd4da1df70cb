"""Python functions as tools: what the model may call, and how each is described to it."""

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from PIL import Image

Function = Callable[..., Any]

_FORM = """write it in this form:
    def name(count: int) -> str:
        \"\"\"What the tool does.

        Args:
            count: What the argument is.
        \"\"\""""


_UNRESOLVED = (NameError, AttributeError, TypeError, SyntaxError)
_PICTURES = ("Image", "Image.Image", "PIL.Image.Image")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One function with its description.

    Attributes:
        name: what the model calls it by.
        function: sync or async.
        schema: as chat templates take it.
        in_order: it may change what later calls see, so that it runs alone among the others that do.
    """

    name: str
    function: Function
    schema: Mapping[str, Any]
    in_order: bool = False

    @property
    def is_async(self) -> bool:
        """Whether a call gives a coroutine."""
        return inspect.iscoroutinefunction(_inner(self.function))

    @property
    def returns_pictures(self) -> bool:
        """Whether its return type names a PIL picture, as in `Image.Image`, `list[Image.Image]` or `Image | None`."""
        returns: Any = inspect.signature(self.function).return_annotation
        try:
            return _names_picture(_resolved(self.function, {"return": returns})["return"])
        except _UNRESOLVED:  # such as what is only imported for type checkers
            return returns in _PICTURES

    def fault(self, arguments: Mapping[str, Any]) -> str:
        """Why the function cannot be called with these arguments, or nothing."""
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as error:
            wanted = ", ".join(self.schema["function"]["parameters"]["properties"]) or "no arguments"
            return f"{self.name}: {error}; it takes {wanted}"
        return ""


class Toolbox:
    """The tools that one rollout may call, by name.

    Args:
        functions: a list of typed functions with docstrings, as transformers describes them; sync or async, methods of
            an instance and `functools.partial` objects, too.
        in_order: the calls of a turn run one after the other, since they share a state.

    Attributes:
        tools: by name.
        stuck: a call of a tool with a state was left behind and may still be running. No such tool is called any more.

    Raises:
        ValueError: there is no list, a function cannot be described, or two have one name.

    Example:
        >>> def double(number: int) -> int:
        ...     '''Doubles a number.
        ...
        ...     Args:
        ...         number: The number.
        ...     '''
        ...     return 2 * number
        >>> Toolbox([double]).names
        ('double',)
    """

    def __init__(self, functions: Any = (), *, in_order: bool = False) -> None:
        self.tools: dict[str, Tool] = {}
        self.stuck = False
        if not isinstance(functions, Sequence) or isinstance(functions, str):
            name = getattr(functions, "__name__", "function")
            raise ValueError(f"tools is {functions!r:.100}; give a list of functions, such as [{name}]")
        for place, function in enumerate(cast("Sequence[Any]", functions)):
            self._add(_tool(function, f"tools[{place}]", in_order=in_order))

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they were given."""
        return tuple(self.tools)

    @property
    def returns_pictures(self) -> bool:
        """Whether the return type of a tool names a PIL picture."""
        return any(tool.returns_pictures for tool in self.tools.values())

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The description of every tool, for the chat template."""
        return [dict(tool.schema) for tool in self.tools.values()]

    def stick(self) -> None:
        """Say that a call of a tool with a state was left behind."""
        self.stuck = True

    def joined(self, other: "Toolbox") -> "Toolbox":
        """A new toolbox with the tools of both.

        Raises:
            ValueError: a name is in both.
        """
        both = Toolbox()
        for tool in (*self.tools.values(), *other.tools.values()):
            both._add(tool)
        return both

    def bound_to(self, instance: object) -> "Toolbox":
        """A new toolbox in which the tools with a state are the methods of the same name of `instance`."""
        copy = Toolbox()
        for name, tool in self.tools.items():
            copy.tools[name] = replace(tool, function=getattr(instance, name)) if tool.in_order else tool
        return copy

    def _add(self, tool: Tool) -> None:
        if tool.name in self.tools:
            raise ValueError(f"two tools have the name {tool.name!r}; rename one, the model calls them by name")
        self.tools[tool.name] = tool

    def __len__(self) -> int:
        return len(self.tools)


def _tool(function: Any, where: str, *, in_order: bool) -> Tool:
    if not callable(function) or inspect.isclass(function):
        kind = (
            "a class; give a function, or a class as environment_factory"
            if inspect.isclass(function)
            else "no function"
        )
        raise ValueError(f"{where} is {function!r}, which is {kind}")
    inner = _inner(function)
    name: str = getattr(inner, "__name__", type(inner).__name__)
    if not (inspect.isfunction(inner) or inspect.ismethod(inner)) or not name.isidentifier():
        raise ValueError(f"{where} is {function!r}; give a function with a name and a docstring, and {_FORM}")
    return Tool(name=name, function=function, schema=_schema(function, name), in_order=in_order)


def _inner(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _schema(function: Function, name: str) -> dict[str, Any]:
    if not (inspect.getdoc(_inner(function)) or "").strip():
        raise ValueError(f"tool {name!r} has no docstring, which is what the model learns about it; {_FORM}")
    given = function.keywords if isinstance(function, partial) else {}
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"tool {name!r}: {parameter} cannot be given by name, and a model gives every argument by name; "
                "replace it by plain arguments"
            )
        if parameter.annotation is parameter.empty:
            raise ValueError(f"tool {name!r}: argument {parameter.name!r} has no type; {_FORM}")
    returns = inspect.signature(function).return_annotation
    schema = None if returns is inspect.Signature.empty else _described(function, parameters, {"return": returns})
    schema = _described(function, parameters, {}) if not isinstance(schema, dict) else schema
    if isinstance(schema, dict):
        found: dict[str, Any] = schema["function"]["parameters"]["properties"]
        if pictures := [argument for argument, described in found.items() if '"image"' in json.dumps(described)]:
            raise ValueError(
                f"tool {name!r}: argument {pictures[0]!r} is a picture, which no model can write; take what names it"
            )
        return schema
    # Which one it is: the first that fails alone.
    faults = ((p.name, _described(function, [p], {})) for p in parameters)
    argument, fault = next(((n, f) for n, f in faults if isinstance(f, str)), ("", schema))
    about = f"argument {argument!r}" if argument else "its description"
    raise ValueError(f"tool {name!r}: {about} cannot be described to the model ({fault}); {_FORM}")


def _described(function: Function, parameters: Sequence[inspect.Parameter], more: Mapping[str, Any]) -> Any:
    """The schema of a function with these parameters alone, or in words what transformers says against it."""
    from transformers.utils import chat_template_utils as utils

    inner = _inner(function)
    inner = getattr(inner, "__func__", inner)
    hints = {p.name: p.annotation for p in parameters} | dict(more)
    stand_in: Any = types.FunctionType((lambda: None).__code__, {}, inner.__name__)  # without what is bound
    stand_in.__doc__ = inspect.getdoc(inner)
    stand_in.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])
    try:
        stand_in.__annotations__ = _resolved(function, hints)
        return utils.get_json_schema(stand_in)
    except (utils.TypeHintParsingException, utils.DocstringParsingException, json.JSONDecodeError) as error:
        return " ".join(map(str, error.args))
    except _UNRESOLVED as error:
        return f"its type cannot be read: {error}"


def _resolved(function: Function, hints: Mapping[str, Any]) -> dict[str, Any]:
    """The types, of which those that are written as strings are looked up where the function was written."""
    inner = _inner(function)
    known = getattr(inspect.unwrap(getattr(inner, "__func__", inner)), "__globals__", {})
    return typing.get_type_hints(types.SimpleNamespace(__annotations__=dict(hints)), known)


def _names_picture(hint: Any) -> bool:
    if hint is Image:  # the module, written by mistake
        return True
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return issubclass(hint, Image.Image)
    return any(_names_picture(part) for part in typing.get_args(hint))
