"""Rows that share the keys of their prompts, against a cache that is copied for each row and against attention written
out; which families take it, and why the others do not."""

import copy
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from tiny_families.base import randomise
from tiny_models import VISION_FAMILIES, tiny, user
from training_runs import adapter, rows
from vlmroll.attention import NotShareable, in_place_of
from vlmroll.generators import TransformersGenerator
from vlmroll.generators.branch_cache import BranchCache
from vlmroll.generators.branch_layer import BranchLayer, Fold
from vlmroll.types import GenerationOutput, SamplingParams
from vlmroll_processors import Prompt

REPEATS = {
    "qwen3_5": "layers of another kind: linear_attention",
    "paligemma2": "takes softcap",
    "lfm2_vl": "layers of another kind: conv",
    "kimi_k25": "attends to other keys than those that it caches",
    "mllama": "tokens of a prompt",
}
"""Families whose rows get copies of their prompt's cache, and a word of the reason; all others share it."""
LENGTH = 12


@cache
def prompts(name: str) -> tuple[Prompt, ...]:
    """Four prompts of different lengths, the first of them twice."""
    texts = ("which ?", "what is the sum of 0 1 2 3 ?", "how many dots ? 7", "red")
    found = adapter(name).encode([{"prompt": user(t)} for t in texts] if name == "text" else rows(4, name))
    return (*found, found[0])


def copied(model: Any, stops: Sequence[int], *, eager: bool) -> Any:
    """A copy with these stop ids; one with eager attention cannot share prompts."""
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = list(stops)
    if eager:
        model.config.get_text_config()._attn_implementation = "eager"
    return model


def both(name: str, model: Any, sampling: SamplingParams, stops: Sequence[int]) -> tuple[GenerationOutput, ...]:
    """Samples of the model as it is, and with copied caches."""
    models = [copied(model, stops, eager=eager) for eager in (False, True)]
    return tuple(TransformersGenerator(m, adapter(name)).generate(prompts(name), sampling, 3) for m in models)


def assert_alike(found: GenerationOutput, expected: GenerationOutput) -> None:
    assert found.completion_ids == expected.completion_ids
    for logprobs, others in zip(found.logprobs, expected.logprobs, strict=True):
        assert logprobs == pytest.approx(others, abs=2e-5)


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "vlmroll.generators.transformers"]
    return [message.partition("since they cannot share it: ")[2] for message in found]


# Against a cache that is copied for each row.


@pytest.mark.parametrize("name", [*VISION_FAMILIES, "text"])
def test_shared_prompts_give_the_samples_of_copied_ones(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Completions of five prompts, two of them one, stop at different times, some with their first token."""
    with caplog.at_level(logging.INFO):
        sampling = SamplingParams(max_tokens=LENGTH, temperature=0.9, seed=3)
        found, expected = both(name, tiny(name).model, sampling, range(20, 80))
    why = reasons(caplog)
    assert "'eager'" in why.pop()
    assert len(why) == (name in REPEATS)
    assert REPEATS.get(name, "") in "".join(why)
    if name != "paligemma2":  # "sdpa" leaves its cap of attention scores out, "eager" does not
        assert_alike(found, expected)
    assert len({len(ids) for ids in found.completion_ids}) > 3, "rows leave at different times"


def windowed(window: int) -> Any:
    """A text model whose first layer has a window."""
    config = copy.deepcopy(tiny("text").model.config)
    config.layer_types, config.sliding_window = ["sliding_attention", "full_attention"], window
    return randomise(hf.Qwen3ForCausalLM(config))


@pytest.mark.parametrize("window", [2, 5, 16, 30])
def test_windows_that_own_tokens_outgrow(window: int) -> None:
    """At a window of 5 the prompt goes out of sight, then the first own tokens; at 30 the padding of short prompts."""
    sampling = SamplingParams(max_tokens=24, seed=1)
    found, expected = both("text", windowed(window), sampling, [0, 5])
    assert_alike(found, expected)
    wide, _ = both("text", windowed(4096), sampling, [0, 5])
    assert wide.completion_ids != found.completion_ids, "the window matters"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_whose_rows_have_all_stopped_are_dropped(temperature: float) -> None:
    """The stop ids are the first tokens of some prompts and later ones of others."""
    sampling = SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=0)
    free, _ = both("gemma3", tiny("gemma3").model, sampling, [])
    stops = [free.completion_ids[0][0], free.completion_ids[4][2], free.completion_ids[7][6]]
    found, expected = both("gemma3", tiny("gemma3").model, sampling, stops)
    assert_alike(found, expected)
    lengths = [len(ids) for ids in found.completion_ids]
    assert min(lengths) == 1
    assert len(set(lengths)) > 2


def test_a_model_that_generated_is_otherwise_as_before() -> None:
    model = copied(tiny("qwen2_5_vl").model, [7], eager=False)
    ids, before = torch.arange(10, 40)[None], model.generation_config.to_dict()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        TransformersGenerator(model, adapter("qwen2_5_vl")).generate(
            prompts("qwen2_5_vl"), SamplingParams(max_tokens=8), 2
        )
        model.model.rope_deltas = None
        assert model(input_ids=ids).logits.equal(expected)
    assert model.generation_config.to_dict() == before
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    assert in_place_of.get() is None


# What is copied and allocated.


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that was made while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):  # a view has the size of what it looks at
            self.elements = max(self.elements, found.untyped_storage().nbytes() // found.element_size())
        return found


@pytest.mark.parametrize("eager", [False, True])
def test_no_step_makes_a_tensor_of_the_size_of_all_copies(eager: bool) -> None:
    """One prompt of about 600 tokens, 32 rows: their keys alone would be 32 times the prompt's, in each step."""
    model = copied(tiny("text").model, [0], eager=eager)
    (prompt,) = adapter("text").encode([{"prompt": user("which ? " * 100)}])
    watched, generator = Largest(), TransformersGenerator(model, adapter("text"))

    def step(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] == 1 and watched.elements == 0:
            watched.__enter__()

    model.register_forward_pre_hook(step, with_kwargs=True)
    try:
        generator.generate([prompt], SamplingParams(max_tokens=4, seed=0), 32)
    finally:
        watched.__exit__(None, None, None)
    copies = 32 * prompt.num_tokens * 32
    assert watched.elements > 0
    assert (watched.elements >= copies) == eager


def layer_of(keys: torch.Tensor, hidden: torch.Tensor | None, window: int | None, room: int) -> BranchLayer:
    """A layer over a prompt's keys, which are its values too."""
    config = hf.Qwen3Config(
        num_hidden_layers=1,
        sliding_window=window,
        use_sliding_window=window is not None,
        layer_types=["full_attention" if window is None else "sliding_attention"],
    )
    filled = DynamicCache(config=config)
    filled.update(keys, keys * 2, 0)
    return BranchLayer(filled.layers[0], hidden, keys.shape[2], room)


def test_buffers_double_and_rows_leave_in_place() -> None:
    layer = layer_of(torch.randn(1, 2, 5, 4), None, None, 4)
    kept, places = list[torch.Tensor](), set[int]()
    alive = 6
    for step in range(40):
        token = torch.randn(alive, 2, 1, 4)
        layer.update(token, token * 2)
        layer.fresh = None
        kept.append(token)
        if step % 10 == 9:
            stays = torch.tensor([row for row in range(alive) if row != step // 10])
            layer.keep_rows(stays)
            kept, alive = [old[stays] for old in kept], alive - 1
        assert layer.keys is not None
        assert layer.values is not None
        places.add(layer.keys.data_ptr())
        assert layer.keys[:, :, : step + 1].equal(torch.cat(kept, dim=2))
        assert layer.values[:, :, : step + 1].equal(torch.cat(kept, dim=2) * 2)
    assert len(places) <= 5, "4, 8, 16, 32 and 64 tokens"
    assert layer.get_seq_length() == 45


# Against attention written out.


@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    own=st.integers(1, 9),
    window=st.sampled_from([None, 2, 3, 6, 9, 40]),
    padding=st.sampled_from([0, 2]),
    seed=st.integers(0, 1000),
)
def test_attention_is_that_of_each_row_alone(
    owners: list[int], own: int, window: int | None, padding: int, seed: int
) -> None:
    owners = [sorted(set(owners)).index(owner) for owner in owners]
    random, length, heads, shared = torch.Generator().manual_seed(seed), 7, 6, 2

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    keys = noise(max(owners) + 1, shared, length, 4)
    hidden = torch.arange(length) < torch.arange(len(keys))[:, None].clamp(max=1) * padding  # not of the first prompt
    layer = layer_of(keys, hidden if padding else None, window, 2)
    fold, tokens = Fold.of(owners, torch.device("cpu")), list[torch.Tensor]()
    for _ in range(own):
        tokens.append(noise(len(owners), shared, 1, 4))
        layer.update(tokens[-1], tokens[-1] * 2)
        layer.fresh = None
    query = noise(len(owners), heads, 1, 4)
    found = layer.attend(query, fold, None)
    for row, owner in enumerate(owners):
        seen = [torch.cat([keys[owner], *(token[row] for token in tokens)], dim=1)[:, int(hidden[owner].sum()) :]]
        seen = [seen[0] if window is None else seen[0][:, -window:]]
        for head in range(heads):
            own_keys = seen[0][head // (heads // shared)]
            weights = (own_keys @ query[row, head, 0] / 2).softmax(0)
            torch.testing.assert_close(found[row, 0, head], weights @ own_keys * 2, atol=1e-5, rtol=1e-5)


@given(owners=st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_a_fold_puts_each_row_at_its_prompt(owners: list[int]) -> None:
    owners = [sorted(set(owners)).index(owner) for owner in owners]
    fold, given_rows = Fold.of(owners, torch.device("cpu")), torch.arange(len(owners)).float()
    folded = fold(given_rows)
    assert folded.shape == (max(owners) + 1, max(map(owners.count, owners)))
    assert [{owners[int(row)] for row in some} for some in folded] == [{i} for i in range(len(folded))]
    assert fold.undo(folded).equal(given_rows)
    assert (fold.chosen is None) == (len(set(map(owners.count, owners))) == 1 and owners == sorted(owners))


# What is refused.


def step_with(change: str, *, padded: bool = False) -> None:
    """One step of a model of one layer, which does something that the cache does not know."""
    filled, mask = DynamicCache(), torch.ones(1, 5, dtype=torch.long)
    mask[0, 0] = 0 if padded else 1
    filled.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), 0)
    branches = BranchCache(filled, mask, [0, 0], 8)

    def model(attention_mask: Any, past_key_values: Any, use_cache: bool) -> None:
        key = torch.randn(2, 2, 2 if change == "two tokens" else 1, 4)
        found = past_key_values.update(key, key * 2, 0)
        if change == "twice":
            past_key_values.update(key, key, 0)
        if change == "own attention":
            return
        keys, values = [tensor.clone() for tensor in found] if change == "other keys" else found
        given: Any = {"padding": None, "float mask": torch.zeros(2, 1, 1, 6)}.get(change)
        if change in ("hides", "nothing"):
            given = torch.ones(2, 1, 1, 6, dtype=torch.bool)
            given[1, :, :, 2] = change == "nothing"
        options: Any = {"softcap": {"softcap": 30.0}, "window": {"sliding_window": 3}}.get(change, {})
        attention = in_place_of.get()
        assert attention is not None
        attention(None, torch.randn(2, 4, 1, 4), keys, values, given, scaling=0.5, **options)

    branches.forward(model, torch.cat([mask, mask[:, :1]], dim=1).expand(2, -1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("two tokens", "in another way"),
        ("twice", "a token twice"),
        ("own attention", "does not use the attention"),
        ("other keys", "other keys than those that it caches"),
        ("float mask", "in a way of its own"),
        ("hides", "other tokens than padding"),
        ("softcap", "takes softcap"),
        ("window", "has a window of 3"),
    ],
)
def test_a_model_that_does_something_else_is_refused(change: str, reason: str) -> None:
    with pytest.raises(NotShareable, match=reason):
        step_with(change)
    assert in_place_of.get() is None


def test_a_model_that_does_nothing_else_is_not() -> None:
    step_with("nothing")
    step_with("padding")
    with pytest.raises(NotShareable, match="other tokens than padding"):
        step_with("padding", padded=True)
