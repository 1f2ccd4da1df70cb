"""vLLM in the process of the policy: what it leaves alone, what it takes over, and what it refuses.

What it samples is tested in `tests/sdk/test_generator_contract.py`. Run as a script, this file starts engines in a
process of its own and prints what it saw, since the first import of vLLM in a process is the one that changes things.
"""

import copy
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from engines import (
    CONTEXT,
    ENVIRONMENT,
    MOST_ROWS,
    NEEDS_VLLM,
    Engine,
    adapter_of,
    another,
    engine_of,
    largest_gap,
    model_of,
    perturb,
    tied,
)
from tiny_models import tiny, user
from vlmroll.types import SamplingParams

pytestmark = list(NEEDS_VLLM)
TOLERANCE = 2e-5
GREEDY = SamplingParams(max_tokens=8, temperature=0)
WARM = SamplingParams(max_tokens=8, temperature=0.7, seed=3)


def fresh(name: str, model: Any = None, **more: Any) -> Engine:
    model = model_of(name) if model is None else model
    return another("vllm_colocate", name, model=model, adapter=adapter_of(name), **more)


def assert_is_the_policy(engine: Engine, model: Any = None) -> None:
    reference = engine.reference
    reference.model = engine.model if model is None else model
    expected = reference.generate(engine.prompts, GREEDY, 1).completion_ids
    assert engine.generator.generate(engine.prompts, GREEDY, 1).completion_ids == expected
    warm = engine.generator.generate(engine.prompts, WARM, 3)
    assert largest_gap(engine, warm, 0.7, reference.model) <= TOLERANCE


# In a process of its own.


def process_state() -> dict[str, Any]:
    """What others in the process may rely on."""
    root = logging.getLogger()
    return {
        "random": repr(random.getstate()),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": id(torch.set_num_threads),
        "environment": dict(os.environ),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default type": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "folder": os.getcwd(),
        "logging": (root.level, [str(handler) for handler in root.handlers]),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "garbage": (gc.isenabled(), gc.get_threshold()),
    }


def watch() -> None:
    """Start two engines one after the other and print what they changed and sampled."""
    found: dict[str, Any] = {}
    model = model_of("text")
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = process_state()
    first = fresh("text", model)
    after = process_state()
    found["changed"] = [name for name in before if before[name] != after[name]]
    environment = set(before["environment"].items()) ^ set(after["environment"].items())
    found["environment"] = sorted({name for name, _ in environment})
    found["first"] = first.generator.generate(first.prompts, GREEDY, 1).completion_ids
    runner: Any = first.generator._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    alive = [weakref.ref(runner.model), *(weakref.ref(parameter) for parameter in runner.model.parameters())]
    del runner
    first.generator.close()
    first.generator.close()
    gc.collect()
    found["alive after close"] = sum(ref() is not None for ref in alive)
    second = fresh("text")
    found["second"] = second.generator.generate(second.prompts, GREEDY, 1).completion_ids
    perturb(second.model, 1)
    second.generator.sync_weights(second.model)
    assert_is_the_policy(second)
    assert_is_the_policy(second)
    found["expected"] = first.reference.generate(first.prompts, GREEDY, 1).completion_ids
    found["gradients"] = torch.is_grad_enabled() and first.model(torch.tensor([[5, 6]])).logits.requires_grad
    print("FOUND " + json.dumps(found))


@cache
def watched() -> dict[str, Any]:
    roots = [Path(__file__).resolve().parents[2] / name for name in ("sdk", "processors", "tests")]
    path = os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, (run.stdout + run.stderr)[-4000:]
    return json.loads(lines[0].removeprefix("FOUND "))


def test_an_engine_changes_nothing_else_in_the_process() -> None:
    assert watched()["changed"] == []
    assert watched()["environment"] == []
    assert watched()["gradients"]


def test_engines_run_one_after_the_other() -> None:
    assert watched()["first"] == watched()["second"] == watched()["expected"]


def test_closing_frees_the_weights() -> None:
    assert watched()["alive after close"] == 0


# Weights.


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_an_engine_starts_from_a_policy_with_tied_embeddings_and_an_adapter(name: str) -> None:
    """As a policy is when training goes on from a checkpoint: nothing has been synchronised yet.

    The config may say that the head is tied in one of two places, and transformers and vLLM look at different ones.
    """
    base = tied(tiny(name).model)
    silent = base.config.get_text_config() if name == "qwen2_5_vl" else base.config
    silent.tie_word_embeddings = False
    targets = r".*language_model.*\.(q|down)_proj"
    lora: Any = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    policy: Any = get_peft_model(base, lora).eval()
    engine = fresh(name, policy)
    assert_is_the_policy(engine)
    perturb(policy, 1)
    engine.generator.sync_weights(policy)
    assert_is_the_policy(engine)


def without_a_layer(model: Any) -> None:
    model.model.layers[1].mlp.down_proj = torch.nn.Identity()


def with_a_layer_more(model: Any) -> None:
    model.model.layers[1].mlp.more_proj = torch.nn.Linear(4, 4)


def with_a_bias_more(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.bias = torch.nn.Parameter(torch.ones(64))


def with_a_head_of_its_own(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() + 1)
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


UNFIT: list[tuple[Callable[[Any], None], str]] = [
    (without_a_layer, r"not sent for 1 parameters of the engine: \['model.layers.1.mlp.down_proj.weight'\]"),
    (with_a_layer_more, "no module or parameter named 'layers.1.mlp.more_proj'"),
    (with_a_bias_more, r"\d+ numbers were sent to an engine with \d+: it has no place for some of the weights"),
    (with_a_head_of_its_own, r"\d+ numbers were sent to an engine with \d+: it has no place for some of the weights"),
]


def refuse(engine: Engine, change: Callable[[Any], None], words: str) -> None:
    """Change a copy of the policy so that it does not fit the engine."""
    other = copy.deepcopy(engine.model)
    change(other)
    version = engine.generator.policy_version
    with pytest.raises(ValueError, match=words):
        engine.generator.sync_weights(other)
    assert engine.generator.policy_version == version


@pytest.mark.parametrize(("change", "words"), UNFIT)
def test_weights_that_do_not_fit_are_refused(change: Callable[[Any], None], words: str) -> None:
    refuse(fresh("text"), change, words)


def test_weights_that_fit_are_taken_after_others_were_refused() -> None:
    engine = fresh("text")
    for change, words in UNFIT:
        refuse(engine, change, words)
        engine.generator.sync_weights(engine.model)
        assert_is_the_policy(engine)


def test_a_tied_head_does_not_do_where_the_engine_has_one_of_its_own() -> None:
    engine = engine_of("vllm_colocate", "qwen3_vl")
    try:
        with pytest.raises(ValueError, match=r"not sent for 1 parameters of the engine: \['.*lm_head.weight'\]"):
            engine.generator.sync_weights(tied(tiny("qwen3_vl").model))
    finally:
        engine.generator.sync_weights(engine.model)
    assert_is_the_policy(engine)


# Prompts.


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_prompts_that_would_be_expanded_twice_are_noticed(name: str) -> None:
    engine = engine_of("vllm_colocate", name)
    wrong = [replace(prompt, engine_ids=prompt.prompt_ids) for prompt in engine.prompts[:1]]
    with pytest.raises(ValueError, match=r"prompt 0: the engine used \d+ ids that differ from the \d+ encoded ones"):
        engine.generator.generate(wrong, GREEDY, 1)
    assert_is_the_policy(engine)


def test_more_completions_than_run_at_once() -> None:
    engine = engine_of("vllm_colocate", "qwen3_vl")
    output = engine.generator.generate(engine.prompts, WARM, MOST_ROWS + 8)
    assert [len(group) for group in output.completions] == [MOST_ROWS + 8] * 4
    assert largest_gap(engine, output, 0.7) <= TOLERANCE


def test_more_prompt_tokens_than_are_read_at_once() -> None:
    engine = fresh("text", options={"more": {"max_num_batched_tokens": CONTEXT}})
    (long,) = engine.adapter.encode([{"prompt": user(" ".join(["which"] * 100))}])
    output = engine.generator.generate([long] * 4, WARM, 2)
    assert largest_gap(engine, output, 0.7) <= TOLERANCE


def test_an_interrupted_call_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh("text")
    core, steps = engine.generator._llm.llm_engine, iter(range(100))
    step = core.step

    def interrupted() -> Any:
        if next(steps) == 4:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generator.generate(engine.prompts, replace(WARM, max_tokens=20), 2)
    perturb(engine.model, 1)
    engine.generator.sync_weights(engine.model)
    assert_is_the_policy(engine)


def test_a_ban_reaches_no_other_id() -> None:
    (zero,) = tiny("text").tokenizer.encode("0")
    engine = fresh("text", banned_ids=[zero])
    assert engine.generator.banned_ids == {zero}
    output = engine.generator.generate(engine.prompts, replace(WARM, temperature=2.0, max_tokens=32), 16)
    assert largest_gap(engine, output, 2.0) <= TOLERANCE


# Options.


def test_an_engine_of_less_precision_is_near_the_policy() -> None:
    engine = fresh("text", options={"dtype": "bfloat16"})
    output = engine.generator.generate(engine.prompts, WARM, 4)
    assert 1e-4 < largest_gap(engine, output, 0.7) < 0.3


def test_arguments_of_ones_own_win() -> None:
    engine = fresh("text", options={"max_model_length": 100, "more": {"max_model_len": 64, "seed": 5}})
    assert engine.generator.max_model_length == 64
    assert engine.generator._llm.model_config.seed == 5


def test_sleep_does_nothing_where_there_is_nothing_to_give_back() -> None:
    engine = fresh("text", options={"sleep": True})
    assert_is_the_policy(engine)
    perturb(engine.model, 1)
    engine.generator.sync_weights(engine.model)
    assert_is_the_policy(engine)


def test_an_untested_version_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import vllm  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with caplog.at_level(logging.WARNING):
        fresh("text")
    assert "the installed engine is vLLM 0.99.1; this was tested with 0.32 to 0.33" in caplog.text


if __name__ == "__main__":
    watch()
