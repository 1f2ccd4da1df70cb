"""Engines for tests: one of a kind and a model serves a whole run, and servers are started for it.

Nothing is imported or started before a test asks for it, so the default run needs no vLLM.
"""

import atexit
import copy
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import mixed_rows, tiny, user
from vlmroll.generators import ScriptedGenerator, TransformersGenerator
from vlmroll.generators.base import Generator as AnyGenerator
from vlmroll.scoring import policy_logprobs
from vlmroll.types import GenerationOutput
from vlmroll_processors import PaddedBatch, Prompt, collate, load_adapter
from vlmroll_processors.adapter import FamilyAdapter

# What vLLM needs on a CPU, read when it is imported and when an engine starts.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ.update(ENVIRONMENT)

VLLM = ("vllm_colocate", "vllm_server")
KINDS = ("scripted", "transformers", "continuous_batching", *VLLM)
MODELS = ("qwen2_5_vl", "qwen3_vl", "text")
"""Names of `model_of`. The head of the text model is tied to its embeddings; those of the others are not."""
CONTEXT, MOST_ROWS = 512, 32
"""Tokens of prompt and completion together, and completions of one request, that vLLM's engines take."""
_BLOCKS = 192  # of 128 tokens: room for all of them, in a tenth of the memory that is taken by default
BANNED = (5, 70, 220)
"""Ids that the shared engines must not sample, beside the vision ids; 220 is a space."""
STOPS = tuple(range(100, 110))
"""Ids that end a completion by the model's generation config, beside the tokenizer's own."""
KEY = "key-of-the-tests"

NEEDS_VLLM = (
    pytest.mark.vllm,
    # vLLM's own, while it is imported and while an engine starts.
    pytest.mark.filterwarnings("ignore"),
)


def marked(kind: str, name: str) -> Any:
    """A parameter of tests, with the marks that its kind of engine needs."""
    return pytest.param((kind, name), marks=NEEDS_VLLM if kind in VLLM else (), id=f"{kind}-{name}")


# Models and prompts.


def model_of(name: str) -> Any:
    """A copy of a tiny model with several stop ids."""
    model = tied(tiny(name).model) if name == "text" else copy.deepcopy(tiny(name).model)
    model.generation_config.eos_token_id = [model.generation_config.eos_token_id, *STOPS]
    return model


def tied(model: Any) -> Any:
    """A copy of a model with the embeddings as its head."""
    changed = copy.deepcopy(model)
    for config in (changed.config, changed.config.get_text_config()):
        config.tie_word_embeddings = True
    made = type(model)(changed.config)
    made.load_state_dict({n: t for n, t in changed.state_dict().items() if n != "lm_head.weight"}, strict=False)
    made.tie_weights()
    made.generation_config = changed.generation_config
    assert made.get_output_embeddings().weight is made.get_input_embeddings().weight
    return made.eval()


@cache
def adapter_of(name: str) -> FamilyAdapter:
    """The adapter of a tiny model."""
    return load_adapter(tiny(name).processor)


@cache
def prompts_of(name: str, *, pictures: bool = True) -> tuple[Prompt, ...]:
    """Four prompts, with 1, 3, 0 and 2 pictures where there may be some."""
    texts = ("which ?", "what is the sum of 0 1 2 3 ?", "how many dots ? 7", "red")
    rows = mixed_rows() if pictures and name != "text" else [{"prompt": user(text)} for text in texts]
    return tuple(adapter_of(name).encode(rows))


# Engines.


@dataclass(frozen=True, kw_only=True, repr=False)
class Engine:
    """A generator with the policy whose weights it has."""

    kind: str
    name: str
    model: Any
    adapter: FamilyAdapter
    generator: Any

    @property
    def reads_pictures(self) -> bool:
        return self.name != "text" and self.kind != "continuous_batching"

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Four prompts of different lengths, with and without pictures where the engine reads pictures."""
        return prompts_of(self.name, pictures=self.reads_pictures)

    @property
    def reference(self) -> TransformersGenerator:
        """A generator that runs the same policy itself, one token after the other."""
        return TransformersGenerator(self.model, self.adapter, banned_ids=sorted(self.generator.banned_ids))

    @contextmanager
    def changed(self) -> Generator[None]:
        """The policy's weights may be changed in place; behind the block they, and the engine's, are as before."""
        before = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        try:
            yield
        finally:
            self.model.load_state_dict(before)
            self.generator.sync_weights(self.model)


def padded(engine: Engine, output: GenerationOutput) -> PaddedBatch:
    """Prompts and completions of an output."""
    owners = [prompt for prompt, group in zip(output.prompts, output.completions, strict=True) for _ in group]
    return collate(owners, output.completion_ids, pad_token_id=engine.adapter.pad_token_id)


def largest_gap(engine: Engine, output: GenerationOutput, temperature: float, model: Any = None) -> float:
    """The largest difference between the log-probabilities of an output and the policy's."""
    policy, banned = engine.model if model is None else model, sorted(engine.generator.banned_ids)
    with torch.no_grad():
        scores = policy_logprobs(policy, padded(engine, output), temperature=temperature, banned_ids=banned)
    return max(
        abs(ours - theirs)
        for row, others in zip(output.logprobs, scores.logprobs.tolist(), strict=True)
        for ours, theirs in zip(row, others, strict=False)
    )


def perturb(model: Any, seed: int, size: float = 0.02) -> None:
    """Add noise to every weight of a model, in its vision tower too."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * size)


def make(kind: str, model: Any, adapter: FamilyAdapter, *, server: "Server | None" = None, **more: Any) -> AnyGenerator:
    """A new generator of a kind; `more` goes to its constructor."""
    if kind == "scripted":
        return ScriptedGenerator([[7, 8, 9], [10], [11, 12]], banned_ids=frozenset(more.get("banned_ids", ())))
    if kind == "transformers":
        return TransformersGenerator(model, adapter, **more)
    if kind == "continuous_batching":
        from vlmroll.generators.continuous_batching import ContinuousBatchingGenerator

        return ContinuousBatchingGenerator(model, adapter, **more)
    if kind == "vllm_colocate":
        from vlmroll.generators.vllm_colocate import VLLMColocateGenerator
        from vlmroll.generators.vllm_start import EngineOptions

        sizes: dict[str, Any] = {"max_num_seqs": MOST_ROWS, "max_num_batched_tokens": CONTEXT * MOST_ROWS}
        sizes |= {"num_gpu_blocks_override": _BLOCKS, "enforce_eager": True}
        own: Mapping[str, Any] = more.pop("options", {})
        chosen: dict[str, Any] = {"max_model_length": CONTEXT, **own, "more": {**sizes, **own.get("more", {})}}
        return VLLMColocateGenerator(model, adapter, options=EngineOptions(**chosen), **more)
    from vlmroll.generators.vllm_server import VLLMServerGenerator

    assert server is not None
    server.wait()
    where: dict[str, Any] = {"base_url": server.url, "api_key": KEY, "timeout": 120.0, **more}
    return VLLMServerGenerator(model, adapter, **where)


def engine_of(kind: str, name: str) -> Engine:
    """The engine of a kind with a model, for the whole run."""
    if kind == "vllm_colocate" and not _is_whole():
        for key in [key for key in _engines if key[0] == kind]:
            del _engines[key]
    if (kind, name) not in _engines:
        model, adapter = model_of(name), adapter_of(name)
        _engines[kind, name] = another(kind, name, model=model, adapter=adapter, banned_ids=BANNED)
    return _engines[kind, name]


def _is_whole() -> bool:
    """Whether vLLM has the state that engines of a process share: the first one that closes ends them all."""
    from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]

    return bool(parallel_state.model_parallel_is_initialized())


def another(kind: str, name: str, *, model: Any, adapter: FamilyAdapter, **more: Any) -> Engine:
    """A further engine with a model of this name; a server is the shared one."""
    server = server_of(name) if kind == "vllm_server" else None
    generator = make(kind, model, adapter, server=server, **more)
    _kept.append(generator)
    return Engine(kind=kind, name=name, model=model, adapter=adapter, generator=generator)


_engines: dict[tuple[str, str], Engine] = {}
_kept: list[Any] = []  # so that no engine is closed while others run


# Servers.

SERVED: Mapping[str, Sequence[str]] = {"qwen3_vl": ("--min-pixels", "256", "--max-pixels", "9216")}
"""Further arguments of a model's server."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(kw_only=True)
class Server:
    """A vLLM server in a process of its own, started by `python -m vlmroll serve`."""

    folder: Path
    log: Path
    more: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and do not wait."""
        sizes = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(MOST_ROWS)]
        sizes += ["--max-num-batched-tokens", str(CONTEXT * MOST_ROWS), "--num-gpu-blocks-override", str(_BLOCKS)]
        command = [sys.executable, "-m", "vlmroll", "serve", str(self.folder), "--port", str(self.port)]
        path = os.pathsep.join(filter(None, [*map(str, _source_roots()), os.environ.get("PYTHONPATH")]))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--dtype", "float32", "--enforce-eager", *sizes, *self.more],
                env={**os.environ, **ENVIRONMENT, "VLLM_API_KEY": KEY, "PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the engine is a process of its own
            )

    def wait(self, timeout: float = 300.0) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + timeout
        while not self.answers():
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > deadline:
                output = self.log.read_text(encoding="utf-8", errors="replace")
                pytest.fail(f"the vLLM server did not start; it said:\n{output[-6000:]}", pytrace=False)
            time.sleep(0.2)

    def answers(self) -> bool:
        """Whether it is up."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """End it at once, as the kernel would when memory runs out."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _source_roots() -> Iterable[Path]:
    root = Path(__file__).resolve().parent.parent
    return root / "sdk", root / "processors"


@cache
def scratch() -> Path:
    """A folder for the whole run."""
    folder = tempfile.TemporaryDirectory(prefix="vlmroll-tests-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def saved(name: str) -> Path:
    """A folder with a model of `model_of` and its processor."""
    folder = scratch() / name
    if not folder.exists():
        model_of(name).save_pretrained(folder)
        tiny(name).processor.save_pretrained(folder)
    return folder


def server_of(name: str, number: int = 0) -> Server:
    """A server of a model, for the whole run. It is started here and may not be up yet."""
    return _server(name, number)


@cache
def _server(name: str, number: int) -> Server:
    server = Server(folder=saved(name), log=scratch() / f"{name}-{number}.log", more=SERVED.get(name, ()))
    server.start()
    atexit.register(server.kill)
    return server


def start_ahead(session: pytest.Session) -> None:
    """Start the servers that the selected tests need, so that they come up while other tests run.

    These are the `engine` parameters of tests, and the `SERVERS` of modules with tests that need vLLM.
    """
    for item in session.items:
        callspec: Any = getattr(item, "callspec", None)
        match callspec and callspec.params.get("engine"):
            case ("vllm_server", str(name)):
                server_of(name)
            case _:
                pass
        if item.get_closest_marker("vllm"):
            for name, number in getattr(getattr(item, "module", None), "SERVERS", ()):
                server_of(name, number)
