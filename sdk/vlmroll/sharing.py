"""Whether a model takes packed rows, in which a prompt stands once for all of its completions: it is tried.

Attention over a packed row (`vlmroll.attention`) is exact for models whose tokens meet in causal attention alone. It is
not for models with recurrent or convolutional layers, nor where a prompt's pictures attend to each other in both
directions. The first are told by their config. For the rest, on first use, padded rows are run with a look at the
masks of every layer, and their log-probabilities compared with those of packed rows.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vlmroll.attention import NotShareable, in_place_of, switch_on
from vlmroll.types import Rollout
from vlmroll_processors import PackedBatch, PaddedBatch

logger = logging.getLogger(__name__)

Kind = tuple[bool, bool, int]
Join = Callable[[Sequence[Rollout], bool], PaddedBatch | PackedBatch]
Score = Callable[[PaddedBatch | PackedBatch], torch.Tensor]

_FAILURES = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


class Sharing:
    """Decides for the rollouts of a micro-batch; each mix of pictures and videos is tried on its first use.

    Args:
        wanted: False for padded rows always.
        join: rollouts, and whether to pack them -> the model's inputs.
    """

    def __init__(self, join: Join, *, wanted: bool) -> None:
        self._known: dict[Kind, bool] = {}
        self._told: set[str] = set()
        self._wanted, self._join = wanted, join

    def applies(self, model: Any, rollouts: Sequence[Rollout], score: Score) -> bool:
        """Whether to pack these rollouts.

        Args:
            model: the policy, without wrappers.
            score: the model's inputs -> log-probabilities [B, C], without gradient.
        """
        if not self._wanted:
            return False
        for kind in dict.fromkeys(map(_kind, rollouts)):
            if kind not in self._known:
                self._known[kind] = self._fits(model, _sample(rollouts, kind), score)
        return all(self._known[kind] for kind in map(_kind, rollouts))

    def _fits(self, model: Any, sample: Sequence[Rollout], score: Score) -> bool:
        try:
            switch_on(model)
            expected = _watched(self._join(sample, False), score)
            difference = float((score(self._join(sample, True)) - expected).abs().mean())
            if difference > tolerance(model):
                raise NotShareable(f"its log-probabilities would differ by {difference:.2g} a token")
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            self._tell(model, str(error) if isinstance(error, NotShareable) else f"{type(error).__name__}: {error}")
            return False
        return True

    def _tell(self, model: Any, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning(
                "%s: prompts are run again for each of their completions, since the model cannot share them: %s",
                type(model).__name__,
                reason,
            )


def _watched(padded: PaddedBatch | PackedBatch, score: Score) -> torch.Tensor:
    """The scores of padded rows in one piece, after a look at the masks of all layers.

    Raises:
        NotShareable: some of the attention is not causal, or none was seen.
    """
    assert isinstance(padded, PaddedBatch)
    seen: list[bool] = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        if key.shape[2] == query.shape[2]:
            seen.append(is_causal(mask, padded.attention_mask, options.get("sliding_window")))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    token = in_place_of.set(attend)
    try:
        scores = score(padded)
    finally:
        in_place_of.reset(token)
    if not seen:
        raise NotShareable("its attention cannot be replaced")
    if not all(seen):
        raise NotShareable("some of its attention is not causal")
    return scores


def is_causal(mask: torch.Tensor | None, real: Int[torch.Tensor, "B T"], window: int | None) -> bool:
    """Whether a mask of "sdpa", [B, 1, T, T] and True where a key is seen, is causal on all tokens but padding.

    Args:
        real: 1 on tokens, 0 on padding.
        window: how many keys a token sees; None for all before it.
    """
    places = torch.arange(real.shape[1], device=real.device)
    expected = places[None, :] <= places[:, None]
    if window is not None:
        expected = expected & (places[None, :] > places[:, None] - window)
    tokens = real.bool()
    expected = expected & tokens[:, None, :]
    found = places[None, :] <= places[:, None] if mask is None else mask[:, 0]
    if found.dtype is not torch.bool:
        found = found == 0
    return bool((found.expand_as(expected) == expected)[tokens].all())


def tolerance(model: Any) -> float:
    """Mean difference of log-probabilities, in nats a token, that the model's precision explains."""
    device = model.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
    return max(1e-4, 4 * torch.finfo(dtype).eps)


def _kind(rollout: Rollout) -> Kind:
    prompt = rollout.prompt
    return bool(prompt.images), bool(prompt.videos), prompt.batch_key


def _sample(rollouts: Sequence[Rollout], kind: Kind) -> list[Rollout]:
    """Two siblings of a kind, and a rollout of another prompt: nothing may leak between any of them."""
    alike = [rollout for rollout in rollouts if _kind(rollout) == kind]
    siblings = [rollout for rollout in alike if rollout.prompt is alike[0].prompt]
    others = [rollout for rollout in alike if rollout.prompt is not alike[0].prompt]
    return [*siblings[:2], *others[:1]]
