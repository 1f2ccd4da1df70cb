"""How an option is declared, and how values and names that cannot work are turned away.

An option is a dataclass field. Beside its default it carries a help text and, where only the default works in this
release, the reason and what to do instead:

    @dataclass(repr=False)
    class EngineOptions:
        use_engine: bool = option(False, help="Generate with it.", refused="it is not offered yet; leave it out")

`refuse_unsupported` reads those reasons when a config is made, and the options page is printed from the same data.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

RETIRED: Mapping[str, str] = {
    "use_liger_loss": "removed; the loss never needs the logits of all tokens at once, see logprob_chunk_size",
    "use_transformers_paged": "renamed; write use_transformers_continuous_batching",
    "vllm_device": "removed; vLLM inside the training processes runs on their devices",
    "vllm_dtype": 'removed; write vllm_engine_kwargs={"dtype": ...}',
    "vllm_enable_prefix_caching": 'removed; write vllm_engine_kwargs={"enable_prefix_caching": ...}',
    "vllm_guided_decoding_regex": "renamed; write vllm_structured_outputs_regex",
    "vllm_importance_sampling_cap": "renamed; write vllm_importance_sampling_clip_max",
    "vllm_max_model_len": "renamed; write vllm_max_model_length",
    "wandb_log_unique_prompts": "renamed; write log_unique_prompts",
}
"""Names of earlier or other releases of this field's configs, and what to write instead."""


class OptionMetadata(dict[str, Any]):
    """Metadata of an option: `help`, `refused` (a reason or None) and `new` (not a name of TRL's configs).

    `transformers.HfArgumentParser` hands a copy of a field's metadata on to argparse, which knows `help` only.
    """

    def copy(self) -> dict[str, Any]:
        """The part that argparse knows."""
        return {"help": self["help"]}


def option(default: T, *, help: str, refused: str | None = None, new: bool = False) -> T:
    """Declare an option of a config dataclass.

    `refused` says why no value but the default works in this release, and what to do; `new` marks names that TRL's
    configs do not have.
    """
    return field(default=default, metadata=OptionMetadata(help=help, refused=refused, new=new))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionInfo:
    """What a config class says about one of its options.

    `describe_options(GRPOConfig)["use_vllm"].refused` is the reason, `["beta"].refused` is None.
    """

    name: str
    default: object
    help: str
    refused: str | None
    new: bool


def describe_options(config_class: type[Any]) -> dict[str, OptionInfo]:
    """The options of a config class by name, without those that are plain `transformers.TrainingArguments`."""
    return {
        declared.name: OptionInfo(name=declared.name, default=declared.default, **declared.metadata)
        for declared in fields(config_class)
        if "refused" in declared.metadata
    }


def refuse(name: str, value: object, reason: str) -> NoReturn:
    """Raise the ValueError of an option whose value cannot be used: its name, the value, why, what to do."""
    raise ValueError(f"{name}={value!r} cannot be used: {reason}")


def require(valid: bool, name: str, value: object, rule: str) -> None:
    """Refuse the value of the option `name` unless it is `valid`; `rule` says what is.

    `require(temperature > 0, "temperature", temperature, "it must be greater than 0")`
    """
    if not valid:
        refuse(name, value, rule)


def require_choice(
    name: str, value: object, choices: Sequence[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse a value that is not among `choices`; `elsewhere` has the reasons of values that people may expect."""
    if value in choices:
        return
    listed = ", ".join(repr(choice) for choice in choices)
    reason = (elsewhere or {}).get(str(value))
    refuse(name, value, f"{reason}; it must be one of {listed}" if reason else f"it must be one of {listed}")


def require_dict(name: str, value: object) -> None:
    """Refuse a value that is neither None nor a dict (text that is a JSON object has become a dict before this)."""
    require(value is None or isinstance(value, dict), name, value, "it must be a dict, or a JSON object as text")


def require_types(config: object, **also: type) -> None:
    """Refuse values of another type than declared, such as the text "4"; `also` allows a further type by option."""
    hints = get_type_hints(type(config))
    for info in describe_options(type(config)).values():
        value: object = getattr(config, info.name)
        hint = hints[info.name]
        allowed = _fits(value, hint) or (info.name in also and isinstance(value, also[info.name]))
        if value is not info.default and not allowed:
            refuse(info.name, value, f"it must be {getattr(hint, '__name__', hint)}, got {type(value).__name__}")


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a plain type, or of one of a union's; other types are left to checks of their own."""
    if parts := get_args(hint) if get_origin(hint) in (Union, UnionType) else ():
        return any(_fits(value, part) for part in parts)
    if hint in (bool, str, NoneType):
        return isinstance(value, hint)
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(value, int if hint is int else int | float)
    return True


def refuse_unsupported(config: object) -> None:
    """Raise ValueError for the first option of `config` that is set, although only its default works."""
    for info in describe_options(type(config)).values():
        value: object = getattr(config, info.name)
        if info.refused is not None and value != info.default:
            refuse(info.name, value, info.refused)


def check_names(known: Iterable[str], given: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    """Raise TypeError for a name that is no option, with what to write instead.

    `elsewhere` has the names that are options, but not of this config.
    """
    names = list(known)
    for name in given:
        if name in names:
            continue
        if reason := {**RETIRED, **elsewhere}.get(name):
            raise TypeError(f"option {name!r}: {reason}")
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "no option has a name like it (see docs/options.md)"
        raise TypeError(f"unknown option {name!r}; {hint}")


def refuse_unknown_names(config_class: type[T]) -> type[T]:
    """Class decorator, above `@dataclass`: wrong option names raise a TypeError that says what to write.

    A class may say in `_names_elsewhere` which names belong to another config, and what to do about them.
    """
    generated = cast("Callable[..., None]", config_class.__init__)
    known = [declared.name for declared in fields(cast(Any, config_class)) if declared.init]
    elsewhere: Mapping[str, str] = getattr(config_class, "_names_elsewhere", {})

    # The signature is shown on the class and not on this function: checkers of calls at run time would go by it, and
    # the conversions of TrainingArguments (an int for a float, text for an enum) come after them.
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        check_names(known, kwargs, elsewhere)
        generated(self, *args, **kwargs)

    __init__.__qualname__ = generated.__qualname__
    shown = inspect.signature(generated)
    signature = shown.replace(parameters=list(shown.parameters.values())[1:], return_annotation=config_class)
    changed = cast(Any, config_class)
    changed.__init__ = __init__
    changed.__signature__ = signature
    return config_class
