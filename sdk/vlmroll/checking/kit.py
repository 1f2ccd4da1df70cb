"""Puts generators through the trials, one after the other, and makes the report."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image

from vlmroll.checking.prompts import KINDS, encode_prompts, kind_of
from vlmroll.checking.report import (
    GREEDY,
    LOGPROBS,
    PICTURES,
    PROMPT_IDS,
    RESTORED,
    SYNCED,
    VISION_IDS,
    CheckReport,
    GeneratorReport,
    Outcome,
)
from vlmroll.checking.trial import Bench, Trial
from vlmroll.generators import Generator
from vlmroll.generators.vllm_http import ServerError
from vlmroll.types import SamplingParams
from vlmroll_processors import Prompt
from vlmroll_processors.adapter import FamilyAdapter

logger = logging.getLogger(__name__)

# What engines raise for what they cannot do; a trial that ends in one of them has failed.
MISFITS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
TEXT_ONLY_GENERATORS = ("continuous-batching",)
"""Names of generators that refuse pictures by design."""


def default_tolerance(dtype: torch.dtype) -> float:
    """The tolerance for a policy's dtype: engines add numbers in another order, which shows in few digits."""
    return 5e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-3


def check_generators(
    model: Any,
    adapter: FamilyAdapter,
    generators: Mapping[str, Generator],
    *,
    images: Sequence[Image.Image] = (),
    tolerance: float | None = None,
    max_tokens: int = 32,
    num_generations: int = 4,
    text_only: Sequence[str] = TEXT_ONLY_GENERATORS,
) -> CheckReport:
    """Compare generators with the policy that they sample for.

    Each is asked prompts without, with one and with many pictures. Its ids, greedy tokens and log-probabilities are
    held against the policy's own; vision ids are made likely to see whether they are banned; and the policy's weights
    are changed and put back, to see whether the engine follows. Videos are left out.

    Args:
        model: the policy. It is as it was afterwards, bit for bit.
        adapter: what `load_adapter` returns for it.
        generators: name -> generator; they stay open.
        images: pictures to ask about; none for noise of several sizes.
        tolerance: largest mean difference of log-probabilities that passes; None for 1e-3, in half precision 5e-2.
        max_tokens: longest completion.
        num_generations: completions of each prompt.
        text_only: names of the generators that have to refuse prompts with pictures.

    Raises:
        ValueError: the prompts cannot be encoded.

    Example:
        >>> print(check_generators(model, adapter, {"mine": generator}))  # doctest: +SKIP
    """
    bench = Bench(
        model=model,
        adapter=adapter,
        prompts=encode_prompts(adapter, images),
        tolerance=default_tolerance(model.dtype) if tolerance is None else tolerance,
        max_tokens=max_tokens,
        num_generations=num_generations,
    )
    found = [examine(bench, name, one, text_only=name in text_only) for name, one in generators.items()]
    return make_report(bench, found)


def make_report(bench: Bench, generators: Sequence[GeneratorReport]) -> CheckReport:
    """The reports of all generators as one."""
    counts = Counter(kind_of(prompt) for prompt in bench.prompts)
    return CheckReport(
        model=str(bench.model.config._name_or_path) or type(bench.model).__name__,
        dtype=str(bench.model.dtype).removeprefix("torch."),
        device=bench.model.device.type,
        prompts={kind: counts[kind] for kind in KINDS if counts[kind]},
        tolerance=bench.tolerance,
        generators=tuple(generators),
    )


def examine(bench: Bench, name: str, generator: Generator, *, text_only: bool = False) -> GeneratorReport:
    """Put one generator through all trials.

    Args:
        name: for the report.
        text_only: it has to refuse prompts with pictures.
    """
    outcomes: list[Outcome] = []

    def attempt(line: str, work: Callable[[], Outcome]) -> None:
        try:
            outcomes.append(work())
        except MISFITS as error:
            logger.debug("%s, %s", name, line, exc_info=True)
            outcomes.append(Outcome(name=line, result="failed", detail=words(error)))

    if text_only and (pictures := [prompt for prompt in bench.prompts if prompt.images]):
        attempt(PICTURES, partial(_refusal, generator, pictures[0]))
        bench = replace(bench, prompts=tuple(prompt for prompt in bench.prompts if not prompt.images))
        if not bench.prompts:
            return GeneratorReport(name=name, outcomes=tuple(outcomes))
    trial = Trial(bench, generator)
    attempt(PROMPT_IDS, trial.prompt_ids)
    if trial.answers_prompts:
        attempt(GREEDY, trial.greedy_tokens)
        attempt(LOGPROBS, trial.logprobs)
    if trial.differences:
        with trial.disturbed():
            attempt(SYNCED, trial.weights_synced)
            attempt(VISION_IDS, trial.vision_ids)
        attempt(RESTORED, trial.weights_restored)
    found = {outcome.name for outcome in outcomes}
    outcomes += [
        Outcome(name=line, result="not run", detail="nothing was sampled")
        for line in (GREEDY, LOGPROBS, VISION_IDS, SYNCED, RESTORED)
        if line not in found
    ]
    return GeneratorReport(
        name=name,
        outcomes=tuple(outcomes),
        differences=tuple(trial.differences),
        tokens_per_second=trial.tokens_per_second,
    )


def _refusal(generator: Generator, prompt: Prompt) -> Outcome:
    """Whether a prompt with pictures is refused, and not answered without them."""
    try:
        generator.generate([prompt], SamplingParams(max_tokens=1, temperature=0), 1)
    except ValueError as error:
        return Outcome(name=PICTURES, result="refused", detail=words(error))
    detail = "it takes no pictures, but answers a prompt with one; it must have left the picture aside"
    return Outcome(name=PICTURES, result="failed", detail=detail)


def words(error: BaseException) -> str:
    """An error in a line, with its type where it was not meant for the person."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, ValueError | ImportError | ServerError) else f"{type(error).__name__}: {text}"
