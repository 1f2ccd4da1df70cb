"""Options of generation with vLLM, and of the correction for what its numbers differ by."""

from dataclasses import dataclass
from typing import Any

from vlmroll.mismatch import MODES

from .options import describe_options, option, refuse, require, require_choice, require_dict

_SERVER = ("server_base_url", "server_host", "server_port", "server_timeout", "group_port")
_COLOCATE = (
    *("model_impl", "enable_sleep_mode", "gpu_memory_utilization", "max_model_length", "tensor_parallel_size"),
    "engine_kwargs",
)


@dataclass(repr=False)
class VLLMOptions:
    """How vLLM is started, or reached, and how its log-probabilities are held against the policy's.

    `GRPOConfig(use_vllm=True, vllm_mode="server", vllm_server_port=8001)`
    """

    use_vllm: bool = option(False, help="Generate with vLLM in place of the model's own generate.")
    vllm_mode: str = option(
        "colocate", help="Run vLLM inside the training processes (colocate), or as servers (`vlmroll serve MODEL`)."
    )
    vllm_model_impl: str = option(
        "vllm", help="Whose model code vLLM runs: its own (vllm), that of transformers, or auto."
    )
    vllm_enable_sleep_mode: bool = option(
        False, help="Free the accelerator's memory of vLLM's weights and cache while the optimizer works."
    )
    vllm_structured_outputs_regex: str | None = option(
        None, help="Regular expression that every completion has to match."
    )
    vllm_server_base_url: str | None = option(
        None, help="Address of the server, or of several with commas between; host and port are then not read."
    )
    vllm_server_host: str = option("0.0.0.0", help="Host of the server. 0.0.0.0: this machine.")
    vllm_server_port: int = option(8000, help="Port of the server.")
    vllm_server_timeout: float = option(
        240.0, help="Seconds to wait for a server, at the start and when it has to be started again."
    )
    vllm_group_port: int = option(51216, help="Port on which new weights go to the server by NCCL.")
    vllm_gpu_memory_utilization: float = option(
        0.3, help="Share of the accelerator's memory for vLLM inside the training processes."
    )
    vllm_max_model_length: int | None = option(
        None, help="Most tokens of prompt and completion together. None: as the model's config says."
    )
    vllm_tensor_parallel_size: int = option(
        1, help="Number of training processes that one copy of the model in vLLM is split over."
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = option(
        None, help="Further arguments of `vllm.LLM`, such as dtype, enforce_eager or max_num_seqs.", new=True
    )
    vllm_importance_sampling_correction: bool = option(
        True,
        help="Multiply the policy loss by the ratio of the policy's probabilities to vLLM's, which sampled (importance "
        "sampling). It acts where an engine of its own generates, also one given as `generator`.",
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        help="A ratio for each token (token_*), or the product of them for each completion (sequence_*); out of bounds "
        "it becomes 0 (*_mask) or the bound (*_truncate): token_mask, token_truncate, sequence_mask, "
        "sequence_truncate.",
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, help="Upper bound of those ratios. None: no bound.")
    vllm_importance_sampling_clip_min: float | None = option(None, help="Lower bound of those ratios. None: no bound.")

    def check_vllm(self, num_processes: int) -> None:
        """Raise ValueError for an option of vLLM that is out of range, or that nothing would read."""
        require_choice("vllm_mode", self.vllm_mode, ("colocate", "server"))
        require_choice("vllm_model_impl", self.vllm_model_impl, ("vllm", "transformers", "auto"))
        require_dict("vllm_engine_kwargs", self.vllm_engine_kwargs)
        declared = describe_options(VLLMOptions)
        mine = {"colocate": _COLOCATE, "server": _SERVER}[self.vllm_mode] if self.use_vllm else ()
        unread = [*_SERVER, *_COLOCATE, *(() if self.use_vllm else ("mode", "structured_outputs_regex"))]
        for name in (f"vllm_{name}" for name in unread if name not in mine):
            value: object = getattr(self, name)
            if value != declared[name].default:
                where = f"vllm_mode={self.vllm_mode!r}" if self.use_vllm else "use_vllm=False"
                served = self.use_vllm and name == "vllm_max_model_length"
                advice = "; write --max-model-len to `vlmroll serve`" if served else ""
                refuse(name, value, f"with {where} nothing would read it; leave it out{advice}")
        share, length, size = (
            self.vllm_gpu_memory_utilization,
            self.vllm_max_model_length,
            self.vllm_tensor_parallel_size,
        )
        require(0 < share <= 1, "vllm_gpu_memory_utilization", share, "it must be greater than 0 and at most 1")
        require(length is None or length > 1, "vllm_max_model_length", length, "it must be greater than 1, or None")
        rule = f"it must divide the number of training processes, which is {num_processes}"
        require(size >= 1 and num_processes % size == 0, "vllm_tensor_parallel_size", size, rule)
        timeout = self.vllm_server_timeout
        require(timeout > 0, "vllm_server_timeout", timeout, "it must be greater than 0 seconds")

    @property
    def vllm_urls(self) -> str:
        """The address of the server, or several with commas between."""
        host = "127.0.0.1" if self.vllm_server_host == "0.0.0.0" else self.vllm_server_host
        return self.vllm_server_base_url or f"http://{host}:{self.vllm_server_port}"

    def check_mismatch(self) -> None:
        """Raise ValueError for an option of the correction that is out of range."""
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        mode = self.vllm_importance_sampling_mode
        require_choice("vllm_importance_sampling_mode", mode, MODES)
        rule = "it must be greater than 0, or None for no bound"
        require(low is None or low > 0, "vllm_importance_sampling_clip_min", low, rule)
        require(high is None or high > 0, "vllm_importance_sampling_clip_max", high, rule)
        if low is not None and high is not None:
            rule = f"it must be less than vllm_importance_sampling_clip_max={high}"
            require(low < high, "vllm_importance_sampling_clip_min", low, rule)
        if self.vllm_importance_sampling_correction and low is None and high is None:
            reason = f"mode {mode!r} needs a bound; set this or vllm_importance_sampling_clip_min"
            refuse("vllm_importance_sampling_clip_max", high, reason)

    @property
    def mismatch_bounds(self) -> dict[str, Any]:
        """What `vlmroll.mismatch.importance_weights` needs to know."""
        return {
            "mode": self.vllm_importance_sampling_mode,
            "clip_min": self.vllm_importance_sampling_clip_min,
            "clip_max": self.vllm_importance_sampling_clip_max,
        }
