"""Training with every generator: the run finishes, and the engine has the policy that comes out."""

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import CONTEXT, ENVIRONMENT, KEY, MODELS, NEEDS_VLLM, adapter_of, model_of, server_of
from training_runs import ALGORITHMS, make_trainer
from vlmroll import PolicyTrainer
from vlmroll.checking import check_generators
from vlmroll.generators.vllm_http import VLLMServer

ROOT = Path(__file__).parents[2]
ENGINE = {"enforce_eager": True, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
BY_OPTION: dict[str, dict[str, Any]] = {
    "transformers": {},
    "continuous-batching": {"use_transformers_continuous_batching": True},
    "vllm-colocate": {"use_vllm": True, "vllm_engine_kwargs": ENGINE, "vllm_max_model_length": CONTEXT},
    "vllm-server": {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 120.0},
}
pytestmark = list(NEEDS_VLLM)


def trainer_with(kind: str, name: str, folder: Path, algorithm: str = "grpo", **options: Any) -> PolicyTrainer:
    """A trainer that generates with an engine, which is chosen by options."""
    more = dict(BY_OPTION[kind])
    if kind == "vllm-server":
        server = server_of(name)
        server.wait()
        more["vllm_server_base_url"] = server.url
    return make_trainer(algorithm, folder, model=name, wrap=partial(_instead, model_of(name)), **more, **options)


def _instead(model: Any, given: Any) -> Any:
    return model


CASES = [(kind, name) for kind in BY_OPTION for name in MODELS if kind != "continuous-batching" or name == "text"]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_engine_has_the_trained_policy(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    trainer = trainer_with(kind, name, tmp_path, algorithm=ALGORITHMS[len(name) % 2], max_steps=3)
    before = state_of(trainer)
    trainer.train()
    assert any(not torch.equal(before[key], tensor) for key, tensor in state_of(trainer).items())
    report = check_generators(trainer.model, adapter_of(name), {kind: trainer.generator}, tolerance=1e-3)
    assert report.passed, str(report)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 3
    if kind != "transformers":
        assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-4  # 3e-6 were measured
    trainer.generator.close()


def state_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """A copy of the policy's weights."""
    model: Any = trainer.model
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def weights_after(folder: Path, name: str, *, disturb: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Weights and rewards of a run of three steps, in the second of which the server may be killed and started anew."""
    trainer = trainer_with("vllm-server", name, folder, max_steps=3, max_completion_length=48)
    server = server_of(name)
    killed = threading.Event()
    ask = VLLMServer.generate

    def ask_and_kill(self: VLLMServer, content: Any) -> Any:
        if disturb and trainer.state.global_step == 1 and not killed.is_set():
            killed.set()
            threading.Timer(0.05, server.kill).start()  # while it works on this request
        return ask(self, content)

    def start_again() -> None:
        killed.wait(timeout=300)
        time.sleep(2)
        server.start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMServer, "generate", ask_and_kill)
        thread = threading.Thread(target=start_again, daemon=True)
        if disturb:
            thread.start()
        trainer.train()
    if disturb:
        thread.join()
        assert killed.is_set()
    trainer.generator.close()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return state_of(trainer), rewards


def test_a_run_goes_on_when_the_server_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have seeds of their own, so what a server had not answered is answered as it would have been."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    undisturbed, rewards = weights_after(tmp_path / "one", "qwen2_5_vl", disturb=False)
    disturbed, again = weights_after(tmp_path / "two", "qwen2_5_vl", disturb=True)
    assert again == rewards
    # Completions are the same. Their log-probabilities differ in the last digit, since a server forms its batches by
    # what arrives when; through the correction that reaches the weights.
    for key, tensor in undisturbed.items():
        assert torch.allclose(tensor, disturbed[key], rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("size", [1, 2])
def test_two_processes_with_engines_in_them(size: int, tmp_path: Path) -> None:
    """An engine for each, and one engine split over both: the processes end with the same weights."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("sdk", "processors", "tests"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = ROOT / "tests" / "with_vllm" / "two_processes.py"
    done = subprocess.run(
        [*launcher, str(script), str(size), str(tmp_path)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one["passed"], one["report"]
    assert other["passed"], other["report"]
    assert all(torch.equal(one["weights"][key], other["weights"][key]) for key in one["weights"])
