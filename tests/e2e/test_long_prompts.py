"""`max_prompt_length` and `long_prompts` in real runs: nothing is cut, other rows are as they were."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import picture, tiny, user
from training_runs import make_trainer, variety
from vlmroll_processors import PromptTooLong, load_adapter

SHORT = {"prompt": user("which digit ?", picture(64, 48, 1))}  # 33 tokens
LONG = {"prompt": user("what is the sum of", picture(120, 40, 2), picture(40, 100, 3), picture(64, 64, 4))}  # 72
TEXT = {"prompt": user("how many dots ? 7")}
LIMIT = 40
ROWS = [{**(LONG if i in (1, 2, 5) else TEXT if i == 4 else SHORT), "n": i} for i in range(8)]


def seen(trainer: Any) -> list[int]:
    """Numbers of the rows that a run's first steps were trained on, kept by the reward function."""
    return trainer.rows_seen


def run(folder: Path, policy: str, **options: Any) -> Any:
    rows: list[int] = []

    def reward(completions: Any, n: list[int], **kwargs: Any) -> list[float]:
        rows.extend(dict.fromkeys(n))
        return [len(set(c[0]["content"])) / 10 for c in completions]

    defaults: dict[str, Any] = {"shuffle_dataset": False, "max_prompt_length": LIMIT, "long_prompts": policy}
    trainer = make_trainer("grpo", folder, reward=reward, data=ROWS, **{**defaults, **options})
    trainer.rows_seen = rows  # pyright: ignore[reportAttributeAccessIssue]
    return trainer


def test_a_long_prompt_stops_the_run_by_default(tmp_path: Path) -> None:
    trainer = run(tmp_path, "raise")
    with pytest.raises(
        PromptTooLong, match=r"^row 1, column 'prompt': it has 72 tokens \(\d+ of pictures .* at most 40"
    ):
        trainer.train()


def test_skipped_rows_are_counted_and_others_take_their_places(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run(tmp_path, "skip", max_steps=4)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    rounds = [seen(trainer)[i : i + 2] for i in range(0, 8, 2)]
    assert not {1, 2, 5}.intersection(seen(trainer)), "the long ones are never trained on"
    assert [chosen[0] for chosen in rounds[::3]] == [0, 6], "rows that fit stay in their rounds"
    counts = [log["prompts/num_skipped"] for log in trainer.state.log_history if "prompts/num_skipped" in log]
    assert sum(counts) == sum("skipped: row" in record.message for record in caplog.records) > 0
    assert all(log["prompts/max_length"] <= LIMIT for log in trainer.state.log_history if "loss" in log)


def test_a_run_that_skips_goes_on_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4, "max_steps": 4}
    whole = run(tmp_path / "whole", "skip", **options)
    whole.train()
    again = run(tmp_path / "whole", "skip", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for name, weight in whole.model.state_dict().items():
        assert weight.equal(again.model.state_dict()[name]), name


def test_shrunk_pictures_leave_other_rows_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = load_adapter(tiny("qwen2_5_vl").processor).encode(ROWS)
    adapter = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=LIMIT, long_prompts="shrink")
    with caplog.at_level(logging.WARNING):
        shrunk = adapter.encode(ROWS)
    told = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in told] == ["row 1", "row 2", "row 5"]
    assert "since it had 72 tokens" in told[0]
    for before, after in zip(plain, shrunk, strict=True):
        assert after.num_tokens <= LIMIT
        assert len(after.images) == len(before.images)
        if before.num_tokens <= LIMIT:
            assert after.prompt_ids == before.prompt_ids
            assert [p.resize for p in after.images] == [p.resize for p in before.images]
            for name, tensor in before.forward_kwargs.items():
                assert after.forward_kwargs[name].equal(tensor)
        else:
            (budget,) = {dict(p.resize)["max_pixels"] for p in after.images}
            assert all(budget < p.size[0] * p.size[1] for p in after.images)
    trainer = run(tmp_path, "shrink", max_steps=4)
    trainer.train()
    assert seen(trainer) == list(range(8))
    assert all(log["prompts/max_length"] <= LIMIT for log in trainer.state.log_history if "loss" in log)


def test_what_is_shrunk_never_grows_and_keeps_within_the_run_s_budget() -> None:
    small = {"type": "image", "image": picture(300, 300, 2), "resized_height": 16, "resized_width": 16}
    row = {"prompt": [{"role": "user", "content": [{"type": "image", "image": picture(600, 600, 1)}, small]}]}
    for most in (None, 2000):
        plain = load_adapter(tiny("qwen2_5_vl").processor, max_pixels=most).encode([row])[0]
        limit = plain.num_tokens - 2
        shrinking = load_adapter(
            tiny("qwen2_5_vl").processor, max_pixels=most, max_prompt_length=limit, long_prompts="shrink"
        )
        (found,) = shrinking.encode([row])
        before, after = ([span.length for span in prompt.image_spans] for prompt in (plain, found))
        assert after[0] < before[0]
        assert after[1] == before[1]
        assert dict(found.images[0].resize)["max_pixels"] < (most or 600 * 600)


def test_text_that_is_too_long_cannot_be_shrunk() -> None:
    adapter = load_adapter(tiny("qwen2_5_vl").processor, max_prompt_length=LIMIT, long_prompts="shrink")
    for row in ({"prompt": user("digit " * 60)}, {"prompt": user("digit " * 60, picture(64, 48, 1))}):
        with pytest.raises(PromptTooLong, match=r"^row 5, .* cannot be shrunk enough; shorten it"):
            adapter.encode([row], [5])


def test_evaluation_leaves_long_rows_out(tmp_path: Path) -> None:
    trainer = run(tmp_path, "skip", eval_dataset=ROWS[:6], per_device_eval_batch_size=4, num_generations_eval=4)
    found = trainer.evaluate()
    assert found["eval_prompts/num_skipped"] == 3
    assert found["eval_prompts/max_length"] <= LIMIT
    assert sorted(seen(trainer)) == [0, 3, 4]
    nothing = run(tmp_path / "n", "skip", eval_dataset=[{**LONG, "n": 0}], num_generations_eval=4).evaluate()
    assert nothing["eval_prompts/num_skipped"] == 1
    assert torch.tensor(nothing["eval_loss"]) == 0


def test_the_model_s_positions_are_a_limit_too(tmp_path: Path) -> None:
    def short(model: Any) -> Any:
        model.config.get_text_config().max_position_embeddings = LIMIT + 6
        return model

    trainer = run(tmp_path, "skip", max_prompt_length=None, wrap=short, max_steps=2)
    trainer.train()
    assert not {1, 2, 5}.intersection(seen(trainer))


def test_an_adapter_brings_its_own_limit(tmp_path: Path) -> None:
    from vlmroll import GRPOConfig, GRPOTrainer

    made = tiny("qwen2_5_vl")
    options: dict[str, Any] = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_prompt_length": 9}, "max_prompt_length is set and processing_class is an adapter"),
        ({"long_prompts": "shrink"}, "long_prompts is set and processing_class is an adapter"),
        ({"long_prompts": "skip"}, "the adapter has no max_prompt_length"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            GRPOTrainer(
                made.model,
                variety,
                GRPOConfig(**options, **given),
                train_dataset=ROWS,
                processing_class=load_adapter(made.processor),
            )
