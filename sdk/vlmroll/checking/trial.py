"""What one generator is put through. Each trial returns its line of the report."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Generator as Yields
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from vlmroll.batches import to_device
from vlmroll.checking.disturbance import Disturbance
from vlmroll.checking.prompts import KINDS, kind_of
from vlmroll.checking.report import GREEDY, LOGPROBS, PROMPT_IDS, RESTORED, SYNCED, VISION_IDS, Difference, Outcome
from vlmroll.generators import Generator, TransformersGenerator
from vlmroll.modeling import eval_mode
from vlmroll.scoring import policy_logprobs
from vlmroll.types import Completion, SamplingParams
from vlmroll_processors import Prompt, collate
from vlmroll_processors.adapter import FamilyAdapter

_TEMPERATURES = (1.0, 0.7)
_HOT = 2.0
_TIE = 5.0  # tolerances between two tokens of which either may be taken
_ROOM = 1.5  # how much larger than before a difference may be after a sync, where it was too large before
_CLEAR = 4.0  # allowed differences by which a change of the weights has to show
_SHOWN = 3  # prompts in a message

Answers = list[tuple[Prompt, tuple[Completion, ...]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What generators are compared with, and on what.

    Attributes:
        model: the policy.
        adapter: its adapter.
        prompts: what is asked.
        tolerance: largest mean difference of log-probabilities that passes.
        max_tokens: longest completion.
        num_generations: completions of each prompt.
    """

    model: Any
    adapter: FamilyAdapter
    prompts: tuple[Prompt, ...]
    tolerance: float
    max_tokens: int
    num_generations: int


class Trial:
    """One generator on the bench.

    Attributes:
        answers_prompts: whether the first trial got completions.
        differences: of log-probabilities from the policy's own, by kind of prompts and temperature.
        tokens_per_second: of the samples for them.
    """

    def __init__(self, bench: Bench, generator: Generator) -> None:
        self._bench, self._generator = bench, generator
        self._watched = generator.banned_ids | bench.adapter.vision_ids
        self._found: set[int] = set()  # of the watched ids
        self._greedy: Answers = []
        self._samples: Answers = []
        self._weak: list[str] = []  # what the disturbance does not show
        self.answers_prompts = False
        self.differences: list[Difference] = []
        self.tokens_per_second: float | None = None

    def _ask(self, temperature: float, num_generations: int, seed: int = 0) -> tuple[Answers, bool]:
        """The answers in the order of the prompts, and whether they came in it."""
        prompts = self._bench.prompts
        sampling = SamplingParams(max_tokens=self._bench.max_tokens, temperature=temperature, seed=seed)
        output = self._generator.generate(prompts, sampling, num_generations)
        groups = {id(prompt): group for prompt, group in zip(output.prompts, output.completions, strict=True)}
        if groups.keys() != {id(prompt) for prompt in prompts}:
            raise ValueError("it answers other prompts than it was asked")
        for i, prompt in enumerate(prompts):
            if (found := len(groups[id(prompt)])) != num_generations:
                raise ValueError(f"prompt {i}: {found} completions came for {num_generations}")
        for ids in output.completion_ids:
            self._found |= self._watched.intersection(ids)
        in_order = all(prompt is used for prompt, used in zip(prompts, output.prompts, strict=True))
        return [(prompt, groups[id(prompt)]) for prompt in prompts], in_order

    def prompt_ids(self) -> Outcome:
        """Whether the engine read the ids that were encoded; `GenerationOutput` compares them and raises."""
        self._greedy, in_order = self._ask(0.0, 1)
        self.answers_prompts = True
        if in_order:
            return Outcome(name=PROMPT_IDS, result="passed")
        return Outcome(name=PROMPT_IDS, result="failed", detail="the answers are in another order than the prompts")

    def greedy_tokens(self) -> Outcome:
        """Whether the most likely tokens are those of `TransformersGenerator`."""
        bench = self._bench
        reference = TransformersGenerator(bench.model, bench.adapter, banned_ids=sorted(self._generator.banned_ids))
        sampling = SamplingParams(max_tokens=bench.max_tokens, temperature=0)
        expected = reference.generate(bench.prompts, sampling, 1).completion_ids
        faults: list[str] = []
        ties: list[str] = []
        for i, ((prompt, (completion,)), theirs) in enumerate(zip(self._greedy, expected, strict=True)):
            if list(ours := completion.completion_ids) != theirs:
                gap, told = self._first_difference(prompt, ours, theirs)
                (ties if gap <= _TIE * bench.tolerance else faults).append(f"prompt {i} ({kind_of(prompt)}), {told}")
        detail = "; ".join([*faults, *ties][:_SHOWN])
        if faults:
            return Outcome(name=GREEDY, result="failed", detail=detail)
        return Outcome(name=GREEDY, result="passed", value="near tie" if ties else "", detail=detail)

    def _first_difference(self, prompt: Prompt, ours: Sequence[int], theirs: Sequence[int]) -> tuple[float, str]:
        """How far two tokens are apart under the policy where completions part, and where that is."""
        shorter = min(len(ours), len(theirs))
        place = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
        if place == shorter:
            return math.inf, f"it has {len(ours)} tokens instead of {len(theirs)}"
        pair = ours[place], theirs[place]
        said = [f"{token} ({self._bench.adapter.decode([token])!r})" for token in pair]
        told = f"token {place}: {said[0]} instead of {said[1]}"
        if not self._watched.isdisjoint(pair):
            return math.inf, f"{told}; it is banned"
        scores = self._score(prompt, [(*ours[:place], token) for token in pair], 1.0)
        gap = abs(scores[0][-1] - scores[1][-1])
        near = ", a near tie" if gap <= _TIE * self._bench.tolerance else ""
        return gap, f"{told}; their log-probabilities are {gap:.1e} apart{near}"

    def _score(self, prompt: Prompt, completions: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """The policy's own log-probabilities."""
        model = self._bench.model
        batch = collate([prompt] * len(completions), completions, pad_token_id=self._bench.adapter.pad_token_id)
        with torch.no_grad(), eval_mode(model):
            found = policy_logprobs(
                model,
                to_device(batch, model.device),
                temperature=temperature,
                banned_ids=sorted(self._generator.banned_ids),
            )
        return [row[: len(ids)] for row, ids in zip(found.logprobs.tolist(), completions, strict=True)]

    def _scored(self, answers: Answers, temperature: float) -> Yields[tuple[str, list[list[float]], list[list[float]]]]:
        """For each prompt its kind, what the generator reports for its completions, and what the policy says.

        A completion ends before a token that must not be there: the policy has no number for what follows it.
        """
        for prompt, group in answers:
            ends = [next((i for i, t in enumerate(c.completion_ids) if t in self._watched), None) for c in group]
            kept = [(c, end) for c, end in zip(group, ends, strict=True) if end != 0]
            if kept:
                own = self._score(prompt, [completion.completion_ids[:end] for completion, end in kept], temperature)
                yield kind_of(prompt), [list(completion.logprobs[:end]) for completion, end in kept], own

    def _differences(self, answers: Answers, temperature: float) -> list[Difference]:
        found: defaultdict[str, list[float]] = defaultdict(list)
        for kind, reported, own in self._scored(answers, temperature):
            for ours, theirs in zip(reported, own, strict=True):
                found[kind] += [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        return [
            Difference(kind=kind, temperature=temperature, mean=fmean(values), max=max(values), num_tokens=len(values))
            for kind in KINDS
            if (values := found[kind])
        ]

    def logprobs(self) -> Outcome:
        """Whether the reported log-probabilities are the policy's own, at two temperatures."""
        num_tokens, start, seconds = 0, 0.0, 0.0
        for seed, temperature in enumerate(_TEMPERATURES):
            start = time.perf_counter()
            answers, _ = self._ask(temperature, self._bench.num_generations, seed)
            seconds += time.perf_counter() - start
            num_tokens += sum(len(completion.completion_ids) for _, group in answers for completion in group)
            self.differences += self._differences(answers, temperature)
            self._samples = self._samples or answers
        self.tokens_per_second = num_tokens / seconds
        faults = [
            f"{d.kind}, temperature {d.temperature:g}: {d.mean:.1e} on average, {d.max:.1e} at most"
            for d in self.differences
            if not d.mean <= self._bench.tolerance
        ]
        return Outcome(name=LOGPROBS, result="failed" if faults else "passed", detail="; ".join(faults))

    @property
    def _allowed(self) -> Mapping[str, float]:
        """Kind of prompts -> mean difference that says that the engine has the policy's weights."""
        before = {d.kind: d.mean for d in self.differences if d.temperature == _TEMPERATURES[0]}
        return {kind: max(self._bench.tolerance, _ROOM * mean) for kind, mean in before.items()}

    @contextlib.contextmanager
    def disturbed(self) -> Yields[None]:
        """Other weights for the time of the block, which also make the banned ids likely."""
        bench = self._bench
        disturbance = Disturbance(bench.model, bench.adapter.family.vision_modules)
        before = [own for _, _, own in self._scored(self._samples, _TEMPERATURES[0])]

        def moved() -> Mapping[str, float]:
            found: defaultdict[str, list[float]] = defaultdict(list)
            for old, (kind, _, new) in zip(before, self._scored(self._samples, _TEMPERATURES[0]), strict=True):
                for was, now in zip(old, new, strict=True):
                    found[kind] += [abs(a - b) for a, b in zip(was, now, strict=True)]
            return {kind: fmean(values) for kind, values in found.items()}

        try:
            self._weak = disturbance.disturb(moved, {kind: _CLEAR * value for kind, value in self._allowed.items()})
            if self._watched:
                reference = TransformersGenerator(bench.model, bench.adapter, banned_ids=sorted(self._watched))
                first = reference.generate(bench.prompts[:1], SamplingParams(max_tokens=1, temperature=0), 1)
                disturbance.make_likely(sorted(self._watched), first.completion_ids[0][0])
            yield
        finally:
            disturbance.restore()

    def weights_synced(self) -> Outcome:
        """Whether new samples, on the same pictures and texts, are the changed policy's."""
        return self._synced(SYNCED, seed=len(_TEMPERATURES), more=self._weak)

    def weights_restored(self) -> Outcome:
        """Whether new samples are the old policy's again."""
        return self._synced(RESTORED, seed=len(_TEMPERATURES) + 1)

    def _synced(self, name: str, *, seed: int, more: Sequence[str] = ()) -> Outcome:
        self._generator.sync_weights(self._bench.model)
        answers, _ = self._ask(_TEMPERATURES[0], self._bench.num_generations, seed)
        faults = [
            f"{d.kind}: log-probabilities are {d.mean:.1e} off on average, at most {self._allowed[d.kind]:.1e} is right"
            for d in self._differences(answers, _TEMPERATURES[0])
            if not d.mean <= self._allowed.get(d.kind, self._bench.tolerance)
        ]
        return Outcome(name=name, result="failed" if faults else "passed", detail="; ".join([*faults, *more]))

    def vision_ids(self) -> Outcome:
        """Whether ids that no completion may hold are never sampled, also where they are as likely as any."""
        if not self._watched:
            return Outcome(name=VISION_IDS, result="passed", value="none")
        self._ask(_HOT, self._bench.num_generations)
        faults: list[str] = []
        if missing := self._bench.adapter.vision_ids - self._generator.banned_ids:
            faults.append(f"banned_ids lacks {sorted(missing)[:_SHOWN]}")
        if self._found:
            faults.append(f"it sampled {sorted(self._found)[:_SHOWN]}")
        value = f"{len(self._generator.banned_ids)} banned"
        return Outcome(name=VISION_IDS, result="failed" if faults else "passed", value=value, detail="; ".join(faults))
