"""`vlmroll check`: right generators pass, and each wrong one fails in the line that tells what is wrong."""

import copy
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tiny_models import picture, tiny
from vlmroll.checking import CheckError, CheckReport, Difference, GeneratorReport, Outcome, check_generators
from vlmroll.checking.disturbance import Disturbance
from vlmroll.checking.prompts import encode_prompts, kind_of
from vlmroll.cli import main
from vlmroll.generators import Generator, ScriptedGenerator, TransformersGenerator
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import Prompt, load_adapter
from vlmroll_processors.adapter import FamilyAdapter

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "qwen2_5_vl"
FEW: dict[str, Any] = {"max_tokens": 3, "num_generations": 2}
AFTER = ("greedy tokens", "log-probabilities", "vision ids", "weights synced", "weights restored")
PICTURE_KINDS, ALL_KINDS = ("one picture", "many pictures"), ("text only", "one picture", "many pictures")


@cache
def adapter(name: str = NAME) -> FamilyAdapter:
    return load_adapter(tiny(name).processor)


def results(report: CheckReport, name: str = "it") -> dict[str, str]:
    """Line -> result, of one generator."""
    (found,) = (generator for generator in report.generators if generator.name == name)
    return {outcome.name: outcome.result for outcome in found.outcomes}


def failed(report: CheckReport) -> dict[str, str]:
    """Line -> what is wrong."""
    return {outcome.name: outcome.detail for generator in report.generators for outcome in generator.failures}


# Right generators.


@pytest.mark.parametrize("name", ["text", NAME, "qwen3_vl", "paligemma", "llava"])
def test_the_policy_itself_passes_and_keeps_its_weights(name: str) -> None:
    model = copy.deepcopy(tiny(name).model).train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = TransformersGenerator(model, adapter(name))
    report = check_generators(model, adapter(name), {"it": engine}, **FEW)
    report.raise_for_failures()
    assert report.passed
    assert results(report) == dict.fromkeys(("prompt ids", *AFTER), "passed")
    (found,) = report.generators
    assert [outcome.detail for outcome in found.outcomes] == [""] * 6, "the noise was enough to tell everything"
    kinds = {"text": ALL_KINDS[:1], "paligemma": PICTURE_KINDS}.get(name, ALL_KINDS)
    assert dict(report.prompts) == dict.fromkeys(kinds, 2)
    assert [(d.kind, d.temperature) for d in found.differences] == [(k, t) for t in (1.0, 0.7) for k in kinds]
    assert all(0 <= d.mean <= d.max < 1e-4 and 4 <= d.num_tokens <= 12 for d in found.differences)
    assert found.tokens_per_second is not None
    assert found.tokens_per_second > 0
    assert (report.dtype, report.device, report.tolerance) == ("float32", "cpu", 1e-3)
    assert engine.policy_version == 2, "new weights, and the old ones again"
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_half_precision_has_a_tolerance_of_its_own() -> None:
    model = copy.deepcopy(tiny("text").model).bfloat16()
    report = check_generators(model, adapter("text"), {"it": TransformersGenerator(model, adapter("text"))}, **FEW)
    assert (report.tolerance, report.dtype, report.passed) == (5e-2, "bfloat16", True)


def test_every_generator_has_its_own_column() -> None:
    model = tiny("text").model
    right = TransformersGenerator(model, adapter("text"))
    report = check_generators(model, adapter("text"), {"a": Shifted(model, "text"), "it": right, "c": right}, **FEW)
    assert [generator.name for generator in report.generators] == ["a", "it", "c"]
    assert set(results(report).values()) == {"passed"}
    with pytest.raises(CheckError, match=r"^a: log-probabilities: text only, temperature 1: 5.0e-01 on average.*$"):
        report.raise_for_failures()
    header, line = (line.split() for line in str(report).splitlines()[1:6] if re.match(r" +a |log-prob", line))
    assert header == ["a", "it", "c"]
    assert line == ["log-probabilities", "NO", "yes", "yes"]


# Wrong ones.


class Wrong:
    """The policy itself, until a subclass breaks something."""

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self.inner = TransformersGenerator(model, adapter(name))

    @property
    def banned_ids(self) -> frozenset[int]:
        return self.inner.banned_ids

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        output = self.inner.generate(prompts, sampling, num_generations)
        groups = [
            tuple(self.change(prompt, completion, sampling) for completion in group)
            for prompt, group in zip(prompts, output.completions, strict=True)
        ]
        return replace(output, completions=tuple(groups))

    def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
        return completion

    def sync_weights(self, policy: Any) -> None:
        self.inner.sync_weights(policy)

    def close(self) -> None:
        pass


class WrongEcho(Wrong):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        output = super().generate(prompts, sampling, num_generations)
        return replace(output, prompt_ids=tuple(ids[1:] for ids in output.prompt_ids))


class OtherOrder(Wrong):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        return super().generate(prompts[::-1], sampling, num_generations)


class OtherPrompts(Wrong):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        return super().generate([prompts[0]] * len(prompts), sampling, num_generations)


class Broken(Wrong):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        raise RuntimeError("the engine\n is dead")


class OneFewer(Wrong):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        return super().generate(prompts, sampling, max(1, num_generations - 1))


class OtherGreedy(Wrong):
    """Takes another token in the third place."""

    def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
        if sampling.temperature:
            return completion
        ids = completion.completion_ids
        return replace(completion, completion_ids=(*ids[:2], (ids[2] + 100) % 300, *ids[3:]))


class Shorter(Wrong):
    def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
        cut = slice(1 if sampling.temperature == 0 else None)
        return replace(completion, completion_ids=completion.completion_ids[cut], logprobs=completion.logprobs[cut])


class Shifted(Wrong):
    def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
        return replace(completion, logprobs=tuple(logprob - 0.5 for logprob in completion.logprobs))


class ShiftedWithPictures(Shifted):
    def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
        return super().change(prompt, completion, sampling) if prompt.images else completion


class Unscaled(Wrong):
    """Reports about what the model says at temperature 1."""

    def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
        scale = sampling.temperature or 1.0
        return replace(completion, logprobs=tuple(logprob * scale for logprob in completion.logprobs))


class NoNumber(Wrong):
    def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
        return replace(completion, logprobs=(float("nan"),) * len(completion.logprobs))


class SamplesAVisionId(Wrong):
    """As second token, at a high temperature; a subclass at any."""

    least = 2.0

    def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
        if sampling.temperature < self.least:
            return completion
        first, _, *rest = completion.completion_ids
        return replace(completion, completion_ids=(first, min(self.banned_ids), *rest))


class SamplesVisionIds(SamplesAVisionId):
    least = 0.5


class BansNothing(Wrong):
    def __init__(self, model: Any, name: str) -> None:
        super().__init__(model, name)
        self.inner.banned_ids = frozenset()


class SaysThatItBans(BansNothing):
    @property
    def banned_ids(self) -> frozenset[int]:
        return adapter().vision_ids


class Separate(Wrong):
    """Has weights of its own, as an engine does."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(copy.deepcopy(model), name)
        self.times = 0

    def sync_weights(self, policy: Any) -> None:
        self.times += 1
        source = policy.state_dict()
        self.model.load_state_dict({key: source[key] for key in source if self.takes(key)}, strict=False)

    def takes(self, key: str) -> bool:
        return True


class IgnoresSync(Separate):
    def takes(self, key: str) -> bool:
        return False


class LeavesTheTowerOut(Separate):
    def takes(self, key: str) -> bool:
        return ".visual." not in key


class LeavesTheTextOut(Separate):
    def takes(self, key: str) -> bool:
        return ".visual." in key


class SyncsOnce(Separate):
    def takes(self, key: str) -> bool:
        return self.times == 1


class RefusesWeights(Wrong):
    def sync_weights(self, policy: Any) -> None:
        raise ValueError("no place for lm_head.weight")


# Kind -> the model that shows it, and line -> what is said.
WRONG: dict[type[Wrong], tuple[str, dict[str, str]]] = {
    WrongEcho: ("text", {"prompt ids": r"prompt 0: the engine used \d+ ids that differ from the \d+ encoded"}),
    OtherOrder: ("text", {"prompt ids": "the answers are in another order than the prompts"}),
    OtherPrompts: ("text", {"prompt ids": "it answers other prompts than it was asked"}),
    Broken: ("text", {"prompt ids": "RuntimeError: the engine is dead"}),
    OneFewer: ("text", {"log-probabilities": "prompt 0: 1 completions came for 2"}),
    OtherGreedy: (
        "text",
        {"greedy tokens": r"prompt 0 \(text only\), token 2: \d+ \('.+'\) instead of \d+ \(.*prompt 1"},
    ),
    Shorter: ("text", {"greedy tokens": r"prompt 0 \(text only\), it has 1 tokens instead of 3;"}),
    Shifted: (
        "text",
        {"log-probabilities": "text only, temperature 1: 5.0e-01 on average, 5.0e-01 at most; text only, "},
    ),
    ShiftedWithPictures: (NAME, {"log-probabilities": "one picture, temperature 1: (?!.*text only).*many pictures"}),
    Unscaled: ("text", {"log-probabilities": "text only, temperature 0.7: (?!.*temperature 1:)"}),
    NoNumber: ("text", dict.fromkeys(("log-probabilities", "weights synced", "weights restored"), ".*nan")),
    SamplesAVisionId: (NAME, {"vision ids": r"it sampled \[\d+\]$"}),
    SamplesVisionIds: (NAME, {"vision ids": r"it sampled \[\d+\]$"}),
    IgnoresSync: ("text", {"weights synced": "text only: .* off on average, at most 1.0e-03 is right"}),
    LeavesTheTowerOut: (NAME, {"weights synced": "one picture: (?!.*text only).*many pictures: "}),
    LeavesTheTextOut: (NAME, {"weights synced": "text only: "}),
    SyncsOnce: ("text", {"weights restored": "text only: "}),
    RefusesWeights: ("text", dict.fromkeys(("weights synced", "weights restored"), "no place for lm_head.weight")),
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_what_is_wrong_fails_in_its_line_and_in_no_other(kind: type[Wrong]) -> None:
    name, expected = WRONG[kind]
    model = copy.deepcopy(tiny(name).model)
    report = check_generators(model, adapter(name), {"it": kind(model, name)}, **FEW)
    assert not report.passed
    found = failed(report)
    assert found.keys() == expected.keys(), str(report)
    for line, pattern in expected.items():
        assert re.match(pattern, found[line]), found[line]
    left = AFTER if kind in (WrongEcho, OtherPrompts, Broken) else AFTER[2:] if kind is OneFewer else ()
    assert [line for line, result in results(report).items() if result == "not run"] == list(left)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), tiny(name).model.parameters(), strict=True))


def test_noise_is_large_enough_for_the_tolerance() -> None:
    """What 2 % of noise changes lies within this tolerance."""
    model = copy.deepcopy(tiny("text").model)
    report = check_generators(model, adapter("text"), {"it": IgnoresSync(model, "text")}, tolerance=0.1, **FEW)
    assert failed(report).keys() == {"weights synced"}


@pytest.mark.parametrize(
    ("kind", "told"), [(BansNothing, r"banned_ids lacks \[\d+, .*it sampled"), (SaysThatItBans, r"it sampled \[\d+")]
)
def test_an_engine_without_bans_is_found_out(kind: type[Wrong], told: str) -> None:
    model = copy.deepcopy(tiny(NAME).model)
    found = failed(check_generators(model, adapter(), {"it": kind(model, NAME)}, **FEW))
    assert re.match(told, found["vision ids"])


def test_an_engine_with_its_own_weights_passes() -> None:
    model = copy.deepcopy(tiny("text").model)
    engine = Separate(model, "text")
    report = check_generators(model, adapter("text"), {"it": engine}, **FEW)
    assert report.passed
    assert engine.times == 2
    assert all(torch.equal(p, q) for p, q in zip(engine.model.parameters(), model.parameters(), strict=True))


def test_weights_are_put_back_when_the_check_breaks_off() -> None:
    class Interrupted(Wrong):
        def sync_weights(self, policy: Any) -> None:
            raise KeyboardInterrupt

    model = copy.deepcopy(tiny("text").model)
    with pytest.raises(KeyboardInterrupt):
        check_generators(model, adapter("text"), {"it": Interrupted(model, "text")}, **FEW)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), tiny("text").model.parameters(), strict=True))


def test_differences_are_those_that_were_made() -> None:
    """The first token of each completion is off by 0.25, the others are not."""

    class First(Wrong):
        def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
            first, *rest = completion.logprobs
            lengths[sampling.temperature] = lengths.get(sampling.temperature, 0) + len(completion.logprobs)
            return replace(completion, logprobs=(first + 0.25, *rest))

    lengths: dict[float, int] = {}
    model = tiny("text").model
    report = check_generators(model, adapter("text"), {"it": First(model, "text")}, max_tokens=5, num_generations=3)
    cold = next(d for d in report.generators[0].differences if d.temperature == 0.7)
    assert (cold.num_tokens, cold.max) == (lengths[0.7], pytest.approx(0.25, abs=1e-4))
    assert cold.mean == pytest.approx(0.25 * 6 / cold.num_tokens, abs=1e-5)
    assert check_generators(model, adapter("text"), {"it": First(model, "text")}, tolerance=0.3, **FEW).passed


def test_a_near_tie_passes_and_is_told() -> None:
    """Two ids with the same row in the head, of which the engine takes the other one."""
    model = copy.deepcopy(tiny("text").model)
    engine = TransformersGenerator(model, adapter("text"))
    asked, greedy = encode_prompts(adapter("text")), SamplingParams(max_tokens=1, temperature=0)
    token = engine.generate(asked, greedy, 1).completion_ids[0][0]
    other = (token + 1) % 300
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[token]

    class Other(Wrong):
        def change(self, prompt: Prompt, completion: Completion, sampling: SamplingParams) -> Completion:
            if prompt.text != asked[0].text or sampling.temperature:
                return completion
            (taken,) = completion.completion_ids
            return replace(completion, completion_ids=(token + other - taken,))

    report = check_generators(model, adapter("text"), {"it": Other(model, "text")}, max_tokens=1)
    (line,) = (outcome for outcome in report.generators[0].outcomes if outcome.name == "greedy tokens")
    assert (line.result, line.cell) == ("passed", "near tie")
    assert re.match(r"prompt 0 \(text only\), token 0: \d+ .* instead of \d+ .* apart, a near tie$", line.detail)


# What they are asked.


def test_prompts_are_of_every_kind_that_the_family_takes() -> None:
    kinds = [kind_of(prompt) for prompt in encode_prompts(adapter())]
    assert sorted(kinds) == sorted(ALL_KINDS * 2)
    assert kinds != sorted(kinds, key=ALL_KINDS.index), "mixed, so that a wrong order shows"
    assert {kind_of(prompt) for prompt in encode_prompts(adapter("paligemma"))} == set(PICTURE_KINDS)
    sizes = {image.image.size for prompt in encode_prompts(adapter()) for image in prompt.images}
    assert len(sizes) >= 4


@pytest.mark.parametrize("count", [1, 2, 7])
def test_own_pictures_are_asked_about(count: int) -> None:
    images = [picture(40 + i, 60, i) for i in range(count)]
    prompts = encode_prompts(adapter(), images)
    assert len({id(prompt) for prompt in prompts}) == len(prompts)
    shown = {image.sha256 for prompt in prompts for image in prompt.images}
    of_own = encode_prompts(adapter(), images[:1])[0].images[0].sha256
    assert of_own in shown
    assert len(shown) == count, "each of them"
    assert Counter(map(kind_of, prompts)) == {"text only": 2, "one picture": count, "many pictures": 2}
    assert max(len(prompt.images) for prompt in prompts) <= 4


def test_pictures_for_a_text_model_are_refused() -> None:
    with pytest.raises(ValueError, match="the model takes no pictures; leave --images out"):
        encode_prompts(adapter("text"), [picture(20, 20, 0)])


# Generators that take no pictures.


class TextOnly(Wrong):
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        if any(prompt.images for prompt in prompts):
            raise ValueError("prompt 0 has pictures; use another generator")
        return super().generate(prompts, sampling, num_generations)


def test_a_refusal_by_design_is_no_failure() -> None:
    model = tiny(NAME).model
    report = check_generators(model, adapter(), {"it": TextOnly(model, NAME)}, text_only=["it"], **FEW)
    assert report.passed
    assert results(report) == {"pictures": "refused", **dict.fromkeys(("prompt ids", *AFTER), "passed")}
    assert {d.kind for d in report.generators[0].differences} == {"text only"}
    assert "it, pictures: refused: prompt 0 has pictures; use another generator" in str(report).splitlines()
    assert failed(check_generators(model, adapter(), {"it": TextOnly(model, NAME)}, **FEW)).keys() == {"prompt ids"}


def test_pictures_must_not_be_left_aside_in_silence() -> None:
    model = tiny(NAME).model
    report = check_generators(model, adapter(), {"it": Wrong(model, NAME)}, text_only=["it"], **FEW)
    assert failed(report).keys() == {"pictures"}


def test_nothing_is_left_to_ask_where_every_prompt_has_a_picture() -> None:
    model = tiny("paligemma").model
    report = check_generators(model, adapter("paligemma"), {"it": TextOnly(model, "paligemma")}, text_only=["it"])
    assert results(report) == {"pictures": "refused"}
    assert report.passed


# Noise on the weights.


def test_noise_grows_until_it_shows_in_every_kind() -> None:
    model = copy.deepcopy(tiny(NAME).model)
    before = copy.deepcopy(model.state_dict())
    disturbance = Disturbance(model, adapter().family.vision_modules)

    def change(visual: bool) -> float:
        """Of the matrices of the tower, or of the rest, relative to their size."""
        sizes = [
            float((value - before[key]).norm() / before[key].norm())
            for key, value in model.state_dict().items()
            if (".visual." in key) is visual and before[key].ndim > 1
        ]
        return fmean(sizes)

    calls: list[tuple[float, float]] = []

    def moved() -> dict[str, float]:
        calls.append((change(True), change(False)))
        return {"text only": 5.0 if len(calls) > 4 else 0.0, "one picture": 1.0 if len(calls) > 1 else 0.0}

    assert disturbance.disturb(moved, {"text only": 4.0, "one picture": 1.0}) == []
    assert [round(tower / 0.02) for tower, _ in calls] == [1, 5, 5, 5, 5], "text only says nothing of the tower"
    assert [round(rest / 0.02) for _, rest in calls] == [0, 0, 1, 5, 25]
    disturbance.restore()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    told = disturbance.disturb(lambda: {"text only": 9.0, "one picture": 0.5}, {"text only": 1.0, "one picture": 1.0})
    assert told == [
        f"noise on {part} moves log-probabilities of one picture too little to tell"
        for part in ("the vision tower", "the other weights")
    ]


def test_banned_ids_become_as_likely_as_another() -> None:
    model = copy.deepcopy(tiny("text").model)
    disturbance = Disturbance(model, ())
    disturbance.make_likely([3, 5], 40)
    ids = torch.tensor([[7, 8, 9]])
    logits = model(input_ids=ids).logits[0]
    assert torch.allclose(logits[:, [3, 5]], logits[:, [40, 40]], atol=1e-5)
    disturbance.restore()
    assert torch.equal(model(input_ids=ids).logits, tiny("text").model(input_ids=ids).logits)


# The report.


def test_the_table() -> None:
    engine = GeneratorReport(
        name="engine",
        outcomes=(
            Outcome(name="prompt ids", result="passed"),
            Outcome(name="greedy tokens", result="passed", value="near tie", detail="prompt 0"),
            Outcome(name="log-probabilities", result="failed", detail="far off"),
            Outcome(name="vision ids", result="failed", value="5 banned", detail="it sampled [3]"),
            Outcome(name="weights synced", result="not run", detail="nothing was sampled"),
        ),
        differences=(Difference(kind="text only", temperature=0.7, mean=0.25, max=1.0, num_tokens=9),),
        tokens_per_second=12.34,
    )
    absent = GeneratorReport(name="b", outcomes=(Outcome(name="starts", result="not run", detail="install it"),))
    options: dict[str, Any] = {"model": "m", "dtype": "float32", "device": "cpu", "tolerance": 1e-3}
    report = CheckReport(prompts={"text only": 2}, generators=(engine, absent), **options)
    assert str(report).splitlines() == [
        "m: float32 on cpu; prompts: 2 text only",
        "                              engine             b",
        "starts                        -                  not run",
        "prompt ids                    yes                -",
        "greedy tokens                 near tie           -",
        "log-probabilities             NO                 -",
        "  text only, temperature 0.7  2.5e-01 (1.0e+00)  -",
        "vision ids                    NO                 -",
        "weights synced                not run            -",
        "tokens per second             12                 -",
        "Under log-probabilities: mean (largest) difference to the policy's own, in nats; the mean may be at most "
        "0.001.",
        "engine, greedy tokens: prompt 0",
        "engine, log-probabilities: failed: far off",
        "engine, vision ids: failed: it sampled [3]",
        "engine, weights synced: not run: nothing was sampled",
        "b, starts: not run: install it",
    ]
    assert not report.passed
    passing = CheckReport(prompts={}, generators=(absent,), **options)
    passing.raise_for_failures()
    assert passing.passed


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny(NAME).model.save_pretrained(path)
    tiny(NAME).processor.save_pretrained(path)
    return str(path)


def check(folder: str, *arguments: str) -> int:
    return main(["check", folder, "--max-tokens", "3", "--num-generations", "2", *arguments])


def test_the_command_passes(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(folder, "--generators", "transformers", "--json", str(tmp_path / "report.json")) == 0
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (found["passed"], found["model"], found["tolerance"], found["dtype"]) == (True, folder, 1e-3, "float32")
    assert found["prompts"] == dict.fromkeys(ALL_KINDS, 2)
    (engine,) = found["generators"]
    assert engine["name"] == "transformers"
    assert {outcome["result"] for outcome in engine["outcomes"]} == {"passed"}
    assert {(d["kind"], d["temperature"]) for d in engine["differences"]} == {
        (k, t) for k in ALL_KINDS for t in (1, 0.7)
    }
    assert f"{folder}: float32 on cpu" in capsys.readouterr().out


def not_made(error: Exception) -> Callable[..., Generator]:
    def make(bench: Any, args: Any) -> Generator:
        raise error

    return make


def makers(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Put makers in the place of the engines'; `_` stands for `-` in their names."""
    for name, make in more.items():
        monkeypatch.setitem(import_module("vlmroll.check")._MAKERS, name.replace("_", "-"), make)


def test_the_command_fails_and_still_writes(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    makers(monkeypatch, transformers=not_made(RuntimeError("out of memory")))
    assert check(folder, "--generators", "transformers", "--json", str(path)) == 1
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["passed"] is False
    outcome = {"name": "starts", "result": "failed", "value": "", "detail": "RuntimeError: out of memory"}
    assert found["generators"][0]["outcomes"] == [outcome]


def at_once(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Put something that always passes in the place of the trials; the generators' names, and whether text only."""
    asked: list[tuple[str, bool]] = []

    def examine(bench: Any, name: str, generator: Generator, *, text_only: bool = False) -> GeneratorReport:
        asked.append((name, text_only))
        return GeneratorReport(name=name, outcomes=())

    monkeypatch.setattr("vlmroll.checking.kit.examine", examine)
    return asked


def test_what_is_not_there_fails_only_when_named(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    at_once(monkeypatch)
    makers(monkeypatch, continuous_batching=not_made(ValueError("it cannot run this model")))
    assert check(folder) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^starts +- +refused +not run$", printed, re.MULTILINE)
    assert "continuous-batching, starts: refused: it cannot run this model\n" in printed
    assert "vllm-colocate, starts: not run: vLLM is not installed; run: python -m pip install" in printed
    assert "vllm-server" not in printed
    assert check(folder, "--generators", "continuous-batching") == 0
    assert check(folder, "--generators", "vllm-colocate") == 1
    makers(monkeypatch, vllm_colocate=not_made(ValueError("no such architecture")), transformers=Fake)
    assert check(folder) == 1, "what is there and does not start is a failure"


class Fake(ScriptedGenerator):
    """A generator that remembers what it was made with."""

    made: list["Fake"] = []

    def __init__(self, bench: Any, args: Any) -> None:
        super().__init__([[1]])
        self.bench, self.args, self.closed = bench, args, False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


def test_options_reach_the_bench(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = at_once(monkeypatch)
    makers(monkeypatch, vllm_server=Fake, transformers=Fake, vllm_colocate=Fake, continuous_batching=Fake)
    picture(64, 64, 3).save(tmp_path / "own.png")
    Fake.made.clear()
    assert check(folder) == 0
    assert asked == [("transformers", False), ("continuous-batching", True), ("vllm-colocate", False)]
    assert check(folder, "--server", "http://there", "--images", str(tmp_path / "own.png"), "--max-pixels", "1024") == 0
    assert len(Fake.made) == 7, "an address brings the server in"
    assert all(fake.closed for fake in Fake.made)
    plain, last = Fake.made[0], Fake.made[-1]
    assert last.args.server == "http://there"
    assert (last.bench.max_tokens, last.bench.num_generations) == (3, 2)
    (own,) = {image.sha256 for prompt in last.bench.prompts for image in prompt.images}
    assert own == encode_prompts(adapter(), [picture(64, 64, 3)])[0].images[0].sha256
    tokens = [prompt.num_image_tokens for prompt in last.bench.prompts if kind_of(prompt) == "one picture"]
    assert tokens == [4], "1024 pixels are 4 squares of 16 x 16"
    assert last.bench.model.dtype == torch.float32
    assert plain.bench.model.dtype == torch.float32
    assert check(folder, "--generators", "vllm-server", "vllm-server", "--tolerance", "0.01") == 0
    assert (len(Fake.made), Fake.made[-1].bench.tolerance) == (8, 0.01)
    assert check(folder, "--generators", "transformers", "--dtype", "bfloat16") == 0
    assert (Fake.made[-1].bench.model.dtype, Fake.made[-1].bench.tolerance) == (torch.bfloat16, 5e-2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["./nowhere"], "there is no such folder"),
        (["--images", "nowhere.png"], "nowhere.png"),
        (["--max-pixels", "0"], "max_pixels must be a whole number of pixels above 0"),
    ],
)
def test_what_cannot_be_checked_is_told_in_a_line(
    folder: str, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = arguments[0].startswith("./")
    assert main(["check", *([] if own else [folder]), *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert "vlmroll check: " in printed.err


def test_a_server_that_does_not_answer_is_told(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vlmroll.check._PATIENCE", 0.0)
    at_once(monkeypatch)
    assert check(folder, "--generators", "vllm-server", "--server", "http://127.0.0.1:9") == 1
    assert (
        f"no vLLM server answers at http://127.0.0.1:9; start it with `vlmroll serve {folder}`"
        in capsys.readouterr().out
    )
    makers(monkeypatch, transformers=Fake, continuous_batching=Fake, vllm_colocate=Fake)
    assert check(folder, "--server", "http://127.0.0.1:9") == 1, "an address names the server"


def test_a_server_of_another_dtype_is_told(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Server:
        description = {"dtype": "bfloat16"}

        def __init__(self, url: str, key: str | None, **more: Any) -> None:
            self.url = url
            keys.append(key)

        def connect(self, expected: Any) -> None:
            pass

        def close(self) -> None:
            pass

    class Remote(ScriptedGenerator):
        def __init__(self, model: Any, adapter: Any, *, base_url: str, api_key: str | None) -> None:
            super().__init__([[1]])
            keys.append(f"{base_url} {api_key}")

    keys: list[str | None] = []
    at_once(monkeypatch)
    monkeypatch.setattr("vlmroll.generators.vllm_http.VLLMServer", Server)
    monkeypatch.setattr("vlmroll.generators.vllm_server.VLLMServerGenerator", Remote)
    monkeypatch.setenv("VLLM_API_KEY", "set")
    assert check(folder, "--generators", "vllm-server", "--server", "http://a,http://b") == 0
    assert keys == ["set", "set", "http://a,http://b set"]
    told = [line for line in capsys.readouterr().err.splitlines() if "log-probabilities differ" in line]
    assert [line.split(",")[0] for line in told] == [f"http://{name} runs in bfloat16" for name in "ab"]
    assert check(folder, "--generators", "vllm-server", "--api-key", "given", "--dtype", "bfloat16") == 0
    assert keys[3:] == ["given", "http://127.0.0.1:8000 given"]
    assert "log-probabilities differ" not in capsys.readouterr().err


def test_a_peft_folder_is_checked_on_its_base(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    from vlmroll.modeling import load_model

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(load_model(folder), config).save_pretrained(str(tmp_path))
    makers(monkeypatch, transformers=Fake)
    at_once(monkeypatch)
    Fake.made.clear()
    assert check(str(tmp_path), "--generators", "transformers") == 0
    (fake,) = Fake.made
    assert any("lora_A" in name for name, _ in fake.bench.model.named_parameters())


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_in_the_process_passes(tmp_path: Path) -> None:
    """The whole command in a process of its own, on a trained model with vLLM's own code."""
    roots = os.pathsep.join(str(ROOT / root) for root in ("sdk", "processors"))
    command = [sys.executable, "-m", "vlmroll", "check", str(ROOT / "assets" / "tiny-vl"), "--generators"]
    command += ["transformers", "vllm-colocate", "--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": roots}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    for engine in report["generators"]:
        assert [outcome["result"] for outcome in engine["outcomes"]] == ["passed"] * 6
        assert len(engine["differences"]) == 6
        assert all(difference["mean"] < 1e-4 for difference in engine["differences"])
