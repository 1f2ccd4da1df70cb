"""Generation with the continuous batching of transformers, against the in-process generator and against scoring."""

import copy
import gc
import threading
from collections.abc import Generator as Iterator
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, ContinuousMixin
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from tiny_models import mixed_rows, tiny, user
from vlmroll.generators import Generator, TransformersGenerator
from vlmroll.generators.continuous_batching import ContinuousBatchingGenerator
from vlmroll.generators.continuous_engine import MAX_BATCH_TOKENS, MAX_CACHED_TOKENS
from vlmroll.generators.sampling import processors
from vlmroll.scoring import policy_logprobs
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import Prompt, collate, load_adapter
from vlmroll_processors.adapter import FamilyAdapter

NAMES = ("text", "qwen2_5_vl", "qwen3_vl")
names = pytest.mark.parametrize("name", NAMES)
GREEDY = SamplingParams(max_tokens=10, temperature=0)
PLAIN = SamplingParams(max_tokens=6, temperature=0.7, seed=0)
CUT = SamplingParams(max_tokens=6, temperature=0.7, seed=0, top_p=0.9, top_k=60, min_p=0.001)
TOLERANCE = 1e-4  # the largest difference seen was 1.9e-6
SETTINGS = pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine collects garbage twice in each call, 0.3 s each with all that tests have loaded."""
    monkeypatch.setattr(gc, "collect", int)


@pytest.fixture(autouse=True)
def _no_thread() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before, "no thread of the engine is left"


@cache
def adapter(name: str) -> FamilyAdapter:
    return load_adapter(tiny(name).processor)


@cache
def prompts(name: str) -> tuple[Prompt, ...]:
    """Texts of several lengths."""
    texts = ("which ?", "what is the sum of 0 1 2 3 ? 0 1 2 3 4 5 6 7 8 9", "how many dots ? 7", "red")
    return tuple(adapter(name).encode([{"prompt": user(text)} for text in texts]))


def model_of(name: str, *stops: int) -> Any:
    """A copy of a tiny model that stops at these ids too."""
    model = copy.deepcopy(tiny(name).model)
    model.generation_config.eos_token_id = [model.generation_config.eos_token_id, *stops]
    return model


def engine(name: str, model: Any = None, **more: Any) -> ContinuousBatchingGenerator:
    return ContinuousBatchingGenerator(tiny(name).model if model is None else model, adapter(name), **more)


def sample(
    name: str, sampling: SamplingParams, n: int = 1, *, asked: Sequence[Prompt] | None = None, **more: Any
) -> GenerationOutput:
    return engine(name, **more).generate(prompts(name) if asked is None else asked, sampling, n)


def in_process(name: str, model: Any = None, sampling: SamplingParams = GREEDY, n: int = 1) -> GenerationOutput:
    generator = TransformersGenerator(tiny(name).model if model is None else model, adapter(name))
    return generator.generate(prompts(name), sampling, n)


def flat(values: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in values for value in row]


def assert_same(found: GenerationOutput, expected: GenerationOutput) -> None:
    assert found.prompts == expected.prompts
    assert found.completion_ids == expected.completion_ids
    assert flat(found.logprobs) == pytest.approx(flat(expected.logprobs), abs=TOLERANCE)
    reasons = [[completion.finish_reason for completion in group] for group in expected.completions]
    assert [[completion.finish_reason for completion in group] for group in found.completions] == reasons


def scores(name: str, model: Any, output: GenerationOutput, temperature: float, banned: Sequence[int]) -> list[float]:
    """What training computes for the sampled tokens."""
    pairs = [(p, c) for p, group in zip(output.prompts, output.completions, strict=True) for c in group]
    ids = [completion.completion_ids for _, completion in pairs]
    batch = collate([prompt for prompt, _ in pairs], ids, pad_token_id=adapter(name).pad_token_id)
    with torch.no_grad():
        found = policy_logprobs(model, batch, temperature=temperature, banned_ids=banned).logprobs
    return [value for row, own in zip(found.tolist(), ids, strict=True) for value in row[: len(own)]]


# Against the generator in the process.


@names
def test_greedy_is_that_of_the_policy(name: str) -> None:
    """With the positions of pictures that an earlier batch left in the model, and with rows that stop early."""
    model = copy.deepcopy(tiny(name).model)
    if name != "text":
        TransformersGenerator(model, adapter(name)).generate(adapter(name).encode(mixed_rows()), GREEDY, 1)
    free = in_process(name)
    assert_same(sample(name, GREEDY, 1, model=model), free)
    varied = replace(GREEDY, repetition_penalty=2.0)
    ids = in_process(name, sampling=varied).completion_ids
    model = model_of(name, ids[0][4], ids[2][2])
    found = sample(name, varied, 3, model=model)
    assert_same(found, in_process(name, model, varied, 3))
    assert len({len(ids) for ids in found.completion_ids}) > 2
    model = model_of(name, free.completion_ids[3][0])
    found = sample(name, GREEDY, 2, model=model)
    assert_same(found, in_process(name, model, n=2))
    assert found.completion_ids[-1] == free.completion_ids[3][:1], "only the stop token"


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"extra": {"no_repeat_ngram_size": 1, "bad_words_ids": [[40], [41, 42]]}},
    {"extra": {"min_new_tokens": 4}},
    {"extra": {"suppress_tokens": list(range(0, 300, 3))}},
    {"top_k": 3, "min_p": 0.9, "extra": {"typical_p": 0.3}},  # nothing is cut at temperature 0
]


@pytest.mark.parametrize("options", PENALTIES, ids=str)
def test_greedy_with_penalties_is_that_of_the_policy(options: dict[str, Any]) -> None:
    """In batches of so few tokens that prompts are read in parts and rows are at different steps."""
    first = in_process("text").completion_ids
    model = model_of("text", first[0][1], first[2][2])
    sampling = SamplingParams(max_tokens=10, temperature=0, **options)
    expected = in_process("text", model, sampling)
    assert (expected.completion_ids == in_process("text", model).completion_ids) == ("top_k" in options)
    assert_same(sample("text", sampling, model=model, config={"max_batch_tokens": 20}), expected)


def test_a_small_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions that lose their place in the cache go on later, from where they were."""
    lost: list[bool] = []
    offload = OffloadingManager.offload_requests

    def take_note(manager: OffloadingManager) -> bool:
        lost.append(offload(manager))
        return lost[-1]

    monkeypatch.setattr(OffloadingManager, "offload_requests", take_note)
    sampling = SamplingParams(max_tokens=16, temperature=0, repetition_penalty=1.3)
    found = sample("text", sampling, 4, config={"page_size": 4, "num_blocks": 22, "max_batch_tokens": 32})
    assert_same(found, in_process("text", sampling=sampling, n=4))
    assert any(lost)


def test_eager_attention() -> None:
    model = copy.deepcopy(tiny("text").model)
    model.set_attn_implementation("eager")
    assert_same(sample("text", GREEDY, 2, model=model), in_process("text", n=2))


def test_a_prompt_of_one_token() -> None:
    asked = adapter("text").encode([{"prompt": "a"}, {"prompt": "ab"}])
    assert [prompt.num_tokens for prompt in asked] == [1, 2]
    expected = TransformersGenerator(tiny("text").model, adapter("text")).generate(asked, GREEDY, 3)
    assert_same(sample("text", GREEDY, 3, asked=asked), expected)


def test_new_weights_are_used_from_the_next_call_on() -> None:
    model = copy.deepcopy(tiny("text").model)
    generator = engine("text", model)
    before = generator.generate(prompts("text"), GREEDY, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    generator.sync_weights(model)
    after = generator.generate(prompts("text"), GREEDY, 2)
    assert after.completion_ids != before.completion_ids
    assert_same(after, in_process("text", model, n=2))
    assert {c.policy_version for group in before.completions for c in group} == {0}
    assert {c.policy_version for group in after.completions for c in group} == {1}


def test_adapters_of_peft() -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(tiny("text").model), lora)
    found = sample("text", GREEDY, 2, model=model)
    assert_same(found, in_process("text", model, n=2))
    assert found.completion_ids != in_process("text", n=2).completion_ids


# Against scoring.


@names
@SETTINGS
def test_logprobs_are_what_training_scores(name: str, sampling: SamplingParams) -> None:
    banned = list(range(100, 200))
    output = sample(name, sampling, 3, banned_ids=banned)
    expected = scores(name, tiny(name).model, output, 0.7, sorted(adapter(name).vision_ids.union(banned)))
    assert flat(output.logprobs) == pytest.approx(expected, abs=TOLERANCE)
    assert not any(completion.truncated for group in output.completions for completion in group)
    without = scores(name, tiny(name).model, output, 0.7, ())
    assert flat(output.logprobs) != pytest.approx(without, abs=100 * TOLERANCE), "banned ids matter"


@SETTINGS
def test_mixed_precision_is_that_of_the_caller(sampling: SamplingParams) -> None:
    """Autocast belongs to a thread, and the engine runs in another one; on a PEFT model it runs the model below."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])  # it starts as the model itself
    model = get_peft_model(copy.deepcopy(tiny("text").model), lora)
    banned = sorted(adapter("text").vision_ids)
    with torch.autocast("cpu", torch.bfloat16):
        output = sample("text", sampling, 4, model=model)
        expected = scores("text", model, output, 0.7, banned)
    exact = scores("text", model, output, 0.7, banned)
    # Measured: 0.012 to the scores in bfloat16, 0.028 to those in float32.
    assert flat(output.logprobs) == pytest.approx(expected, abs=5e-2)
    assert flat(output.logprobs) != pytest.approx(exact, abs=1e-3)


# Which ids are sampled.


@SETTINGS
def test_vision_and_banned_ids_are_never_sampled(sampling: SamplingParams) -> None:
    name, banned = "qwen3_vl", range(0, 336, 3)
    hot = replace(sampling, max_tokens=100, temperature=5.0, top_k=200 if sampling.top_k else 0)
    sampled = {id for ids in sample(name, hot, 4, banned_ids=banned).completion_ids for id in ids}
    assert len(sampled) > 150
    assert not sampled & adapter(name).vision_ids
    assert not sampled & set(banned)


@SETTINGS
def test_frequencies_follow_the_distribution(sampling: SamplingParams) -> None:
    """Chi-square over the 12 most likely first tokens and the rest: 12 degrees of freedom, 1 in 1000 above 32.9."""
    prompt, draws = prompts("text")[1], 600
    model = tiny("text").model
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt.prompt_ids])).logits[0, -1:]
    logits[:, sorted(adapter("text").vision_ids)] = float("-inf")
    first = replace(sampling, max_tokens=1, seed=11)
    nothing = torch.zeros(1, 0, dtype=torch.long)
    probabilities = processors(first, [], 1, "cpu")(nothing, nothing, logits)[0].softmax(-1)
    sampled = [ids[0] for ids in sample("text", first, draws, asked=[prompt]).completion_ids]
    best = probabilities.topk(12).indices.tolist()
    expected = [draws * float(probabilities[id]) for id in best]
    counts = [sampled.count(id) for id in best]
    expected.append(draws - sum(expected))
    counts.append(draws - sum(counts))
    assert sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True)) < 32.9
    assert all(probabilities[id] > 0 for id in sampled)


@pytest.mark.parametrize(
    "options",
    [
        *({"top_p": 0.05}, {"top_k": 2}, {"min_p": 0.9}, {"repetition_penalty": 1e9}),
        *({"extra": {"typical_p": 0.05}}, {"extra": {"suppress_tokens": list(range(12, 300))}}),
    ],
    ids=str,
)
def test_each_option_leaves_out_what_it_should(options: dict[str, Any]) -> None:
    prompt, draws = prompts("text")[1], 200
    sampling = SamplingParams(max_tokens=1, temperature=2.0, seed=0, **options)
    ids = torch.tensor([prompt.prompt_ids])
    with torch.no_grad():
        logits = tiny("text").model(input_ids=ids).logits[0, -1:]
    left = processors(sampling, [], ids.shape[1], "cpu")(ids, torch.ones_like(ids), logits)[0].softmax(-1) > 0
    output = sample("text", sampling, draws, asked=[prompt])
    assert all(left[id] for (id,) in output.completion_ids)
    without = sample("text", replace(PLAIN, max_tokens=1, temperature=2.0), draws, asked=[prompt])
    assert not all(left[id] for (id,) in without.completion_ids)


@SETTINGS
def test_one_seed_gives_one_output(sampling: SamplingParams) -> None:
    def ids(seed: int | None) -> list[list[int]]:
        return sample("text", replace(sampling, seed=seed), 3).completion_ids

    torch.manual_seed(5)
    state = torch.get_rng_state()
    once = ids(1)
    assert torch.get_rng_state().equal(state), "a seed of its own leaves torch's generator alone"
    torch.manual_seed(6)
    assert ids(1) == once
    assert ids(2) != once
    torch.manual_seed(5)
    first = ids(None)
    assert ids(None) != first
    torch.manual_seed(5)
    assert ids(None) == first


@SETTINGS
def test_siblings_keep_their_order_whichever_ends_first(sampling: SamplingParams) -> None:
    model = model_of("text", *range(150))
    whole = sample("text", replace(sampling, max_tokens=8), 8, model=model)
    assert len({len(ids) for ids in whole.completion_ids}) > 3
    cut = sample("text", replace(sampling, max_tokens=1), 8, model=model)
    assert cut.completion_ids == [ids[:1] for ids in whole.completion_ids]


@SETTINGS
def test_prompts_and_siblings_differ(sampling: SamplingParams) -> None:
    twice = [prompts("text")[0], prompts("text")[0]]
    output = sample("text", replace(sampling, max_tokens=10), 4, asked=twice)
    assert len({completion.completion_ids for group in output.completions for completion in group}) == 8


# When completions end.


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_end_at_the_limit(length: int, temperature: float) -> None:
    sampling = SamplingParams(max_tokens=length, temperature=temperature, seed=0)
    output = sample("text", sampling, 2)
    assert [len(ids) for ids in output.completion_ids] == [length] * 8
    assert {completion.finish_reason for group in output.completions for completion in group} == {"length"}


def test_a_stop_at_the_limit_is_a_stop() -> None:
    first = in_process("text").completion_ids[0][0]
    limit = SamplingParams(max_tokens=1, temperature=0)
    ((completion,), *_) = sample("text", limit, model=model_of("text", first)).completions
    assert completion.finish_reason == "stop"


def test_a_sampled_stop_token_has_its_logprob() -> None:
    """Most of the vocabulary stops: many completions are a stop token alone."""
    model = model_of("text", *range(300))
    output = sample("text", PLAIN, 6, model=model)
    lengths = {len(ids) for ids in output.completion_ids}
    assert 1 in lengths
    expected = scores("text", model, output, 0.7, sorted(adapter("text").vision_ids))
    assert flat(output.logprobs) == pytest.approx(expected, abs=TOLERANCE)
    for completion in (completion for group in output.completions for completion in group):
        stopped = [id < 300 or id == 319 for id in completion.completion_ids]
        assert not any(stopped[:-1])
        assert completion.finish_reason == ("stop" if stopped[-1] else "length")


def test_it_is_a_generator_of_plain_values() -> None:
    generator = engine("text")
    assert isinstance(generator, Generator)
    assert generator.has_mismatch
    assert generator.stop_ids == [319]
    assert generator.banned_ids == adapter("text").vision_ids
    (group,) = generator.generate(prompts("text")[:1], GREEDY, 1).completions
    assert isinstance(group[0], Completion)
    assert {type(id) for id in group[0].completion_ids} == {int}
    assert {type(logprob) for logprob in group[0].logprobs} == {float}
    generator.close()


# What it leaves behind.


def state_of(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return (
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [part._attn_implementation for part in (base.config, base.config.text_config, base.config.vision_config)],
        base.generation_config.to_dict(),
        {name for name in vars(base) if not name.startswith("__")},
        base.forward,
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("fails", ["no", "engine", "interrupt"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_everything_is_as_it_was(attention: str, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny("qwen2_5_vl").model).train()
    model.set_attn_implementation({"": attention, "text_config": attention, "vision_config": "eager"})
    model.model.visual.eval()
    model.model.language_model.layers[1].eval()
    model.model.visual.requires_grad_(False)
    before = state_of(model)
    generator = engine("qwen2_5_vl", model)
    seen: list[Any] = []

    def look(module: Any, args: Any) -> None:
        seen.append((any(module.training for module in model.modules()), torch.is_grad_enabled()))
        if fails == "engine" and len(seen) == 3:
            raise RuntimeError("out of luck")

    join = ContinuousBatchingManager.join

    def interrupted(manager: Any, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(ContinuousBatchingManager, "join", join)
        raise KeyboardInterrupt

    hook = model.model.language_model.layers[0].register_forward_pre_hook(look)
    if fails == "interrupt":
        monkeypatch.setattr(ContinuousBatchingManager, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generator.generate(prompts("qwen2_5_vl"), replace(PLAIN, max_tokens=200), 2)
    elif fails == "engine":
        with pytest.raises(RuntimeError, match="prompt 0: continuous batching of transformers failed: out of luck; "):
            generator.generate(prompts("qwen2_5_vl"), PLAIN, 2)
    else:
        generator.generate(prompts("qwen2_5_vl"), PLAIN, 2)
    hook.remove()
    assert state_of(model) == before
    assert set(seen) <= {(False, False)}, "eval mode and no gradients while it generates"
    assert len(seen) < 100 if fails == "interrupt" else seen, "an interrupt does not wait for the completions"
    assert_same(generator.generate(prompts("qwen2_5_vl"), GREEDY, 1), in_process("qwen2_5_vl", model))


def test_a_patched_forward_stays() -> None:
    """Accelerate patches autocast into it."""
    model = copy.deepcopy(tiny("text").model)
    calls: list[int] = []
    original = model.forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    model.forward = patched
    sample("text", GREEDY, model=model)
    assert model.forward is patched
    assert len(calls) == GREEDY.max_tokens


# What it refuses, and how it fails.


@pytest.mark.parametrize(("asked", "number"), [((), 1), (prompts("text"), 0)])
def test_nothing_to_generate_is_refused(asked: Sequence[Prompt], number: int) -> None:
    with pytest.raises(ValueError, match=f"nothing to generate: {len(asked)} prompts, {number} generations each"):
        sample("text", GREEDY, number, asked=asked)


def refusal(name: str, sampling: SamplingParams, asked: Sequence[Prompt], **more: Any) -> str:
    """The message with which it refuses, before the model runs."""
    model = copy.deepcopy(tiny(name).model)
    model.register_forward_pre_hook(lambda module, args: pytest.fail("the model ran"))  # pyright: ignore
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        sample(name, sampling, asked=asked, model=model, **more)
    return str(caught.value)


def test_pictures_are_refused() -> None:
    text = prompts("qwen3_vl")[0]
    pictures = adapter("qwen3_vl").encode(mixed_rows())[1]
    message = refusal("qwen3_vl", GREEDY, [text, pictures])
    assert message.startswith(
        "prompt 1 has 3 pictures and 0 videos, and the continuous batching of transformers reads "
    )
    assert message.endswith(
        "use TransformersGenerator (use_transformers_continuous_batching=False) or vLLM (use_vllm=True)"
    )


def test_prompts_that_are_too_long_are_refused() -> None:
    context = tiny("text").model.config.max_position_embeddings
    longest = prompts("text")[1].num_tokens
    message = refusal("text", SamplingParams(max_tokens=context - longest + 1), prompts("text"))
    assert message.startswith(f"prompt 1: {longest} tokens and a completion of {context - longest + 1} do not fit the ")
    assert f"{context} positions" in message
    message = refusal("text", GREEDY, prompts("text"), config={"num_blocks": 1, "page_size": longest + 9})
    assert message.startswith(f"prompt 1: {longest} tokens and a completion of 10 do not fit a cache of 1 blocks of ")
    fits = {"num_blocks": 1, "page_size": longest + 10}
    assert_same(sample("text", GREEDY, config=fits), in_process("text"))


def test_options_of_sampling_that_are_not_offered_are_refused() -> None:
    message = refusal("text", SamplingParams(extra={"num_beams": 4}), prompts("text"))
    assert message.startswith("generation_kwargs: 'num_beams' is not offered")
    assert "'min_new_tokens'" in message


@pytest.mark.parametrize("setting", [{"use_cuda_graph": (False, True)}, {"use_async_batching": True}], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, CUT, SamplingParams(extra={"min_new_tokens": 2})], ids=str)
def test_recorded_steps_are_refused_where_python_draws(sampling: SamplingParams, setting: dict[str, Any]) -> None:
    message = refusal("text", sampling, prompts("text"), config=setting)
    assert f"{next(iter(setting))}=" in message
    assert "leave out top_p, top_k, min_p, repetition_penalty and generation_kwargs, and temperature=0" in message


def test_steps_that_are_not_recorded_are_no_reason_to_refuse() -> None:
    off = {"use_cuda_graph": (False, False), "use_async_batching": False, "default_compile_level": 0}
    assert_same(sample("text", GREEDY, config=off), in_process("text"))


def test_the_reason_of_an_engine_that_does_not_start_is_told() -> None:
    with pytest.raises(ValueError, match=r"cannot run Qwen3ForCausalLM: Async batching requires .*; change "):
        sample("text", PLAIN, config={"use_async_batching": True})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"pagesize": 8}, "has no 'pagesize'; did you mean 'page_size'"),
        ({"seed": 1}, "'seed' is not taken"),
        ({"num_blocks": 0}, "num_blocks must be a whole number of at least 1"),
        ({"page_size": 2}, "cannot run Qwen3ForCausalLM: page_size must be at least 4"),
    ],
    ids=str,
)
def test_settings_are_checked_when_it_is_made(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine("text", config=setting)


def test_a_model_with_other_layers_is_refused_when_the_generator_is_made() -> None:
    model = copy.deepcopy(tiny("qwen3_5").model).train()
    with pytest.raises(ValueError, match="cannot run Qwen3_5ForCon.*: Invalid layer type: linear_attention; change"):
        engine("qwen3_5", model)
    assert model.training


def test_a_manager_that_the_model_keeps_is_not_used() -> None:
    model = copy.deepcopy(tiny("text").model)
    generator = engine("text", model)
    sizes = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=8)
    model._cached_continuous_batching_manager = model.init_continuous_batching(GenerationConfig(), sizes)
    with pytest.raises(ValueError, match=r"destroy_cached_continuous_batching_manager\(\) first"):
        generator.generate(prompts("text"), GREEDY, 1)


def test_completions_that_do_not_come_back_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    get_result = ContinuousBatchingManager.get_result

    def lose(manager: Any, **kwargs: Any) -> Any:
        answer = get_result(manager, **kwargs)
        return get_result(manager, **kwargs) if answer is not None and answer.request_id == "2" else answer

    monkeypatch.setattr(ContinuousBatchingManager, "get_result", lose)
    with pytest.raises(RuntimeError, match="prompt 2: continuous .* failed: 2 of 3 completions came back; use Trans"):
        sample("text", GREEDY, 3)


def test_one_failed_completion_is_an_error() -> None:
    """Logits that are no numbers."""
    model = copy.deepcopy(tiny("text").model)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="prompt 0: continuous batching of transformers failed: probability tensor"):
        sample("text", PLAIN, model=model)


@pytest.mark.parametrize("given", [{}, {"num_blocks": None}, {"num_blocks": 77, "max_batch_tokens": 55}], ids=str)
def test_the_cache_always_has_a_size(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the engine takes most of the machine's memory."""
    model, seen = copy.deepcopy(tiny("text").model), list[Any]()

    def take_note(options: Any, config: Any, hints: Any) -> Any:
        seen.append(config)
        raise ValueError("seen")

    generator = engine("text", model, config=given)
    monkeypatch.setattr(model, "init_continuous_batching", take_note, raising=False)
    for n in (1, 10_000):
        with pytest.raises(ValueError, match="seen"):
            generator.generate(prompts("text"), GREEDY, n)
    sizes = [(config.num_blocks, config.max_batch_tokens) for config in seen]
    if given.get("num_blocks"):
        assert sizes == [(77, 55)] * 2
        return
    lengths = [prompt.num_tokens for prompt in prompts("text")]
    (few, tokens), (most, limit) = sizes
    page = 32  # on a CPU
    assert sum(lengths) + 40 <= few * page <= sum(lengths) + 40 + 4 * 3 * page
    assert tokens == sum(lengths)
    assert (most * page, limit) == (MAX_CACHED_TOKENS, MAX_BATCH_TOKENS)


def test_steps_are_recorded_where_the_engine_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it can, the engine decides; tokens that are drawn in Python need it in each step."""
    seen: list[Any] = []

    def take_note(model: Any, options: Any, config: Any, hints: Any) -> Any:
        seen.append((config.use_cuda_graph, config.use_async_batching))
        return start(model, options, config, hints)

    start = ContinuousMixin.init_continuous_batching
    monkeypatch.setattr(ContinuousMixin, "init_continuous_batching", take_note)
    generator = engine("text")
    for sampling in (PLAIN, CUT):
        generator.generate(prompts("text"), sampling, 1)
    assert seen[1:] == [(None, None), (False, False)]
