"""The generator that runs the policy itself, in the process.

Each distinct picture goes through the vision tower once, and each distinct prompt through the prefill; its completions
branch from its key-value cache, which they read together where the model's attention allows (`branch_cache`) and get a
copy of elsewhere. Rows leave the batch when they stop.
"""

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vlmroll.attention import NotShareable, switch_on
from vlmroll.batches import to_device
from vlmroll.generators.base import stop_ids_of
from vlmroll.generators.branches import Branches, History
from vlmroll.generators.sampling import draw, processors
from vlmroll.modeling import eval_mode
from vlmroll.scoring import token_logprobs
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll.vision import VisionFeatures
from vlmroll_processors import ProcessorAdapter, Prompt, collate
from vlmroll_processors.collate import alike

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Grown:
    """What was sampled for each of some completions; values stay on the device until all is done.

    Attributes:
        count: how many completions.
        steps: at each step the completions that grew, their ids and log-probabilities.
        stopped: the completions that ended with a stop id.
    """

    count: int
    steps: list[tuple[list[int], torch.Tensor, torch.Tensor]] = field(
        default_factory=list[tuple[list[int], torch.Tensor, torch.Tensor]]
    )
    stopped: set[int] = field(default_factory=set[int])

    def completions(self, policy_version: int) -> list[Completion]:
        """The values that travel."""
        ids: list[list[int]] = [[] for _ in range(self.count)]
        logprobs: list[list[float]] = [[] for _ in range(self.count)]
        owners = [owner for step, _, _ in self.steps for owner in step]
        all_ids: list[int] = torch.cat([tokens for _, tokens, _ in self.steps]).tolist()
        all_logprobs: list[float] = torch.cat([values for _, _, values in self.steps]).tolist()
        for owner, token, logprob in zip(owners, all_ids, all_logprobs, strict=True):
            ids[owner].append(token)
            logprobs[owner].append(logprob)
        return [
            Completion(
                completion_ids=tuple(ids[i]),
                logprobs=tuple(logprobs[i]),
                finish_reason="stop" if i in self.stopped else "length",
                policy_version=policy_version,
            )
            for i in range(self.count)
        ]


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
        self._vision = VisionFeatures(keep=0)
        self._repeats = False  # whether the model was found unable to share prompts

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        """`num_generations` completions for each prompt.

        The model is switched to eval mode for the call and back afterwards.

        Raises:
            ValueError: no prompts, fewer than one generation, or an option in `sampling.extra` that is not offered.
        """
        if not prompts or num_generations < 1:
            raise ValueError(f"nothing to generate: {len(prompts)} prompts, {num_generations} generations each")
        n, groups = num_generations, dict[int, tuple[Completion, ...]]()
        limits = sampling.limits_of(len(prompts))
        with torch.no_grad(), eval_mode(self.model), self._sharing():
            for number, places in enumerate(alike(prompts)):
                seed = None if sampling.seed is None else sampling.seed + (number << 32)
                chosen, its = [prompts[i] for i in places], tuple(limits[i] for i in places)
                part = replace(sampling, seed=seed, limits=its, max_tokens=max(its))
                found = self._grow(chosen, part, n).completions(self.policy_version)
                groups |= {place: tuple(found[i * n : (i + 1) * n]) for i, place in enumerate(places)}
        return GenerationOutput(
            prompts=tuple(prompts),
            prompt_ids=tuple(prompt.prompt_ids for prompt in prompts),
            completions=tuple(groups[place] for place in range(len(prompts))),
        )

    def _prefill(self, prompts: Sequence[Prompt], num_generations: int, room: int) -> Branches:
        """Run each distinct prompt once, for all of its completions."""
        device = self.model.device
        distinct = list({id(prompt): prompt for prompt in prompts}.values())
        place = {id(prompt): i for i, prompt in enumerate(distinct)}
        batch = to_device(collate(distinct, pad_token_id=self._adapter.pad_token_id), device)
        inputs: dict[str, Any] = batch.model_inputs(dtype=self.model.dtype)
        shown = [medium.key for prompt in distinct for medium in (*prompt.images, *prompt.videos)]
        if len(set(shown)) < len(shown):  # later turns of siblings show the pictures of their prompt again
            inputs = self._vision.inputs(self.model, distinct, inputs)
        output = self.model(**inputs, use_cache=True, logits_to_keep=1)
        positions = batch.forward_kwargs["position_ids"]
        # The next position follows the last, which is text and so alike on every axis.
        position = positions[..., -1].reshape(-1, positions.shape[-2]).amax(0) + 1
        owners = [place[id(prompt)] for prompt in prompts for _ in range(num_generations)]
        rows = torch.tensor(owners, device=device)
        return Branches(
            completions=list(range(len(owners))),
            prefilled=output.past_key_values,
            owners=owners,
            prompt_mask=batch.attention_mask,
            cache=None,
            history=History(batch.input_ids[rows], batch.attention_mask[rows], room),
            position=position[rows],
            logits=output.logits[:, -1][rows],
            axes=tuple(positions.shape[:-2]),
            repeated={
                name: tensor[:, -1:][rows]
                for name, tensor in batch.forward_kwargs.items()
                if name in prompts[0].join and prompts[0].join[name].completion == "repeat"
            },
            room=room,
        )

    def _grow(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> _Grown:
        branches = self._prefill(prompts, num_generations, sampling.max_tokens - 1)
        device = branches.logits.device
        generator = None if sampling.seed is None else torch.Generator(device).manual_seed(sampling.seed)
        banned = torch.tensor(sorted(self.banned_ids), dtype=torch.long, device=device)
        warp = processors(sampling, self.stop_ids, branches.history.length, str(device))
        stop = torch.tensor(self.stop_ids, dtype=torch.long, device=device)
        grown = _Grown(len(branches.completions))
        limits = [limit for limit in sampling.limits_of(len(prompts)) for _ in range(num_generations)]
        for step in range(sampling.max_tokens):
            logits = branches.logits.float().index_fill_(1, banned, float("-inf"))
            history, warped = branches.history, logits
            if warp.history or warp.rest:
                warped = warp(history.ids, history.mask, logits.clone())
            tokens = draw(warped, sampling.temperature, generator)
            logprobs = token_logprobs(logits, tokens, sampling.temperature or 1.0)
            grown.steps.append((branches.completions, tokens, logprobs))
            ends: list[bool] = torch.isin(tokens, stop).tolist()  # all that is read from the device in a step
            grown.stopped.update(row for row, end in zip(branches.completions, ends, strict=True) if end)
            places = enumerate(zip(branches.completions, ends, strict=True))
            alive = [row for row, (completion, end) in places if not end and step + 1 < limits[completion]]
            if not alive:
                break
            if len(alive) < len(ends):
                branches.keep(alive)
                tokens = tokens[torch.tensor(alive, device=device)]
            if reason := branches.advance(self.model, tokens, share=not self._repeats):
                self._repeat(reason)
        return grown

    @contextlib.contextmanager
    def _sharing(self) -> Generator[None]:
        """Let rows share their prompts in the model's attention for the time of the block, unless known not to work.

        Other engines may run the same model, and know the names of other attention functions only.
        """
        config = self.model.config.get_text_config()
        before = config._attn_implementation
        if not self._repeats:
            try:
                switch_on(self.model)
            except NotShareable as error:
                self._repeat(str(error))
        try:
            yield
        finally:
            config._attn_implementation = before

    def _repeat(self, reason: str) -> None:
        self._repeats = True
        logger.info(
            "%s: the cache of a prompt is copied for each of its completions, since they cannot share it: %s",
            type(self.model).__name__,
            reason,
        )

    def sync_weights(self, policy: Any) -> None:
        """The policy is the model itself: only its version is counted."""
        self.policy_version += 1

    def close(self) -> None:
        """Nothing to free: the model belongs to the caller."""
