"""What every generator promises, for each kind of engine and several models.

The oracles are the policy itself: `TransformersGenerator` for what is sampled at temperature 0 (it is compared with
transformers in `test_generators.py`), and `policy_logprobs` for log-probabilities.
"""

import gc
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image

from engines import (
    BANNED,
    CONTEXT,
    KINDS,
    MODELS,
    STOPS,
    VLLM,
    Engine,
    another,
    engine_of,
    largest_gap,
    marked,
    padded,
    perturb,
    start_ahead,
)
from tiny_models import picture, tiny, user
from vlmroll.generators.base import stop_ids_of
from vlmroll.types import GenerationOutput, SamplingParams
from vlmroll_processors import Prompt, load_adapter

REAL = tuple(kind for kind in KINDS if kind != "scripted")
PICTURED = ("transformers", *VLLM)
"""Kinds that read pictures."""
SEEING = ("qwen2_5_vl", "qwen3_vl")
"""Models that read pictures."""
FEW = ("qwen3_vl", "text")
"""Models for what does not depend on the model."""
TOLERANCE = {"transformers": 1e-5, "continuous_batching": 2e-5, "vllm_colocate": 2e-5, "vllm_server": 2e-5}
"""Largest difference of a log-probability from the policy's, in float32 on a CPU; measured were at most 2.4e-6."""
HOTTEST = {"transformers": 5.0, "continuous_batching": 5.0, "vllm_colocate": 2.0, "vllm_server": 2.0}
"""The highest temperature that is tried; vLLM takes none above 2."""
GREEDY = SamplingParams(max_tokens=12, temperature=0)
WARM = SamplingParams(max_tokens=12, temperature=0.7, seed=3)


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batching collects garbage twice in each call, 0.3 s each with all that tests have loaded."""
    monkeypatch.setattr(gc, "collect", int)


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Engine:
    start_ahead(request.session)
    return engine_of(*request.param)


def engines(kinds: Sequence[str] = REAL, models: Sequence[str] = MODELS) -> pytest.MarkDecorator:
    """Run a test with engines of these kinds and models."""
    cases = [marked(kind, name) for kind, name in itertools.product(kinds, models)]
    return pytest.mark.parametrize("engine", cases, indirect=True)


# What is compared.


def sampled(output: GenerationOutput) -> set[int]:
    return {id for ids in output.completion_ids for id in ids}


def generate(engine: Engine, prompts: Sequence[Prompt], sampling: SamplingParams, n: int) -> GenerationOutput:
    """The engine's output, after a look at all that holds for any output."""
    output = engine.generator.generate(prompts, sampling, n)
    assert isinstance(output, GenerationOutput)
    assert len(output.prompts) == len(prompts)
    assert all(mine is given for mine, given in zip(output.prompts, prompts, strict=True))
    assert output.prompt_ids == tuple(prompt.prompt_ids for prompt in prompts)
    assert [len(group) for group in output.completions] == [n] * len(prompts)
    stops = set(stop_ids_of(engine.model, engine.adapter)) | set(sampling.extra.get("stop_token_ids", ()))
    words: Sequence[str] = sampling.extra.get("stop", ())
    for completion in itertools.chain(*output.completions):
        ids, logprobs = completion.completion_ids, completion.logprobs
        assert 1 <= len(ids) == len(logprobs) <= sampling.max_tokens
        assert {type(id) for id in ids} == {int}
        assert {type(logprob) for logprob in logprobs} == {float}
        assert all(-math.inf < logprob <= 0 for logprob in logprobs)
        assert not stops.intersection(ids[:-1]), "nothing follows a stop id"
        stopped = ids[-1] in stops or any(word in engine.adapter.decode(ids) for word in words)
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(ids) == sampling.max_tokens
        assert completion.policy_version == engine.generator.policy_version
    assert not sampled(output) & engine.generator.banned_ids
    return output


def assert_is_the_policy(engine: Engine, prompts: Sequence[Prompt], model: Any = None) -> GenerationOutput:
    """At temperature 0 the same ids as the policy's, at another the same log-probabilities; the warm output."""
    reference = engine.reference
    reference.model = engine.model if model is None else model
    cold = generate(engine, prompts, GREEDY, 1)
    assert cold.completion_ids == reference.generate(prompts, GREEDY, 1).completion_ids
    assert largest_gap(engine, cold, 1.0, model) <= TOLERANCE[engine.kind]
    warm = generate(engine, prompts, WARM, 3)
    assert largest_gap(engine, warm, 0.7, model) <= TOLERANCE[engine.kind]
    return warm


def rows_with(*pictures: Any) -> list[dict[str, Any]]:
    return [{"prompt": user("which digit ?", *(p if isinstance(p, tuple) else (p,)))} for p in pictures]


def behind_a_long_text(engine: Engine, *pictures: Image.Image) -> tuple[Prompt, ...]:
    """Prompts that begin alike, with more tokens than an engine keeps in one piece, and end in a picture each."""
    text = {"type": "text", "text": " ".join(["which"] * 90)}
    parts = [[text, {"type": "image", "image": image}, {"type": "text", "text": "?"}] for image in pictures] or [[text]]
    return tuple(engine.adapter.encode([{"prompt": [{"role": "user", "content": content}]} for content in parts]))


# Completions: how many, in which order, where they end.


@engines(KINDS)
@pytest.mark.parametrize("num_generations", [1, 4])
def test_every_prompt_is_answered_in_order(engine: Engine, num_generations: int) -> None:
    asked, sampling = engine.prompts, SamplingParams(max_tokens=3, seed=0)
    if engine.kind == "scripted":
        output = engine.generator.generate(asked, sampling, num_generations)
        assert output.prompts == asked
        assert [len(group) for group in output.completions] == [num_generations] * 4
        return
    for prompts in (asked, asked[::-1], asked[1:2]):
        output = generate(engine, prompts, sampling, num_generations)
        assert largest_gap(engine, output, 1.0) <= TOLERANCE[engine.kind]
        if len(prompts) > 1:
            mixed = replace(output, completions=output.completions[1:] + output.completions[:1])
            assert largest_gap(engine, mixed, 1.0) > 1e-2, "completions can be told by their log-probabilities"
    assert generate(engine, asked, replace(GREEDY, max_tokens=3), 1).completion_ids == [
        generate(engine, [prompt], replace(GREEDY, max_tokens=3), 1).completion_ids[0] for prompt in asked
    ]


@engines(REAL, ["text"])
def test_siblings_at_temperature_0_are_equal(engine: Engine) -> None:
    output = generate(engine, engine.prompts, GREEDY, 3)
    alone = generate(engine, engine.prompts, GREEDY, 1)
    assert output.completion_ids == [ids for ids in alone.completion_ids for _ in range(3)]


@engines(models=["text"])
@pytest.mark.parametrize(("number", "num_generations"), [(0, 1), (4, 0)])
def test_nothing_to_generate_is_refused(engine: Engine, number: int, num_generations: int) -> None:
    with pytest.raises(ValueError, match=f"nothing to generate: {number} prompts, {num_generations} generations each"):
        engine.generator.generate(engine.prompts[:number], GREEDY, num_generations)


@engines(models=FEW)
def test_completions_end_at_stop_ids_of_model_and_tokenizer(engine: Engine) -> None:
    """`generate` looks at each completion; here the cases that it should have seen are counted."""
    sampling = SamplingParams(max_tokens=48, temperature=2.0, seed=1)
    output = generate(engine, engine.prompts, sampling, 16)
    last = [ids[-1] for ids in output.completion_ids]
    assert engine.adapter.tokenizer.eos_token_id in last
    assert len(set(STOPS) & set(last)) > 3
    reasons = [completion.finish_reason for completion in itertools.chain(*output.completions)]
    assert {"stop", "length"} == set(reasons)
    empty = generate(engine, engine.prompts, replace(sampling, max_tokens=1), 32)
    found = [completion for completion in itertools.chain(*empty.completions) if completion.finish_reason == "stop"]
    assert found, "some completions are nothing but a stop token"
    assert largest_gap(engine, output, 2.0) <= TOLERANCE[engine.kind]


@engines(KINDS, ["text"])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_completions_end_at_the_limit(engine: Engine, max_tokens: int) -> None:
    output = engine.generator.generate(engine.prompts, SamplingParams(max_tokens=max_tokens, seed=0), 2)
    assert {len(ids) for ids in output.completion_ids} <= set(range(1, max_tokens + 1))
    for completion in itertools.chain(*output.completions):
        assert completion.finish_reason == "stop" or len(completion.completion_ids) == max_tokens


# The policy's tokens and log-probabilities.


@engines()
def test_greedy_ids_are_the_policys(engine: Engine) -> None:
    output = generate(engine, engine.prompts, replace(GREEDY, max_tokens=40), 1)
    expected = engine.reference.generate(engine.prompts, replace(GREEDY, max_tokens=40), 1)
    assert output.completion_ids == expected.completion_ids
    for row, theirs in zip(output.logprobs, expected.logprobs, strict=True):
        assert row == pytest.approx(theirs, abs=TOLERANCE[engine.kind])


@engines()
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_those_that_training_scores(engine: Engine, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    output = generate(engine, engine.prompts, sampling, 4)
    assert largest_gap(engine, output, temperature) <= TOLERANCE[engine.kind]
    assert largest_gap(engine, output, temperature + 0.1) > 1e-3, "the comparison can tell"
    assert not any(completion.truncated for completion in itertools.chain(*output.completions))


@engines(models=FEW)
def test_vision_and_banned_ids_are_never_sampled(engine: Engine) -> None:
    hot = SamplingParams(max_tokens=256, temperature=HOTTEST[engine.kind], seed=0)
    assert engine.generator.banned_ids == engine.adapter.vision_ids | set(BANNED)
    output = generate(engine, [engine.prompts[2]], hot, 32)
    assert len(sampled(output)) > 250
    assert largest_gap(engine, output, hot.temperature) <= TOLERANCE[engine.kind]


@engines(models=SEEING)
def test_a_policy_that_wants_vision_ids_does_not_get_them(engine: Engine) -> None:
    with engine.changed():
        with torch.no_grad():
            head = engine.model.get_output_embeddings().weight
            wanted = sorted(engine.generator.banned_ids)
            head.zero_()
            head[wanted] = 3 * torch.randn(len(wanted), head.shape[1], generator=torch.Generator().manual_seed(0))
        engine.generator.sync_weights(engine.model)
        output = generate(engine, engine.prompts, SamplingParams(max_tokens=8, seed=0), 4)
        logits = engine.model(**padded(engine, output).model_inputs()).logits[:, -4:]
        assert (logits.argmax(-1).unsqueeze(-1) == torch.tensor(wanted)).any(-1).float().mean() > 0.9
        uniform = -math.log(head.shape[0] - len(wanted))
        assert all(logprob == pytest.approx(uniform, abs=1e-4) for row in output.logprobs for logprob in row)


# Seeds.


@engines(models=FEW)
def test_one_seed_gives_one_output(engine: Engine) -> None:
    asked = [engine.prompts[i] for i in (0, 2, 0)]

    def sample(seed: int | None) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=24, temperature=2.0, seed=seed)
        return generate(engine, asked, sampling, 4).completion_ids

    first = sample(1)
    assert sample(1) == first
    assert sample(2) != first
    assert sample(None) != sample(None)
    distinct = {tuple(ids) for ids in first}
    assert len(distinct) >= 11, "siblings differ, and so do the completions of equal prompts (some are short)"
    assert not distinct & {tuple(ids) for ids in sample(2) if len(ids) > 2}


@engines(models=FEW)
def test_sampling_leaves_random_states_alone(engine: Engine) -> None:
    torchs, numpys = torch.get_rng_state(), repr(np.random.get_state())
    generate(engine, engine.prompts, WARM, 2)
    assert torch.equal(torch.get_rng_state(), torchs)
    assert repr(np.random.get_state()) == numpys


# Pictures.


@engines(["continuous_batching"], SEEING)
def test_pictures_are_refused_where_they_cannot_be_read(engine: Engine) -> None:
    asked = engine.adapter.encode([{"prompt": user("red")}, *rows_with(picture(64, 48, 1))])
    with pytest.raises(ValueError, match=r"prompt 1 .*pictures"):
        engine.generator.generate(asked, GREEDY, 1)


@engines(PICTURED, SEEING)
def test_pictures_are_seen_wherever_they_stand(engine: Engine) -> None:
    """Sizes differ, one picture stands in several prompts and twice in one, and text stands between."""
    one, wide, tall = picture(64, 48, 1), picture(128, 24, 7), picture(20, 160, 8)
    rows = [*rows_with(one, wide, (one, tall, one), one), {"prompt": user("red")}, *rows_with((tall, wide))]
    asked = engine.adapter.encode(rows)
    assert len({picture.size for prompt in asked for picture in prompt.images}) == 3
    assert_is_the_policy(engine, asked)
    assert_is_the_policy(engine, asked[::-1])


@engines(PICTURED, SEEING)
def test_pictures_behind_equal_texts_are_told_apart(engine: Engine) -> None:
    """Engines keep what they computed for the beginning of a prompt."""
    one, other = behind_a_long_text(engine, picture(64, 48, 1), picture(64, 48, 2))
    assert one.prompt_ids == other.prompt_ids
    assert one.num_tokens > 160
    for asked in ([one], [other], [one, other, one]):
        assert_is_the_policy(engine, asked)


@engines(PICTURED, SEEING)
def test_pixels_are_seen(engine: Engine) -> None:
    """The same ids with other pixels."""
    pictures = [picture(64, 48, 1), Image.new("RGB", (64, 48))]
    noise, black = engine.adapter.encode(rows_with(*pictures))
    assert noise.prompt_ids == black.prompt_ids
    logprobs = [generate(engine, [prompt], GREEDY, 1).logprobs[0] for prompt in (noise, black, noise)]
    assert abs(logprobs[0][0] - logprobs[1][0]) > 1e-2
    assert logprobs[0] == logprobs[2]
    assert_is_the_policy(engine, [black])


def with_exif() -> Image.Image:
    turned = picture(64, 48, 9)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    turned.info["exif"] = exif.tobytes()
    turned._exif = exif  # pyright: ignore
    return turned


@engines(PICTURED, SEEING)
def test_pictures_of_other_modes_are_seen_as_they_were_encoded(engine: Engine) -> None:
    clear = picture(64, 48, 10).convert("RGBA")
    clear.putalpha(Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) * 4, (48, 1))))
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 2**16, (48, 64), dtype=np.uint16))
    grey = picture(64, 48, 11).convert("L")
    palette = picture(64, 48, 12).convert("P")
    asked = engine.adapter.encode(rows_with(clear, with_exif(), deep, grey, palette))
    assert asked[1].images[0].size == (48, 64), "it was turned"
    assert_is_the_policy(engine, asked)


# Pixel budgets: an engine that reads pictures by itself has to come to the size that was encoded.


def a_part(image: Any, **keys: int) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image, **keys}, {"type": "text", "text": "which digit ?"}]
    return [{"role": "user", "content": parts}]


# The processors of the tiny models take 512 to 4096 pixels; the server of one was told of other bounds when it started.
BOUNDS = "its processor has other bounds for pictures than the run .* give `vlmroll serve` the same --min-pixels and"
TOLD = "qwen3_vl"


def assert_pictures_are_the_policys(engine: Engine, asked: Sequence[Prompt], *, refused: bool) -> None:
    """Either the engine makes of them what the policy makes, or it says what to change."""
    if not refused:
        assert_is_the_policy(engine, asked)
        return
    # A picture of one token looks like its placeholder.
    small = any(prompt.images and prompt.engine_ids == prompt.prompt_ids for prompt in asked)
    with pytest.raises(ValueError, match=r"prompt \d: the engine used \d+ ids that differ" if small else BOUNDS):
        engine.generator.generate(asked, GREEDY, 1)


@engines(PICTURED, SEEING)
@pytest.mark.parametrize(
    ("budget", "beyond"),
    [
        ({"min_pixels": 1024, "max_pixels": 2048}, False),
        ({"min_pixels": 256, "max_pixels": 1024}, True),
        ({"min_pixels": 3000, "max_pixels": 9216}, True),
    ],
)
def test_the_pixel_budget_of_a_run_holds_in_the_engine(engine: Engine, budget: dict[str, Any], beyond: bool) -> None:
    """With pictures far above and far below it, and one between."""
    adapter = load_adapter(tiny(engine.name).processor, **budget)
    rows = rows_with(picture(400, 300, 1), picture(16, 16, 2), picture(64, 48, 3))
    asked, without = adapter.encode(rows), engine.adapter.encode(rows)
    assert [p.num_tokens for p in asked] != [p.num_tokens for p in without], "the budget does something"
    other = another(engine.kind, engine.name, model=engine.model, adapter=adapter)
    refused = beyond and engine.kind == "vllm_server" and engine.name != TOLD
    assert_pictures_are_the_policys(other, asked, refused=refused)


def own_size(engine: Engine, **keys: int) -> Prompt:
    """A prompt with a picture of some size keys."""
    parts = [{"type": "image", "image": picture(120, 128, 1), **keys}, {"type": "text", "text": "which digit ?"}]
    return engine.adapter.encode([{"prompt": [{"role": "user", "content": parts}]}])[0]


@engines(PICTURED, SEEING)
def test_pictures_with_sizes_of_their_own_have_them_in_the_engine(engine: Engine) -> None:
    """One picture in several sizes, so that the engine's caches have to tell them apart."""
    asked = [
        own_size(engine),
        own_size(engine, resized_height=48, resized_width=80),
        own_size(engine, resized_height=50, resized_width=30),
        own_size(engine, max_pixels=1024),
        own_size(engine, min_pixels=3000, max_pixels=4000),
    ]
    assert len({prompt.num_tokens for prompt in asked}) > 3
    assert_is_the_policy(engine, asked)


@engines(PICTURED, SEEING)
@pytest.mark.parametrize(
    "keys",
    [
        {"min_pixels": 256, "max_pixels": 400},
        {"resized_height": 96, "resized_width": 80},
        {"min_pixels": 6000, "max_pixels": 9000},
    ],
    ids=str,
)
def test_sizes_beyond_the_processors_hold_in_the_engine_or_are_refused(engine: Engine, keys: dict[str, int]) -> None:
    larger = keys.get("max_pixels", 9000) > 4096
    refused = {"vllm_colocate": larger, "vllm_server": engine.name != TOLD}.get(engine.kind, False)
    assert_pictures_are_the_policys(engine, [own_size(engine, **keys)], refused=refused)


# New weights.


@engines()
def test_new_weights_are_taken_over(engine: Engine) -> None:
    """The same prompts and pictures in every round: nothing may be left of the old weights."""
    asked = engine.prompts + behind_a_long_text(engine)
    with engine.changed():
        for seed in range(3):
            before = generate(engine, asked, GREEDY, 1)
            perturb(engine.model, seed)
            engine.generator.sync_weights(engine.model)
            assert largest_gap(engine, before, 1.0) > 1e-2
            assert_is_the_policy(engine, asked)
    assert_is_the_policy(engine, asked)


@engines(PICTURED, SEEING)
def test_a_new_vision_tower_is_taken_over(engine: Engine) -> None:
    asked = engine.prompts + behind_a_long_text(engine, picture(64, 48, 1), picture(64, 48, 2))
    with engine.changed():
        before = generate(engine, asked, GREEDY, 1)
        perturb(engine.model.model.visual, 7, size=0.2)
        engine.generator.sync_weights(engine.model)
        assert largest_gap(engine, before, 1.0) > 1e-2
        assert_is_the_policy(engine, asked)


@engines(KINDS, ["text"])
def test_a_generator_counts_the_weights_that_it_took_over(engine: Engine) -> None:
    first = engine.generator.policy_version
    for version in range(first, first + 3):
        (group,) = engine.generator.generate(engine.prompts[:1], SamplingParams(max_tokens=1), 2).completions
        assert [completion.policy_version for completion in group] == [version] * 2
        engine.generator.sync_weights(engine.model)


@engines()
def test_adapters_come_merged(engine: Engine) -> None:
    """A LoRA on all linear layers of the language model."""
    targets = "all-linear" if engine.name == "text" else r".*language_model.*\.\w+_proj"
    lora: Any = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    before = generate(engine, engine.prompts, GREEDY, 1)
    policy: Any = get_peft_model(engine.model, lora)
    try:
        engine.generator.sync_weights(policy)
        assert largest_gap(engine, before, 1.0, policy) > 1e-2
        assert_is_the_policy(engine, engine.prompts, policy)
        with policy.disable_adapter():
            engine.generator.sync_weights(policy)
            assert_is_the_policy(engine, engine.prompts, policy)
    finally:
        policy.unload()
        engine.generator.sync_weights(engine.model)
    assert generate(engine, engine.prompts, GREEDY, 1).completion_ids == before.completion_ids


# Options of sampling.


def kept(probabilities: Sequence[float], *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> dict[int, float]:
    """What truncation leaves of a distribution, normalised again: min_p, then top_k, then top_p."""
    most = max(probabilities)
    left = {id: p for id, p in enumerate(probabilities) if p > 0 and p >= min_p * most}
    ranked = sorted(left, key=lambda id: -left[id])
    ranked = ranked[:top_k] if top_k else ranked
    total = sum(left[id] for id in ranked)
    before = itertools.accumulate((left[id] / total for id in ranked[:-1]), initial=0.0)
    chosen = [id for id, mass in zip(ranked, before, strict=True) if mass < top_p]
    total = sum(left[id] for id in chosen)
    return {id: left[id] / total for id in chosen}


def distributions(engine: Engine, output: GenerationOutput, temperature: float) -> list[list[torch.Tensor]]:
    """For each token of each completion the distribution that it is drawn from, before truncation."""
    batch = padded(engine, output)
    with torch.no_grad():
        logits = engine.model(**batch.model_inputs()).logits[:, -batch.completion_mask.shape[1] - 1 : -1].double()
    logits[..., sorted(engine.generator.banned_ids)] = float("-inf")
    rows = (logits / temperature).softmax(-1)
    return [list(row[: len(ids)]) for row, ids in zip(rows, output.completion_ids, strict=True)]


CUTS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 5},
    {"min_p": 0.4},
    {"min_p": 0.05, "top_k": 60, "top_p": 0.8},
    {"top_k": 1},
]


@engines(models=FEW)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_truncated_distributions(engine: Engine, cut: dict[str, Any]) -> None:
    """vLLM reports log-probabilities after truncation and says so, the others those before it."""
    output = generate(engine, engine.prompts, SamplingParams(max_tokens=8, temperature=0.7, seed=2, **cut), 4)
    truncated = engine.kind in VLLM
    assert {completion.truncated for group in output.completions for completion in group} == {truncated}
    sizes: list[int] = []
    for ids, logprobs, rows in zip(
        output.completion_ids, output.logprobs, distributions(engine, output, 0.7), strict=True
    ):
        for id, logprob, row in zip(ids, logprobs, rows, strict=True):
            whole = row.tolist()
            left = kept(whole, **cut)
            sizes.append(len(left))
            if truncated or len(cut) == 1:  # the others apply several in another order
                assert id in left
            expected = left[id] if truncated else whole[id]
            assert logprob == pytest.approx(math.log(expected), abs=TOLERANCE[engine.kind])
    assert max(sizes) < 250


@engines(models=FEW)
def test_nothing_is_truncated_at_temperature_0(engine: Engine) -> None:
    output = generate(engine, engine.prompts, replace(GREEDY, top_p=0.5, top_k=2, min_p=0.3), 1)
    assert output.completion_ids == generate(engine, engine.prompts, GREEDY, 1).completion_ids
    assert largest_gap(engine, output, 1.0) <= TOLERANCE[engine.kind]
    assert not any(completion.truncated for (completion,) in output.completions)


@engines(models=FEW)
def test_repetition_penalty_sees_prompt_and_completion(engine: Engine) -> None:
    sampling = replace(GREEDY, max_tokens=24, repetition_penalty=1.7)
    output = generate(engine, engine.prompts, sampling, 1)
    assert output.completion_ids == engine.reference.generate(engine.prompts, sampling, 1).completion_ids
    assert output.completion_ids != generate(engine, engine.prompts, replace(GREEDY, max_tokens=24), 1).completion_ids


@engines(models=["text"])
def test_unknown_options_are_refused(engine: Engine) -> None:
    for name in ("num_beams", "n", "stop_token_id", "best_of"):
        with pytest.raises(ValueError, match=f"generation_kwargs: .*{name!r}"):
            engine.generator.generate(engine.prompts, SamplingParams(extra={name: 2}), 1)
    generate(engine, engine.prompts, GREEDY, 1)


HOT = SamplingParams(max_tokens=32, temperature=2.0, seed=4)


@engines(["transformers", "continuous_batching"], ["text"])
def test_options_of_transformers_act(engine: Engine) -> None:
    few = set(range(10, 60))
    output = generate(engine, engine.prompts, replace(HOT, extra={"suppress_tokens": sorted(few)}), 8)
    assert not sampled(output) & few
    output = generate(engine, engine.prompts, replace(HOT, extra={"min_new_tokens": 32}), 8)
    assert {len(ids) for ids in output.completion_ids} == {32}


@engines(VLLM, ["text"])
def test_options_of_vllm_act(engine: Engine) -> None:
    def run(**extra: Any) -> GenerationOutput:
        return generate(engine, engine.prompts, replace(HOT, extra=extra), 8)

    few = set(range(10, 20))
    assert sampled(run(allowed_token_ids=sorted(few))) <= few
    assert {len(ids) for ids in run(min_tokens=31).completion_ids} <= {31, 32}
    assert min(len(ids) for ids in run().completion_ids) < 31
    assert sampled(run(logit_bias={40: 100.0})) == {40}
    assert 40 not in sampled(run(bad_words=["I"]))
    assert 40 in sampled(run()), "the word of id 40"
    assert {ids[-1] for ids in run(stop_token_ids=[40, 41]).completion_ids} >= {40, 41}
    for penalty in ("presence_penalty", "frequency_penalty"):
        repeats = [sum(len(ids) - len(set(ids)) for ids in run(**{penalty: p}).completion_ids) for p in (2.0, -2.0)]
        assert repeats[0] < repeats[1]


@engines(VLLM, ["text"])
def test_ignore_eos_acts(engine: Engine) -> None:
    output = engine.generator.generate(engine.prompts, replace(HOT, extra={"ignore_eos": True}), 8)
    assert {len(ids) for ids in output.completion_ids} == {32}


@engines(VLLM, ["text", "qwen3_vl"])
def test_stop_strings_end_completions_and_stay_in_them(engine: Engine) -> None:
    output = generate(engine, engine.prompts, replace(HOT, max_tokens=64, extra={"stop": ["e", "which"]}), 8)
    texts = [engine.adapter.decode(ids) for ids in output.completion_ids]
    ended = [re.search("e|which", text) is not None for text in texts]
    assert sum(ended) > 4
    for ids, end in zip(output.completion_ids, ended, strict=True):
        assert re.search("e|which", engine.adapter.decode(ids[:-1])) is None
        assert end or len(ids) == 64 or ids[-1] in stop_ids_of(engine.model, engine.adapter)
    assert largest_gap(engine, output, 2.0) <= TOLERANCE[engine.kind]


@engines(VLLM, ["text", "qwen2_5_vl"])
def test_completions_match_a_regular_expression(engine: Engine) -> None:
    pytest.importorskip("lmformatenforcer", reason="vLLM imports it for any regular expression")
    pattern = r"[a-f]{2,5}( [0-9]{1,3})?\."
    other = another(engine.kind, engine.name, model=engine.model, adapter=engine.adapter, regex=pattern)
    output = generate(other, engine.prompts, replace(HOT, max_tokens=64), 6)
    stops = set(stop_ids_of(engine.model, engine.adapter))
    texts = [engine.adapter.decode([id for id in ids if id not in stops]) for ids in output.completion_ids]
    assert len(set(texts)) > 12
    assert [text for text in texts if re.fullmatch(pattern, text) is None] == []
    assert {completion.finish_reason for group in output.completions for completion in group} == {"stop"}


# Prompts that an engine cannot take.


@engines(VLLM, FEW)
def test_a_prompt_that_is_too_long_is_refused_before_any_is_sent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long,) = engine.adapter.encode([{"prompt": user(" ".join(["which"] * 220))}])
    room = CONTEXT - long.num_tokens
    assert 0 < room < 100
    most = SamplingParams(max_tokens=room, temperature=0)
    output = generate(engine, [engine.prompts[0], long], most, 1)
    assert output.completion_ids == engine.reference.generate([engine.prompts[0], long], most, 1).completion_ids

    def send(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was sent")

    if engine.kind == "vllm_colocate":
        monkeypatch.setattr(engine.generator._llm, "generate", send)
    else:
        monkeypatch.setattr(type(engine.generator._servers[0]), "post", send)
    words = rf"prompt 2: it has {long.num_tokens} tokens .* with {room + 1} .* context of {CONTEXT}"
    with pytest.raises(ValueError, match=words):
        engine.generator.generate([*engine.prompts[:2], long], replace(most, max_tokens=room + 1), 1)
