"""What vLLM is asked: options, bans, seeds, and what is refused before anything is sent. No vLLM is needed here."""

import importlib.util
import logging
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from engines import adapter_of, prompts_of
from tiny_models import picture, tiny, user
from vlmroll.generators import vllm_requests
from vlmroll.generators.vllm_requests import (
    Bans,
    RequestMaker,
    bans_of,
    check_extra,
    check_version,
    output_of,
    require_vllm,
    truncates,
)
from vlmroll.types import Completion, SamplingParams
from vlmroll_processors import load_adapter

NOTHING = Bans(words=(), others=())


def maker(**more: Any) -> RequestMaker:
    given: dict[str, Any] = {"bans": NOTHING, "stop_ids": [319], **more}
    return RequestMaker(**given)


def options(sampling: SamplingParams, n: int = 1, **more: Any) -> dict[str, Any]:
    (request,) = maker(**more).make(prompts_of("text")[:1], sampling, n)
    return dict(request.options)


# Options.


def test_options_are_vllms_names_of_the_sampling_parameters() -> None:
    sampling = SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, seed=3
    )
    found = options(sampling, 4)
    expected = {"n": 4, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1}
    expected |= {
        "repetition_penalty": 1.2,
        "logprobs": 0,
        "stop_token_ids": [319],
        "bad_words": [],
        "detokenize": False,
    }
    assert {name: value for name, value in found.items() if name != "seed"} == expected
    assert type(found["seed"]) is int


def test_what_is_off_is_off_for_vllm_too() -> None:
    found = options(SamplingParams())
    off = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0}
    assert found | off == found
    assert "seed" not in found
    assert "logit_bias" not in found
    assert "structured_outputs" not in found


def test_options_of_ones_own_are_added_to_ours() -> None:
    bans = Bans(words=("x",), others=(220,))
    extra = {"stop_token_ids": [7], "bad_words": ["y"], "logit_bias": {5: 1.0}, "stop": ["."], "min_tokens": 2}
    found = options(SamplingParams(extra=extra), bans=bans)
    assert found["stop_token_ids"] == [7, 319]
    assert found["bad_words"] == ["x", "y"]
    assert found["logit_bias"] == {"220": -100.0, "5": 1.0}
    assert found["stop"] == ["."]
    assert found["detokenize"] is True, "stop strings are looked for in text"
    assert found["min_tokens"] == 2
    assert extra["bad_words"] == ["y"], "what was given stays as it is"


def test_ignore_eos_leaves_the_stop_ids_of_ones_own() -> None:
    assert options(SamplingParams(extra={"ignore_eos": True, "stop_token_ids": [7]}))["stop_token_ids"] == [7]
    assert options(SamplingParams(extra={"ignore_eos": False}))["stop_token_ids"] == [319]


def test_a_regular_expression_goes_along() -> None:
    assert options(SamplingParams(), regex="[0-9]+")["structured_outputs"] == {"regex": "[0-9]+"}


def test_a_bias_of_ones_own_does_not_lift_a_ban() -> None:
    found = options(SamplingParams(extra={"logit_bias": {220: 3.0}}), bans=Bans(words=(), others=(220,)))
    assert found["logit_bias"] == {"220": -100.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stop_token_id", "vLLM has no 'stop_token_id' that could be set here; did you mean 'stop_token_ids'?"),
        ("presence_penality", "did you mean 'presence_penalty'?"),
        ("num_beams", "it takes ['allowed_token_ids', 'bad_words',"),
        ("n", "generation_kwargs: 'n' is set by num_generations"),
        ("max_tokens", "'max_tokens' is set by max_completion_length"),
        ("seed", "'seed' is set by the run's seed"),
        ("top_k", "'top_k' is set by the option top_k"),
        ("logprobs", "vLLM has no 'logprobs' that could be set here"),
        ("prompt_logprobs", "vLLM has no 'prompt_logprobs' that could be set here"),
        ("detokenize", "vLLM has no 'detokenize' that could be set here"),
        ("structured_outputs", "vLLM has no 'structured_outputs' that could be set here"),
    ],
)
def test_options_that_are_not_offered_are_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        options(SamplingParams(extra={name: 2}))
    with pytest.raises(ValueError, match=re.escape(message)):
        check_extra({"stop": ["."], name: 2})


def test_repetition_detection_is_refused() -> None:
    with pytest.raises(ValueError, match="repetition_detection"):
        check_extra({"repetition_detection": {"max_pattern_size": 1, "min_count": 2}})


def test_a_temperature_that_vllm_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        options(SamplingParams(temperature=2.5))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(top_k=5), True),
        (SamplingParams(min_p=0.1), True),
        (SamplingParams(temperature=0, top_p=0.9, top_k=5, min_p=0.1), False),
        (SamplingParams(repetition_penalty=1.5, extra={"logit_bias": {5: 1.0}}), False),
    ],
)
def test_what_truncates(sampling: SamplingParams, expected: bool) -> None:
    assert truncates(sampling) is expected


# Seeds. vLLM gives the siblings of a prompt the seeds that follow the prompt's own.


def seeds(seed: int, count: int) -> list[int]:
    asked = prompts_of("text")[:1] * count
    return [request.options["seed"] for request in maker().make(asked, SamplingParams(seed=seed), 2)]


def test_no_two_completions_of_a_call_or_of_the_next_share_a_seed() -> None:
    starts = sorted(seed for run in range(8) for seed in seeds(run, 200))
    assert min(after - before for before, after in zip(starts, starts[1:], strict=False)) > 10_000
    assert all(0 <= seed < 2**63 - 2**20 for seed in starts)


def test_a_seed_depends_on_the_calls_seed_and_the_prompts_place_alone() -> None:
    assert seeds(1, 5) == seeds(1, 9)[:5]
    assert seeds(1, 5) != seeds(2, 5)
    assert seeds(2**63 - 1, 1) != seeds(2**63 - 2, 1)


# Bans.


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_every_vision_id_is_banned_by_its_word(name: str) -> None:
    adapter = adapter_of(name)
    bans = bans_of(adapter, adapter.vision_ids)
    ids = [adapter.tokenizer.encode(word, add_special_tokens=False) for word in bans.words]
    assert sorted(ids) == [[id] for id in sorted(adapter.vision_ids)]
    assert bans.others == ()


def test_ids_that_no_word_gives_are_banned_by_a_bias() -> None:
    """A space, a line break, an id beyond the tokenizer."""
    bans = bans_of(adapter_of("text"), frozenset({220, 198, 330}))
    assert bans == Bans(words=(), others=(198, 220, 330))


def reached(words: tuple[str, ...]) -> set[int]:
    """The ids that vLLM makes of bad words: each word as it is, and behind a space where that is one token too."""
    tokenizer = tiny("text").tokenizer
    found: set[int] = set()
    for word in words:
        alone, behind = (tokenizer.encode(text + word.lstrip(), add_special_tokens=False) for text in ("", " "))
        found |= {*alone, *(behind if len(behind) == len(alone) and behind[0] != alone[0] else ())}
    return found


def test_a_ban_reaches_no_other_id() -> None:
    adapter = adapter_of("text")
    for token_id in range(317):
        bans = bans_of(adapter, frozenset({token_id}))
        assert reached(bans.words) | set(bans.others) == {token_id}


def test_every_banned_id_is_reached() -> None:
    banned = frozenset(range(0, 330, 3))
    bans = bans_of(adapter_of("text"), banned)
    assert reached(bans.words) | set(bans.others) >= banned


# Prompts that cannot be sent.


def test_a_prompt_that_is_too_long_is_named() -> None:
    asked = load_adapter(tiny("qwen3_vl").processor).encode(
        [{"prompt": user("red")}, {"prompt": user("which digit ?", picture(64, 64, 1))}]
    )
    length, pictures = asked[1].num_tokens, asked[1].num_image_tokens
    assert pictures == 16
    fits = maker(max_model_length=length + 8)
    assert len(fits.make(asked, SamplingParams(max_tokens=8), 1)) == 2
    message = (
        f"prompt 1: it has {length} tokens (16 of pictures), and with 9 for the completion that is more than vLLM's "
        f"context of {length + 8}; shorten it, or raise vllm_max_model_length"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        fits.make(asked, SamplingParams(max_tokens=9), 1)
    assert len(maker().make(asked, SamplingParams(max_tokens=10**6), 1)) == 2


def test_a_prompt_with_videos_is_named() -> None:
    film = {"video": [picture(32, 32, seed) for seed in range(4)], "sample_fps": 2.0}
    asked = adapter_of("qwen3_vl").encode([{"prompt": user("red")}, {"prompt": user("red"), "video": film}])
    assert len(asked[1].videos) == 1
    with pytest.raises(ValueError, match=r"prompt 1: it has videos, .*use_vllm=False"):
        maker().make(asked, SamplingParams(), 1)


@pytest.mark.parametrize(("count", "n"), [(0, 1), (2, 0)])
def test_nothing_to_generate_is_refused(count: int, n: int) -> None:
    with pytest.raises(ValueError, match=f"nothing to generate: {count} prompts, {n} generations each"):
        maker().make(prompts_of("text")[:count], SamplingParams(), n)


# What comes back, and with which vLLM.


def test_other_ids_than_the_encoded_ones_are_noticed() -> None:
    asked = prompts_of("qwen3_vl")[:2]
    requests = maker().make(asked, SamplingParams(), 1)
    group = (Completion(completion_ids=(7,), logprobs=(-1.0,), finish_reason="length"),)
    same = [list(prompt.prompt_ids) for prompt in asked]
    assert output_of(requests, same, [group, group], 1).prompt_ids == tuple(prompt.prompt_ids for prompt in asked)
    with pytest.raises(ValueError, match="prompt 1: the engine used"):
        output_of(requests, [same[0], list(asked[1].engine_ids)], [group, group], 1)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1", "0.33", "0.33.9+cu130", "dev", ""])
def test_tested_versions_and_unreadable_ones_pass_without_a_word(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_version(version, "it")
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.9.2", "1.0.0", "0.100"])
def test_other_versions_are_warned_of(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version, "the server at X")
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the server at X is vLLM {version}; this was tested with 0.32 to 0.33. Run `vlmroll check` before a long run"
    )


def test_without_vllm_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    with pytest.raises(ImportError, match=r'vLLM is not installed; run: python -m pip install "vlmroll\[vllm\]"'):
        require_vllm()
    assert vllm_requests.INSTALL == 'python -m pip install "vlmroll[vllm]"'


def test_without_vllm_no_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlmroll.generators.vllm_colocate import VLLMColocateGenerator

    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    with pytest.raises(ImportError, match="vLLM is not installed"):
        VLLMColocateGenerator(tiny("text").model, adapter_of("text"))


def test_the_generators_of_vllm_are_imported_without_it() -> None:
    names = ("vllm_requests", "vllm_http", "vllm_colocate", "vllm_server")
    lines = [*(f"import vlmroll.generators.{name}" for name in names), "import sys", "assert 'vllm' not in sys.modules"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", "; ".join(lines)], env=environment, check=True, timeout=120)
