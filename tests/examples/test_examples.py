"""Every example runs without arguments' help, offline, and ends with its line of JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACCURACY = {"accuracy_before", "accuracy_after", "seconds", "steps", "seed"}
REWARD = {"reward_before", "reward_after", "seconds", "steps", "seed"}


@pytest.mark.parametrize(
    ("script", "keys"),
    [("grpo_multi_image", ACCURACY), ("rloo_multi_image", ACCURACY), ("own_loop", ACCURACY), ("grpo_text", REWARD)],
)
def test_an_example_ends_with_a_line_of_json(script: str, keys: set[str], tmp_path: Path) -> None:
    paths = os.pathsep.join(str(ROOT / name) for name in ("sdk", "processors"))
    command = [sys.executable, str(ROOT / "examples" / f"{script}.py"), "--steps", "2", "--seed", "1"]
    run = subprocess.run(
        [*command, "--output-dir", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert set(result) == keys
    assert (result["steps"], result["seed"]) == (2, 1)
    assert {path.name for path in tmp_path.iterdir()} <= {"out"}


def test_the_hand_written_loop_is_short() -> None:
    assert len((ROOT / "examples" / "own_loop.py").read_text().splitlines()) <= 100
