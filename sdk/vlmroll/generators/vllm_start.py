"""How vLLM is started in the process: with the policy in memory, and with nothing else in the process changed by it."""

import contextlib
import copy
import os
import random
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vlmroll.generators.vllm_requests import check_version
from vlmroll.weights import PolicyWeights
from vlmroll_processors.adapter import FamilyAdapter


def _nothing() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How vLLM is started in the process.

    Attributes:
        max_model_length: most tokens of prompt and completion together; None: as the model's config says.
        gpu_memory_utilization: share of the accelerator's memory for weights and cache.
        tensor_parallel_size: processes that one copy of the model is split over.
        sleep: give the memory of weights and cache back while the engine has nothing to do.
        model_impl: whose model code runs, "vllm" or "transformers".
        dtype: of the engine's weights; None: the policy's.
        seed: of the engine; requests have seeds of their own.
        more: further arguments of `vllm.LLM`, which win over ours.
    """

    max_model_length: int | None = None
    gpu_memory_utilization: float = 0.3
    tensor_parallel_size: int = 1
    sleep: bool = False
    model_impl: str = "vllm"
    dtype: str | None = None
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=_nothing)


def start(model: Any, adapter: FamilyAdapter, options: EngineOptions) -> Any:
    """The engine, with nothing else in the process changed by it."""
    with tempfile.TemporaryDirectory() as folder, _unchanged():
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        _config_for_engine(base).save_pretrained(folder)
        adapter.engine_processor().save_pretrained(folder)
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        import vllm  # pyright: ignore[reportMissingImports]

        from vlmroll.generators.vllm_worker import IN_PROCESS, starting_with

        check_version(vllm.__version__, "the installed engine")
        arguments: dict[str, Any] = {
            "model": folder,
            "load_format": IN_PROCESS,
            "dtype": options.dtype or str(base.dtype).removeprefix("torch."),
            "max_model_len": options.max_model_length,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "tensor_parallel_size": options.tensor_parallel_size,
            "distributed_executor_backend": "external_launcher" if several else "uni",
            "enable_sleep_mode": options.sleep and base.device.type != "cpu",
            "model_impl": options.model_impl,
            "seed": options.seed,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # else the model's own sampling defaults would come in
            "worker_extension_cls": "vlmroll.generators.vllm_worker.PolicyWorker",
            "disable_log_stats": True,
        }
        if base.device.type == "cpu":  # where a prompt that is read in parts fails if its request has a seed
            arguments["enable_chunked_prefill"] = False
        with starting_with(PolicyWeights(model)):
            return vllm.LLM(**{**arguments, **options.more})


def _config_for_engine(base: Any) -> Any:
    """The policy's config, with what vLLM reads from it and transformers from the model itself.

    That is the architecture, without which vLLM makes an embedding model, and whether the head is tied to the
    embeddings, for which vLLM goes by the config of the text model.
    """
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    tied = base.get_output_embeddings().weight is base.get_input_embeddings().weight
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = tied
    return config


@contextlib.contextmanager
def _unchanged() -> Generator[None]:
    """Keep random states, the thread count's setter and the environment as they are; starting vLLM changes them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerator = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    environment = dict(os.environ)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this very process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # else it says something at every sync
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if accelerator:
            torch.cuda.set_rng_state_all(accelerator)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
