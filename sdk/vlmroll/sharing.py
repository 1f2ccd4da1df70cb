"""Whether a model takes packed rows, in which a prompt stands once for all of its completions: it is tried.

Attention over a packed row (`vlmroll.attention`) is exact for models whose tokens meet in causal attention alone. It is
not for models with recurrent or convolutional layers, nor where a prompt's pictures attend to each other in both
directions. The first are told by their config. For the rest, on first use, padded rows are run with a look at the
masks of every layer, and their log-probabilities compared with those of packed rows.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vlmroll.attention import NotShareable, in_place_of, switch_on
from vlmroll.types import Rollout
from vlmroll_processors import PackedBatch, PaddedBatch

logger = logging.getLogger(__name__)

JoinRollouts = Callable[[Sequence[Rollout], bool], PaddedBatch | PackedBatch]
Score = Callable[[PaddedBatch | PackedBatch], torch.Tensor]

# What a model that packed rows do not suit may raise.
_FAILURES = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


class Kind(NamedTuple):
    """What may decide whether a rollout can share its prompt; `added`: later turns brought pictures."""

    images: bool
    videos: bool
    batch_key: int
    beyond_window: bool
    added: bool


class Trial(NamedTuple):
    """What a trial found, and whether it had siblings, and two prompts, between which something might leak."""

    fits: bool
    siblings: bool
    prompts: bool


class Sharing:
    """Decides for the rollouts of a micro-batch; each kind of them is tried on its first use.

    Args:
        wanted: False for padded rows always.
        join: rollouts, and whether to pack them -> the model's inputs.
    """

    def __init__(self, join: JoinRollouts, *, wanted: bool) -> None:
        self._trials: dict[Kind, Trial] = {}
        self._told: set[str] = set()
        self._wanted, self._join = wanted, join

    def applies(self, model: Any, rollouts: Sequence[Rollout], score: Score) -> bool:
        """Whether to pack these rollouts.

        Args:
            model: the policy, without wrappers.
            score: the model's inputs -> log-probabilities [B, C], in the model's own precision, without gradient.
        """
        if not self._wanted:
            return False
        window = _window(model)
        kinds = [_kind(rollout, window) for rollout in rollouts]
        for kind in dict.fromkeys(kinds):
            sample = _sample([rollout for rollout, its in zip(rollouts, kinds, strict=True) if its == kind])
            known = self._trials.get(kind, Trial(fits=True, siblings=False, prompts=False))
            siblings = len(sample) > 1 and sample[1].prompt is sample[0].prompt
            prompts = sample[-1].prompt is not sample[0].prompt
            more = siblings > known.siblings or prompts > known.prompts
            if kind not in self._trials or (known.fits and more):
                fits = self._fits(model, sample, score)
                self._trials[kind] = Trial(fits, siblings or known.siblings, prompts or known.prompts)
        return all(self._trials[kind].fits for kind in kinds)

    def _fits(self, model: Any, sample: Sequence[Rollout], score: Score) -> bool:
        try:
            switch_on(model)
            padded = self._join(sample, False)
            expected = _watched(padded, score)
        except NotShareable as error:
            return self._refuse(model, str(error))
        try:
            found = score(self._join(sample, True))
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            return self._refuse(model, str(error) if isinstance(error, NotShareable) else repr(error))
        expected = expected[:, : found.shape[1]]  # padded rows may be rounded up
        difference = float((found - expected).abs().sum() / padded.scored_mask.sum())
        if not difference <= tolerance(model.dtype):  # NaN is no agreement
            return self._refuse(model, f"its log-probabilities would differ by {difference:.2g} a token")
        return True

    def _refuse(self, model: Any, reason: str) -> bool:
        if reason not in self._told:
            self._told.add(reason)
            logger.warning(
                "%s: prompts are run again for each of their completions, since the model cannot share them: %s",
                type(model).__name__,
                reason,
            )
        return False


def _watched(padded: PaddedBatch | PackedBatch, score: Score) -> torch.Tensor:
    """The scores of padded rows in one piece, after a look at the masks of all layers.

    Raises:
        NotShareable: some of the attention is not causal, or none was seen.
    """
    assert isinstance(padded, PaddedBatch)
    seen: dict[tuple[int, int | None], tuple[Any, bool]] = {}  # layers mostly have one mask, which is kept for its id

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        window = options.get("sliding_window")
        if key.shape[2] == query.shape[2] and (id(mask), window) not in seen:
            seen[id(mask), window] = mask, is_causal(mask, padded.attention_mask, window)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    token = in_place_of.set(attend)
    try:
        scores = score(padded)
    finally:
        in_place_of.reset(token)
    if not seen:
        raise NotShareable("its attention cannot be replaced")
    if not all(causal for _, causal in seen.values()):
        raise NotShareable("some of its attention is not causal")
    return scores


def is_causal(mask: torch.Tensor | None, real: Int[torch.Tensor, "B T"], window: int | None) -> bool:
    """Whether a mask of "sdpa", [B, 1, T, T] and True where a key is seen, is causal on all tokens but padding.

    Args:
        real: 1 on tokens, 0 on padding.
        window: how many keys a token sees; None for all before it.
    """
    places = torch.arange(real.shape[1], device=real.device)
    causal = places[None, :] <= places[:, None]
    expected = causal if window is None else causal & (places[None, :] > places[:, None] - window)
    if mask is None:
        masks = [causal] * len(real)
    else:
        mask = mask if mask.dtype is torch.bool else mask == 0
        masks = [row[0] for row in mask.expand(len(real), -1, -1, -1)]
    return all(
        torch.equal(found[tokens], (expected & tokens[None, :])[tokens])
        for found, tokens in zip(masks, real.bool(), strict=True)
    )


def tolerance(dtype: torch.dtype) -> float:
    """Mean difference of log-probabilities, in nats a token, that a precision explains."""
    return max(1e-4, 4 * torch.finfo(dtype).eps)


def _window(model: Any) -> int | None:
    config = model.config.get_text_config()
    return getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)


def _kind(rollout: Rollout, window: int | None) -> Kind:
    prompt = rollout.prompt
    length = prompt.num_tokens + len(rollout.completion.completion_ids)
    # Some models leave the window to the mask of longer rows alone.
    beyond = window is not None and length > window
    media = [(bool(shown.images), bool(shown.videos)) for shown in rollout.shown]
    images, videos = (any(kind) for kind in zip(*media, strict=True))
    return Kind(images, videos, rollout.shown[-1].batch_key, beyond, any(map(any, media[1:])))


def _sample(alike: Sequence[Rollout]) -> list[Rollout]:
    """Two siblings, and a rollout of another prompt: nothing may leak between any of them."""
    siblings = [rollout for rollout in alike if rollout.prompt is alike[0].prompt]
    others = [rollout for rollout in alike if rollout.prompt is not alike[0].prompt]
    return [*siblings[:2], *others[:1]]
