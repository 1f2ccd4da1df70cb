"""From what a person hands to a trainer to what the trainer works with."""

import difflib
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from vlmroll.config import PolicyConfig
from vlmroll.modeling import Reference, add_adapter, disable_dropout, freeze_vision_tower, load_model
from vlmroll.rewards import ModelReward
from vlmroll_processors.adapter import FamilyAdapter
from vlmroll_processors.conformance import check
from vlmroll_processors.loading import load_adapter

logger = logging.getLogger(__name__)

_LATER = {
    "quantization_config": "load the quantised model yourself and give it as `model`",
    "data_collator": "rows are encoded by the processor adapter; there is nothing to collate",
    "compute_metrics": "evaluation logs rewards; write a reward function",
    "model_init": "give the model itself",
    "tokenizer": "write processing_class=...",
    "reward_func": "write reward_funcs=...",
    "ref_model": "the reference is a copy of `model` (or its base under an adapter) when beta is not 0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The policy, its adapter for prompts, and the reference model (None when beta is 0)."""

    model: Any
    adapter: FamilyAdapter
    reference: Reference | None


def prepare(model: Any, args: PolicyConfig, processing_class: Any, peft_config: Any) -> Parts:
    """Load what is given by name and apply the options that change the model."""
    from transformers import set_seed

    set_seed(args.seed)  # adapters start from random weights
    if isinstance(model, str | Path):
        model = load_model(str(model), options_dict(args.model_init_kwargs), trust_remote_code=args.trust_remote_code)
    elif args.model_init_kwargs:
        raise ValueError("model_init_kwargs is for a model given by name; load the model with them yourself")
    if getattr(model, "config", None) is None or getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise ValueError(f"model is {type(model).__name__}; give a model of transformers with a language-model head")
    if processing_class is None and not model.config._name_or_path:
        raise ValueError("the model was not loaded from a folder or hub; give its processor as processing_class")
    refuse_sharding(args)
    if isinstance(processing_class, FamilyAdapter):
        names = ("min_pixels", "max_pixels", "chat_template_kwargs", "max_prompt_length")
        own = {name: getattr(args, name) for name in names}
        own["long_prompts"] = args.long_prompts if args.long_prompts == "shrink" else None
        if given := [name for name, value in own.items() if value is not None]:
            raise ValueError(f"{given[0]} is set and processing_class is an adapter too; give it to load_adapter")
        if args.long_prompts == "skip" and processing_class.max_prompt_length is None:
            raise ValueError("long_prompts='skip', and the adapter has no max_prompt_length; give it to load_adapter")
        adapter = processing_class
    else:
        adapter = load_adapter(
            model.config._name_or_path if processing_class is None else processing_class,
            min_pixels=args.min_pixels,
            max_pixels=args.max_pixels,
            chat_template_kwargs=options_dict(args.chat_template_kwargs),
            config=model.config,
            max_prompt_length=prompt_limit(model, args),
            long_prompts="shrink" if args.long_prompts == "shrink" else "raise",
            trust_remote_code=args.trust_remote_code,
            revision=options_dict(args.model_init_kwargs).get("revision"),
        )
    if hasattr(model.config, "vision_config") and not adapter.family.slot:
        raise ValueError(
            f"{type(model).__name__} takes pictures, but processing_class is a text tokenizer; give the model's "
            "processor (AutoProcessor), also for rows without pictures"
        )
    if adapter.family.slot and not hasattr(model.config, "vision_config"):
        raise ValueError(f"{type(model).__name__} takes no pictures; give its tokenizer as processing_class")
    if peft_config is not None or hasattr(model, "peft_config"):
        model = add_adapter(model, peft_config, gradient_checkpointing=args.gradient_checkpointing)
    if args.disable_dropout:
        disable_dropout(model)
    if args.freeze_vision_tower:
        freeze_vision_tower(model, adapter.family.vision_modules)
    if adapter.family.slot and args.ddp_find_unused_parameters is None:
        # A micro-batch of text rows leaves the vision tower without gradients.
        args.ddp_find_unused_parameters = True
    _check_trainable(model)
    new_adapter = peft_config is not None
    reference = Reference(model, new_adapter=new_adapter, device=args.device) if args.beta else None
    return Parts(model=model, adapter=adapter, reference=reference)


def _check_trainable(model: Any) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError(
            "the model has no trainable parameters; load a PEFT adapter with is_trainable=True, or unfreeze weights"
        )
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in trainable):
        logger.warning(
            "trainable weights are in half precision, where updates of a small learning rate round to nothing; load "
            "them in float32 and set bf16=True for mixed precision"
        )


def prompt_limit(model: Any, args: PolicyConfig) -> int | None:
    """The most tokens of a prompt: what was asked for, or what the model's positions leave for it.

    Raises:
        ValueError: the longest completion leaves no room for a prompt.
    """
    limits = (context_length(model), args.vllm_max_model_length)
    if (context := min((limit for limit in limits if limit is not None), default=None)) is None:
        return args.max_prompt_length
    if context <= args.max_completion_length:
        raise ValueError(
            f"max_completion_length={args.max_completion_length} leaves no room for a prompt in the model's {context} "
            "positions; lower it"
        )
    room = context - args.max_completion_length
    return room if args.max_prompt_length is None else min(room, args.max_prompt_length)


def check_family(model: Any, adapter: Any) -> None:
    """Try a family whose rules were read off its processor on the model itself, with pictures and without.

    Raises:
        ValueError: the rules do not fit the model.
    """
    logger.info("trying the rules of %s on the model, with pictures and without", adapter.family.name)
    check(adapter, model, tolerance=1e-4 if model.dtype == torch.float32 else 5e-2).raise_for_failures()


def context_length(model: Any) -> int | None:
    """The number of positions that the model has, or None when its config names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_rows(role: str, rows: Any) -> None:
    """Refuse what is no dataset of rows.

    Raises:
        TypeError: names the argument and what to give.
    """
    if rows is None:
        return
    kind = type(rows).__name__
    if isinstance(rows, str) or kind == "DataFrame":
        advice = {"str": "datasets.load_dataset(...)", "DataFrame": "datasets.Dataset.from_pandas(...)"}[kind]
        raise TypeError(f"{role} is a {kind}; give {advice}")
    if role == "train_dataset" and isinstance(rows, Mapping):
        raise TypeError(f"{role} is a {kind}; give one split of it, or datasets.Dataset.from_dict(...)")
    if iter(rows) is rows:
        raise TypeError(f"{role} is a {kind}, which can be read once; give a list or a datasets.IterableDataset")


def refuse_sharding(args: PolicyConfig) -> None:
    """Refuse FSDP and DeepSpeed, where neither generating nor scoring parts of a model was tried yet.

    Raises:
        ValueError: says what works.
    """
    launched = [name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"]
    launched += [name for name in ("fsdp", "deepspeed") if getattr(args, name)]
    if launched:
        raise ValueError(f"{launched[0]}: sharded training is not offered yet; launch with data parallelism (DDP)")


def reward_functions(reward_funcs: Any, tokenizers: Any, args: PolicyConfig) -> list[Any]:
    """Reward functions as a list, with models wrapped.

    Args:
        reward_funcs: one or a list of functions, ids or models.
        tokenizers: one or a list, an entry for each reward; None entries for functions.

    Raises:
        ValueError: the lists differ in length.
    """
    given: list[Any] = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    given = [] if reward_funcs is None else given
    classes: list[Any] = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers] * len(given)
    if len(classes) != len(given):
        raise ValueError(f"reward_processing_classes has {len(classes)} entries for {len(given)} reward functions")
    return [
        ModelReward(reward, tokenizer, device=args.device, trust_remote_code=args.trust_remote_code)
        if isinstance(reward, str | torch.nn.Module)
        else reward
        for reward, tokenizer in zip(given, classes, strict=True)
    ]


def refuse_options(trainer: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse arguments that a trainer does not take.

    Raises:
        TypeError: names the argument and what to write instead.
    """
    for name, value in given.items():
        if name in _LATER:
            if value is not None:
                raise TypeError(f"{trainer}: {name} is not taken; {_LATER[name]}")
            continue
        near = difflib.get_close_matches(name, [*known, *_LATER], n=1)
        raise TypeError(f"{trainer}: unknown argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def options_dict(value: Any) -> dict[str, Any]:
    """An option that holds keyword arguments, as a dict; None means none."""
    return dict(cast("Mapping[str, Any]", value)) if value else {}


def derive_seed(*parts: Any) -> int:
    """A seed that depends on all of the parts and on nothing else, the same in every process and run."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:7], "big")
