"""The generator that runs the policy itself, in the process.

Each distinct prompt goes through the vision tower and the prefill once; then its key-value cache is repeated, not
recomputed, and its completions branch from it. Rows leave the batch when they stop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vlmroll.generators.base import stop_ids_of
from vlmroll.generators.sampling import draw, processors
from vlmroll.modeling import eval_mode
from vlmroll.scoring import to_device, token_logprobs
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import ProcessorAdapter, Prompt, collate
from vlmroll_processors.collate import alike


@dataclass(slots=True)
class _Branches:
    """The rows that still grow: R of them, one for each unfinished completion."""

    owner: torch.Tensor  # [R] which completion a row is
    cache: Any
    ids: torch.Tensor  # [R, P + steps]
    mask: torch.Tensor  # [R, P + steps]
    position: torch.Tensor  # [R] of the next token
    logits: torch.Tensor  # [R, V] for the next token
    axes: tuple[int, ...]  # leading axes of the position ids, such as (3,)
    repeated: dict[str, torch.Tensor]  # [R, 1, ...] per-token inputs that each new token gets from the last one

    def keep(self, rows: torch.Tensor) -> None:
        """Keep some rows, or repeat rows, in the order of their indices."""
        self.cache.reorder_cache(rows)
        for name in ("owner", "ids", "mask", "position", "logits"):
            setattr(self, name, getattr(self, name)[rows])
        self.repeated = {name: tensor[rows] for name, tensor in self.repeated.items()}


@dataclass(slots=True)
class _Growing:
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    stopped: bool = False


class TransformersGenerator:
    """Samples from a transformers model.

    Stop ids are those of the model's generation config and of the tokenizer together; the vision ids of the adapter
    and `banned_ids` are never sampled. Nothing else is taken from the model's generation config.

    Args:
        model: a causal or image-text-to-text model, or a PEFT model over one.
        adapter: the adapter that encoded the prompts.
        banned_ids: further ids that must not be sampled.

    Example:
        >>> generator = TransformersGenerator(model, adapter)  # doctest: +SKIP
        >>> output = generator.generate(prompts, SamplingParams(max_tokens=32), 8)  # doctest: +SKIP
    """

    metric_name = "transformers.generate"

    def __init__(self, model: Any, adapter: ProcessorAdapter, *, banned_ids: Sequence[int] = ()) -> None:
        self.model = model
        self._adapter = adapter
        self.banned_ids = frozenset(adapter.vision_ids.union(banned_ids))
        self.policy_version = 0
        self.stop_ids = stop_ids_of(model, adapter)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        """`num_generations` completions for each prompt.

        The model is switched to eval mode for the call and back afterwards.

        Raises:
            ValueError: no prompts, fewer than one generation, or an option in `sampling.extra` that is not offered.
        """
        if not prompts or num_generations < 1:
            raise ValueError(f"nothing to generate: {len(prompts)} prompts, {num_generations} generations each")
        grown = [_Growing() for _ in range(len(prompts) * num_generations)]
        with torch.no_grad(), eval_mode(self.model):
            for number, places in enumerate(alike(prompts)):
                seed = None if sampling.seed is None else sampling.seed + (number << 32)
                chosen = [prompts[i] for i in places]
                found = self._grow(chosen, replace(sampling, seed=seed), num_generations)
                for i, place in enumerate(places):
                    for j in range(num_generations):
                        grown[place * num_generations + j] = found[i * num_generations + j]
        completions = [
            Completion(
                completion_ids=tuple(row.ids),
                logprobs=tuple(row.logprobs),
                finish_reason="stop" if row.stopped else "length",
                policy_version=self.policy_version,
            )
            for row in grown
        ]
        n = num_generations
        return GenerationOutput(
            prompts=tuple(prompts),
            prompt_ids=tuple(prompt.prompt_ids for prompt in prompts),
            completions=tuple(tuple(completions[i * n : (i + 1) * n]) for i in range(len(prompts))),
        )

    def _prefill(self, prompts: Sequence[Prompt], num_generations: int) -> _Branches:
        """Run each distinct prompt once and repeat its cache for its completions."""
        device = self.model.device
        distinct = list({id(prompt): prompt for prompt in prompts}.values())
        place = {id(prompt): i for i, prompt in enumerate(distinct)}
        batch = to_device(collate(distinct, pad_token_id=self._adapter.pad_token_id), device)
        output = self.model(**batch.model_inputs(dtype=self.model.dtype), use_cache=True, logits_to_keep=1)
        positions = batch.forward_kwargs["position_ids"]
        branches = _Branches(
            owner=torch.arange(len(distinct), device=device),
            cache=output.past_key_values,
            ids=batch.input_ids,
            mask=batch.attention_mask,
            # The next position follows the last, which is text and so alike on every axis.
            position=positions[..., -1].reshape(-1, positions.shape[-2]).amax(0) + 1,
            logits=output.logits[:, -1],
            axes=tuple(positions.shape[:-2]),
            repeated={
                name: tensor[:, -1:]
                for name, tensor in batch.forward_kwargs.items()
                if name in prompts[0].join and prompts[0].join[name].completion == "repeat"
            },
        )
        rows = torch.tensor([place[id(prompt)] for prompt in prompts], device=device)
        branches.keep(rows.repeat_interleave(num_generations))
        branches.owner = torch.arange(len(prompts) * num_generations, device=device)
        return branches

    def _grow(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> list[_Growing]:
        branches = self._prefill(prompts, num_generations)
        device = branches.ids.device
        generator = None if sampling.seed is None else torch.Generator(device).manual_seed(sampling.seed)
        banned = sorted(self.banned_ids)
        warp = processors(sampling, self.stop_ids, branches.ids.shape[1], str(device))
        stop = torch.tensor(self.stop_ids, dtype=torch.long, device=device)
        grown = [_Growing() for _ in range(len(prompts) * num_generations)]
        for step in range(sampling.max_tokens):
            logits = branches.logits.float()
            logits[:, banned] = float("-inf")
            tokens = draw(warp(branches.ids, branches.mask, logits.clone()), sampling.temperature, generator)
            logprobs = token_logprobs(logits, tokens, sampling.temperature or 1.0)
            stopped = torch.isin(tokens, stop)
            for row, token, logprob, end in zip(
                branches.owner.tolist(), tokens.tolist(), logprobs.tolist(), stopped.tolist(), strict=True
            ):
                grown[row].ids.append(token)
                grown[row].logprobs.append(logprob)
                grown[row].stopped = end
            if stopped.all() or step + 1 == sampling.max_tokens:
                break
            self._advance(branches, tokens, (~stopped).nonzero()[:, 0])
        return grown

    def _advance(self, branches: _Branches, tokens: torch.Tensor, alive: torch.Tensor) -> None:
        """Drop the rows that stopped and run the others one token further."""
        if len(alive) < len(tokens):
            branches.keep(alive)
            tokens = tokens[alive]
        branches.ids = torch.cat([branches.ids, tokens[:, None]], dim=1)
        branches.mask = torch.cat([branches.mask, torch.ones_like(tokens)[:, None]], dim=1)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=branches.mask,
            position_ids=branches.position[:, None].expand(*branches.axes, -1, 1),
            past_key_values=branches.cache,
            use_cache=True,
            **branches.repeated,
        )
        branches.position = branches.position + 1
        branches.logits = output.logits[:, -1]

    def sync_weights(self, policy: Any) -> None:
        """The policy is the model itself: only its version is counted."""
        self.policy_version += 1

    def close(self) -> None:
        """Nothing to free: the model belongs to the caller."""
