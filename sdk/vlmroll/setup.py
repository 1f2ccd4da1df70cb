"""From what a person hands to a trainer to what the trainer works with."""

import difflib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from vlmroll.config import PolicyConfig
from vlmroll.modeling import Reference, add_adapter, disable_dropout, freeze_vision_tower, load_model
from vlmroll.rewards import ModelReward, RewardFunc
from vlmroll_processors.adapter import FamilyAdapter, load_adapter

_LATER = {
    "quantization_config": "load the quantised model yourself and give it as `model`",
    "tools": "tools are not offered yet",
    "rollout_func": "rollout functions are not offered yet; give a `generator`",
    "environment_factory": "environments are not offered yet",
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
    if isinstance(model, str):
        model = load_model(model, options_dict(args.model_init_kwargs), trust_remote_code=args.trust_remote_code)
    elif args.model_init_kwargs:
        raise ValueError("model_init_kwargs is for a model given by name; load the model with them yourself")
    refuse_sharding(args)
    if isinstance(processing_class, FamilyAdapter):
        own = {name: getattr(args, name) for name in ("min_pixels", "max_pixels", "chat_template_kwargs")}
        if given := [name for name, value in own.items() if value is not None]:
            raise ValueError(f"{given[0]} is set and processing_class is an adapter too; give it to load_adapter")
        adapter = processing_class
    else:
        adapter = load_adapter(
            model.config._name_or_path if processing_class is None else processing_class,
            min_pixels=args.min_pixels,
            max_pixels=args.max_pixels,
            chat_template_kwargs=options_dict(args.chat_template_kwargs),
            trust_remote_code=args.trust_remote_code,
            revision=options_dict(args.model_init_kwargs).get("revision"),
        )
    if hasattr(model.config, "vision_config") and not adapter.family.placeholder:
        raise ValueError(
            f"{type(model).__name__} takes pictures, but processing_class is a text tokenizer; give the model's "
            "processor (AutoProcessor), also for rows without pictures"
        )
    if peft_config is not None or hasattr(model, "peft_config"):
        model = add_adapter(model, peft_config, gradient_checkpointing=args.gradient_checkpointing)
    if args.disable_dropout:
        disable_dropout(model)
    if args.freeze_vision_tower:
        freeze_vision_tower(model, adapter.family.vision_modules)
    if adapter.family.placeholder and args.ddp_find_unused_parameters is None:
        # A micro-batch of text rows leaves the vision tower without gradients.
        args.ddp_find_unused_parameters = True
    new_adapter = peft_config is not None
    reference = Reference(model, new_adapter=new_adapter, device=args.device) if args.beta else None
    return Parts(model=model, adapter=adapter, reference=reference)


def refuse_sharding(args: PolicyConfig) -> None:
    """Refuse FSDP and DeepSpeed, where neither generating nor scoring parts of a model was tried yet.

    Raises:
        ValueError: says what works.
    """
    launched = [name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"]
    launched += [name for name in ("fsdp", "deepspeed") if getattr(args, name)]
    if launched:
        raise ValueError(f"{launched[0]}: sharded training is not offered yet; launch with data parallelism (DDP)")


def reward_functions(reward_funcs: Any, tokenizers: Any, args: PolicyConfig) -> list[RewardFunc]:
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
        else cast("RewardFunc", reward)
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
