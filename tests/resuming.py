"""Runs that are stopped and resumed, against those that are not, for several test files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from training_runs import make_trainer

# A round lasts 2 optimizer steps and is used twice, so a stop may fall between and inside rounds.
ROUNDS: dict[str, Any] = {
    "max_steps": 6,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "num_generations": 2,
    "beta": 0.05,
    "save_strategy": "steps",
    "save_steps": 1,
}


def final_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def check_resume(
    algorithm: str, folder: Path, stops: list[int], *, fresh: Callable[[], dict[str, Any]] = dict, **options: Any
) -> None:
    """Compare runs; `fresh` makes those options that each run needs of its own."""
    options = ROUNDS | options
    whole = make_trainer(algorithm, folder / "whole", **fresh(), **options)
    whole.train()
    expected = final_weights(whole)
    for stop in stops:
        copied = folder / f"stopped_{stop}" / f"checkpoint-{stop}"
        shutil.copytree(folder / "whole" / f"checkpoint-{stop}", copied)
        resumed = make_trainer(algorithm, copied.parent, **fresh(), **options)
        resumed.train(resume_from_checkpoint=str(copied))
        for name, value in final_weights(resumed).items():
            assert torch.equal(value, expected[name]), (stop, name)
        tail = [log for log in whole.state.log_history if "loss" in log and log["step"] > stop]
        again = [log for log in resumed.state.log_history if "loss" in log and log["step"] > stop]
        assert [log["loss"] for log in tail] == [log["loss"] for log in again]
        assert [log["epoch"] for log in tail] == [log["epoch"] for log in again]
        assert whole.state.num_input_tokens_seen == resumed.state.num_input_tokens_seen
