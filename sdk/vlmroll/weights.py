"""The policy's weights as its checkpoints name them, for engines that load checkpoints.

Names are those that `save_pretrained` writes, adapters are merged into copies, and tied weights come once. A weight is
made when its turn comes, so a policy with an adapter is never in memory a second time.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Make = Callable[[], torch.Tensor]


class PolicyWeights:
    """Iterates over (name, tensor) of a policy; each pass reads the weights anew.

    Args:
        policy: a model of transformers, or a PEFT model over one.

    Attributes:
        shapes: tensors of the weights' shapes and types, without content, by name.
        num_elements: numbers in all tensors.

    Raises:
        ValueError: an adapter on a tied embedding, which an engine could not tell from its head.

    Example:
        >>> dict(PolicyWeights(model))["lm_head.weight"].shape  # doctest: +SKIP
        torch.Size([336, 64])
    """

    def __init__(self, policy: Any) -> None:
        base = policy.get_base_model() if hasattr(policy, "peft_config") else policy
        sources = _sources(base)
        shapes = {name: make_shape for name, (_, make_shape) in sources.items()}
        self._makes = {name: make for name, (make, _) in sources.items()}
        self._base = base
        # Tensors without content go through the conversion first. Where it only renames, they tell who is who, and the
        # weights need not exist all at once.
        self.shapes = _as_saved(base, shapes)
        origin = {id(shape): name for name, shape in shapes.items()}
        only_renamed = all(id(shape) in origin for shape in self.shapes.values())
        self._renamed = {n: origin[id(shape)] for n, shape in self.shapes.items()} if only_renamed else None
        self.num_elements = sum(shape.numel() for shape in self.shapes.values())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            if self._renamed is None:
                yield from _as_saved(self._base, {name: make() for name, make in self._makes.items()}).items()
            else:
                for new, name in self._renamed.items():
                    yield new, self._makes[name]()


def _as_saved(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def _sources(base: Any) -> dict[str, tuple[Make, torch.Tensor]]:
    """For each weight of the plain model how to make it, and a tensor of its shape without content."""
    tied: Mapping[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    state: Mapping[str, torch.Tensor] = base.state_dict(keep_vars=True)
    wrappers = {name: module for name, module in base.named_modules() if _is_wrapper(module)}
    found: dict[str, tuple[Make, torch.Tensor]] = {}
    seen: set[int] = set()
    for full, tensor in state.items():
        place = _place(full, wrappers)
        if place is None:
            continue
        name, owner = place
        if name in tied and owner is not None:
            raise ValueError(
                f"an adapter changes {name}, which is tied to {tied[name]}: the engine has one weight for both; leave "
                "it out of target_modules, or load the model with tie_word_embeddings=False"
            )
        if id(tensor) in seen or name in tied:
            continue
        seen.add(id(tensor))
        shape = torch.empty_like(tensor, device="meta")
        found[name] = (_reader(tensor, owner, full.rpartition(".")[2]), shape)
    return found


def _is_wrapper(module: Any) -> bool:
    """Whether PEFT has put the module around one of the model's own."""
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def _place(full: str, wrappers: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The name of a weight in the plain model, and the wrapper that changes it; None for an adapter's own weight."""
    name, owner = full, None
    for prefix, wrapper in wrappers.items():
        if not full.startswith(f"{prefix}."):
            continue
        inner = "base_layer" if hasattr(wrapper, "base_layer") else "original_module"
        if not full.startswith(f"{prefix}.{inner}."):
            return None
        owner = wrapper
        name = name.replace(f"{prefix}.{inner}.", f"{prefix}.", 1)
    return name, owner


def _reader(tensor: torch.Tensor, owner: Any, attribute: str) -> Make:
    if owner is None:
        return lambda: tensor.detach()
    if hasattr(owner, "modules_to_save"):
        return lambda: _trained_copy(owner, tensor, attribute)
    return lambda: _merged(getattr(owner, "token_adapter", owner), tensor)


def _trained_copy(wrapper: Any, tensor: torch.Tensor, attribute: str) -> torch.Tensor:
    """The weight of the copy that is trained in the module's place, while its adapter is on."""
    if wrapper.disable_adapters or not wrapper.active_adapters:
        return tensor.detach()
    return getattr(wrapper.modules_to_save[wrapper.active_adapters[0]], attribute).detach()


def _merged(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The weight with the active adapters added, in a tensor of its own.

    Taking the adapter off again would leave rounding behind, so the weight is put back from a copy.
    """
    if layer.disable_adapters or layer.merged:
        return tensor.detach()
    inner = layer.get_base_layer()
    before = {name: value.detach().clone() for name, value in inner.named_parameters(recurse=False)}
    layer.merge()
    result = tensor.detach().clone()
    layer.unmerge()
    for name, value in inner.named_parameters(recurse=False):
        value.data.copy_(before[name])
    return result
