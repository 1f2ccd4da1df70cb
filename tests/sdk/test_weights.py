"""The policy's weights for engines, against what `save_pretrained` writes and what PEFT's own merging gives."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from engines import tied
from tiny_models import VISION_FAMILIES, tiny
from vlmroll.weights import PolicyWeights

Weights = dict[str, torch.Tensor]


def weights_of(policy: Any) -> Weights:
    return dict(PolicyWeights(policy))


def assert_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in expected.items()}


def saved(model: Any, folder: Path) -> Weights:
    model.save_pretrained(folder)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def moe() -> Any:
    """A model whose checkpoints hold each expert by itself."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))


# Plain models.


@pytest.mark.parametrize("make", [lambda: tiny("text").model, moe])
def test_who_stops_in_the_middle_keeps_gradients(make: Callable[[], Any]) -> None:
    weights = iter(PolicyWeights(make()))
    name, tensor = next(weights)
    assert torch.is_grad_enabled()
    assert name
    assert not tensor.requires_grad


@pytest.mark.parametrize("name", ["text", *VISION_FAMILIES])
def test_names_and_values_are_those_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    model = tiny(name).model
    weights = PolicyWeights(model)
    expected = saved(model, tmp_path)
    assert_equal(dict(weights), expected)
    assert {n: (t.shape, t.dtype) for n, t in weights.shapes.items()} == {
        n: (t.shape, t.dtype) for n, t in expected.items()
    }
    assert all(shape.device.type == "meta" for shape in weights.shapes.values())
    assert weights.num_elements == sum(tensor.numel() for tensor in expected.values())


@pytest.mark.parametrize("make", [lambda: tied(tiny("text").model), lambda: tied(tiny("qwen3_vl").model), moe])
def test_tied_weights_come_once_and_experts_one_by_one(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    assert_equal(weights_of(model), saved(model, tmp_path))


def test_each_pass_reads_the_weights_anew() -> None:
    model = copy.deepcopy(tiny("qwen3_vl").model)
    weights = PolicyWeights(model)
    first = {name: tensor.clone() for name, tensor in weights}
    assert_equal(dict(weights), first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    second = dict(weights)
    assert all(torch.equal(second[name], first[name] + 1) for name in first)


def test_weights_come_in_their_own_type_and_without_gradient(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("text").model).bfloat16().train()
    assert_equal(weights_of(model), saved(model, tmp_path))
    assert {tensor.dtype for tensor in weights_of(model).values()} == {torch.bfloat16}
    assert not any(tensor.requires_grad for tensor in weights_of(model).values())


# Adapters.


def lora(**options: Any) -> LoraConfig:
    given: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return LoraConfig(**given)


def adapted(model: Any, config: Any) -> Any:
    """A PEFT model over a copy, with an adapter that changes something."""
    policy: Any = get_peft_model(copy.deepcopy(model), copy.deepcopy(config))  # PEFT writes into the config
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad:
                scale = 0.02 if "embed" in name or "head" in name else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=random) * scale)
    return policy.eval()


def merged(policy: Any) -> Weights:
    """What PEFT itself makes of a policy and its adapter."""
    return weights_of(copy.deepcopy(policy).merge_and_unload())


def assert_merged(policy: Any, expected: Weights, plain: Any) -> None:
    """The policy's weights are the expected ones, and its own stay what they are, bit by bit."""
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    weights = PolicyWeights(policy)
    assert_equal(dict(weights), expected)
    assert_equal(dict(weights), expected)
    after = policy.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert expected.keys() == weights_of(plain).keys()
    assert weights.num_elements == PolicyWeights(plain).num_elements
    assert any(not torch.equal(expected[name], tensor) for name, tensor in weights_of(plain).items())


ADAPTERS: dict[str, Any] = {
    "lora": lora(),
    "dora": lora(use_dora=True),
    "rank_stabilised": lora(use_rslora=True, r=8),
    "bias": lora(bias="all"),
    "head_trained": lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "norms_trained": lora(modules_to_save=["norm", "input_layernorm"]),
    "embeddings": lora(target_modules=["embed_tokens", "down_proj"]),
    "head": lora(target_modules=["lm_head", "k_proj"]),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", ["text", "qwen2_5_vl"])
def test_adapters_come_merged(name: str, kind: str) -> None:
    policy = adapted(tiny(name).model, ADAPTERS[kind])
    assert_merged(policy, merged(policy), tiny(name).model)


@pytest.mark.parametrize("name", ["gemma3", "llava", "internvl", "qwen3_5"])
def test_adapters_come_merged_under_a_checkpoints_names(name: str) -> None:
    policy = adapted(tiny(name).model, lora())
    assert_merged(policy, merged(policy), tiny(name).model)


def test_adapters_come_merged_where_a_checkpoint_splits_weights() -> None:
    policy = adapted(moe(), lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]))
    assert_merged(policy, merged(policy), moe())


def test_adapters_on_several_parameters_of_a_module_come_merged() -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    policy = adapted(moe(), lora(target_modules=["q_proj"], target_parameters=parameters))
    assert_merged(policy, merged(policy), moe())


def test_larger_modules_that_are_trained_come_as_they_are_trained() -> None:
    plain = tiny("qwen2_5_vl").model
    policy = adapted(plain, lora(target_modules=["q_proj"], modules_to_save=["merger"]))
    assert_merged(policy, merged(policy), plain)


@pytest.mark.parametrize("make", [lambda: tiny("text").model, lambda: tied(tiny("text").model)])
def test_single_tokens_that_are_trained_come_merged(make: Callable[[], Any]) -> None:
    plain = make()
    policy = adapted(plain, lora(trainable_token_indices=[5, 6, 300]))
    assert_merged(policy, merged(policy), plain)


def test_the_active_one_of_several_adapters_counts() -> None:
    plain = tiny("text").model
    policy = adapted(plain, lora(target_modules=["q_proj", "down_proj"]))
    policy.add_adapter("second", lora(target_modules=["o_proj", "down_proj"], modules_to_save=["norm"]))
    first = merged(policy)
    assert_merged(policy, first, plain)
    policy.set_adapter("second")
    second = merged(policy)
    assert_merged(policy, second, plain)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    policy.base_model.set_adapter(["default", "second"])
    both = merged(policy)
    assert_merged(policy, both, plain)
    assert any(not torch.equal(both[name], second[name]) for name in second)


def test_an_adapter_that_is_off_does_not_count() -> None:
    plain = tiny("text").model
    policy = adapted(plain, lora(modules_to_save=["lm_head"]))
    with policy.disable_adapter():
        assert_equal(weights_of(policy), weights_of(plain))
    assert_merged(policy, merged(policy), plain)


def test_an_adapter_that_is_merged_already_is_not_added_again() -> None:
    policy = adapted(tiny("text").model, lora())
    expected = merged(policy)
    policy.merge_adapter()
    for _ in range(2):
        assert_equal(weights_of(policy), expected)
    layers = [module for module in policy.modules() if hasattr(module, "merged_adapters")]
    assert layers
    assert all(layer.merged for layer in layers)


def test_an_adapter_of_less_precision() -> None:
    plain = copy.deepcopy(tiny("text").model).bfloat16()
    policy = adapted(plain, lora())
    assert {tensor.dtype for tensor in weights_of(policy).values()} == {torch.bfloat16}
    assert_merged(policy, merged(policy), plain)


def test_one_merged_weight_exists_at_a_time() -> None:
    policy = adapted(tiny("text").model, lora())
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    made: list[weakref.ref[torch.Tensor]] = []
    for _, tensor in PolicyWeights(policy):
        assert sum(ref() is not None for ref in made) == 0
        assert not any(getattr(module, "merged", False) for module in policy.modules())
        if tensor.data_ptr() not in own:
            made.append(weakref.ref(tensor))
        del tensor
    assert len(made) == 14, "seven linear layers in each of two blocks"


# Adapters on tied weights.


@pytest.mark.parametrize(
    "config", [lora(target_modules=["lm_head"]), lora(target_modules=["q_proj"], modules_to_save=["lm_head"])], ids=str
)
@pytest.mark.filterwarnings("ignore:Model (with|has) `?tie")
def test_an_adapter_on_a_tied_head_is_refused(config: LoraConfig) -> None:
    policy = adapted(tied(tiny("text").model), config)
    message = (
        "an adapter changes lm_head.weight, which is tied to model.embed_tokens.weight: the engine has one weight for "
        "both; leave it out of target_modules, or load the model with tie_word_embeddings=False"
    )
    with pytest.raises(ValueError, match=message):
        PolicyWeights(policy)


@pytest.mark.parametrize(
    "config",
    [lora(target_modules=["embed_tokens"]), lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"])],
    ids=["lora", "trained"],
)
@pytest.mark.filterwarnings("ignore:Model (with|has) `?tie")
def test_an_adapter_on_embeddings_that_are_the_head_is_refused(config: LoraConfig) -> None:
    policy = adapted(tied(tiny("text").model), config)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight"):
        PolicyWeights(policy)


def test_an_adapter_beside_tied_weights_comes_merged() -> None:
    plain = tied(tiny("text").model)
    policy = adapted(plain, lora())
    assert_merged(policy, merged(policy), plain)
    assert "lm_head.weight" not in weights_of(policy)
