"""The vision tower's output in place of pixels, against the model's own way with pixels, for every family."""

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tiny_models import QWEN_FAMILIES, picture, tiny, user
from training_runs import FAMILIES, adapter, rows
from vlmroll.modeling import freeze_vision_tower
from vlmroll.scoring import head_of, policy_logprobs
from vlmroll.towers import Output, Tower
from vlmroll.vision import VisionFeatures, shown_by
from vlmroll_processors import PaddedBatch, Prompt, collate

PIXELS_ONLY = {"mllama": "its pictures enter by cross-attention, and its forward takes no encoded ones"}
WHOLE = (*QWEN_FAMILIES, "glm4v", "glm46v")
"""Families whose projector is a part of the tower."""
TAKING = tuple(name for name in FAMILIES if name not in PIXELS_ONLY)
families = pytest.mark.parametrize("name", TAKING)
TAILS = ((270, 280, 12), (290,), (300, 301, 302, 40, 41), (17, 17), (33, 34, 35, 36), (50, 51), (44,))
# Siblings apart from each other; the last prompt shows the picture of the first.
ORDER = (0, 1, 2, 3, 1, 0, 4)
Gradients = dict[str, torch.Tensor]


@cache
def prompts(name: str) -> tuple[Prompt, ...]:
    """Prompts with 1, 3, 0 and 2 pictures (PaliGemma: 1, 3, 2 and 1), and one with the first one's picture."""
    again = {"prompt": user("is it a larger one ?", picture(64, 48, 1))}
    return tuple(adapter(name).encode([*rows(4, name), again]))


def trained(name: str, *, tower: bool = True) -> Any:
    """A copy of the family's model, as training has it; with `tower=False` only its language model learns."""
    model = copy.deepcopy(tiny(name).model).train()
    if not tower:
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
    return model


def batch_of(name: str, owners: Sequence[Prompt]) -> PaddedBatch:
    return collate(owners, TAILS[: len(owners)], pad_token_id=adapter(name).pad_token_id)


def base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


class Runs:
    """Counts what goes into the tower: into its first layer that has weights, and no layers inside."""

    def __init__(self, model: Any) -> None:
        self.values, self.calls = 0, 0
        base = base_of(model)
        text = set(base.get_decoder().modules()) | {base.get_input_embeddings(), base.get_output_embeddings()}
        around = {module for module in base.modules() if base.get_decoder() in module.modules()}
        self.first: nn.Module | None = None
        for module in base.modules():
            if module in text | around or list(module.children()) or not list(module.parameters()):
                continue
            module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.first = self.first or module
        if module is self.first:
            self.calls += 1
            self.values += next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)).numel()

    def during(self, work: Callable[[], Any]) -> int:
        """How many values went in."""
        before = self.values
        work()
        return self.values - before


def states_and_gradients(model: Any, batch: PaddedBatch, inputs: dict[str, Any]) -> tuple[torch.Tensor, Gradients]:
    """Hidden states of real tokens, and the gradients of a sum over them that no two tokens enter alike."""
    model.zero_grad()
    hidden = head_of(model).backbone(**inputs, use_cache=False).last_hidden_state
    hidden = hidden[batch.attention_mask.bool()]
    weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    if hidden.requires_grad:
        (hidden * weights).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), found


def assert_close(found: tuple[torch.Tensor, Gradients], expected: tuple[torch.Tensor, Gradients]) -> None:
    """Relative to the norms; gradients all together."""
    assert float((found[0] - expected[0]).norm() / expected[0].norm()) < 1e-5
    assert found[1].keys() == expected[1].keys()
    if expected[1]:
        flat = [torch.cat([side[1][name].flatten() for name in expected[1]]).double() for side in (found, expected)]
        assert float((flat[0] - flat[1]).norm() / flat[1].norm()) < 1e-5


def compare(vision: VisionFeatures, name: str, model: Any, owners: Sequence[Prompt]) -> dict[str, Any]:
    """With the tower's output a pass gives what it gives with pixels; the inputs of the former."""
    batch = batch_of(name, owners)
    plain = batch.model_inputs(dtype=model.dtype)
    expected = states_and_gradients(model, batch, dict(plain))
    inputs = vision.inputs(model, owners, plain)
    assert_close(states_and_gradients(model, batch, dict(inputs)), expected)
    return inputs


# One pass.


@families
def test_each_distinct_picture_runs_once_and_nothing_else_changes(name: str) -> None:
    model, owners = trained(name), [prompts(name)[i] for i in ORDER]
    runs, vision = Runs(model), VisionFeatures()
    compare(vision, name, model, owners)
    distinct = batch_of(name, prompts(name)[:3] if name.startswith("paligemma") else prompts(name)[:4])
    once = runs.during(lambda: head_of(model).backbone(**distinct.model_inputs(dtype=torch.float32), use_cache=False))
    plain = batch_of(name, owners).model_inputs(dtype=torch.float32)
    assert once > 0
    found = runs.during(lambda: compare_inputs(vision, model, owners, plain))
    assert found == once
    assert runs.during(lambda: head_of(model).backbone(**plain, use_cache=False)) > 1.5 * once


def compare_inputs(vision: VisionFeatures, model: Any, owners: Sequence[Prompt], plain: dict[str, Any]) -> None:
    inputs = vision.inputs(model, owners, plain)
    assert not [key for key in inputs if "pixel" in key]
    head_of(model).backbone(**inputs, use_cache=False)


@families
def test_a_tower_says_of_a_picture_the_same_alone_and_among_others(name: str) -> None:
    tower = Tower(tiny(name).model)
    shown = [medium for prompt in prompts(name) for medium in shown_by(prompt)]
    vision, plain = VisionFeatures(), batch_of(name, prompts(name)).model_inputs(dtype=torch.float32)
    alone: list[Output] = []
    with torch.no_grad():
        together = vision.inputs(tiny(name).model, prompts(name), plain)
        for medium in shown:
            alone += tower.run("image", medium.kwargs, [medium.num_features], frozen=False)
    found, expected = together["mm_encoder_outputs"]["image"], Output.joined(alone)
    found, expected = (torch.cat(list(each[alone[0].rows[0]])) for each in (found, expected))
    assert float((found - expected).detach().norm() / expected.norm()) < 1e-6


@families
def test_prompts_without_pictures_keep_their_inputs(name: str) -> None:
    owners = [prompt for prompt in prompts(name) if not prompt.images]
    plain = batch_of(name, owners).model_inputs(dtype=torch.float32) if owners else {}
    found = VisionFeatures().inputs(trained(name), owners, plain)
    assert found.keys() == plain.keys()
    assert all(found[key] is plain[key] for key in plain)


@pytest.mark.parametrize("name", PIXELS_ONLY)
def test_models_that_take_pixels_only_get_pixels(name: str) -> None:
    owners = [prompts(name)[0]] * 2
    plain = batch_of(name, owners).model_inputs(dtype=torch.float32)
    found = VisionFeatures().inputs(trained(name), owners, plain)
    assert found.keys() == plain.keys()
    assert "pixel_values" in found


@pytest.mark.parametrize("name", ["pixtral", "llava_next", "idefics2", "qwen3_vl"])
def test_a_picture_is_the_same_whatever_stands_beside_it(name: str) -> None:
    """Its neighbours decide how it is padded."""
    shared = picture(64, 48, 1)
    alone, beside = adapter(name).encode(
        [{"prompt": user("one ?", shared)}, {"prompt": user("two ?", picture(120, 140, 7), shared)}]
    )
    (first,), (other, second) = shown_by(alone), shown_by(beside)
    assert first.key == second.key != other.key
    compare(VisionFeatures(), name, trained(name), [alone, beside, alone])


def test_equal_pictures_of_different_sizes_are_different() -> None:
    large, small = adapter("qwen2_5_vl").encode(
        [
            {
                "prompt": [
                    {"role": "user", "content": [{"type": "image", "image": picture(64, 64, 1), "max_pixels": pixels}]}
                ]
            }
            for pixels in (64 * 64, 32 * 32)
        ]
    )
    assert shown_by(large)[0].key != shown_by(small)[0].key


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_videos_beside_pictures(name: str) -> None:
    frames = [picture(64, 48, seed) for seed in range(4)]
    some = adapter(name).encode(
        [
            {"prompt": user("what moves ?", picture(64, 48, 1)), "video": frames},
            {"prompt": user("what moves ?"), "video": frames},
            {"prompt": user("and here ?", picture(64, 48, 1))},
            {"prompt": user("nothing")},
        ]
    )
    vision, model = VisionFeatures(), trained(name)
    inputs = compare(vision, name, model, [some[i] for i in (0, 1, 2, 3, 0, 1)])
    assert set(inputs["mm_encoder_outputs"]) == {"image", "video"}
    assert set(compare(vision, name, model, [some[2]] * 2)["mm_encoder_outputs"]) == {"image"}
    assert set(compare(vision, name, model, [some[1]] * 2)["mm_encoder_outputs"]) == {"video"}


def test_with_gradient_checkpointing() -> None:
    model = trained("qwen3_vl")
    model.gradient_checkpointing_enable()
    compare(VisionFeatures(), "qwen3_vl", model, [prompts("qwen3_vl")[i] for i in ORDER])


def test_prompts_that_do_not_say_what_a_picture_brings_keep_their_pixels() -> None:
    prompt = replace(prompts("gemma3")[0], units=())
    plain = batch_of("gemma3", [prompt]).model_inputs(dtype=torch.float32)
    assert VisionFeatures().inputs(trained("gemma3"), [prompt], plain).keys() == plain.keys()


@pytest.mark.parametrize("part", ["dropout", "attention_dropout", "batch norm"])
def test_a_tower_that_is_random_or_mixes_pictures_gets_pixels(part: str) -> None:
    model = trained("gemma3")
    attention = model.model.vision_tower.encoder.layers[0].self_attn
    if part == "attention_dropout":
        attention.dropout = 0.1
    else:
        attention.extra = nn.Dropout(0.1) if part == "dropout" else nn.BatchNorm1d(4)
    owners = [prompts("gemma3")[0]] * 2
    plain = batch_of("gemma3", owners).model_inputs(dtype=torch.float32)
    vision = VisionFeatures()
    assert vision.inputs(model, owners, plain).keys() == plain.keys()
    model.eval()
    assert "mm_encoder_outputs" in vision.inputs(model, owners, plain)


def counted(features: Any) -> Any:
    """A tower whose features depend on the place of a picture among the others."""

    def get(pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        output = features(pixel_values, **kwargs)
        output.pooler_output = output.pooler_output * torch.arange(1.0, 1 + len(pixel_values))[:, None, None]
        return output

    return get


def short(features: Any) -> Any:
    """A tower that gives fewer features than the prompt has places, which its model would fill up later."""

    def get(pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        output = features(pixel_values, **kwargs)
        output.pooler_output = output.pooler_output[:, 1:]
        return output

    return get


def dropping(forward: Any) -> Any:
    """A backbone that drops what was encoded before."""

    def run(*args: Any, mm_encoder_outputs: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return run


@pytest.mark.parametrize(
    ("method", "change", "reason"),
    [
        ("get_image_features", counted, "features differ by"),
        ("get_image_features", short, "ValueError: "),
        ("forward", dropping, "features differ by"),
    ],
)
def test_a_model_that_fails_the_first_comparison_keeps_pixels_with_one_warning(
    method: str, change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, owners = trained("gemma3"), [prompts("gemma3")[1]] * 2
    setattr(model.model, method, change(getattr(model.model, method)))
    plain, vision = batch_of("gemma3", owners).model_inputs(dtype=torch.float32), VisionFeatures()
    with caplog.at_level(logging.WARNING, "vlmroll"):
        for _ in range(2):
            assert vision.inputs(model, owners, plain).keys() == plain.keys()
    (message,) = [record.message for record in caplog.records if record.name == "vlmroll.vision"]
    assert "Gemma3ForConditionalGeneration" in message
    assert reason in message


# A frozen tower.


def passes(vision: VisionFeatures, runs: Runs, name: str, model: Any, owners: Sequence[Prompt]) -> int:
    """How many values go into the tower for one pass."""
    plain = batch_of(name, owners).model_inputs(dtype=model.dtype)
    return runs.during(lambda: head_of(model).backbone(**vision.inputs(model, owners, plain), use_cache=False))


@families
def test_a_frozen_tower_runs_once_for_all_passes(name: str) -> None:
    model, owners = trained(name, tower=False), [prompts(name)[i] for i in ORDER]
    runs, vision = Runs(model), VisionFeatures()
    with torch.inference_mode():
        vision.inputs(model, owners, batch_of(name, owners).model_inputs(dtype=torch.float32))
    batch = batch_of(name, owners)
    expected = states_and_gradients(model, batch, batch.model_inputs(dtype=torch.float32))
    assert expected[1]
    found: list[Any] = []
    assert not runs.during(lambda: found.append(vision.inputs(model, owners, batch.model_inputs(dtype=torch.float32))))
    assert_close(states_and_gradients(model, batch, found[0]), expected)
    # Other prompts with the same pictures find them too.
    assert not passes(vision, runs, name, model, prompts(name)[:1] + prompts(name)[4:])
    vision.clear()
    assert passes(vision, runs, name, model, owners)


def load(model: Any) -> None:
    model.load_state_dict({n: t * 1.5 if t.is_floating_point() else t for n, t in model.state_dict().items()})


def step(model: Any) -> None:
    bias = model.model.visual.merger.mlp[2].bias.requires_grad_(True)
    bias.grad = torch.ones_like(bias)
    torch.optim.SGD([bias], lr=0.1).step()
    bias.requires_grad_(False)


def write_data(model: Any) -> None:
    model.model.visual.merger.mlp[2].bias.data.add_(0.1)


def new_parameter(model: Any) -> None:
    last = model.model.visual.merger.mlp[2]
    last.weight = nn.Parameter(last.weight * 2, requires_grad=False)


def write_buffer(model: Any) -> None:
    model.model.visual.rotary_pos_emb.inv_freq.mul_(3.0)


CHANGES = (load, step, write_data, new_parameter, write_buffer)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_runs_the_tower_again(change: Callable[[Any], None]) -> None:
    name, model = "qwen2_5_vl", trained("qwen2_5_vl", tower=False)
    owners, runs, vision = [prompts(name)[1]] * 2, Runs(model), VisionFeatures()
    whole = passes(vision, runs, name, model, owners) / 2  # the first use compares
    assert not passes(vision, runs, name, model, owners)
    change(model)
    compare(vision, name, model, owners)
    vision.clear()
    assert 0 < passes(vision, runs, name, model, owners) <= whole
    assert not passes(vision, runs, name, model, owners)


def test_changes_of_the_language_model_leave_what_is_kept() -> None:
    name, model = "qwen2_5_vl", trained("qwen2_5_vl", tower=False)
    owners, runs, vision = [prompts(name)[1]] * 2, Runs(model), VisionFeatures()
    assert passes(vision, runs, name, model, owners)
    batch = batch_of(name, owners)
    before, _ = states_and_gradients(
        model, batch, vision.inputs(model, owners, batch.model_inputs(dtype=torch.float32))
    )
    torch.optim.SGD(model.get_decoder().parameters(), lr=0.1).step()
    assert not passes(vision, runs, name, model, owners)
    assert not torch.equal(states_and_gradients(model, batch, batch.model_inputs(dtype=torch.float32))[0], before)


def test_a_thawed_tower_gets_its_gradient() -> None:
    name, model = "gemma3", trained("gemma3", tower=False)
    owners, vision = [prompts(name)[1]] * 2, VisionFeatures()
    compare(vision, name, model, owners)
    model.requires_grad_(True)
    compare(vision, name, model, owners)
    model.model.vision_tower.requires_grad_(False)  # the projector goes on learning
    compare(vision, name, model, owners)
    batch = batch_of(name, owners)
    _, gradients = states_and_gradients(
        model, batch, vision.inputs(model, owners, batch.model_inputs(dtype=torch.float32))
    )
    assert [parameter for parameter in gradients if "projector" in parameter]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llama4", "ovis2"])
def test_a_frozen_copy_shares_what_is_kept_until_it_differs(name: str) -> None:
    policy = trained(name, tower=False)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    owners, vision = [prompts(name)[i] for i in ORDER], VisionFeatures()
    runs = Runs(reference)
    passes(vision, Runs(policy), name, policy, owners)
    plain = batch_of(name, owners).model_inputs(dtype=torch.float32)
    vision.inputs(reference, owners, plain)  # the first use compares
    assert not passes(vision, runs, name, reference, owners)
    weight = next(w for n, w in reference.named_parameters() if w.dim() == 2 and ("vision" in n or "visual" in n))
    with torch.no_grad():
        weight.mul_(1.1)
    assert passes(vision, runs, name, reference, owners)
    compare(vision, name, reference, owners)
    compare(vision, name, policy, owners)


def test_twins_are_weighed_and_not_only_counted() -> None:
    """Two models that were changed equally often, in other ways."""
    name = "qwen3_vl"
    one, other = trained(name, tower=False), trained(name, tower=False)
    for model, factor in ((one, 1.0), (other, 1.3)):
        with torch.no_grad():
            model.model.visual.merger.linear_fc2.weight.mul_(factor)
    owners, vision = [prompts(name)[1]] * 2, VisionFeatures()
    for model in (one, other, one):
        compare(vision, name, model, owners)


def test_what_is_kept_has_a_bound() -> None:
    name, model = "qwen3_vl", trained("qwen3_vl", tower=False)
    first, second = [prompts(name)[0]], [prompts(name)[3]]
    size = 16 * 64 * 4 * 3  # 16 features of 64 numbers, with those of two layers below
    assert prompts(name)[0].num_image_tokens <= 16
    for keep, again in ((0, True), (size, True), (8 * size, False)):
        vision, runs = VisionFeatures(keep=keep), Runs(model)
        passes(vision, runs, name, model, first)
        assert bool(passes(vision, runs, name, model, first)) == (keep == 0)
        passes(vision, runs, name, model, second)
        assert bool(passes(vision, runs, name, model, first)) == again
        compare(vision, name, model, first)
    with pytest.raises(ValueError, match="number of bytes"):
        VisionFeatures(keep=-1)


def test_what_weights_of_long_ago_made_is_let_go() -> None:
    name, model = "qwen2_5_vl", trained("qwen2_5_vl", tower=False)
    vision, runs = VisionFeatures(), Runs(model)
    for _ in range(20):
        write_data(model)
        passes(vision, runs, name, model, prompts(name)[:1])
    assert len(vision._places) <= 8  # pyright: ignore[reportPrivateUsage]
    kept = vision._kept._outputs  # pyright: ignore[reportPrivateUsage]
    assert 0 < len(kept) <= 8


def test_autocast_and_float32_are_kept_apart() -> None:
    name, model = "gemma3", trained("gemma3", tower=False)
    owners, vision = [prompts(name)[1]] * 2, VisionFeatures()
    plain = batch_of(name, owners).model_inputs(dtype=torch.float32)

    def features() -> torch.Tensor:
        return vision.inputs(model, owners, plain)["mm_encoder_outputs"]["image"].pooler_output

    whole = features()
    with torch.autocast("cpu", torch.bfloat16):
        half = features()
        expected = model.model.get_image_features(plain["pixel_values"][:3], return_dict=True).pooler_output
    assert not half.float().equal(whole)
    torch.testing.assert_close(half[:3], expected)
    assert features().equal(whole)


def test_a_model_in_bfloat16() -> None:
    name = "qwen2_5_vl"
    model = trained(name, tower=False).bfloat16()
    owners, vision = [prompts(name)[i] for i in ORDER], VisionFeatures()
    batch = batch_of(name, owners)
    with torch.no_grad():
        plain = batch.model_inputs(dtype=model.dtype)
        inputs = vision.inputs(model, owners, plain)
        found, expected = (states_and_gradients(model, batch, dict(each))[0].float() for each in (inputs, plain))
    assert "mm_encoder_outputs" in inputs
    assert float((found - expected).norm() / expected.norm()) < 0.02


# A frozen tower before a projector that is trained.


def half_trained(name: str) -> Any:
    """As `freeze_vision_tower` has it: what stands between the tower and the language model goes on learning."""
    model = trained(name)
    freeze_vision_tower(model, adapter(name).family.vision_modules)
    return model


def rest_of(model: Any) -> list[nn.Parameter]:
    """The vision side's parameters that are trained."""
    base = base_of(model)
    text = {id(p) for part in (base.get_decoder(), base.get_input_embeddings()) for p in part.parameters()}
    text |= {id(parameter) for parameter in base.get_output_embeddings().parameters()}
    return [parameter for parameter in base.parameters() if parameter.requires_grad and id(parameter) not in text]


def inside(model: Any) -> str:
    """The name of a matrix of the frozen tower beside a trained projector."""
    trunk = Tower(base_of(model)).trunk()
    assert trunk is not None
    held = {id(weight) for weight in trunk.module.parameters() if weight.dim() == 2}
    return next(name for name, parameter in base_of(model).named_parameters() if id(parameter) in held)


PROJECTED = tuple(name for name in TAKING if name not in WHOLE)
projected = pytest.mark.parametrize("name", PROJECTED)


@families
def test_families_whose_projector_stands_apart(name: str) -> None:
    assert bool(rest_of(half_trained(name))) == (name in PROJECTED)


@projected
def test_a_frozen_tower_runs_once_while_the_projector_learns(name: str) -> None:
    model, owners, vision = half_trained(name), [prompts(name)[i] for i in ORDER], VisionFeatures()
    runs, batch = Runs(model), batch_of(name, owners)
    with torch.inference_mode():
        assert passes(vision, runs, name, model, owners)
    for _ in range(2):
        found: list[Any] = []
        plain = batch.model_inputs(dtype=torch.float32)
        assert not runs.during(lambda found=found, plain=plain: found.append(vision.inputs(model, owners, plain)))
        shared = states_and_gradients(model, batch, found[0])
        assert_close(shared, states_and_gradients(model, batch, plain))
        learned = {id(p) for n, p in model.named_parameters() if n in shared[1] and float(shared[1][n].norm()) > 0}
        assert learned & {id(parameter) for parameter in rest_of(model)}
        torch.optim.SGD([parameter for parameter in rest_of(model) if parameter.grad is not None], lr=0.1).step()
    assert not passes(vision, runs, name, model, prompts(name)[:1] + prompts(name)[4:])
    with torch.no_grad():
        model.get_parameter(inside(model)).data.mul_(1.1)
    assert passes(vision, runs, name, model, owners)
    compare(vision, name, model, owners)
    assert not passes(vision, runs, name, model, owners)


@projected
def test_a_reference_finds_what_the_tower_gave_the_policy(name: str) -> None:
    policy = half_trained(name)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in rest_of(policy):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    owners, vision = [prompts(name)[i] for i in ORDER], VisionFeatures()
    runs, plain = Runs(reference), batch_of(name, owners).model_inputs(dtype=torch.float32)
    vision.inputs(policy, owners[:1], batch_of(name, owners[:1]).model_inputs(dtype=torch.float32))
    vision.inputs(reference, owners[:1], batch_of(name, owners[:1]).model_inputs(dtype=torch.float32))  # compares
    vision.inputs(policy, owners, plain)
    assert not passes(vision, runs, name, reference, owners)
    compare(vision, name, reference, owners)
    compare(vision, name, policy, owners)
    with torch.no_grad():
        reference.get_parameter(inside(policy)).mul_(1.1)
    assert passes(vision, runs, name, reference, owners)
    compare(vision, name, reference, owners)
    compare(vision, name, policy, owners)


def kept_bytes(vision: VisionFeatures) -> int:
    return vision._kept._size  # pyright: ignore[reportPrivateUsage]


def test_of_a_tower_only_what_the_projector_reads_is_kept() -> None:
    """Llava's tower gives the states of all layers, and its projector reads one."""
    name, model, vision = "llava", half_trained("llava"), VisionFeatures()
    compare(vision, name, model, prompts(name)[:1])
    plain = batch_of(name, prompts(name)[:1]).model_inputs(dtype=torch.float32)
    with torch.no_grad():
        states = model.model.vision_tower(plain["pixel_values"], output_hidden_states=True).hidden_states
    assert len(states) > 2
    assert kept_bytes(vision) == states[0].nbytes


def test_what_is_kept_of_a_tower_alone_has_a_bound() -> None:
    name, model = "llava", half_trained("llava")
    for keep, again in ((0, True), (10, True), (2**20, False)):
        vision, runs = VisionFeatures(keep=keep), Runs(model)
        passes(vision, runs, name, model, prompts(name)[:1])
        assert bool(passes(vision, runs, name, model, prompts(name)[:1])) == again
        assert kept_bytes(vision) <= keep
        compare(vision, name, model, prompts(name)[:1])


def test_a_tower_alone_with_autocast_and_gradient_checkpointing() -> None:
    name, model, vision = "gemma3", half_trained("gemma3"), VisionFeatures()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    owners, runs = [prompts(name)[1]] * 2, Runs(model)
    compare(vision, name, model, owners)
    with torch.autocast("cpu", torch.bfloat16):
        assert passes(vision, runs, name, model, owners)
        assert not passes(vision, runs, name, model, owners)
    assert not passes(vision, runs, name, model, owners)
    compare(vision, name, model, owners)


def test_what_is_trained_before_a_frozen_part_gets_its_gradient() -> None:
    name, model, vision = "gemma3", half_trained("gemma3"), VisionFeatures()
    embeddings = model.model.vision_tower.embeddings.requires_grad_(True)
    owners = [prompts(name)[1]] * 2
    for _ in range(2):
        compare(vision, name, model, owners)
        assert float(embeddings.patch_embedding.weight.grad.norm()) > 0
        torch.optim.SGD(embeddings.parameters(), lr=0.1).step()
        with torch.no_grad():
            compare(vision, name, model, owners)


def test_a_frozen_part_that_is_not_called_runs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """The layers of Qwen's tower stand in a list, and its merger is trained."""
    name, model, vision = "qwen2_5_vl", half_trained("qwen2_5_vl"), VisionFeatures()
    model.model.visual.merger.requires_grad_(True)
    owners, runs = [prompts(name)[i] for i in ORDER], Runs(model)
    with caplog.at_level(logging.WARNING, "vlmroll"):
        compare(vision, name, model, owners)
    (message,) = [record.message for record in caplog.records if record.name == "vlmroll.vision"]
    assert "in each pass, though it is frozen: ValueError: the frozen part is not called" in message
    assert passes(vision, runs, name, model, owners)
    assert "forward" not in vars(model.model.visual.blocks)


def write_into(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    args[0].add_(1)


def written_over(projector: nn.Module) -> None:
    projector.register_forward_pre_hook(write_into)


def strange(tower: nn.Module) -> None:
    forward = tower.forward
    tower.forward = lambda *args, **kwargs: SimpleNamespace(**forward(*args, **kwargs))


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("multi_modal_projector", written_over, "the features differ by"),
        ("vision_tower", strange, "ValueError: the frozen part returns a SimpleNamespace, which cannot be kept"),
    ],
)
def test_a_tower_whose_output_cannot_be_kept_runs_as_before(
    part: str, change: Callable[[nn.Module], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, model, vision = "gemma3", half_trained("gemma3"), VisionFeatures()
    change(getattr(model.model, part))
    owners, runs = [prompts(name)[i] for i in ORDER], Runs(model)
    plain = batch_of(name, owners).model_inputs(dtype=torch.float32)
    with caplog.at_level(logging.WARNING, "vlmroll"):
        vision.inputs(model, owners, plain)
    assert reason in caplog.records[0].message
    assert "in each pass, though it is frozen" in caplog.records[0].message
    assert passes(vision, runs, name, model, owners)
    if part == "multi_modal_projector":
        compare(vision, name, model, owners)


def test_the_forward_of_a_frozen_part_is_its_own_again() -> None:
    name, model, vision = "gemma3", half_trained("gemma3"), VisionFeatures()
    compare(vision, name, model, prompts(name)[:1])
    assert "forward" not in vars(model.model.vision_tower)

    def patched(*args: Any, **kwargs: Any) -> Any:
        return type(model.model.vision_tower).forward(model.model.vision_tower, *args, **kwargs)

    model.model.vision_tower.forward = patched
    compare(vision, name, model, prompts(name)[1:2])
    assert model.model.vision_tower.forward is patched


def test_a_projector_trained_beside_an_adapter() -> None:
    name = "gemma3"
    config = LoraConfig(r=4, target_modules=r".*language_model.*q_proj", modules_to_save=["multi_modal_projector"])
    model = get_peft_model(copy.deepcopy(tiny(name).model), config).train()
    owners, runs, vision = [prompts(name)[i] for i in ORDER], Runs(model), VisionFeatures()
    for step_number in range(12):  # more than the states that are kept
        for reference in (False, True):
            with model.disable_adapter() if reference else contextlib.nullcontext():
                if step_number:
                    assert not passes(vision, runs, name, model, owners)
                compare(vision, name, model, owners)
        model.set_adapter("default")
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


# Adapters.


def with_adapter(name: str, targets: str | list[str]) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(tiny(name).model), LoraConfig(r=4, target_modules=targets))
    for parameter, weight in model.named_parameters():
        if "lora_B" in parameter:
            nn.init.normal_(weight, std=0.3)
    return model.train()


def test_an_adapter_of_the_language_model_leaves_the_tower_frozen_for_policy_and_reference() -> None:
    name, model = "gemma3", with_adapter("gemma3", r".*language_model.*(q_proj|v_proj)")
    owners, runs, vision = [prompts(name)[i] for i in ORDER], Runs(model), VisionFeatures()
    compare(vision, name, model, owners)
    with model.disable_adapter():
        assert not passes(vision, runs, name, model, owners)
        compare(vision, name, model, owners)


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_an_adapter_of_the_tower_is_trained_and_the_reference_does_without_it(name: str) -> None:
    model = with_adapter(name, "all-linear")
    owners, vision = [prompts(name)[i] for i in ORDER], VisionFeatures()
    for _ in range(2):
        compare(vision, name, model, owners)
        with model.disable_adapter(), torch.no_grad():
            compare(vision, name, model, owners)
        model.set_adapter("default")
        batch = batch_of(name, owners)
        inputs = vision.inputs(model, owners, batch.model_inputs(dtype=torch.float32))
        _, gradients = states_and_gradients(model, batch, inputs)
        assert [parameter for parameter in gradients if "lora_B" in parameter and "language_model" not in parameter]
        torch.optim.SGD(model.parameters(), lr=0.01).step()


def test_switching_a_frozen_adapter_of_the_tower_off_and_on() -> None:
    name, model = "gemma3", with_adapter("gemma3", "all-linear").requires_grad_(False)
    owners, vision = [prompts(name)[1]] * 2, VisionFeatures()
    for _ in range(2):
        compare(vision, name, model, owners)
        with model.disable_adapter():
            compare(vision, name, model, owners)
        model.requires_grad_(False)
    runs = Runs(model)
    assert not passes(vision, runs, name, model, owners)


def test_an_adapter_with_gradient_checkpointing() -> None:
    name, model = "qwen3_vl", with_adapter("qwen3_vl", r".*language_model.*(q_proj|v_proj)")
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    runs, vision, owners = Runs(model), VisionFeatures(), [prompts(name)[i] for i in ORDER]
    inputs = compare(vision, name, model, owners)
    assert not inputs["mm_encoder_outputs"]["image"].pooler_output[0].requires_grad
    assert not passes(vision, runs, name, model, owners)


# What the state of the weights rests on.


@families
def test_the_tower_calls_no_module_of_the_language_model(name: str) -> None:
    """So its output depends on no weight that its state leaves out."""
    model = copy.deepcopy(tiny(name).model)
    called: list[nn.Module] = []

    def note(module: nn.Module, args: Any) -> None:
        called.append(module)

    for part in (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
        for module in part.modules():
            module.register_forward_pre_hook(note)
    owners = [prompts(name)[1]]
    vision = VisionFeatures()
    vision.inputs(model, owners, batch_of(name, owners).model_inputs(dtype=torch.float32))  # the first use calls both
    vision.clear()
    called.clear()
    vision.inputs(model, owners, batch_of(name, owners).model_inputs(dtype=torch.float32))
    assert not called


def test_scores_are_the_same_with_features_in_the_place_of_pixels() -> None:
    """Through the public scoring function, whose batch carries tensors only."""
    name, model = "qwen2_5_vl", trained("qwen2_5_vl")
    owners = [prompts(name)[i] for i in ORDER]
    batch = batch_of(name, owners)
    inputs = VisionFeatures().inputs(model, owners, batch.model_inputs(dtype=torch.float32))
    with torch.no_grad():
        expected = policy_logprobs(model, batch).logprobs
        hidden = head_of(model).backbone(**inputs, use_cache=False).last_hidden_state
        logits = head_of(model).logits(hidden[:, -batch.completion_mask.shape[1] - 1 : -1])
    found = logits.log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]
    mask = batch.completion_mask.bool()
    torch.testing.assert_close(found[mask], expected[mask], atol=2e-5, rtol=0)
