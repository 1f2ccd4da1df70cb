"""A model's vision tower as a function from pixels to features: what it eats, whether it is frozen, how to divide."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from vlmroll.frozen import Part, WeightState

Tensors = Mapping[str, torch.Tensor]

_KINDS = ("image", "video")
_SHARE = 16
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

    def part(self, name: str = "") -> Part:
        """A module of the vision side with what it holds, by its name in the backbone; without a name all of them."""
        inside = [each for each in self._modules() if not name or f"{each[0]}.".startswith(f"{name}.")]
        return Part(name, inside)

    def trunk(self) -> Part | None:
        """The largest module that is frozen, if it holds a sixteenth of the vision side's weights, else None."""
        modules = self._modules()
        total = sum(weight.numel() for _, module in modules for weight in module.parameters(recurse=False))
        sizes: dict[str, int] = {}
        for name, module in modules:
            weights = list(module.parameters())
            size = sum(weight.numel() for weight in weights)
            if any(weight.requires_grad for weight in weights) or size < max(1, total // _SHARE):
                continue
            if not any(id(inner) in self._text for inner in module.modules()):
                sizes[name] = size
        # The outer of two that hold the same comes first.
        return self.part(max(sizes, key=sizes.__getitem__)) if sizes else None

    def equals(self, base: Any, name: str, state: WeightState) -> bool:
        """Whether a part of another model, if it is in a state still, is the twin of this one's."""
        if type(base) is not type(self.base) or base.config.to_dict() != self.base.config.to_dict():
            return False
        return self.part(name).equals(Tower(base).part(name), state)
