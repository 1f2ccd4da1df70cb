"""One vLLM server: its paths, its errors in plain words, and how it takes weights."""

import logging
import os
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import torch

from vlmroll.generators.vllm_requests import check_version
from vlmroll.weights import PolicyWeights

logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds
_LONGEST_REQUEST = 3600.0  # seconds: a request that takes longer is taken for lost
_SHARED_MEMORY = Path("/dev/shm")


class ServerError(RuntimeError):
    """The server cannot do what was asked, and asking again would not help."""


class ServerGone(ServerError):
    """The server does not answer; it may come back."""


class VLLMServer:
    """A vLLM server that was started by `vlmroll serve`.

    Args:
        url: its address, such as "http://127.0.0.1:8000".
        key: its API key; None for none.
        timeout: seconds to wait until it answers, and for each call but generation.
        model: what the policy was loaded from, for messages.
    """

    def __init__(self, url: str, key: str | None, *, timeout: float, model: str) -> None:
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._start = f"vlmroll serve {model or 'MODEL'}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self._close = weakref.finalize(self, self._client.close)  # also where nobody calls `close`
        self._transfer: Any = None
        self.description: Mapping[str, Any] = {}

    def connect(self, expected: Mapping[str, Any]) -> None:
        """Wait until the server answers, and see what it runs.

        Args:
            expected: what `describe_engine` has to say of the policy's architecture.

        Raises:
            ServerGone: it did not answer in time.
            ServerError: it is no server for training, has another key, or runs another model.
        """
        deadline, told = time.monotonic() + self._timeout, False
        while not self._is_up():
            if time.monotonic() > deadline:
                raise ServerGone(
                    f"no vLLM server answers at {self.url}; start it with `{self._start}`, or correct the address"
                )
            if not told:
                logger.warning("waiting for the vLLM server at %s (start it with `%s`)", self.url, self._start)
                told = True
            time.sleep(_POLL)
        check_version(str(self.get("version").get("version", "")), f"the server at {self.url}")
        self.description = self.call("describe_engine")
        self._transfer = None
        for name, value in expected.items():
            if self.description[name] != value:
                raise ServerError(
                    f"the server at {self.url} runs another model, {self.description['model']}: its {name} is "
                    f"{self.description[name]!r}, the policy's {value!r}; start it with `{self._start}`"
                )

    def _is_up(self) -> bool:
        try:
            return self._client.get("/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> dict[str, Any]:
        """The answer to a question that changes nothing."""
        return self._ask("GET", path, None, self._timeout)

    def post(self, path: str, content: Any = None, *, timeout: float | None = None) -> dict[str, Any]:
        """The answer to a command."""
        return self._ask("POST", path, content, self._timeout if timeout is None else timeout)

    def generate(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The completions of one request, token ids in and out."""
        return self.post("inference/v1/generate", content, timeout=_LONGEST_REQUEST)

    def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """What a method of `PolicyWorker` returns in the first worker."""
        found = self.post("collective_rpc", {"method": method, "args": list(arguments)})
        return (found.get("results") or [None])[0] or {}

    def _ask(self, method: str, path: str, content: Any, timeout: float) -> dict[str, Any]:
        try:
            answer = self._client.request(method, f"/{path}", json=content, timeout=timeout)
        except httpx.TransportError as error:
            raise ServerGone(f"the vLLM server at {self.url} is gone ({type(error).__name__}: {error})") from error
        if answer.is_success:
            found: Any = answer.json() if answer.content else {}
            return found if isinstance(found, dict) else {}
        if answer.status_code >= 500 and not self._is_up():  # its engine died, and it will follow
            raise ServerGone(f"the vLLM server at {self.url} is gone ({_words(answer)})")
        raise ServerError(self._reason(answer, path))

    def _reason(self, answer: httpx.Response, path: str) -> str:
        if answer.status_code == 401:
            return f"the server at {self.url} has another key; set VLLM_API_KEY to the one that it was started with"
        if answer.status_code == 404 or "object has no attribute" in answer.text:
            return (
                f"the server at {self.url} has no /{path}: it is no server for training; start it with `{self._start}`"
            )
        return f"the server at {self.url} answered {answer.status_code} to /{path}: {_words(answer)}"

    @property
    def weight_version(self) -> str:
        """The version of the weights that the server has."""
        return str(self.get("weight_info").get("weight_version"))

    def take(self, weights: PolicyWeights, version: str, group_port: int) -> None:
        """Give the server all weights, and have it forget what it computed with the old ones.

        Raises:
            ServerError: weights were left over or missing. The server has to be started again then.
        """
        if self._transfer is None:
            kind = {"vlmroll-file": FileTransfer, "nccl": NCCLTransfer}.get(self.description["backend"])
            if kind is None:
                raise ServerError(
                    f"the server at {self.url} was started without a way to take weights; start it with `{self._start}`"
                )
            self._transfer = kind(self, group_port)
        self.post("pause?mode=wait")
        self.call("begin_sync")
        self._transfer.send(weights, version)
        report = self.call("end_sync", weights.num_elements)
        if report["error"]:
            raise ServerError(f"the server at {self.url} has to be started again: {report['error']}")
        self.post("reset_prefix_cache")
        self.post("reset_encoder_cache")
        self.post("resume")

    def close(self) -> None:
        """Close the connections."""
        self._close()


def _words(answer: httpx.Response) -> str:
    """What an error answer says."""
    try:
        found: Any = answer.json()
    except ValueError:
        return answer.text[:300]
    error: Any = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


class FileTransfer:
    """Weights through a file in memory that the server, on the same machine, reads."""

    def __init__(self, server: VLLMServer, group_port: int) -> None:
        self._server = server
        server.post("init_weight_transfer_engine", {"init_info": {}})

    def send(self, weights: PolicyWeights, version: str) -> None:
        """Write the file and have it read."""
        from safetensors.torch import save_file

        folder = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = Path(place) / "policy.safetensors"
            save_file({name: tensor.cpu().contiguous().clone() for name, tensor in weights}, path)
            self._server.post("start_weight_update")
            self._server.post("update_weights", {"update_info": {"path": str(path)}})
            self._server.post("finish_weight_update", {"weight_version": version})


class NCCLTransfer:
    """Weights from the policy's device to the server's by NCCL, with vLLM's own trainer side of it."""

    def __init__(self, server: VLLMServer, group_port: int) -> None:
        self._server, self._port = server, group_port
        self._engine: Any = None
        self._version = ""

    def send(self, weights: PolicyWeights, version: str) -> None:
        """Connect on first use, then broadcast."""
        from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        self._version = version
        if self._engine is None:
            workers = self._server.get("get_world_size")["world_size"]
            info = NCCLTrainerInitInfo(
                rank=0, master_address=_own_address(self._server.url), master_port=self._port, world_size=workers + 1
            )
            self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=_source_of(weights))
        self._engine.source = _source_of(weights)
        self._engine.send_weights()

    # What vLLM's trainer side calls.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the server connect."""
        self._server.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Have the server make itself ready."""
        self._server.post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have the server receive."""
        self._server.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the server run the new weights."""
        self._server.post("finish_weight_update", {"weight_version": self._version})


def _own_address(url: str) -> str:
    """The address of this machine on the way to the server."""
    import socket

    parts = httpx.URL(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.host, parts.port or 80))
        return str(probe.getsockname()[0])


def _source_of(weights: PolicyWeights) -> Any:
    """The weights as vLLM's trainer side reads them."""
    from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
        ParamMeta,
        WeightSource,
    )

    class Source(WeightSource):  # pyright: ignore[reportUntypedBaseClass]
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, shape.dtype, tuple(shape.shape)) for name, shape in weights.shapes.items()]

        def __iter__(self) -> Iterable[tuple[str, torch.Tensor]]:  # pyright: ignore
            return iter(weights)

    return Source()
