"""Plans keep the order of rollouts and their groups whole, inside the budgets, and change no gradient."""

import logging
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import tiny
from training_runs import gradients, make_trainer, relative_difference, rows
from vlmroll import Rollout
from vlmroll.modeling import numbers_of_a_patch
from vlmroll.planning import Budget, deal, plan, warn_of_large
from vlmroll.types import Completion
from vlmroll_processors import Join, JoinKind, Prompt, load_adapter


@cache
def prompt_of(length: int, patches: int, number: int) -> Prompt:
    ids = tuple(range(number, number + length))
    rule = {"pixels": Join(kind=JoinKind.ROWS)}
    kwargs = {"pixels": torch.zeros(patches, 4)} if patches else {}
    return Prompt(prompt_ids=ids, engine_ids=ids, forward_kwargs=kwargs, join=rule)


def rollout(prompt: Prompt, length: int) -> Rollout:
    completion = Completion(completion_ids=(1,) * length, logprobs=(0.0,) * length, finish_reason="stop")
    return Rollout(prompt=prompt, completion=completion, row={}, row_id=3, group=0)


groups = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(1, 6), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)
"""For each group the tokens of its prompt, its patches, and the lengths of its completions."""


def tokens(piece: list[Rollout], *, shared: bool) -> int:
    """Written out anew."""
    prompts = {id(r.prompt): r.prompt.num_tokens for r in piece}
    lengths = [len(r.completion.completion_ids) for r in piece]
    padded = len(piece) * (max(prompts.values()) + max(lengths))
    return sum(prompts.values()) + sum(lengths) if shared else padded


limits = st.one_of(st.none(), st.integers(5, 40))


@given(groups, st.integers(1, 8), limits, limits, st.booleans())
def test_pieces_are_inside_the_budgets_and_groups_stay_together(
    drawn: list[tuple[int, int, list[int]]], completions: int, most: int | None, patches: int | None, shared: bool
) -> None:
    found = [rollout(prompt_of(n, rows, i), c) for i, (n, rows, lengths) in enumerate(drawn) for c in lengths]
    budget = Budget(completions=completions, tokens=most, patches=patches, patch_size=4, shared=shared)
    pieces = plan(found, budget)
    assert [r for piece in pieces for r in piece] == found
    for piece in pieces:
        assert piece
        assert len(piece) <= completions
        seen = [r.prompt for r in piece]
        rows = sum(len(p.forward_kwargs.get("pixels", ())) for p in {id(p): p for p in seen}.values())
        fits = (most is None or tokens(piece, shared=shared) <= most) and (patches is None or rows <= patches)
        assert fits or len(piece) == 1
    sizes = Counter(id(r.prompt) for r in found)
    whole = [Counter(id(r.prompt) for r in piece).items() <= sizes.items() for piece in pieces]
    for i, (one, other) in enumerate(zip(pieces, pieces[1:], strict=False)):
        assert not (whole[i] and whole[i + 1] and budget.holds([*one, *other])), "two pieces would fit together"


def test_a_group_that_fits_is_never_cut() -> None:
    one, other = prompt_of(5, 0, 0), prompt_of(5, 0, 1)
    found = [rollout(one, 2)] * 4 + [rollout(other, 2)] * 4
    assert [len(piece) for piece in plan(found, Budget(completions=6))] == [4, 4]
    assert [len(piece) for piece in plan(found, Budget(completions=8))] == [8]
    assert [len(piece) for piece in plan(found, Budget(completions=3))] == [3, 1, 3, 1]
    assert [len(piece) for piece in plan(found, Budget(completions=8, tokens=13))] == [4, 4]
    assert [len(piece) for piece in plan(found, Budget(completions=8, tokens=13, shared=False))] == [1] * 8


def test_a_rollout_over_the_budget_goes_alone_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    found = [rollout(prompt_of(9, 5, 0), 6), rollout(prompt_of(2, 0, 1), 1)]
    budget, told = Budget(completions=8, tokens=10, patch_size=4), set[int]()
    pieces = plan(found, budget)
    assert [len(piece) for piece in pieces] == [1, 1]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            warn_of_large(pieces, budget, told)
    assert len(caplog.records) == 1
    assert "row 3: one completion with its prompt is over the budget of a micro-batch (15 tokens, 5" in caplog.text


@given(st.lists(st.integers(1, 4), max_size=12), st.integers(1, 5))
def test_pieces_are_dealt_evenly_and_in_order(lengths: list[int], steps: int) -> None:
    pieces = [[rollout(prompt_of(1, 0, i), 1)] * n for i, n in enumerate(lengths)]
    if sum(lengths) < steps:
        with pytest.raises(ValueError, match=f"rollouts cannot fill {steps} micro-steps"):
            deal(pieces, steps)
        return
    dealt = deal(pieces, steps)
    assert [r for share in dealt for piece in share for r in piece] == [r for piece in pieces for r in piece]
    sizes = [len(share) for share in dealt]
    assert len(sizes) == steps
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1
    if len(pieces) >= steps:
        assert [piece for share in dealt for piece in share] == pieces


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava", "idefics3"])
def test_patches_are_those_of_the_vision_tower(name: str) -> None:
    made = tiny(name)
    prompts = load_adapter(made.processor, config=made.model.config).encode(rows(4, name))
    budget = Budget(completions=1, patch_size=numbers_of_a_patch(made.model.config))
    for prompt in prompts:
        pixels = [tensor for tensor in prompt.forward_kwargs.values() if tensor.is_floating_point()]
        if name.startswith("qwen"):
            expected = sum(len(tensor) for tensor in pixels)
        else:
            size = made.model.config.vision_config.patch_size
            sides = [(*tensor.shape[:-3], *(side // size for side in tensor.shape[-2:])) for tensor in pixels]
            expected = sum(int(torch.tensor(side).prod()) for side in sides)
        assert budget.patches_of(prompt) == expected


# In training.


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("budget", [{"micro_batch_max_tokens": 150}, {"micro_batch_max_patches": 100}])
def test_budgets_change_no_gradient(budget: dict[str, int], shared: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 8, "share_prompts": shared, "beta": 0.1}
    (plain,) = gradients("grpo", tmp_path, **options)
    (planned,) = gradients("grpo", tmp_path, **budget, **options)
    assert relative_difference(plain, planned) < 1e-5


def test_groups_stay_together_over_micro_steps(tmp_path: Path) -> None:
    """Micro-steps of 6 would cut the second group of 4 of three."""
    trainer = make_trainer("grpo", tmp_path, max_steps=1, per_device_train_batch_size=6, gradient_accumulation_steps=2)
    sizes: list[int] = []
    compute = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, *a, **k: sizes.append(len(inputs)) or compute(model, inputs, *a, **k)  # pyright: ignore
    trainer.train()
    assert sizes == [4, 4, 4]


@pytest.mark.parametrize("name", ["micro_batch_max_tokens", "micro_batch_max_patches"])
def test_budgets_of_nothing_are_refused(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0"):
        make_trainer("grpo", tmp_path, **options)
