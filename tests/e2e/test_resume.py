"""A run that was stopped and resumed gives the weights of the run that was never stopped, bit for bit."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from training_runs import make_trainer, rows, variety

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


def check_resume(algorithm: str, folder: Path, stops: list[int], **options: Any) -> None:
    options = ROUNDS | options
    whole = make_trainer(algorithm, folder / "whole", **options)
    whole.train()
    expected = final_weights(whole)
    for stop in stops:
        copied = folder / f"stopped_{stop}" / f"checkpoint-{stop}"
        shutil.copytree(folder / "whole" / f"checkpoint-{stop}", copied)
        resumed = make_trainer(algorithm, copied.parent, **options)
        resumed.train(resume_from_checkpoint=str(copied))
        for name, value in final_weights(resumed).items():
            assert torch.equal(value, expected[name]), (stop, name)
        tail = [log for log in whole.state.log_history if "loss" in log and log["step"] > stop]
        again = [log for log in resumed.state.log_history if "loss" in log and log["step"] > stop]
        assert [log["loss"] for log in tail] == [log["loss"] for log in again]
        assert [log["epoch"] for log in tail] == [log["epoch"] for log in again]
        assert whole.state.num_input_tokens_seen == resumed.state.num_input_tokens_seen


def test_grpo_resumes_from_any_step_with_pictures(tmp_path: Path) -> None:
    check_resume("grpo", tmp_path, [1, 2, 3, 4, 5], data=rows(12))


def test_rloo_resumes_with_pictures(tmp_path: Path) -> None:
    check_resume("rloo", tmp_path, [1, 4], data=Dataset.from_list([{**row, "n": row["n"]} for row in rows(12)]))


def test_a_stream_resumes(tmp_path: Path) -> None:
    def stream() -> Iterator[dict[str, Any]]:
        yield from rows(12)

    check_resume("grpo", tmp_path, [1, 3, 4], data=IterableDataset.from_generator(stream))


def test_a_run_with_random_rewards_resumes(tmp_path: Path) -> None:
    def noisy(completions: list[Any], **kwargs: Any) -> list[float]:
        return torch.rand(len(completions)).tolist()

    check_resume("grpo", tmp_path, [2, 3, 4], reward=noisy, model="text", data=rows(12, "text"))


def test_a_lora_run_resumes(tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    check_resume("grpo", tmp_path, [1, 3], peft_config=lora, data=rows(12))


def test_a_checkpoint_inside_a_round_without_its_rollouts_is_refused(tmp_path: Path) -> None:
    make_trainer("grpo", tmp_path, **ROUNDS, data=rows(12)).train()
    (tmp_path / "checkpoint-1" / "rollouts_rank0.json").unlink()
    with pytest.raises(ValueError, match="lacks its rollouts"):
        make_trainer("grpo", tmp_path, **ROUNDS, data=rows(12)).train(str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_loads_with_plain_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    trainer = make_trainer("grpo", tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "checkpoint-1")
    expected = final_weights(trainer)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name])
    assert type(AutoProcessor.from_pretrained(tmp_path / "checkpoint-1")) is type(trainer.processing_class)
    assert variety([[{"role": "assistant", "content": "aab"}]]) == [0.2]


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    def falling(completions: list[Any], trainer_state: Any) -> list[float]:
        return [value - 10 * trainer_state.global_step for value in variety(completions)]

    trainer = make_trainer(
        "grpo",
        tmp_path,
        reward=falling,
        eval_dataset=rows(4),
        per_device_eval_batch_size=4,
        max_steps=3,
        learning_rate=0.02,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
    )
    trainer.train()
    rewards = {log["step"]: log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log}
    assert max(rewards, key=lambda step: rewards[step]) == 1
    expected = type(trainer.model).from_pretrained(tmp_path / "checkpoint-1")  # pyright: ignore
    current = final_weights(trainer)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, current[name])
