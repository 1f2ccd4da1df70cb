"""The continuous batching of transformers, handled so that it leaves nothing behind: settings, start, answers.

The engine runs in a thread of its own, on the policy itself. It may switch the model's attention, its mode and torch's
random state, and it reports errors in its answers; here all of that is undone or raised.
"""

import contextlib
import difflib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from vlmroll.attention import switch_off
from vlmroll.modeling import eval_mode
from vlmroll.types import SamplingParams
from vlmroll_processors import Prompt

MAX_CACHED_TOKENS = 65_536
"""Most tokens in the cache where `num_blocks` is not given; what does not fit waits for its turn."""
MAX_BATCH_TOKENS = 1024
"""Most tokens of one forward pass where `max_batch_tokens` is not given."""
OPTION = "transformers_continuous_batching_config"
OTHERS = "use TransformersGenerator (use_transformers_continuous_batching=False) or vLLM (use_vllm=True)"

_KNOWN = tuple(setting.name for setting in fields(ContinuousBatchingConfig))
_PAGE_NAMES = ("page_size", "block_size")  # the second one is its name before transformers 5.18
_PAGE = next(name for name in _PAGE_NAMES if name in _KNOWN)
_OURS = {
    "return_logprobs": "log-probabilities are always reported",
    "seed": "each call has a seed of its own, which follows from the option seed",
    "max_queue_size": "all prompts of a round are queued at once",
    "per_request_processors": "all prompts of a round are sampled alike",
    "drop_unsupported_processors": "no option of sampling is dropped",
}
_RECORDING = (
    *("use_cuda_graph", "use_async_batching", "default_compile_level", "use_default_compile_configs"),
    *("varlen_compile_config", "decode_compile_config", "q_padding_interval_size", "kv_padding_interval_size"),
)


def check_engine_config(config: Mapping[str, Any]) -> None:
    """Refuse settings that the engine does not have, and those that are not for the user to make.

    Raises:
        ValueError: names the setting, and the nearest one or the reason.
    """
    offered = sorted({*_KNOWN, *_PAGE_NAMES} - set(_OURS))
    for name, value in config.items():
        if name in _OURS:
            raise ValueError(f"{OPTION}: {name!r} is not taken; {_OURS[name]}")
        if name not in offered:
            near = difflib.get_close_matches(name, offered, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {offered}"
            raise ValueError(f"{OPTION}: ContinuousBatchingConfig of transformers has no {name!r}; {hint}")
        size = name in (*_PAGE_NAMES, "num_blocks", "max_batch_tokens") and value is not None
        if size and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{OPTION}: {name} must be a whole number of at least 1, or None, got {value!r}")


class Engine:
    """Continuous batching of one model.

    Args:
        model: a model of transformers.
        config: settings of `ContinuousBatchingConfig`; None values are left to us.
        stop_ids: the ids that end a completion.

    Raises:
        ValueError: a setting that is not offered, or a model that the engine cannot run.
    """

    def __init__(self, model: Any, config: Mapping[str, Any], stop_ids: Sequence[int]) -> None:
        check_engine_config(config)
        self._model = model
        self._stop_ids = list(stop_ids)
        self._config = {
            _PAGE if name in _PAGE_NAMES else name: value for name, value in config.items() if value is not None
        }
        with as_it_was(model):  # kinds of layers that the engine has no cache for are refused here
            self._manager([1], SamplingParams(max_tokens=1), 1, {"use_cuda_graph": False})

    @property
    def device(self) -> torch.device:
        """Where the model is now; a trainer moves it."""
        return self._model.device

    @property
    def _page(self) -> int:
        """Tokens of a page; attention kernels of accelerators want a multiple of 256."""
        return self._config.get(_PAGE, 32 if self.device.type == "cpu" else 256)

    def check_length(self, number: int, prompt_length: int, max_tokens: int) -> None:
        """Refuse a prompt that is too long.

        Raises:
            ValueError: its longest completion does not fit the model's positions, or the cache.
        """
        context: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        blocks: int | None = self._config.get("num_blocks")
        page = self._page
        lacking = f"prompt {number}: {prompt_length} tokens and a completion of {max_tokens} do not fit"
        if context is not None and prompt_length + max_tokens > context:
            raise ValueError(f"{lacking} the model's {context} positions; lower max_completion_length")
        if blocks is not None and prompt_length + max_tokens > blocks * page:
            raise ValueError(f"{lacking} a cache of {blocks} blocks of {page} tokens; raise num_blocks in {OPTION}")

    def check_python_runs(self) -> None:
        """Refuse settings under which a step is recorded and played back, and so runs no Python.

        Raises:
            ValueError: names the setting, and what it works with.
        """
        for name in _RECORDING:
            value = self._config.get(name)
            if any(value) if isinstance(value, tuple | list) else value:
                raise ValueError(
                    f"{OPTION}: {name}={value!r} works where tokens are drawn by temperature alone; leave it out, or "
                    "leave out top_p, top_k, min_p, repetition_penalty and generation_kwargs, and temperature=0"
                )

    def run(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, n: int, *, seed: int, step: Any, python: bool
    ) -> list[list[Any]]:
        """The engine's `n` answers for each prompt, in an order that does not depend on which ended first.

        Args:
            seed: of what the engine draws.
            step: the logits processor.
            python: whether it must run in each step.

        Raises:
            ValueError: it cannot start.
            RuntimeError: it failed; says at which prompt and why.
        """
        more: dict[str, Any] = {"seed": seed, "return_logprobs": True}
        more |= {"use_cuda_graph": False, "use_async_batching": False} if python else {}
        with as_it_was(self._model):
            manager = self._manager([prompt.num_tokens for prompt in prompts], sampling, n, more)
            chain = manager.logit_processor
            chain.logits_processor = LogitsProcessorList([step])
            chain.tensors_required, chain.do_processing = int(python), True
            # All requests wait before it starts, so that the same ones run together in each call.
            for i, (prompt, limit) in enumerate(zip(prompts, sampling.limits_of(len(prompts)), strict=True)):
                ids, ends = list(prompt.prompt_ids), self._stop_ids
                manager.add_request(ids, request_id=str(i), max_new_tokens=limit, eos_token_id=ends)
            try:
                with _reason_of(self._model):
                    manager.warmup()  # makes the cache
                manager.start()
                manager.stop(block=True)  # it finishes all requests first
            finally:
                if manager.is_running():  # after an interrupt
                    manager.stop(block=True, hard_stop=True)
                manager.destroy()
        found = defaultdict[int, list[Any]](list)
        for answer in iter(lambda: manager.get_result(timeout=0), None):
            found[number_of(answer.request_id)].append(answer)
        for i in range(len(prompts)):
            _check_answers(i, found[i], n)
        return [sorted(found[i], key=lambda answer: answer.request_id) for i in range(len(prompts))]

    def _manager(self, lengths: Sequence[int], sampling: SamplingParams, n: int, more: Mapping[str, Any]) -> Any:
        """The engine's manager for prompts of these lengths, before it starts."""
        page, rows = self._page, n * len(lengths)
        blocks = [math.ceil((length + sampling.max_tokens) / page) + 2 for length in lengths]
        settings: dict[str, Any] = {
            _PAGE: page,
            "num_blocks": max(min(n * sum(blocks), MAX_CACHED_TOKENS // page), 2 * max(blocks)),
            "max_batch_tokens": min(max(sum(lengths), rows), MAX_BATCH_TOKENS),
            "disable_nccl_graph_mixing": False,  # it would change NCCL for the training of several processes, too
        }
        if "auto_switch_to_flash" in _KNOWN:
            settings["auto_switch_to_flash"] = False
        if "max_memory_percent" in self._config and self.device.type != "cpu":
            del settings["num_blocks"], settings["max_batch_tokens"]
        options = GenerationConfig(
            do_sample=True,
            num_return_sequences=n,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=self._stop_ids or -1,
        )
        hints = WorkloadHints(max(lengths), sampling.max_tokens, rows)
        with _reason_of(self._model):
            config = ContinuousBatchingConfig(**{**settings, **self._config, **more})
            manager = self._model.init_continuous_batching(options, config, hints)
        if manager.generation_config is not options:
            raise ValueError(
                "the model keeps a continuous batching manager of an earlier call, which has other settings; call "
                "model.destroy_cached_continuous_batching_manager() first"
            )
        return manager


def number_of(request_id: str) -> int:
    """The prompt's number in the engine's name of a completion; siblings are `number__child#i`."""
    return int(request_id.partition("__")[0])


def _check_answers(number: int, answers: Sequence[Any], n: int) -> None:
    failed = next((answer.error for answer in answers if answer.error is not None), None)
    if failed is not None or len(answers) != n:
        reason = f"{len(answers)} of {n} completions came back" if failed is None else _one_line(failed)
        raise RuntimeError(f"prompt {number}: continuous batching of transformers failed: {reason}; {OTHERS}")


@contextlib.contextmanager
def _reason_of(model: Any) -> Generator[None]:
    """The engine's reason not to start, in one line."""
    try:
        yield
    except (ValueError, RuntimeError, MemoryError) as error:
        name, reason = type(model).__name__, _one_line(str(error))
        raise ValueError(
            f"continuous batching of transformers cannot run {name}: {reason}; change {OPTION}, or {OTHERS}"
        ) from error


def _one_line(reason: str) -> str:
    return reason.partition("\n")[0].rstrip(".")


@contextlib.contextmanager
def as_it_was(model: Any) -> Generator[None]:
    """Whatever the engine does to the model and to torch's random state in the block is undone behind it."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    attention = [(part, part._attn_implementation) for config in configs for part in _parts(config)]
    device = model.device
    devices = [] if device.type == "cpu" else [device]
    rng = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
    with rng, eval_mode(model), _forward_for_the_engine(model):
        try:
            switch_off(model)
            yield
        finally:
            for config, value in attention:  # wholes come before their parts, which they set too
                config._attn_implementation = value


def _parts(config: Any) -> list[Any]:
    """A config and all those in it."""
    below = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(deep for part in below if part is not None for deep in _parts(part))]


@contextlib.contextmanager
def _forward_for_the_engine(model: Any) -> Generator[None]:
    """A forward that works in another thread, which knows nothing of the caller's autocast.

    Autocast leaves keys and values in two dtypes; the engine's cache has one, that of the weights.
    """
    kind, original, own = model.device.type, model.forward, vars(model).get("forward")
    autocast = functools.partial(
        torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
    )

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs["cache"]
        if "update" not in vars(cache):
            cache.update = _in_dtype(cache.update, cache.dtype)
        with autocast():
            return original(*args, **kwargs)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _in_dtype(update: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def cast(key_states: torch.Tensor, value_states: torch.Tensor, **others: Any) -> Any:
        return update(key_states.to(dtype), value_states.to(dtype), **others)

    return cast
