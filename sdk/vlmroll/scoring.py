"""Per-token log-probabilities and entropies of sampled ids, without the logits of a whole batch.

The backbone runs once over prompt and completion; the head is applied to the positions that predict completion tokens
only, `chunk_size` of them at a time. Logits of one chunk exist at a time: in the backward pass they are computed again.

Shapes: B rows, C longest completion, N sampled tokens of the batch, H hidden size, V vocabulary.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch.utils.checkpoint import checkpoint

from vlmroll.mismatch import Truncation, truncated_logprobs
from vlmroll.modeling import eval_mode
from vlmroll.vision import VisionFeatures
from vlmroll_processors import PackedBatch, PaddedBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores of sampled tokens; 0 on those that a tool or environment added, and on padding.

    Attributes:
        logprobs: [B, C] of the sampled ids at the sampling temperature, banned ids removed.
        entropies: [B, C] of the same distributions, in nats, without gradient; None unless asked for.
        truncated: [B, C] as logprobs, after truncation, without gradient; None unless asked for.
    """

    logprobs: Float[torch.Tensor, "B C"]
    entropies: Float[torch.Tensor, "B C"] | None
    truncated: Float[torch.Tensor, "B C"] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A model taken apart into backbone and head, with what its forward does to the logits.

    Attributes:
        backbone: ids and kwargs -> last hidden states.
        project: hidden states -> raw logits.
        scale: raw logits are multiplied by it.
        softcap: then squashed to (-softcap, softcap); None switches off.
    """

    backbone: Any
    project: Callable[[torch.Tensor], torch.Tensor]
    scale: float
    softcap: float | None

    def logits(self, hidden: Float[torch.Tensor, "*batch H"]) -> Float[torch.Tensor, "*batch V"]:
        """The model's logits in float32."""
        logits = self.project(hidden).float()
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


def head_of(model: Any) -> Head:
    """Take a causal or image-text-to-text model, or a PEFT model over one, apart."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config, forward = base.config.get_text_config(), _source_of_forward(type(base))

    def value(name: str) -> float | None:
        # A model over pictures may leave out what its text model alone would do with the same config.
        return getattr(config, name, None) if name in forward else None

    return Head(
        backbone=getattr(base, base.base_model_prefix, None) or partial(_before_head, base),
        project=base.get_output_embeddings(),
        scale=(value("logit_scale") or 1.0) / (value("logits_scaling") or 1.0),
        softcap=value("final_logit_softcapping"),
    )


@cache
def _source_of_forward(kind: type) -> str:
    return inspect.getsource(kind.forward)


def _before_head(base: Any, **inputs: Any) -> Any:
    """The hidden states that a model without a backbone of its own gives its head; the head itself gets none."""
    found: list[torch.Tensor] = []

    def keep(module: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        found.append(given[0])
        return (given[0][:, :0],)

    hook = base.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        base(**inputs)
    finally:
        hook.remove()
    return SimpleNamespace(last_hidden_state=found[0])


def check_head(model: Any, batch: PaddedBatch, tolerance: float = 1e-3) -> None:
    """Compare the taken-apart model with its own forward on the last position of a batch.

    Args:
        tolerance: relative to the largest logit; logits below float32 get a few of their own rounding steps.

    Raises:
        ValueError: the model does something to its logits that `head_of` does not know.
    """
    head = head_of(model)
    # Accelerate patches autocast into `forward`; both sides must run in the same precision, the weights' own.
    forward = getattr(model, "_original_forward", model)
    largest = max(batch.pieces, key=lambda piece: len(piece.forward_kwargs))  # pictures, where there are some
    inputs = batch.model_inputs(largest, dtype=model.dtype)
    with eval_mode(model), torch.no_grad(), torch.autocast(batch.input_ids.device.type, enabled=False):
        hidden = head.backbone(**inputs, use_cache=False).last_hidden_state[:, -1:]
        ours = head.logits(hidden)
        theirs = forward(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1:]  # some keep all, whatever asked
    difference = float((ours - theirs).abs().max())
    tolerance = max(tolerance, 4 * torch.finfo(theirs.dtype).eps)
    if not difference <= tolerance * max(1.0, float(theirs.abs().max())):
        raise ValueError(
            f"{type(model).__name__} changes its logits in a way that is not known here (difference {difference:.2g}); "
            "please report the model"
        )


def token_logprobs(
    logits: Float[torch.Tensor, "N V"], ids: Int[torch.Tensor, " N"], temperature: float
) -> Float[torch.Tensor, " N"]:
    """Log-probability of each id under `softmax(logits / temperature)`."""
    scaled = logits if temperature == 1 else logits / temperature
    return scaled.gather(-1, ids[:, None])[:, 0] - scaled.logsumexp(-1)


def _entropy(logits: Float[torch.Tensor, "N V"], temperature: float) -> Float[torch.Tensor, " N"]:
    logprobs = (logits.detach() / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isinf(), 0.0)).sum(-1)


def predicting_states(
    model: Any, head: Head, batch: PaddedBatch | PackedBatch, vision: VisionFeatures | None
) -> Float[torch.Tensor, "N H"]:
    """The last hidden states from which each sampled token is predicted, row by row."""

    def run(piece: Any) -> torch.Tensor:
        inputs: dict[str, Any] = batch.model_inputs(piece, dtype=model.dtype)
        inputs = inputs if vision is None else vision.inputs(model, piece.prompts, inputs)
        return head.backbone(**inputs, use_cache=False).last_hidden_state

    if isinstance(batch, PackedBatch):
        return torch.cat([run(piece)[0] for piece in batch.pieces])[batch.predictors]
    length = batch.completion_mask.shape[1]
    # The logits of position t predict token t + 1.
    states = torch.cat([run(piece)[:, -length - 1 : -1] for piece in batch.pieces])
    if len(batch.pieces) > 1:
        states = states[torch.tensor([row for piece in batch.pieces for row in piece.rows]).argsort()]
    return states[batch.scored_mask.bool()]


def policy_logprobs(
    model: Any,
    batch: PaddedBatch | PackedBatch,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    chunk_size: int = 1024,
    with_entropy: bool = False,
    truncation: Truncation | None = None,
    vision: VisionFeatures | None = None,
) -> Scores:
    """Score the completions of a batch.

    Args:
        model: see `head_of`.
        batch: prompts and completions. Packed ones need `attention.switch_on` for the model before.
        temperature: the sampling temperature.
        banned_ids: ids that could not be sampled; their probability is 0.
        chunk_size: completion tokens whose logits exist at one time.
        with_entropy: also return entropies.
        truncation: also return log-probabilities under it.
        vision: runs each distinct picture once; None for all pictures of the batch as they come.

    Example:
        >>> policy_logprobs(model, batch).logprobs.shape  # doctest: +SKIP
        torch.Size([8, 64])
    """
    head = head_of(model)
    chosen = batch.scored_mask.bool()
    hidden, ids = predicting_states(model, head, batch, vision), batch.completion_ids[chosen]

    def score(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = head.logits(hidden)
        logits[:, list(banned_ids)] = float("-inf")
        logprobs = token_logprobs(logits, ids, temperature)
        # The others come last: computing again for the backward pass ends where the last needed value is made.
        none = torch.zeros_like(logprobs)
        entropies = _entropy(logits, temperature) if with_entropy else none
        truncated = none if truncation is None else truncated_logprobs(logits, ids, temperature, truncation)
        return logprobs, entropies, truncated

    *chunks, last = zip(hidden.split(chunk_size), ids.split(chunk_size), strict=True)
    # The last chunk comes first in the backward pass: computed again, its logits would take as much memory then.
    again = partial(checkpoint, score, use_reentrant=False) if torch.is_grad_enabled() else score
    pieces = [*(again(*chunk) for chunk in chunks), score(*last)]
    logprobs, entropies, truncated = (torch.cat(values) for values in zip(*pieces, strict=True))
    empty = logprobs.new_zeros(chosen.shape)
    return Scores(
        logprobs=empty.masked_scatter(chosen, logprobs),
        entropies=empty.masked_scatter(chosen, entropies) if with_entropy else None,
        truncated=None if truncation is None else empty.masked_scatter(chosen, truncated),
    )
