"""Wrong use of the trainers ends in one clear sentence that names the row, the column or the option, and the fix."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_models import picture, tiny, tokenizer, user
from training_runs import ALGORITHMS, make_trainer, rows, variety
from vlmroll import GRPOConfig, GRPOTrainer, RLOOConfig
from vlmroll_processors import load_adapter

CHAT = [{"role": "user", "content": "which ?"}]


def bad_rows() -> dict[str, tuple[dict[str, Any], str]]:
    """A bad row and the sentence that it must end in, by what is wrong."""
    slot = {"type": "image"}
    return {
        "missing picture file": (
            {"prompt": CHAT, "images": ["/no/such.png"]},
            r"row 2, column 'images'\[0\].*no picture",
        ),
        "broken picture": ({"prompt": CHAT, "image": b"\x89PNG broken"}, r"row 2, column 'image'.*cannot be read"),
        "more pictures than slots": (
            {"prompt": [{"role": "user", "content": [slot]}], "images": [picture(32, 32, 1)] * 2},
            r"row 2.*2 pictures.*1 empty image slots",
        ),
        "fewer pictures than slots": (
            {"prompt": [{"role": "user", "content": [slot, slot]}], "images": [picture(32, 32, 1)]},
            r"row 2.*1 pictures.*2 empty image slots",
        ),
        "unknown role": ({"prompt": [{"role": "robot", "content": "hi"}]}, r"row 2.*unknown role 'robot'"),
        "unknown part": (
            {"prompt": [{"role": "user", "content": [{"type": "smell"}]}]},
            r"row 2.*unknown part type 'smell'",
        ),
        "prompt of a wrong type": ({"prompt": 7}, r"row 2, column 'prompt'.*int"),
        "no prompt": ({"question": "hi"}, r"row 2, column 'prompt'.*missing"),
        "reserved text": ({"prompt": user("see <|image_pad|>")}, r"row 2.*reserved <\|image_pad\|>"),
        "strange picture": ({"prompt": CHAT, "images": [picture(2, 900, 1)]}, r"row 2.*2x900"),
    }


@pytest.mark.parametrize("what", bad_rows())
def test_a_bad_row_is_named(what: str, tmp_path: Path) -> None:
    row, message = bad_rows()[what]
    data = [*rows(2), {**row, "n": 2}, *rows(1)]
    trainer = make_trainer("grpo", tmp_path, data=data, shuffle_dataset=False, per_device_train_batch_size=8)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def wrong_calls() -> dict[str, tuple[Callable[[Path], Any], str]]:
    """A wrong call and the sentence that it must end in, by what is wrong."""
    return {
        "batch not divisible": (
            lambda folder: GRPOConfig(str(folder), per_device_train_batch_size=3, num_generations=2),
            r"num_generations.*(per_device_train_batch_size|gradient_accumulation_steps)",
        ),
        "unknown option": (
            lambda folder: RLOOConfig(str(folder), num_generation=2),  # pyright: ignore[reportCallIssue]
            "did you mean 'num_generations'",
        ),
        "unknown argument": (
            lambda folder: GRPOTrainer("model", variety, GRPOConfig(str(folder)), traindataset=[]),
            "did you mean 'train_dataset'",
        ),
        "tools": (
            lambda folder: GRPOTrainer("model", variety, GRPOConfig(str(folder)), tools=[len]),
            "not offered yet",
        ),
        "tokenizer for a model with pictures": (
            lambda folder: GRPOTrainer(
                copy.deepcopy(tiny("qwen3_vl").model), variety, GRPOConfig(str(folder)), processing_class=tokenizer()
            ),
            "give the model's processor",
        ),
        "reward that asks for a missing column": (
            lambda folder: make_trainer("grpo", folder, reward=lambda completions, solution: []).train(),
            "asks for 'solution', which is no column",
        ),
        "unknown generation setting": (
            lambda folder: make_trainer("grpo", folder, generation_kwargs={"eos_token_id": 3}),
            "'eos_token_id' is not offered",
        ),
        "adapter and pixel budget": (
            lambda folder: GRPOTrainer(
                copy.deepcopy(tiny("qwen3_vl").model),
                variety,
                GRPOConfig(str(folder), max_pixels=1024),
                processing_class=load_adapter(tiny("qwen3_vl").processor),
            ),
            "give it to load_adapter",
        ),
        "no reward": (lambda folder: make_trainer("grpo", folder, reward=[]), "reward_funcs is empty"),
        "config of another algorithm": (
            lambda folder: GRPOTrainer("model", variety, RLOOConfig(str(folder))),  # pyright: ignore
            "takes args of GRPOConfig",
        ),
        "weights of other length": (
            lambda folder: make_trainer("grpo", folder, reward_weights=[1.0, 2.0]),
            "reward_weights has 2 values for 1",
        ),
    }


@pytest.mark.parametrize("what", wrong_calls())
def test_a_wrong_call_says_what_to_write(what: str, tmp_path: Path) -> None:
    call, message = wrong_calls()[what]
    with pytest.raises((TypeError, ValueError), match=message):
        call(tmp_path)


def test_a_dataset_too_small_for_a_round_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 rows but one generation round takes 2 prompts"):
        make_trainer("grpo", tmp_path, data=rows(1)).train()


def test_training_without_rows_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path)
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="needs a train_dataset"):
        trainer.train()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_reward_function_that_returns_too_few_is_named(algorithm: str, tmp_path: Path) -> None:
    def lazy(completions: list[Any]) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="reward function 'lazy' returned 1 for 8 completions"):
        make_trainer(algorithm, tmp_path, reward=lazy).train()


def test_rows_without_any_reward_get_no_gradient_and_are_counted(tmp_path: Path) -> None:
    def silent(completions: list[Any]) -> list[None]:
        return [None] * len(completions)

    trainer = make_trainer("grpo", tmp_path, reward=silent, max_steps=1)
    trainer.train()
    (log,) = [log for log in trainer.state.log_history if "rewards/num_unscored" in log]
    assert log["rewards/num_unscored"] == 8
    assert log["loss"] == 0
    assert "reward" not in log  # nothing was measured
