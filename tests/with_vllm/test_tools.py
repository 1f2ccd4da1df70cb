"""Rollouts of several turns with every generator, of a model that really calls tools and gets pictures from them."""

import atexit
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import KEY, NEEDS_VLLM, Server, scratch
from tool_tasks import MAX_PIXELS, MAX_TOKENS, MODEL_DIR, answer_reward, make_calculator_rows, make_zoom_rows
from tools_text import calculate
from tools_zoom import Zoom
from vlmroll import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SamplingParams

pytestmark = list(NEEDS_VLLM)
ENGINE = {"enforce_eager": True, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
BY_OPTION: dict[str, dict[str, Any]] = {
    "transformers": {},
    "continuous-batching": {"use_transformers_continuous_batching": True},
    "vllm-colocate": {"use_vllm": True, "vllm_engine_kwargs": ENGINE, "vllm_max_model_length": 256},
    "vllm-server": {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 120.0},
}
TASKS: dict[str, dict[str, Any]] = {
    "zoom": {"environment_factory": Zoom},
    "calculate": {"tools": [calculate]},
}
CASES = [(kind, task) for kind in BY_OPTION for task in TASKS if kind != "continuous-batching" or task == "calculate"]


@cache
def server() -> Server:
    """One server of the model for all tests here."""
    served = Server(folder=MODEL_DIR, log=scratch() / "tools.log", more=("--max-pixels", str(MAX_PIXELS)))
    served.start()
    atexit.register(served.kill)
    return served


def rows_of(task: str, split: Any, count: int) -> list[Any]:
    return list((make_zoom_rows if task == "zoom" else make_calculator_rows)(split, count, seed=1))


@pytest.mark.parametrize(("kind", "task"), CASES)
def test_turns_are_sampled_scored_and_trained_on(
    kind: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    options = dict(BY_OPTION[kind])
    if kind == "vllm-server":
        server().wait()
        options["vllm_server_base_url"] = server().url
    config, algorithm = (GRPOConfig, GRPOTrainer) if task == "zoom" else (RLOOConfig, RLOOTrainer)
    args: Any = config(
        output_dir=str(tmp_path),
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=MAX_TOKENS,
        max_pixels=MAX_PIXELS,
        beta=0.0,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = algorithm(str(MODEL_DIR), answer_reward, args, train_dataset=rows_of(task, "train", 32), **TASKS[task])
    found = trainer.roll_out(rows_of(task, "heldout", 8), SamplingParams(max_tokens=MAX_TOKENS, seed=1), 4)
    turns = [rollout.completion.turns for rollout in found if rollout.completion.turns is not None]
    assert len(turns) == len(found) == 32
    assert sum(its.num_calls for its in turns) > 16
    pictures = sum(len(prompt.images) for rollout in found for prompt in rollout.shown[1:])
    assert (pictures > 16) == (task == "zoom")
    with torch.no_grad():
        scores = trainer.scorer.score(trainer.model, trainer.scorer.join(trainer.model, found)).logprobs
    for rollout, row in zip(found, scores, strict=True):
        own = torch.tensor(rollout.completion.logprobs)
        torch.testing.assert_close(row[: len(own)].detach(), own, atol=1e-4, rtol=1e-4)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2
    assert all(log["tools/call_frequency"] > 0.5 for log in logs)
    if kind.startswith("vllm"):
        assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 1e-3
    trainer.generator.close()
