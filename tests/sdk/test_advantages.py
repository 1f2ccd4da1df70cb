"""Advantages against statistics written out with `statistics`, and against TRL's formulas on TRL's `nanstd`.

TRL computes advantages in the middle of a method of hundreds of lines that generates and scores too, so its lines are
repeated here around its own standard deviation; names are TRL's.
"""

import math
import statistics
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlmroll import advantages as adv
from vlmroll.grpo import GRPOTrainer
from vlmroll.rewards import RewardSuite
from vlmroll.rloo import RLOOTrainer

NAN = float("nan")
ROUNDS = {
    "full": [1.0, 0.0, 0.5, 2.0, -1.0, 3.0, 0.25, 0.25],
    "holes": [1.0, NAN, 0.0, NAN, 2.0, 3.0, NAN, 5.0],
    "lone": [4.0, NAN, NAN, NAN, 1.0, 2.0, 3.0, 5.0],
    "empty_group": [NAN, NAN, NAN, NAN, 1.0, 2.0, 3.0, 5.0],
    "empty": [NAN] * 8,
    "equal": [2.0] * 4 + [0.3] * 4,
}
rounds = pytest.mark.parametrize("name", ROUNDS)
scales = pytest.mark.parametrize("scale", ["group", "batch", "none"])
G = 4


def known(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def deviation(values: list[float]) -> float:
    return statistics.stdev(known(values)) if len(known(values)) > 1 else 0.0


def groups_of(values: list[float]) -> list[list[float]]:
    return [values[i : i + G] for i in range(0, len(values), G)]


@rounds
@scales
def test_group_normalised_equals_the_written_out_formula(name: str, scale: str) -> None:
    values, expected = ROUNDS[name], list[float]()
    for group in groups_of(values):
        spread = {"group": deviation(group) + 1e-4, "batch": deviation(values) + 1e-4, "none": 1.0}[scale]
        for value in group:
            expected.append(0.0 if math.isnan(value) else (value - statistics.mean(known(group))) / spread)
    found = adv.group_normalised(torch.tensor(values), G, scale).tolist()
    assert found == pytest.approx(expected, abs=1e-5)


@rounds
def test_leave_one_out_equals_the_written_out_formula(name: str) -> None:
    values, expected = ROUNDS[name], list[float]()
    for group in groups_of(values):
        for i, value in enumerate(group):
            siblings = known(group[:i] + group[i + 1 :])
            lonely = math.isnan(value) or not siblings
            expected.append(0.0 if lonely else value - statistics.mean(siblings))
    assert adv.leave_one_out(torch.tensor(values), G).tolist() == pytest.approx(expected, abs=1e-5)


def two_rewards(name: str) -> torch.Tensor:
    """[N, 2]: the named round, and another one that is there for every second completion."""
    other = [value if i % 2 else NAN for i, value in enumerate([0.5, 1.5, -1.0, 2.5, 0.0, 1.0, 7.0, -3.0])]
    return torch.tensor([ROUNDS[name], other]).T


def trl_nanstd() -> Any:
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl.trainer.utils").nanstd


def trl_sum_then_normalize(rewards_per_func: torch.Tensor, weights: torch.Tensor, scale: str) -> torch.Tensor:
    nanstd = trl_nanstd()
    rewards = (rewards_per_func * weights.unsqueeze(0)).nansum(dim=1)
    rewards[torch.isnan(rewards_per_func).all(dim=1)] = torch.nan
    mean_grouped_rewards = torch.nanmean(rewards.view(-1, G), dim=1).repeat_interleave(G, dim=0)
    if scale == "batch":
        std_rewards = nanstd(rewards).expand_as(rewards)
    else:
        std_rewards = nanstd(rewards.view(-1, G), dim=1).repeat_interleave(G, dim=0)
    advantages = rewards - mean_grouped_rewards
    if scale != "none":
        advantages = advantages / (std_rewards + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


def trl_normalize_then_sum(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    nanstd = trl_nanstd()
    grouped = rewards_per_func.view(-1, G, rewards_per_func.shape[1])
    mean_k = torch.nanmean(grouped, dim=1, keepdim=True)
    std_k = nanstd(grouped, dim=1, keepdim=True)
    reward_k = ((grouped - mean_k) / (std_k + 1e-4)).view(-1, rewards_per_func.shape[1])
    rewards = (reward_k * weights.unsqueeze(0)).nansum(dim=1)
    rewards[torch.isnan(rewards_per_func).all(dim=1)] = torch.nan
    advantages = (rewards - torch.nanmean(rewards)) / (nanstd(rewards).expand_as(rewards) + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


def trl_leave_one_out(
    rewards: torch.Tensor, kl: torch.Tensor, clip: tuple[float, float] | None, beta: float, normalize: bool
) -> torch.Tensor:
    nanstd = trl_nanstd()
    if clip:
        rewards = rewards.clamp(min=clip[0], max=clip[1])
    rewards = rewards - beta * kl
    grouped = rewards.view(-1, G)
    counts = (~torch.isnan(grouped)).sum(dim=1, keepdim=True)
    baselines = (torch.nansum(grouped, dim=1, keepdim=True) - grouped) / (counts - 1)
    advantages = rewards - baselines.view(-1)
    if normalize:
        advantages = (advantages - torch.nanmean(advantages)) / (nanstd(advantages) + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0)


def of_trainer(kind: Any, rewards: torch.Tensor, kl: torch.Tensor, weights: list[float], **args: Any) -> torch.Tensor:
    """The trainer's own method, on the attributes that it reads."""

    def none(**kwargs: Any) -> list[float]:
        return []

    suite = RewardSuite([none] * len(weights), weights)
    trainer = SimpleNamespace(args=SimpleNamespace(**args), rewards=suite)
    return kind.compute_advantages(trainer, rewards, kl, G)


@rounds
@scales
def test_sum_then_normalize_equals_trls(name: str, scale: str) -> None:
    rewards, weights = two_rewards(name), [1.0, 0.3]
    expected = trl_sum_then_normalize(rewards, torch.tensor(weights), scale)
    args = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": scale}
    found = of_trainer(GRPOTrainer, rewards, torch.zeros(8), weights, **args)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["full", "holes", "equal"])
def test_normalize_then_sum_equals_trls(name: str) -> None:
    rewards, weights = two_rewards(name), [1.0, 0.3]
    rewards[:, 1] = torch.tensor([0.5, 1.5, NAN, 2.5, 0.0, 1.0, 7.0, NAN])
    expected = trl_normalize_then_sum(rewards, torch.tensor(weights))
    args = {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "group"}
    found = of_trainer(GRPOTrainer, rewards, torch.zeros(8), weights, **args)
    # Where nothing varies, TRL's rounding errors are divided by 1e-4; ours are exact.
    torch.testing.assert_close(found, expected, atol=1e-3 if name == "equal" else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["full", "holes", "empty_group", "empty"])
@pytest.mark.parametrize("clip", [None, (0.0, 1.5)])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("normalize", [True, False])
def test_rloo_equals_trls(name: str, clip: tuple[float, float] | None, beta: float, normalize: bool) -> None:
    rewards = torch.tensor(ROUNDS[name])
    kl = torch.tensor([0.1, 2.0, -0.4, 0.0, 1.0, 3.0, 0.2, -2.0])
    expected = trl_leave_one_out(rewards, kl, clip, beta, normalize)
    args = {"reward_clip_range": clip, "beta": beta, "normalize_advantages": normalize, "scale_rewards": "none"}
    found = of_trainer(RLOOTrainer, rewards[:, None], kl, [1.0], **args)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_completion_without_scored_siblings_counts_when_rloo_normalises_unlike_in_trl() -> None:
    """Its advantage is 0 and stays 0; TRL leaves it out of the standard deviation of the round, here it is one 0."""
    rewards = torch.tensor(ROUNDS["lone"])
    args = {"reward_clip_range": None, "beta": 0.0, "normalize_advantages": True, "scale_rewards": "none"}
    found = of_trainer(RLOOTrainer, rewards[:, None], torch.zeros(8), [1.0], **args)
    loo = [0.0, *adv.leave_one_out(rewards, G)[4:].tolist()]
    expected = [value / (statistics.stdev(loo) + 1e-4) for value in loo]
    assert found[[0, 4, 5, 6, 7]].tolist() == pytest.approx(expected, abs=1e-5)
    assert found[:4].tolist() == pytest.approx([0.0] * 4, abs=1e-5)


@pytest.mark.parametrize("scale", [1.0, 0.001, 1000.0])
@given(value=st.floats(-1000, 1000, width=32), generations=st.integers(2, 33))
def test_equal_rewards_teach_nothing(scale: float, value: float, generations: int) -> None:
    """Exactly nothing: a rounding error of the mean must not be scaled up by a standard deviation of 0."""
    rewards = torch.full((2 * generations,), value * scale)
    rewards[generations:] += 1
    for kind in ("group", "batch", "none"):
        assert adv.group_normalised(rewards, generations, kind).eq(0).all()
    assert adv.leave_one_out(rewards, generations).eq(0).all()
    assert adv.normalise_then_sum(rewards[:, None], [0.3], generations).eq(0).all()
    assert adv.zero_variance(rewards, generations).all()


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10, width=32)), min_size=12, max_size=12))
def test_advantages_are_finite_and_a_group_sums_to_nothing(values: list[float | None]) -> None:
    rewards = torch.tensor([NAN if value is None else value for value in values])
    for kind in ("group", "batch", "none"):
        found = adv.group_normalised(rewards, G, kind)
        assert found.dtype == torch.float32
        assert found.isfinite().all()
        assert found[rewards.isnan()].eq(0).all()
        assert found.view(-1, G).sum(1).abs().max() < 1e-3
    assert adv.leave_one_out(rewards, G).isfinite().all()
    assert adv.batch_normalised(adv.leave_one_out(rewards, G), ~rewards.isnan()).isfinite().all()
    assert adv.normalise_then_sum(torch.stack([rewards, -rewards], 1), [1.0, 0.5], G).isfinite().all()


def test_groups_do_not_see_each_other() -> None:
    alone = adv.group_normalised(torch.tensor(ROUNDS["holes"][:G]), G)
    assert adv.group_normalised(torch.tensor(ROUNDS["holes"]), G)[:G].equal(alone)


def test_weighted_sum_leaves_missing_rewards_out() -> None:
    rewards = torch.tensor([[1.0, 2.0], [NAN, 2.0], [1.0, NAN], [NAN, NAN]])
    found = adv.weighted_sum(rewards, [2.0, 0.5])
    assert found[:3].tolist() == [3.0, 1.0, 2.0]
    assert found[3].isnan()


def test_zero_variance_names_groups_without_a_difference() -> None:
    found = adv.zero_variance(torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 3.0, NAN, NAN, 0.0, 1e-3]), 2)
    assert found.view(-1, 2).tolist() == [[True] * 2, [False] * 2, [True] * 2, [True] * 2, [False] * 2]


def test_unknown_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="'group', 'batch' or 'none', got 'row'"):
        adv.group_normalised(torch.zeros(2), 2, "row")
