"""Scoring and sampling with the models of every family, against transformers' own processor, forward and `generate`."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tiny_models import tiny
from training_runs import FAMILIES, adapter, prompts, rows
from vlmroll.generators import TransformersGenerator
from vlmroll.scoring import check_head, policy_logprobs
from vlmroll.types import GenerationOutput, SamplingParams
from vlmroll_processors import PaddedBatch, Prompt, collate

families = pytest.mark.parametrize("name", FAMILIES)
LENGTH = 8
# Rows with equally many pictures are not neighbours: where they share a forward pass, the order must be restored.
ORDER = (0, 1, 2, 3, 1, 0)
TAILS = ((270, 280, 12), (290,), (300, 301, 302, 40, 41), (17, 17), (33, 34, 35, 36), (50, 51))


def batch_of(name: str, owners: Sequence[Prompt], completions: Sequence[Sequence[int]]) -> PaddedBatch:
    return collate(owners, completions, pad_token_id=adapter(name).pad_token_id)


@cache
def batch(name: str) -> PaddedBatch:
    return batch_of(name, [prompts(name)[i] for i in ORDER], TAILS)


@cache
def picture_ids(name: str) -> tuple[int, ...]:
    """What must not be sampled, read off the prompts and the config: tokens of pictures, and the ids that it names."""
    added = adapter(name).tokenizer.added_tokens_decoder
    spans = [(prompt, span) for prompt in prompts(name) for span in prompt.image_spans]
    found = {i for prompt, span in spans for i in prompt.prompt_ids[span.offset :][: span.length] if i in added}
    config = tiny(name).model.config
    keys = ("image_token_id", "image_token_index", "video_token_id", "boi_token_id", "eoi_token_id")
    found |= {value for key in keys if isinstance(value := getattr(config, key, None), int)}
    return tuple(sorted(found))


def dense(model: Any, batch: PaddedBatch, banned: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[B, C, V] log-probabilities from the logits of whole rows, one piece of the batch after the other."""
    found = torch.empty(0)
    for piece in batch.pieces:
        logits = model(**batch.model_inputs(piece, dtype=model.dtype), use_cache=False).logits.float() / temperature
        logits[..., list(banned)] = float("-inf")
        if not len(found):
            found = logits.new_empty(len(batch.input_ids), *logits.shape[1:])
        found[list(piece.rows)] = logits.log_softmax(-1)
    return found[:, -batch.completion_mask.shape[1] - 1 : -1]


def of_ids(logprobs: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
    """[B, C] those of the completion ids, 0 on padding."""
    found = logprobs.gather(-1, batch.completion_ids[..., None])[..., 0]
    return found.masked_fill(~batch.completion_mask.bool(), 0.0)


def assert_scores_agree(
    name: str, model: Any, output: GenerationOutput, *, temperature: float = 1.0, atol: float = 2e-5
) -> None:
    """What the generator says of its samples is what training would say of them."""
    owners = [prompt for prompt, group in zip(output.prompts, output.completions, strict=True) for _ in group]
    given = batch_of(name, owners, output.completion_ids)
    with torch.no_grad():
        scores = policy_logprobs(model, given, temperature=temperature, banned_ids=sorted(adapter(name).vision_ids))
    for row, logprobs in zip(scores.logprobs, output.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(logprobs), row[: len(logprobs)], atol=atol, rtol=0)


def with_stops(name: str, *stops: int) -> Any:
    """A copy of the family's model that stops at these ids too."""
    model = copy.deepcopy(tiny(name).model)
    own: int | list[int] = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [*(own if isinstance(own, list) else [own]), *stops]
    return model


# The head.


def check_scores(model: Any, given: PaddedBatch, banned: Sequence[int]) -> None:
    check_head(model, given)
    with torch.no_grad():
        expected = dense(model, given, banned, temperature=0.7)
        found = policy_logprobs(model, given, temperature=0.7, banned_ids=banned, chunk_size=5, with_entropy=True)
    torch.testing.assert_close(found.logprobs, of_ids(expected, given), atol=2e-5, rtol=0)
    entropies = -(expected.exp() * expected.clamp(min=-1e9)).sum(-1).masked_fill(~given.completion_mask.bool(), 0.0)
    assert found.entropies is not None
    torch.testing.assert_close(found.entropies, entropies, atol=5e-5, rtol=0)


@families
def test_scores_are_those_of_the_models_own_logits(name: str) -> None:
    check_scores(tiny(name).model, batch(name), picture_ids(name))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gemma3", "final_logit_softcapping", 0.4),
        ("gemma4", "final_logit_softcapping", 0.4),
        ("paligemma2", "final_logit_softcapping", 0.4),
        ("aya_vision", "logit_scale", 0.0625),
        ("cohere2_vision", "logit_scale", 0.0625),
    ],
)
def test_a_head_changes_its_logits_as_the_model_does(name: str, option: str, value: float) -> None:
    """Checkpoints have such values in the config of their language model; not every model with pictures heeds them."""
    model = copy.deepcopy(tiny(name).model)
    assert hasattr(model.config.get_text_config(), option)
    setattr(model.config.get_text_config(), option, value)
    check_scores(model, batch(name), picture_ids(name))


# Sampling.


def generated(name: str, row: dict[str, Any], banned: Sequence[int]) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of what transformers generates greedily for a row by its own processor, unstopped."""
    made, model = tiny(name), copy.deepcopy(tiny(name).model)
    model.generation_config.eos_token_id = None
    inputs = made.processor.apply_chat_template(
        copy.deepcopy(row["prompt"]),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    inputs.pop("labels", None)
    options = GenerationConfig(
        do_sample=False,
        max_new_tokens=LENGTH,
        suppress_tokens=list(banned),
        pad_token_id=adapter(name).pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output = model.generate(**inputs.to(model.dtype), generation_config=options)
    logits = torch.cat(output.logits).float()
    logits[:, list(banned)] = float("-inf")
    ids = output.sequences[0, -LENGTH:]
    return ids.tolist(), logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()


@families
def test_greedy_equals_transformers_row_by_row(name: str) -> None:
    """All rows in one call, two of which stop early, against each row alone in `generate`."""
    banned = sorted(adapter(name).vision_ids)
    alone = [generated(name, row, banned) for row in rows(4, name)]
    model = with_stops(name, alone[0][0][2], alone[1][0][5])
    generator = TransformersGenerator(model, adapter(name))
    output = generator.generate(prompts(name), SamplingParams(max_tokens=LENGTH, temperature=0), 1)
    lengths: list[int] = []
    for (completion,), (ids, logprobs) in zip(output.completions, alone, strict=True):
        end = next((i + 1 for i, id in enumerate(ids) if id in generator.stop_ids), LENGTH)
        lengths.append(end)
        assert list(completion.completion_ids) == ids[:end]
        assert completion.logprobs == pytest.approx(logprobs[:end], abs=2e-5)
    assert min(lengths) <= 3


@families
def test_samples_have_the_log_probabilities_that_training_scores(name: str) -> None:
    """Three completions for each of four prompts, which stop at different times; one seed gives one output."""
    model = with_stops(name, *range(20, 60))
    generator = TransformersGenerator(model, adapter(name))
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0.9, seed=3)
    output = generator.generate(prompts(name), sampling, 3)
    assert len({len(ids) for ids in output.completion_ids}) > 2, "rows leave the batch at different times"
    assert len({tuple(ids) for ids in output.completion_ids}) > 6, "siblings differ"
    assert_scores_agree(name, model, output, temperature=0.9)
    assert generator.generate(prompts(name), sampling, 3).completion_ids == output.completion_ids


@families
def test_ids_of_pictures_are_never_sampled(name: str) -> None:
    """Not even by a model that wants nothing else, at a high temperature."""
    wanted, banned = copy.deepcopy(tiny(name).model), {*picture_ids(name), *adapter(name).vision_ids}
    head = wanted.get_output_embeddings()
    bias = torch.zeros(head.weight.shape[0])
    bias[sorted(banned)] = 100.0
    head.bias = torch.nn.Parameter(bias)
    with torch.no_grad():
        assert set(dense(wanted, batch(name), ()).argmax(-1).flatten().tolist()) <= banned
    hot = SamplingParams(max_tokens=LENGTH, temperature=5.0, seed=0)
    output = TransformersGenerator(wanted, adapter(name)).generate(prompts(name), hot, 16)
    sampled = {id for ids in output.completion_ids for id in ids}
    assert len(sampled) > 100
    assert not sampled & banned
    assert_scores_agree(name, wanted, output, temperature=5.0)


@pytest.mark.parametrize(
    ("name", "option"),
    [("cohere2_vision", "sliding_window"), ("llava_next", "sliding_window"), ("llama4", "attention_chunk_size")],
)
def test_caches_of_a_short_window_forget_the_same_tokens_that_training_does(name: str, option: str) -> None:
    """A window of 16 tokens, which the prompts and some completions overrun, in batches whose rows are padded."""
    made, scores = tiny(name), dict[int | None, torch.Tensor]()
    for window in (None, 16):
        config = copy.deepcopy(made.model.config)
        setattr(config.get_text_config(), option, window or 4096)
        model = type(made.model)(config).float().eval()
        model.load_state_dict(made.model.state_dict())
        output = TransformersGenerator(model, adapter(name)).generate(
            prompts(name), SamplingParams(max_tokens=LENGTH, seed=1), 2
        )
        assert_scores_agree(name, model, output)
        with torch.no_grad():
            scores[window] = policy_logprobs(model, batch(name)).logprobs
    assert (scores[None] - scores[16]).abs().max() > 1e-3, "the window matters"


# Half precision.


@families
def test_a_model_in_bfloat16_scores_and_samples_what_it_does_in_float32(name: str) -> None:
    """With the same rounded weights. Pixels come from the processor in float32, and few models cast them."""
    half = copy.deepcopy(tiny(name).model).bfloat16()
    whole = copy.deepcopy(half).float()
    with torch.no_grad():
        found, expected = (policy_logprobs(model, batch(name)).logprobs for model in (half, whole))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.2, rtol=0)
    output = TransformersGenerator(half, adapter(name)).generate(prompts(name), SamplingParams(max_tokens=4, seed=0), 2)
    assert_scores_agree(name, half, output, atol=0.2)
