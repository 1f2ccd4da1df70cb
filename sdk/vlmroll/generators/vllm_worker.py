"""What runs inside vLLM's workers: loading the policy's weights with nothing left over, and the server's key.

vLLM itself imports this module, by `worker_extension_cls="vlmroll.generators.vllm_worker.PolicyWorker"`. A sync is
`begin_sync`, weights by any of vLLM's ways (`load_policy` in the process, its weight-transfer API in a server), and
`end_sync`, which compares what was loaded with what the model has.
"""

import contextlib
import logging
import secrets
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import register_model_loader  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # pyright: ignore[reportMissingImports]
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from vlmroll.weights import PolicyWeights

FILE_BACKEND = "vlmroll-file"
"""Weight transfer through a file that both sides can read, for CPUs, where NCCL does not work."""
IN_PROCESS = "vlmroll-policy"
"""Load format of an engine that starts with the weights of a policy in its own process."""
_SHOWN = 3  # names in a message
logger = logging.getLogger(__name__)


class Account:
    """Compares the parameters of a model with those that are loaded.

    Args:
        model: one of vLLM's.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sizes = {name: 0 for name, _ in model.named_parameters()}
        self._loaded: set[str] | None = set()

    def load(self, load: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Load weights by the method `load` of the model's class, and remember where they went."""
        # Only now do the parameters have their full shapes: those that are in use may be packed and empty.
        known = dict(self._model.named_parameters(remove_duplicate=False))
        self._sizes = {name: _own_elements(self._model, name, known[name]) for name in self._sizes}
        found: set[str] | None = load(self._model, weights)
        self._loaded = None if found is None or self._loaded is None else self._loaded | found
        return found

    def close(self, num_elements: int | None) -> int:
        """The number of parameters, all of which were loaded.

        Args:
            num_elements: numbers in all tensors that were sent; None where the model is one of several parts.

        Raises:
            ValueError: a parameter was not loaded, or more was sent than the model has.
        """
        if self._loaded is None:
            logger.warning("the engine does not tell which weights it loaded; run `vlmroll check` before a long run")
            return len(self._sizes)
        missing = sorted(self._sizes.keys() - self._loaded)
        if missing:
            raise ValueError(f"weights were not sent for {len(missing)} parameters of the engine: {missing[:_SHOWN]}")
        room = sum(self._sizes.values())
        if num_elements is not None and num_elements > room:
            raise ValueError(
                f"{num_elements} numbers were sent to an engine with {room}: it has no place for some of the weights"
            )
        return len(self._sizes)


class PolicyWorker:
    """Methods that vLLM adds to its workers; `self` is the worker."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    _account: Account
    _tied: list[tuple[Any, Any]]

    def describe_engine(self) -> dict[str, Any]:
        """What the engine runs: its model, architecture and sizes, and how it takes weights."""
        config, text = self.model_config, self.model_config.hf_text_config
        transfer = self.vllm_config.weight_transfer_config
        return {
            "model": str(config.model),
            "architectures": list(config.hf_config.architectures or ()),
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "num_hidden_layers": text.num_hidden_layers,
            "dtype": str(config.dtype).removeprefix("torch."),
            "max_model_length": config.max_model_len,
            "backend": None if transfer is None else transfer.backend,
        }

    def begin_sync(self) -> None:
        """From now on remember which of the model's parameters are loaded."""
        model = self.model_runner.get_model()
        # It warns of every layer without weights of its own; `Account` knows which weights are missing.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        if not hasattr(self, "_tied"):
            self._tied = _tied_heads(model)
        account = self._account = Account(model)

        def recorded(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            return account.load(type(model).load_weights, weights)

        model.load_weights = recorded

    def load_policy(self, weights: Iterable[tuple[str, torch.Tensor]], num_elements: int) -> None:
        """Take over the policy's weights in one call; for engines in the policy's own process."""
        model = self.model_runner.get_model()
        self.begin_sync()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            try:
                model.load_weights(weights)
            finally:
                finalize_layerwise_reload(model, self.model_config)
                report = self.end_sync(num_elements)
        if report["error"]:
            raise ValueError(report["error"])

    def end_sync(self, num_elements: int) -> dict[str, Any]:
        """Finish what reloading leaves undone, and account for every tensor; "error" tells what is wrong."""
        model = self.model_runner.get_model()
        model.__dict__.pop("load_weights", None)
        for head, embedding in self._tied:
            # Reloading separates a tied head from its embedding, or leaves the head's packed copy as it was.
            head.tie_weights(embedding)
            head.quant_method.process_weights_after_loading(head)
        self.model_runner.reset_encoder_cache()
        whole = self.vllm_config.parallel_config.world_size == 1
        try:
            return {"num_parameters": self._account.close(num_elements if whole else None), "error": None}
        except ValueError as error:  # over HTTP an exception would lose its words
            return {"num_parameters": 0, "error": str(error)}


def _tied_heads(model: Any) -> list[tuple[Any, Any]]:
    """Pairs of a head and the embedding that shares its weight."""
    modules = list(model.modules())
    embeddings = [m for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
    heads = [m for m in modules if isinstance(m, ParallelLMHead)]
    return [(head, e) for head in heads for e in embeddings if head.weight is e.weight]


def _own_elements(model: Any, name: str, parameter: torch.Tensor) -> int:
    """Numbers in a parameter, without the rows that only fill up a vocabulary."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, VocabParallelEmbedding) and parameter.ndim == 2:
        return min(owner.org_vocab_size, parameter.shape[0]) * parameter.shape[1]
    return parameter.numel()


# An engine that starts with the policy's weights.

_policies: list[PolicyWeights] = []


@contextlib.contextmanager
def starting_with(weights: PolicyWeights) -> Generator[None]:
    """Engines that are started inside the block, with the load format `IN_PROCESS`, get these weights."""
    _policies.append(weights)
    try:
        yield
    finally:
        _policies.pop()


@register_model_loader(IN_PROCESS)  # pyright: ignore[reportUntypedClassDecorator]
class PolicyLoader(BaseModelLoader):  # pyright: ignore[reportUntypedBaseClass]
    """vLLM's model loader for the weights of `starting_with`: no file, and no made-up weight or buffer."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load all of them."""
        account = Account(model)
        account.load(type(model).load_weights, iter(_policies[-1]))
        account.close(None)


# Weight transfer through a file.


@dataclass
class FileInit(WeightTransferInitInfo):  # pyright: ignore[reportUntypedBaseClass]
    """Nothing to agree on."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # pyright: ignore[reportUntypedBaseClass]
    """Where the weights are, as safetensors."""

    path: str


class FileTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):  # pyright: ignore[reportUntypedBaseClass]
    """Backend of vLLM's weight-transfer API that reads the weights from a file."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Make the model ready to be loaded again."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which would wait for an accelerator that may not be there."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load the file."""
        from safetensors.torch import load_file

        model: Any = self.model
        model.load_weights(iter(load_file(Path(update_info.path)).items()))

    def finish_weight_update(self) -> None:
        """Make the loaded weights ready to run."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to close."""


if FILE_BACKEND not in WeightTransferEngineFactory._registry:  # pyright: ignore
    WeightTransferEngineFactory.register_engine(FILE_BACKEND, FileTransferEngine)


class RequireKey:
    """ASGI middleware: every path but /health needs the API key of the environment variable VLLM_API_KEY.

    vLLM's own guard leaves the paths open that take weights and call workers.
    """

    def __init__(self, app: Any) -> None:
        import os

        self._app, self._key = app, os.environ.get("VLLM_API_KEY", "")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and self._key and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            if not secrets.compare_digest(given, f"Bearer {self._key}"):
                body = b'{"error": "Unauthorized"}'
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": body})
                return
        await self._app(scope, receive, send)
