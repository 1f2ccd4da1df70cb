"""The weights against written-out formulas and TRL's own code, truncated scoring, and whole runs with a noisy engine.

TRL's code is inside a method of its trainer, so its statements are taken out of the source and run on a stand-in.
"""

import ast
import copy
import inspect
import logging
import math
import shutil
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import tiny
from training_runs import ALGORITHMS, make_trainer, relative_difference, rows
from vlmroll import GRPOConfig, GRPOTrainer, TransformersGenerator
from vlmroll.batches import join_rollouts, make_batch
from vlmroll.config import PolicyConfig
from vlmroll.metrics import Metrics
from vlmroll.mismatch import (
    MODES,
    Truncation,
    difference,
    importance_weights,
    refuse_unscorable,
    truncated_logprobs,
    truncation_of,
)
from vlmroll.reporting import report_mismatch
from vlmroll.scoring import Scores, policy_logprobs
from vlmroll.types import Batch, Completion, GenerationOutput, Rollout, SamplingParams
from vlmroll_processors import ProcessorAdapter, Prompt, collate, load_adapter

NAN, INF = float("nan"), float("inf")
BOUNDS = ((None, 3.0), (0.8, 1.3), (0.9, None))
PROMPT = Prompt(prompt_ids=(5,), engine_ids=(5,))
modes = pytest.mark.parametrize("mode", MODES)
bounds = pytest.mark.parametrize(("low", "high"), BOUNDS)


def rollout(logprobs: Sequence[float], *, truncated: bool = False, **more: Any) -> Rollout:
    """One rollout whose engine reported these."""
    completion = Completion(
        completion_ids=(7,) * len(logprobs), logprobs=tuple(logprobs), finish_reason="stop", truncated=truncated
    )
    return Rollout(prompt=PROMPT, completion=completion, row={}, row_id=0, group=0, **more)


def correction(mode: str, low: float | None, high: float | None) -> dict[str, Any]:
    """The options of the correction."""
    names = ("mode", "clip_min", "clip_max")
    return {f"vllm_importance_sampling_{n}": v for n, v in zip(names, (mode, low, high), strict=True)}


# Weights


def written_out(gap: list[float], mask: list[int], mode: str, low: float | None, high: float | None) -> list[float]:
    """The weight of each token of a row, in plain Python."""
    known = [0.0 if not counts or value != value else value for value, counts in zip(gap, mask, strict=True)]
    logs = [sum(known)] * len(known) if mode.startswith("sequence") else known
    result: list[float] = []
    for ratio in map(math.exp, logs):
        below, above = low is not None and ratio < low, high is not None and ratio > high
        if mode.endswith("mask"):
            result.append(0.0 if below or above else ratio)
        else:
            bound = low if below else high if above else ratio
            assert bound is not None
            result.append(bound)
    return result


def random_gap(seed: int, scale: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """[4, 6] differences and a mask that counts between 1 and 6 tokens of a row."""
    generator = torch.Generator().manual_seed(seed)
    gap = torch.randn(4, 6, generator=generator) * scale
    lengths = torch.randint(1, 7, (4, 1), generator=generator)
    return gap, (torch.arange(6) < lengths).long()


@modes
@bounds
def test_the_weights_equal_the_written_out_formula(mode: str, low: float | None, high: float | None) -> None:
    out_of_bounds = 0
    for seed in range(5):
        gap, mask = random_gap(seed)
        gap[0, 0] = NAN
        found = importance_weights(gap, mask, mode, clip_min=low, clip_max=high).expand(4, 6)
        expected = torch.tensor(
            [written_out(g, m, mode, low, high) for g, m in zip(gap.tolist(), mask.tolist(), strict=True)]
        )
        torch.testing.assert_close(found, expected)
        ends = [0.0] if mode.endswith("mask") else [low, high]
        out_of_bounds += sum(int(found.eq(torch.tensor(end)).sum()) for end in ends if end is not None)
    assert out_of_bounds or high == 3.0, "bounds that nothing passes are not tested"


def of_trl(name: str) -> Any:
    """A module of TRL, which is no dependency."""
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"trl.trainer.{name}")


@cache
def trl_statements() -> tuple[Any, list[ast.stmt]]:
    """TRL's module, and the statements in it that compute weights and report them."""
    module = of_trl("grpo_trainer")
    tree = ast.parse(textwrap.dedent(inspect.getsource(module.GRPOTrainer._generate_and_score_completions)))
    condition = "self.use_vllm and self.vllm_importance_sampling_correction"
    found = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == condition]
    marks = ("per_token_logps_diff", "sampling_logp_difference")
    chosen = [[node for node in found if mark in ast.unparse(node)] for mark in marks]
    assert [len(nodes) for nodes in chosen] == [1, 1]
    return module, [node for nodes in chosen for node in nodes]


def trls(gap: torch.Tensor, mask: torch.Tensor, mode: str, low: Any, high: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """TRL's weights and metrics for one micro-batch."""
    module, statements = trl_statements()
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        accelerator=SimpleNamespace(gather=lambda tensor: tensor),  # pyright: ignore
        _metrics={"train": defaultdict[str, list[float]](list)},
    )
    names: dict[str, Any] = {
        **vars(module),
        "self": trainer,
        "mode": "train",
        "device": "cpu",
        "tool_mask": None,
        "completion_mask": mask,
        "old_per_token_logps": gap,
        "sampling_per_token_logps": torch.zeros_like(gap),
    }
    program = ast.fix_missing_locations(ast.Module(body=statements, type_ignores=[]))
    exec(compile(program, "trl", "exec"), names)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return names["vllm_importance_sampling_ratio"], metrics


@modes
@bounds
def test_weights_and_metrics_equal_trls(mode: str, low: float | None, high: float | None) -> None:
    for seed in range(3):
        gap, mask = random_gap(seed)
        gap[1, 0] = NAN
        expected, metrics = trls(gap, mask, mode, low, high)
        found = importance_weights(gap, mask, mode, clip_min=low, clip_max=high)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)
        of_ours = Metrics("T")
        report_mismatch(of_ours, [rollout([-1.0])] * 4, mask, gap, found)
        ours = of_ours.flush(lambda entries: entries)
        assert {name: ours[name] for name in metrics} == pytest.approx(metrics)


GAPS = st.lists(st.lists(st.floats(-3, 3, width=32), min_size=5, max_size=5), min_size=1, max_size=5)
LENGTHS = st.lists(st.integers(0, 5), min_size=5, max_size=5)
CHOICE = st.tuples(st.sampled_from(MODES), st.sampled_from(BOUNDS))


def masks(lengths: list[int], rows: int) -> torch.Tensor:
    return (torch.arange(5) < torch.tensor(lengths[:rows])[:, None]).long()


@given(values=GAPS, lengths=LENGTHS, choice=CHOICE, noise=st.sampled_from([NAN, INF, -INF, 5.0]))
def test_a_row_depends_on_its_own_counted_tokens_alone(
    values: list[list[float]], lengths: list[int], choice: Any, noise: float
) -> None:
    """Neither the cut into micro-batches, nor the padding, nor what stands on tokens that do not count matters."""
    (mode, (low, high)), gap = choice, torch.tensor(values)
    mask = masks(lengths, len(values))
    weigh = partial(importance_weights, mode=mode, clip_min=low, clip_max=high)
    together = weigh(gap, mask).expand(gap.shape)
    noisy = weigh(gap.masked_fill(mask == 0, noise), mask).expand(gap.shape)
    assert torch.equal(noisy, together)
    assert noisy.isfinite().all()
    for i, length in enumerate(lengths[: len(values)]):
        if length:
            alone = weigh(gap[i : i + 1, :length], mask[i : i + 1, :length]).expand(1, length)
            torch.testing.assert_close(alone, together[i : i + 1, :length])


@given(values=GAPS, lengths=LENGTHS, choice=CHOICE)
def test_weights_lie_within_the_bounds_and_carry_no_gradient(
    values: list[list[float]], lengths: list[int], choice: Any
) -> None:
    (mode, (low, high)), gap = choice, torch.tensor(values, requires_grad=True)
    mask = masks(lengths, len(values))
    found = importance_weights(difference_of(gap), mask, mode, clip_min=low, clip_max=high)
    assert not found.requires_grad
    inside = found.ge(torch.tensor(0.0 if low is None else low)) & found.le(torch.tensor(high or INF))
    assert (inside | found.eq(0) if mode.endswith("mask") else inside).all()
    equal = importance_weights(torch.zeros_like(gap), mask, mode, clip_min=low, clip_max=high)
    assert equal.eq(1).all(), "an engine that agrees with the policy changes nothing"


def difference_of(logprobs: torch.Tensor) -> torch.Tensor:
    """Of policy scores that take gradients and an engine that reported 0 everywhere."""
    return difference([rollout([0.0] * logprobs.shape[1])] * len(logprobs), logprobs)


@modes
def test_weights_are_finite_however_far_apart_the_models_are(mode: str) -> None:
    gap, mask = torch.tensor([[300.0, 0.0], [-300.0, 0.0]]), torch.ones(2, 2, dtype=torch.long)
    assert importance_weights(gap, mask, mode, clip_min=None, clip_max=None).isfinite().all()
    found = importance_weights(gap, mask, mode, clip_min=0.5, clip_max=3.0)[:, 0]
    assert found.tolist() == ([0.0, 0.0] if mode.endswith("mask") else [3.0, 0.5])


def test_unknown_modes_are_refused() -> None:
    gap, mask = random_gap(0)
    with pytest.raises(ValueError, match="mode must be one of .*'sequence_truncate'.*, got 'token'"):
        importance_weights(gap, mask, "token", clip_min=None, clip_max=3.0)


def test_the_difference_is_taken_between_like_and_like() -> None:
    """Truncated with truncated, and plain with plain; what the engine did not report is not known."""
    rows = [rollout([-1.0, -2.0], truncated=True), rollout([-1.0, NAN, -INF])]
    logprobs = torch.tensor([[-1.5, -2.5, 0.0], [-2.0, -3.0, -4.0]], requires_grad=True)
    truncated = torch.tensor([[-0.5, -1.0, 0.0], [-9.0, -9.0, -9.0]])
    found = difference(rows, logprobs, truncated)
    assert not found.requires_grad
    torch.testing.assert_close(found, torch.tensor([[0.5, 1.0, 0.0], [-1.0, NAN, NAN]]), equal_nan=True)
    plain = difference(rows, logprobs)
    torch.testing.assert_close(plain, torch.tensor([[-0.5, -0.5, 0.0], [-1.0, NAN, NAN]]), equal_nan=True)


# The loss, against TRL's


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
@modes
def test_loss_and_gradient_equal_trls_with_kl(mode: str, loss_type: str, tmp_path: Path) -> None:
    """The policy loss is weighted and the KL term is not, in `compute_loss` as in TRL's."""
    gap, mask = random_gap(4)
    generator = torch.Generator().manual_seed(5)
    logprobs, old, ref = (-torch.rand(4, 6, generator=generator) * mask for _ in range(3))
    logprobs.requires_grad_()
    advantages, lengths = torch.tensor([1.0, -0.5, 0.3, -1.2]), mask.sum(1).tolist()
    scale = {"grpo": [1 / (4 * n) for n in lengths], "dr_grpo": [1 / (4 * 6)] * 4}
    weights = scale.get(loss_type, [1 / sum(lengths)] * 4)
    rows = [
        rollout(
            [0.0] * n,
            old_logprobs=tuple(old[i, :n].tolist()),
            ref_logprobs=tuple(ref[i, :n].tolist()),
            mismatch=tuple(gap[i, :n].tolist()),
            advantage=advantages[i].item(),
            loss_weight=weights[i],
        )
        for i, n in enumerate(lengths)
    ]
    options = correction(mode, 0.8, 1.3)
    args = GRPOConfig(str(tmp_path), use_cpu=True, loss_type=loss_type, beta=0.1, epsilon_high=0.4, **options)
    ours = compute_loss(args, rows, logprobs)
    module = of_trl("grpo_trainer")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros(4, 6), None),  # pyright: ignore
        _metrics={"train": defaultdict[str, list[float]](list)},
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda tensor: tensor,  # pyright: ignore
            reduce=lambda tensor, reduction: tensor,  # pyright: ignore
            pad_across_processes=lambda tensor, dim, pad_index: tensor,  # pyright: ignore
        ),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=True, steps_per_generation=1),
        loss_type=loss_type,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.1,
        epsilon_low=0.2,
        epsilon_high=0.4,
        max_completion_length=6,
        current_gradient_accumulation_steps=1,
    )
    ones = torch.ones(4, 1, dtype=torch.long)
    theirs = module.GRPOTrainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": ones,
            "prompt_mask": ones,
            "completion_ids": mask * 7,
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
            "importance_sampling_ratio": trls(gap * mask, mask, mode, 0.8, 1.3)[0],
            "num_items_in_batch": mask.sum(),
        },
    )
    torch.testing.assert_close(ours, theirs)
    slopes = [torch.autograd.grad(loss, logprobs, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes)
    args.vllm_importance_sampling_correction = False
    assert abs((compute_loss(args, rows, logprobs) - ours).item()) > 1e-4


def compute_loss(args: PolicyConfig, rows: Sequence[Rollout], logprobs: torch.Tensor) -> torch.Tensor:
    """`GRPOTrainer.compute_loss` where the policy's scores are given."""

    def score(model: Any, inputs: Any, **more: Any) -> Scores:
        width = inputs.completion_mask.shape[1]
        return Scores(logprobs=logprobs[:, :width], entropies=None, truncated=None)

    def join(model: Any, rows: Sequence[Rollout]) -> Batch:
        return make_batch(rows, pad_token_id=0, device="cpu")

    def gap(rows: Sequence[Rollout], scores: Scores) -> torch.Tensor:
        return difference(rows, scores.logprobs, scores.truncated)

    trainer: Any = SimpleNamespace(
        args=args,
        metrics={"train": Metrics("T")},
        kl_in_loss=True,
        accelerator=SimpleNamespace(num_processes=1),
        scorer=SimpleNamespace(batch=join, score=score, gap=gap),
    )
    trainer.policy_term = partial(GRPOTrainer.policy_term, trainer)
    trainer.ratio_bounds = lambda: (0.8, 1.4)
    return GRPOTrainer.compute_loss(trainer, SimpleNamespace(training=True), list(rows))


# Truncated sampling


def truncated_by_hand(logprobs: list[float], truncation: Truncation) -> list[float]:
    """The probabilities after min_p, top_k and top_p, in this order, each on what the last one left."""
    probabilities = [math.exp(value) for value in logprobs]
    kept = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    kept = [i for i in kept if probabilities[i] >= truncation.min_p * probabilities[kept[0]]]
    kept = kept[: truncation.top_k] if truncation.top_k else kept
    total, reached, nucleus = sum(probabilities[i] for i in kept), 0.0, list[int]()
    for i in kept:
        if not nucleus or reached < truncation.top_p * total:
            nucleus.append(i)
        reached += probabilities[i]
    whole = sum(probabilities[i] for i in nucleus)
    return [probability / whole if i in nucleus else 0.0 for i, probability in enumerate(probabilities)]


TRUNCATIONS = (
    Truncation(min_p=0.0, top_k=0, top_p=0.8),
    Truncation(min_p=0.0, top_k=5, top_p=1.0),
    Truncation(min_p=0.2, top_k=0, top_p=1.0),
    Truncation(min_p=0.0, top_k=20, top_p=0.7),
    Truncation(min_p=0.05, top_k=12, top_p=0.9),
)


def text_scores(model: Any, prompt: Sequence[int], completion: Sequence[int], banned: Sequence[int]) -> torch.Tensor:
    """[C, V] log-probabilities of a text model at each completion token, from all of its logits."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float()
    logits[:, list(banned)] = -INF
    return logits


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_written_out_truncated_probability(truncation: Truncation, temperature: float) -> None:
    """Rows of a random model that are sampled by the written-out distribution, and scored with the pass's own."""
    model, adapter = tiny("text").model, load_adapter(tiny("text").processor)
    generator, banned = torch.Generator().manual_seed(7), [3, 4]
    prompts = adapter.encode([{"prompt": [{"role": "user", "content": text}]} for text in ("how many ?", "a")])
    completions: list[list[int]] = []
    expected: list[list[float]] = []
    with torch.no_grad():
        for prompt in prompts:
            ids, values = list[int](), list[float]()
            for _ in range(8):
                logits = text_scores(model, prompt.prompt_ids, [*ids, 0], banned)[-1] / temperature
                by_hand = truncated_by_hand(logits.log_softmax(-1).tolist(), truncation)
                ids.append(int(torch.multinomial(torch.tensor(by_hand), 1, generator=generator)))
                values.append(math.log(by_hand[ids[-1]]))
            completions.append(ids)
            expected.append(values)
        batch = collate(prompts, completions, pad_token_id=adapter.pad_token_id)
        settings: dict[str, Any] = {"temperature": temperature, "banned_ids": banned, "chunk_size": 5}
        scores = policy_logprobs(model, batch, **settings, truncation=truncation)
        plain = policy_logprobs(model, batch, **settings)
    assert scores.truncated is not None
    torch.testing.assert_close(scores.truncated, torch.tensor(expected), atol=1e-4, rtol=1e-4)
    assert torch.equal(scores.logprobs, plain.logprobs), "the objective's own scores are not truncated"
    assert plain.truncated is None
    assert (scores.truncated - scores.logprobs).max() > 0.01


@given(seed=st.integers(0, 99), truncation=st.sampled_from(TRUNCATIONS))
def test_truncated_scores_of_any_id_are_finite_and_those_inside_sum_to_1(seed: int, truncation: Truncation) -> None:
    """100 distributions: more than are truncated at one time."""
    logits = torch.randn(100, 30, generator=torch.Generator().manual_seed(seed)) * 2
    every = torch.stack(
        [truncated_logprobs(logits, torch.full((100,), i, dtype=torch.long), 0.7, truncation) for i in range(30)], 1
    )
    assert every.isfinite().all()
    by_hand = torch.tensor([truncated_by_hand(row, truncation) for row in (logits / 0.7).log_softmax(-1).tolist()])
    inside = by_hand > 0
    torch.testing.assert_close(every[inside].exp(), by_hand[inside], atol=1e-5, rtol=1e-4)
    # An id outside is taken in beside the others.
    plain = (logits / 0.7).softmax(-1)
    beside = plain / ((plain * inside).sum(1, keepdim=True) + plain)
    torch.testing.assert_close(every.exp()[~inside], beside[~inside], atol=1e-6, rtol=1e-4)


@pytest.mark.vllm
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_the_truncated_set_is_vllms(truncation: Truncation) -> None:
    ops = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(3)) * 2
    kept = logits.clone()
    probabilities = kept.softmax(-1)
    kept.masked_fill_(probabilities < truncation.min_p * probabilities.amax(-1, keepdim=True), -INF)
    k = torch.full((200,), truncation.top_k or 50)
    kept = ops.apply_top_k_top_p_pytorch(kept, k, torch.full((200,), truncation.top_p))
    ids = kept.argsort(-1, descending=True)[:, 0]
    expected = kept.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    torch.testing.assert_close(truncated_logprobs(logits, ids, 1.0, truncation), expected)


def test_truncation_is_asked_for_only_where_it_was_in_force() -> None:
    rows = [rollout([-1.0]), rollout([-1.0], truncated=True)]
    on = Truncation(min_p=0.1, top_k=5, top_p=0.9)
    assert truncation_of(rows, min_p=0.1, top_k=5, top_p=0.9) == on
    assert truncation_of(rows, min_p=None, top_k=None, top_p=0.9) == Truncation(min_p=0.0, top_k=0, top_p=0.9)
    assert truncation_of(rows, min_p=None, top_k=0, top_p=1.0) is None
    assert truncation_of(rows[:1], min_p=0.1, top_k=5, top_p=0.9) is None
    scored = [replace(row, old_logprobs=(-1.0,)) for row in rows]
    assert truncation_of(scored, min_p=0.1, top_k=5, top_p=0.9) is None, "the difference is known by then"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"repetition_penalty": 1.1}, r"repetition_penalty=1\.1"),
        ({"regex": "a+"}, r"vllm_structured_outputs_regex='a\+'"),
        ({"generation_kwargs": {"stop": ["x"], "min_tokens": 3}}, r"generation_kwargs\['min_tokens'\]"),
        *(
            ({"generation_kwargs": [name]}, rf"generation_kwargs\['{name}'\]")
            for name in ("frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "allowed_token_ids")
        ),
        ({"generation_kwargs": ["logits_processors"]}, r"generation_kwargs\['logits_processors'\]"),
    ],
)
def test_settings_that_scoring_cannot_repeat_are_refused(settings: dict[str, Any], named: str) -> None:
    plain: dict[str, Any] = {"repetition_penalty": 1.0, "regex": None, "generation_kwargs": ()}
    with pytest.raises(ValueError, match=f"^{named} changes .* set vllm_importance_sampling_correction=False$"):
        refuse_unscorable(**(plain | settings))
    refuse_unscorable(**plain)
    plain["generation_kwargs"] = ["stop", "stop_token_ids", "ignore_eos", "max_tokens", "seed"]
    refuse_unscorable(**plain)


# Whole runs

Report = Callable[[Any, Prompt, Completion], Sequence[float]]


@dataclass
class Engine:
    """Samples as the policy does, and reports log-probabilities of its own making.

    Attributes:
        report: policy, prompt, completion -> what it reports.
        truncated: what it says of these.
    """

    adapter: ProcessorAdapter
    report: Report
    truncated: bool = False
    has_mismatch: bool = True

    def __post_init__(self) -> None:
        self.banned_ids = self.adapter.vision_ids

    def sync_weights(self, policy: Any) -> None:
        self.policy = policy

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        output = TransformersGenerator(self.policy, self.adapter).generate(prompts, sampling, num_generations)
        groups = [
            tuple(
                replace(c, logprobs=tuple(self.report(self.policy, prompt, c)), truncated=self.truncated) for c in group
            )
            for prompt, group in zip(prompts, output.completions, strict=True)
        ]
        return replace(output, completions=tuple(groups))

    def close(self) -> None:
        """Nothing to free."""


def noisy(scale: float, missing: bool = False) -> Report:
    """Noise on what the policy reports, by the ids alone; `missing` leaves out the first number."""

    def report(policy: Any, prompt: Prompt, completion: Completion) -> list[float]:
        seed = sum((i + 1) * id for i, id in enumerate((*prompt.prompt_ids, *completion.completion_ids)))
        noise = torch.randn(len(completion.logprobs), generator=torch.Generator().manual_seed(seed)) * scale
        values = [value + float(extra) for value, extra in zip(completion.logprobs, noise, strict=True)]
        return [NAN, *values[1:]] if missing else values

    return report


def engine(report: Report, name: str = "text", **more: Any) -> Engine:
    return Engine(load_adapter(tiny(name).processor), report, **more)


def run(
    algorithm: str, folder: Path, **options: Any
) -> tuple[Any, list[tuple[dict[str, Any], dict[str, torch.Tensor]]]]:
    """A trainer after training, and for each step the weights that its gradients were taken at, and these."""
    from transformers import TrainerCallback

    steps: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []

    class Recorder(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            steps.append((copy.deepcopy(model.state_dict()), grads))

    defaults: dict[str, Any] = {"model": "text", "max_grad_norm": 0.0, "callbacks": [Recorder()]}
    trainer = make_trainer(algorithm, folder, **(defaults | options))
    trainer.train()
    return trainer, steps


def by_hand(trainer: Any, state: dict[str, Any], rows: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    """The gradients of a step over `rows` at the weights `state`, row by row and token by token."""
    args, model, first = trainer.args, copy.deepcopy(tiny("text").model), tiny("text").model
    model.load_state_dict(state)
    mode, low, high = args.mismatch_bounds.values()
    banned = sorted(trainer.generator.banned_ids)
    tokens = sum(len(row.completion.completion_ids) for row in rows)
    total = torch.zeros(())
    for row in rows:
        ids = row.completion.completion_ids
        given = (row.prompt.prompt_ids, ids, banned)
        picked = torch.tensor(ids)[:, None]
        now = text_scores(model, *given).log_softmax(-1).gather(-1, picked)[:, 0]
        with torch.no_grad():
            old = text_scores(first, *given).log_softmax(-1).gather(-1, picked)[:, 0]
        gap = [a - b for a, b in zip(old.tolist(), row.completion.logprobs, strict=True)]
        weights = torch.tensor(written_out(gap, [1] * len(ids), mode, low, high))
        ratio = (now - old).sum().exp() if args.importance_sampling_level == "sequence" else (now - old).exp()
        clipped = ratio.clamp(1 - args.epsilon, 1 + args.epsilon)
        loss = -torch.minimum(ratio * row.advantage, clipped * row.advantage) * weights
        if args.loss_type != "rloo":
            loss = loss + args.beta * ((old - now).exp() - (old - now) - 1) * ratio
        total = total + (loss.mean() / len(rows) if args.loss_type == "rloo" else loss.sum() / tokens)
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


CUTS = [(1, 8), (4, 2), (8, 1)]
WEIGHED = [("token_truncate", 0.9, 1.1), ("sequence_mask", 0.7, 1.5), ("token_mask", None, 1.15)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("how", WEIGHED, ids=str)
def test_the_gradient_is_the_hand_weighted_one_however_it_is_cut(algorithm: str, how: Any, tmp_path: Path) -> None:
    """RLOO with KL in its rewards scores the policy beforehand, GRPO takes the difference from the training pass."""
    options = {**correction(*how), "max_steps": 1, "beta": 0.1}
    corrected: list[dict[str, torch.Tensor]] = []
    reported: list[dict[str, float]] = []
    for size, accumulation in CUTS:
        trainer, ((state, found),) = run(
            algorithm,
            tmp_path,
            generator=engine(noisy(0.15)),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            **options,
        )
        rows = trainer._round.rollouts
        assert {row.mismatch is None for row in rows} == {algorithm == "grpo"}
        assert relative_difference(by_hand(trainer, state, rows), found) < 1e-4
        corrected.append(found)
        reported.append({n: v for n, v in trainer.state.log_history[0].items() if n.startswith("sampling/")})
        ratio = "sampling/importance_sampling_ratio"
        assert reported[-1][f"{ratio}/min"] < 0.95
        assert reported[-1][f"{ratio}/max"] > 1.05
        assert reported[-1] == pytest.approx(reported[0], rel=1e-4)
    _, ((_, plain),) = run(algorithm, tmp_path, **options)
    assert relative_difference(plain, corrected[0]) > 0.02, "weights that change nothing are not tested"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("rounds", [{"num_iterations": 2}, {"steps_per_generation": 4}], ids=str)
def test_later_steps_of_a_round_are_weighted_by_the_policy_that_began_it(
    algorithm: str, rounds: dict[str, int], tmp_path: Path
) -> None:
    options = {**correction("token_truncate", 0.9, 1.1), "max_steps": 2, "beta": 0.1, "epsilon": 5.0, **rounds}
    trainer, steps = run(algorithm, tmp_path, generator=engine(noisy(0.15)), **options)
    rows = trainer._round.rollouts
    assert all(row.mismatch is not None for row in rows)
    parts = [rows[:8], rows[8:] or rows]
    for (state, found), part in zip(steps, parts, strict=True):
        assert relative_difference(by_hand(trainer, state, part), found) < 1e-3


def exactly(policy: Any, prompt: Prompt, completion: Completion) -> list[float]:
    """What the trainer's own pass says of a completion, in a micro-batch of one."""
    row = Rollout(prompt=prompt, completion=completion, row={}, row_id=0, group=0)
    padded = join_rollouts([row], pad_token_id=load_adapter(tiny("text").processor).pad_token_id, device="cpu")
    banned = sorted(load_adapter(tiny("text").processor).vision_ids)
    with torch.no_grad():
        return policy_logprobs(policy, padded, banned_ids=banned).logprobs[0].tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_an_engine_that_agrees_changes_nothing(algorithm: str, mode: str, tmp_path: Path) -> None:
    """Bit for bit where it agrees exactly, and up to rounding where it rounds otherwise."""
    options = {
        **correction(mode, None, 3.0),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
    }
    plain, expected = run(algorithm, tmp_path, **options)
    same, found = run(algorithm, tmp_path, generator=engine(exactly), **options)
    log = same.state.log_history[0]
    assert log["sampling/sampling_logp_difference/max"] == 0
    assert log["sampling/importance_sampling_ratio/min"] == log["sampling/importance_sampling_ratio/max"] == 1
    for (_, one), (_, other) in zip(expected, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(name.startswith("sampling/") for name in plain.state.log_history[0])
    rounded, steps = run(algorithm, tmp_path, generator=engine(noisy(0.0)), **options)
    assert rounded.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert relative_difference(expected[0][1], steps[0][1]) < 1e-4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_correction_can_be_switched_off_and_is_still_measured(algorithm: str, tmp_path: Path) -> None:
    off = {"vllm_importance_sampling_correction": False, "max_steps": 1}
    trainer, ((_, found),) = run(algorithm, tmp_path, generator=engine(noisy(0.15)), **off)
    _, ((_, expected),) = run(algorithm, tmp_path, max_steps=1)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    log = trainer.state.log_history[0]
    assert 0.05 < log["sampling/sampling_logp_difference/mean"] < log["sampling/sampling_logp_difference/max"]
    assert log["sampling/importance_sampling_ratio/max"] > 1.01


def test_a_generator_without_a_mismatch_of_its_own_is_not_corrected(tmp_path: Path) -> None:
    _, ((_, found),) = run("grpo", tmp_path, generator=engine(noisy(0.15), has_mismatch=False), max_steps=1)
    _, ((_, expected),) = run("grpo", tmp_path, max_steps=1)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("options", [{"max_steps": 1}, {"max_steps": 2, "num_iterations": 2}], ids=str)
def test_an_engine_that_truncates_is_compared_with_the_truncated_policy(options: Any, tmp_path: Path) -> None:
    truncation = Truncation(min_p=0.0, top_k=8, top_p=0.8)

    def report(policy: Any, prompt: Prompt, completion: Completion) -> list[float]:
        banned = sorted(load_adapter(tiny("text").processor).vision_ids)
        with torch.no_grad():
            logits = text_scores(policy, prompt.prompt_ids, completion.completion_ids, banned) / 0.8
        rows = zip(logits.log_softmax(-1).tolist(), completion.completion_ids, strict=True)
        return [math.log(truncated_by_hand(row, truncation)[id]) for row, id in rows]

    sampled = {"top_k": 8, "top_p": 0.8, "temperature": 0.8, **options}
    trainer, _ = run("grpo", tmp_path, generator=engine(report, truncated=True), **sampled)
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-3
    trainer, _ = run("grpo", tmp_path, generator=engine(report), **sampled)
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/mean"] > 0.1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_resumes_inside_a_round_bit_for_bit(algorithm: str, tmp_path: Path) -> None:
    """With weights that differ from 1, and with numbers that the engine did not report."""
    rounds = {"num_iterations": 2, "steps_per_generation": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    options = {**correction("token_truncate", 0.5, 2.0), **rounds, "learning_rate": 3e-3}
    report = noisy(0.2, missing=True)
    whole, _ = run(algorithm, tmp_path / "whole", generator=engine(report), **options)
    for stop in (1, 3):
        copied = tmp_path / f"stopped_{stop}" / f"checkpoint-{stop}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{stop}", copied)
        resumed: Any = make_trainer(
            algorithm, copied.parent, model="text", max_grad_norm=0.0, generator=engine(report), **options
        )
        resumed.train(resume_from_checkpoint=str(copied))
        expected, again = (dict(trainer.model.state_dict()) for trainer in (whole, resumed))
        assert all(torch.equal(expected[name], again[name]) for name in expected), stop
        logs = [
            [
                {n: v for n, v in log.items() if n.startswith("sampling/")}
                for log in t.state.log_history
                if log["step"] > stop
            ]
            for t in (whole, resumed)
        ]
        assert logs[0][:-1] == logs[1][:-1]
        assert logs[0][0]


def test_a_run_with_pictures_reports_by_their_number_and_evaluates(tmp_path: Path) -> None:
    def report(policy: Any, prompt: Prompt, completion: Completion) -> list[float]:
        return [value + 0.01 + 0.1 * len(prompt.images) for value in completion.logprobs]

    name = "qwen2_5_vl"
    data = rows(16, name)
    trainer, _ = run(
        "grpo",
        tmp_path,
        model=name,
        generator=engine(report, name),
        data=data,
        shuffle_dataset=False,
        gradient_accumulation_steps=4,
        max_steps=1,
        eval_dataset=data[2:3],
        per_device_eval_batch_size=4,
    )
    log = trainer.state.log_history[0] | trainer.evaluate()
    of = "sampling/sampling_logp_difference"
    assert log[f"{of}/text_only/mean"] == pytest.approx(0.01, abs=1e-3)
    assert log[f"{of}/one_image/mean"] == pytest.approx(0.11, abs=1e-3)
    assert 0.21 < log[f"{of}/many_images/mean"] < log[f"{of}/many_images/max"]
    assert log[f"{of}/many_images/max"] == log[f"{of}/max"] == pytest.approx(0.31, abs=1e-3)
    assert log[f"eval_{of}/mean"] == log[f"eval_{of}/text_only/mean"] == pytest.approx(0.01, abs=1e-3)
    assert f"eval_{of}/one_image/mean" not in log


def test_a_large_difference_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vlmroll.reporting"):
        run("grpo", tmp_path, generator=engine(noisy(0.05)), max_steps=2)
        assert not caplog.records
        run("grpo", tmp_path, generator=engine(noisy(1.0)), max_steps=3)
    (record,) = caplog.records
    assert "differ by 0." in record.getMessage()
    assert "vlmroll check" in record.getMessage()
