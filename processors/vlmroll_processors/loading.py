"""A model's id, path, processor or tokenizer -> its adapter."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.conformance import check
from vlmroll_processors.families import FAMILIES, Family, family_of
from vlmroll_processors.families.generic import infer_family

logger = logging.getLogger(__name__)


def load_adapter(
    model: Any,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    config: Any = None,
    max_prompt_length: int | None = None,
    long_prompts: Literal["raise", "shrink"] = "raise",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> FamilyAdapter:
    """The adapter of a model.

    Args:
        model: a hub id, a path, or a processor or tokenizer of transformers.
        min_pixels, max_pixels: pixel budget of a picture (height x width); None leaves the processor's own.
        chat_template_kwargs: passed to the chat template, such as `{"enable_thinking": False}`.
        config: the model's config, which some videos need; of an id or a path it is loaded then.
        max_prompt_length, long_prompts: most tokens of a prompt, and whether a longer one is refused or its pictures
            are shrunk.
        trust_remote_code, revision: passed to `from_pretrained` when `model` is an id or a path.

    Raises:
        ValueError: no family serves the processor.

    Example:
        >>> adapter = load_adapter("assets/tiny-vl")  # doctest: +SKIP
        >>> adapter.encode([{"prompt": "Hi"}])[0].prompt_ids  # doctest: +SKIP
    """
    if isinstance(model, FamilyAdapter):
        raise ValueError("it is an adapter already; give these options to the load_adapter call that made it")
    if not isinstance(model, str | Path) and not hasattr(model, "get_vocab") and not hasattr(model, "tokenizer"):
        raise ValueError(
            f"an adapter is made from a processor, a tokenizer, a path or a hub id, not {type(model).__name__}"
        )
    if isinstance(model, str | Path):
        from transformers import AutoConfig, AutoProcessor

        options = {"trust_remote_code": trust_remote_code, "revision": revision}
        if config is None:
            config = partial(AutoConfig.from_pretrained, str(model), **options)  # a processor alone has none
        try:
            model = AutoProcessor.from_pretrained(str(model), **options)
        except OSError as error:
            raise ValueError(
                f"{model!s:.200} is no folder with a processor, and no hub id that loads: {error}"
            ) from error
    return FamilyAdapter(
        model,
        family_of(model) or _inferred(model),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        chat_template_kwargs=chat_template_kwargs,
        config=config,
        max_prompt_length=max_prompt_length,
        long_prompts=long_prompts,
    )


def _inferred(processor: Any) -> Family:
    """The generic rule for a processor without a row of its own, once it has passed the conformance kit."""
    try:
        family = infer_family(processor)
        check(FamilyAdapter(processor, family)).raise_for_failures()
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        known = ", ".join(sorted(name for family in FAMILIES for name in family.processors))
        raise ValueError(
            f"the processor {type(processor).__name__} has no family, and the generic rule does not fit it ({error}); "
            f"families with pictures: {known}. CONTRIBUTING.md tells how to add one"
        ) from error
    logger.warning("%s has no family of its own; the generic rule passed the conformance kit", family.name)
    return family
