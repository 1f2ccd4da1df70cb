"""The objectives against written-out sums and against TRL's own code, and the cut into micro-batches.

TRL's loss methods are called on a stand-in for its trainer that holds the few attributes they read.
"""

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmroll import losses
from vlmroll.batches import make_batch
from vlmroll.losses import token_weights
from vlmroll.rollouts import keep_high_entropy, weigh
from vlmroll.types import Completion, Rollout
from vlmroll_processors import Prompt
from vlmroll_processors.collate import pad

LENGTHS = (3, 7, 1, 5, 4, 6)
MAX_LENGTH = 9
PROMPT = Prompt(prompt_ids=(5,), engine_ids=(5,))


@dataclass(frozen=True)
class Options:
    """One way to compute a loss. `level` is as in `importance_ratio`."""

    loss_type: str
    level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    bias_correction: bool = False
    quantile: float = 1.0

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Options("grpo"), name)]
        return "-".join(changed) or "grpo"


GRPO_OPTIONS = [
    Options(loss_type, level, **more)  # pyright: ignore[reportArgumentType]
    for loss_type in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo")
    for level in ("token", "sequence")
    for more in (
        {"epsilon_high": 1.1 if loss_type == "cispo" else 0.28},
        {"delta": 1.5, "beta": 0.1},
        {"beta": 0.2, "bias_correction": True, "quantile": 0.4},
    )
]
RLOO_OPTIONS = [Options("rloo", "sum"), Options("rloo", "sum", epsilon=0.1, epsilon_high=0.4)]
ALL_OPTIONS = pytest.mark.parametrize("options", [*GRPO_OPTIONS, *RLOO_OPTIONS], ids=str)


@dataclass(frozen=True)
class Step:
    """The rollouts of one optimizer step and the policy's current log-probabilities [B, C], which take gradients."""

    rows: list[Rollout]
    logprobs: torch.Tensor


def make_step(seed: int = 0, lengths: Sequence[int] = LENGTHS, masked: Sequence[int] = ()) -> Step:
    """Random rollouts; those numbered in `masked` count nowhere."""
    generator = torch.Generator().manual_seed(seed)

    def values(length: int, scale: float) -> torch.Tensor:
        return torch.randn(length, generator=generator) * scale

    rows: list[Rollout] = []
    current: list[torch.Tensor] = []
    for number, length in enumerate(lengths):
        now = -values(length, 1.5).abs()
        before = now + values(length, 0.2) + values(1, 0.4)
        current.append(now)
        rows.append(
            Rollout(
                prompt=PROMPT,
                completion=Completion(completion_ids=(7,) * length, logprobs=(-1.0,) * length, finish_reason="stop"),
                row={},
                row_id=number,
                group=0,
                advantage=float(values(1, 1.0)),
                old_logprobs=tuple(before.tolist()),
                ref_logprobs=tuple((now + values(length, 0.3)).tolist()),
                entropies=tuple(values(length, 1.0).abs().tolist()),
                loss_mask=(0,) * length if number in masked else None,
            )
        )
    return Step(rows=rows, logprobs=pad(current, 0.0).requires_grad_())


def weighed(rows: Sequence[Rollout], options: Options) -> list[Rollout]:
    """The rollouts with their shares in the step's loss."""
    batches: list[list[Rollout]] = [list(rows)]
    if options.quantile < 1:
        batches = keep_high_entropy(batches, options.quantile, lambda values: values)
    (result,) = weigh(
        batches, loss_type=options.loss_type, max_completion_length=MAX_LENGTH, gather=lambda values: values
    )
    return result


def policy_term(options: Options, ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor) -> Any:
    if options.loss_type == "cispo":
        return losses.cispo(ratio, advantages, logprobs, epsilon_high=options.epsilon_high)
    bounds = {"epsilon": options.epsilon, "epsilon_high": options.epsilon_high}
    return losses.clipped_surrogate(ratio, advantages, **bounds, delta=options.delta)


def micro_batch_loss(options: Options, rows: Sequence[Rollout], logprobs: torch.Tensor) -> torch.Tensor:
    """The share of some rows, as the trainers compute it."""
    batch = make_batch(rows, pad_token_id=0, device="cpu")
    logprobs = logprobs[:, : batch.loss_mask.shape[1]]
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    ratio = losses.importance_ratio(logprobs, batch.old_logprobs, batch.loss_mask, options.level)
    term = policy_term(options, ratio, batch.advantages, logprobs)
    per_token = term.loss if batch.entropy_mask is None else term.loss * batch.entropy_mask
    if options.beta:
        kl = losses.k3_kl(logprobs, batch.ref_logprobs)
        per_token = per_token + options.beta * (kl * term.ratio if options.bias_correction else kl)
    return (per_token * batch.loss_mask * batch.loss_weights[:, None]).sum()


def ours(options: Options, step: Step) -> torch.Tensor:
    return micro_batch_loss(options, weighed(step.rows, options), step.logprobs)


def written_out(options: Options, step: Step) -> float:
    """The same loss, token by token in plain Python."""
    rows = [row for row in step.rows if row.num_loss_tokens]
    current = [values for values, row in zip(step.logprobs.tolist(), step.rows, strict=True) if row.num_loss_tokens]
    tokens = sum(row.num_loss_tokens for row in rows)
    entropies = sorted(entropy for row in rows for entropy in row.entropies or ())
    place = (1 - options.quantile) * (len(entropies) - 1)
    low, high = entropies[math.floor(place)], entropies[math.ceil(place)]
    threshold = low + (high - low) * (place - math.floor(place))
    total = 0.0
    for row, logprobs in zip(rows, current, strict=True):
        assert row.old_logprobs is not None
        assert row.ref_logprobs is not None
        assert row.entropies is not None
        length = row.num_loss_tokens
        log_ratios = [logprobs[t] - row.old_logprobs[t] for t in range(length)]
        for t in range(length):
            exponent = {"token": log_ratios[t], "sequence": sum(log_ratios) / length, "sum": sum(log_ratios)}
            ratio = math.exp(exponent[options.level])
            if options.loss_type == "cispo":
                loss = -min(ratio, options.epsilon_high) * row.advantage * logprobs[t]
            else:
                clipped = min(max(ratio, 1 - options.epsilon), 1 + options.epsilon_high)
                bounded = ratio if options.delta is None else min(ratio, options.delta)
                loss = -min(bounded * row.advantage, clipped * row.advantage)
            if options.quantile < 1 and row.entropies[t] < threshold - 1e-6:
                loss = 0.0
            gap = row.ref_logprobs[t] - logprobs[t]
            kl = math.exp(gap) - gap - 1
            loss += options.beta * kl * (ratio if options.bias_correction else 1.0)
            divisor = {"grpo": len(rows) * length, "rloo": len(rows) * length, "dr_grpo": len(rows) * MAX_LENGTH}
            total += loss / divisor.get(options.loss_type, tokens)
    return total


def of_trl(name: str) -> Any:
    """A module of TRL, which is no dependency."""
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"trl.trainer.{name}")


def trl_inputs(step: Step) -> dict[str, torch.Tensor]:
    width = step.logprobs.shape[1]
    mask = pad([torch.ones(len(row.completion.completion_ids), dtype=torch.long) for row in step.rows], 0, to=width)
    kept = torch.tensor([[int(row.num_loss_tokens > 0)] for row in step.rows])
    ones = torch.ones(len(step.rows), 1, dtype=torch.long)
    old, ref = (
        pad([torch.tensor(getattr(row, name)) for row in step.rows], 0.0, to=width)
        for name in ("old_logprobs", "ref_logprobs")
    )
    return {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": mask * 7,
        "completion_mask": mask * kept,
        "advantages": torch.tensor([row.advantage for row in step.rows]),
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": ref,
        "num_items_in_batch": (mask * kept).sum(),
    }


def trl_loss(options: Options, step: Step, accumulation: int = 1) -> torch.Tensor:
    """What TRL computes for the step as one micro-batch out of `accumulation`."""
    rloo = options.loss_type == "rloo"
    kind: Any = of_trl("rloo_trainer").RLOOTrainer if rloo else of_trl("grpo_trainer").GRPOTrainer
    entropies = pad([torch.tensor(row.entropies) for row in step.rows], 0.0, to=step.logprobs.shape[1])
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (step.logprobs, entropies, None),  # pyright: ignore
        _metrics={"train": defaultdict[str, list[float]](list)},
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda tensor: tensor,  # pyright: ignore
            reduce=lambda tensor, reduction: tensor,  # pyright: ignore
            pad_across_processes=lambda tensor, dim, pad_index: tensor,  # pyright: ignore
        ),
        args=SimpleNamespace(
            delta=options.delta, use_bias_correction_kl=options.bias_correction, steps_per_generation=accumulation
        ),
        loss_type=options.loss_type,
        importance_sampling_level=options.level,
        top_entropy_quantile=options.quantile,
        off_policy_mask_threshold=None,
        beta=options.beta,
        epsilon_low=options.epsilon,
        epsilon_high=options.epsilon_high,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=accumulation,
    )
    if not rloo:
        trainer.get_high_entropy_mask = partial(kind.get_high_entropy_mask, trainer)
    return kind._compute_loss(trainer, None, trl_inputs(step))


def gradient(loss: torch.Tensor, step: Step) -> torch.Tensor:
    return torch.autograd.grad(loss, step.logprobs)[0]


@ALL_OPTIONS
def test_the_loss_equals_the_written_out_sum(options: Options) -> None:
    for masked in ((), (1, 4)):
        step = make_step(1, masked=masked)
        assert ours(options, step).item() == pytest.approx(written_out(options, step), abs=1e-5)


@ALL_OPTIONS
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_trls(options: Options, seed: int) -> None:
    step = make_step(seed)
    found, expected = ours(options, step), trl_loss(options, step)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient(found, step), gradient(expected, step), atol=1e-5, rtol=1e-5)


@ALL_OPTIONS
def test_the_options_of_this_file_matter(options: Options) -> None:
    """A clip, a bound or a KL weight that changed nothing would be compared with nothing."""
    plain = replace(options, epsilon=9.0, epsilon_high=9.0, delta=None, beta=0.0, quantile=1.0)
    steps = [make_step(seed) for seed in range(3)]
    assert max(abs((ours(options, step) - ours(plain, step)).item()) for step in steps) > 1e-3


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_rows_that_count_nowhere_are_not_counted_unlike_in_trl(loss_type: str) -> None:
    """TRL divides by all rows: taking truncated ones out of the loss makes the others weigh less there."""
    options, step = Options(loss_type), make_step(2, masked=(0, 3))
    counted = len(LENGTHS) - 2
    expected = trl_loss(options, step) * len(LENGTHS) / counted
    torch.testing.assert_close(ours(options, step), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "cispo"])
def test_rows_that_count_nowhere_leave_token_means_alone_as_in_trl(loss_type: str) -> None:
    options, step = Options(loss_type, epsilon_high=1.5), make_step(2, masked=(0, 3))
    torch.testing.assert_close(ours(options, step), trl_loss(options, step), atol=1e-5, rtol=0)


def test_bnpo_is_dapo_over_the_step_unlike_in_trl() -> None:
    """TRL means each micro-batch by itself, so that its gradient depends on the cut; ours is that of the whole step."""
    step = make_step(3)
    parts = [Step(rows=step.rows[i : i + 2], logprobs=step.logprobs[i : i + 2]) for i in (0, 2, 4)]
    cut = torch.stack([trl_loss(Options("bnpo"), part, accumulation=3) for part in parts]).sum()
    whole = trl_loss(Options("bnpo"), step)
    assert abs((cut - whole).item()) > 1e-3
    torch.testing.assert_close(ours(Options("bnpo"), step), whole, atol=1e-5, rtol=0)
    assert ours(Options("bnpo"), step).equal(ours(Options("dapo"), step))


@pytest.mark.parametrize("options", [*GRPO_OPTIONS[::3], *GRPO_OPTIONS[2::6], RLOO_OPTIONS[0]], ids=str)
@settings(max_examples=10)
@given(data=st.data())
def test_the_cut_into_micro_batches_changes_no_gradient(options: Options, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=7), label="lengths")
    masked = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=2), label="masked")
    order = data.draw(st.permutations(range(len(lengths))), label="order")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1)), label="cuts"))
    step = make_step(len(lengths), lengths, sorted(masked))
    whole = gradient(ours(options, step), step)
    rows = weighed(step.rows, options)
    parts = [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(lengths)], strict=True)]
    total = torch.zeros_like(whole)
    for part in parts:
        total += gradient(micro_batch_loss(options, [rows[i] for i in part], step.logprobs[list(part)]), step)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def test_weights_of_a_step_sum_to_one_row_mean_or_token_mean() -> None:
    assert token_weights("grpo", [1, 4], 8) == [0.5, 0.125]
    assert token_weights("rloo", [1, 4, 0], 8) == [0.5, 0.125, 0.0]
    assert token_weights("dapo", [1, 3, 0], 8) == token_weights("bnpo", [1, 3, 0], 8) == [0.25] * 3
    assert token_weights("cispo", [1, 3], 8) == [0.25] * 2
    assert token_weights("dr_grpo", [1, 4, 0], 8) == [1 / 16] * 3
    with pytest.raises(ValueError, match="unknown loss_type 'sapo'"):
        token_weights("sapo", [1], 8)


@ALL_OPTIONS
def test_a_step_in_which_nothing_counts_has_loss_and_gradient_zero(options: Options) -> None:
    step = make_step(4, masked=range(len(LENGTHS)))
    loss = ours(options, step)
    assert loss.item() == 0
    assert gradient(loss, step).equal(torch.zeros_like(step.logprobs))


def test_unknown_levels_are_refused() -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="'token', 'sequence' or 'sum', got 'word'"):
        losses.importance_ratio(ones, ones, torch.ones(1, 1, dtype=torch.long), "word")


def test_kl_estimates() -> None:
    """k3 is never negative, both vanish on equal policies, and on samples both average to the exact divergence."""
    policy = torch.tensor([0.5, 0.3, 0.2])
    reference = torch.tensor([0.2, 0.5, 0.3])
    exact = float((policy * (policy / reference).log()).sum())
    k3 = losses.k3_kl(policy.log()[None], reference.log()[None])
    k1 = losses.k1_kl(policy.log()[None], reference.log()[None])
    assert (k3 > 0).all()
    assert losses.k3_kl(policy.log()[None], policy.log()[None]).eq(0).all()
    assert float((policy * k1).sum()) == pytest.approx(exact, abs=1e-6)
    assert float((policy * k3).sum()) == pytest.approx(exact, abs=1e-6)


def test_cispo_takes_its_gradient_through_the_log_probability_alone() -> None:
    """A ratio above the bound still teaches, with the bound as its weight, where the clipped surrogate would not."""
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    ratio = losses.importance_ratio(logprobs, torch.tensor([[-4.0]]), torch.ones(1, 1, dtype=torch.long))
    advantages = torch.tensor([2.0])
    (slope,) = torch.autograd.grad(losses.cispo(ratio, advantages, logprobs, epsilon_high=5.0).loss.sum(), logprobs)
    assert slope.item() == pytest.approx(-10.0)
    ratio = losses.importance_ratio(logprobs, torch.tensor([[-4.0]]), torch.ones(1, 1, dtype=torch.long))
    term = losses.clipped_surrogate(ratio, advantages, epsilon=0.2, epsilon_high=0.2)
    (slope,) = torch.autograd.grad(term.loss.sum(), logprobs)
    assert slope.item() == 0
