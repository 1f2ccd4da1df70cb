"""Prompts that are run once for all of their completions give the numbers of prompts that are run for each of them."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3ForCausalLM

from shared_prompts import NOT_SHARED, SHARED, scores_and_gradients, shares, sharing
from tiny_models import tiny
from training_runs import ALGORITHMS, gradients, make_trainer, prompts, relative_difference
from vlmroll.attention import NAME, NotShareable, segments_of, switch_on
from vlmroll.batches import join_rollouts
from vlmroll.scoring import policy_logprobs
from vlmroll.sharing import is_causal
from vlmroll.types import Completion, Rollout
from vlmroll_processors import PackedBatch, PaddedBatch, Prompt

LENGTHS = (4, 2, 7, 1, 5, 3, 6, 1, 1, 2, 3, 2)


def rollouts_of(name: str, lengths: Sequence[int] = LENGTHS) -> list[Rollout]:
    """Groups of three, with completions of uneven lengths."""
    owners = [prompt for prompt in prompts(name) for _ in range(3)]
    return [
        Rollout(
            prompt=prompt,
            completion=Completion(
                completion_ids=tuple(range(40 + i, 40 + i + n)), logprobs=(0.0,) * n, finish_reason="stop"
            ),
            row={},
            row_id=i,
            group=i // 3,
        )
        for i, (prompt, n) in enumerate(zip(owners, lengths, strict=False))
    ]


def assert_equal(model: Any, found: Sequence[Rollout]) -> None:
    """Scores and gradients of packed rows against those of padded rows."""
    switch_on(model)
    scores, expected = scores_and_gradients(model, found, packed=False)
    shared, gradients = scores_and_gradients(model, found, packed=True)
    torch.testing.assert_close(shared, scores, atol=1e-5, rtol=0)
    assert gradients.keys() == expected.keys()
    assert any(gradient.abs().max() > 0 for gradient in expected.values())
    assert relative_difference(expected, gradients) < 1e-5


def fresh(name: str) -> Any:
    return copy.deepcopy(tiny(name).model)


@pytest.mark.parametrize("name", SHARED)
def test_scores_and_gradients_are_those_of_the_dense_path(name: str) -> None:
    """Four groups with 1, 3, 0 and 2 pictures in one micro-batch."""
    model, found = fresh(name).train(), rollouts_of(name)
    assert shares(model, found)
    assert_equal(model, found)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_models_whose_tokens_meet_in_other_ways_keep_the_dense_path(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not shares(fresh(name), rollouts_of(name))
    assert NOT_SHARED[name] in caplog.text


def test_text_rows_share_where_only_pictures_cannot() -> None:
    found = rollouts_of("gemma3")
    assert shares(fresh("gemma3"), [rollout for rollout in found if not rollout.prompt.images])


@pytest.mark.parametrize("name", ["text", "qwen2_5_vl", "idefics3"])
def test_under_gradient_checkpointing(name: str) -> None:
    model = fresh(name).train()
    model.gradient_checkpointing_enable()
    assert_equal(model, rollouts_of(name))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # the vision tower's
def test_under_gradient_checkpointing_of_either_kind_with_an_adapter(reentrant: bool) -> None:
    model: Any = get_peft_model(fresh("qwen3_vl"), LoraConfig(r=4, target_modules=r".*language_model.*(q|v|down)_proj"))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_equal(model.train(), rollouts_of("qwen3_vl"))


@pytest.mark.parametrize("lengths", [(1,) * 12, (3,) * 12, (1, 1, 9, 1, 1, 1, 2, 2, 2, 1, 5, 1)])
def test_with_completions_of_one_token_and_of_equal_length(lengths: Sequence[int]) -> None:
    assert_equal(fresh("qwen2_5_vl"), rollouts_of("qwen2_5_vl", lengths))


@pytest.mark.parametrize("window", [2, 5, 40])
def test_windows_forget_the_same_tokens(window: int) -> None:
    config = copy.deepcopy(tiny("text").model.config)
    layers = [("sliding_attention", "full_attention")[i % 2] for i in range(config.num_hidden_layers)]
    config.sliding_window, config.layer_types, config.use_sliding_window = window, layers, True
    torch.manual_seed(0)
    model, found = Qwen3ForCausalLM(config), rollouts_of("text")
    assert shares(model, found)
    assert_equal(model, found)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model, found = fresh("qwen2_5_vl"), rollouts_of("qwen2_5_vl")
    switch_on(model)

    def score(some: Sequence[Rollout]) -> torch.Tensor:
        with torch.no_grad():
            return policy_logprobs(model, join_rollouts(some, pad_token_id=0, device="cpu", packed=True)).logprobs

    together, order = score(found), torch.randperm(len(found)).tolist()
    shuffled = score([found[i] for i in order])
    for place, i in enumerate(order):
        torch.testing.assert_close(shuffled[place], together[i], atol=2e-6, rtol=0)
        alone = score([found[i]])[0]
        torch.testing.assert_close(together[i, : len(alone)], alone, atol=2e-6, rtol=0)


def test_a_bfloat16_model_whose_pictures_look_ahead_is_told_by_its_masks() -> None:
    """The effect on a random tiny model is within what bfloat16 rounds away."""
    assert not shares(fresh("gemma3").bfloat16(), rollouts_of("gemma3"))
    assert shares(fresh("qwen2_5_vl").bfloat16(), rollouts_of("qwen2_5_vl"))


def test_mixed_precision_shares(tmp_path: Path) -> None:
    """Trials are in the weights' own precision, so that bfloat16 neither hides nor makes a difference."""
    trainer = make_trainer("grpo", tmp_path, model="qwen2_5_vl", max_steps=1, bf16=True)
    trainer.train()
    assert isinstance(trainer.scorer.join(trainer.model, rollouts_of("qwen2_5_vl")), PackedBatch)


def test_a_window_that_is_in_the_mask_alone_is_found_when_rows_reach_it() -> None:
    sizes: dict[str, Any] = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 16, "num_experts": 2}
    sizes |= {"shared_expert_intermediate_size": 16, "num_experts_per_tok": 1, "max_window_layers": 2}
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, use_sliding_window=True, sliding_window=16))

    def rows_of(length: int) -> list[Rollout]:
        prompt = Prompt(prompt_ids=tuple(range(100, 100 + length)), engine_ids=(1,))
        completion = Completion(completion_ids=(7, 8, 9), logprobs=(0.0,) * 3, finish_reason="stop")
        return [Rollout(prompt=prompt, completion=completion, row={}, row_id=0, group=0)] * 2

    tried = sharing()

    def applies(found: Sequence[Rollout]) -> bool:
        with torch.no_grad():
            return tried.applies(model, found, lambda inputs: policy_logprobs(model, inputs).logprobs)

    assert applies(rows_of(6))
    assert not applies(rows_of(40))


def test_a_model_is_tried_again_when_the_first_siblings_come() -> None:
    """A leak from one completion to the next, in which a lone rollout has no part."""
    model, found, tried = fresh("text").eval(), rollouts_of("text"), sharing()
    own = model.model.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.cumsum(1)
        return output

    model.model.forward = leaking

    def applies(some: Sequence[Rollout]) -> bool:
        with torch.no_grad():
            return tried.applies(model, some, lambda inputs: policy_logprobs(model, inputs).logprobs)

    lone = [replace(found[0], completion=Completion(completion_ids=(5,), logprobs=(0.0,), finish_reason="stop"))]
    assert applies(lone)
    assert not applies(found[:2])
    assert not applies(lone)


def test_scores_that_are_no_numbers_are_no_agreement(caplog: pytest.LogCaptureFixture) -> None:
    model, found = fresh("text"), rollouts_of("text")

    def score(inputs: Any) -> torch.Tensor:
        scores = policy_logprobs(model, inputs).logprobs.detach()
        return scores * float("nan") if isinstance(inputs, PackedBatch) else scores

    assert not sharing().applies(model, found, score)
    assert "differ by nan" in caplog.text


def test_errors_of_the_padded_path_are_not_taken_for_a_model_that_cannot_share() -> None:
    def score(inputs: Any) -> torch.Tensor:
        raise ValueError("row 7 is broken")

    with pytest.raises(ValueError, match="row 7"):
        sharing().applies(fresh("text"), rollouts_of("text"), score)


def test_training_follows_scoring_in_inference_mode() -> None:
    model, found = fresh("text"), rollouts_of("text", (2, 9, 4))
    switch_on(model)
    packed = join_rollouts(found, pad_token_id=0, device="cpu", packed=True)
    with torch.inference_mode():
        policy_logprobs(model, packed)
    policy_logprobs(model, packed).logprobs.sum().backward()


def test_masks_are_read() -> None:
    real = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    causal = torch.tril(torch.ones(4, 4, dtype=torch.bool)) & real.bool()[:, None, :]
    assert is_causal(causal[:, None], real, None)
    assert not is_causal(causal[:, None], real, 2)
    assert is_causal(None, torch.ones(2, 4, dtype=torch.long), None)
    assert not is_causal(None, real, None)
    ahead = causal.clone()
    ahead[0, 1, 2] = True
    assert not is_causal(ahead[:, None], real, None)
    padding = causal.clone()
    padding[1, 3, 2] = False  # what padding sees is of no account
    assert is_causal(padding[:, None], real, None)


def test_other_attention_is_told_what_to_load() -> None:
    model = fresh("text")
    model.set_attn_implementation("eager")
    with pytest.raises(NotShareable, match='attn_implementation="sdpa"'):
        switch_on(model)


def test_a_model_that_is_switched_on_is_saved_and_run_as_before(tmp_path: Path) -> None:
    model = fresh("qwen2_5_vl").eval()
    padded = join_rollouts(rollouts_of("qwen2_5_vl"), pad_token_id=0, device="cpu")
    with torch.no_grad():
        before = policy_logprobs(model, padded).logprobs
        switch_on(model)
        assert torch.equal(policy_logprobs(model, padded).logprobs, before)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text(encoding="utf-8")


def test_layouts_are_read_back() -> None:
    one, other = segments_of((5, 2, 3, 4, 7, 0))
    assert (one.prompt, one.completions, one.rows, one.longest, one.is_even) == (5, (3, 4), 2, 4, False)
    assert (other.prompt, other.completions, other.longest, other.is_even) == (7, (), 0, True)


# In training.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model", ["text", "qwen2_5_vl", "qwen3_5"])
def test_training_gives_the_gradients_of_the_dense_path(algorithm: str, model: str, tmp_path: Path) -> None:
    """Old policy, reference and policy passes; with a model that cannot share, too."""
    options: dict[str, Any] = {"model": model, "max_steps": 2, "num_iterations": 2, "beta": 0.1, "learning_rate": 1e-4}
    dense = gradients(algorithm, tmp_path, share_prompts=False, **options)
    shared = gradients(algorithm, tmp_path, share_prompts=True, **options)
    for one, other in zip(dense, shared, strict=True):
        assert relative_difference(one, other) < 1e-5


def test_prompts_go_through_the_model_once(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, model="qwen2_5_vl", max_steps=1, per_device_train_batch_size=8)
    trainer.train()
    found = rollouts_of("qwen2_5_vl")
    inputs = trainer.scorer.join(trainer.model, found)
    assert isinstance(inputs, PackedBatch)
    assert inputs.num_tokens == sum(p.num_tokens for p in prompts("qwen2_5_vl")) + sum(LENGTHS) - len(LENGTHS)
    assert trainer.state.log_history[0]["batch/pad_frac"] == 0


@pytest.mark.parametrize("generator", ["transformers", "continuous batching"])
def test_generators_that_run_the_policy_work_beside_it(generator: str, tmp_path: Path) -> None:
    """Later rounds are sampled from a model whose attention was replaced for training."""
    continuous = {"use_transformers_continuous_batching": generator != "transformers"}
    trainer = make_trainer("grpo", tmp_path, model="text", max_steps=3, **continuous)
    trainer.train()
    model: Any = trainer.model
    assert model.config._attn_implementation == "sdpa", "the model gets its own attention back"
    assert isinstance(trainer.scorer.join(model, rollouts_of("text")), PackedBatch)


def test_the_option_switches_it_off(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, model="text", share_prompts=False)
    trainer.train()
    assert isinstance(trainer.scorer.join(trainer.model, rollouts_of("text")), PaddedBatch)
