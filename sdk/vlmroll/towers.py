"""A model's vision tower as a function from pixels to features: what it eats, whether it is frozen, how to divide."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

Tensors = Mapping[str, torch.Tensor]
WeightState = bytes
"""Digest of what a tower's output depends on beside its pixels; equal states give equal outputs."""

_KINDS = ("image", "video")
_CHANCE = ("dropout", "drop_prob", "drop_path")
# Fields of an output that no language model reads when there is a pooled one.
_INSIDE = ("last_hidden_state", "hidden_states", "attentions")


class _Reached(BaseException):
    """The language model was called; what comes behind is not needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What a tower says of one medium (or of all that were processed together).

    Attributes:
        kind: the class of the model's output.
        rows: name and features of the main field: [n, k, H] where the model has one tensor for all media, or a list of
            [n, H] where it has one for each.
        layers: fields with features for several layers: name -> [n, H] (in a list where the model has lists) by layer.
        shared: fields that are the same for all media.
    """

    kind: type
    rows: tuple[str, Any]
    layers: Mapping[str, list[Any]]
    shared: Mapping[str, Any]

    @staticmethod
    def divided(output: Any, sizes: Sequence[int]) -> "list[Output]":
        """The outputs of media that went through the tower together.

        Args:
            sizes: how many features each of them has.

        Raises:
            ValueError: the output does not divide so.
        """
        main = "pooler_output" if output.get("pooler_output") is not None else "last_hidden_state"
        others = {name: value for name, value in output.items() if name != main and name not in _INSIDE}
        layers = {
            name: [_divided(layer, sizes) for layer in cast("list[Any]", value)]
            for name, value in others.items()
            if isinstance(value, list | tuple)
        }
        return [
            Output(
                kind=type(output),
                rows=(main, part),
                layers={name: [layer[i] for layer in value] for name, value in layers.items()},
                shared={name: value for name, value in others.items() if name not in layers},
            )
            for i, part in enumerate(_divided(output[main], sizes))
        ]

    @staticmethod
    def joined(outputs: "Sequence[Output]") -> Any:
        """The output for several media as the model itself would give it."""
        first = outputs[0]
        layers = {
            name: [_joined([output.layers[name][i] for output in outputs]) for i in range(len(value))]
            for name, value in first.layers.items()
        }
        rows = {first.rows[0]: _joined([output.rows[1] for output in outputs])}
        return first.kind(**rows, **layers, **first.shared)

    @property
    def nbytes(self) -> int:
        """The memory of its own features."""
        return sum(tensor.nbytes for tensor in tensors_in([self.rows[1], *self.layers.values()]))

    def copied(self) -> "Output":
        """The same with memory of its own."""
        return Output(
            kind=self.kind,
            rows=(self.rows[0], _copied(self.rows[1])),
            layers={name: _copied(value) for name, value in self.layers.items()},
            shared=self.shared,
        )


def _divided(value: Any, sizes: Sequence[int]) -> list[Any]:
    listed = not isinstance(value, torch.Tensor)
    tensor = torch.cat(list(value)) if listed else value
    each = 1 if tensor.dim() == 2 else tensor.shape[1]
    if sum(sizes) != len(tensor) * each or any(size % each for size in sizes):
        raise ValueError(f"the tower gives {len(tensor)} times {each} features for media of {list(sizes)}")
    parts = tensor.split([size // each for size in sizes])
    return [[part] for part in parts] if listed else list(parts)


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if isinstance(parts[0], torch.Tensor) else [part for (part,) in parts]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else [_copied(each) for each in value]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of floating point in nested lists and mappings."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    nested = cast("list[Any]", value if isinstance(value, list | tuple) else [])
    return [tensor for each in nested for tensor in tensors_in(each)]


class Tower:
    """The part of a model that turns pixels into features.

    Args:
        base: an image-text-to-text model of transformers.

    Attributes:
        pixels: for each kind of media that the model takes features of ("image", "video") the name of its pixels.
    """

    def __init__(self, base: Any) -> None:
        self.base = base
        self._owner = getattr(base, base.base_model_prefix, base)
        takes = "mm_encoder_outputs" in inspect.signature(self._owner.forward).parameters
        encoders = {kind: getattr(self._owner, f"get_{kind}_features", None) for kind in _KINDS if takes}
        self._encoders = {kind: encoder for kind, encoder in encoders.items() if encoder is not None}
        self.pixels = {kind: self.eats(kind)[0] for kind in self._encoders}
        text = (base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings())
        self._text = {id(module) for part in text if part is not None for module in part.modules()}

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights."""
        return self.base.dtype

    def eats(self, kind: str) -> list[str]:
        """The names of what the tower may be given, pixels first."""
        return [name for name in inspect.signature(self._encoders[kind]).parameters if name != "kwargs"]

    def run(self, kind: str, kwargs: Tensors, sizes: Sequence[int], *, frozen: bool) -> list[Output]:
        """The outputs for media of a kind.

        Args:
            kwargs: their forward kwargs, joined.
            sizes: how many features each of them has.
            frozen: they need no gradient, and get memory of their own.
        """
        given = {name: kwargs[name].to(self.device) for name in self.eats(kind) if name in kwargs}
        given = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in given.items()}
        if not frozen:
            return Output.divided(self._encoders[kind](**given, return_dict=True), sizes)
        # What is made in inference mode could not meet a gradient later.
        with torch.inference_mode(False), torch.no_grad():
            found = Output.divided(self._encoders[kind](**given, return_dict=True), sizes)
            return [output.copied() for output in found]

    def given_to_decoder(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """What the backbone hands to its language model for some inputs, which is not run.

        Raises:
            ValueError: it does not call it.
        """
        given: list[torch.Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.extend(tensors_in([*args, *(kwargs[name] for name in sorted(kwargs))]))
            raise _Reached

        hook = self.base.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._owner(**inputs, use_cache=False)
        except _Reached:
            return given
        finally:
            hook.remove()
        raise ValueError("the backbone does not call the language model")

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """The backbone's modules but those of the language model."""
        return [(name, module) for name, module in self._owner.named_modules() if id(module) not in self._text]

    def is_steady(self) -> bool:
        """Whether the same pixels give the same features whatever was run before and beside them."""
        for _, module in self._modules():
            if not module.training:
                continue
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]
                return False
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:  # pyright: ignore[reportPrivateUsage]
                return False
            if any(name.endswith(_CHANCE) and isinstance(v, float) and v > 0 for name, v in vars(module).items()):
                return False
        return True

    def _weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that the features may depend on: all but the language model's."""
        return {
            f"{prefix}.{name}": tensor
            for prefix, module in self._modules()
            for held in (module._parameters, module._buffers)  # pyright: ignore[reportPrivateUsage]
            for name, tensor in held.items()
            if tensor is not None
        }

    def _switches(self) -> list[str]:
        """Which adapters are on, and how strongly."""
        return [
            repr((name, key, value))
            for name, module in self._modules()
            for key, value in vars(module).items()
            if "adapter" in key or key == "scaling"
        ]

    def state(self) -> WeightState | None:
        """A digest of what the output depends on beside the pixels; None while some of it is trained.

        It is made of each weight's address, number of changes and sum of bits, since changes through `.data` are not
        counted; of the adapters that are on; and of autocast.
        """
        weights = self._weights()
        if not weights or any(weight.requires_grad or weight.is_meta for weight in weights.values()):
            return None
        local = [cast("Any", w).to_local() if hasattr(w, "to_local") else w for w in weights.values()]
        facts = [(w.data_ptr(), w._version, w.dtype, tuple(w.shape)) for w in local]
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        everything = (list(weights), facts, _bits(local), self._switches(), autocast)
        return hashlib.sha256(repr(everything).encode()).digest()

    def equals(self, base: Any, state: WeightState) -> bool:
        """Whether another model's tower, if it is in a state still, is this one's twin."""
        if type(base) is not type(self.base) or base.config.to_dict() != self.base.config.to_dict():
            return False
        other = Tower(base)
        mine, its = self._weights(), other._weights()
        if mine.keys() != its.keys() or other._switches() != self._switches() or other.state() != state:
            return False
        return all(weight.equal(its[name].to(weight.device)) for name, weight in mine.items())


def _bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A sum over the bits of each tensor, in words of 8 bytes: fast enough to be taken before each pass."""
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        data = data.clone() if data.storage_offset() % 8 else data
        words = len(data) // 8 * 8
        total = data[:words].view(torch.int64).sum() + data[words:].sum()
        sums.append(total.to(sums[0].device if sums else total.device))
    return torch.stack(sums).tolist()
