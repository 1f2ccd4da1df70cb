"""The policy's weights as its checkpoints name them, for engines that load checkpoints.

Names are those that `save_pretrained` writes, adapters are merged into copies, and tied weights come once. A weight is
made when its turn comes, so a policy with an adapter is never in memory a second time.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
        # No `yield` without gradients: who stops in the middle, as after an error, would be left without them.
        if self._renamed is None:
            with torch.no_grad():
                converted = _as_saved(self._base, {name: make() for name, make in self._makes.items()})
            yield from converted.items()
            return
        for new, name in self._renamed.items():
            with torch.no_grad():
                tensor = self._makes[name]()
            yield new, tensor


def _as_saved(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def _sources(base: Any) -> dict[str, tuple[Make, torch.Tensor]]:
    """For each weight of the plain model how to make it, and a tensor of its shape without content."""
    tied: Mapping[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    state: Mapping[str, torch.Tensor] = base.state_dict(keep_vars=True)
    wrappers = {name: module for name, module in base.named_modules() if _inner(module)}
    found: dict[str, tuple[Make, torch.Tensor]] = {}
    seen: set[int] = set()
    for full, tensor in state.items():
        place = _place(full, wrappers)
        if place is None:
            continue
        # Single tokens that are trained are the same ones in the embeddings and in the head.
        if place.owners and not any(hasattr(owner, "token_adapter") for owner in place.owners):
            _refuse_tied(place.name, tied)
        if id(tensor) in seen or place.name in tied:
            continue
        seen.add(id(tensor))
        found[place.name] = (_reader(tensor, place), torch.empty_like(tensor, device="meta"))
    return found


def _refuse_tied(name: str, tied: Mapping[str, str]) -> None:
    """Refuse an adapter on one of two weights that are the same."""
    other = tied.get(name) or next((head for head, source in tied.items() if source == name), None)
    if other is not None:
        raise ValueError(
            f"an adapter changes {name}, which is tied to {other}: the engine has one weight for both; leave it out of "
            "target_modules, or load the model with tie_word_embeddings=False"
        )


def _inner(module: Any) -> str:
    """Under which name a module of PEFT holds the model's own; empty for other modules."""
    return next((name for name in ("token_adapter", "original_module", "base_layer") if name in module._modules), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a weight is.

    Attributes:
        name: in the plain model.
        owners: the wrappers around it, from the outside in.
        rest: its name below the last of them.
    """

    name: str
    owners: tuple[Any, ...]
    rest: str


def _place(full: str, wrappers: Mapping[str, Any]) -> _Place | None:
    """The place of a weight of the plain model; None for an adapter's own weight."""
    parts, owners, rest = full.split("."), list[Any](), full
    dropped: set[int] = set()
    for prefix, wrapper in wrappers.items():
        if not full.startswith(f"{prefix}."):
            continue
        depth = prefix.count(".") + 1
        if parts[depth] != _inner(wrapper):
            return None
        owners.append(wrapper)
        dropped.add(depth)
        rest = ".".join(parts[depth + 1 :])
    kept = [part for i, part in enumerate(parts) if i not in dropped]
    return _Place(name=".".join(kept), owners=tuple(owners), rest=rest)


def _reader(tensor: torch.Tensor, place: _Place) -> Make:
    if not place.owners:
        return lambda: tensor.detach()
    if hasattr(place.owners[-1], "modules_to_save"):
        return lambda: _trained_copy(place.owners[-1], tensor, place.rest)
    layers = [owner for owner in place.owners if hasattr(owner, "merge")]
    return lambda: _merged(layers, tensor)


def _trained_copy(wrapper: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The weight of the copy that is trained in the module's place, while its adapter is on."""
    if wrapper.disable_adapters or not wrapper.active_adapters:
        return tensor.detach()
    trained = wrapper.modules_to_save
    active = next((adapter for adapter in wrapper.active_adapters if adapter in trained), None)
    return tensor.detach() if active is None else attrgetter(name)(trained[active]).detach()


def _merged(layers: Sequence[Any], tensor: torch.Tensor) -> torch.Tensor:
    """The weight with the active adapters added, in a tensor of its own.

    Taking the adapter off again would leave rounding behind, so the weight is put back from a copy.
    """
    todo = [layer for layer in reversed(layers) if not layer.disable_adapters and not layer.merged]
    if not todo:
        return tensor.detach()
    inner = todo[0].get_base_layer()
    before = {name: value.detach().clone() for name, value in inner.named_parameters(recurse=False)}
    with warnings.catch_warnings():
        # That an adapter has nothing in a layer, and that taking it off rounds.
        warnings.simplefilter("ignore", UserWarning)
        for layer in todo:
            layer.merge()
        result = tensor.detach().clone()
        for layer in reversed(todo):
            layer.unmerge()
    for name, value in inner.named_parameters(recurse=False):
        value.data.copy_(before[name])
    return result
