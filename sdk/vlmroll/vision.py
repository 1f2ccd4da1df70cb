"""Pictures and videos go through the vision tower once for each forward pass, or once for all while it is frozen.

The siblings of a group share their pictures, and several prompts may show the same one. `VisionFeatures` runs the tower
on the distinct ones and hands its output to the model in place of pixels, repeated as the prompts ask for it; a
gradient sums over the repeats. A frozen tower's output is kept and serves later passes too, also those of a frozen copy
of the model, until a weight changes.

Models are taken at their word: what the tower eats is the signature of `get_image_features`, and how its output is
divided follows from how many features each picture brings. On first use the language model's inputs are compared with
those that pixels give, and where they differ the model gets its pixels as before.
"""

import hashlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from vlmroll.modeling import eval_mode
from vlmroll.towers import Output, Tower, WeightState
from vlmroll_processors import Join, JoinKind, Prompt, collate
from vlmroll_processors.collate import pad_and_cat
from vlmroll_processors.types import JOINED_ON

logger = logging.getLogger(__name__)
OUTPUTS = "mm_encoder_outputs"
_STATES = 8  # of weights for which output is kept: an adapter of the tower makes a new one in each step
# What a model that is not built as expected raises in the first comparison.
_REFUSALS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What one picture or video (or all that were processed together) brings, as a prompt holds it.

    Attributes:
        key: digest of its tensors; equal media have equal keys, whatever padding their neighbours gave them.
        num_features: tokens that hold its features.
        kwargs: its forward kwargs, on the CPU.
        join: their join rules.
    """

    key: bytes
    num_features: int
    kwargs: Mapping[str, torch.Tensor]
    join: Mapping[str, Join]


def shown_by(prompt: Prompt) -> tuple[Shown, ...]:
    """The media of a prompt in the order of their tokens."""
    return tuple(
        Shown(key=_digest(kwargs, prompt.join), num_features=unit.num_features, kwargs=kwargs, join=prompt.join)
        for unit, kwargs in zip(prompt.units, prompt.unit_kwargs(), strict=True)
    )


def _digest(kwargs: Mapping[str, torch.Tensor], join: Mapping[str, Join]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in sorted(kwargs.items()):
        rule = join[name]
        for axis in range(2, tensor.dim()) if rule.kind is JoinKind.SAMPLES else rule.pad_axes:
            filled = (tensor != rule.pad).any(tuple(other for other in range(tensor.dim()) if other != axis))
            tensor = tensor.narrow(axis, 0, int(filled.nonzero().max()) + 1 if filled.any() else 0)
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


class VisionFeatures:
    """Turns the pixels among forward kwargs into the tower's output, each distinct picture once.

    Args:
        keep: bytes of a frozen tower's output that are kept for later passes; what was used longest ago leaves first.

    Example:
        >>> vision = VisionFeatures()
        >>> inputs = vision.inputs(model, prompts, kwargs)  # doctest: +SKIP
        >>> model.model(**inputs).last_hidden_state  # doctest: +SKIP
    """

    def __init__(self, *, keep: int = 2**29) -> None:
        if keep < 0:
            raise ValueError(f"keep is a number of bytes, got {keep}")
        self._kept = Kept(keep)
        self._shown: WeakKeyDictionary[Prompt, tuple[Shown, ...]] = WeakKeyDictionary()
        self._exact: WeakKeyDictionary[Any, dict[frozenset[str], bool]] = WeakKeyDictionary()
        self._states: WeakKeyDictionary[Any, WeightState] = WeakKeyDictionary()
        self._places: dict[WeightState, int] = {}
        self._numbers = itertools.count()

    def clear(self) -> None:
        """Let go of everything that is kept."""
        self._kept.clear()
        self._places.clear()
        self._states.clear()

    def inputs(self, model: Any, prompts: Sequence[Prompt], kwargs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The kwargs with the tower's output in place of pixels.

        Args:
            model: an image-text-to-text model, or a PEFT model over one.
            prompts: whose pictures the pass shows, in the order of their tokens; siblings bring one object several
                times, unless their prompt stands in the pass only once.
            kwargs: of the pass, joined over these prompts in any layout; pixels may be missing.

        Returns:
            Inputs of the model's backbone; the kwargs themselves for prompts without pictures, and for models that
            take pixels only, or whose tower is random or mixes pictures while it trains.
        """
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        number = sum(len(self._of(prompt)) for prompt in prompts)
        if not number or any((prompt.images or prompt.videos) and not prompt.units for prompt in prompts):
            return dict(kwargs)
        tower = Tower(base)
        media = self._by_kind(tower, prompts)
        if sum(map(len, media.values())) != number or not tower.is_steady():
            return dict(kwargs)
        if not self._is_exact(tower, frozenset(media), prompts):
            return dict(kwargs)
        return self._replaced(tower, media, kwargs)

    def _of(self, prompt: Prompt) -> tuple[Shown, ...]:
        if prompt not in self._shown:
            self._shown[prompt] = shown_by(prompt)
        return self._shown[prompt]

    def _replaced(
        self, tower: Tower, kinds: Mapping[str, Sequence[Shown]], kwargs: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        place = self._place(tower)
        eaten = {name for kind in kinds for name in tower.eats(kind)}
        outputs = {kind: self._features(tower, kind, media, place) for kind, media in kinds.items()}
        return {name: value for name, value in kwargs.items() if name not in eaten} | {OUTPUTS: outputs}

    def _features(self, tower: Tower, kind: str, media: Sequence[Shown], place: int | None) -> Any:
        """The tower's output for media of a kind, in their order."""
        distinct = {medium.key: medium for medium in media}
        found = {key: self._kept.get((place, key)) for key in distinct} if place is not None else {}
        missing = [medium for key, medium in distinct.items() if found.get(key) is None]
        if missing:
            made = tower.run(
                kind, _joined(missing), [medium.num_features for medium in missing], frozen=place is not None
            )
            for medium, output in zip(missing, made, strict=True):
                found[medium.key] = output
                if place is not None:
                    self._kept.put((place, medium.key), output)
        return Output.joined([cast("Output", found[medium.key]) for medium in media])

    def _place(self, tower: Tower) -> int | None:
        """The number under which output of the tower, as its weights are now, is kept; None while it trains."""
        state = tower.state() if self._kept.limit else None
        if state is None:
            return None
        if state not in self._places:
            alike = (other for other, its in self._states.items() if its in self._places and tower.equals(other, its))
            number = next((self._places[self._states[other]] for other in alike), next(self._numbers))
            self._places[state] = number
        self._states[tower.base] = state
        while len(self._places) > _STATES:
            oldest = self._places.pop(next(iter(self._places)))
            if oldest not in self._places.values():
                self._kept.drop(oldest)
        return self._places[state]

    def _is_exact(self, tower: Tower, kinds: frozenset[str], prompts: Sequence[Prompt]) -> bool:
        """Whether the model takes the tower's output as well as pixels; found out on first use."""
        known = self._exact.setdefault(tower.base, {})
        if kinds not in known:
            reason = self._compare(tower, kinds, prompts)
            known[kinds] = not reason
            if reason:
                name = type(tower.base).__name__
                logger.warning("the vision tower of %s runs for each row, not once for each picture: %s", name, reason)
        return known[kinds]

    def _compare(self, tower: Tower, kinds: frozenset[str], prompts: Sequence[Prompt]) -> str:
        """Compare what the language model is given for two of each of the richest prompts; what is wrong, or ""."""

        def count(prompt: Prompt, kind: str) -> int:
            return sum(tower.pixels[kind] in medium.kwargs for medium in self._of(prompt))

        richest = [max(prompts, key=lambda prompt: count(prompt, kind)) for kind in sorted(kinds)] * 2
        batch = collate(richest, pad_token_id=0)
        plain = {name: value.to(tower.device) for name, value in batch.model_inputs(dtype=tower.dtype).items()}
        media = self._by_kind(tower, richest)
        try:
            with eval_mode(tower.base), torch.no_grad(), torch.autocast(tower.device.type, enabled=False):
                expected = tower.given_to_decoder(plain)
                found = tower.given_to_decoder(self._replaced(tower, media, plain))
        except _REFUSALS as error:
            return f"{type(error).__name__}: {error}"
        difference = _difference(found, expected)
        fits = difference <= max(1e-4, 8 * torch.finfo(tower.dtype).eps)
        return "" if fits else f"the features differ by {difference:.2g}"

    def _by_kind(self, tower: Tower, prompts: Sequence[Prompt]) -> dict[str, list[Shown]]:
        shown = [medium for prompt in prompts for medium in self._of(prompt)]
        found = {kind: [medium for medium in shown if name in medium.kwargs] for kind, name in tower.pixels.items()}
        return {kind: media for kind, media in found.items() if media}


class Kept:
    """Outputs by key; above a number of bytes those leave that were used longest ago."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._outputs: OrderedDict[Any, Output] = OrderedDict()
        self._size = 0

    def get(self, key: Any) -> Output | None:
        """What is kept under a key."""
        if key in self._outputs:
            self._outputs.move_to_end(key)
        return self._outputs.get(key)

    def put(self, key: Any, output: Output) -> None:
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


def _joined(media: Sequence[Shown]) -> dict[str, torch.Tensor]:
    """The forward kwargs of media, one after the other, as one prompt would bring them."""
    return {
        name: pad_and_cat([medium.kwargs[name] for medium in media], rule, JOINED_ON[rule.kind])
        for name, rule in media[0].join.items()
        if name in media[0].kwargs
    }


def _difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the norm of each; infinite for other shapes."""
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in expected]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return max((float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs), default=float("inf"))
