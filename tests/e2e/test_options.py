"""Each option does what it says, seen in a real run."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from training_runs import ALGORITHMS, gradients, make_trainer, relative_difference, rows, short_words, variety
from vlmroll.modeling import eval_mode


def logged(trainer: Any, name: str) -> list[float]:
    """The values of a metric over the run."""
    return [log[name] for log in trainer.state.log_history if name in log]


def changed(trainer: Any, before: dict[str, torch.Tensor]) -> set[str]:
    """Names of the parameters that differ from before."""
    return {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_logs_under_the_names_that_people_know(algorithm: str, tmp_path: Path) -> None:
    trainer = make_trainer(algorithm, tmp_path, reward=[variety, short_words], beta=0.05)
    trainer.train()
    names = "completions/mean_length completions/min_length completions/max_length completions/clipped_ratio reward"
    names += " reward_std frac_reward_zero_std rewards/variety/mean rewards/variety/std rewards/short_words/mean"
    names += " entropy kl num_tokens step_time clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean"
    names += " clip_ratio/low_min clip_ratio/high_max loss grad_norm learning_rate"
    missing = [name for name in names.split() if len(logged(trainer, name)) < 2]
    assert not missing


def test_cispo_logs_its_clipping_under_its_own_name(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, loss_type="cispo", epsilon_high=0.5)
    trainer.train()
    shares = logged(
        trainer, "cispo_clip_ratio"
    )  # every ratio is 1, above the bound; half of the advantages is positive
    assert all(0.1 < share < 0.9 for share in shares)
    assert not logged(trainer, "clip_ratio/high_mean")


def test_the_vision_tower_is_frozen_on_request(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, freeze_vision_tower=True)
    before = weights(trainer)
    trainer.train()
    moved = changed(trainer, before)
    assert moved
    assert not any("visual" in name for name in moved)
    trainer = make_trainer("grpo", tmp_path)
    trainer.train()
    assert any("visual" in name for name in changed(trainer, before))


def test_freezing_the_vision_tower_of_a_text_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no vision tower"):
        make_trainer("grpo", tmp_path, model="text", freeze_vision_tower=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_lora_adapter_is_trained_against_its_base(algorithm: str, tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"])
    trainer = make_trainer(
        algorithm, tmp_path, peft_config=lora, beta=0.1, gradient_checkpointing=True, max_steps=3, learning_rate=0.02
    )
    before = weights(trainer)
    trainer.train()
    moved = changed(trainer, before)
    assert moved
    assert all("lora_" in name for name in moved)
    kl = logged(trainer, "kl")
    assert abs(kl[0]) < 1e-6  # a new adapter changes nothing
    assert abs(kl[-1]) > 1e-6
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_an_adapter_that_was_trained_before_is_its_own_reference(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from vlmroll.modeling import Reference

    base: Any = make_trainer("grpo", tmp_path).model
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    reference = Reference(model, new_adapter=False)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "mm_token_type_ids": torch.zeros(1, 3, dtype=torch.long)}
    with torch.no_grad(), eval_mode(model):
        trained = model(**inputs).logits
        with reference.using() as policy:
            assert torch.equal(policy(**inputs).logits, trained)
        for name, parameter in model.named_parameters():
            if ".default." in name:
                parameter.add_(1.0)
        with reference.using() as policy:
            assert torch.equal(policy(**inputs).logits, trained)
        assert not torch.allclose(model(**inputs).logits, trained)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable
    assert all(".default." in name for name in trainable)


def test_groups_without_variance_are_dropped_on_request(tmp_path: Path) -> None:
    def only_even(completions: Sequence[Any], n: Sequence[int], **kwargs: Any) -> list[float]:
        return [variety([c])[0] if i % 2 == 0 else 1.0 for c, i in zip(completions, n, strict=True)]

    options: dict[str, Any] = {"reward": only_even, "shuffle_dataset": False, "max_steps": 1, "loss_type": "dapo"}
    (kept,) = gradients("grpo", tmp_path, **options)
    (dropped,) = gradients("grpo", tmp_path, **options, drop_zero_variance_groups=True)
    # About half of the tokens leave the normaliser, and they had no gradient: the same direction, about twice as long.
    norms = [float(sum(g.pow(2).sum() for g in step.values()) ** 0.5) for step in (kept, dropped)]
    assert 1.5 < norms[1] / norms[0] < 2.5
    scaled = {name: norms[1] / norms[0] * gradient for name, gradient in kept.items()}
    assert relative_difference(scaled, dropped) < 1e-5


def test_truncated_completions_are_masked_on_request(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, mask_truncated_completions=True, max_completion_length=2)
    before = weights(trainer)
    trainer.train()  # a random model does not stop within two tokens
    assert logged(trainer, "completions/clipped_ratio") == [1.0, 1.0]
    assert [abs(loss) for loss in logged(trainer, "loss")] == [0.0, 0.0]
    assert not changed(trainer, before)


def test_evaluation_has_its_own_number_of_generations(tmp_path: Path) -> None:
    trainer = make_trainer(
        "grpo",
        tmp_path,
        eval_dataset=rows(5),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=2,
        num_generations_eval=1,
        log_completions=True,
    )
    trainer.train()
    first, second = logged(trainer, "eval_reward")
    assert first != second  # the policy moved, the sampling seeds of evaluation did not
    tables = sorted((tmp_path / "eval_completions").glob("*.parquet"))
    assert [len(Dataset.from_parquet(str(table))) for table in tables] == [5, 5]  # pyright: ignore
    again = trainer.evaluate()
    assert again["eval_reward"] == second


def test_a_stream_trains_like_the_rows_it_holds(tmp_path: Path) -> None:
    def stream() -> Iterator[dict[str, Any]]:
        yield from rows(8)

    listed = gradients("grpo", tmp_path, data=rows(8), shuffle_dataset=False)
    streamed = gradients("grpo", tmp_path, data=IterableDataset.from_generator(stream))
    for one, other in zip(listed, streamed, strict=True):
        assert relative_difference(one, other) < 1e-6


def test_rows_of_a_dataset_with_undecoded_pictures_train_like_a_list(tmp_path: Path) -> None:
    given = rows(8)
    for row in given:
        parts = row["prompt"][0]["content"]
        row["images"] = [part["image"] for part in parts if part["type"] == "image"]
        row["prompt"] = [{"role": "user", "content": parts[-1]["text"]}]
    listed = gradients("grpo", tmp_path, data=given, shuffle_dataset=False)
    stored = gradients("grpo", tmp_path, data=Dataset.from_list(given), shuffle_dataset=False)
    for one, other in zip(listed, stored, strict=True):
        assert relative_difference(one, other) == 0


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    first, again = (gradients("grpo", tmp_path, seed=3)[1] for _ in range(2))
    other = gradients("grpo", tmp_path, seed=4)[1]
    assert relative_difference(first, again) == 0
    assert relative_difference(first, other) > 0


def test_completions_and_their_pictures_are_written_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer("grpo", tmp_path, log_completions=True, num_completions_to_print=1, max_steps=1)
    trainer.train()
    (table,) = (tmp_path / "completions").glob("*.parquet")
    found = Dataset.from_parquet(str(table))
    assert {"step", "prompt", "completion", "variety", "advantage", "images"} <= set(found.column_names)  # pyright: ignore
    assert len(found) == 8
    counts = {len(pictures) for pictures in found["images"]}  # pyright: ignore
    assert counts <= {0, 1, 2, 3}
    assert max(counts) > 0
    assert "Step 1" in capsys.readouterr().out


def test_metrics_reach_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make_trainer("grpo", tmp_path, report_to=["tensorboard"])
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    assert len(events.Scalars("train/reward")) == 2
    assert events.Scalars("train/reward")[0].value == pytest.approx(logged(trainer, "reward")[0], rel=1e-6)


def test_a_sequence_classification_model_is_a_reward(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from tiny_models import randomise, tokenizer

    size: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = Qwen3Config(vocab_size=336, num_key_value_heads=2, head_dim=16, pad_token_id=0, **size)
    config.num_labels = 1
    randomise(Qwen3ForSequenceClassification(config)).save_pretrained(tmp_path / "judge")
    tokenizer().save_pretrained(tmp_path / "judge")
    trainer = make_trainer("grpo", tmp_path, reward=[str(tmp_path / "judge"), variety], reward_weights=[0.5, 2.0])
    trainer.train()
    (judge, variety_mean, total) = (
        logged(trainer, name)[0] for name in ("rewards/judge/mean", "rewards/variety/mean", "reward")
    )
    assert total == pytest.approx(0.5 * judge + 2 * variety_mean, rel=1e-5)
    assert json.dumps(trainer.state.log_history)


def test_bfloat16_trains_near_float32(tmp_path: Path) -> None:
    """Mixed precision on a CPU: every pass under autocast, the check of the model's head included."""
    (full,) = gradients("grpo", tmp_path, max_steps=1, beta=0.1)
    (mixed,) = gradients("grpo", tmp_path, max_steps=1, beta=0.1, bf16=True)
    assert 0 < relative_difference(full, mixed) < 0.3


def test_a_given_adapter_resumes_and_its_frozen_tower_stays_frozen(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def lora(base: Any) -> Any:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj", "qkv"], init_lora_weights=False)
        return get_peft_model(base, config)

    options: dict[str, Any] = {"beta": 0.1, "freeze_vision_tower": True, "wrap": lora, "max_steps": 3}
    options |= {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer("grpo", tmp_path, **options)
    before = weights(trainer)
    trainer.train()
    moved = changed(trainer, before)
    assert moved
    assert all(".default." in name and "visual" not in name for name in moved)
    resumed = make_trainer("grpo", tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = weights(trainer)
    assert not changed(resumed, expected)


def test_dropout_is_switched_off_on_request(tmp_path: Path) -> None:
    def noisy(base: Any) -> Any:
        for module in base.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        return base

    def same(base: Any) -> Any:
        return base

    options: dict[str, Any] = {"wrap": noisy, "max_steps": 1}
    dropped, plain, calm = (
        gradients("grpo", tmp_path, **{**options, **more})[0]
        for more in ({}, {"wrap": same}, {"disable_dropout": True})
    )
    assert relative_difference(plain, dropped) > 0.01
    assert relative_difference(plain, calm) < 1e-6


def test_several_evaluation_sets_log_under_their_own_names(tmp_path: Path) -> None:
    sets = {"few": rows(2), "more": rows(4)}
    trainer = make_trainer(
        "grpo", tmp_path, eval_dataset=sets, eval_strategy="steps", eval_steps=1, max_steps=1, log_completions=True,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "eval_few_reward")
    assert logged(trainer, "eval_more_reward")
    assert not logged(trainer, "eval_reward")
    counts = {
        name: [len(Dataset.from_parquet(str(file))) for file in (tmp_path / f"eval_{name}_completions").iterdir()]  # pyright: ignore
        for name in sets
    }
    assert counts == {"few": [8], "more": [16]}
    with pytest.raises(TypeError, match="call evaluate"):
        trainer.predict(rows(1))


def test_an_engine_gets_the_weights_before_every_generation(tmp_path: Path) -> None:
    from vlmroll import ScriptedGenerator

    class Recorder(ScriptedGenerator):
        calls: list[str] = []

        def sync_weights(self, policy: Any) -> None:
            self.calls.append("sync")

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("generate")
            return super().generate(*args, **kwargs)

    trainer = make_trainer(
        "grpo", tmp_path, generator=Recorder([[7, 8], [9]]), eval_dataset=rows(1), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    assert Recorder.calls == [*["sync", "generate"] * 4, "sync"], "in the end it has the trained weights"


def test_the_data_seed_orders_the_rows(tmp_path: Path) -> None:
    def order(**seeds: Any) -> list[int]:
        seen: list[int] = []

        def note(completions: Sequence[Any], n: Sequence[int]) -> list[float]:
            seen.extend(n[::4])
            return variety(completions)

        make_trainer("grpo", tmp_path, reward=note, max_steps=1, **seeds).train()
        return seen

    assert order(seed=1) == order(seed=2, data_seed=1)
    assert order(seed=1) != order(seed=1, data_seed=2)


def test_a_checkpoint_of_an_unknown_architecture_keeps_its_vision_tower(tmp_path: Path) -> None:
    from tiny_models import tiny
    from vlmroll.modeling import load_model

    tiny("qwen2_5_vl").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["SomethingOwn"]}))
    assert any("visual" in name for name, _ in load_model(str(tmp_path)).named_parameters())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_padding_to_a_multiple_changes_no_gradient(algorithm: str, tmp_path: Path) -> None:
    (plain,) = gradients(algorithm, tmp_path / "plain", max_steps=1)
    (padded,) = gradients(algorithm, tmp_path / "padded", max_steps=1, pad_to_multiple_of=8)
    assert relative_difference(plain, padded) < 1e-4
