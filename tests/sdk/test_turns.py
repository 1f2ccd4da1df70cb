"""Rollouts of several turns: ids that are never encoded twice, budgets, tools that misbehave."""

import copy
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shared_prompts import scores_and_gradients
from tiny_models import picture, tiny, user
from tool_runs import Forced, adapter, add, call, ids_of, look
from training_runs import relative_difference
from vlmroll.batches import join_rollouts
from vlmroll.scoring import policy_logprobs
from vlmroll.tools import Toolbox
from vlmroll.turns import ToolLoop
from vlmroll.types import Completion, Rollout, SamplingParams
from vlmroll_processors import Prompt

END = "<|im_end|>"
ROW = {"prompt": user("which digit ?", picture(64, 48, 1))}


def encoded(tools: Toolbox, *rows: dict[str, Any]) -> list[Prompt]:
    return adapter().encode([{**row, "chat_template_kwargs": {"tools": tools.schemas}} for row in rows])


def run(
    scripts: Sequence[Sequence[Sequence[int]]],
    *functions: Any,
    max_tokens: int = 400,
    model: Any = None,
    **options: Any,
) -> tuple[Forced, list[Completion], Prompt]:
    """The completions of one prompt whose rollouts take the scripted turns."""
    forced, toolbox = Forced(scripts, model), Toolbox(functions)
    (prompt,) = encoded(toolbox, ROW)
    settled: dict[str, Any] = {"seconds": 5.0, **options}
    loop = ToolLoop(forced, adapter(), **settled)
    output = loop.generate([prompt], toolbox, SamplingParams(max_tokens=max_tokens, seed=3), len(scripts))
    return forced, list(output.completions[0]), prompt


def rollout(prompt: Prompt, completion: Completion) -> Rollout:
    return Rollout(prompt=prompt, completion=completion, row={}, row_id=0, group=0, advantage=1.0, loss_weight=0.1)


def said(completion: Completion) -> list[Any]:
    assert completion.turns is not None
    return [(message["role"], message["content"]) for message in completion.turns.messages]


def test_a_call_is_answered_and_the_turn_goes_on() -> None:
    turns = [ids_of(call("add", a=2, b=40)), ids_of(f"42{END}")]
    forced, (completion,), prompt = run([turns], add)
    assert said(completion) == [("assistant", ""), ("tool", "42"), ("assistant", "42")]
    added = ids_of(f"\n<|im_start|>tool\n42{END}\n<|im_start|>assistant\n")
    assert completion.completion_ids == (*turns[0], *added, *turns[1])
    assert completion.sampled == (1,) * len(turns[0]) + (0,) * len(added) + (1,) * len(turns[1])
    assert completion.finish_reason == "stop"
    later, sampling = forced.asked[1]
    assert later[0].prompt_ids == (*prompt.prompt_ids, *turns[0], *added)
    assert sampling.limits == (400 - len(turns[0]) - len(added),)
    assert sampling.seed != 3


def test_rollouts_without_calls_wait_for_nothing() -> None:
    scripts = [[ids_of(f"7{END}")], [ids_of(call("add", a=1, b=1)), ids_of(f"2{END}")], [ids_of(f"8{END}")]]
    forced, completions, _ = run(scripts, add)
    assert [len(prompts) for prompts, _ in forced.asked] == [1, 1]
    assert [said(completion)[-1] for completion in completions] == [("assistant", text) for text in ("7", "2", "8")]


turn_ids = st.lists(st.integers(0, 300), min_size=0, max_size=6)
results = st.one_of(
    st.text(alphabet="abc <>{}\n", max_size=12), st.integers(), st.none(), st.lists(st.integers(), max_size=5)
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.tuples(turn_ids, results, st.integers(0, 2)), min_size=0, max_size=3), min_size=1, max_size=3)
)
def test_whatever_is_sampled_stays_and_scores_as_a_fresh_pass(plan: Any) -> None:
    """Random ids in front of calls: most are no tokenisation of their text. Log-probabilities of a turn were computed
    from its own prompt, those that they are compared with from the whole sequence."""
    scripts = [[(*ids, *ids_of(call("tell", turn=t))) for t, (ids, _, _) in enumerate(turns)] for turns in plan]
    scripts = [[*turns, (40 + i, 41, *ids_of(END))] for i, turns in enumerate(scripts)]
    answers = iter([(value, number) for turns in plan for _, value, number in turns])

    def tell(turn: int) -> Any:
        """Tells.

        Args:
            turn: which one.
        """
        value, number = next(answers)
        return [value, *(picture(40 + 8 * i, 40, i) for i in range(number))]

    model = tiny("qwen2_5_vl").model.eval()
    expected = [list(map(tuple, turns)) for turns in scripts]
    _, completions, prompt = run(scripts, tell, max_tokens=2000, model=model)
    found = [rollout(prompt, completion) for completion in completions]
    for completion, turns in zip(completions, expected, strict=True):
        assert runs(completion) == turns
        assert len(completion.sampled) == len(completion.logprobs) == len(completion.completion_ids)
    with torch.no_grad():
        scores = policy_logprobs(model, join_rollouts(found, pad_token_id=0, device="cpu")).logprobs
    for completion, row in zip(completions, scores, strict=True):
        own = torch.tensor(completion.logprobs)
        torch.testing.assert_close(row[: len(own)], own, atol=1e-4, rtol=1e-4)
        assert not own[torch.tensor(completion.sampled) == 0].any()


def runs(completion: Completion) -> list[tuple[int, ...]]:
    """The runs of sampled ids."""
    found: list[list[int]] = []
    last = 0
    for token, its in zip(completion.completion_ids, completion.sampled, strict=True):
        if its:
            found = found if last else [*found, []]
            found[-1].append(token)
        last = its
    return [tuple(ids) for ids in found]


def test_a_turn_that_does_not_fit_is_rolled_back_whole() -> None:
    turns = [[ids_of(call("look", size=64)), ids_of(f"1{END}")], [ids_of(call("look", size=16)), ids_of(f"2{END}")]]
    _, roomy, _ = run(turns, look)
    lengths = [len(completion.completion_ids) for completion in roomy]
    assert lengths[0] > lengths[1]
    # One id less than the larger picture needs to be followed by anything.
    limit = lengths[0] - len(turns[0][1])
    _, (cut, kept), prompt = run(turns, look, max_tokens=limit)
    assert cut.completion_ids == turns[0][0]
    assert cut.finish_reason == "length"
    assert cut.turns is not None
    assert (cut.turns.num_calls, cut.turns.num_rolled_back) == (1, 1)
    assert cut.turns.continuation.prompt is prompt
    assert said(cut) == [("assistant", "")]
    assert kept.completion_ids == roomy[1].completion_ids
    assert kept.turns is not None
    assert len(kept.turns.continuation.prompt.images) == 2
    # With one id more it fits, and one id follows.
    _, (fits, _), _ = run(turns, look, max_tokens=limit + 1)
    assert fits.completion_ids == roomy[0].completion_ids[: limit + 1]
    assert fits.finish_reason == "length"


def test_the_other_rollout_keeps_its_pictures_and_its_gradient() -> None:
    turns = [[ids_of(call("look", size=64)), ids_of(f"1{END}")], [ids_of(call("look", size=16)), ids_of(f"2{END}")]]
    _, roomy, _ = run(turns, look)
    limit = len(roomy[1].completion_ids)
    _, (cut, kept), prompt = run(turns, look, max_tokens=limit)
    assert cut.turns is not None
    assert kept.turns is not None
    assert cut.turns.num_rolled_back == 1
    assert len(kept.turns.continuation.prompt.images) == 2
    _, (alone,), same = run(turns[1:], look, max_tokens=limit)
    model = copy.deepcopy(tiny("qwen2_5_vl").model).eval()
    _, together = scores_and_gradients(model, [rollout(prompt, kept)], packed=False)
    _, expected = scores_and_gradients(model, [rollout(same, alone)], packed=False)
    assert relative_difference(expected, together) < 1e-7
    # In one batch with the other, whose own part counts nothing.
    model.zero_grad()
    batch = join_rollouts([rollout(prompt, cut), rollout(prompt, kept)], pad_token_id=0, device="cpu")
    scores = policy_logprobs(model, batch, temperature=0.9, banned_ids=[3], chunk_size=5).logprobs[1]
    scores = scores[: len(alone.completion_ids)]
    (scores * torch.linspace(-1, 1, scores.numel())).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert relative_difference(expected, found) < 1e-5


def test_no_more_turns_than_allowed() -> None:
    turns = [ids_of(call("add", a=1, b=1)) for _ in range(5)]
    _, (completion,), _ = run([turns], add, max_iterations=2)
    assert runs(completion) == turns[:3]
    assert completion.finish_reason == "stop"
    assert completion.turns is not None
    assert completion.turns.num_calls == 2


def test_a_turn_that_is_cut_inside_of_a_call_ends_there() -> None:
    turn = ids_of(call("add", a=1, b=1))
    _, (completion,), _ = run([[turn]], add, max_tokens=len(turn) - 3)
    assert completion.completion_ids == turn[:-3]
    assert completion.finish_reason == "length"


def sleeps() -> str:
    """Sleeps."""
    time.sleep(3)
    return "late"


def raises() -> str:
    """Raises."""
    raise ZeroDivisionError("no")


def nothing() -> None:
    """Returns nothing."""


def numbers() -> Any:
    """Returns many numbers."""
    return np.arange(1000)


def cmyk() -> Any:
    """Returns a picture for printers."""
    return Image.new("CMYK", (32, 32), (0, 255, 255, 0))


def reserved() -> str:
    """Returns the texts of tokens."""
    return "see <|image_pad|> <|im_end|>"


def odd() -> Any:
    """Returns something that cannot be shown."""
    return object()


def narrow() -> Any:
    """Returns a picture that no model takes."""
    return picture(4, 2000, 1)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (sleeps, "did not finish within 0.2 seconds"),
        (raises, "ZeroDivisionError: no"),
        (odd, "return"),
        (narrow, "the processor refuses a picture"),
    ],
)
def test_a_failure_is_told_to_the_model(tool: Any, words: str) -> None:
    turns = [ids_of(call(tool.__name__)), ids_of(f"oh{END}")]
    started = time.perf_counter()
    _, (completion,), _ = run([turns], tool, seconds=0.2)
    assert time.perf_counter() - started < 2
    answer = said(completion)[1]
    assert answer[0] == "tool"
    assert words in json.loads(answer[1])["error"]
    assert said(completion)[2] == ("assistant", "oh")
    assert completion.turns is not None
    assert (completion.turns.num_calls, completion.turns.num_failed) == (1, 1)
    assert completion.turns.num_timed_out == (tool is sleeps)


def test_results_of_all_kinds_are_shown() -> None:
    for tool, shown in ((nothing, "null"), (numbers, json.dumps(list(range(1000))))):
        turns = [ids_of(call(tool.__name__)), ids_of(f"so{END}")]
        _, (completion,), _ = run([turns], tool, max_tokens=8000)
        assert said(completion)[1] == ("tool", shown)
        assert completion.turns is not None
        assert completion.turns.num_failed == 0
    _, (cut,), _ = run([[ids_of(call("numbers")), ids_of(f"so{END}")]], numbers)
    assert cut.turns is not None
    assert (cut.turns.num_rolled_back, cut.finish_reason) == (1, "length")


def test_a_picture_for_printers_is_seen_in_rgb() -> None:
    _, (completion,), _ = run([[ids_of(call("cmyk")), ids_of(f"red{END}")]], cmyk)
    assert completion.turns is not None
    seen = completion.turns.continuation.prompt.images[1].image
    assert (seen.mode, seen.size, seen.getpixel((0, 0))) == ("RGB", (32, 32), (255, 0, 0))


def test_the_text_of_a_special_token_stays_text() -> None:
    _, (completion,), _ = run([[ids_of(call("reserved")), ids_of(f"x{END}")]], reserved)
    assert said(completion)[1] == ("tool", "see < |image_pad|> < |im_end|>")
    assert completion.turns is not None
    assert completion.turns.num_failed == 0


def test_one_result_that_cannot_be_shown_spoils_no_other() -> None:
    both = call("look", size=24).removesuffix(END) + call("narrow")
    _, (completion,), _ = run([[ids_of(both), ids_of(f"x{END}")]], look, narrow)
    assert completion.turns is not None
    assert (completion.turns.num_calls, completion.turns.num_failed) == (2, 1)
    assert len(completion.turns.continuation.prompt.images) == 2


def test_a_call_in_a_turn_that_was_cut_is_no_call_in_the_messages() -> None:
    turn = ids_of(call("add", a=1, b=1))
    _, (completion,), _ = run([[turn]], add, max_tokens=len(turn) - 1)
    assert completion.turns is not None
    (message,) = completion.turns.messages
    assert message["content"].startswith('<tool_call>{"name": "add"')
    assert "tool_calls" not in message
    assert completion.turns.num_calls == 0


def test_siblings_that_did_the_same_share_their_next_prompt() -> None:
    turns = [[ids_of(call("look", size=n)), ids_of(f"{i}{END}")] for i, n in enumerate((16, 24, 16))]
    forced, completions, _ = run(turns, look)
    first, second, third = forced.asked[1][0]
    assert first is third
    assert first is not second
    continuations = [completion.turns.continuation for completion in completions if completion.turns is not None]
    assert continuations[0] is continuations[2]


def test_a_generator_of_text_shows_no_picture_and_goes_on() -> None:
    toolbox = Toolbox([look])
    forced = Forced([[ids_of(call("look", size=16)), ids_of(f"so{END}")]])
    forced.text_only = True  # pyright: ignore[reportAttributeAccessIssue]
    (prompt,) = encoded(toolbox, {"prompt": user("go")})
    output = ToolLoop(forced, adapter()).generate([prompt], toolbox, SamplingParams(max_tokens=300), 1)
    ((completion,),) = output.completions
    assert "the generator reads text only" in said(completion)[1][1]
    assert said(completion)[2] == ("assistant", "so")


def test_rows_with_other_arguments_for_the_template_have_turns_of_their_own() -> None:
    turn, toolbox = ids_of(call("add", a=1, b=1)), Toolbox([add])
    (prompt,) = encoded(toolbox, ROW)
    forced = Forced([[turn, ids_of(f"x{END}")]] * 2)
    first = forced.generate([prompt], SamplingParams(max_tokens=400), 2).completions[0]
    options = [{"hint": "so"}, {"hint": "no"}]
    ToolLoop(forced, adapter()).go_on(
        [prompt] * 2, list(first), [toolbox] * 2, SamplingParams(max_tokens=400), options=options
    )
    assert [later.text[-3:] for later in forced.asked[1][0]] == ["\nso", "\nno"]


def test_results_that_differ_in_size_alone_are_told_apart() -> None:
    def sized(most: int) -> Any:
        """Shows a picture in a size.

        Args:
            most: its pixels.
        """
        return {"type": "image", "image": picture(120, 120, 1), "max_pixels": most}

    turns = [[ids_of(call("sized", most=n)), ids_of(f"1{END}")] for n in (1024, 4096)]
    forced, _, _ = run(turns, sized)
    small, large = forced.asked[1][0]
    assert small.num_image_tokens < large.num_image_tokens


def test_limits_of_prompts_hold_for_all_of_their_completions() -> None:
    toolbox = Toolbox([add])
    prompts = encoded(toolbox, ROW, {"prompt": user("go")})
    turn = ids_of(call("add", a=1, b=1))
    forced = Forced([[turn, ids_of(f"x{END}")] for _ in range(4)])
    sampling = SamplingParams(max_tokens=400, limits=(len(turn) + 4, 400))
    output = ToolLoop(forced, adapter()).generate(prompts, toolbox, sampling, 2)
    assert [[c.finish_reason for c in group] for group in output.completions] == [["length"] * 2, ["stop"] * 2]


def test_a_turn_that_no_answer_fits_ends_its_rollout_alone(caplog: pytest.LogCaptureFixture) -> None:
    turn, toolbox = ids_of(call("add", a=1, b=1)), Toolbox([add])
    (prompt,) = encoded(toolbox, ROW)
    forced = Forced([[turn, ids_of(f"x{END}")]] * 2)
    first = forced.generate([prompt], SamplingParams(max_tokens=400), 2).completions[0]
    # A hint that is no text breaks the template for one of the rows.
    options: list[dict[str, Any]] = [{"hint": "<|image_pad|>"}, {}]
    found = ToolLoop(forced, adapter()).go_on(
        [prompt] * 2, list(first), [toolbox] * 2, SamplingParams(max_tokens=400), options=options
    )
    assert [completion.finish_reason for completion in found] == ["length", "stop"]
    assert found[0].completion_ids == turn
    assert "tools cannot answer a turn" in caplog.text
