"""From a run's options to the generator that they ask for."""

from typing import Any

from vlmroll.config import PolicyConfig
from vlmroll.config.options import refuse
from vlmroll.generators import Generator, TransformersGenerator, sampling, vllm_requests
from vlmroll.mismatch import refuse_unscorable
from vlmroll.setup import options_dict
from vlmroll.types import SamplingParams
from vlmroll_processors.adapter import FamilyAdapter


def check_options(args: PolicyConfig, generator: Generator | None) -> None:
    """Refuse options of generation that do not go together, before anything is loaded.

    Args:
        generator: the one that was given to the trainer, if any.

    Raises:
        ValueError: names the option and the fix.
    """
    by_option = [name for name in ("use_vllm", "use_transformers_continuous_batching") if getattr(args, name)]
    if len(by_option) > 1:
        refuse(by_option[1], True, f"{by_option[0]}=True already says how to generate; leave one of them out")
    if by_option and generator is not None:
        refuse(by_option[0], True, "a generator is given too; leave one of them out")
    extra = options_dict(args.generation_kwargs)
    if args.use_vllm:
        vllm_requests.check_extra(extra)
        vllm_requests.require_vllm(server=args.vllm_mode == "server")
        if args.vllm_importance_sampling_correction:
            regex = args.vllm_structured_outputs_regex
            refuse_unscorable(repetition_penalty=args.repetition_penalty, regex=regex, generation_kwargs=extra)
    elif generator is None:
        sampling.check_extra(extra)


def sampling_of(args: PolicyConfig, seed: int) -> SamplingParams:
    """How a run samples."""
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        repetition_penalty=args.repetition_penalty,
        seed=seed,
        extra=options_dict(args.generation_kwargs),
    )


def make_generator(model: Any, adapter: FamilyAdapter, args: PolicyConfig) -> Generator:
    """The generator of a run, with the policy's weights."""
    if args.use_transformers_continuous_batching:
        from vlmroll.generators.continuous_batching import ContinuousBatchingGenerator

        config = options_dict(args.transformers_continuous_batching_config)
        return ContinuousBatchingGenerator(model, adapter, config=config)
    if not args.use_vllm:
        return TransformersGenerator(model, adapter)
    if args.vllm_mode == "server":
        from vlmroll.generators.vllm_server import VLLMServerGenerator

        return VLLMServerGenerator(
            model,
            adapter,
            base_url=args.vllm_urls,
            timeout=args.vllm_server_timeout,
            group_port=args.vllm_group_port,
            regex=args.vllm_structured_outputs_regex,
        )
    from vlmroll.generators.vllm_colocate import VLLMColocateGenerator
    from vlmroll.generators.vllm_start import EngineOptions

    options = EngineOptions(
        max_model_length=args.vllm_max_model_length,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        sleep=args.vllm_enable_sleep_mode,
        model_impl=args.vllm_model_impl,
        dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else None,
        seed=args.seed,
        more={"trust_remote_code": args.trust_remote_code} | options_dict(args.vllm_engine_kwargs),
    )
    return VLLMColocateGenerator(model, adapter, options=options, regex=args.vllm_structured_outputs_regex)
