"""The values that check themselves."""

from typing import Any

import pytest
import torch

from vlmroll.types import Completion, GenerationOutput, Rollout, SamplingParams
from vlmroll_processors import Prompt
from vlmroll_processors.types import Join, JoinKind

DONE = Completion(completion_ids=(7, 8), logprobs=(-1.0, -2.0), finish_reason="stop")


def prompt(*ids: int) -> Prompt:
    return Prompt(
        prompt_ids=ids,
        engine_ids=ids,
        forward_kwargs={"marks": torch.zeros(len(ids))},
        join={"marks": Join(kind=JoinKind.TOKENS)},
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must not be negative, got -0.1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"top_k": -1}, "top_k must not be negative, got -1"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1, got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
    ],
)
def test_sampling_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams: {message}"):
        SamplingParams(**options)


def test_a_completion_has_a_log_probability_for_each_id() -> None:
    for ids, logprobs in (((), ()), ((7,), ()), ((7,), (-1.0, -1.0))):
        with pytest.raises(ValueError, match=f"got {len(ids)} ids and {len(logprobs)} log-probabilities"):
            Completion(completion_ids=ids, logprobs=logprobs, finish_reason="stop")


def test_an_output_lists_completions_prompt_by_prompt() -> None:
    one, other = prompt(1, 2), prompt(3)
    short = Completion(completion_ids=(9,), logprobs=(-3.0,), finish_reason="length")
    output = GenerationOutput(
        prompts=(one, other), prompt_ids=((1, 2), (3,)), completions=((DONE, short), (short, DONE))
    )
    assert output.completion_ids == [[7, 8], [9], [9], [7, 8]]
    assert output.logprobs == [[-1.0, -2.0], [-3.0], [-3.0], [-1.0, -2.0]]
    assert [kwargs is one.forward_kwargs for kwargs in output.forward_kwargs] == [True, True, False, False]


def test_an_engine_that_read_other_ids_is_found_out() -> None:
    prompts = (prompt(1, 2), prompt(3, 4, 4, 5))
    for used in ((3, 4, 5), (3, 4, 4, 6)):
        with pytest.raises(
            ValueError, match=f"prompt 1: the engine used {len(used)} ids that differ from the 4 encoded"
        ):
            GenerationOutput(prompts=prompts, prompt_ids=((1, 2), used), completions=((DONE,), (DONE,)))


def test_an_engine_that_forgot_a_prompt_is_found_out() -> None:
    with pytest.raises(ValueError, match="2 prompts, 2 prompt id lists and 1 completion lists"):
        GenerationOutput(prompts=(prompt(1), prompt(2)), prompt_ids=((1,), (2,)), completions=((DONE,),))


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "entropies", "mismatch", "loss_mask", "entropy_mask"])
def test_a_rollouts_values_have_the_length_of_its_completion(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 3 values for 2 tokens"):
        Rollout(prompt=prompt(1), completion=DONE, row={}, row_id=0, group=0, **{name: (1, 1, 1)})  # pyright: ignore


def test_loss_tokens_are_those_that_the_mask_counts() -> None:
    for mask, expected in ((None, 2), ((1, 0), 1), ((0, 0), 0)):
        row = Rollout(prompt=prompt(1), completion=DONE, row={}, row_id=0, group=0, loss_mask=mask)
        assert row.num_loss_tokens == expected
