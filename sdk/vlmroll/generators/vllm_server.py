"""vLLM as a server of its own, on this machine or another."""

import base64
import io
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from vlmroll.generators.base import stop_ids_of
from vlmroll.generators.vllm_http import ServerGone, VLLMServer
from vlmroll.generators.vllm_requests import Request, RequestMaker, bans_of, output_of, truncates
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll.weights import PolicyWeights
from vlmroll_processors import Picture, Prompt
from vlmroll_processors.adapter import FamilyAdapter

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 256  # requests of this process to one server
_MOST_RESTARTS = 5  # of one server during one call
_TURN = 10.0  # seconds that a process leaves each one before it to send weights


class VLLMServerGenerator:
    """Samples with vLLM servers that were started by `vlmroll serve MODEL`.

    Token ids and pictures go to the server's token-level endpoint, token ids and log-probabilities come back; these are
    as those of `VLLMColocateGenerator`. Several servers share the prompts. `sync_weights` sends all weights through
    vLLM's weight-transfer API: by NCCL, or through a file in memory where the server runs on a CPU.

    A server that dies is waited for. When it is back it gets the weights again and the requests that it had not
    answered; with a seed, these are answered as they would have been.

    Args:
        model: the policy.
        adapter: the adapter that encodes the prompts.
        base_url: the address of a server, or several with commas between.
        api_key: the servers' key; None: the environment variable VLLM_API_KEY.
        timeout: seconds to wait for a server that does not answer.
        group_port: port on which NCCL connects, and the ones after it for further servers.
        banned_ids: further ids that must not be sampled.
        regex: a regular expression that every completion has to match.

    Raises:
        ServerGone, ServerError: no server answers, or it cannot serve this policy.

    Example:
        >>> generator = VLLMServerGenerator(model, adapter, base_url="http://127.0.0.1:8000")  # doctest: +SKIP
        >>> generator.sync_weights(model)  # doctest: +SKIP
    """

    has_mismatch = True
    metric_name = "vLLM.generate"

    def __init__(
        self,
        model: Any,
        adapter: FamilyAdapter,
        *,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        timeout: float = 240.0,
        group_port: int = 51216,
        banned_ids: Sequence[int] = (),
        regex: str | None = None,
    ) -> None:
        self._adapter, self._policy, self._group_port = adapter, model, group_port
        self.banned_ids = frozenset(adapter.vision_ids.union(banned_ids))
        self.policy_version = 0
        self._run = _same_everywhere(uuid.uuid4().hex)
        key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        text = base.config.get_text_config()
        self._expected = {name: getattr(text, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        self._expected["architectures"] = [type(base).__name__]
        name = str(base.config._name_or_path)
        urls = [url.strip() for url in base_url.split(",") if url.strip()]
        self._servers = [VLLMServer(url, key, timeout=timeout, model=name) for url in urls]
        for server in self._servers:
            server.connect(self._expected)
        self.max_model_length: int = min(server.description["max_model_length"] for server in self._servers)
        self._maker = RequestMaker(
            bans=bans_of(adapter, self.banned_ids),
            stop_ids=stop_ids_of(model, adapter),
            regex=regex,
            max_model_length=self.max_model_length,
        )
        self.sync_weights(model)
        self.policy_version = 0

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        """`num_generations` completions for each prompt.

        Raises:
            ValueError: a prompt cannot be sent, an option is not offered, or the server read other ids than the
                encoded ones.
            ServerGone: a server died and did not come back in time.
            ServerError: a server refuses a request.
        """
        requests = self._maker.make(prompts, sampling, num_generations)
        pictures = {self._adapter.engine_key(p): p for request in requests for p in request.prompt.images}
        urls = {key: _data_url(self._adapter, picture) for key, picture in pictures.items()}
        contents = [self._content(request, urls) for request in requests]
        servers = self._servers[: len(contents)]
        parts = [range(k, len(contents), len(servers)) for k in range(len(servers))]
        answers: dict[int, dict[str, Any]] = {}
        with ThreadPoolExecutor(len(servers)) as pool:
            futures = [pool.submit(self._answers, *job, contents) for job in zip(servers, parts, strict=True)]
        for part, future in zip(parts, futures, strict=True):
            answers.update(zip(part, future.result(), strict=True))
        ordered = [answers[i] for i in range(len(contents))]
        completions = [self._completions(answer, truncated=truncates(sampling)) for answer in ordered]
        return output_of(requests, [answer["prompt_token_ids"] for answer in ordered], completions, num_generations)

    def _content(self, request: Request, urls: Mapping[str, str]) -> dict[str, Any]:
        """The body of a request; a picture's content hash goes along as cache key."""
        prompt = request.prompt
        content: dict[str, Any] = {
            "token_ids": list(prompt.engine_ids),
            "sampling_params": dict(request.options),
            "return_token_ids": True,
        }
        if prompt.images:
            keys = [self._adapter.engine_key(picture) for picture in prompt.images]
            content["content_parts"] = [{"type": "image_url", "url": urls[key], "uuid": key} for key in keys]
        return content

    def _completions(self, answer: Mapping[str, Any], *, truncated: bool) -> tuple[Completion, ...]:
        return tuple(
            Completion(
                completion_ids=tuple(choice["token_ids"]),
                logprobs=tuple(token["logprob"] for token in choice["logprobs"]["content"]),
                finish_reason=choice["finish_reason"],
                policy_version=self.policy_version,
                truncated=truncated,
            )
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        )

    def _answers(self, server: VLLMServer, part: Sequence[int], contents: Sequence[Any]) -> list[dict[str, Any]]:
        """The answers to some requests, all made with the current weights; a server that dies is waited for."""
        answers: dict[int, dict[str, Any]] = {}
        for _ in range(_MOST_RESTARTS + 1):
            missing = [i for i in part if i not in answers]
            if not missing:
                return [answers[i] for i in part]
            try:
                if server.weight_version != self._version:
                    self._send(server)
            except ServerGone as gone:
                self._wait_for(server, gone)
                continue
            gone = None
            with ThreadPoolExecutor(min(len(missing), _MOST_AT_ONCE)) as pool:
                futures = {i: pool.submit(server.generate, contents[i]) for i in missing}
            for i, future in futures.items():
                error = future.exception()
                if isinstance(error, ServerGone):
                    gone = error
                elif error is not None:
                    raise error
                elif self._is_current(future.result()):
                    answers[i] = future.result()
            if gone is not None:
                self._wait_for(server, gone)
        raise ServerGone(f"the vLLM server at {server.url} dies again and again; look at what it prints")

    def _is_current(self, answer: Mapping[str, Any]) -> bool:
        """Whether no other weights than the current ones had a part in an answer."""
        spans = [span for choice in answer["choices"] for span in choice.get("weight_versions") or ()]
        return all(span["version"] == self._version for span in spans)

    def _wait_for(self, server: VLLMServer, gone: ServerGone) -> None:
        logger.warning("%s; waiting for it to be started again", gone)
        server.connect(self._expected)

    def sync_weights(self, policy: Any) -> None:
        """Give all servers the policy's weights, adapters merged; the first process does it for all.

        Raises:
            ServerError: a server could not take them and has to be started again.
        """
        self._policy = policy
        self.policy_version += 1
        self._version = f"{self._run}-{self.policy_version}"
        if _rank() == 0:
            for server in self._servers:
                self._send(server)
        if _num_processes() > 1:
            torch.distributed.barrier()

    def _send(self, server: VLLMServer) -> None:
        """Give a server the current weights, unless another process does."""
        for _ in range(_MOST_RESTARTS):
            try:
                if not self._comes_from_another(server):
                    port = self._group_port + self._servers.index(server) + _rank() * len(self._servers)
                    server.take(PolicyWeights(self._policy), self._version, port)
                return
            except ServerGone as gone:
                self._wait_for(server, gone)
        raise ServerGone(f"the vLLM server at {server.url} dies again and again; look at what it prints")

    def _comes_from_another(self, server: VLLMServer) -> bool:
        """Whether the weights arrive from a process before this one; processes take turns in trying."""
        deadline = time.monotonic() + _rank() * _TURN
        while time.monotonic() < deadline:
            if server.weight_version == self._version:
                return True
            time.sleep(0.5)
        return False

    def close(self) -> None:
        """Close the connections; the servers go on."""
        for server in self._servers:
            server.close()


def _data_url(adapter: FamilyAdapter, picture: Picture) -> str:
    """A picture as the server gets it, without loss."""
    buffer = io.BytesIO()
    adapter.engine_picture(picture).save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _num_processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _same_everywhere(value: str) -> str:
    """The first process's value, in all processes."""
    if _num_processes() == 1:
        return value
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
