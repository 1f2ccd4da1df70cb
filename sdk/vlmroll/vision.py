"""Pictures and videos go through the vision tower once for each forward pass, or once for all while it is frozen.

The siblings of a group share their pictures, and several prompts may show the same one. `VisionFeatures` runs the tower
on the distinct ones and hands its output to the model in place of pixels, repeated as the prompts ask for it; a
gradient sums over the repeats. A frozen tower's output is kept and serves later passes too, also those of a frozen copy
of the model, until a weight changes. Where a frozen tower feeds a projector that is trained, the output of the tower
itself is kept in the same way, and each pass runs the projector alone.

Models are taken at their word: what the tower eats is the signature of `get_image_features`, and how its output is
divided follows from how many features each picture brings. On first use the language model's inputs are compared with
those that pixels give, and where they differ the model gets its pixels as before.
"""

import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from vlmroll.frozen import Kept, Part, WeightState, remembered
from vlmroll.modeling import eval_mode
from vlmroll.towers import Output, Tower
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
        self._exact: WeakKeyDictionary[Any, dict[tuple[frozenset[str], str], bool]] = WeakKeyDictionary()
        self._states: WeakKeyDictionary[Any, dict[str, WeightState]] = WeakKeyDictionary()
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
        trunk = self._trunk(tower)
        if trunk is not None and not self._is_exact(tower, frozenset(media), prompts, trunk):
            trunk = None
        if trunk is None and not self._is_exact(tower, frozenset(media), prompts, None):
            return dict(kwargs)
        return self._replaced(tower, media, kwargs, trunk)

    def _of(self, prompt: Prompt) -> tuple[Shown, ...]:
        if prompt not in self._shown:
            self._shown[prompt] = shown_by(prompt)
        return self._shown[prompt]

    def _trunk(self, tower: Tower) -> Part | None:
        """The frozen part whose output is kept by itself: beside trained ones, here or in another model."""
        if not self._kept.limit:
            return None
        if not tower.part().is_frozen():
            return tower.trunk()
        names = dict.fromkeys(name for states in self._states.values() for name in states if name)
        return next((part for part in map(tower.part, names) if part.is_frozen()), None)

    def _replaced(
        self,
        tower: Tower,
        kinds: Mapping[str, Sequence[Shown]],
        kwargs: Mapping[str, torch.Tensor],
        trunk: Part | None,
    ) -> dict[str, Any]:
        place = self._place(tower, tower.part())
        eaten = {name for kind in kinds for name in tower.eats(kind)}
        outputs: dict[str, Any] = {}
        for kind, media in kinds.items():
            distinct = {medium.key: medium for medium in media}
            found = {key: self._kept.get((place, key)) for key in distinct} if place is not None else {}
            missing = [medium for key, medium in distinct.items() if found.get(key) is None]
            made = self._made(tower, kind, missing, trunk, frozen=place is not None) if missing else []
            for medium, output in zip(missing, made, strict=True):
                found[medium.key] = output
                if place is not None:
                    self._kept.put((place, medium.key), output)
            outputs[kind] = Output.joined([cast("Output", found[medium.key]) for medium in media])
        return {name: value for name, value in kwargs.items() if name not in eaten} | {OUTPUTS: outputs}

    def _made(
        self, tower: Tower, kind: str, media: Sequence[Shown], trunk: Part | None, *, frozen: bool
    ) -> list[Output]:
        """The tower's output for distinct media of a kind: all at once, or one by one where some of it is kept.

        What is kept must not depend, in its last bits, on what ran beside it: a run that is resumed keeps other things.
        """
        place = None if trunk is None else self._place(tower, trunk)
        if not frozen and (trunk is None or place is None):
            return tower.run(kind, _joined(media), [medium.num_features for medium in media], frozen=False)
        found: list[Output] = []
        for medium in media:
            if trunk is None or place is None:
                found += tower.run(kind, _joined([medium]), [medium.num_features], frozen=True)
                continue
            with remembered(trunk.module, self._kept, (place, medium.key)):
                found += tower.run(kind, medium.kwargs, [medium.num_features], frozen=frozen)
        return found

    def _place(self, tower: Tower, part: Part) -> int | None:
        """The number under which output of a part, as its weights are now, is kept; None while it trains."""
        state = part.state(tower.device) if self._kept.limit else None
        if state is None:
            return None
        # What was used last stands last, so that a state which stays outlives those of a part that changes.
        number = self._places.pop(state, None)
        if number is None:
            known = [(other, states[part.name]) for other, states in self._states.items() if part.name in states]
            alike = (its for other, its in known if its in self._places and tower.equals(other, part.name, its))
            number = next((self._places[its] for its in alike), None)
        self._places[state] = next(self._numbers) if number is None else number
        self._states.setdefault(tower.base, {})[part.name] = state
        while len(self._places) > _STATES:
            oldest = self._places.pop(next(iter(self._places)))
            if oldest not in self._places.values():
                self._kept.drop(oldest)
        return self._places[state]

    def _is_exact(self, tower: Tower, kinds: frozenset[str], prompts: Sequence[Prompt], trunk: Part | None) -> bool:
        """Whether the model takes the tower's output as well as pixels; found out on first use."""
        known = self._exact.setdefault(tower.base, {})
        use = (kinds, trunk.name if trunk else "")
        if use not in known:
            reason = self._compare(tower, kinds, prompts, trunk)
            known[use] = not reason
            if reason:
                what = f"{type(tower.base).__name__} runs " + (
                    "in each pass, though it is frozen" if trunk else "for each row, not once for each picture"
                )
                logger.warning("the vision tower of %s: %s", what, reason)
        return known[use]

    def _compare(self, tower: Tower, kinds: frozenset[str], prompts: Sequence[Prompt], trunk: Part | None) -> str:
        """Compare what the language model is given for two of each of the richest prompts; what is wrong, or ""."""

        def count(prompt: Prompt, kind: str) -> int:
            return sum(tower.pixels[kind] in medium.kwargs for medium in self._of(prompt))

        richest = [max(prompts, key=lambda prompt: count(prompt, kind)) for kind in sorted(kinds)] * 2
        batch = collate(richest, pad_token_id=0)
        plain = {name: value.to(tower.device) for name, value in batch.model_inputs(dtype=tower.dtype).items()}
        media, passes = self._by_kind(tower, richest), 2 if trunk else 1
        try:
            with eval_mode(tower.base), torch.no_grad(), torch.autocast(tower.device.type, enabled=False):
                expected = tower.given_to_decoder(plain)
                # A trunk runs in the first of two passes; in the second its output is found.
                found = [tower.given_to_decoder(self._replaced(tower, media, plain, trunk)) for _ in range(passes)]
        except _REFUSALS as error:
            return f"{type(error).__name__}: {error}"
        difference = max(_difference(given, expected) for given in found)
        fits = difference <= max(1e-4, 8 * torch.finfo(tower.dtype).eps)
        return "" if fits else f"the features differ by {difference:.2g}"

    def _by_kind(self, tower: Tower, prompts: Sequence[Prompt]) -> dict[str, list[Shown]]:
        shown = [medium for prompt in prompts for medium in self._of(prompt)]
        found = {kind: [medium for medium in shown if name in medium.kwargs] for kind, name in tower.pixels.items()}
        return {kind: media for kind, media in found.items() if media}


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
