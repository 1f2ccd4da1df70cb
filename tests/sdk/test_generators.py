"""The in-process generator against `generate` of transformers and against scoring; what all promise is in
`test_generator_contract.py`."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from tiny_models import QWEN_FAMILIES, mixed_rows, tiny, user
from vlmroll.generators import ScriptedGenerator, TransformersGenerator
from vlmroll.generators.sampling import draw, processors
from vlmroll.scoring import policy_logprobs
from vlmroll.types import GenerationOutput, SamplingParams
from vlmroll_processors import Prompt, collate, load_adapter
from vlmroll_processors.adapter import FamilyAdapter

ALL = (*QWEN_FAMILIES, "text")
names = pytest.mark.parametrize("name", ALL)
families = pytest.mark.parametrize("name", QWEN_FAMILIES)
GREEDY = SamplingParams(max_tokens=10, temperature=0)


@cache
def adapter(name: str) -> FamilyAdapter:
    return load_adapter(tiny(name).processor)


@cache
def prompts(name: str) -> tuple[Prompt, ...]:
    """Rows with 1, 3, 0 and 2 pictures; texts of several lengths for the text family."""
    texts = ("which ?", "what is the sum of 0 1 2 3 ?", "how many dots ? 7", "red")
    return tuple(adapter(name).encode([{"prompt": user(t)} for t in texts] if name == "text" else mixed_rows()))


def model_with_stops(name: str, *stops: int) -> Any:
    """A copy of a tiny model that stops at these ids too."""
    model = copy.deepcopy(tiny(name).model)
    model.generation_config.eos_token_id = [model.generation_config.eos_token_id, *stops]
    return model


def generator(name: str, model: Any = None, **more: Any) -> TransformersGenerator:
    return TransformersGenerator(tiny(name).model if model is None else model, adapter(name), **more)


def ids_of(output: GenerationOutput) -> list[list[int]]:
    return output.completion_ids


# The scripted generator.


def test_a_script_goes_on_from_call_to_call_and_remembers() -> None:
    engine, asked = ScriptedGenerator([[7, 8, 9], [10], [11, 12]], logprob=-0.5), prompts("text")[:1]
    short = SamplingParams(max_tokens=2)
    first, second = engine.generate(asked, short, 2), engine.generate(asked, SamplingParams(), 2)
    assert ids_of(first) == [[7, 8], [10]]
    assert ids_of(second) == [[11, 12], [7, 8, 9]]
    assert [c.finish_reason for c in first.completions[0]] == ["length", "stop"]
    assert second.logprobs == [[-0.5] * 2, [-0.5] * 3]
    assert engine.requests == [(asked, short, 2), (asked, SamplingParams(), 2)]


# Against `generate` of transformers.


def generated(name: str, model: Any, options: dict[str, Any]) -> list[list[int]]:
    """What transformers generates for the prompts in one batch, each cut behind its first stop id."""
    batch = collate(prompts(name), pad_token_id=adapter(name).pad_token_id).model_inputs()
    del batch["position_ids"]  # it finds its own
    banned = sorted(adapter(name).vision_ids) or None
    config = GenerationConfig(
        do_sample=False,
        suppress_tokens=banned,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=adapter(name).pad_token_id,
        **options,
    )
    rows = model.generate(**batch, generation_config=config)[:, batch["input_ids"].shape[1] :].tolist()
    eos = model.generation_config.eos_token_id
    stops = eos if isinstance(eos, list) else [eos]
    ends = [next((i + 1 for i, id in enumerate(row) if id in stops), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@names
def test_greedy_equals_transformers(name: str) -> None:
    """Rows with and without pictures in one batch; then again with two rows that stop early."""
    free = ids_of(generator(name).generate(prompts(name), GREEDY, 1))
    assert free == generated(name, tiny(name).model, {"max_new_tokens": 10})
    model = model_with_stops(name, free[0][4], free[2][2])
    output = generator(name, model).generate(prompts(name), GREEDY, 1)
    assert ids_of(output) == generated(name, model, {"max_new_tokens": 10})
    assert min(map(len, ids_of(output))) < 10
    assert ids_of(output)[0][-1] in (free[0][4], free[2][2]), "the stop id stays in the completion"
    for (completion,) in output.completions:
        stopped = completion.completion_ids[-1] in (free[0][4], free[2][2], adapter(name).tokenizer.eos_token_id)
        assert completion.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "text"])
@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 1}, {"bad_words_ids": [[40], [41, 42]]}], ids=str
)
def test_greedy_with_penalties_equals_transformers(name: str, options: dict[str, Any]) -> None:
    penalty: float = options.get("repetition_penalty", 1.0)
    extra = {key: value for key, value in options.items() if key != "repetition_penalty"}
    sampling = SamplingParams(max_tokens=10, temperature=0, repetition_penalty=penalty, extra=extra)
    found = ids_of(generator(name).generate(prompts(name), sampling, 1))
    assert found == generated(name, tiny(name).model, {"max_new_tokens": 10, **options})


TRUNCATIONS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 5},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5, "top_p": 0.9, "top_k": 40},
    {"extra": {"typical_p": 0.5, "epsilon_cutoff": 0.002, "eta_cutoff": 0.002}},
    {"extra": {"no_repeat_ngram_size": 2, "bad_words_ids": [[40], [41, 42]], "suppress_tokens": [50, 51]}},
    {"extra": {"min_new_tokens": 3}, "repetition_penalty": 0.8, "min_p": 0.01},
]


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_processors_equal_those_of_transformers(options: dict[str, Any], temperature: float) -> None:
    model, stops = tiny("text").model, [319, 7]
    theirs = {key: value for key, value in options.items() if key != "extra"} | options.get("extra", {})
    config = GenerationConfig(
        do_sample=True, temperature=temperature, eos_token_id=stops, pad_token_id=0, **{"top_k": 0, **theirs}
    )
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
    expected: Any = model._get_logits_processor(config, input_ids_seq_length=4, device="cpu")
    found: Any = processors(SamplingParams(temperature=temperature, **options), stops, 4, "cpu")
    assert [type(step) for step in (*found.history, *found.rest)] == [type(step) for step in expected]
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 60, (6, 6), generator=random)
    ids[0, -1] = 41
    logits = torch.randn(6, 336, generator=random) * 2
    logits[:, 300:305] = float("-inf")
    whole = torch.ones_like(ids)
    assert found(ids, whole, logits.clone()).equal(expected(ids, logits.clone()))
    assert not found(ids, whole, logits.clone()).equal(logits)


def test_penalties_do_not_see_the_padding() -> None:
    """A row that is padded on the left with a token that it does not hold is penalised as it is without padding."""
    found = processors(SamplingParams(repetition_penalty=2.0, extra={"no_repeat_ngram_size": 2}), [], 4, "cpu")
    alone, padded = torch.tensor([[7, 8, 7]]), torch.tensor([[3, 3, 3, 7, 8, 7]])
    logits = torch.ones(1, 12)
    expected = found(alone, torch.ones_like(alone), logits.clone())
    assert found(padded, torch.tensor([[0, 0, 0, 1, 1, 1]]), logits.clone()).equal(expected)
    assert expected[0, 3] == 1
    assert expected[0, 7] == 0.5
    assert expected[0, 8].isinf()


def test_options_that_are_off_do_nothing() -> None:
    off = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0}
    found = processors(SamplingParams(extra={**off, "suppress_tokens": None}), [1], 4, "cpu")
    assert not found.history
    assert not found.rest


def test_greedy_takes_the_most_likely_token_whatever_the_truncation() -> None:
    """Typical sampling alone would drop it."""
    logits = torch.tensor([[3.0, *[1.0] * 8]])
    sampling = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=1.0, extra={"typical_p": 0.3})
    ids = torch.zeros(1, 1, dtype=torch.long)
    cold = processors(sampling, [], 1, "cpu")
    assert draw(cold(ids, ids + 1, logits), 0, None).item() == 0
    hot = processors(SamplingParams(extra={"typical_p": 0.3}), [], 1, "cpu")
    assert hot(ids, ids + 1, logits.clone())[0, 0].isinf()


def test_unknown_options_are_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"generation_kwargs: 'num_beams' is not offered.*'min_new_tokens'.*typical_p"):
        generator("text").generate(prompts("text"), SamplingParams(extra={"num_beams": 4}), 1)


# Log-probabilities.


def assert_scores_agree(name: str, model: Any, output: GenerationOutput, temperature: float) -> None:
    ids = ids_of(output)
    owners = [prompt for prompt, group in zip(output.prompts, output.completions, strict=True) for _ in group]
    batch = collate(owners, ids, pad_token_id=adapter(name).pad_token_id)
    with torch.no_grad():
        scores = policy_logprobs(model, batch, temperature=temperature, banned_ids=sorted(adapter(name).vision_ids))
    for row, logprobs in zip(scores.logprobs, output.logprobs, strict=True):
        assert logprobs == pytest.approx(row[: len(logprobs)].tolist(), abs=1e-4)


@names
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_that_training_scores(name: str, temperature: float) -> None:
    model = model_with_stops(name, *range(20, 60))
    output = generator(name, model).generate(
        prompts(name), SamplingParams(max_tokens=8, temperature=temperature, seed=3), 3
    )
    assert len({len(ids) for ids in ids_of(output)}) > 2, "rows leave the batch at different times"
    assert_scores_agree(name, model, output, temperature)


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
def test_log_probabilities_are_those_before_truncation(options: dict[str, Any]) -> None:
    name, model = "qwen3_vl", tiny("qwen3_vl").model
    sampling = SamplingParams(max_tokens=6, temperature=0.7, seed=1, **options)
    assert_scores_agree(name, model, generator(name).generate(prompts(name), sampling, 2), 0.7)


def test_a_peft_model_samples_with_its_adapter() -> None:
    name = "qwen2_vl"
    base = model_with_stops(name, 20, 21)
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).eval()
    engine = generator(name, model)
    assert engine.stop_ids == [20, 21, 319]
    output = engine.generate(prompts(name), SamplingParams(max_tokens=5, seed=0), 2)
    assert_scores_agree(name, model, output, 1.0)


# How much the model runs.


def count_rows(model: Any) -> dict[str, list[tuple[int, ...]]]:
    """Rows and tokens of each call of the language model, and patches of each call of the vision tower."""
    calls: dict[str, list[tuple[int, ...]]] = {"language": [], "visual": []}
    visual = getattr(model.model, "visual", None)
    language = model.model if visual is None else model.model.language_model

    def see_language(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [kwargs.get(key) for key in ("inputs_embeds", "input_ids")]
        calls["language"].append(tuple(next(value for value in given if value is not None).shape[:2]))

    def see_visual(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls["visual"].append((len(args[0] if args else kwargs["hidden_states"]),))

    language.register_forward_pre_hook(see_language, with_kwargs=True)
    if visual is not None:
        visual.register_forward_pre_hook(see_visual, with_kwargs=True)
    return calls


@names
def test_each_prompt_is_read_once_for_all_its_completions(name: str) -> None:
    model, asked = copy.deepcopy(tiny(name).model), prompts(name)
    calls = count_rows(model)
    generator(name, model).generate(asked, SamplingParams(max_tokens=3, seed=0), 8)
    longest = max(prompt.num_tokens for prompt in asked)
    assert calls["language"] == [(len(asked), longest), (32, 1), (32, 1)]
    patches = sum(len(prompt.forward_kwargs.get("pixel_values", ())) for prompt in asked)
    assert calls["visual"] == ([(patches,)] if name != "text" else [])


def test_a_prompt_that_is_asked_for_twice_is_read_once() -> None:
    name = "qwen3_vl"
    model, asked = copy.deepcopy(tiny(name).model), [prompts(name)[i] for i in (1, 0, 1, 2)]
    calls = count_rows(model)
    output = generator(name, model).generate(asked, GREEDY, 2)
    assert calls["language"][0][0] == 3
    assert calls["visual"] == [(sum(len(p.forward_kwargs["pixel_values"]) for p in prompts(name)[:2]),)]
    alone = [ids_of(generator(name).generate([prompt], GREEDY, 1))[0] for prompt in asked]
    assert ids_of(output) == [ids for ids in alone for _ in range(2)]


@names
def test_rows_that_stop_leave_the_batch_and_the_others_go_on_as_alone(name: str) -> None:
    free = ids_of(generator(name).generate(prompts(name), GREEDY, 1))

    def ends(stop: int) -> set[int]:
        return {ids.index(stop) if stop in ids else len(ids) for ids in free}

    model = model_with_stops(name, max(sorted({id for ids in free for id in ids}), key=lambda id: len(ends(id))))
    calls = count_rows(model)
    together = ids_of(generator(name, model).generate(prompts(name), GREEDY, 2))
    rows = [rows for rows, _ in calls["language"][1:]]
    lengths = list(map(len, together))
    assert rows == [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    assert len(set(rows)) > 1
    alone = [ids_of(generator(name, model).generate([prompt], GREEDY, 1))[0] for prompt in prompts(name)]
    assert together == [ids for ids in alone for _ in range(2)]


# Which ids are sampled.


def test_one_seed_gives_one_output() -> None:
    def sample(seed: int | None) -> list[list[int]]:
        return ids_of(generator("qwen3_5").generate(prompts("qwen3_5"), SamplingParams(max_tokens=6, seed=seed), 2))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    torch.manual_seed(5)
    first = sample(None)
    assert sample(None) != first
    torch.manual_seed(5)
    sample(1)  # a seed of its own leaves torch's generator alone
    assert sample(None) == first


def test_stop_ids_are_those_of_the_model_and_of_the_tokenizer() -> None:
    model = copy.deepcopy(tiny("text").model)
    for eos, expected in ((None, [319]), (7, [7, 319]), ([319, 7, 9], [7, 9, 319])):
        model.generation_config.eos_token_id = eos
        assert generator("text", model).stop_ids == expected


@families
def test_vision_ids_are_never_sampled(name: str) -> None:
    wanted = copy.deepcopy(tiny(name).model)
    with torch.no_grad():  # the model wants nothing but vision ids
        bias = torch.zeros(wanted.get_output_embeddings().weight.shape[0])
        bias[sorted(adapter(name).vision_ids)] = 100.0
        wanted.get_output_embeddings().bias = torch.nn.Parameter(bias)
    output = generator(name, wanted).generate(prompts(name), SamplingParams(max_tokens=8, temperature=5.0, seed=0), 4)
    assert not {id for ids in ids_of(output) for id in ids} & adapter(name).vision_ids
    assert_scores_agree(name, wanted, output, 5.0)


def test_top_k_leaves_its_number_of_ids() -> None:
    for k in (1, 2):
        sampling = SamplingParams(max_tokens=1, temperature=3.0, top_k=k, seed=0)
        output = generator("text").generate(prompts("text")[:1], sampling, 64)
        assert len({ids[0] for ids in ids_of(output)}) == k


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """Chi-square over the 12 most likely first tokens and the rest: 12 degrees of freedom, 1 in 1000 above 32.9."""
    prompt, model, draws = prompts("text")[1], tiny("text").model, 4000
    sampling = SamplingParams(max_tokens=1, temperature=temperature, seed=11)
    sampled = [ids[0] for ids in ids_of(generator("text").generate([prompt], sampling, draws))]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt.prompt_ids])).logits[0, -1]
    probabilities = (logits / temperature).softmax(-1)
    best = probabilities.topk(12).indices.tolist()
    expected = [draws * float(probabilities[id]) for id in best]
    counts = [sampled.count(id) for id in best]
    expected.append(draws - sum(expected))
    counts.append(draws - sum(counts))
    assert sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True)) < 32.9


def test_a_stop_at_the_limit_is_a_stop() -> None:
    first = ids_of(generator("text").generate(prompts("text"), GREEDY, 1))
    model = model_with_stops("text", first[0][0])
    output = generator("text", model).generate(prompts("text")[:1], SamplingParams(max_tokens=1, temperature=0), 1)
    assert output.completions[0][0].finish_reason == "stop"


# What it leaves behind, and what it refuses.


def modes(model: Any) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_mode_back(fails: bool) -> None:
    model = copy.deepcopy(tiny("qwen2_5_vl").model).train()
    model.model.visual.eval()
    model.model.language_model.layers[1].eval()
    before, seen = modes(model), list[tuple[bool, bool]]()
    model.model.language_model.register_forward_pre_hook(
        lambda module, args: seen.append((any(modes(model)), torch.is_grad_enabled()))  # pyright: ignore
    )
    sampling = SamplingParams(max_tokens=2, extra={"num_beams": 2} if fails else {})
    if fails:
        with pytest.raises(ValueError, match="num_beams"):
            generator("qwen2_5_vl", model).generate(prompts("qwen2_5_vl"), sampling, 1)
    else:
        generator("qwen2_5_vl", model).generate(prompts("qwen2_5_vl"), sampling, 1)
    assert modes(model) == before
    assert seen
    assert set(seen) == {(False, False)}, "eval mode and no gradients while it generates"
    assert torch.is_grad_enabled()


def test_prompts_of_two_families_are_refused() -> None:
    with pytest.raises(ValueError, match="lacks the per-token input"):
        generator("qwen3_vl").generate([prompts("qwen3_vl")[0], prompts("text")[0]], GREEDY, 1)
