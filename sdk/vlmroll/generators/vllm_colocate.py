"""vLLM in the process of the trainer."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlmroll.generators.base import stop_ids_of
from vlmroll.generators.vllm_requests import (
    Request,
    RequestMaker,
    bans_of,
    output_of,
    require_vllm,
    truncates,
)
from vlmroll.generators.vllm_start import EngineOptions, start
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll.weights import PolicyWeights
from vlmroll_processors import Prompt
from vlmroll_processors.adapter import FamilyAdapter


class VLLMColocateGenerator:
    """Samples with vLLM in the process of the policy.

    The engine starts from the config, the processor and the weights of the policy in memory; `sync_weights` gives it
    the weights again, all of them. Pictures are sent once for each prompt, with their content hash as cache key.

    Log-probabilities are vLLM's processed ones: at the sampling temperature, banned ids removed, and, where min_p,
    top_k or top_p cut the distribution, of what is left (`Completion.truncated`).

    Args:
        model: the policy.
        adapter: the adapter that encodes the prompts.
        banned_ids: further ids that must not be sampled.
        options: how the engine is started.
        regex: a regular expression that every completion has to match.

    Raises:
        ImportError: vLLM is not installed.

    Example:
        >>> generator = VLLMColocateGenerator(model, adapter)  # doctest: +SKIP
        >>> generator.sync_weights(model)  # doctest: +SKIP
        >>> output = generator.generate(prompts, SamplingParams(max_tokens=32), 8)  # doctest: +SKIP
    """

    has_mismatch = True
    metric_name = "vLLM.generate"

    def __init__(
        self,
        model: Any,
        adapter: FamilyAdapter,
        *,
        banned_ids: Sequence[int] = (),
        options: EngineOptions | None = None,
        regex: str | None = None,
    ) -> None:
        require_vllm()
        options = EngineOptions() if options is None else options
        self._adapter = adapter
        # A CPU has no memory to give back.
        self._sleeps, self._asleep = options.sleep and model.device.type != "cpu", False
        self.banned_ids = frozenset(adapter.vision_ids.union(banned_ids))
        self.policy_version = 0
        self._group = _tensor_parallel_group(options.tensor_parallel_size)
        self.collective = self._group is not None
        self._llm: Any = start(model, adapter, options)
        self.max_model_length: int = self._llm.model_config.max_model_len
        self._maker = RequestMaker(
            bans=bans_of(adapter, self.banned_ids),
            stop_ids=stop_ids_of(model, adapter),
            regex=regex,
            max_model_length=self.max_model_length,
        )

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        """`num_generations` completions for each prompt.

        Raises:
            ValueError: a prompt cannot be sent, an option is not offered, or the engine read other ids than the
                encoded ones.
        """
        requests = self._maker.make(prompts, sampling, num_generations) if prompts or not self.collective else []
        self._wake()
        inputs = [(self._input(request), dict(request.options)) for request in requests]
        everyone, first = _joined(inputs, self._group)
        given, asked = [found for found, _ in everyone], [_sampling_params(options) for _, options in everyone]
        answers = self._answers(given, asked, seeded=sampling.seed is not None)[first : first + len(requests)]
        truncated = truncates(sampling)
        completions = [
            tuple(
                Completion(
                    completion_ids=tuple(found.token_ids),
                    logprobs=tuple(found.logprobs.logprobs),
                    finish_reason=found.finish_reason,
                    policy_version=self.policy_version,
                    truncated=truncated,
                )
                for found in sorted(answer.outputs, key=lambda output: output.index)
            )
            for answer in answers
        ]
        self._sleep()
        return output_of(requests, [answer.prompt_token_ids for answer in answers], completions, num_generations)

    def _answers(self, given: list[Any], asked: list[Any], *, seeded: bool) -> list[Any]:
        """What the engine answers. A call that fails or is interrupted leaves nothing in it."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._abort)
            # It draws from torch's generators also where each request has its own.
            with torch.random.fork_rng(enabled=seeded):
                answers = self._llm.generate(given, asked, use_tqdm=False)
            stack.pop_all()  # nothing is left to abort
        return answers

    def _abort(self) -> None:
        waiting = self._llm.llm_engine.output_processor
        self._llm.llm_engine.abort_request([*waiting.request_states, *waiting.parent_requests], internal=True)

    def _input(self, request: Request) -> dict[str, Any]:
        prompt = request.prompt
        found: dict[str, Any] = {"prompt_token_ids": list(prompt.engine_ids)}
        if prompt.images:
            found["multi_modal_data"] = {"image": [self._adapter.engine_picture(p) for p in prompt.images]}
            found["multi_modal_uuids"] = {"image": [self._adapter.engine_key(p) for p in prompt.images]}
        return found

    def sync_weights(self, policy: Any) -> None:
        """Load the policy's weights, adapters merged, and forget what was computed with the old ones.

        Raises:
            ValueError: a parameter of the engine got no weight, or a weight found no place.
        """
        self._wake()
        weights = PolicyWeights(policy)
        self._llm.collective_rpc("load_policy", args=(iter(weights), weights.num_elements))
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_encoder_cache()
        self.policy_version += 1

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _sleep(self) -> None:
        """Level 1 keeps the weights in main memory, so that nothing has to be sent again."""
        if self._sleeps:
            self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None


def _sampling_params(options: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]

    options = dict(options)
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): value for token, value in options["logit_bias"].items()}
    return VLLMSamplingParams(**options, flat_logprobs=True)


def _tensor_parallel_group(size: int) -> Any:
    """The processes that share one engine with this one; None where each has its own.

    Raises:
        ValueError: the processes cannot be parted so.
    """
    if size == 1:
        return None
    num_processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if num_processes % size:
        raise ValueError(
            f"vllm_tensor_parallel_size={size}: an engine is split over that many training processes, and there are "
            f"{num_processes}; launch a multiple of {size}"
        )
    groups = [torch.distributed.new_group(list(range(i, i + size))) for i in range(0, num_processes, size)]
    return groups[torch.distributed.get_rank() // size]


def _joined(mine: list[Any], group: Any) -> tuple[list[Any], int]:
    """What all processes of a group ask for, since every part of an engine runs it all, and where this one's begins."""
    if group is None:
        return mine, 0
    parts: list[list[Any]] = [[] for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather_object(parts, mine, group=group)
    before = parts[: torch.distributed.get_rank(group)]
    return [request for part in parts for request in part], sum(map(len, before))
