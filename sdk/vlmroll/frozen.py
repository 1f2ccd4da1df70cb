"""Frozen parts of a model: when their output may serve again, and what is kept of it."""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

WeightState = bytes
"""Digest of what a part's output depends on beside its inputs; equal states give equal outputs."""

_PLAIN = (torch.Tensor, bool, int, float, str, type(None))


class Part:
    """Modules of a model that may be frozen.

    Args:
        name: of the module that holds the others; empty for several side by side.
        modules: their names and themselves, the holder first.
    """

    def __init__(self, name: str, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.name = name
        self._modules = modules

    @property
    def module(self) -> nn.Module:
        """The module that holds the others."""
        return self._modules[0][1]

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers that the output may depend on."""
        return {
            f"{prefix}.{name}": tensor
            for prefix, module in self._modules
            for held in (module._parameters, module._buffers)  # pyright: ignore[reportPrivateUsage]
            for name, tensor in held.items()
            if tensor is not None
        }

    def switches(self) -> list[str]:
        """Which adapters are on, and how strongly."""
        return [
            repr((name, key, value))
            for name, module in self._modules
            for key, value in vars(module).items()
            if "adapter" in key or key == "scaling"
        ]

    def is_frozen(self) -> bool:
        """Whether it has weights, and none of them is trained."""
        weights = self.weights().values()
        return bool(weights) and not any(weight.requires_grad or weight.is_meta for weight in weights)

    def state(self, device: torch.device) -> WeightState | None:
        """A digest of what the output depends on beside the inputs; None while some of it is trained.

        It is made of each weight's address, number of changes and sum of bits, since changes through `.data` are not
        counted; of the adapters that are on; and of autocast on the device.
        """
        if not self.is_frozen():
            return None
        weights = self.weights()
        local = [cast("Any", w).to_local() if hasattr(w, "to_local") else w for w in weights.values()]
        facts = [(w.data_ptr(), w._version, w.dtype, tuple(w.shape)) for w in local]
        kind = device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        everything = (list(weights), facts, _bits(local), self.switches(), autocast)
        return hashlib.sha256(repr(everything).encode()).digest()

    def equals(self, other: "Part", state: WeightState) -> bool:
        """Whether another model's part, if it is in a state still, is this one's twin."""
        mine, its = self.weights(), other.weights()
        if mine.keys() != its.keys() or other.switches() != self.switches():
            return False
        if not its or other.state(next(iter(its.values())).device) != state:
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


@runtime_checkable
class Sized(Protocol):
    """What can be kept."""

    @property
    def nbytes(self) -> int:
        """Its memory."""
        ...


class Kept:
    """Outputs by key; above a number of bytes those leave that were used longest ago.

    A key is a tuple that begins with the number of the weights' state.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._outputs: OrderedDict[Any, Sized] = OrderedDict()
        self._size = 0

    def get(self, key: Any) -> Any:
        """What is kept under a key, or None."""
        if key in self._outputs:
            self._outputs.move_to_end(key)
        return self._outputs.get(key)

    def put(self, key: Any, output: Any) -> None:
        """Keep an output that is not kept yet."""
        self._outputs[key] = output
        self._size += output.nbytes
        while self._size > self.limit:
            _, left = self._outputs.popitem(last=False)
            self._size -= left.nbytes

    def drop(self, place: int) -> None:
        """Let go of what was made with one state of the weights."""
        for key in [key for key in self._outputs if key[0] == place]:
            self._size -= self._outputs.pop(key).nbytes

    def clear(self) -> None:
        """Let go of all."""
        self._outputs.clear()
        self._size = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given:
    """What a module returned: its tensors and other plain values, and the nesting around them."""

    leaves: Sequence[Any]
    spec: Any

    @staticmethod
    def by(output: Any) -> "_Given":
        """With memory of its own, so that nothing done to the output reaches it."""
        leaves, spec = pytree.tree_flatten(output)
        strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)]
        if strange:
            raise ValueError(f"the frozen part returns a {strange[0]}, which cannot be kept")
        copied = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return _Given(leaves=copied, spec=spec)

    def output(self) -> Any:
        """A new object of the kind that the module returned."""
        return pytree.tree_unflatten(list(self.leaves), self.spec)

    def only(self, read: Collection[int]) -> "_Given":
        """Without the memory of tensors that nobody read, such as the hidden states of most layers."""
        leaves = [x.new_empty(0) if isinstance(x, torch.Tensor) and id(x) not in read else x for x in self.leaves]
        return _Given(leaves=leaves, spec=self.spec)

    @property
    def nbytes(self) -> int:
        """The memory of its tensors."""
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, torch.Tensor))


class _Reads(TorchFunctionMode):
    """Notes which tensors are given to functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.seen.update(id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def remembered(module: nn.Module, kept: Kept, key: tuple[int, bytes]) -> Generator[None]:
    """Within the block a frozen module's output is taken from what is kept, or made without gradient and then kept.

    Inputs are part of the key by the sum of their bits, for weights before the module. Where such a weight is trained,
    the module runs as always, since the gradient goes through it. Of an output only what the block reads is kept.

    Args:
        key: number of the state of its weights, and what the block is about.

    Raises:
        ValueError: the block does not call the module, or its output holds what cannot be kept.
    """
    forward, own = module.forward, "forward" in vars(module)
    made: dict[Any, _Given] = {}
    called, reads = False, _Reads()

    def instead(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called = True
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return forward(*args, **kwargs)
        facts = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        whole = (*key, repr((spec, others, facts, _bits(tensors))))
        known: _Given | None = made.get(whole) or kept.get(whole)
        if known is None:
            # What is made in inference mode could not meet a gradient later.
            with torch.inference_mode(False), torch.no_grad():
                known = made[whole] = _Given.by(forward(*args, **kwargs))
            # A tensor that is gone may have had the same id.
            reads.seen.difference_update(map(id, known.leaves))
        return known.output()

    module.forward = instead
    try:
        with reads:
            yield
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward
    if not called:
        raise ValueError("the frozen part is not called")
    for whole, given in made.items():
        kept.put(whole, given.only(reads.seen))
