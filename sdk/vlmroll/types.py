"""The values that pass between generation, scoring and training.

Shapes: B rows of a micro-batch, C longest completion, T longest prompt + C. Samples stay Python values in lists until
`Batch`; slicing, shuffling and filtering are list operations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int

from vlmroll_processors import PackedBatch, PaddedBatch, Prompt

FinishReason = Literal["stop", "length"]


def _nothing() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How completions are sampled; one object for text and picture prompts alike.

    Attributes:
        max_tokens: longest completion, its stop token included.
        temperature: 0 takes the most likely token.
        top_p, top_k, min_p, repetition_penalty: as in transformers' GenerationConfig; 1.0, 0, 0.0 and 1.0 switch off.
        seed: of this call; None draws from torch's global generator.
        extra: further options of the engine's own, by its own names.

    Example:
        >>> SamplingParams(max_tokens=8, temperature=0.7).top_p
        1.0
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        wrong = {
            "max_tokens must be at least 1": self.max_tokens < 1,
            "temperature must not be negative": self.temperature < 0,
            "top_p must be above 0 and at most 1": not 0 < self.top_p <= 1,
            "top_k must not be negative": self.top_k < 0,
            "min_p must be from 0 to 1": not 0 <= self.min_p <= 1,
            "repetition_penalty must be above 0": self.repetition_penalty <= 0,
        }
        for message, bad in wrong.items():
            if bad:
                raise ValueError(f"SamplingParams: {message}, got {getattr(self, message.split()[0])}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion.

    Attributes:
        completion_ids: the sampled ids, a stop token included when there is one.
        logprobs: of each sampled token under the policy at the sampling temperature, vision ids removed, before top_p,
            top_k, min_p and penalties: the number that training scores again.
        finish_reason: "stop" at a stop token, "length" at the limit.
        policy_version: how often the weights had been synchronised when it was sampled.
        truncated: logprobs are of the distribution after min_p, top_k and top_p, in this order, normalised again.
    """

    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int = 0
    truncated: bool = False

    def __post_init__(self) -> None:
        if not self.completion_ids or len(self.completion_ids) != len(self.logprobs):
            raise ValueError(
                f"a completion needs one log-probability for each of its ids and at least one id, "
                f"got {len(self.completion_ids)} ids and {len(self.logprobs)} log-probabilities"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOutput:
    """What every generator returns. It checks that the engine read the ids that were encoded.

    Attributes:
        prompts: the prompts asked for.
        prompt_ids: for each prompt the ids that the engine used, as it reports them.
        completions: for each prompt its completions.
    """

    prompts: tuple[Prompt, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[Completion, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.prompts) == len(self.prompt_ids) == len(self.completions):
            raise ValueError(
                f"{len(self.prompts)} prompts, {len(self.prompt_ids)} prompt id lists and {len(self.completions)} "
                "completion lists; a generator returns one of each for every prompt"
            )
        for i, (prompt, used) in enumerate(zip(self.prompts, self.prompt_ids, strict=True)):
            if prompt.prompt_ids != used:
                raise ValueError(
                    f"prompt {i}: the engine used {len(used)} ids that differ from the {prompt.num_tokens} encoded "
                    "ones; it must get `engine_ids` if it expands placeholders itself, else `prompt_ids`"
                )

    @property
    def completion_ids(self) -> list[list[int]]:
        """The ids of all completions, prompt by prompt."""
        return [list(c.completion_ids) for group in self.completions for c in group]

    @property
    def logprobs(self) -> list[list[float]]:
        """The log-probabilities of all completions, prompt by prompt."""
        return [list(c.logprobs) for group in self.completions for c in group]

    @property
    def forward_kwargs(self) -> list[Mapping[str, torch.Tensor]]:
        """For each completion the forward kwargs of its prompt; siblings share one mapping."""
        pairs = zip(self.prompts, self.completions, strict=True)
        return [prompt.forward_kwargs for prompt, group in pairs for _ in group]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One completion with all that is known about it. Stages add to it with `dataclasses.replace`.

    Attributes:
        row: the dataset row.
        row_id: its number in the dataset (or in the stream).
        group: number of the group in its round; siblings share it.
        rewards: reward by function name; None where a function gave none.
        reward: the weighted sum; NaN when no function gave one.
        advantage: what the objective multiplies with; 0 without a reward.
        old_logprobs: [C] under the policy as it was when the round began; None while that is the current policy.
        ref_logprobs: [C] under the reference model; None without one.
        entropies: [C] of the policy's distributions when the round began, in nats; None unless asked for.
        mismatch: [C] log-probabilities of the policy when the round began less those of its engine, NaN where the
            engine gave none; None while that is the current policy, and where the policy itself samples.
        loss_mask: [C] 1 where a token counts in the loss and in its normaliser; None means everywhere.
        entropy_mask: [C] 1 where the policy term counts (`top_entropy_quantile`); None means everywhere.
        loss_weight: the share of each counted token in the optimizer step's loss.
    """

    prompt: Prompt
    completion: Completion
    row: Mapping[str, Any]
    row_id: int
    group: int
    rewards: Mapping[str, float | None] = field(default_factory=_nothing)
    reward: float = float("nan")
    advantage: float = 0.0
    old_logprobs: tuple[float, ...] | None = None
    ref_logprobs: tuple[float, ...] | None = None
    entropies: tuple[float, ...] | None = None
    mismatch: tuple[float, ...] | None = None
    loss_mask: tuple[int, ...] | None = None
    entropy_mask: tuple[int, ...] | None = None
    loss_weight: float = 0.0

    def __post_init__(self) -> None:
        for name in ("old_logprobs", "ref_logprobs", "entropies", "mismatch", "loss_mask", "entropy_mask"):
            values: Sequence[float] | None = getattr(self, name)
            if values is not None and len(values) != len(self.completion.completion_ids):
                raise ValueError(f"{name} has {len(values)} values for {len(self.completion.completion_ids)} tokens")

    @property
    def counted(self) -> tuple[int, ...]:
        """[C] 1 where a token counts in the loss: `loss_mask`, or 1 everywhere."""
        return (1,) * len(self.completion.completion_ids) if self.loss_mask is None else self.loss_mask

    @property
    def num_loss_tokens(self) -> int:
        """How many tokens count in the loss."""
        return sum(self.counted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The tensors of one micro-batch; `vlmroll.batches.make_batch` makes it.

    Attributes:
        inputs: ids, masks and forward kwargs.
        loss_mask: [B, C] 1 where a token counts.
        entropy_mask: [B, C] 1 where the policy term counts; None means everywhere.
        advantages: [B].
        loss_weights: [B] the share of each counted token in the optimizer step's loss.
        old_logprobs: [B, C] or None, see `Rollout`.
        ref_logprobs: [B, C] or None.
        mismatch: [B, C] or None, see `Rollout`.
    """

    inputs: PaddedBatch | PackedBatch
    loss_mask: Int[torch.Tensor, "B C"]
    entropy_mask: Int[torch.Tensor, "B C"] | None
    advantages: Float[torch.Tensor, " B"]
    loss_weights: Float[torch.Tensor, " B"]
    old_logprobs: Float[torch.Tensor, "B C"] | None
    ref_logprobs: Float[torch.Tensor, "B C"] | None
    mismatch: Float[torch.Tensor, "B C"] | None
