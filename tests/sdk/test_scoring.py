"""Scoring against `log_softmax(model(...).logits / T)` written out, its gradients, and how much of the head it runs."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3ForCausalLM,
)

from tiny_models import QWEN_FAMILIES, mixed_rows, randomise, tiny, user
from vlmroll.batches import make_batch, to_device
from vlmroll.scoring import check_head, head_of, policy_logprobs
from vlmroll.types import Completion, Rollout
from vlmroll_processors import PaddedBatch, Prompt, collate, load_adapter

ALL = (*QWEN_FAMILIES, "text")
names = pytest.mark.parametrize("name", ALL)
TAILS = ((270, 280, 12), (290,), (300, 301, 302, 40, 41), (17, 17))


@dataclass(frozen=True)
class Case:
    """A padded batch of a family, and the ids that it must not sample."""

    batch: PaddedBatch
    banned: list[int]

    @property
    def num_tokens(self) -> int:
        return int(self.batch.completion_mask.sum())


def text_rows() -> list[dict[str, Any]]:
    return [{"prompt": user(text)} for text in ("which ?", "what is the sum of 0 1 2 3 ?", "how many dots ? 7", "red")]


@cache
def case(name: str) -> Case:
    """Rows with 1, 3, 0 and 2 pictures (none for the text family), and completions of several lengths."""
    adapter = load_adapter(tiny(name).processor)
    prompts = adapter.encode(text_rows() if name == "text" else mixed_rows())
    batch = collate(prompts, TAILS, pad_token_id=adapter.pad_token_id)
    return Case(batch=batch, banned=sorted(adapter.vision_ids) or [3, 4])


def dense(model: Any, batch: PaddedBatch, banned: Sequence[int] = (), temperature: float = 1.0) -> torch.Tensor:
    """[B, C, V] log-probabilities from the logits of the whole batch."""
    logits = model(**batch.model_inputs()).logits.float() / temperature
    keep = [id for id in range(logits.shape[-1]) if id not in banned]
    length = batch.completion_mask.shape[1]
    result = torch.full_like(logits, float("-inf"))
    result[..., keep] = logits[..., keep].log_softmax(-1)
    return result[:, -length - 1 : -1]


def of_ids(logprobs: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
    """[B, C] those of the batch's completion ids, 0 on padding."""
    found = logprobs.gather(-1, batch.completion_ids[..., None])[..., 0]
    return found.masked_fill(~batch.completion_mask.bool(), 0.0)


def entropies_of(logprobs: torch.Tensor, batch: PaddedBatch) -> torch.Tensor:
    terms = torch.where(logprobs.isinf(), 0.0, logprobs.exp() * logprobs)
    return -terms.sum(-1).masked_fill(~batch.completion_mask.bool(), 0.0)


@names
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_the_dense_formula(name: str, temperature: float) -> None:
    model, given = tiny(name).model, case(name)
    with torch.no_grad():
        logprobs = dense(model, given.batch, given.banned, temperature)
        for chunk_size in (1, 3, 1000):
            scores = policy_logprobs(
                model,
                given.batch,
                temperature=temperature,
                banned_ids=given.banned,
                chunk_size=chunk_size,
                with_entropy=True,
            )
            assert scores.entropies is not None
            torch.testing.assert_close(scores.logprobs, of_ids(logprobs, given.batch), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(scores.entropies, entropies_of(logprobs, given.batch), atol=1e-5, rtol=1e-5)


def test_temperature_and_banned_ids_matter() -> None:
    model, given = tiny("qwen3_vl").model, case("qwen3_vl")
    with torch.no_grad():
        plain = policy_logprobs(model, given.batch).logprobs
        banned = policy_logprobs(model, given.batch, banned_ids=given.banned).logprobs
        cooler = policy_logprobs(model, given.batch, temperature=0.7).logprobs
    on = given.batch.completion_mask.bool()
    assert (banned[on] > plain[on]).all(), "the probability of the banned ids goes to the others"
    assert (cooler[on] - plain[on]).abs().max() > 0.1


@names
def test_banned_ids_have_probability_0_and_the_others_sum_to_1(name: str) -> None:
    """Every id of the vocabulary is scored as the only completion token."""
    model, given = tiny(name).model, case(name)
    adapter = load_adapter(tiny(name).processor)
    (prompt,) = adapter.encode([{"prompt": user("which ?")}])
    size = head_of(model).project.weight.shape[0]  # pyright: ignore
    batch = collate([prompt] * size, [[id] for id in range(size)], pad_token_id=adapter.pad_token_id)
    with torch.no_grad():
        found = policy_logprobs(model, batch, banned_ids=given.banned, temperature=0.7).logprobs[:, 0]
    assert found[given.banned].exp().eq(0).all()
    assert float(found.exp().sum()) == pytest.approx(1, abs=1e-5)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def weighted(logprobs: torch.Tensor) -> torch.Tensor:
    """A loss in which every token has a weight of its own."""
    weights = torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)
    return (logprobs * weights).sum()


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5 * max(largest, 1e-3), msg=name)


@names
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_the_dense_formulas(name: str, checkpointing: bool) -> None:
    model, given = copy.deepcopy(tiny(name).model), case(name)
    expected = gradients(model, weighted(of_ids(dense(model, given.batch, given.banned, temperature=0.7), given.batch)))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    scores = policy_logprobs(
        model, given.batch, temperature=0.7, banned_ids=given.banned, chunk_size=4, with_entropy=True
    )
    assert scores.entropies is not None
    assert not scores.entropies.requires_grad
    assert_same_gradients(gradients(model, weighted(scores.logprobs)), expected)


@names
def test_the_head_sees_completion_positions_alone_a_chunk_at_a_time(name: str) -> None:
    model, given = copy.deepcopy(tiny(name).model), case(name)
    seen: list[int] = []
    kept: list[torch.Size] = []
    vocabulary: int = model.get_output_embeddings().weight.shape[0]
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output.shape[:-1].numel())  # pyright: ignore
    )

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores = policy_logprobs(model, given.batch, chunk_size=4, with_entropy=True)
    assert given.num_tokens < given.batch.input_ids.numel()
    assert max(seen) <= 4
    assert sum(seen) == given.num_tokens
    last = (given.num_tokens - 1) % 4 + 1
    head = model.get_output_embeddings().weight.T.shape
    logits = {shape for shape in kept if shape[-1:] == (vocabulary,) and shape != head}
    assert logits == {(last, vocabulary)}, "the logits of the last chunk alone are kept for the backward pass"
    weighted(scores.logprobs).backward()
    assert max(seen) <= 4
    assert sum(seen) == 2 * given.num_tokens - last


@names
def test_cutting_and_permuting_rows_changes_no_score(name: str) -> None:
    model, adapter = tiny(name).model, load_adapter(tiny(name).processor)
    prompts = adapter.encode(text_rows() if name == "text" else mixed_rows())
    with torch.no_grad():
        together = policy_logprobs(model, case(name).batch).logprobs
        for rows in ([3, 1], [0], [2], [1, 2]):
            batch = collate(
                [prompts[i] for i in rows],
                [TAILS[i] for i in rows],
                pad_token_id=adapter.pad_token_id,
                pad_to_multiple_of=8,
            )
            found = policy_logprobs(model, batch).logprobs
            for row, i in zip(found, rows, strict=True):
                length = len(TAILS[i])
                torch.testing.assert_close(row[:length], together[i, :length], atol=1e-5, rtol=1e-5)
                assert row[length:].eq(0).all()


class Louder(Qwen3ForCausalLM):
    """A model that does something to its logits that its config does not tell."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


def test_a_model_with_unknown_logits_is_refused() -> None:
    model = Louder(copy.deepcopy(tiny("text").model.config))
    model.load_state_dict(tiny("text").model.state_dict())
    with pytest.raises(ValueError, match="Louder changes its logits in a way that is not known"):
        check_head(model.eval(), case("text").batch)


@names
def test_the_families_here_have_known_logits(name: str) -> None:
    check_head(tiny(name).model, case(name).batch)


def scaling_model(kind: str) -> Any:
    """A tiny model that scales or squashes its logits, far enough that leaving it out would show."""
    sizes: dict[str, Any] = {"vocab_size": 336, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
    sizes |= {"eos_token_id": 2}
    if kind == "cohere":
        return randomise(CohereForCausalLM(CohereConfig(**sizes, logit_scale=0.5)))
    if kind == "gemma2":
        return randomise(Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=0.4)))
    return randomise(GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=3.0)))


@pytest.mark.parametrize("kind", ["cohere", "gemma2", "granite"])
def test_models_that_scale_or_squash_their_logits(kind: str) -> None:
    model, batch = scaling_model(kind), case("text").batch
    with torch.no_grad():
        check_head(model, batch)
        found = policy_logprobs(model, batch, temperature=0.7, chunk_size=3).logprobs
        torch.testing.assert_close(found, of_ids(dense(model, batch, (), 0.7), batch), atol=1e-5, rtol=1e-5)
        head = head_of(model)
        assert (head.scale, head.softcap) != (1.0, None)
        check_head(model.bfloat16(), batch)  # rounds its logits before and after scaling them


@pytest.mark.parametrize("name", ["qwen3_vl", "text"])
def test_a_peft_model_is_scored_with_its_adapter(name: str) -> None:
    given, base = case(name), copy.deepcopy(tiny(name).model)
    targets = ["q_proj", "v_proj", "lm_head"]
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    check_head(model, given.batch)
    expected = gradients(model, weighted(of_ids(dense(model, given.batch, given.banned), given.batch)))
    scores = policy_logprobs(model, given.batch, banned_ids=given.banned, chunk_size=4)
    assert expected
    assert_same_gradients(gradients(model, weighted(scores.logprobs)), expected)
    with torch.no_grad():
        torch.testing.assert_close(scores.logprobs, of_ids(dense(model, given.batch, given.banned), given.batch))
        unadapted = policy_logprobs(tiny(name).model, given.batch, banned_ids=given.banned).logprobs
        assert (unadapted - scores.logprobs).abs().max() > 0.01
        with model.disable_adapter():
            off = policy_logprobs(model, given.batch, banned_ids=given.banned).logprobs
        torch.testing.assert_close(off, unadapted)


def rollout(length: int, **more: Any) -> Rollout:
    ids = tuple(range(10, 10 + length))
    completion = Completion(completion_ids=ids, logprobs=(-1.0,) * length, finish_reason="stop")
    prompt = Prompt(prompt_ids=(5, 6), engine_ids=(5, 6))
    return Rollout(prompt=prompt, completion=completion, row={}, row_id=0, group=0, **more)


def test_a_micro_batch_pads_what_its_rollouts_know() -> None:
    rows = [
        rollout(2, advantage=0.5, loss_weight=0.25, old_logprobs=(-1.0, -2.0), loss_mask=(1, 0), entropy_mask=(0, 1)),
        rollout(3, advantage=-1.0, loss_weight=0.5, old_logprobs=(-3.0, -4.0, -5.0), entropy_mask=(1, 1, 0)),
    ]
    gaps = ((0.1, 0.2), (0.3, 0.4, 0.5))
    rows = [replace(row, mismatch=gap) for row, gap in zip(rows, gaps, strict=True)]
    batch = make_batch(rows, pad_token_id=0, device="cpu", pad_to_multiple_of=4)
    assert isinstance(batch.inputs, PaddedBatch)
    assert batch.inputs.input_ids.tolist() == [[0, 0, 5, 6, 10, 11, 0, 0], [0, 0, 5, 6, 10, 11, 12, 0]]
    assert batch.loss_mask.tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]
    assert batch.entropy_mask is not None
    assert batch.entropy_mask.tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
    assert batch.old_logprobs is not None
    assert batch.old_logprobs.tolist() == [[-1, -2, 0, 0], [-3, -4, -5, 0]]
    assert batch.ref_logprobs is None
    assert batch.mismatch is not None
    torch.testing.assert_close(batch.mismatch, torch.tensor([[0.1, 0.2, 0, 0], [0.3, 0.4, 0.5, 0]]))
    assert batch.advantages.tolist() == [0.5, -1.0]
    assert batch.loss_weights.tolist() == [0.25, 0.5]


def test_a_batch_moves_to_a_device_as_a_whole() -> None:
    moved = to_device(case("qwen3_vl").batch, "meta")
    tensors = [moved.input_ids, moved.attention_mask, moved.completion_mask, *moved.forward_kwargs.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
