"""Tiny models whose chat templates take tools, and generators that say what a test wants, for several test files."""

import copy
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tiny_models import picture, tiny
from vlmroll.scoring import policy_logprobs
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import FamilyAdapter, Prompt, collate, load_adapter

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ hint }}{% endif %}"
)
"""Calls are JSON between tags; results stand in messages of the role tool, with their pictures."""


@cache
def adapter(name: str = "qwen2_5_vl") -> FamilyAdapter:
    """The adapter of a tiny model, "text" or a Qwen family, with a chat template for tools."""
    made = tiny(name)
    return load_adapter(processor(name), config=made.model.config)


@cache
def processor(name: str = "qwen2_5_vl") -> Any:
    """The same processor without an adapter, as a trainer takes it."""
    changed = copy.deepcopy(tiny(name).processor)
    changed.chat_template = TEMPLATE
    getattr(changed, "tokenizer", changed).chat_template = TEMPLATE
    return changed


def ids_of(text: str, name: str = "qwen2_5_vl") -> tuple[int, ...]:
    """The ids of a turn's text."""
    return tuple(adapter(name).tokenizer(text, add_special_tokens=False)["input_ids"])


def call(tool: str, **arguments: Any) -> str:
    """A turn that calls a tool."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call><|im_end|>"


class Forced:
    """A generator that gives scripted turns, with the log-probabilities that a model has for them.

    A later turn goes to the rollout whose ids its prompt begins with, so that ids which were changed between two turns
    are an error.

    Args:
        script: for each rollout its turns.
        model: None for log-probabilities of -1.
    """

    banned_ids: frozenset[int] = frozenset()

    def __init__(self, script: Sequence[Sequence[Sequence[int]]], model: Any = None) -> None:
        self._script, self._model = [list(turns) for turns in script], model
        self._so_far: list[tuple[int, ...]] = []
        self.asked: list[tuple[tuple[Prompt, ...], SamplingParams]] = []

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        self.asked.append((tuple(prompts), sampling))
        flat = [prompt for prompt in prompts for _ in range(num_generations)]
        limits = [limit for limit in sampling.limits_of(len(prompts)) for _ in range(num_generations)]
        if not self._so_far:
            self._so_far = [prompt.prompt_ids for prompt in flat]
        turns = [self._turn(prompt, limit) for prompt, limit in zip(flat, limits, strict=True)]
        completions = [
            Completion(
                completion_ids=ids,
                logprobs=values,
                finish_reason="stop" if ids[-1] in adapter().stop_ids else "length",
            )
            for ids, values in zip(turns, self._logprobs(flat, turns), strict=True)
        ]
        n = num_generations
        return GenerationOutput(
            prompts=tuple(prompts),
            prompt_ids=tuple(prompt.prompt_ids for prompt in prompts),
            completions=tuple(tuple(completions[i : i + n]) for i in range(0, len(completions), n)),
        )

    def _turn(self, prompt: Prompt, limit: int) -> tuple[int, ...]:
        begun = ((i, ids) for i, ids in enumerate(self._so_far) if self._script[i])
        place = next(i for i, ids in begun if prompt.prompt_ids[: len(ids)] == ids)
        ids = tuple(self._script[place].pop(0))[:limit]
        self._so_far[place] = (*prompt.prompt_ids, *ids) if self._script[place] else ()
        return ids

    def _logprobs(self, prompts: Sequence[Prompt], turns: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        if self._model is None:
            return [(-1.0,) * len(ids) for ids in turns]
        with torch.no_grad():
            scores = policy_logprobs(self._model, collate(prompts, turns, pad_token_id=0)).logprobs
        return [tuple(row[: len(ids)].tolist()) for row, ids in zip(scores, turns, strict=True)]

    def sync_weights(self, policy: Any) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to free."""


class ByPrompt(Forced):
    """A generator whose turns follow from the prompt and the place among siblings alone, whatever it was asked before.

    Args:
        turns: among which it chooses.
    """

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        super().__init__([])
        self._turns = [tuple(turn) for turn in turns]

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, num_generations: int) -> GenerationOutput:
        numbers = [sum(prompt.prompt_ids) + i for prompt in prompts for i in range(num_generations)]
        self._so_far = [prompt.prompt_ids for prompt in prompts for _ in range(num_generations)]
        self._script = [[self._turns[number % len(self._turns)]] for number in numbers]
        return super().generate(prompts, sampling, num_generations)


def look(size: int) -> Any:
    """Shows a picture.

    Args:
        size: its side in pixels.
    """
    return picture(size, size, seed=size)


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one of them.
        b: the other one.
    """
    return a + b
