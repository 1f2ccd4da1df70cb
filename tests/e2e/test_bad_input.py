"""Wrong use of the trainers ends in one clear sentence that names the row, the column or the option, and the fix."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_models import picture, tiny, tokenizer, user
from training_runs import ALGORITHMS, make_trainer, rows, variety
from vlmroll import GRPOConfig, GRPOTrainer, RLOOConfig, ScriptedGenerator
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


def by_position(completions: list[Any], /) -> list[float]:
    return [0.0] * len(completions)


def asks_for_solution(completions: list[Any], solution: list[Any]) -> list[float]:
    return [0.0] * len(completions)


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
            r"tools\[0\] is <built-in function len>",
        ),
        "tokenizer for a model with pictures": (
            lambda folder: GRPOTrainer(
                copy.deepcopy(tiny("qwen3_vl").model), variety, GRPOConfig(str(folder)), processing_class=tokenizer()
            ),
            "give the model's processor",
        ),
        "reward that asks for a missing column": (
            lambda folder: make_trainer("grpo", folder, reward=asks_for_solution).train(),
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
        "rewards in a dict": (lambda folder: make_trainer("grpo", folder, reward={"a": variety}), r"reward_funcs\[0\]"),
        "weight that is no number": (
            lambda folder: make_trainer("grpo", folder, reward_weights=[float("nan")]),
            "list of finite numbers",
        ),
        "reward by position": (
            lambda folder: make_trainer("grpo", folder, reward=by_position).train(),
            "by position only",
        ),
        "dataset given by name": (lambda folder: make_trainer("grpo", folder, data="org/rows"), "load_dataset"),
        "generator object as dataset": (lambda folder: make_trainer("grpo", folder, data=iter(rows(4))), "read once"),
        "splits instead of a split": (
            lambda folder: make_trainer("grpo", folder, data={"train": rows(4)}),
            "give one split",
        ),
        "empty dataset": (lambda folder: make_trainer("grpo", folder, data=[]).train(), "has no rows"),
        "empty evaluation set": (
            lambda folder: make_trainer("grpo", folder, eval_dataset=[]).evaluate(),
            "needs an eval_dataset with rows",
        ),
        "frozen model": (
            lambda folder: make_trainer("grpo", folder, wrap=lambda base: base.requires_grad_(False)),  # pyright: ignore
            "no trainable parameters",
        ),
        "processor for a text model": (
            lambda folder: GRPOTrainer(
                copy.deepcopy(tiny("text").model),
                variety,
                GRPOConfig(str(folder)),
                processing_class=tiny("qwen3_vl").processor,
            ),
            "takes no pictures",
        ),
        "checkpoint that is not there": (
            lambda folder: make_trainer("grpo", folder).train(resume_from_checkpoint="/no/such/folder"),
            "no checkpoint folder",
        ),
        "dict as peft_config": (lambda folder: make_trainer("grpo", folder, peft_config={"r": 2}), "LoraConfig"),
        "prompt longer than the context": (
            lambda folder: make_trainer("grpo", folder, max_completion_length=32760).train(),
            r"row \d+, column 'prompt': it has .* tokens .* at most 8 may be",
        ),
        "completions longer than the context": (
            lambda folder: make_trainer("grpo", folder, max_completion_length=32768),
            "leaves no room for a prompt in the model's 32768 positions",
        ),
        "text for a switch": (
            lambda folder: GRPOConfig(str(folder), shuffle_dataset="false"),  # pyright: ignore
            "must be bool",
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


def test_an_async_reward_that_exits_does_not_hang(tmp_path: Path) -> None:
    async def leaves(completions: list[Any]) -> list[float]:
        raise SystemExit(3)

    async def works(completions: list[Any]) -> list[float]:
        return variety(completions)

    with pytest.raises(SystemExit) as caught:
        make_trainer("grpo", tmp_path, model="text", reward=leaves).train()
    assert "in reward function 'leaves'" in caught.value.__notes__
    make_trainer("grpo", tmp_path, model="text", reward=works).train()


def test_a_generator_that_returns_too_few_completions_is_refused(tmp_path: Path) -> None:
    class Lazy(ScriptedGenerator):
        def generate(self, prompts: Any, sampling: Any, num_generations: int) -> Any:
            return super().generate(prompts, sampling, num_generations - 1)

    with pytest.raises(ValueError, match="row .: 3 completions came back where 4 were asked for"):
        make_trainer("grpo", tmp_path, model="text", generator=Lazy([[7], [8, 9]])).train()


def test_a_reward_that_changes_its_input_changes_nothing_else(tmp_path: Path) -> None:
    data = [{"prompt": user(f"how many ? {i}"), "n": i, "tags": ["a"]} for i in range(8)]
    before = copy.deepcopy(data)

    def greedy(prompts: list[Any], completions: list[Any], tags: list[Any]) -> list[float]:
        assert all(len(prompt) == 1 for prompt in prompts)
        assert all(tag == ["a"] for tag in tags)
        for prompt, completion, tag in zip(prompts, completions, tags, strict=True):
            prompt.extend(completion)
            tag.clear()
        completions.clear()
        return [0.0] * len(prompts)

    make_trainer("grpo", tmp_path, model="text", reward=[greedy, variety], data=data, max_steps=8).train()
    assert data == before


def test_rewards_far_from_zero_keep_their_differences(tmp_path: Path) -> None:
    def shifted(completions: list[Any]) -> list[float]:
        return [1e8 + value for value in variety(completions)]

    near, far = (make_trainer("grpo", tmp_path, model="text", reward=reward) for reward in (variety, shifted))
    for trainer in (near, far):
        trainer.train()
    shares = [[log["grad_norm"] for log in t.state.log_history if "grad_norm" in log] for t in (near, far)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("reward", 1.0, "metric of the trainer itself"), ("rewards/x", 1.0, "metric of the"), ("mine", None, "a number")],
)
def test_a_logged_metric_cannot_falsify_the_trainers(name: str, value: Any, message: str, tmp_path: Path) -> None:
    def logs(completions: list[Any], log_metric: Callable[[str, Any], None]) -> list[float]:
        log_metric(name, value)
        return variety(completions)

    with pytest.raises(ValueError, match=message):
        make_trainer("grpo", tmp_path, model="text", reward=logs).train()


def test_columns_of_the_table_are_nobody_elses(tmp_path: Path) -> None:
    def prompt(completions: list[Any]) -> list[float]:
        return variety(completions)

    trainer = make_trainer("grpo", tmp_path, model="text", reward=prompt)
    assert trainer.rewards.names == ["prompt_2"]

    def extra(completions: list[Any], log_extra: Callable[[str, Any], None]) -> list[float]:
        log_extra("advantage", completions)
        return variety(completions)

    with pytest.raises(ValueError, match="has a column 'advantage' of its own"):
        make_trainer("grpo", tmp_path, model="text", reward=extra).train()


def test_a_column_named_completion_reaches_the_rewards_and_completions_is_refused(tmp_path: Path) -> None:
    def reads(completions: list[Any], completion: list[str]) -> list[float]:
        assert set(completion) == {"reference"}
        return variety(completions)

    data = [{**row, "completion": "reference"} for row in rows(8, "text")]
    make_trainer("grpo", tmp_path, model="text", reward=reads, data=data).train()
    data = [{**row, "completions": "x"} for row in rows(8, "text")]
    with pytest.raises(ValueError, match="the column 'completions' has the name of an argument"):
        make_trainer("grpo", tmp_path, model="text", data=data).train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.1}, "beta=0.0, now it is 0.1"),
        ({"seed": 7}, "seed=42, now it is 7"),
        ({"data": rows(16, "text")[::-1]}, "its prompt is not the one"),
        ({"max_completion_length": 5}, "max_completion_length=6, now it is 5"),
    ],
    ids=str,
)
def test_a_round_does_not_go_on_with_other_options_or_rows(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model": "text", "steps_per_generation": 4, "num_generations": 2, "max_steps": 3}
    options |= {"save_strategy": "steps", "save_steps": 1, "shuffle_dataset": False}
    make_trainer("grpo", tmp_path, **options).train()
    with pytest.raises(ValueError, match=message):
        make_trainer("grpo", tmp_path, **{**options, **change}).train(str(tmp_path / "checkpoint-1"))


def test_a_run_after_a_failed_one_starts_with_clean_logs(tmp_path: Path) -> None:
    fails = [True]

    def unlucky(completions: list[Any], log_extra: Callable[[str, Any], None]) -> list[float]:
        log_extra("note", ["x"] * len(completions))
        if fails.pop() if fails else False:
            raise ConnectionError("the judge is away")
        return variety(completions)

    trainer = make_trainer("grpo", tmp_path, model="text", reward=unlucky, log_completions=True)
    with pytest.raises(ConnectionError, match="away"):
        trainer.train()
    trainer.train()
