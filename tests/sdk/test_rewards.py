"""Reward functions of every form, what they are given, what they may return, and sequence-classification models."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from tiny_models import picture, randomise, tiny, tokenizer, user
from vlmroll.metrics import Metrics
from vlmroll.rewards import ModelReward, RewardSuite
from vlmroll.rewards.arguments import completion_of
from vlmroll.types import Completion, Rollout
from vlmroll_processors import Prompt, load_adapter

NAN = float("nan")


def rollout(number: int, row: dict[str, Any] | None = None, ids: Sequence[int] = (7, 8)) -> Rollout:
    return Rollout(
        prompt=Prompt(prompt_ids=(5,), engine_ids=(5,)),
        completion=Completion(completion_ids=tuple(ids), logprobs=(-1.0,) * len(ids), finish_reason="stop"),
        row={"prompt": "hi"} if row is None else row,
        row_id=number,
        group=0,
    )


def score(
    *functions: Callable[..., Any], rollouts: Sequence[Rollout] | None = None, metrics: Metrics | None = None
) -> list[dict[str, float | None]]:
    """The rewards of three rollouts, or of those given."""
    found = [rollout(40), rollout(41), rollout(42)] if rollouts is None else rollouts
    texts = [f"text {i}" for i in range(len(found))]
    scored = RewardSuite(list(functions)).score(found, texts, "state", Metrics("T") if metrics is None else metrics)
    assert [one.row_id for one in scored] == [one.row_id for one in found]
    return [dict(one.rewards) for one in scored]


def column(rewards: Sequence[dict[str, float | None]], name: str) -> list[float | None]:
    return [row[name] for row in rewards]


def test_sync_and_async_functions_mix_and_keep_their_order() -> None:
    running: list[str] = []

    def plain(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(text[-1]) for text in completions]

    async def slow(completions: list[str]) -> list[float]:
        running.append("slow")
        await asyncio.sleep(0.02)
        assert running == ["slow", "quick"], "they wait at the same time"
        return [1.0, 2.0, 3.0]

    class Quick:
        async def __call__(self, prompts: list[str]) -> list[float]:
            running.append("quick")
            await asyncio.sleep(0)
            return [4.0, 5.0, 6.0]

    found = score(slow, plain, Quick())
    assert list(found[0]) == ["slow", "plain", "Quick"]
    assert column(found, "slow") == [1, 2, 3]
    assert column(found, "plain") == [0, 1, 2]
    assert column(found, "Quick") == [4, 5, 6]


def test_async_functions_work_where_a_loop_runs_and_share_one_loop() -> None:
    loops: list[Any] = []

    async def reward(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    async def notebook() -> list[dict[str, float | None]]:
        return score(reward)

    assert column(asyncio.run(notebook()), "reward") == [0, 0, 0]
    score(reward)
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, None, NAN], [1.0, None, None]),
        ([None] * 3, [None] * 3),
        ([True, False, 2], [1.0, 0.0, 2.0]),
        (np.array([1.5, np.nan, 2.0], dtype=np.float32), [1.5, None, 2.0]),
        ([np.float32(0.5), np.int64(3), np.bool_(True)], [0.5, 3.0, 1.0]),
        (torch.tensor([1.5, NAN, 2.0]), [1.5, None, 2.0]),
        ([torch.tensor(0.5), torch.tensor([3]), torch.tensor(True)], [0.5, 3.0, 1.0]),
        ((0.0, -1.0, 1e30), [0.0, -1.0, 1e30]),
    ],
    ids=str,
)
def test_numbers_of_every_kind(values: Any, expected: list[float | None]) -> None:
    def reward(**kwargs: Any) -> Any:
        return values

    found = column(score(reward), "reward")
    assert found == expected
    assert {type(value) for value in found} <= {float, type(None)}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "reward function 'reward' returned 2 for 3 completions"),
        ([1.0] * 4, "reward function 'reward' returned 4 for 3 completions"),
        (1.0, "reward function 'reward' returned a float; return a list of 3 rewards"),
        (None, "reward function 'reward' returned a NoneType; return a list of 3 rewards"),
        (torch.tensor(1.0), "reward function 'reward' returned a float; return a list of 3 rewards"),
        ({"a": 1, "b": 2, "c": 3}, "reward function 'reward' returned a dict; return a list of 3 rewards"),
        ([1.0, float("inf"), 0.0], "reward function 'reward' gave inf for row 41; rewards must be finite"),
        ([1.0, 0.0, np.float32("-inf")], "reward function 'reward' gave -inf for row 42; rewards must be finite"),
        ([1.0, "good", 0.0], "reward function 'reward' gave 'good' for row 41; a reward is a number or None"),
        ("abc", "reward function 'reward' gave 'a' for row 40; a reward is a number or None"),
        ([[1.0], [2.0], [3.0]], r"reward function 'reward' gave \[1.0\] for row 40"),
        ([0.0, torch.tensor([1.0, 2.0]), 0.0], r"reward function 'reward' gave tensor\(.* for row 41"),
        ([0.0, 0.0, np.zeros(2)], r"reward function 'reward' gave array\(.* for row 42"),
    ],
    ids=str,
)
@pytest.mark.parametrize("waits", [False, True])
def test_other_results_are_refused_by_function_and_row(values: Any, message: str, waits: bool) -> None:
    def reward(**kwargs: Any) -> Any:
        return values

    async def later(**kwargs: Any) -> Any:
        return values

    later.__name__ = "reward"
    with pytest.raises(ValueError, match=message):
        score(later if waits else reward)


def test_functions_get_the_columns_that_they_name() -> None:
    seen: dict[str, Any] = {}
    rows = [{"prompt": "a", "answer": 1, "level": "x"}, {"prompt": "b", "answer": 2}]

    def named(answer: list[int], completions: list[str]) -> list[float]:
        seen["named"] = (answer, completions)
        return [0.0] * 2

    def optional(completions: list[str], missing: str = "default") -> list[float]:
        seen["optional"] = missing
        return [0.0] * 2

    def everything(**kwargs: Any) -> list[float]:
        seen["all"] = kwargs
        return [0.0] * 2

    score(named, optional, everything, rollouts=[rollout(0, rows[0]), rollout(1, rows[1], ids=[9])])
    assert seen["named"] == ([1, 2], ["text 0", "text 1"])
    assert seen["optional"] == "default"
    given = seen["all"]
    assert given["prompts"] == ["a", "b"]
    assert given["completion_ids"] == [[7, 8], [9]]
    assert given["level"] == ["x", None]
    assert given["images"] == [[], []]
    assert given["trainer_state"] == "state"
    assert set(given) == {
        *("prompts", "completions", "completion_ids", "images", "answer", "level"),
        *("trainer_state", "log_metric", "log_extra"),
    }


def test_functions_get_the_pictures() -> None:
    rows = [{"prompt": user("a", picture(64, 48, 1), picture(32, 40, 2))}, {"prompt": user("b")}]
    prompts = load_adapter(tiny("qwen3_vl").processor).encode(rows)
    done = Completion(completion_ids=(7,), logprobs=(-1.0,), finish_reason="stop")
    found = [
        Rollout(prompt=prompt, completion=done, row=row, row_id=i, group=i)
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]

    def area(images: list[list[Any]]) -> list[float]:
        assert images[0][0].tobytes() == picture(64, 48, 1).tobytes()
        return [float(sum(image.width * image.height for image in row)) for row in images]

    assert column(score(area, rollouts=found), "area") == [64 * 48 + 32 * 40, 0]


def test_completions_have_the_form_of_their_prompts() -> None:
    assert completion_of("say", "yes") == "yes"
    assert completion_of(user("say"), "yes") == [{"role": "assistant", "content": "yes"}]
    begun = [*user("say"), {"role": "assistant", "content": "Well, "}]
    assert completion_of(begun, "yes") == [{"role": "assistant", "content": "Well, yes"}]
    parts = [*user("say"), {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
    assert completion_of(parts, "yes") == [{"role": "assistant", "content": "Well, yes"}]


def reward_named(name: str) -> Callable[..., list[float]]:
    def function(**kwargs: Any) -> list[float]:
        return [0.0]

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "a", "a"], ["a", "a_2", "a_3"]),
        (["acc_format", "acc", "acc"], ["acc_format", "acc", "acc_2"]),
        (["a_2", "a", "a"], ["a_2", "a", "a_3"]),
        (["a", "a", "a_2"], ["a", "a_2", "a_2_2"]),
    ],
)
def test_names_are_unique_and_kept_where_they_are(given: list[str], expected: list[str]) -> None:
    assert RewardSuite([reward_named(name) for name in given]).names == expected


def test_functions_of_one_name_keep_their_own_rewards() -> None:
    def constant(value: float) -> Callable[..., list[float]]:
        def a(**kwargs: Any) -> list[float]:
            return [value] * 3

        return a

    first, second = constant(1.0), constant(2.0)
    first.__name__ = "a_2"
    assert score(first, second, constant(3.0))[0] == {"a_2": 1.0, "a": 2.0, "a_3": 3.0}


def test_partials_lambdas_and_objects() -> None:
    def above(completions: list[str], threshold: int) -> list[float]:
        return [float(int(text[-1]) > threshold) for text in completions]

    class Scorer:
        def __call__(self, completions: list[str]) -> list[float]:
            return [9.0] * len(completions)

        def method(self, **kwargs: Any) -> list[float]:
            return [8.0] * 3

    one: Callable[..., Any] = lambda completions, **kwargs: [1.0] * len(completions)  # noqa: E731  # pyright: ignore
    found = score(partial(above, threshold=0), partial(above, threshold=1), one, one, Scorer(), Scorer().method)
    assert found[1] == {"above": 1, "above_2": 0, "<lambda>": 1, "<lambda>_2": 1, "Scorer": 9, "method": 8}


def test_weights_and_totals() -> None:
    suite = RewardSuite([reward_named("a"), reward_named("b")], [2, 0.5])
    total = suite.total(torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]]))
    assert total[:2].tolist() == [3.0, 1.0]
    assert total[2].isnan()
    assert RewardSuite([reward_named("a")]).weights == [1.0]
    with pytest.raises(ValueError, match="reward_weights has 1 values for 2 reward functions"):
        RewardSuite([reward_named("a"), reward_named("b")], [1.0])
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        RewardSuite([])


def test_a_process_without_a_share_calls_no_function() -> None:
    """It has no rows, so no columns either: a function that names one could not be called."""

    def needs(answer: list[int]) -> list[float]:
        return [float(value) for value in answer]

    assert score(needs, rollouts=[]) == []


@pytest.mark.parametrize("value", [2, 2.0, True + 1, np.float32(2), torch.tensor(2.0)], ids=repr)
def test_functions_log_metrics_and_columns(value: Any) -> None:
    def reward(log_metric: Callable[..., None], log_extra: Callable[..., None]) -> list[float]:
        log_metric("tries", value)
        log_metric("tries", 4)
        log_extra("found", ["a", "b", "c"])
        log_extra("size", np.array([1, 2, 3]))
        return [0.0] * 3

    metrics = Metrics("T")
    score(reward, metrics=metrics)
    columns = metrics.take_columns()
    assert columns == {"found": ["a", "b", "c"], "size": [1, 2, 3]}
    assert metrics.take_columns() == {}
    logged = metrics.flush(lambda entries: entries)
    assert logged["tries"] == 3.0
    assert type(logged["tries"]) is float
    assert logged["profiling/Time taken: T.reward"] >= 0


def test_errors_of_a_function_come_through() -> None:
    async def fails(**kwargs: Any) -> Awaitable[Any]:
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        score(fails)


def classifier(num_labels: int = 1) -> Any:
    base: dict[str, Any] = copy.deepcopy(tiny("text").model.config.to_dict())
    for key in ("id2label", "label2id", "num_labels", "architectures"):
        base.pop(key, None)
    base["num_labels"] = num_labels
    return randomise(Qwen3ForSequenceClassification(Qwen3Config(**base)))


def by_hand(model: Any, ids: Sequence[int]) -> float:
    """The head on the last hidden state of one row without padding."""
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        return float(model.score.weight[0] @ hidden)


def test_a_model_scores_plain_text() -> None:
    model, prompts, completions = classifier(), ["which ?", "sum of 0 1 2 3"], [" red dots", " 7"]
    expected = [by_hand(model, tokenizer()(p + c)["input_ids"]) for p, c in zip(prompts, completions, strict=True)]
    assert ModelReward(model, tokenizer())(prompts, completions) == pytest.approx(expected, abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)


def test_a_model_scores_chats_by_its_own_template() -> None:
    model = classifier()
    begun = [*user("dots ?"), {"role": "assistant", "content": "Well, "}]
    prompts = [user("which ?", picture(40, 40, 1)), begun]
    completions = [[{"role": "assistant", "content": "red"}], [{"role": "assistant", "content": "Well, 7"}]]
    texts = [
        "<|im_start|>user\nwhich ?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>\n",
        "<|im_start|>user\ndots ?<|im_end|>\n<|im_start|>assistant\nWell, 7<|im_end|>\n",
    ]
    expected = [by_hand(model, tokenizer()(text)["input_ids"]) for text in texts]
    assert ModelReward(model, tokenizer())(prompts, completions) == pytest.approx(expected, abs=1e-5)


def test_a_model_is_a_reward_function() -> None:
    model = ModelReward(classifier(), tokenizer())
    found = score(model, model)
    assert list(found[0]) == ["Qwen3ForSequenceClassification", "Qwen3ForSequenceClassification_2"]
    assert column(found, "Qwen3ForSequenceClassification") == model(["hi"] * 3, ["text 0", "text 1", "text 2"])


def test_a_saved_model_is_found_by_its_path(tmp_path: Any) -> None:
    model = classifier()
    model.save_pretrained(tmp_path / "judge")
    tokenizer().save_pretrained(tmp_path / "judge")
    reward = ModelReward(str(tmp_path / "judge"))
    assert reward.__name__ == "judge"
    assert reward(["which ?"], [" red"]) == pytest.approx(ModelReward(model, tokenizer())(["which ?"], [" red"]))


def test_models_and_tokenizers_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="has 3 labels; a reward needs exactly one"):
        ModelReward(classifier(3), tokenizer())
    bare: Any = copy.deepcopy(tokenizer())
    bare.pad_token = None
    assert ModelReward(classifier(), bare).model.config.pad_token_id == bare.eos_token_id
    bare.pad_token = bare.eos_token = None
    with pytest.raises(ValueError, match="neither a pad nor an eos token"):
        ModelReward(classifier(), bare)
