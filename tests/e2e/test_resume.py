"""A run that was stopped and resumed gives the weights of the run that was never stopped, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from resuming import ROUNDS, check_resume, final_weights
from training_runs import make_trainer, rows, variety


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
