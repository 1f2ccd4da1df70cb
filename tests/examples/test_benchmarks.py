"""The benchmarks against TRL and against a bare loop, with tiny models and few tokens."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import against_trl
import limit
import workloads
from against_trl import SCALING, Measured, check_work, draw, table
from random_models import build_model, build_processor, build_tokenizer
from vlmroll.bench import Run
from vlmroll_processors import load_adapter
from workloads import SIDES, WORKLOADS, Workload, make_rows, make_trainer, tiny

HERE = ("w1", "w2", "w3", "w5-g2", "w5-p1", "w5-p8-g16")


class StepClock(TrainerCallback):
    """Keeps the seconds of each step."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as the script does; TRL would load it


def run_side(workload: Workload, side: str, folder: Path) -> Run:
    """Train for two rounds in this process, and the run as the recorder would describe it."""
    steps = 2 * workload.iterations
    trainer = make_trainer(workload, side, steps=steps, seed=0, folder=str(folder))
    clock = StepClock()
    trainer.add_callback(clock)
    trainer.train()
    seconds = [later - earlier for earlier, later in zip(clock.ends, clock.ends[1:], strict=False)]
    training = {"first_step": 1, "step_seconds": seconds, "logs": trainer.state.log_history, "configuration": {}}
    return Run(side=side, seed=0, repeat=0, warmup_steps=workload.iterations, record={"trainings": [training]})


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", HERE)
@pytest.mark.usefixtures("without_vllm")
def test_a_side_does_the_work_of_its_workload(name: str, side: str, tmp_path: Path) -> None:
    if side == "trl":
        pytest.importorskip("trl")
    workload = tiny(WORKLOADS[name])
    run = run_side(workload, side, tmp_path)
    check_work(run, workload, 2 * workload.iterations)
    passes = [log[workloads.PASS] for log in run.training["logs"] if workloads.PASS in log]
    assert all(
        0 < seconds < step for seconds, (_, step) in zip(passes[workload.iterations :], run.step_seconds, strict=True)
    )
    more = replace(workload, text_tokens=workload.text_tokens + 1)
    with pytest.raises(ValueError, match="tokens of prompts and completions"):
        check_work(run, more, 2 * workload.iterations)


@pytest.mark.vllm
@pytest.mark.parametrize("side", SIDES)
def test_a_side_generates_with_vllm(side: str) -> None:
    if side == "trl":
        pytest.importorskip("trl")
    options = ["--workload", "w4", "--tiny", "--steps", "2", "--side", side]
    done = subprocess.run([sys.executable, workloads.__file__, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    tokens = tiny(WORKLOADS["w4"]).warmup.num_tokens + tiny(WORKLOADS["w4"]).num_tokens
    assert f"'num_tokens': '{tokens}'" in done.stdout
    assert "sampling/sampling_logp_difference/mean" in done.stdout


def test_workloads_have_the_sizes_that_they_claim() -> None:
    w1, w2 = WORKLOADS["w1"], WORKLOADS["w2"]
    tokenizer = build_tokenizer(w1.shape.vocabulary)
    assert len(tokenizer) == 4096
    assert build_model(w1.shape, tokenizer, 0).num_parameters() == pytest.approx(29e6, rel=0.02)
    for workload in (w1, WORKLOADS["w3"], WORKLOADS["w5-p8-g16"]):
        rows = make_rows(workload, 1, 0)
        prompts = load_adapter(build_processor(tokenizer)).encode(rows)
        tokens = sum(prompt.num_tokens for prompt in prompts) + len(prompts) * workload.new_tokens
        assert workload.num_tokens == workload.num_generations * tokens
        assert [len(prompt.images) for prompt in prompts] == [len(sizes) for sizes in workload.prompts]
    assert w1.num_tokens == 8 * (532 + 64)
    tokenizer = build_tokenizer(w2.shape.vocabulary)
    assert build_model(w2.shape, tokenizer, 0).num_parameters() == pytest.approx(32e6, rel=0.02)
    (prompt,) = load_adapter(tokenizer).encode(make_rows(w2, 1, 0))
    assert prompt.num_tokens == 256


def test_seeds_make_weights_and_pictures() -> None:
    workload = tiny(WORKLOADS["w1"])
    tokenizer = build_tokenizer(workload.shape.vocabulary)

    def made(seed: int) -> tuple[torch.Tensor, bytes, str]:
        weight = next(build_model(workload.shape, tokenizer, seed).parameters())
        (row,) = make_rows(workload, 1, seed)
        return weight, row["images"][0].tobytes(), row["prompt"][0]["content"]

    (weight, picture, text), again, other = made(0), made(0), made(1)
    assert torch.equal(weight, again[0])
    assert (picture, text) == again[1:]
    assert not torch.equal(weight, other[0])
    assert picture != other[1]
    assert text != other[2]
    first, second = make_rows(workload, 2, 0)
    assert first["images"][0].tobytes() != second["images"][0].tobytes()


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_the_bare_loop_has_the_same_gradients(name: str, tmp_path: Path) -> None:
    workload = tiny(WORKLOADS[name])
    trainer = make_trainer(workload, "vlmroll", steps=1, seed=0, folder=str(tmp_path))
    found = limit.make_round(trainer, workload, 0)
    bare = limit.Bare(trainer.model, trainer.processing_class, found)
    assert limit.gradient_difference(trainer, bare, found.rollouts) < 1e-4
    other = replace(found, advantages=found.advantages.roll(1))
    bare = limit.Bare(trainer.model, trainer.processing_class, other)
    assert limit.gradient_difference(trainer, bare, found.rollouts) > 1e-2


def test_the_limit_is_measured_in_turn() -> None:
    found = limit.measure(tiny(WORKLOADS["w1"]), repeats=2, seed=0)
    assert found["gradients, relative difference"] < 1e-4
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert set(found["seconds"]) == {
        *("ours, whole step", "ours, training pass"),
        *("bare, processing", "bare, generation", "bare, training pass", "bare, optimizer"),
    }
    assert all(ratio["least"] <= ratio["median"] <= ratio["most"] for ratio in found["ours / bare"].values())


def test_ratios_of_the_limit_are_of_pairs() -> None:
    parts = {"bare, processing": 1.0, "bare, generation": 2.0, "bare, training pass": 5.0, "bare, optimizer": 2.0}
    step = {**parts, "ours, whole step": 12.0, "ours, training pass": 6.0}
    assert limit.ratios([step]) == {
        "training pass": [1.2],
        "whole step": [1.2],
        "whole step, bare without optimizer": [1.5],
    }


def test_a_table_and_a_picture_of_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quantities = {
        "seconds per step": Measured(vlmroll=(1.0, 2.0, 4.0), trl=(6.0, 10.0, 12.0)),
        "peak memory in MiB": Measured(vlmroll=(1500.0,) * 3, trl=(3000.0,) * 3),
    }
    results = dict.fromkeys(SCALING, quantities)
    lines = table(results).splitlines()
    assert "| w1 | seconds per step | 2 | 10 | 5.00 | 3.00 to 6.00 |" in lines
    assert "| w1 | peak memory in MiB | 1500 | 3000 | 2.00 | 2.00 to 2.00 |" in lines
    draw(results, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.distributed
def test_the_command_compares_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    command = [sys.executable, against_trl.__file__, "--out", str(tmp_path), "--tiny", "--repeats", "1", "w2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| w2 | seconds per step |" in done.stdout
    found = json.loads((tmp_path / "against_trl.json").read_text())
    assert set(found["w2"]) == {"seconds per step", "seconds of the training pass", "peak memory in MiB"}
    assert (tmp_path / "w2" / "report.md").is_file()
