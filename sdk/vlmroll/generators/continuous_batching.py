"""The generator that runs the policy through the continuous batching of transformers, for prompts without pictures.

The engine packs prompts and growing completions of any length into one row of tokens and keeps their keys and values in
pages, so that nothing is padded. It reads token ids only; there is no way in for pictures.
"""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from vlmroll.generators.base import stop_ids_of
from vlmroll.generators.continuous_engine import OTHERS, Engine, number_of
from vlmroll.generators.sampling import Logits, Warper, check_extra, draw, processors
from vlmroll.scoring import token_logprobs
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import ProcessorAdapter, Prompt


class ContinuousBatchingGenerator:
    """Samples from a transformers model with its continuous batching.

    What it samples and reports is what `TransformersGenerator` does, but other code computes the attention, and
    training corrects the difference (`has_mismatch`). Where tokens are drawn by temperature alone, the engine draws
    them; else they are drawn here, from the engine's logits.

    Each call makes a cache of its own: one that was kept would offer keys and values of old weights to prompts that
    begin alike.

    Args:
        model: a causal or image-text-to-text model, or a PEFT model over one.
        adapter: the adapter that encoded the prompts.
        banned_ids: further ids that must not be sampled.
        config: settings of transformers' `ContinuousBatchingConfig`; None values are left to us. Without `num_blocks`
            the cache has room for the prompts and completions of the call, at most for
            `continuous_engine.MAX_CACHED_TOKENS` tokens, or, on an accelerator with `max_memory_percent`, takes that
            share of the free memory. Attention stays as the model was loaded; `auto_switch_to_flash=True` lets the
            engine choose.

    Raises:
        ValueError: a setting that is not offered, or a model that the engine cannot run.

    Example:
        >>> generator = ContinuousBatchingGenerator(model, adapter, config={"num_blocks": 4096})  # doctest: +SKIP
        >>> output = generator.generate(prompts, SamplingParams(max_tokens=32), 8)  # doctest: +SKIP
    """

    has_mismatch = True
    metric_name = "transformers.generate_batch"
    text_only = True

    def __init__(
        self,
        model: Any,
        adapter: ProcessorAdapter,
        *,
        banned_ids: Sequence[int] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.banned_ids = frozenset(adapter.vision_ids.union(banned_ids))
        self.policy_version = 0
        self.stop_ids = stop_ids_of(model, adapter)
        self._engine = Engine(base, config or {}, self.stop_ids)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        """`num_generations` completions for each prompt.

        Afterwards the model is as it was before, also when the call fails, and so is torch's random state when there is
        a seed.

        Raises:
            ValueError: nothing to generate, a prompt with pictures or one that is too long, or an option that is not
                offered.
            RuntimeError: the engine failed; says at which prompt and why.
        """
        if not prompts or num_generations < 1:
            raise ValueError(f"nothing to generate: {len(prompts)} prompts, {num_generations} generations each")
        check_extra(sampling.extra)
        for i, (prompt, limit) in enumerate(zip(prompts, sampling.limits_of(len(prompts)), strict=True)):
            if prompt.images or prompt.videos:
                raise ValueError(
                    f"prompt {i} has {len(prompt.images)} pictures and {len(prompt.videos)} videos, and the continuous "
                    f"batching of transformers reads text only; {OTHERS}"
                )
            self._engine.check_length(i, prompt.num_tokens, limit)
        seed = int(torch.randint(2**62, ())) if sampling.seed is None else sampling.seed
        banned = torch.tensor(sorted(self.banned_ids), dtype=torch.long, device=self._engine.device)
        own = None
        step: Any = functools.partial(_scaled, banned, sampling.temperature)
        if not _is_plain(sampling):
            self._engine.check_python_runs()
            lengths = [prompt.num_tokens for prompt in prompts]
            step = own = _OwnDraws(sampling, self.stop_ids, banned, lengths, seed)
        answers = self._engine.run(prompts, sampling, num_generations, seed=seed, step=step, python=own is not None)
        return GenerationOutput(
            prompts=tuple(prompts),
            prompt_ids=tuple(tuple(group[0].prompt_ids) for group in answers),
            completions=tuple(tuple(self._completion(answer, own) for answer in group) for group in answers),
        )

    def _completion(self, answer: Any, own: "_OwnDraws | None") -> Completion:
        ids, logprobs = answer.generated_tokens, answer.logprobs
        if own is not None:
            assert own.ids[answer.request_id] == ids, "the engine took another token than the one left to it"
            logprobs = own.logprobs[answer.request_id]
        return Completion(
            completion_ids=tuple(ids),
            logprobs=tuple(logprobs),
            finish_reason="stop" if ids[-1] in self.stop_ids else "length",
            policy_version=self.policy_version,
        )

    def sync_weights(self, policy: Any) -> None:
        """The policy is the model itself: only its version is counted."""
        self.policy_version += 1

    def close(self) -> None:
        """Nothing to free: the model belongs to the caller."""


def _is_plain(sampling: SamplingParams) -> bool:
    """Whether tokens are drawn by temperature alone."""
    cut = sampling.top_p < 1 or sampling.top_k or sampling.min_p or sampling.repetition_penalty != 1 or sampling.extra
    return sampling.temperature > 0 and not cut


def _scaled(banned: torch.Tensor, temperature: float, ids: Any, logits: torch.Tensor) -> torch.Tensor:
    """A logits processor, once it has its first two arguments."""
    return logits.index_fill(-1, banned, float("-inf")) / temperature


class _OwnDraws(ContinuousBatchingLogitsProcessor):
    """A logits processor that draws the tokens and leaves the engine those alone, each with all of the probability.

    The engine shows its logits processors the last token of each row, while penalties need all of them, and reports
    log-probabilities after truncation, while training needs those before it. Here each row is processed with its own
    tokens, and the log-probability comes from the logits as they were.

    Args:
        banned: [K] ids that are never drawn.
        lengths: the prompts' lengths.

    Attributes:
        ids, logprobs: what was drawn, by the engine's name of the completion.
    """

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(
        self, sampling: SamplingParams, stop_ids: list[int], banned: torch.Tensor, lengths: Sequence[int], seed: int
    ) -> None:
        self._sampling, self._stop_ids, self._banned, self._lengths = sampling, stop_ids, banned, lengths
        self._warpers: dict[int, Warper] = {}
        self._generator = torch.Generator(banned.device).manual_seed(seed)
        self._rows: list[Any] = []
        self.ids, self.logprobs = defaultdict[str, list[int]](list), defaultdict[str, list[float]](list)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """The number that each row could have is not used."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Take note of the rows of the next step."""
        self._rows = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> Any:
        """[R, V] scores that leave one token to each row; what the engine has behind our rows it does not read."""
        left = torch.zeros_like(scores)
        if not self._rows:  # all tokens of the step belong to unfinished prompts
            return left
        temperature, count = self._sampling.temperature, len(self._rows)
        logits = scores[:count].index_fill(-1, self._banned, float("-inf"))
        tokens = draw(self._warped(logits.clone()), temperature, self._generator)
        logprobs = token_logprobs(logits, tokens, temperature or 1.0)
        for row, token, logprob in zip(self._rows, tokens.tolist(), logprobs.tolist(), strict=True):
            self.ids[row.request_id].append(token)
            self.logprobs[row.request_id].append(logprob)
        left[:count] = float("-inf")
        return left.scatter(-1, tokens[:, None], 0.0)

    def _warper(self, length: int) -> Warper:
        """The processors for prompts of a length."""
        if length not in self._warpers:
            device = str(self._banned.device)
            self._warpers[length] = processors(self._sampling, self._stop_ids, length, device)
        return self._warpers[length]

    def _warped(self, logits: Logits) -> Logits:
        if self._sampling.repetition_penalty == 1 and not self._sampling.extra:
            nothing = torch.zeros(len(logits), 0, dtype=torch.long, device=logits.device)
            return self._warper(0)(nothing, nothing, logits)
        warped: list[torch.Tensor] = []
        for row, row_logits in zip(self._rows, logits, strict=True):
            ids = torch.tensor([row.initial_tokens + row.generated_tokens], device=logits.device)
            warper = self._warper(self._lengths[number_of(row.request_id)])
            warped.append(warper(ids, torch.ones_like(ids), row_logits[None]))
        return torch.cat(warped)
