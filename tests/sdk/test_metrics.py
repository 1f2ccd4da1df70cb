"""Metrics by kind, merged over processes, and what is reported of rollouts, rewards and losses."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import picture, tiny, user
from vlmroll.batches import make_batch
from vlmroll.losses import PolicyTerm
from vlmroll.metrics import Gather, Kind, Metrics
from vlmroll.reporting import report_loss, report_mismatch, report_rewards, report_rollouts
from vlmroll.types import Completion, FinishReason, Rollout
from vlmroll_processors import Prompt, load_adapter

NAN = float("nan")


def alone(entries: list[Any]) -> list[Any]:
    return entries


def together(*others: Metrics) -> Gather:
    """A gather over this process and others."""

    def gather(entries: list[Any]) -> list[Any]:
        return [*entries, *(entry for other in others for entry in other._entries.items())]  # pyright: ignore

    return gather


def test_each_kind_is_aggregated_as_what_it_is() -> None:
    metrics = Metrics("T")
    for value in (3.0, 1.0, 2.0):
        for kind in ("mean", "min", "max", "sum"):
            metrics.add(kind, kind, value)
    assert metrics.flush(alone) == {"max": 3.0, "mean": 2.0, "min": 1.0, "sum": 6.0}
    assert metrics.flush(alone) == {}, "it starts anew"


def test_means_are_weighted_and_missing_values_left_out() -> None:
    metrics = Metrics("T")
    metrics.add_mean("tokens", 1.0, 3)
    metrics.add_mean("tokens", 5.0, 1)
    metrics.add_mean("tokens", NAN, 7)
    metrics.add_mean("tokens", 9.0, 0)
    metrics.add("min", "low", NAN)
    metrics.add("min", "low", 2.0)
    metrics.add("sum", "nothing", NAN)
    metrics.add_spread("", [], "_length")
    assert metrics.flush(alone) == {"low": 2.0, "tokens": 2.0}


@given(st.lists(st.lists(st.tuples(st.sampled_from(["mean", "min", "max", "sum"]), st.integers(-5, 5))), max_size=4))
def test_processes_add_up_to_one(parts: list[list[tuple[Kind, int]]]) -> None:
    """However the values lie on the processes, and though some have none of a metric."""
    processes, whole = [Metrics("T"), *(Metrics("T") for _ in parts)], Metrics("T")
    for process, part in zip(processes[1:], parts, strict=True):
        for kind, value in part:
            for metrics in (process, whole):
                metrics.add(kind, kind, float(value), 2.0)
    merged = processes[0].flush(together(*processes[1:]))
    assert merged == pytest.approx(whole.flush(alone))


def test_equal_processes_have_the_mean_of_one_and_twice_the_sum() -> None:
    metrics = Metrics("T")
    metrics.add_spread("", [1.0, 4.0])
    metrics.add("sum", "sum", 5.0)
    assert metrics.flush(lambda entries: entries * 2) == {"max": 4.0, "mean": 2.5, "min": 1.0, "sum": 10.0}


def test_a_name_has_one_kind() -> None:
    metrics = Metrics("T")
    metrics.add("min", "x", 1.0)
    with pytest.raises(ValueError, match="metric 'x' is both a min and a mean"):
        metrics.add_mean("x", 1.0)


def test_a_mean_can_be_asked_for_before_it_is_logged() -> None:
    metrics = Metrics("T")
    metrics.add_mean("tokens", 1.0, 3)
    metrics.add_mean("tokens", 5.0, 1)
    assert metrics.mean_so_far("tokens") == (2.0, 4.0)
    assert metrics.flush(alone) == {"tokens": 2.0}


def test_warnings_are_given_once() -> None:
    metrics = Metrics("T")
    assert [metrics.first_time(what) for what in ("a", "a", "b", "a")] == [True, False, True, False]


@pytest.mark.parametrize("name", ["loss", "sampling/sampling_logp_difference/mean", "rewards/x", "eval_loss"])
def test_names_of_the_trainers_own_metrics_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"log_metric: {name!r} is a metric of the trainer itself"):
        Metrics("T").log_metric(name, 1.0)


def test_times_are_means() -> None:
    metrics = Metrics("Trainer")
    for _ in range(2):
        with metrics.timed("work"):
            pass
    (name, value), *_ = metrics.flush(alone).items()
    assert name == "profiling/Time taken: Trainer.work"
    assert 0 <= value < 1


PROMPT = Prompt(prompt_ids=(5, 6), engine_ids=(5, 6))


def rollout(length: int, finish: FinishReason = "stop", prompt: Prompt = PROMPT, **more: Any) -> Rollout:
    completion = Completion(completion_ids=(7,) * length, logprobs=(-1.0,) * length, finish_reason=finish)
    return Rollout(prompt=prompt, completion=completion, row={}, row_id=0, group=0, **more)


def test_report_of_rollouts() -> None:
    rows = [{"prompt": user("a", picture(64, 48, 1), picture(32, 40, 2))}, {"prompt": user("b")}]
    pictured, plain = load_adapter(tiny("qwen3_vl").processor).encode(rows)
    metrics = Metrics("T")
    more: dict[str, Any] = {"old_logprobs": (-1.0, -2.0), "ref_logprobs": (-2.0, -4.0)}
    rollouts = [
        rollout(2, prompt=pictured, reward=1.0, **more),
        rollout(4, "length", pictured),
        rollout(6, prompt=plain),
    ]
    report_rollouts(metrics, rollouts, kl=True)
    found = metrics.flush(alone)
    tokens = pictured.num_tokens + plain.num_tokens
    assert found == pytest.approx(
        {
            "completions/mean_length": 4.0,
            "completions/min_length": 2.0,
            "completions/max_length": 6.0,
            "completions/mean_terminated_length": 4.0,
            "completions/min_terminated_length": 2.0,
            "completions/max_terminated_length": 6.0,
            "completions/clipped_ratio": 1 / 3,
            "kl": 3.0 / 12,
            "prompts/mean_length": tokens / 2,
            "prompts/min_length": plain.num_tokens,
            "prompts/max_length": pictured.num_tokens,
            "images/mean_count": 1.0,
            "images/token_share": pictured.num_image_tokens / tokens,
            "rewards/num_unscored": 2.0,
        }
    )
    report_rollouts(metrics, [], kl=True)
    assert metrics.flush(alone) == {}


def test_unscored_completions_of_all_processes_are_counted_once() -> None:
    """Rewards are known to every process, so each counts its own rollouts only."""
    processes = [Metrics("T"), Metrics("T")]
    total = torch.tensor([1.0, NAN, NAN, NAN])
    for i, process in enumerate(processes):
        report_rewards(process, ["f"], total[:, None], total, 2)
        report_rollouts(process, [rollout(1, reward=float(reward)) for reward in total[2 * i : 2 * i + 2]], kl=False)
    assert processes[0].flush(together(processes[1]))["rewards/num_unscored"] == 3.0


def test_report_of_rewards() -> None:
    metrics = Metrics("T")
    each = torch.tensor([[1.0, NAN], [3.0, NAN], [NAN, NAN], [2.0, NAN]])
    report_rewards(metrics, ["a", "b"], each, each[:, 0], 2)
    assert metrics.flush(alone) == pytest.approx(
        {
            "rewards/a/mean": 2.0,
            "rewards/a/std": 1.0,
            "rewards/b/std": 0.0,
            "reward": 2.0,
            "reward_std": 1.0,
            "frac_reward_zero_std": 0.5,
        }
    )


def losses_of(
    rollouts: Sequence[Rollout], ratio: torch.Tensor, extras: dict[str, torch.Tensor] | None = None
) -> dict[str, float]:
    metrics = Metrics("T")
    batch = make_batch(rollouts, pad_token_id=0, device="cpu")
    report_loss(metrics, PolicyTerm(loss=ratio, ratio=ratio), batch, (0.8, 1.2), extras or {})
    return metrics.flush(alone)


def test_report_of_a_loss() -> None:
    rows = [rollout(2, advantage=-1.0), rollout(4, advantage=1.0)]
    ratio = torch.tensor([[0.5, 1.5, 9.0, 9.0], [1.5, 1.0, 1.5, 0.5]])
    entropy = torch.tensor([[1.0, 3.0, 9.0, 9.0], [2.0, 2.0, 2.0, 2.0]])
    found = losses_of(rows, ratio, {"entropy": entropy})
    assert found == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 6,
            "clip_ratio/high_mean": 2 / 6,
            "clip_ratio/region_mean": 3 / 6,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_max": 0.5,
            "entropy": 12 / 6,
            "batch/pad_frac": 2 / 12,
        }
    )


def test_rows_that_count_nowhere_are_left_out_of_the_report() -> None:
    rows = [rollout(2, advantage=-1.0), rollout(2, advantage=-1.0, loss_mask=(0, 0))]
    ratio = torch.full((2, 2), 0.5)
    for shaped in (ratio, ratio[:, :1]):
        found = losses_of(rows, shaped, {"kl": torch.tensor([[1.0, 1.0], [9.0, 9.0]])})
        assert found["clip_ratio/low_mean"] == 1.0
        assert found["clip_ratio/low_min"] == 1.0
        assert found["kl"] == 1.0
    assert set(losses_of([rows[1]], ratio[:1], {"kl": ratio[:1]})) == {"batch/pad_frac"}


def test_report_of_a_mismatch_by_the_number_of_pictures() -> None:
    """Means over counted tokens, or rows; what does not count or is not known is in none of them."""
    shown = [picture(64, 48, 1), picture(32, 40, 2)]
    rows = [{"prompt": user("a", *shown)}, {"prompt": user("b", shown[0])}, {"prompt": user("c")}]
    many, one, none = load_adapter(tiny("qwen3_vl").processor).encode(rows)
    rollouts = [rollout(2, prompt=many), rollout(3, prompt=one), rollout(1, prompt=none), rollout(3, prompt=none)]
    gap = torch.tensor([[0.1, -0.3, 9.0], [NAN, 0.2, 0.1], [-0.5, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    of, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
    expected = {
        f"{of}/mean": 1.1 / 4,
        f"{of}/max": 0.5,
        f"{of}/many_images/mean": 0.2,
        f"{of}/many_images/max": 0.3,
        f"{of}/one_image/mean": 0.2,
        f"{of}/one_image/max": 0.2,
        f"{of}/text_only/mean": 0.5,
        f"{of}/text_only/max": 0.5,
    }
    weights = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0]])
    for shaped, mean, most in ((weights, 10.5 / 5, 4.0), (weights[:, :1], 4.5 / 3, 3.0)):
        spread = {f"{ratio}/mean": mean, f"{ratio}/min": 0.5, f"{ratio}/max": most}
        whole, cut = Metrics("T"), [Metrics("T"), Metrics("T")]
        report_mismatch(whole, rollouts, mask, gap, shaped)
        for process, part in zip(cut, (slice(0, 1), slice(1, 4)), strict=True):
            report_mismatch(process, rollouts[part], mask[part], gap[part], shaped[part])
        assert whole.flush(alone) == pytest.approx(expected | spread)
        assert cut[0].flush(together(cut[1])) == pytest.approx(expected | spread)
    nothing = Metrics("T")
    report_mismatch(nothing, rollouts[3:], mask[3:], gap[3:], weights[3:])
    assert nothing.flush(alone) == {}
