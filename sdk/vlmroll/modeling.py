"""Preparing the policy and its reference: loading, adapters, frozen parts, dropout."""

import contextlib
import copy
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def load_model(model: str, options: Mapping[str, Any] | None = None, *, trust_remote_code: bool = False) -> Any:
    """Load a policy by hub id or path, in float32 unless `options` names a dtype.

    The class is the one that the checkpoint names as its architecture, so a vision-language checkpoint keeps its
    vision tower even when the data is text only.
    """
    import transformers

    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise ValueError(f"model={model!r}: there is no such folder")
    options = dict(options or {})
    options.setdefault("dtype", options.pop("torch_dtype", torch.float32))  # the name that transformers had before
    if isinstance(options["dtype"], str) and options["dtype"] != "auto":
        options["dtype"] = getattr(torch, options["dtype"])
    config = transformers.AutoConfig.from_pretrained(
        model, trust_remote_code=trust_remote_code, revision=options.get("revision")
    )
    names: Sequence[str] = config.architectures or ()
    kind = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if kind is None:  # code of the repository's own; a text class would leave the vision tower out
        pictures = hasattr(config, "vision_config")
        kind = transformers.AutoModelForImageTextToText if pictures else transformers.AutoModelForCausalLM
    return kind.from_pretrained(model, trust_remote_code=trust_remote_code, **options)


def add_adapter(model: Any, peft_config: Any, *, gradient_checkpointing: bool) -> Any:
    """Wrap the model with a PEFT adapter.

    Raises:
        ValueError: the model is a PEFT model already, or the adapter changes the prompt instead of the weights.
    """
    from peft import PeftConfig, get_peft_model

    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        raise ValueError(f"peft_config is a {type(peft_config).__name__}; give a peft config such as peft.LoraConfig")
    if not hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        raise ValueError("the adapter was added by model.add_adapter; wrap the model with peft.get_peft_model instead")
    if peft_config is not None:
        if hasattr(model, "peft_config"):
            raise ValueError(
                "the model is a PEFT model and peft_config is given too; give a base model, or the PEFT model alone"
            )
        model = get_peft_model(model, peft_config)
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise ValueError("prompt tuning is not offered: scoring reads hidden states without virtual tokens; use LoRA")
    if gradient_checkpointing:
        # The embeddings are frozen, so nothing that enters the first checkpointed layer would ask for a gradient.
        model.enable_input_require_grads()
    return model


def load_adapter(model: Any, folder: str) -> None:
    """Load the weights of a PEFT model's active adapter, as `save_pretrained` wrote them, in place.

    Raises:
        ValueError: the folder's adapter has other weights.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    found = set_peft_model_state_dict(model, load_peft_weights(folder), adapter_name=model.active_adapter)
    if found.unexpected_keys:
        raise ValueError(f"{folder} holds another adapter: unexpected weights such as {found.unexpected_keys[0]}")


def disable_dropout(model: Any) -> None:
    """Set every dropout to 0: that of dropout modules, and that which attention layers hold as a number."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):  # pyright: ignore[reportPrivateUsage]
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def freeze_vision_tower(model: Any, names: Sequence[str]) -> int:
    """Freeze the modules that turn pixels into features; the number of parameters that were frozen.

    Raises:
        ValueError: the model has none of these modules.
    """
    towers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    if not towers:
        raise ValueError("freeze_vision_tower=True, but the model has no vision tower; leave the option off")
    frozen = 0
    for parameter in (parameter for tower in towers for parameter in tower.parameters()):
        frozen += parameter.numel() if parameter.requires_grad else 0
        parameter.requires_grad_(False)
    return frozen


def numbers_of_a_patch(config: Any) -> int:
    """How many numbers of a picture or video the vision tower takes as one patch; 1 for text models."""
    vision = getattr(config, "vision_config", None)
    size = getattr(vision, "patch_size", None) or 1
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
    return height * width * channels * (getattr(vision, "temporal_patch_size", None) or 1)


class Reference:
    """The model that KL is measured against.

    For a new adapter it is the base model, with the adapter switched off; for an adapter that was trained before, a
    frozen copy of the adapter; else a frozen copy of the model as it was given.

    Args:
        model: the policy before training.
        new_adapter: whether its adapter was made for this run.
        device: where a copy of the model is put.
    """

    def __init__(self, model: Any, *, new_adapter: bool, device: torch.device | str = "cpu") -> None:
        self._policy = model if hasattr(model, "peft_config") else None
        self._copy: Any = None
        self._adapter: str | None = None
        if self._policy is None:
            self._copy = copy.deepcopy(model).to(device).eval().requires_grad_(False)
        elif not new_adapter:
            self._adapter = "ref"
            active = model.active_adapter
            with _same_trainable(model):
                model.add_adapter("ref", model.peft_config[active])
                with torch.no_grad():
                    for name, parameter in list(model.named_parameters()):
                        if f".{active}." in name:
                            model.get_parameter(name.replace(f".{active}.", ".ref.")).copy_(parameter)
                model.set_adapter(active)

    @contextlib.contextmanager
    def using(self) -> Generator[Any]:
        """The reference model, in eval mode, for the time of the block."""
        if self._copy is not None:
            yield self._copy
            return
        policy: Any = self._policy
        with _same_trainable(policy):
            if self._adapter is None:
                with policy.disable_adapter():
                    yield policy
                return
            active = policy.active_adapter
            policy.set_adapter(self._adapter)
            try:
                yield policy
            finally:
                policy.set_adapter(active)


@contextlib.contextmanager
def _same_trainable(model: Any) -> Generator[None]:
    """What is trainable before the block is so after it, and nothing else; switching adapters would set all of them."""
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trainable)


@contextlib.contextmanager
def eval_mode(model: Any) -> Generator[None]:
    """Eval mode for the time of the block, and every module's own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def call_through(wrapper: Any, model: Any, work: Callable[[], Result]) -> Result:
    """Run `work` on a wrapped model so that the wrapper takes part.

    A data-parallel wrapper prepares its gradient reduction in its own forward. Scoring calls parts of the model
    instead of its forward, so the work is run in the forward's place.
    """
    if wrapper is model:
        return work()
    original = model.forward

    def instead(*args: Any, **kwargs: Any) -> Result:
        model.forward = original
        return work()

    model.forward = instead
    try:
        return wrapper()
    finally:
        model.forward = original
