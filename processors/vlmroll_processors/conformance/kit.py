"""Runs the checks and puts what they find into a report."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

import torch

from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.conformance import checks, with_model
from vlmroll_processors.conformance.probes import KINDS, Probe, probe
from vlmroll_processors.conformance.report import Outcome, Report
from vlmroll_processors.families import Family

# What processors and models raise for inputs that do not fit; a check that ends in one of them has failed.
_MISFITS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

_WITHOUT_MODEL: dict[str, Callable[..., checks.Problems]] = {
    "joined equals processor": checks.joined_equals_processor,
    "split gives back": checks.split_gives_back,
    "order changes nothing": checks.order_changes_nothing,
    "spans cover features": checks.spans_cover_features,
    "engine ids expand": checks.engine_ids_expand,
    "vision ids are complete": checks.vision_ids_are_complete,
}
_WITH_MODEL: dict[str, Callable[..., checks.Problems]] = {
    "config ids are banned": with_model.config_ids_are_banned,
    "batch changes nothing": with_model.batch_changes_nothing,
    "as generated": with_model.as_generated,
    "pixels matter": with_model.pixels_matter,
}
_BY_CHARACTERS = "spans cover features"
_OF_PICTURES = (_BY_CHARACTERS, "vision ids are complete", "pixels matter")
ENCODED = "rows are encoded"
CHECKS = (ENCODED, *_WITHOUT_MODEL, *_WITH_MODEL)
"""Names of all checks."""
_MOST_TOKENS = 8192


def check(adapter: FamilyAdapter, model: Any = None, *, tolerance: float = 1e-4) -> Report:
    """Try an adapter on rows with no, one and many pictures, alone and mixed.

    Args:
        adapter: what `load_adapter` returns; its pixel budget and length limit are left aside.
        model: a model for it, of any size; without one the checks that need logits are not run. It runs in eval mode,
            for a few short prompts, and is left as it was.
        tolerance: of logits, relative to the largest; 1e-4 suits float32, 5e-3 float16, 3e-2 bfloat16.

    Returns:
        A report that prints as a table.

    Raises:
        TypeError: it is no such adapter.

    Example:
        >>> print(check(load_adapter("assets/tiny-vl")))  # doctest: +SKIP
    """
    if not isinstance(cast("object", adapter), FamilyAdapter):
        raise TypeError(f"check takes what load_adapter returns, got {type(adapter).__name__}")
    family = adapter.family
    plain = FamilyAdapter(
        adapter.processor,
        family,
        config=getattr(model, "config", None) or adapter.config,
        chat_template_kwargs=adapter.chat_template_kwargs,
    )
    abilities: dict[str, str] = {}
    found: list[Probe] = []
    for kind, rows in KINDS.items():
        try:
            found += [probe(plain, kind, letters) for letters in rows]
            abilities[kind] = "yes"
        except _MISFITS as error:
            abilities[kind] = f"no: {_words(error)}"
    abilities["mixed batch"] = abilities["text only"]
    if abilities["mixed batch"] == "yes" and len({probe.prompt.batch_key for probe in found}) > 1:
        abilities["mixed batch"] = "yes, with a forward pass for each number of pictures"
    outcomes = [_encoded(family, abilities)]
    outcomes += [_run(name, work, plain, found) for name, work in _WITHOUT_MODEL.items()]
    if model is None:
        outcomes += [Outcome(name=name, result="not run", detail="needs a model") for name in _WITH_MODEL]
    else:
        few = _affordable(found)
        with _eval_mode(model):
            outcomes += [_run(name, work, plain, few, model, tolerance) for name, work in _WITH_MODEL.items()]
    return Report(
        family=family.name,
        processor=type(adapter.processor).__name__,
        abilities=abilities,
        outcomes=tuple(outcomes),
    )


def _encoded(family: Family, abilities: Mapping[str, str]) -> Outcome:
    """Whether all kinds of rows that the family is to take were encoded."""
    refused = {"text only"} if family.min_pictures else set[str]()
    refused |= {"video"} if not family.video_slot else set[str]()
    refused |= {"one picture", "many pictures"} if not family.slot else set[str]()
    faults = [f"{kind}: {abilities[kind]}" for kind in KINDS if kind not in refused and abilities[kind] != "yes"]
    return Outcome(name=ENCODED, result="failed" if faults else "passed", detail="; ".join(faults))


def _affordable(found: Sequence[Probe]) -> list[Probe]:
    """The first probe of each kind, and of the others as many as a large model can be asked to run."""
    chosen: list[Probe] = []
    for one in found:
        new = one.kind not in {other.kind for other in chosen}
        if new or sum(other.prompt.num_tokens for other in chosen) + one.prompt.num_tokens <= _MOST_TOKENS:
            chosen.append(one)
    return chosen


@contextlib.contextmanager
def _eval_mode(model: Any) -> Generator[None]:
    was = {module: module.training for module in model.modules()} if isinstance(model, torch.nn.Module) else {}
    for module in was:
        module.training = False
    try:
        yield
    finally:
        for module, training in was.items():
            module.training = training


def _run(
    name: str, work: Callable[..., checks.Problems], adapter: FamilyAdapter, found: Sequence[Probe], *more: Any
) -> Outcome:
    if not any(one.texts for one in found) and (adapter.family.slot or name in _OF_PICTURES):
        return Outcome(name=name, result="not run", detail="no row with pictures could be encoded")
    if name == _BY_CHARACTERS and not adapter.tokenizer.is_fast:
        return Outcome(name=name, result="not run", detail="the tokenizer does not tell the characters of a token")
    try:
        problems = list(dict.fromkeys(work(adapter, found, *more)))
    except _MISFITS as error:
        problems = [_words(error)]
    if problems and more and (dtype := more[0].dtype) != torch.float32:
        problems = [*problems[:3], f"the model is {dtype}: load it in float32, or give a tolerance"]
    return Outcome(name=name, result="failed" if problems else "passed", detail="; ".join(problems[:4]))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error!s:.300}" if not isinstance(error, ValueError) else f"{error!s:.300}"


def check_by_name(name: str, *, weights: bool = False, trust_remote_code: bool = False) -> Report:
    """Check the processor of a hub id or path, with its weights or without."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from vlmroll_processors.loading import load_adapter

    adapter = load_adapter(name, trust_remote_code=trust_remote_code)
    if not weights:
        return check(adapter)
    kind = AutoModelForImageTextToText if adapter.family.slot else AutoModelForCausalLM
    model = kind.from_pretrained(name, trust_remote_code=trust_remote_code, dtype=torch.float32)
    return check(adapter, model)
