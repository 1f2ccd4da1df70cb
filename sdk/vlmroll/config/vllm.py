"""Options of generation with vLLM. The names are known and kept; none of them works in this release."""

from dataclasses import dataclass

from .options import option

_NOT_YET = "vLLM generation is not offered yet, so nothing would read this option; leave it out"


@dataclass(repr=False)
class VLLMOptions:
    """How vLLM is started, or reached, and how its log-probabilities are held against the policy's.

    `GRPOConfig(use_vllm=True)` raises a ValueError that says what to do.
    """

    use_vllm: bool = option(
        False,
        help="Generate with vLLM in place of the model's own generate.",
        refused="vLLM generation is not offered yet; leave use_vllm=False to generate with transformers",
    )
    vllm_mode: str = option(
        "colocate",
        help="Run vLLM inside the training processes (colocate) or as a server of its own.",
        refused=_NOT_YET,
    )
    vllm_model_impl: str = option(
        "vllm", help="Whose model code vLLM runs: its own (vllm) or that of transformers.", refused=_NOT_YET
    )
    vllm_enable_sleep_mode: bool = option(
        False, help="Free the memory of vLLM's weights and cache while the optimizer works.", refused=_NOT_YET
    )
    vllm_structured_outputs_regex: str | None = option(
        None, help="Regular expression that every completion has to match.", refused=_NOT_YET
    )
    vllm_server_base_url: str | None = option(
        None, help="Address of the server; host and port are then not read.", refused=_NOT_YET
    )
    vllm_server_host: str = option("0.0.0.0", help="Host of the server.", refused=_NOT_YET)
    vllm_server_port: int = option(8000, help="Port of the server.", refused=_NOT_YET)
    vllm_server_timeout: float = option(240.0, help="Seconds to wait until the server answers.", refused=_NOT_YET)
    vllm_group_port: int = option(51216, help="Port on which new weights go to the server.", refused=_NOT_YET)
    vllm_gpu_memory_utilization: float = option(
        0.3, help="Share of the accelerator's memory for vLLM inside the training processes.", refused=_NOT_YET
    )
    vllm_max_model_length: int | None = option(
        None, help="Most tokens of prompt and completion together. None: as the model's config says.", refused=_NOT_YET
    )
    vllm_tensor_parallel_size: int = option(
        1, help="Number of devices that one copy of the model is split over.", refused=_NOT_YET
    )
    vllm_importance_sampling_correction: bool = option(
        True,
        help="Weight the loss for the difference between vLLM's log-probabilities and the policy's.",
        refused=_NOT_YET,
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        help="What happens to ratios out of bounds, by token or by sequence: token_mask, token_truncate, "
        "sequence_mask, sequence_truncate.",
        refused=_NOT_YET,
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, help="Upper bound of those ratios.", refused=_NOT_YET)
    vllm_importance_sampling_clip_min: float | None = option(
        None, help="Lower bound of those ratios.", refused=_NOT_YET
    )
