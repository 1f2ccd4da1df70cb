"""The values that pass between generation, scoring and training.

Shapes: B rows of a micro-batch, C longest completion, T longest prompt + C. Samples stay Python values in lists until
`Batch`; slicing, shuffling and filtering are list operations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int

from vlmroll_processors import Continuation, PackedBatch, PaddedBatch, Prompt

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
        limits: for each prompt of the call its longest completion, where they differ; none is above `max_tokens`.

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
    limits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        wrong = {
            "max_tokens must be at least 1": self.max_tokens < 1,
            "temperature must not be negative": self.temperature < 0,
            "top_p must be above 0 and at most 1": not 0 < self.top_p <= 1,
            "top_k must not be negative": self.top_k < 0,
            "min_p must be from 0 to 1": not 0 <= self.min_p <= 1,
            "repetition_penalty must be above 0": self.repetition_penalty <= 0,
            "limits must be from 1 to max_tokens": not all(1 <= n <= self.max_tokens for n in self.limits or ()),
        }
        for message, bad in wrong.items():
            if bad:
                raise ValueError(f"SamplingParams: {message}, got {getattr(self, message.split()[0])}")

    def limits_of(self, num_prompts: int) -> tuple[int, ...]:
        """For each prompt of a call its longest completion.

        Raises:
            ValueError: `limits` are of another number of prompts.
        """
        limits = (self.max_tokens,) * num_prompts if self.limits is None else self.limits
        if len(limits) != num_prompts:
            raise ValueError(f"SamplingParams: {len(limits)} limits for {num_prompts} prompts; give one for each")
        return limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What a completion of several turns consists of: what the model sampled, and what tools or others added.

    Attributes:
        sampled: [C] 1 on ids that the model sampled, 0 on those that were added.
        continuation: from the completion's prompt to that of its last turn, which has the pictures of all turns.
        messages: the completion as chat messages: of the assistant, with `tool_calls`, and of tools.
        num_calls: how many tool calls there were.
        num_failed, num_timed_out: how many of them ended in an error message, and of those by their time limit.
        num_rolled_back: how many calls were dropped with their results, since these did not fit.
        extra: further values for reward functions, by the names of their arguments.
    """

    sampled: tuple[int, ...]
    continuation: Continuation
    messages: tuple[Mapping[str, Any], ...] = ()
    num_calls: int = 0
    num_failed: int = 0
    num_timed_out: int = 0
    num_rolled_back: int = 0
    extra: Mapping[str, Any] = field(default_factory=_nothing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion, or several with what was added between them.

    Attributes:
        completion_ids: the ids, a stop token included when there is one.
        logprobs: of each sampled token under the policy at the sampling temperature, vision ids removed, before top_p,
            top_k, min_p and penalties: the number that training scores again. 0 on ids that were added.
        finish_reason: "stop" at a stop token, "length" at the limit, or where the next turn did not fit.
        policy_version: how often the weights had been synchronised when it was sampled.
        truncated: logprobs are of the distribution after min_p, top_k and top_p, in this order, normalised again.
        turns: see `Turns`; None where the model sampled everything in one turn.
    """

    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int = 0
    truncated: bool = False
    turns: Turns | None = None

    def __post_init__(self) -> None:
        if not self.completion_ids or len(self.completion_ids) != len(self.logprobs):
            raise ValueError(
                f"a completion needs one log-probability for each of its ids and at least one id, "
                f"got {len(self.completion_ids)} ids and {len(self.logprobs)} log-probabilities"
            )
        if len(self.sampled) != len(self.completion_ids) or not any(self.sampled):
            raise ValueError(
                f"a completion of several turns needs a 1 or 0 for each of its ids and at least one 1, got "
                f"{len(self.completion_ids)} ids and {len(self.sampled)} values, {sum(self.sampled)} of them 1"
            )

    @property
    def num_added(self) -> int:
        """How many of the ids the prompt of the last turn holds already."""
        added = None if self.turns is None else self.turns.continuation.added
        return 0 if added is None else added.num_tokens

    def check(self, prompt: Prompt, *, where: str) -> None:
        """Refuse turns that are not those of the prompt and of these ids; see `Continuation.check`."""
        if self.turns is not None:
            self.turns.continuation.check(prompt, self.completion_ids, where=where)

    @property
    def sampled(self) -> tuple[int, ...]:
        """[C] 1 on ids that the model sampled."""
        return (1,) * len(self.completion_ids) if self.turns is None else self.turns.sampled


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
            for completion in self.completions[i]:
                completion.check(prompt, where=f"prompt {i}")

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
        """For each completion the forward kwargs of its prompt, of the last turn where it has several."""
        pairs = zip(self.prompts, self.completions, strict=True)
        return [
            (prompt if completion.turns is None else completion.turns.continuation.prompt).forward_kwargs
            for prompt, group in pairs
            for completion in group
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One completion with all that is known about it. Stages add to it with `dataclasses.replace`.

    Attributes:
        row: the dataset row.
        row_id: its number in the dataset (or in the stream).
        group: number of the group in its round; siblings share it.
        observation: content parts that an environment added to the row's prompt.
        rewards: reward by function name; None where a function gave none.
        reward: the weighted sum; NaN when no function gave one.
        advantage: what the objective multiplies with; 0 without a reward.
        old_logprobs: [C] under the policy as it was when the round began; None while that is the current policy.
        ref_logprobs: [C] under the reference model; None without one.
        entropies: [C] of the policy's distributions when the round began, in nats; None unless asked for.
        mismatch: [C] log-probabilities of the policy when the round began less those of its engine, NaN where the
            engine gave none; None while that is the current policy, and where the policy itself samples.
        loss_mask: [C] 1 where a sampled token counts in the loss and in its normaliser; None means everywhere.
        entropy_mask: [C] 1 where the policy term counts (`top_entropy_quantile`); None means everywhere.
        loss_weight: the share of each counted token in the optimizer step's loss.
    """

    prompt: Prompt
    completion: Completion
    row: Mapping[str, Any]
    row_id: int
    group: int
    observation: tuple[Mapping[str, Any], ...] = ()
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
        self.completion.check(self.prompt, where=f"row {self.row_id}")

    @property
    def counted(self) -> tuple[int, ...]:
        """[C] 1 where a token counts in the loss: where the model sampled it, and `loss_mask` says no other."""
        sampled = self.completion.sampled
        return sampled if self.loss_mask is None else tuple(a & b for a, b in zip(sampled, self.loss_mask, strict=True))

    @property
    def shown(self) -> tuple[Prompt, ...]:
        """The prompt, and what later turns added to it, as prompts: all that has pictures."""
        turns = self.completion.turns
        added = None if turns is None else turns.continuation.added
        return (self.prompt,) if added is None else (self.prompt, added)

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
