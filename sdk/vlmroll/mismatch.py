"""How far an engine's log-probabilities are from the policy's, and the weights that make up for it in the loss.

An engine runs the policy's weights through code of its own, often in another precision, so its completions are samples
of a slightly different distribution. Weighting each token's loss by the ratio of both probabilities (importance
sampling) corrects that. Ratios out of bounds are cut at the bound, which trades variance for bias (Ionides 2008,
"Truncated Importance Sampling"), or set to 0, which takes what the engine should not have sampled out of the loss.

Shapes: B rows, C longest completion, N completion tokens, V vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int

from vlmroll.losses import Mask, PerRow, PerToken
from vlmroll.types import Rollout
from vlmroll_processors.collate import pad

MODES = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate")

_MOST = 80.0
"""Log ratios are cut here: float32 ends at exp(88), and an infinite weight on a loss of 0 would be NaN."""
_ROWS_AT_ONCE = 64
"""Distributions that are truncated at one time: sorting them takes several times the memory of their logits."""

_HARMLESS = (
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens", "output_kind", "stream_interval"),
    *("logprobs", "prompt_logprobs", "flat_logprobs", "skip_reading_prefix_cache"),
)
"""Settings of an engine that say when a completion ends or what is reported of it, not which token comes next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Which tokens can be sampled at all; 0.0, 0 and 1.0 switch off. Engines apply them in this order."""

    min_p: float
    top_k: int
    top_p: float


def truncation_of(
    rollouts: Sequence[Rollout], *, min_p: float | None, top_k: int | None, top_p: float
) -> Truncation | None:
    """The truncation to score some rollouts with; None where none was in force or nobody asks.

    That is asked of completions whose engine reports truncated log-probabilities, until the round's policy is scored.
    """
    asked = any(rollout.completion.truncated and rollout.old_logprobs is None for rollout in rollouts)
    if not asked or not (min_p or top_k or top_p < 1):
        return None
    return Truncation(min_p=min_p or 0.0, top_k=top_k or 0, top_p=top_p)


@torch.no_grad()
def truncated_logprobs(
    logits: Float[torch.Tensor, "N V"], ids: Int[torch.Tensor, " N"], temperature: float, truncation: Truncation
) -> Float[torch.Tensor, " N"]:
    """Log-probability of each id under `softmax(logits / temperature)`, truncated and normalised again; no gradient.

    The id itself is always kept: it was sampled, so an engine that rounds otherwise had it inside the edge.
    """
    from transformers.generation import logits_process as hf

    warpers = hf.LogitsProcessorList()
    if truncation.min_p:
        warpers.append(hf.MinPLogitsWarper(truncation.min_p))
    if truncation.top_k:
        warpers.append(hf.TopKLogitsWarper(truncation.top_k))
    if truncation.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(truncation.top_p))
    found: list[torch.Tensor] = []
    for piece, chosen in zip(logits.split(_ROWS_AT_ONCE), ids[:, None].split(_ROWS_AT_ONCE), strict=True):
        scaled = piece / temperature
        own = scaled.gather(-1, chosen)
        kept: torch.Tensor = warpers(chosen, scaled)  # pyright: ignore[reportArgumentType]
        found.append(own[:, 0] - kept.scatter(-1, chosen, own).logsumexp(-1))
    return torch.cat(found)


def difference(rollouts: Sequence[Rollout], logprobs: PerToken, truncated: PerToken | None = None) -> PerToken:
    """Log-probabilities of the policy less those that the engine reported; 0 on padding, no gradient.

    NaN stands where the engine reported no finite number.

    Args:
        logprobs: of the policy that sampled, so as it was when the round began.
        truncated: the same after truncation, for the rows whose engine reports these.
    """
    engine = pad([torch.tensor(rollout.completion.logprobs) for rollout in rollouts], 0.0, to=logprobs.shape[1])
    engine = engine.to(logprobs.device)
    ours = logprobs.detach()
    if truncated is not None:
        rows = torch.tensor([rollout.completion.truncated for rollout in rollouts], device=ours.device)
        ours = torch.where(rows[:, None], truncated, ours)
    return (ours - engine).masked_fill(~engine.isfinite(), float("nan"))


def importance_weights(
    gap: PerToken, mask: Mask, mode: str, *, clip_min: float | None, clip_max: float | None
) -> PerRow | PerToken:
    """What the policy loss of each token, or of each row, is multiplied with.

    Args:
        gap: see `difference`; NaN counts as 0.
        mask: 1 where a token counts in the loss; the others contribute nothing to their row.
        mode: `token_*` has a ratio for each token, `sequence_*` the product of those of a row; `*_truncate` cuts
            ratios at the bounds, `*_mask` sets those out of bounds to 0.
        clip_min, clip_max: the bounds; None for none.

    Example:
        >>> gap, mask = torch.tensor([[0.0, 2.0]]), torch.ones(1, 2, dtype=torch.long)
        >>> importance_weights(gap, mask, "token_truncate", clip_min=None, clip_max=3.0)
        tensor([[1., 3.]])
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    level, _, way = mode.partition("_")
    log_ratio = gap.masked_fill((mask == 0) | gap.isnan(), 0.0)
    log_ratio = log_ratio.sum(-1, keepdim=True) if level == "sequence" else log_ratio
    ratio = log_ratio.clamp(max=_MOST).exp()
    low, high = 0.0 if clip_min is None else clip_min, math.inf if clip_max is None else clip_max
    return ratio.clamp(low, high) if way == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def refuse_unscorable(*, repetition_penalty: float, regex: str | None, generation_kwargs: Iterable[str]) -> None:
    """Refuse settings that change which tokens an engine samples in a way that scoring cannot repeat.

    The engine's log-probabilities would then differ from the policy's by design, and the weights would work against it.

    Args:
        regex: that completions must match.
        generation_kwargs: names of further settings of the engine.

    Raises:
        ValueError: names the setting and the fix.
    """
    found = [f"repetition_penalty={repetition_penalty}"] if repetition_penalty != 1 else []
    found += [] if regex is None else [f"vllm_structured_outputs_regex={regex!r}"]
    found += [f"generation_kwargs[{name!r}]" for name in generation_kwargs if name not in _HARMLESS]
    if found:
        raise ValueError(
            f"{found[0]} changes the engine's distribution, and the policy cannot be scored under it to correct the "
            "difference between both; leave it out, or set vllm_importance_sampling_correction=False"
        )
