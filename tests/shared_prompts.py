"""Which tiny models share prompts, and rollouts scored with prompts shared or not, for several test files."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from training_runs import FAMILIES
from vlmroll.batches import join_rollouts
from vlmroll.scoring import policy_logprobs
from vlmroll.sharing import Sharing
from vlmroll.types import Rollout

NOT_SHARED = {
    "qwen3_5": "layers of another kind: linear_attention",
    "lfm2_vl": "layers of another kind: conv",
    "gemma3": "some of its attention is not causal",
    "gemma3_panscan": "some of its attention is not causal",
    "gemma4": "some of its attention is not causal",
    "paligemma": "some of its attention is not causal",
    "paligemma2": "some of its attention is not causal",
    "llama4": "layers of another kind: chunked_attention",
}
"""Linear attention and convolutions run over all tokens of a row. In the others, tokens of a picture, or of the whole
prompt, attend to what comes after them."""
SHARED = tuple(name for name in ("text", *FAMILIES) if name not in NOT_SHARED)


def sharing(*, wanted: bool = True) -> Sharing:
    join = partial(join_rollouts, pad_token_id=0, device="cpu")
    return Sharing(lambda found, packed: join(found, packed=packed), wanted=wanted)


def shares(model: Any, found: Sequence[Rollout]) -> bool:
    with torch.no_grad():
        return sharing().applies(model, found, lambda inputs: policy_logprobs(model, inputs).logprobs)


def scores_and_gradients(model: Any, found: Sequence[Rollout], *, packed: bool) -> tuple[torch.Tensor, Any]:
    model.zero_grad()
    inputs = join_rollouts(found, pad_token_id=0, device="cpu", packed=packed)
    scores = policy_logprobs(model, inputs, temperature=0.9, banned_ids=[3], chunk_size=5).logprobs
    (scores * torch.linspace(-1, 1, scores.numel()).view_as(scores)).sum().backward()
    return scores.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
