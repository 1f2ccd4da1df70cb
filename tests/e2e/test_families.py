"""One real step of training with every family: what learns, what is frozen, and that the cut does not matter."""

import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tiny_models import VISION_FAMILIES
from training_runs import ALGORITHMS, FAMILIES, GradientRecorder, make_trainer, relative_difference, rows

families = pytest.mark.parametrize("name", FAMILIES)
# Parameters that nothing depends on: a norm behind the layer whose states are taken, a merger for a layer that the
# tiny text model does not have, and the part of Janus that draws.
IDLE = {
    **dict.fromkeys(("llava", "llava_next", "llava_onevision", "aya_vision"), "vision_tower.post_layernorm"),
    "qwen3_vl": r"deepstack_merger_list\.1",
    "janus": "vqmodel|generation_(embeddings|aligner|head)",
}


def options(name: str, **more: Any) -> dict[str, Any]:
    """One step on two completions of each of four rows, which have 1, 3, 0 and 2 pictures, in one micro-batch."""
    sizes = {"num_generations": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1}
    return {"model": name, "data": rows(4, name), "shuffle_dataset": False, "max_grad_norm": 0.0, **sizes, **more}


def vision_parameters(model: Any) -> set[str]:
    """Names of the parameters in the module that the vision config describes."""
    config = model.config.vision_config
    towers = [f"{name}." for name, module in model.named_modules() if getattr(module, "config", None) is config]
    assert towers
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(towers))}


def idle(name: str, parameter: str) -> bool:
    return name in IDLE and re.search(IDLE[name], parameter) is not None


@dataclass(frozen=True)
class Step:
    """What one step of training did; the sets hold names of parameters."""

    log: dict[str, float]
    gradients: dict[str, torch.Tensor]
    all: set[str]
    vision: set[str]
    frozen: set[str]
    changed: set[str]


def train(algorithm: str, name: str, **more: Any) -> Step:
    recorder = GradientRecorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(algorithm, Path(folder), callbacks=[recorder], **options(name, **more))
        model: Any = trainer.model
        before = {parameter: value.detach().clone() for parameter, value in model.named_parameters()}
        trainer.train()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    (found,) = recorder.steps
    return Step(
        log=log,
        gradients=found,
        all=set(before),
        vision=vision_parameters(model),
        frozen={parameter for parameter, value in model.named_parameters() if not value.requires_grad},
        changed={parameter for parameter, value in model.named_parameters() if not value.equal(before[parameter])},
    )


def of_vision(step: Step) -> dict[str, torch.Tensor]:
    return {parameter: gradient for parameter, gradient in step.gradients.items() if parameter in step.vision}


@cache
def plain_step(algorithm: str, name: str) -> Step:
    return train(algorithm, name)


@families
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_trains_the_vision_tower_and_the_language_model(algorithm: str, name: str) -> None:
    step = plain_step(algorithm, name)
    assert torch.tensor([step.log["loss"], step.log["grad_norm"]]).isfinite().all()
    assert step.log["grad_norm"] > 0
    # The mean is over distinct prompts, and no two of these have equally many pictures.
    numbers = {len(row["prompt"][0]["content"]) - 1 for row in rows(4, name)}
    assert step.log["images/mean_count"] == sum(numbers) / len(numbers)
    learning = {parameter for parameter in step.all if not idle(name, parameter)}
    assert {parameter for parameter, gradient in step.gradients.items() if gradient.any()} == learning
    assert step.changed == learning
    assert learning & step.vision
    assert learning - step.vision


@pytest.mark.parametrize(
    "name",
    ["gemma3", "smolvlm", "llava_onevision", "paligemma", "mistral3", "lfm2_vl", "kimi_k25", "mllama", "glm4v"],
)
def test_micro_batches_of_1_and_5_rows_give_the_gradients_of_one_of_10(name: str) -> None:
    """As one they mix rows with 1, 3, 0, 2 and 1 pictures; Llama 3.2 Vision reads them in pieces, out of order."""
    data = rows(5, name)
    whole, *others = (
        train("grpo", name, data=data, per_device_train_batch_size=size, gradient_accumulation_steps=10 // size)
        for size in (10, 1, 5)
    )
    for other in others:
        assert relative_difference(whole.gradients, other.gradients) < 1e-4
        assert relative_difference(of_vision(whole), of_vision(other)) < 1e-4


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    found = train("grpo", name, gradient_checkpointing=True).gradients
    assert relative_difference(plain_step("grpo", name).gradients, found) < 1e-4


@families
def test_a_frozen_vision_tower_stays_and_the_rest_learns(name: str) -> None:
    step = train("grpo", name, freeze_vision_tower=True)
    assert step.frozen == step.vision
    assert step.changed == {parameter for parameter in step.all - step.vision if not idle(name, parameter)}


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_a_step_in_mixed_precision(name: str) -> None:
    """Weights in float32 under autocast to bfloat16, as the default is on an accelerator."""
    step = train("rloo", name, bf16=True, beta=0.1)
    assert torch.tensor([step.log["loss"], step.log["grad_norm"], step.log["kl"]]).isfinite().all()
    assert abs(step.log["kl"]) < 1e-3, "the reference is the policy itself, under the same autocast"
    whole = plain_step("rloo", name)
    assert step.changed == whole.changed
    assert step.log["entropy"] == pytest.approx(whole.log["entropy"], abs=0.05)
    assert any(not gradient.equal(whole.gradients[parameter]) for parameter, gradient in step.gradients.items())


QUERIES = ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("name", "targets", "freeze"),
    [
        ("gemma3", "all-linear", False),
        ("gemma3", QUERIES, False),
        ("qwen2_5_vl", "all-linear", True),
        ("qwen2_5_vl", QUERIES, False),
        ("mllama", "all-linear", False),
        ("mllama", QUERIES, True),
        ("lfm2_vl", "all-linear", False),
        ("kimi_k25", "all-linear", True),
    ],
    ids=str,
)
def test_an_adapter_learns_and_the_model_under_it_stays(name: str, targets: Any, freeze: bool) -> None:
    lora = LoraConfig(r=4, target_modules=targets)
    step = train("grpo", name, peft_config=lora, beta=0.1, freeze_vision_tower=freeze)
    # An adapter starts with B = 0, so its A gets a gradient from the second step on.
    adapters = {parameter for parameter in step.all if ".lora_B." in parameter}
    assert step.changed == (adapters - step.vision if freeze else adapters)
    assert adapters - step.vision
    # The vision tower of Qwen2.5-VL makes queries, keys and values in one layer of another name.
    assert bool(adapters & step.vision) == ((name, targets) != ("qwen2_5_vl", QUERIES))
