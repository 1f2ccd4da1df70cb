"""Completions of several turns, with pictures from tools, score as a plain pass over the whole sequence says."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from shared_prompts import SHARED, scores_and_gradients, shares
from tiny_models import picture, tiny
from training_runs import FAMILIES, adapter, prompts, relative_difference
from vlmroll.attention import switch_on
from vlmroll.batches import join_rollouts, make_batch
from vlmroll.scoring import policy_logprobs
from vlmroll.types import Completion, Rollout, Turns
from vlmroll.vision import VisionFeatures
from vlmroll_processors import Continuation, Prompt, collate

NAMES = tuple(name for name in ("text", *FAMILIES) if not name.startswith("paligemma"))
"""PaliGemma has no chats."""
SIZES = ((40, 40), (80, 40), (48, 96))


def answer(num_pictures: int) -> dict[str, Any]:
    """A tool message."""
    images = [{"type": "image", "image": picture(*SIZES[i], seed=i)} for i in range(num_pictures)]
    return {"role": "tool", "name": "look", "content": [{"type": "text", "text": "seen 12"}, *images]}


def taken_on(name: str, prompt: Prompt, turns: Sequence[tuple[tuple[int, ...], int]], last: tuple[int, ...]) -> Rollout:
    """A rollout whose turns were answered with so many pictures each."""
    later, ids, sampled = prompt, list[int](), list[int]()
    for turn, number in turns:
        later = adapter(name).next_turn(later, turn, [answer(number)])
        added = later.prompt_ids[prompt.num_tokens + len(ids) + len(turn) :]
        ids += [*turn, *added]
        sampled += [1] * len(turn) + [0] * len(added)
    completion = Completion(
        completion_ids=(*ids, *last),
        logprobs=(0.0,) * (len(ids) + len(last)),
        finish_reason="stop",
        turns=Turns(sampled=(*sampled, *(1 for _ in last)), continuation=Continuation(start=prompt, prompt=later)),
    )
    return Rollout(prompt=prompt, completion=completion, row={}, row_id=0, group=0, advantage=1.0, loss_weight=0.1)


@cache
def rollouts(name: str) -> tuple[Rollout, ...]:
    """Three siblings each of prompts with 1, 3, 0 and 2 pictures: tools gave them 0, 1 and 1 + 2 pictures."""
    most = 0 if name == "text" else 1
    end = adapter(name).tokenizer.eos_token_id
    found: list[Rollout] = []
    for i, prompt in enumerate(prompts(name)):
        found += [
            taken_on(name, prompt, [((40 + i, 41, end), 0)], (50, 51, end)),
            taken_on(name, prompt, [((42, end), most)], (52 + i,)),
            taken_on(name, prompt, [((43, 44, end), most), ((45, end), 2 * most)], (53, 54, 55, end)),
        ]
    plain = Completion(completion_ids=(60, 61, 62), logprobs=(0.0,) * 3, finish_reason="stop")
    return (*found, Rollout(prompt=prompts(name)[0], completion=plain, row={}, row_id=0, group=0))


def alone(name: str, rollout: Rollout) -> torch.Tensor:
    """Log-probabilities [C] of a rollout from the logits of the whole sequence; 0 where nothing was sampled."""
    model, completion = tiny(name).model, rollout.completion
    turns = completion.turns
    whole = rollout.prompt if turns is None else turns.continuation.prompt
    tail = completion.completion_ids[whole.num_tokens - rollout.prompt.num_tokens :]
    batch = collate([whole], [tail], pad_token_id=0)
    with torch.no_grad():
        logits = model(**batch.model_inputs(dtype=model.dtype)).logits[0].double()
    first = rollout.prompt.num_tokens - 1
    found = logits[first:-1].log_softmax(-1)
    found = found.gather(-1, torch.tensor(completion.completion_ids)[:, None])[:, 0]
    return found.masked_fill(torch.tensor(completion.sampled) == 0, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_whole_sequence(name: str) -> None:
    model = tiny(name).model.eval()
    found = rollouts(name)
    with torch.no_grad():
        inputs = join_rollouts(found, pad_token_id=0, device="cpu")
        for vision in (None, VisionFeatures()):
            scores = policy_logprobs(model, inputs, vision=vision).logprobs
            for rollout, row in zip(found, scores, strict=True):
                expected = alone(name, rollout)
                torch.testing.assert_close(row[: len(expected)].double(), expected, atol=1e-4, rtol=1e-4)
                assert not row[len(expected) :].any()


@pytest.mark.parametrize("name", SHARED)
def test_shared_prompts_give_the_same_scores_and_gradients(name: str) -> None:
    model, found = tiny(name).model.eval(), rollouts(name)
    switch_on(model)
    scores, expected = scores_and_gradients(model, found, packed=False)
    shared, gradients = scores_and_gradients(model, found, packed=True)
    torch.testing.assert_close(shared, scores, atol=1e-4, rtol=1e-4)
    assert relative_difference(expected, gradients) < 1e-5
    with torch.no_grad():
        inputs = join_rollouts(found, pad_token_id=0, device="cpu", packed=True)
        vision = policy_logprobs(model, inputs, vision=VisionFeatures(), temperature=0.9, banned_ids=[3]).logprobs
    torch.testing.assert_close(vision, scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SHARED)
def test_models_that_share_prompts_share_them_with_pictures_of_tools(name: str) -> None:
    assert shares(tiny(name).model, rollouts(name)[1:6])


def test_a_prompt_stands_once_in_a_packed_row() -> None:
    found = rollouts("qwen2_5_vl")
    packed = join_rollouts(found, pad_token_id=0, device="cpu", packed=True)
    own = sum(prompt.num_tokens for prompt in prompts("qwen2_5_vl"))
    assert packed.num_tokens == own + sum(len(r.completion.completion_ids) - 1 for r in found)


def test_what_tools_added_counts_in_no_loss() -> None:
    found = rollouts("qwen2_5_vl")
    batch = make_batch(found, pad_token_id=0, device="cpu")
    for row, rollout in zip(batch.loss_mask.tolist(), found, strict=True):
        sampled = rollout.completion.sampled
        assert tuple(row[: len(sampled)]) == sampled
        assert not any(row[len(sampled) :])
    assert batch.inputs.scored_mask.equal(batch.loss_mask)


def test_turns_of_another_prompt_are_refused() -> None:
    rollout = rollouts("qwen2_5_vl")[1]
    with pytest.raises(ValueError, match="does not begin with the ids that its turns added"):
        Rollout(prompt=prompts("qwen2_5_vl")[1], completion=rollout.completion, row={}, row_id=0, group=0)
    with pytest.raises(ValueError, match="do not begin with the"):
        Continuation(start=prompts("qwen2_5_vl")[1], prompt=rollout.completion.turns.continuation.prompt)  # pyright: ignore
