"""vLLM as a server: who is let in, which errors are told, and what happens when a server dies.

Most of it runs against a small stand-in that speaks vLLM's paths, so that it can die at the right moment. What a real
server samples is tested in `tests/sdk/test_generator_contract.py`; here real ones are killed, shared and asked without
a key.
"""

import base64
import contextlib
import importlib.util
import io
import itertools
import json
import logging
import os
import shlex
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from engines import (
    BANNED,
    KEY,
    MOST_ROWS,
    NEEDS_VLLM,
    Engine,
    Server,
    adapter_of,
    engine_of,
    free_port,
    largest_gap,
    make,
    model_of,
    perturb,
    prompts_of,
    server_of,
    start_ahead,
)
from vlmroll.cli import main
from vlmroll.generators import vllm_http, vllm_server
from vlmroll.generators.vllm_http import ServerError, ServerGone, VLLMServer
from vlmroll.generators.vllm_server import VLLMServerGenerator
from vlmroll.types import SamplingParams
from vlmroll.weights import PolicyWeights

WARM = SamplingParams(max_tokens=6, temperature=0.7, seed=3)
SERVERS = (("text", 0), ("text", 1), ("qwen2_5_vl", 0))
"""What the tests marked `real` need, for `start_ahead`."""

# A stand-in for a server.


@dataclass
class StandIn:
    """What a server would do, and what it was asked.

    Attributes:
        deaths: how many of the next requests for completions end with the connection closed; each one is followed by a
            restart, which forgets the weights.
        victim: the only prompt that it dies of, when all others of a call are answered; by default any.
        answers: what it answers to a path in place of the usual, as status and content.
        asked: paths and contents, in order.
    """

    description: dict[str, Any] = field(default_factory=dict[str, Any])
    key: str | None = None
    deaths: int = 0
    victim: list[int] | None = None
    others: int = 0
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict[str, tuple[int, Any]])
    asked: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    weights: dict[str, torch.Tensor] | None = None
    version: str = "default"
    error: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    @property
    def generated(self) -> list[Any]:
        """What was asked for completions."""
        return [content for path, content in self.asked if path == "/inference/v1/generate"]

    def restart(self) -> None:
        self.weights, self.version = None, "default"

    def answer(self, path: str, content: Any) -> tuple[int, Any] | None:
        """The status and content of an answer; None where the connection ends."""
        dies = path == "/inference/v1/generate" and self.victim in (None, content["token_ids"])
        while dies and self.deaths and self.others > 0:
            time.sleep(0.01)
        with self.lock:
            self.asked.append((path, content))
            if path in self.answers:
                return self.answers[path]
            if path == "/inference/v1/generate":
                if dies and self.deaths:
                    self.deaths -= 1
                    self.restart()
                    return None
                self.others -= 1
                return 200, self.completions(content)
            if path == "/update_weights":
                self.weights = load_file(content["update_info"]["path"])
            if path == "/finish_weight_update":
                self.version = content["weight_version"]
            if path == "/collective_rpc":
                report = {"num_parameters": 1, "error": self.error}
                return 200, {
                    "results": [{"describe_engine": self.description, "end_sync": report}.get(content["method"])]
                }
            found = {"/version": {"version": "0.32.0"}, "/weight_info": {"weight_version": self.version}}
            return 200, found.get(path, {})

    def completions(self, content: Any) -> Any:
        """Ids that follow from the prompt, the seed and the weights."""
        sampling = content["sampling_params"]
        state = 0 if self.weights is None else round(float(self.weights["model.norm.weight"].sum()) * 1000)
        first = sum(content["token_ids"]) + sampling.get("seed", 0) + state
        choices: list[Any] = []
        for i in reversed(range(sampling["n"])):
            logprobs = [{"logprob": -1.0 - j / 8} for j in range(3)]
            choices.append(
                {
                    "index": i,
                    "token_ids": [(first + 7 * i + j) % 300 for j in range(3)],
                    "logprobs": {"content": logprobs},
                    "finish_reason": "length",
                    "weight_versions": [{"version": self.version, "start": 0, "end": 3}],
                }
            )
        return {"prompt_token_ids": content["token_ids"], "choices": choices}


class Handler(BaseHTTPRequestHandler):
    """Hands requests to a stand-in."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece, or each one waits for an acknowledgement
    stand_in: StandIn

    def handle_one(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        content: Any = json.loads(self.rfile.read(length)) if length else None
        stand_in, path = self.stand_in, self.path.partition("?")[0]
        open_to = path == "/health" or stand_in.key is None
        let_in = open_to or self.headers.get("Authorization") == f"Bearer {stand_in.key}"
        found = stand_in.answer(path, content) if let_in else (401, {"error": "Unauthorized"})
        if found is None:
            self.close_connection = True
            self.connection.close()
            return
        status, said = found
        body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = handle_one

    def finish(self) -> None:
        """Flush what is left, unless the connection was closed before."""
        with contextlib.suppress(ValueError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def describe(model: Any) -> dict[str, Any]:
    """What a server says that runs a model."""
    config = model.config.get_text_config()
    names = ("vocab_size", "hidden_size", "num_hidden_layers")
    sizes = {name: getattr(config, name) for name in names}
    more = {"model": "/models/x", "dtype": "float32", "max_model_length": 512, "backend": "vlmroll-file"}
    return {**sizes, "architectures": [type(model).__name__], **more}


@pytest.fixture
def stand_ins() -> Iterator[tuple[StandIn, StandIn]]:
    """Two servers that run the text model."""
    made = StandIn(), StandIn()
    listening: list[ThreadingHTTPServer] = []
    for stand_in in made:
        stand_in.description = describe(model_of("text"))
        handler = type("StandInHandler", (Handler,), {"stand_in": stand_in})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.handle_error = lambda *args: None  # pyright: ignore
        stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()
        listening.append(server)
    yield made
    for server in listening:
        server.shutdown()
        server.server_close()


@pytest.fixture
def stand_in(stand_ins: tuple[StandIn, StandIn]) -> StandIn:
    return stand_ins[0]


@pytest.fixture(autouse=True)
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look often whether a server is up, know no key, and close all connections to stand-ins, refused ones too."""
    monkeypatch.setattr(vllm_http, "_POLL", 0.02)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if request.node.get_closest_marker("vllm"):
        yield
        return
    made: list[VLLMServer] = []

    def server(*args: Any, **more: Any) -> VLLMServer:
        made.append(VLLMServer(*args, **more))
        return made[-1]

    monkeypatch.setattr(vllm_server, "VLLMServer", server)
    yield
    for connection in made:
        connection.close()


def connected(*stand_ins: StandIn, model: Any = None, **more: Any) -> VLLMServerGenerator:
    model = model_of("text") if model is None else model
    options: dict[str, Any] = {"base_url": ",".join(s.url for s in stand_ins), "timeout": 5.0, **more}
    return VLLMServerGenerator(model, adapter_of("text"), **options)


def assert_told(caught: pytest.ExceptionInfo[Any], *words: str) -> None:
    """One line that holds all the words."""
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


# Who is no server for this policy.


def test_nobody_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(ServerGone) as caught:
        VLLMServerGenerator(model_of("text"), adapter_of("text"), base_url=url, timeout=0.3)
    assert_told(caught, f"no vLLM server answers at {url}", "start it with `vlmroll serve", "correct the address")
    assert 0.3 <= time.monotonic() - started < 5


def test_a_server_that_comes_up_late_is_waited_for(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    original, tries = stand_in.answer, iter(range(10**6))

    def starting(path: str, content: Any) -> tuple[int, Any] | None:
        return (503, {}) if path == "/health" and next(tries) < 3 else original(path, content)

    stand_in.answer = starting
    with caplog.at_level(logging.WARNING):
        connected(stand_in)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        f"waiting for the vLLM server at {stand_in.url}"
    ]


def test_the_key_has_to_be_the_servers(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.key = "right"
    for given in (None, "wrong", ""):
        with pytest.raises(ServerError) as caught:
            connected(stand_in, api_key=given)
        assert_told(caught, f"the server at {stand_in.url} has another key", "set VLLM_API_KEY")
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    connected(stand_in, api_key="right")
    monkeypatch.setenv("VLLM_API_KEY", "right")
    connected(stand_in)


def test_a_server_without_the_paths_of_training(stand_in: StandIn) -> None:
    stand_in.answers["/collective_rpc"] = (404, {"detail": "Not Found"})
    with pytest.raises(ServerError) as caught:
        connected(stand_in)
    assert_told(caught, f"the server at {stand_in.url} has no /collective_rpc", "start it with `vlmroll serve MODEL`")


def test_a_server_without_our_worker(stand_in: StandIn) -> None:
    """As vLLM in developer mode says it."""
    words = "Call to collective_rpc method failed: Worker failed with error ''CPUWorker' object has no attribute "
    stand_in.answers["/collective_rpc"] = (500, {"error": {"message": words + "'describe_engine''"}})
    with pytest.raises(ServerError) as caught:
        connected(stand_in)
    assert_told(caught, stand_in.url, "start it with `vlmroll serve MODEL`")


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 999), ("hidden_size", 8), ("num_hidden_layers", 3), ("architectures", ["OtherForCausalLM"])],
)
def test_another_model(stand_in: StandIn, name: str, value: Any) -> None:
    policy = model_of("text")
    policy.config._name_or_path = "org/policy"
    own = describe(policy)[name]
    stand_in.description[name] = value
    with pytest.raises(ServerError) as caught:
        connected(stand_in, model=policy)
    assert_told(caught, f"the server at {stand_in.url} runs another model, /models/x: its {name} is {value!r}")
    assert_told(caught, f"the policy's {own!r}", "start it with `vlmroll serve org/policy`")


def test_a_server_that_takes_no_weights(stand_in: StandIn) -> None:
    stand_in.description["backend"] = None
    with pytest.raises(ServerError) as caught:
        connected(stand_in)
    assert_told(caught, f"the server at {stand_in.url} was started without a way to take weights", "`vlmroll serve")


def test_an_untested_version_is_warned_of(stand_in: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    stand_in.answers["/version"] = (200, {"version": "0.40.1"})
    with caplog.at_level(logging.WARNING):
        connected(stand_in)
    assert f"the server at {stand_in.url} is vLLM 0.40.1; this was tested with 0.32 to 0.33" in caplog.text


def test_proxies_are_not_used(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    connected(stand_in)


# Weights.


def test_a_sync_is_these_steps_and_sends_the_policys_weights(stand_in: StandIn) -> None:
    generator = connected(stand_in)
    policy = model_of("text")
    perturb(policy, 1)
    stand_in.asked.clear()
    generator.sync_weights(policy)
    methods = [content["method"] if path == "/collective_rpc" else path for path, content in stand_in.asked]
    updates = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    resets = ["/reset_prefix_cache", "/reset_encoder_cache"]
    assert methods == ["/pause", "begin_sync", *updates, "end_sync", *resets, "/resume"]
    expected = dict(PolicyWeights(policy))
    assert stand_in.weights is not None
    assert stand_in.weights.keys() == expected.keys()
    assert all(torch.equal(stand_in.weights[name], expected[name]) for name in expected)
    (total,) = [content["args"] for _, content in stand_in.asked if content and content.get("method") == "end_sync"]
    assert total == [PolicyWeights(policy).num_elements]
    assert generator.policy_version == 1


def test_a_new_generator_sends_its_weights_at_once_as_version_0(stand_in: StandIn) -> None:
    generator = connected(stand_in)
    assert stand_in.weights is not None
    assert generator.policy_version == 0
    ((completion,),) = generator.generate(prompts_of("text")[:1], WARM, 1).completions
    assert completion.policy_version == 0


def test_a_sync_that_left_something_over_is_told(stand_in: StandIn) -> None:
    generator = connected(stand_in)
    stand_in.error = "weights were not sent for 1 parameters of the engine: ['x']"
    with pytest.raises(ServerError) as caught:
        generator.sync_weights(model_of("text"))
    assert_told(caught, f"the server at {stand_in.url} has to be started again: {stand_in.error}")
    assert stand_in.paths[-1] != "/resume", "nobody may generate with half of the weights"


# Requests.


def test_requests_hold_ids_options_and_pictures_without_loss(stand_in: StandIn) -> None:
    model = model_of("qwen3_vl")
    stand_in.description = describe(model)
    stand_in.answers["/inference/v1/generate"] = (418, "enough")
    generator = VLLMServerGenerator(model, adapter_of("qwen3_vl"), base_url=stand_in.url + "/")
    asked = prompts_of("qwen3_vl")
    with pytest.raises(ServerError, match="418 to /inference/v1/generate: enough"):
        generator.generate([asked[1], asked[2], asked[1]], WARM, 3)
    contents = sorted(stand_in.generated, key=lambda content: -len(content["token_ids"]))
    assert [content["token_ids"] for content in contents] == [list(asked[i].engine_ids) for i in (1, 1, 2)]
    assert {content["sampling_params"]["n"] for content in contents} == {3}
    assert all(content["return_token_ids"] is True for content in contents)
    assert contents[0]["content_parts"] == contents[1]["content_parts"]
    assert "content_parts" not in contents[2]
    parts = contents[0]["content_parts"]
    assert len({part["uuid"] for part in parts}) == 3
    for part, picture in zip(parts, asked[1].images, strict=True):
        assert part["type"] == "image_url"
        kind, _, data = part["url"].partition(",")
        assert kind == "data:image/png;base64"
        expected = adapter_of("qwen3_vl").engine_picture(picture)
        assert Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB").tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"error": {"message": "n must be at most 32"}}, "n must be at most 32"),
        ({"error": "no room"}, "no room"),
        ({"detail": [{"loc": "x"}]}, "loc"),
        (["odd"], "odd"),
        ("<html>Bad gateway</html>", "Bad gateway"),
        ({"error": {"message": "long " * 500}}, "long long"),
    ],
)
def test_a_request_that_is_refused_is_one_error(stand_in: StandIn, said: Any, words: str) -> None:
    generator = connected(stand_in)
    stand_in.answers["/inference/v1/generate"] = (400, said)
    with pytest.raises(ServerError) as caught:
        generator.generate(prompts_of("text"), WARM, 1)
    assert_told(caught, f"the server at {stand_in.url} answered 400 to /inference/v1/generate: ", words)
    assert not isinstance(caught.value, ServerGone)
    assert len(str(caught.value)) < 500
    assert len(stand_in.generated) == 4, "it is not asked again"


def test_other_ids_than_the_encoded_ones_are_noticed(stand_in: StandIn) -> None:
    generator = connected(stand_in)
    answer = stand_in.completions({"token_ids": [5, 6], "sampling_params": {"n": 1}})
    for choice in answer["choices"]:
        del choice["weight_versions"]
    stand_in.answers["/inference/v1/generate"] = (200, answer)
    with pytest.raises(ValueError, match="prompt 0: the engine used 2 ids that differ"):
        generator.generate(prompts_of("text"), WARM, 1)


def test_two_servers_share_the_prompts_in_order(stand_ins: tuple[StandIn, StandIn]) -> None:
    one, two = stand_ins
    asked = [*prompts_of("text"), prompts_of("text")[1]]
    alone = connected(one).generate(asked, WARM, 2)
    one.asked.clear()
    generator = connected(one, two)
    assert generator.generate(asked, WARM, 2).completion_ids == alone.completion_ids
    ids = [list(prompt.engine_ids) for prompt in asked]
    assert sorted(content["token_ids"] for content in one.generated) == sorted(ids[0::2])
    assert sorted(content["token_ids"] for content in two.generated) == sorted(ids[1::2])
    assert one.version == two.version != "default"
    assert generator.generate(asked[:1], WARM, 1).completion_ids == alone.completion_ids[:1]


def test_the_smallest_context_of_several_servers_counts(stand_ins: tuple[StandIn, StandIn]) -> None:
    one, two = stand_ins
    two.description["max_model_length"] = 20
    with pytest.raises(ValueError, match="context of 20"):
        connected(one, two).generate(prompts_of("text"), WARM, 1)
    assert one.generated == two.generated == []


# Servers that die.


@pytest.mark.parametrize("deaths", [1, 3, 4])
def test_a_server_that_dies_gets_the_weights_again(
    stand_ins: tuple[StandIn, StandIn], deaths: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to as many deaths as there may be restarts, while the other server has nothing to do with it."""
    one, two = stand_ins
    policy = model_of("text")
    generator = connected(one, two, model=policy)
    perturb(policy, 1)
    generator.sync_weights(policy)
    asked = prompts_of("text")[:2]
    expected = generator.generate(asked, WARM, 2)
    for stand_in in stand_ins:
        stand_in.asked.clear()
    one.deaths = deaths
    with caplog.at_level(logging.WARNING):
        found = generator.generate(asked, WARM, 2)
    assert found == expected
    assert one.weights is not None
    assert torch.equal(one.weights["model.norm.weight"], policy.model.norm.weight)
    assert one.paths.count("/update_weights") == deaths
    assert len(one.generated) == 1 + deaths
    assert two.paths.count("/update_weights") == 0
    assert len(two.generated) == 1
    assert f"the vLLM server at {one.url} is gone" in caplog.text
    assert "waiting for it to be started again" in caplog.text


def test_what_a_server_had_answered_before_it_died_is_not_asked_again(stand_in: StandIn) -> None:
    generator = connected(stand_in)
    expected = generator.generate(prompts_of("text"), WARM, 2)
    stand_in.asked.clear()
    stand_in.deaths, stand_in.others, stand_in.victim = 2, 3, list(prompts_of("text")[1].engine_ids)
    assert generator.generate(prompts_of("text"), WARM, 2) == expected
    assert [c["token_ids"] for c in stand_in.generated[4:]] == [stand_in.victim] * 2


def test_a_server_that_only_dies_is_given_up(stand_in: StandIn) -> None:
    generator = connected(stand_in)
    stand_in.deaths = 1000
    with pytest.raises(ServerGone) as caught:
        generator.generate(prompts_of("text"), WARM, 1)
    assert_told(caught, f"the vLLM server at {stand_in.url} dies again and again", "look at what it prints")


def test_a_server_whose_engine_dies_is_waited_for(stand_in: StandIn) -> None:
    """vLLM answers what was asked with 500, then ends; a supervisor starts it again."""
    generator = connected(stand_in)
    expected = generator.generate(prompts_of("text"), WARM, 1)
    dead = {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}}
    stand_in.answers |= {"/inference/v1/generate": (500, dead), "/health": (503, {})}

    def restart() -> None:
        stand_in.restart()
        stand_in.answers.clear()

    threading.Timer(0.5, restart).start()
    assert generator.generate(prompts_of("text"), WARM, 1) == expected


def test_a_restart_between_two_calls_is_noticed(stand_in: StandIn) -> None:
    policy = model_of("text")
    generator = connected(stand_in, model=policy)
    perturb(policy, 1)
    generator.sync_weights(policy)
    expected = generator.generate(prompts_of("text"), WARM, 1)
    stand_in.restart()
    assert generator.generate(prompts_of("text"), WARM, 1) == expected
    assert stand_in.weights is not None


def test_a_server_that_dies_during_a_sync_gets_the_weights_when_it_is_back(stand_in: StandIn) -> None:
    policy = model_of("text")
    generator = connected(stand_in, model=policy)
    perturb(policy, 1)
    original, tries = stand_in.answer, iter(range(10))

    def dying(path: str, content: Any) -> tuple[int, Any] | None:
        if path == "/update_weights" and next(tries) < 2:
            stand_in.restart()
            return None
        return original(path, content)

    stand_in.answer = dying
    generator.sync_weights(policy)
    assert stand_in.weights is not None
    assert torch.equal(stand_in.weights["model.norm.weight"], policy.model.norm.weight)
    assert generator.policy_version == 1


def test_answers_that_other_weights_had_a_part_in_are_asked_for_again(stand_in: StandIn) -> None:
    """As when another run takes the server while a call is under way."""
    generator = connected(stand_in)
    expected = generator.generate(prompts_of("text"), WARM, 2)
    original, taken = stand_in.completions, iter(range(10))

    def completions(content: Mapping[str, Any]) -> Any:
        answer = original(content)
        if next(taken) == 1:
            answer["choices"][1]["weight_versions"] = [
                {"version": stand_in.version, "start": 0, "end": 2},
                {"version": "of another run", "start": 2, "end": 3},
            ]
            answer["choices"][1]["token_ids"] = [1, 2, 3]
        return answer

    stand_in.asked.clear()
    stand_in.completions = completions
    assert generator.generate(prompts_of("text"), WARM, 2) == expected
    assert len(stand_in.generated) == 5


# How a server is started.


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The command lines and environments of servers, which are not started."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, line, env: found.append((line, env)))  # pyright: ignore
    monkeypatch.setattr(importlib.util, "find_spec", {"vllm": True}.get)
    return found


Started = list[tuple[list[str], dict[str, str]]]


def test_a_server_gets_what_training_needs(started: Started) -> None:
    main(["serve", "org/model", "--port", "8123", "--max-pixels", "2048", "--dtype", "float32", "--port=9"])
    ((line, environment),) = started
    assert line[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = dict(itertools.pairwise(line))
    expected = {"--model": "org/model", "--host": "127.0.0.1", "--logprobs-mode": "processed_logprobs"}
    expected |= {"--generation-config": "vllm", "--mm-processor-kwargs": '{"max_pixels": 2048}'}
    assert {name: given[name] for name in expected} == expected
    assert "--enable-scale-out" in line
    assert line[-2:] == ["--dtype", "float32"], "further arguments stand last, so that they win"
    assert given["--port"] == "9"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_a_server_without_a_key_gets_a_new_one_and_tells_it(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        main(["serve", "org/model"])
    keys = [environment["VLLM_API_KEY"] for _, environment in started]
    assert keys[0] != keys[1]
    assert min(map(len, keys)) > 20
    told = [shlex.split(line)[-1] for line in capsys.readouterr().out.splitlines()]
    assert told == [f"VLLM_API_KEY={key}" for key in keys]
    assert not any(key in line for line, _ in started for key in keys), "others see command lines"


def test_a_key_of_ones_own_is_kept_and_not_told(
    started: Started, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    main(["serve", "org/model"])
    assert capsys.readouterr().out == ""
    main(["serve", "org/model", "--api-key", "other"])
    assert "export VLLM_API_KEY=other" in capsys.readouterr().out
    main(["serve", "org/model", "--no-api-key"])
    assert [environment.get("VLLM_API_KEY") for _, environment in started] == ["mine", "other", None]


def test_a_dry_run_shows_the_command_alone(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "a model", "--dry-run", "--api-key", "x y"])
    shown = shlex.split(capsys.readouterr().out)
    assert started == []
    assert "VLLM_SERVER_DEV_MODE=1" in shown
    assert "VLLM_API_KEY=x y" in shown
    assert shown[shown.index("--model") + 1] == "a model"


def test_no_server_without_vllm(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    with pytest.raises(ImportError, match="vLLM is not installed"):
        main(["serve", "org/model"])
    assert started == []


# Real servers.


def own(server: Server, model: Any, **more: Any) -> Engine:
    """An engine on a server, with a policy of its own."""
    adapter = adapter_of("text")
    generator = make("vllm_server", model, adapter, server=server, banned_ids=BANNED, **more)
    return Engine(kind="vllm_server", name="text", model=model, adapter=adapter, generator=generator)


@pytest.fixture(scope="session")
def ahead(request: pytest.FixtureRequest) -> None:
    start_ahead(request.session)


def real(function: Any) -> Any:
    """Mark a test that needs real servers."""
    for mark in (*NEEDS_VLLM, pytest.mark.usefixtures("ahead")):
        function = mark(function)
    return function


@real
def test_every_path_but_health_needs_the_key() -> None:
    server = server_of("text")
    server.wait()

    def status(path: str, method: str, key: str | None) -> int:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(server.url + path, method=method, headers=headers)
        request.data = None if method == "GET" else b"{}"
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    request = urllib.request.Request(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        paths: dict[str, dict[str, Any]] = json.load(answer)["paths"]
    assert {"/collective_rpc", "/update_weights", "/inference/v1/generate", "/pause"} <= paths.keys()
    for path, methods in paths.items():
        for method in methods:
            for key in (None, "wrong"):
                assert status(path, method.upper(), key) == (200 if path == "/health" else 401), (path, method)
    for path in ("/openapi.json", "/docs", "/nothing", "/health/", "//health"):
        assert status(path, "GET", None) == 401, path
    assert status("/version", "GET", KEY) == 200


@real
def test_a_real_server_wants_its_key_and_runs_one_model() -> None:
    server = server_of("text")
    server.wait()
    for key in ("wrong", ""):
        with pytest.raises(ServerError, match=f"the server at {server.url} has another key"):
            make("vllm_server", model_of("text"), adapter_of("text"), server=server, api_key=key)
    other = model_of("qwen3_vl")
    with pytest.raises(ServerError, match=rf"{server.url} runs another model, .*'Qwen3VLForConditionalGeneration'"):
        make("vllm_server", other, adapter_of("qwen3_vl"), server=server)


@real
def test_a_request_beyond_the_servers_rows_is_one_error() -> None:
    engine = engine_of("vllm_server", "text")
    with pytest.raises(ServerError, match=rf"answered 400 .*max_num_seqs \({MOST_ROWS}\), got {MOST_ROWS + 1}"):
        engine.generator.generate(engine.prompts, WARM, MOST_ROWS + 1)
    assert len(engine.generator.generate(engine.prompts, WARM, MOST_ROWS).completions[0]) == MOST_ROWS


@real
def test_prompts_that_would_be_expanded_twice_are_noticed() -> None:
    engine = engine_of("vllm_server", "qwen2_5_vl")
    wrong = [engine.prompts[2], replace(engine.prompts[0], engine_ids=engine.prompts[0].prompt_ids)]
    with pytest.raises(ValueError, match=r"prompt 1: the engine used \d+ ids that differ from the \d+ encoded ones"):
        engine.generator.generate(wrong, WARM, 1)


@real
def test_two_runs_on_one_server_each_get_their_own_policy() -> None:
    policies = [model_of("text"), model_of("text")]
    perturb(policies[1], 1)
    runs = [own(server_of("text"), policy) for policy in policies]
    for seed in range(2):
        for run in runs:
            output = run.generator.generate(run.prompts, replace(WARM, seed=seed), 2)
            assert largest_gap(run, output, 0.7) <= 2e-5


@real
def test_two_real_servers_share_the_prompts() -> None:
    one, two = server_of("text"), server_of("text", 1)
    policy = model_of("text")
    perturb(policy, 2)
    two.wait()
    alone, both = own(one, policy), own(one, policy, base_url=f"{one.url}, {two.url}")
    sampling = replace(WARM, max_tokens=24)
    output = both.generator.generate(both.prompts, sampling, 3)
    assert output.completion_ids == alone.generator.generate(both.prompts, sampling, 3).completion_ids
    assert largest_gap(both, output, 0.7) <= 2e-5


@pytest.mark.slow
@real
def test_a_server_that_is_killed_in_the_middle_of_a_call_is_waited_for() -> None:
    server = server_of("text", 1)
    server.wait()
    policy = model_of("text")
    run = own(server, policy)
    perturb(policy, 3)
    run.generator.sync_weights(policy)
    long = SamplingParams(max_tokens=400, temperature=0.7, seed=1, extra={"ignore_eos": True})
    started = time.monotonic()
    expected = run.generator.generate(run.prompts, long, 4)
    took = time.monotonic() - started

    def kill() -> None:
        server.kill()
        server.start()

    timer = threading.Timer(took / 3, kill)
    timer.start()
    found = run.generator.generate(run.prompts, long, 4)
    timer.join()
    assert time.monotonic() - started > 2 * took + 2, "it was killed before it had answered"
    assert found.completion_ids == expected.completion_ids
    assert largest_gap(run, found, 0.7) <= 2e-5
    assert run.generator.generate(run.prompts, WARM, 2).completion_ids != []
