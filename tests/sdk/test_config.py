"""The options: defaults, every rule and its message, names that are refused, round trips and the options page."""

import copy
import inspect
import json
import os
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import ParallelismConfig  # pyright: ignore[reportMissingTypeStubs]
from hypothesis import given
from hypothesis import strategies as st
from transformers import HfArgumentParser, TrainingArguments

from vlmroll.config import GRPOConfig, PolicyConfig, RLOOConfig
from vlmroll.config.batching import Derived, StepSizes, check_eval_groups, check_groups, plan_round
from vlmroll.config.options import RETIRED, check_names, describe_options, option
from vlmroll.config.table import MARKER, main, options_page

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = (GRPOConfig, RLOOConfig)

# The options of the first release that take any value in range, and those that take their default alone.
WORKING = """
    model_init_kwargs trust_remote_code disable_dropout shuffle_dataset pad_to_multiple_of num_generations
    num_generations_eval max_completion_length generation_batch_size steps_per_generation num_iterations
    chat_template_kwargs max_tool_calling_iterations tool_timeout tool_call_format
    temperature top_p top_k min_p repetition_penalty generation_kwargs beta epsilon epsilon_high
    delta importance_sampling_level loss_type reward_weights multi_objective_aggregation scale_rewards
    mask_truncated_completions top_entropy_quantile use_bias_correction_kl log_completions log_multimodal
    num_completions_to_print log_unique_prompts learning_rate logging_steps gradient_checkpointing bf16
    drop_zero_variance_groups freeze_vision_tower min_pixels max_pixels max_prompt_length long_prompts
    logprob_chunk_size share_prompts micro_batch_max_tokens micro_batch_max_patches
    vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min use_vllm vllm_mode vllm_model_impl
    vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
    vllm_engine_kwargs
    use_transformers_continuous_batching transformers_continuous_batching_config
""".split()  # noqa: SIM905
REFUSED: dict[str, Any] = {
    "cache_implementation": "static",
    "entropy_coef": 0.01,
    "use_adaptive_entropy": True,
    "entropy_coef_min": 0.1,
    "entropy_coef_max": 0.5,
    "entropy_coef_delta": 0.1,
    "entropy_target": 1.0,
    "sapo_temperature_neg": 1.0,
    "sapo_temperature_pos": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "off_policy_mask_threshold": 0.5,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": 0.5,
    "ref_model_sync_steps": 64,
    "router_aux_loss_coef": 0.001,
    "cast_lm_head_to_fp32": True,
    "log_completions_hub_repo": "someone/completions",
    "ds3_gather_for_generation": False,
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
    "torch_compile": True,
    "dataloader_num_workers": 2,
    "dataloader_drop_last": True,
    "label_smoothing_factor": 0.1,
    "train_sampling_strategy": "group_by_length",
    "neftune_noise_alpha": 5.0,
    "remove_unused_columns": True,
}

REFUSED_BY_RLOO = {"loss_type", "multi_objective_aggregation", "use_bias_correction_kl"}

# Where our defaults differ from TRL 1.16's on purpose, and names of TRL's configs that are no options here.
DIFFERENT_DEFAULTS: dict[type[Any], dict[str, Any]] = {GRPOConfig: {}, RLOOConfig: {}}
NOT_FIELDS = {"use_transformers_paged", "vllm_importance_sampling_cap"}

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("num_generations", 1, "at least 2"),
    ("num_generations_eval", 0, "at least 1"),
    ("max_completion_length", 0, "at least 1"),
    ("max_completion_length", None, "must be int, got NoneType"),
    ("generation_batch_size", 0, "at least 1"),
    ("steps_per_generation", 0, "at least 1"),
    ("per_device_train_batch_size", 0, "at least 1"),
    ("num_iterations", 0, "at least 1"),
    ("temperature", 0.0, "greater than 0"),
    ("temperature", float("nan"), "must be finite"),
    ("shuffle_dataset", "false", "must be bool, got str"),
    ("num_generations", "4", "must be int, got str"),
    ("num_iterations", 1.5, "must be int, got float"),
    ("top_p", 0.0, "at most 1"),
    ("top_p", 1.5, "at most 1"),
    ("top_k", -1, "at least 0"),
    ("min_p", -0.1, "from 0 to 1"),
    ("min_p", 1.1, "from 0 to 1"),
    ("repetition_penalty", 0.0, "greater than 0"),
    ("beta", -0.1, "at least 0"),
    ("epsilon", -0.1, "at least 0"),
    ("epsilon_high", -0.1, "at least 0"),
    ("delta", 0.0, "greater than 0"),
    ("top_entropy_quantile", 0.0, "at most 1"),
    ("top_entropy_quantile", 1.1, "at most 1"),
    ("importance_sampling_level", "word", "'token', 'sequence'"),
    ("multi_objective_aggregation", "sum", "'sum_then_normalize', 'normalize_then_sum'"),
    ("scale_rewards", "groups", "'group', 'batch', 'none'"),
    ("num_completions_to_print", 0, "log_completions=False"),
    ("logprob_chunk_size", 0, "at least 1"),
    ("min_pixels", 0, "at least 1"),
    ("max_pixels", 0, "at least 1"),
    ("max_prompt_length", 0, "at least 1"),
    ("long_prompts", "cut", "must be one of"),
    ("pad_to_multiple_of", 0, "at least 1"),
    ("pad_to_multiple_of", "some", "'auto', 'none' or an int"),
    ("model_init_kwargs", "float32", "a dict, or a JSON object"),
    ("generation_kwargs", "top_k=1", "a dict, or a JSON object"),
    ("vllm_importance_sampling_mode", "token", "'token_mask', 'token_truncate', 'sequence_mask', 'sequence_truncate'"),
    ("vllm_importance_sampling_clip_max", 0.0, "greater than 0, or None"),
    ("vllm_importance_sampling_clip_max", None, "mode 'sequence_mask' needs a bound"),
    ("vllm_importance_sampling_clip_min", -0.5, "greater than 0, or None"),
    ("vllm_importance_sampling_clip_min", 3.0, "less than vllm_importance_sampling_clip_max=3.0"),
    ("chat_template_kwargs", "thinking", "a dict, or a JSON object"),
]


def make(config_class: type[PolicyConfig], **options: Any) -> Any:
    """A config on the CPU, wherever the test runs; Any, because the tests give names and values that are wrong."""
    values: dict[str, Any] = {"output_dir": "out", "use_cpu": True, **options}
    return config_class(**values)


def parse(config_class: type[PolicyConfig], *line: str) -> Any:
    """The config that a command line gives."""
    (parsed,) = HfArgumentParser(cast(Any, config_class)).parse_args_into_dataclasses([*line])
    return parsed


def error_of(config_class: type[PolicyConfig], **options: Any) -> str:
    """The message of the ValueError that these options raise."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        make(config_class, **options)
    return str(caught.value)


# Names and defaults


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_option_of_trl_is_there_with_its_default(config_class: type[PolicyConfig]) -> None:
    trl = pytest.importorskip("trl", minversion="1.16")
    ours = {declared.name: declared for declared in fields(config_class)}
    missing: list[str] = []
    different: dict[str, Any] = {}
    for declared in fields(getattr(trl, config_class.__name__)):
        if declared.name not in ours:
            missing.append(declared.name)
        elif (declared.default, declared.default_factory) != (
            ours[declared.name].default,
            ours[declared.name].default_factory,
        ):
            different[declared.name] = ours[declared.name].default
    assert set(missing) <= NOT_FIELDS <= set(RETIRED)
    assert different == DIFFERENT_DEFAULTS[config_class]


def test_both_configs_take_the_same_options() -> None:
    grpo, rloo = (describe_options(config_class) for config_class in CONFIGS)
    assert set(rloo) - set(grpo) == {"normalize_advantages", "reward_clip_range"}
    assert set(grpo) <= set(rloo)
    assert (grpo["beta"].default, rloo["beta"].default) == (0.0, 0.05)
    assert (grpo["num_generations"].default, rloo["num_generations"].default) == (8, 2)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_status_of_every_option(config_class: type[PolicyConfig]) -> None:
    described = describe_options(config_class)
    refused = set(REFUSED) | (REFUSED_BY_RLOO if config_class is RLOOConfig else set[str]())
    assert {name for name, info in described.items() if info.refused} == refused
    own = {"normalize_advantages", "reward_clip_range"} if config_class is RLOOConfig else set[str]()
    assert set(described) - set(REFUSED) == set(WORKING) | own
    assert all(info.help and "%" not in info.help for info in described.values())  # argparse reads % as a format


@pytest.mark.parametrize("config_class", CONFIGS)
def test_defaults_make_a_config(config_class: type[PolicyConfig]) -> None:
    config = make(config_class)
    assert (config.generation_batch_size, config.steps_per_generation) == (8, 1)
    assert config.learning_rate == 1e-6
    assert config.logging_steps == 10
    assert config.gradient_checkpointing is True
    assert config.remove_unused_columns is False
    assert config.pad_to_multiple_of is None  # "auto", on a CPU
    assert config.bf16 is False
    assert config_class("folder", use_cpu=True).output_dir == "folder"  # as TrainingArguments, first by position


def test_bf16_is_chosen_by_the_accelerator() -> None:
    has_bfloat16 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    assert GRPOConfig().bf16 is has_bfloat16
    assert GRPOConfig(fp16=True).bf16 is False
    assert GRPOConfig(bf16=False).bf16 is False
    assert GRPOConfig(bf16=True, use_cpu=True).bf16 is True


def test_signature_lists_the_options() -> None:
    parameters = inspect.signature(RLOOConfig).parameters
    assert list(parameters) == [declared.name for declared in fields(RLOOConfig) if declared.init]
    assert parameters["beta"].default == 0.05


# Values that are refused


@pytest.mark.parametrize("config_class", CONFIGS)
@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_refused_options_raise(config_class: type[PolicyConfig], name: str, value: Any) -> None:
    message = error_of(config_class, **{name: value})
    reason = describe_options(config_class)[name].refused
    assert message == f"{name}={value!r} cannot be used: {reason}"
    assert reason is not None
    assert any(word in reason for word in ("leave", "load", "lower", "use")), "a reason says what to do"


@pytest.mark.parametrize("config_class", CONFIGS)
def test_refused_options_accept_their_default(config_class: type[PolicyConfig]) -> None:
    described = describe_options(config_class)
    make(config_class, **{name: described[name].default for name in REFUSED})


@pytest.mark.parametrize(("name", "value", "rule"), OUT_OF_RANGE)
def test_values_out_of_range_raise(name: str, value: Any, rule: str) -> None:
    message = error_of(GRPOConfig, **{name: value})
    assert message.startswith(f"{name}={value!r}" if value is not None else name)
    assert rule in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_batch_token", "did you mean 'max_batch_tokens'?"),
        ("gpu_utilization", "it has ['allow_block_sharing', "),
        ("seed", "each call has a seed of its own"),
        ("return_logprobs", "always reported"),
    ],
)
def test_continuous_batching_takes_the_settings_of_transformers(name: str, hint: str) -> None:
    message = error_of(
        GRPOConfig, use_transformers_continuous_batching=True, transformers_continuous_batching_config={name: 1}
    )
    assert message.startswith("transformers_continuous_batching_config: ")
    assert repr(name) in message
    assert hint in message


@pytest.mark.parametrize("value", [0, -1, 1.5, "8"])
def test_sizes_of_continuous_batching_are_whole_numbers(value: Any) -> None:
    message = error_of(
        GRPOConfig,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": value},
    )
    assert message.endswith(f"num_blocks must be a whole number of at least 1, or None, got {value!r}")


def test_settings_of_continuous_batching_are_read_where_it_generates() -> None:
    settings = {"num_blocks": None, "max_memory_percent": 0.5}
    config = make(
        GRPOConfig, use_transformers_continuous_batching=True, transformers_continuous_batching_config=settings
    )
    assert config.transformers_continuous_batching_config == settings
    message = error_of(GRPOConfig, transformers_continuous_batching_config=settings)
    assert message.endswith("set use_transformers_continuous_batching=True too, or leave it out")
    assert "a dict, or a JSON object" in error_of(GRPOConfig, transformers_continuous_batching_config="pages")


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"])
def test_losses_of_grpo(loss_type: str) -> None:
    assert make(GRPOConfig, loss_type=loss_type).loss_type == loss_type
    assert "use GRPOConfig" in error_of(RLOOConfig, loss_type=loss_type)


@pytest.mark.parametrize(
    ("loss_type", "reason"),
    [
        ("sapo", "it is not offered yet; it must be one of 'grpo'"),
        ("luspo", "it is not offered yet; it must be one of 'grpo'"),
        ("vespo", "it is not offered yet; it must be one of 'grpo'"),
        ("rloo", "that is the objective of RLOOConfig; it must be one of 'grpo'"),
        ("ppo", "cannot be used: it must be one of 'grpo', 'dr_grpo', 'dapo', 'bnpo', 'cispo'"),
    ],
)
def test_losses_that_grpo_does_not_have(loss_type: str, reason: str) -> None:
    assert reason in error_of(GRPOConfig, loss_type=loss_type)


def test_rloo_has_one_objective() -> None:
    config = make(RLOOConfig, loss_type="rloo")
    assert (config.importance_sampling_level, config.scale_rewards, config.loss_type) == ("sequence", "none", "rloo")
    assert "nothing to correct" in error_of(RLOOConfig, use_bias_correction_kl=True)
    assert "use GRPOConfig" in error_of(RLOOConfig, multi_objective_aggregation="normalize_then_sum")


@pytest.mark.parametrize("config_class", CONFIGS)
def test_bounds_of_the_mismatch_correction(config_class: type[PolicyConfig]) -> None:
    low, high = "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"
    config = make(config_class, vllm_importance_sampling_mode="token_truncate", **{low: 0.5})
    assert config.mismatch_bounds == {"mode": "token_truncate", "clip_min": 0.5, "clip_max": 3.0}
    make(config_class, **{low: 0.5, high: None})
    make(config_class, vllm_importance_sampling_correction=False, **{high: None})


def test_options_that_the_objective_would_not_read() -> None:
    make(GRPOConfig, multi_objective_aggregation="normalize_then_sum")
    message = error_of(GRPOConfig, multi_objective_aggregation="normalize_then_sum", scale_rewards="none")
    assert message.startswith("scale_rewards='none' cannot be used")
    assert message.endswith("leave it 'group'")
    make(GRPOConfig, loss_type="cispo", epsilon_high=5.0)
    assert "leave delta out" in error_of(GRPOConfig, loss_type="cispo", delta=4.0)


@pytest.mark.parametrize(
    ("given_value", "word"),
    [(True, "group"), (False, "none"), ("True", "group"), ("False", "none"), ("batch", "batch")],
)
def test_scale_rewards_takes_booleans(given_value: Any, word: str) -> None:
    assert make(GRPOConfig, scale_rewards=given_value).scale_rewards == word


def test_clip_range_is_symmetric_unless_said() -> None:
    config = make(GRPOConfig, epsilon=0.1)
    assert config.clip_range == (0.1, 0.1)
    assert replace(config, epsilon=0.3).clip_range == (0.3, 0.3)
    assert replace(config, epsilon_high=0.28).clip_range == (0.1, 0.28)


def test_limits_of_ranges_are_allowed() -> None:
    make(GRPOConfig, epsilon=0.0, top_p=1.0, min_p=0.0, top_entropy_quantile=1.0, min_pixels=64, max_pixels=64)
    assert make(GRPOConfig, top_k=None).top_k == 0
    assert make(GRPOConfig, delta=0.5).delta == 0.5


def test_pixel_budget_is_a_range() -> None:
    assert error_of(GRPOConfig, min_pixels=65, max_pixels=64).endswith("it must not be greater than max_pixels=64")


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [((-1.0, 1.0), (-1.0, 1.0)), ([0, 2], (0.0, 2.0)), ("-1,1", (-1.0, 1.0)), (None, None)],
)
def test_reward_clip_range(given_value: Any, expected: Any) -> None:
    assert make(RLOOConfig, reward_clip_range=given_value).reward_clip_range == expected


@pytest.mark.parametrize("given_value", [(1.0, 1.0), (2.0, 1.0), (1.0,), "1", 3.0])
def test_reward_clip_range_needs_two_rising_numbers(given_value: Any) -> None:
    assert error_of(RLOOConfig, reward_clip_range=given_value).startswith("reward_clip_range=")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("temperature", "temperature=..."),
        ("max_new_tokens", "max_completion_length=..."),
        ("num_return_sequences", "num_generations=..."),
        ("do_sample", "always sampled"),
    ],
)
def test_generation_kwargs_hold_no_option(key: str, hint: str) -> None:
    message = error_of(GRPOConfig, generation_kwargs={key: 1})
    assert repr(key) in message
    assert hint in message
    assert make(GRPOConfig, generation_kwargs={"suppress_tokens": [1]}).generation_kwargs == {"suppress_tokens": [1]}


# Processes and devices


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "tp_size"])
def test_rows_are_not_split_over_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ParallelismConfig()
    setattr(plan, name, 2)
    assert f"set {name}=1" in error_of(GRPOConfig, parallelism_config=plan)
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "2")  # as `accelerate launch` does
    assert f"set {name}=1" in error_of(GRPOConfig)


def test_accelerate_does_not_split_batches() -> None:
    assert "split_batches=True" in error_of(GRPOConfig, accelerator_config={"split_batches": True})


def test_one_process_has_one_device() -> None:
    class TwoDevices(GRPOConfig):
        """As on a machine with two devices, in a script that no launcher started."""

        @property
        def n_gpu(self) -> int:
            return 2

    assert "accelerate launch --num_processes 2" in error_of(TwoDevices)


# Batches of completions


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({}, (8, 1)),
        ({"gradient_accumulation_steps": 4}, (32, 4)),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, (16, 2)),
        ({"gradient_accumulation_steps": 4, "generation_batch_size": 24}, (24, 3)),
        ({"steps_per_generation": 3, "generation_batch_size": 24}, (24, 3)),
    ],
)
def test_size_of_a_round(options: dict[str, int], planned: tuple[int, int]) -> None:
    config = make(GRPOConfig, **options)
    assert (config.generation_batch_size, config.steps_per_generation) == planned


def test_size_and_steps_of_a_round_exclude_each_other() -> None:
    message = error_of(GRPOConfig, steps_per_generation=3, generation_batch_size=32)
    assert "exclude each other (3 micro-steps have 24 completions)" in message


def test_round_is_whole_micro_steps() -> None:
    message = error_of(GRPOConfig, generation_batch_size=12, num_generations=2)
    assert "generation_batch_size=12 must be a multiple of 8" in message
    assert message.endswith("Set generation_batch_size to 8 or 16.")


def test_messages_about_cut_groups() -> None:
    message = error_of(GRPOConfig, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert "generation_batch_size=12 (per_device_train_batch_size=4 on 1 process for 3 micro-steps)" in message
    assert message.endswith(
        "Set num_generations to 6 or 12, or per_device_train_batch_size to 8, or gradient_accumulation_steps to 2 or 4."
    )
    given_steps = error_of(GRPOConfig, per_device_train_batch_size=4, steps_per_generation=3)
    assert given_steps.endswith("or steps_per_generation to 2 or 4.")
    given_size = error_of(GRPOConfig, per_device_train_batch_size=4, generation_batch_size=12)
    assert given_size.endswith("Set num_generations to 6 or 12, or generation_batch_size to 8 or 16.")
    nothing_divides = error_of(GRPOConfig, per_device_train_batch_size=1)
    assert "num_generations to" not in nothing_divides
    assert "gradient_accumulation_steps to 8." in nothing_divides


def test_evaluation_batches_have_whole_groups() -> None:
    message = error_of(GRPOConfig, eval_strategy="epoch", num_generations_eval=3)
    assert message.endswith("Set num_generations_eval to 2 or 4, or per_device_eval_batch_size to 6 or 9.")
    assert "the 8 completions of a prompt" in error_of(GRPOConfig, eval_strategy="epoch", per_device_eval_batch_size=4)
    make(GRPOConfig, num_generations_eval=3)  # no evaluation, no rule
    alone = make(GRPOConfig, eval_strategy="epoch", num_generations_eval=1, per_device_eval_batch_size=5)
    assert alone.generations_per_prompt(evaluating=True) == 1
    assert alone.generations_per_prompt(evaluating=False) == 8
    assert make(GRPOConfig).generations_per_prompt(evaluating=True) == 8


SIZES = st.integers(1, 12)


@given(per_device=SIZES, num_processes=SIZES, accumulation=SIZES, num_generations=st.integers(2, 12))
def test_every_proposed_value_makes_whole_groups(
    per_device: int, num_processes: int, accumulation: int, num_generations: int
) -> None:
    sizes = StepSizes(per_device=per_device, num_processes=num_processes, accumulation=accumulation)
    size, steps = plan_round(sizes, None, None)
    assert (size, steps) == (per_device * num_processes * accumulation, accumulation)
    if size % num_generations == 0:
        check_groups(sizes, size, num_generations)
        return
    with pytest.raises(ValueError, match="or a group would be cut") as caught:
        check_groups(sizes, size, num_generations)
    proposal = str(caught.value).partition("Set ")[2].rstrip(".")
    assert "gradient_accumulation_steps" in proposal
    given_values = {
        "num_generations": num_generations,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
    }
    for change in proposal.split(", or "):
        name, _, values = change.partition(" to ")
        for value in values.split(" or "):
            changed = {**given_values, name: int(value)}
            total = changed["per_device_train_batch_size"] * num_processes * changed["gradient_accumulation_steps"]
            assert total % changed["num_generations"] == 0, change


def test_sizes_count_all_processes() -> None:
    sizes = StepSizes(per_device=2, num_processes=3, accumulation=2)
    assert plan_round(sizes, 18, None) == (18, 3)
    with pytest.raises(ValueError, match="must be a multiple of 6, .* on 3 processes"):
        plan_round(sizes, 8, None)
    with pytest.raises(ValueError, match="num_generations_eval to 3 or 6, or per_device_eval_batch_size to 4"):
        check_eval_groups(sizes, 4)
    check_eval_groups(sizes, 3)


# Names that are refused


@pytest.mark.parametrize("config_class", CONFIGS)
@pytest.mark.parametrize("name", RETIRED)
def test_retired_names_say_what_to_write(config_class: type[PolicyConfig], name: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(config_class, **{name: None})
    assert str(caught.value) == f"option {name!r}: {RETIRED[name]}"
    assert name not in {declared.name for declared in fields(config_class)}


def test_retired_names_name_real_options() -> None:
    known = describe_options(GRPOConfig)
    new = "renamed; write "
    renamed = {name: text.removeprefix(new) for name, text in RETIRED.items() if text.startswith(new)}
    assert renamed
    assert set(renamed.values()) <= set(known)
    assert RETIRED["wandb_log_unique_prompts"] == "renamed; write log_unique_prompts"


@pytest.mark.parametrize("name", ["normalize_advantages", "reward_clip_range"])
def test_options_of_rloo_are_named_on_grpo(name: str) -> None:
    with pytest.raises(TypeError, match=f"option '{name}': belongs to RLOOConfig"):
        make(GRPOConfig, **{name: None})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("num_generation", "num_generations"),
        ("max_completions_length", "max_completion_length"),
        ("per_device_train_batchsize", "per_device_train_batch_size"),
        ("learning_rates", "learning_rate"),
    ],
)
def test_unknown_names_say_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(GRPOConfig, **{name: 4})
    assert str(caught.value) == f"unknown option {name!r}; did you mean {nearest!r}?"


def test_unknown_names_that_are_like_no_other() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'zzz'; no option has a name like it \(see docs/options.md\)"):
        make(RLOOConfig, zzz=1)
    check_names(["beta"], ["beta"], {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_server_port": 9}, "vllm_server_port=9 cannot be used: with use_vllm=False nothing would read it"),
        ({"vllm_mode": "server"}, "vllm_mode='server' cannot be used: with use_vllm=False nothing would read it"),
        ({"vllm_structured_outputs_regex": "a"}, "with use_vllm=False nothing would read it"),
        ({"use_vllm": True, "vllm_server_host": "far"}, "with vllm_mode='colocate' nothing would read it"),
        ({"use_vllm": True, "vllm_mode": "near"}, "must be one of 'colocate', 'server'"),
        ({"use_vllm": True, "vllm_model_impl": "torch"}, "must be one of 'vllm', 'transformers', 'auto'"),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 0.0}, "greater than 0 and at most 1"),
        ({"use_vllm": True, "vllm_max_model_length": 1}, "greater than 1"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "divide the number of training processes, which is 1"),
        ({"use_vllm": True, "vllm_engine_kwargs": "eager"}, "a dict, or a JSON object"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 0.0}, "greater than 0 seconds"),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 64},
            "nothing would read it; leave it out; write --max-model-len to `vlmroll serve`",
        ),
    ],
)
def test_options_of_vllm_that_cannot_work(options: dict[str, Any], message: str) -> None:
    assert message in error_of(GRPOConfig, **options)


@pytest.mark.parametrize(
    ("options", "urls"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"vllm_server_host": "far", "vllm_server_port": 9}, "http://far:9"),
        ({"vllm_server_base_url": "http://a:1,http://b:2"}, "http://a:1,http://b:2"),
    ],
)
def test_the_address_of_the_server(options: dict[str, Any], urls: str) -> None:
    assert make(RLOOConfig, use_vllm=True, vllm_mode="server", **options).vllm_urls == urls


def test_subclasses_keep_the_rules() -> None:
    @dataclass(repr=False)
    class MyConfig(GRPOConfig):
        """A config with an option of its own."""

        bonus: float = option(0.0, help="An extra.")

    assert make(MyConfig, bonus=1.0, num_generations=4).bonus == 1.0
    assert "entropy_coef=1.0 cannot be used" in error_of(MyConfig, entropy_coef=1.0)
    with pytest.raises(TypeError, match="num_generation"):
        make(MyConfig, num_generation=4)


# Round trips and the command line


@pytest.mark.parametrize("config_class", CONFIGS)
def test_json_round_trip(config_class: type[PolicyConfig]) -> None:
    config = make(
        config_class,
        gradient_accumulation_steps=4,
        model_init_kwargs={"dtype": "float32"},
        reward_weights=[1.0, 0.5],
        scale_rewards=True,
        hub_token="secret",
        **({"reward_clip_range": (-1.0, 1.0)} if config_class is RLOOConfig else {}),
    )
    text = config.to_json_string()
    assert "secret" not in text + repr(config) + str(config)
    again = config_class.from_dict(json.loads(text))
    assert replace(config, hub_token=None) == again
    assert type(config.to_dict()["generation_batch_size"]) is int
    assert copy.deepcopy(config) == config


def test_from_dict_refuses_unknown_names() -> None:
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        GRPOConfig.from_dict({"temprature": 1.0})


def test_replace_works_out_sizes_anew() -> None:
    config = make(GRPOConfig)
    changed = replace(config, gradient_accumulation_steps=4, per_device_train_batch_size=2)
    assert (changed.generation_batch_size, changed.steps_per_generation) == (8, 4)
    fixed = make(GRPOConfig, steps_per_generation=2)
    assert replace(fixed, gradient_accumulation_steps=4).steps_per_generation == 2  # given, so kept
    assert replace(fixed, per_device_train_batch_size=4).generation_batch_size == 8
    assert isinstance(fixed.generation_batch_size, Derived)
    with pytest.raises(ValueError, match="temperature"):
        replace(config, temperature=0.0)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_command_line_defaults(config_class: type[PolicyConfig]) -> None:
    assert parse(config_class, "--output_dir", "out", "--use_cpu") == make(config_class)


def test_command_line_values() -> None:
    assert "--num_generations" in HfArgumentParser(cast(Any, RLOOConfig)).format_help()
    line = (
        "--use_cpu --bf16 False --num-generations 4 --top_k 20 --min_p 0.1 --scale_rewards True --no_log_multimodal "
        '--generation_kwargs {"suppress_tokens":[1]} --reward_weights 1 0.5 --reward_clip_range=-1,1 '
        "--pad_to_multiple_of 16"
    )
    config = parse(RLOOConfig, *line.split())
    assert (config.bf16, config.num_generations, config.top_k, config.min_p) == (False, 4, 20, 0.1)
    assert (config.scale_rewards, config.log_multimodal) == ("group", False)
    assert (config.generation_kwargs, config.reward_weights) == ({"suppress_tokens": [1]}, [1.0, 0.5])
    assert (config.reward_clip_range, config.pad_to_multiple_of) == ((-1.0, 1.0), 16)
    config = parse(RLOOConfig, "--use_cpu", "--use_vllm", "--vllm_engine_kwargs", '{"enforce_eager":true}')
    assert (config.use_vllm, config.vllm_engine_kwargs) == (True, {"enforce_eager": True})
    with pytest.raises(ValueError, match="sync_ref_model=True cannot be used"):
        parse(RLOOConfig, "--use_cpu", "--sync_ref_model")


@pytest.mark.parametrize(("given_value", "padding"), [("none", None), ("8", 8), (8, 8), (None, None), ("auto", None)])
def test_padding(given_value: Any, padding: int | None) -> None:
    config = make(GRPOConfig, pad_to_multiple_of=given_value)
    assert config.pad_to_multiple_of == padding
    config.pad_to_multiple_of = "auto"
    config.resolve_padding("neuron")
    assert config.pad_to_multiple_of == 128


def test_plain_training_arguments_keep_their_defaults() -> None:
    described = describe_options(GRPOConfig)
    ours = {declared.name: declared for declared in fields(GRPOConfig)}
    for declared in fields(TrainingArguments):
        if declared.name not in described:
            assert ours[declared.name].default == declared.default
            assert declared.default is not MISSING or declared.default_factory is not MISSING


# The options page


def test_options_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert page.partition(MARKER)[0] + MARKER + "\n" == options_page(), (
        "run: python -m vlmroll.config.table docs/options.md"
    )


def test_options_page_has_every_name() -> None:
    page = options_page()
    for name in [*WORKING, *REFUSED, *RETIRED, "normalize_advantages", "reward_clip_range"]:
        assert f"| `{name}` |" in page


def test_options_page_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out == options_page()
    page = tmp_path / "options.md"
    main([str(page)])
    assert page.read_text() == options_page()
    page.write_text(f"old\n{MARKER}\n\nby hand\n")
    main([str(page)])
    assert page.read_text() == options_page() + "\nby hand\n"


@pytest.mark.slow
def test_options_page_as_a_module() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "vlmroll.config.table"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert printed.stdout == options_page()
