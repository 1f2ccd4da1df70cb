"""The gradient of an optimizer step is one number, however the step is cut."""

from pathlib import Path
from typing import Any

import pytest

from tiny_models import QWEN_FAMILIES
from training_runs import ALGORITHMS, gradients, relative_difference

CUTS = ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}, {"gradient_accumulation_steps": 4})
WHOLE = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}


def check_cuts(algorithm: str, folder: Path, **options: Any) -> None:
    """Compare micro-batches of 1 and 4 with one of all 16 rows: 4 groups with 1, 3, 0 and 2 pictures."""
    options = {"shuffle_dataset": False, "max_steps": 1, **options}
    (whole,) = gradients(algorithm, folder, **WHOLE, **options)
    for cut in CUTS:
        (other,) = gradients(algorithm, folder, **cut, **options)
        assert relative_difference(whole, other) < 1e-4, cut


@pytest.mark.parametrize("family", QWEN_FAMILIES)
def test_micro_batches_of_1_and_4_agree_on_rows_with_1_3_0_and_2_pictures(family: str, tmp_path: Path) -> None:
    check_cuts("grpo", tmp_path, model=family)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"])
def test_the_cut_does_not_matter_for_any_objective(loss_type: str, tmp_path: Path) -> None:
    check_cuts("grpo", tmp_path, loss_type=loss_type, beta=0.1)


def test_the_cut_does_not_matter_for_rloo_with_kl(tmp_path: Path) -> None:
    check_cuts("rloo", tmp_path, beta=0.1)


def test_the_cut_does_not_matter_with_sequence_ratios_and_entropy_quantile(tmp_path: Path) -> None:
    check_cuts("grpo", tmp_path, importance_sampling_level="sequence", top_entropy_quantile=0.5)


def test_the_cut_does_not_matter_with_a_text_model(tmp_path: Path) -> None:
    check_cuts("grpo", tmp_path, model="text")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_checkpointing_changes_nothing(algorithm: str, tmp_path: Path) -> None:
    (plain,) = gradients(algorithm, tmp_path, max_steps=1)
    (checkpointed,) = gradients(algorithm, tmp_path, max_steps=1, gradient_checkpointing=True)
    assert relative_difference(plain, checkpointed) < 1e-5


def test_later_iterations_clip_against_the_policy_that_sampled(tmp_path: Path) -> None:
    """With two iterations and a tight clip range the second pass over a round gets little or no policy gradient."""
    options = {"max_steps": 2, "num_iterations": 2, "learning_rate": 0.05}
    first, second = gradients("grpo", tmp_path, epsilon=1e-6, **options)
    again, _ = gradients("grpo", tmp_path, epsilon=10.0, **options)
    assert relative_difference(first, again) < 1e-6  # at ratio 1 nothing is clipped
    norm = sum(float(gradient.pow(2).sum()) for gradient in second.values())
    assert norm < 0.7 * sum(float(gradient.pow(2).sum()) for gradient in first.values())
