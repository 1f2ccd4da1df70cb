"""Training with tools, environments and rollout functions, by both algorithms."""

import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from resuming import check_resume
from tiny_models import picture, user
from tool_runs import ByPrompt, add, call, ids_of, look, processor
from training_runs import ALGORITHMS, make_trainer, rows
from vlmroll import GenerationOutput, SamplingParams, ScriptedGenerator

END = "<|im_end|>"
TOOLS: dict[str, Any] = {"max_completion_length": 200}


def length(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def scripted(*turns: str) -> ScriptedGenerator:
    return ScriptedGenerator([ids_of(turn) for turn in turns])


class Room:
    """An environment that counts what happens to it."""

    made: list["Room"] = []

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.visits = 0
        self.closed = False
        Room.made.append(self)

    def reset(self, n: int, **row: Any) -> list[Any]:
        self.rows.append(n)
        self.visits = 0
        return [f" room {n}", picture(32, 32, n)]

    async def visit(self, times: int) -> Image.Image:
        """Visits the room.

        Args:
            times: how often.
        """
        self.visits += times
        return picture(24, 24, times)

    def get_reward(self) -> float:
        return float(self.visits)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def no_rooms() -> None:
    Room.made.clear()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_environments_are_one_for_each_rollout_used_again_and_closed(algorithm: str, tmp_path: Path) -> None:
    turns = [call("visit", times=2), f"no{END}", call("visit", times=1), f"ok{END}", f"seen{END}", f"yes{END}"]
    data = [{"prompt": user(f"how many ? {i}"), "n": i} for i in range(8)]
    options: dict[str, Any] = {"generator": scripted(*turns), "reward": None, "data": data, **TOOLS}
    trainer = make_trainer(
        algorithm,
        tmp_path,
        environment_factory=Room,
        processing_class=processor(),
        gradient_accumulation_steps=1,
        max_steps=3,
        shuffle_dataset=False,
        **options,
    )
    trainer.train()
    assert len(Room.made) == 4
    assert sorted(room.rows for room in Room.made) == [[0, 1, 2]] * 4
    first = next(log for log in trainer.state.log_history if "reward" in log)
    assert first["rewards/Room/mean"] == first["reward"] == 0.75
    assert first["tools/call_frequency"] == 0.5
    assert first["tools/mean_images"] == 0.5
    assert first["tools/failure_frequency"] == 0
    asked = options["generator"].requests
    assert "how many ? 0 room 0" in asked[0][0][0].text
    assert [len(prompts) * n for prompts, _, n in asked[:2]] == [4, 2]
    assert len(asked[0][0]) == 1, "siblings that are told the same share a prompt"
    assert not any(room.closed for room in Room.made)
    del trainer
    gc.collect()
    assert all(room.closed for room in Room.made)


class Numbers:
    """An environment with tools of its own."""

    def reset(self, n: int) -> None:
        self.n = n

    def double(self) -> int:
        """Doubles the number."""
        self.n *= 2
        return self.n


def test_a_column_chooses_among_environments(tmp_path: Path) -> None:
    data = [{"prompt": user("go"), "n": 1, "environment": kind} for kind in ("rooms", "numbers")] * 2
    seen: list[Any] = []

    def reward(completions: Any, environments: Any, environment: Any) -> list[float | None]:
        seen.append((environments, environment))
        return [1.0 if isinstance(place, Numbers) and place.n == 2 else None for place in environments]

    trainer = make_trainer(
        "grpo",
        tmp_path,
        environment_factory={"rooms": Room, "numbers": Numbers},
        processing_class=processor(),
        generator=scripted(call("double"), f"x{END}"),
        reward=reward,
        data=data,
        tools=[add],
        shuffle_dataset=False,
        max_steps=1,
        num_generations=2,
        reward_weights=[2.0],
        **TOOLS,
    )
    trainer.train()
    ((places, kinds),) = seen
    assert kinds == ["rooms", "rooms", "numbers", "numbers"] * 2
    assert [type(place) for place in places] == [Room, Room, Numbers, Numbers] * 2
    texts = [prompt.text for prompt in trainer.generator.requests[0][0]]  # pyright: ignore
    assert any("Tools: add visit" in text for text in texts)
    assert any("Tools: add double" in text for text in texts)
    with pytest.raises(ValueError, match="row 0: there is no environment 'room'.*did you mean 'rooms'"):
        trainer.roll_out([{"prompt": user("go"), "n": 1, "environment": "room"}])


def test_tools_that_one_kind_lacks_are_told_so(tmp_path: Path) -> None:
    trainer = make_trainer(
        "rloo",
        tmp_path,
        tools=[add, look],
        processing_class=processor(),
        generator=scripted(call("double"), call("add", a=1, b=2), f"x{END}"),
        **TOOLS,
    )
    (found,) = trainer.roll_out([{"prompt": user("go")}], SamplingParams(max_tokens=300))
    turns = found.completion.turns
    assert turns is not None
    assert [message["role"] for message in turns.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert "the tools are: add, look" in turns.messages[1]["content"]
    assert turns.messages[3]["content"] == "3"


def test_rewards_get_the_messages_of_all_turns(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(completions: Any, prompts: Any) -> list[float]:
        seen.extend(completions)
        completions[0].clear()
        return [0.0] * len(completions)

    turns = [call("look", size=40), *[f"no{END}"] * 3, f"done{END}"]
    trainer = make_trainer(
        "grpo",
        tmp_path,
        tools=[look],
        processing_class=processor(),
        generator=scripted(*turns),
        reward=reward,
        max_steps=1,
        gradient_accumulation_steps=1,
        log_completions=True,
        **TOOLS,
    )
    trainer.train()
    assert seen[0] == []
    assert [message["content"] for message in seen[1]] == ["no"]
    import datasets

    (file,) = (tmp_path / "completions").glob("*.parquet")
    table = datasets.Dataset.from_parquet(str(file))
    pictures = [len(images) for images in table["images"]]  # pyright: ignore
    assert pictures[0] == pictures[1] + 1
    assert "done" in table["completion"][0]  # pyright: ignore


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_with_pictures_from_tools_resumes(stop: int, tmp_path: Path) -> None:
    texts = [call("visit", times=3), f"a{END}", f"bb{END}", call("visit", times=1), f"d{END}", f"eeee{END}", f"ff{END}"]
    turns = [ids_of(text) for text in texts]
    data = [{"prompt": user(f"how many ? {i}"), "n": i} for i in range(12)]

    def options() -> dict[str, Any]:
        return {"generator": ByPrompt(turns), "environment_factory": Room, "processing_class": processor()}

    def reward(completions: Any) -> list[float]:
        return [float(len(str(completion[-1]["content"]))) for completion in completions]

    check_resume("grpo", tmp_path, [stop], fresh=options, data=data, reward=reward, **TOOLS)


def test_a_rollout_func_takes_the_place_of_the_generator(tmp_path: Path) -> None:
    asked: list[Any] = []

    def rollout_func(encoded: Any, rows: Any, sampling: Any, num_generations: int, trainer: Any) -> GenerationOutput:
        asked.append((len(encoded), [row["n"] for row in rows], num_generations))
        return trainer.generator.generate(encoded, sampling, num_generations)

    trainer = make_trainer("grpo", tmp_path, rollout_func=rollout_func, max_steps=1, shuffle_dataset=False)
    trainer.train()
    assert asked == [(2, [0, 1], 4)]


def test_a_rollout_func_may_return_lists(tmp_path: Path) -> None:
    seen: list[Any] = []

    def rollout_func(prompts: Any, trainer: Any) -> dict[str, Any]:
        count = trainer.args.num_generations
        ids = [list(prompt.prompt_ids) for prompt in trainer.adapter.encode([{"prompt": p} for p in prompts])]
        return {
            "prompt_ids": [prompt for prompt in ids for _ in range(count)],
            "completion_ids": [[40 + i, 41, 42, 43] for i in range(len(ids) * count)],
            "logprobs": [[[-1.0]] * 4] * (len(ids) * count),
            "env_mask": [[1, 0, 0, 1]] * (len(ids) * count),
            "steps": list(range(len(ids) * count)),
        }

    def reward(completions: Any, steps: Any) -> list[float]:
        seen.append(steps)
        return [float(step) for step in steps]

    data = rows(8, "text")
    trainer = make_trainer(
        "rloo", tmp_path, model="text", rollout_func=rollout_func, reward=reward, data=data, max_steps=1
    )
    trainer.train()
    assert seen == [list(range(8))]
    log = next(log for log in trainer.state.log_history if "reward" in log)
    assert log["completions/mean_length"] == 2


def wrong_ids(encoded: Any, num_generations: int) -> dict[str, Any]:
    total = len(encoded) * num_generations
    return {"prompt_ids": [[1]] * total, "completion_ids": [[5]] * total, "logprobs": [[-1.0]] * total}


def half(prompts: Any) -> dict[str, Any]:
    return {"prompt_ids": []}


def a_list(prompts: Any) -> list[Any]:
    return []


def curious(wishes: Any) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (wrong_ids, "row 0: rollout_func returned prompt_ids that are not those of the encoded prompt"),
        (half, "a dict without 'completion_ids'"),
        (a_list, "returned a list; return a GenerationOutput"),
        (curious, "asks for 'wishes'"),
    ],
)
def test_a_rollout_func_that_cannot_work_is_refused(function: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        make_trainer(
            "grpo", tmp_path, model="text", rollout_func=function, data=rows(4, "text"), shuffle_dataset=False
        ).train()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"rollout_func": wrong_ids, "tools": [add]}, "leave out tools and environment_factory"),
    "no tools": ({"max_tool_calling_iterations": 2}, "there are no tools"),
    "no tools, a format": (
        {"tool_call_format": "json_tagged"},
        "tool_call_format='json_tagged', but there are no tools",
    ),
    "no tools, a limit": ({"tool_timeout": None}, "tool_timeout=None, but there are no tools"),
    "no template": ({"tools": [add]}, "tool_call_format"),
    "no iterations": ({"tools": [add], "max_tool_calling_iterations": 0}, "it must be at least 1"),
    "no time": ({"tools": [add], "tool_timeout": 0.0}, "it must be above 0 s"),
    "no reset": ({"environment_factory": dict, "processing_class": "tools"}, "has no method reset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name: str, tmp_path: Path) -> None:
    options, words = REFUSED[name]
    options = {key: processor() if value == "tools" else value for key, value in options.items()}
    with pytest.raises(ValueError, match=words):
        make_trainer("grpo", tmp_path, **options)


def test_a_plain_string_prompt_takes_no_tools(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, tools=[add], processing_class=processor(), **TOOLS)
    with pytest.raises(ValueError, match="row 0, column 'prompt': it is a plain string"):
        trainer.roll_out([{"prompt": "go"}])


def test_a_template_that_hides_the_tools_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_trainer("grpo", tmp_path, tools=[add], tool_call_format="json_tagged", **TOOLS)
    assert "does not tell the model which tools there are" in caplog.text


def test_a_reset_that_fails_names_the_row(tmp_path: Path) -> None:
    class Broken:
        def reset(self, **row: Any) -> None:
            raise KeyError("door")

    trainer = make_trainer(
        "grpo", tmp_path, environment_factory=Broken, processing_class=processor(), reward=length, **TOOLS
    )
    with pytest.raises(KeyError) as caught:
        trainer.roll_out([{"prompt": user("go")}])
    assert any("row 0" in note for note in caught.value.__notes__)


def test_the_real_generator_samples_turns(tmp_path: Path) -> None:
    """Its turns are scored against the whole sequence; a scripted answer cannot show that the ids go through."""
    trainer = make_trainer("grpo", tmp_path, tools=[add], processing_class=processor(), **TOOLS)
    found = trainer.roll_out([{"prompt": user("go")}], SamplingParams(max_tokens=20, seed=1), 4)
    with torch.no_grad():
        scores = trainer.scorer.score(trainer.model, trainer.scorer.join(trainer.model, found)).logprobs
    for rollout, row in zip(found, scores, strict=True):
        own = torch.tensor(rollout.completion.logprobs)
        torch.testing.assert_close(row[: len(own)], own, atol=1e-4, rtol=1e-4)


def picture_of(name: str) -> Image.Image:
    """Shows a picture.

    Args:
        name: its name.
    """
    return picture(24, 24, len(name))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("mllama", {}, "a later picture changes what was said before it"),
        ("text", {}, "the model takes text only"),
        ("text", {"use_transformers_continuous_batching": True}, "the generator reads text only"),
    ],
)
def test_pictures_that_cannot_be_shown_are_refused_at_the_start(
    model: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    data = rows(4, model)
    with pytest.raises(ValueError, match=words):
        make_trainer(
            "grpo", tmp_path, model=model, data=data, tools=[picture_of], tool_call_format="json_tagged", **options
        )


@pytest.mark.parametrize(
    "prompt",
    [
        user("how many ?"),
        [{"role": "user", "content": "in <image> how many ?"}],
        [{"role": "user", "content": [{"type": "text", "text": "in"}, {"type": "image"}]}],
    ],
)
def test_an_observation_with_pictures_stands_behind_those_of_the_columns(prompt: Any, tmp_path: Path) -> None:
    class Sight:
        def reset(self, **row: Any) -> list[Any]:
            return [picture(40, 40, 9), " and <image> there"]

    trainer = make_trainer(
        "grpo", tmp_path, environment_factory=Sight, tools=[add], processing_class=processor(), **TOOLS
    )
    row = {"prompt": prompt, "images": [picture(64, 48, 1)], "n": 0}
    (found,) = trainer.roll_out([row], SamplingParams(max_tokens=4))
    first, second = found.prompt.images
    assert (first.size, second.size) == ((64, 48), (40, 40))
    assert "and <image> there" in found.prompt.text


def test_rows_that_are_skipped_give_their_environments_back(tmp_path: Path) -> None:
    data = [{"prompt": user("word " * (60 if i % 2 else 1)), "n": i} for i in range(8)]
    trainer = make_trainer(
        "grpo",
        tmp_path,
        environment_factory=Room,
        processing_class=processor(),
        max_prompt_length=80,
        long_prompts="skip",
        data=data,
        max_steps=2,
        gradient_accumulation_steps=1,
        **TOOLS,
    )
    trainer.train()
    assert len(Room.made) == 4


def test_environments_are_closed_when_the_trainer_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tool_call_format"):
        make_trainer("grpo", tmp_path, environment_factory=Room, tool_call_format="smoke", **TOOLS)
    gc.collect()
    assert [room.closed for room in Room.made] == [True]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": user("go"), "chat_template_kwargs": 5}, "row 0, column 'chat_template_kwargs': give a mapping"),
        ({"n": 1}, "row 0, column 'prompt': it is missing"),
        ({"prompt": ["hi"], "n": 1}, "row 0, column 'prompt', message 0: a message is a mapping"),
        ({"prompt": [{"role": "system", "content": "x"}], "n": 1}, "row 0, column 'prompt': no user message"),
    ],
)
def test_rows_that_cannot_be_opened_are_named(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, environment_factory=Room, processing_class=processor(), **TOOLS)
    with pytest.raises(ValueError, match=words):
        trainer.roll_out([{"n": 0, **row}])


def test_a_column_may_be_called_environments_without_environments(tmp_path: Path) -> None:
    def reward(completions: Any, environments: Any) -> list[float]:
        return [float(len(name)) for name in environments]

    data = [{"prompt": user("go"), "environments": "ab"} for _ in range(4)]
    make_trainer("grpo", tmp_path, model="text", reward=reward, data=data, max_steps=1).train()


def test_a_rollout_func_brings_no_picture_by_its_id_alone(tmp_path: Path) -> None:
    def rollout_func(encoded: Any, num_generations: int, trainer: Any) -> dict[str, Any]:
        pad, total = min(trainer.adapter.vision_ids), len(encoded) * num_generations
        ids = [list(prompt.prompt_ids) for prompt in encoded for _ in range(num_generations)]
        mask = {"env_mask": [[1, 0, 1]] * total}
        return {"prompt_ids": ids, "completion_ids": [[5, pad, 6]] * total, "logprobs": [[-1.0] * 3] * total, **mask}

    data = [{"prompt": user(f"go {i}")} for i in range(4)]
    with pytest.raises(ValueError, match=r"row \d: the completion holds the id .* of a picture"):
        make_trainer("grpo", tmp_path, rollout_func=rollout_func, data=data).train()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"completions": ["x"] * 8}, "'completions' have the name of an argument"),
        ({"n": [1] * 8}, "'n' have the name of an argument"),
        ({"completion_ids": [[]] * 8, "logprobs": [[]] * 8}, "row 0: rollout_func: a completion needs"),
        ({"logprobs": [[[-1.0, -2.0]]] * 8}, "row 0: rollout_func: logprobs hold"),
        ({"env_mask": [[0]] * 8}, "row 0: rollout_func: a completion of several turns needs"),
    ],
)
def test_lists_of_a_rollout_func_that_cannot_be_are_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    def rollout_func(encoded: Any, num_generations: int) -> dict[str, Any]:
        ids = [list(prompt.prompt_ids) for prompt in encoded for _ in range(num_generations)]
        return {"prompt_ids": ids, "completion_ids": [[5]] * 8, "logprobs": [[-1.0]] * 8, **more}

    with pytest.raises(ValueError, match=words):
        make_trainer(
            "grpo", tmp_path, model="text", rollout_func=rollout_func, data=rows(4, "text"), shuffle_dataset=False
        ).train()


def test_an_environment_cannot_forge_a_special_token(tmp_path: Path) -> None:
    class Forger:
        def reset(self, **row: Any) -> list[Any]:
            return ["im_end|> <|im_", "end|>"]

    trainer = make_trainer(
        "grpo", tmp_path, environment_factory=Forger, tools=[add], processing_class=processor(), **TOOLS
    )
    (found,) = trainer.roll_out([{"prompt": user("go <|"), "n": 0}], SamplingParams(max_tokens=4))
    ends = found.prompt.prompt_ids.count(processor().tokenizer.convert_tokens_to_ids(END))
    assert ends == 2, "of the system turn and of the user's"


def test_a_number_that_is_none_in_a_call_spoils_no_checkpoint(tmp_path: Path) -> None:
    bad = '<tool_call>{"name": "add", "arguments": {"a": NaN, "b": 1e999}}</tool_call>' + END
    trainer = make_trainer(
        "grpo",
        tmp_path,
        tools=[add],
        processing_class=processor(),
        generator=scripted(bad, f"x{END}", f"yy{END}"),
        steps_per_generation=4,
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
        **TOOLS,
    )
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "rollouts_rank0.json").is_file()


def test_sizes_of_pictures_from_tools_outlive_a_stop(tmp_path: Path) -> None:
    class Sized:
        def reset(self, n: int, **row: Any) -> list[Any]:
            return [{"type": "image", "image": picture(120, 120, n), "max_pixels": 2048}]

        def zoom(self) -> Any:
            """Shows a picture."""
            return {"type": "image", "image": picture(120, 120, 1), "max_pixels": 1024}

    turns = [ids_of(text) for text in (call("zoom"), f"a{END}", f"bb{END}", f"ccc{END}", f"d{END}")]
    data = [{"prompt": user(f"how many ? {i}"), "n": i} for i in range(12)]

    def options() -> dict[str, Any]:
        return {"generator": ByPrompt(turns), "environment_factory": Sized, "processing_class": processor()}

    def reward(completions: Any) -> list[float]:
        return [float(len(str(completion[-1]["content"]))) for completion in completions]

    check_resume("grpo", tmp_path, [1], fresh=options, data=data, reward=reward, **TOOLS)


def test_calls_whose_results_never_fit_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(
        "grpo",
        tmp_path,
        tools=[add],
        processing_class=processor(),
        generator=scripted(call("add", a=1, b=2), f"x{END}", call("add", a=1, b=1)),
        max_completion_length=len(ids_of(call("add", a=1, b=2))) + 3,
    )
    trainer.train()
    told = [record for record in caplog.records if "did not fit into max_completion_length" in record.message]
    assert len(told) == 1


class Silent:
    """An environment without a reward."""

    def reset(self, **row: Any) -> None:
        """Nothing to prepare."""


class Helped(Silent):
    """An environment with a method that is no tool."""

    def helper(self, x: Any) -> Any:
        return x


def picky(completions: Any, environments: Any) -> list[float]:
    return [0.0 for _ in completions]


def compare(picture: Image.Image) -> str:
    """Compares a picture.

    Args:
        picture: which one.
    """
    return "same"


UNHELPFUL: dict[str, tuple[dict[str, Any], str]] = {
    "no reward": ({"environment_factory": Silent, "reward": None}, "write get_reward"),
    "a helper": ({"environment_factory": Helped}, "every public method of Helped is a tool; start the name"),
    "a function alone": ({"tools": add}, "give a list"),
    "a picture to write": ({"tools": [compare]}, "argument 'picture' is a picture, which no model can write"),
}


@pytest.mark.parametrize("name", UNHELPFUL)
def test_messages_say_what_to_do(name: str, tmp_path: Path) -> None:
    options, words = UNHELPFUL[name]
    with pytest.raises(ValueError, match=words):
        make_trainer("grpo", tmp_path, processing_class=processor(), **options)


def test_more_messages_that_say_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="there with an environment_factory alone"):
        make_trainer("grpo", tmp_path, reward=picky, data=rows(4)).train()
    make_trainer("grpo", tmp_path, tools=[add], processing_class=processor(), tool_call_format="python_calls", **TOOLS)
    assert "the chat template shows calls in the format 'json_tagged'" in caplog.text
