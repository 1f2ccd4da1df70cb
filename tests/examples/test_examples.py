"""Every example runs without arguments' help, offline, and ends with its line of JSON."""

from pathlib import Path

import pytest

from example_runs import run_example

ROOT = Path(__file__).parents[2]
ACCURACY = {"accuracy_before", "accuracy_after", "seconds", "steps", "seed"}
REWARD = {"reward_before", "reward_after", "seconds", "steps", "seed"}


@pytest.mark.parametrize(
    ("script", "keys"),
    [("grpo_multi_image", ACCURACY), ("rloo_multi_image", ACCURACY), ("own_loop", ACCURACY), ("grpo_text", REWARD)],
)
def test_an_example_ends_with_a_line_of_json(script: str, keys: set[str], tmp_path: Path) -> None:
    result = run_example(script, "--seed", "1", folder=tmp_path)
    assert set(result) == keys
    assert (result["steps"], result["seed"]) == (2, 1)


def test_the_hand_written_loop_is_short() -> None:
    assert len((ROOT / "examples" / "own_loop.py").read_text().splitlines()) <= 100
