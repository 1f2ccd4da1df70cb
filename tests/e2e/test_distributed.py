"""Two processes on one global batch give the gradients and the metrics of one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from training_runs import ALGORITHMS, relative_difference

ROOT = Path(__file__).parents[2]


def run(launcher: list[str], algorithm: str, model: str, file: Path, *more: str) -> dict[str, Any]:
    """The gradients and numbers of a run of tests/distributed_run.py."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("sdk", "processors", "tests"))
    script = str(ROOT / "tests" / "distributed_run.py")
    command = [sys.executable, *launcher, script, algorithm, model, str(file), *more]
    environment = {**os.environ, "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(file)


@pytest.mark.distributed
@pytest.mark.parametrize(("algorithm", "model"), [("grpo", "qwen2_5_vl"), ("rloo", "qwen2_5_vl"), ("grpo", "text")])
def test_two_processes_give_the_gradients_of_one(algorithm: str, model: str, tmp_path: Path) -> None:
    """The four rows hold 1, 3, 0 and 2 pictures, so the processes see different numbers of them."""
    alone = run([], algorithm, model, tmp_path / "alone.pt")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    together = run(torchrun, algorithm, model, tmp_path / "together.pt")
    assert relative_difference(alone["gradients"], together["gradients"]) < 1e-4
    assert alone["numbers"] == pytest.approx(together["numbers"], rel=1e-5)


@pytest.mark.distributed
def test_processes_may_run_their_micro_steps_in_different_numbers_of_pieces(tmp_path: Path) -> None:
    alone = run([], "grpo", "qwen2_5_vl", tmp_path / "alone.pt")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    together = run(torchrun, "grpo", "qwen2_5_vl", tmp_path / "together.pt", "60")
    assert relative_difference(alone["gradients"], together["gradients"]) < 1e-4


@pytest.mark.distributed
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_process_may_have_all_pictures_from_tools(algorithm: str, tmp_path: Path) -> None:
    alone = run([], algorithm, "qwen2_5_vl", tmp_path / "alone.pt", "", "tools")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    together = run(torchrun, algorithm, "qwen2_5_vl", tmp_path / "together.pt", "", "tools")
    assert relative_difference(alone["gradients"], together["gradients"]) < 1e-4
    assert alone["numbers"] == pytest.approx(together["numbers"], rel=1e-5)
    assert alone["numbers"]["tools/call_frequency"] == 0.25
