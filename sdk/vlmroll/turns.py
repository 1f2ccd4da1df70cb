"""Rollouts of several turns: the model calls tools, reads their results and goes on, until it answers or must stop.

    completion --parse--> calls --run_calls--> results --next_turn--> Prompt --generate--> completion --parse--> ...

What was sampled is never tokenised again: the results of a turn are appended as new ids, with the header of the next
one, and the generator continues from exactly the ids so far. Each completion knows which of its ids were sampled.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlmroll.generators.base import Generator
from vlmroll.growing import Growing
from vlmroll.rollouts import Gather
from vlmroll.tools import ResponseParser, Toolbox, ToolCall, ToolResult, run_calls
from vlmroll.tools.types import failure
from vlmroll.types import Completion, GenerationOutput, SamplingParams
from vlmroll_processors import Continuation, FamilyAdapter, Prompt

logger = logging.getLogger(__name__)


class ToolLoop:
    """Takes completions on, turn by turn, while they call tools.

    A call that is written wrongly, raises, or takes too long becomes a tool message that the model can read. Results
    that leave no room for a further token are dropped whole, and end the completion by "length".

    Args:
        generator: samples the turns.
        adapter: encoded the prompts; it encodes what tools return.
        max_iterations: most turns whose calls are run; None for no limit.
        seconds: time limit of each call; None for none.
        format: how calls are written, where the tokenizer does not tell; see `vlmroll.tools.FORMATS`.

    Raises:
        ValueError: it is not known how calls are written, or the chat template takes no tool results.

    Example:
        >>> loop = ToolLoop(generator, adapter, seconds=10)  # doctest: +SKIP
        >>> output = loop.generate(prompts, Toolbox([calculate]), SamplingParams(max_tokens=256), 8)  # doctest: +SKIP
    """

    def __init__(
        self,
        generator: Generator,
        adapter: FamilyAdapter,
        *,
        max_iterations: int | None = None,
        seconds: float | None = None,
        format: str | None = None,
    ) -> None:
        self._generator, self._adapter = generator, adapter
        template = getattr(adapter.processor, "chat_template", None)
        self._parser = ResponseParser(adapter.tokenizer, format=format, chat_template=template)
        self._most, self._seconds = max_iterations, seconds
        self._special = special_tokens(adapter)
        self._told = False  # whether a turn was found that cannot be answered
        adapter.check_tools(pictures=False)

    def generate(
        self,
        prompts: Sequence[Prompt],
        toolbox: Toolbox,
        sampling: SamplingParams,
        num_generations: int,
        *,
        options: Sequence[Mapping[str, Any]] | None = None,
    ) -> GenerationOutput:
        """`num_generations` completions for each prompt, with as many turns as they take.

        Args:
            prompts: encoded with the toolbox's schemas as `tools` for the chat template.
            toolbox: what may be called.
            sampling: `max_tokens` and `limits` count all turns, and what tools return.
            options: for every prompt the row's own arguments for the chat template.
        """
        first = self._generator.generate(prompts, sampling, num_generations)
        places = [i for i in range(len(prompts)) for _ in range(num_generations)]
        limits, own = sampling.limits_of(len(prompts)), options or [{}] * len(prompts)
        found = self.go_on(
            [prompts[i] for i in places],
            [completion for group in first.completions for completion in group],
            [toolbox] * len(places),
            replace(sampling, limits=tuple(limits[i] for i in places)),
            options=[own[i] for i in places],
        )
        groups = [found[i : i + num_generations] for i in range(0, len(found), num_generations)]
        return replace(first, completions=tuple(map(tuple, groups)))

    def go_on(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        toolboxes: Sequence[Toolbox],
        sampling: SamplingParams,
        gather: Gather = list,
        *,
        options: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Completion]:
        """Take first turns on to their ends.

        Args:
            prompts, completions, toolboxes: one of each for every rollout.
            sampling: of the first turn; `max_tokens` counts all turns, and what tools return.
            gather: list -> the concatenated lists of all processes, for generators that all of them have to call
                together.
            options: for every rollout the row's own arguments for the chat template.
        """
        limits = sampling.limits_of(len(prompts))
        rollouts = [
            Growing(start=prompt, prompt=prompt, toolbox=toolbox, limit=limit, options=own)
            for prompt, toolbox, limit, own in zip(
                prompts, toolboxes, limits, options or [{}] * len(prompts), strict=True
            )
        ]
        for rollout, completion in zip(rollouts, completions, strict=True):
            rollout.take(completion, self._parser, self._adapter)
        together = bool(getattr(self._generator, "collective", False))
        turn = 0
        while self._most is None or turn < self._most:
            ready = self._answered([rollout for rollout in rollouts if rollout.calls])
            if not (any(gather([len(ready)])) if together else ready):
                break
            turn += 1
            room = tuple(rollout.room for rollout in ready)
            seed = None if sampling.seed is None else _seed(sampling.seed, turn)
            asked = replace(sampling, max_tokens=max(room, default=1), limits=room, seed=seed)
            output = self._generator.generate([rollout.prompt for rollout in ready], asked, 1)
            for rollout, (completion,) in zip(ready, output.completions, strict=True):
                rollout.take(completion, self._parser, self._adapter)
        made: dict[tuple[int, int], Continuation] = {}
        return [rollout.completion(made) for rollout in rollouts]

    def _answered(self, calling: Sequence[Growing]) -> list[Growing]:
        """Run the calls of these rollouts; those whose results fit, with their next prompt."""
        work = [(rollout.toolbox, rollout.calls) for rollout in calling]
        found = [[its.defused(self._special) for its in turn] for turn in run_calls(work, seconds=self._seconds)]
        known: dict[Any, tuple[Prompt | None, list[ToolResult]]] = {}  # siblings that did the same share what follows
        ready: list[Growing] = []
        for rollout, results in zip(calling, found, strict=True):
            key = id(rollout.prompt), rollout.turn, repr(sorted(rollout.options.items())), tuple(map(_key, results))
            if key not in known:
                known[key] = self._next(rollout, results)
            prompt, shown = known[key]
            rollout.results += shown
            messages = [result.message(call) for call, result in zip(rollout.calls, shown, strict=True)]
            if prompt is not None and prompt.num_tokens - rollout.start.num_tokens < rollout.limit:
                rollout.add(prompt, messages)
                ready.append(rollout)
            else:
                rollout.num_rolled_back += len(messages)
                rollout.finish_reason = "length"
            rollout.calls = ()
        return ready

    def _next(self, rollout: Growing, results: Sequence[ToolResult]) -> tuple[Prompt | None, list[ToolResult]]:
        """The prompt of the next turn, and the results in it: those that cannot be shown became error messages.

        None where the chat template takes not even these.
        """

        def shown(these: Sequence[tuple[ToolCall, ToolResult]]) -> Prompt:
            messages = [result.message(call) for call, result in these]
            prompt = self._adapter.next_turn(rollout.prompt, rollout.turn, messages, template_kwargs=rollout.options)
            pictures = len(prompt.images) > len(rollout.prompt.images)
            if pictures and getattr(self._generator, "text_only", False):
                raise ValueError("the generator reads text only")
            if pictures and not Continuation(start=rollout.prompt, prompt=prompt).alike:
                raise ValueError("this model cannot be shown a picture here: what it said before would depend on it")
            return prompt

        pairs = list(zip(rollout.calls, results, strict=True))
        try:
            return shown(pairs), [result for _, result in pairs]
        except ValueError:
            pass
        checked: list[tuple[ToolCall, ToolResult]] = []
        for call, result in pairs:
            try:
                shown([(call, result)])
            except ValueError as error:
                result = failure(f"the result cannot be shown: {error}").defused(self._special)
            checked.append((call, result))
        try:
            return shown(checked), [result for _, result in checked]
        except ValueError as error:
            if not self._told:
                logger.warning("tools cannot answer a turn, which ends its rollout: %s", error)
            self._told = True
            return None, [result for _, result in checked]


def _key(result: ToolResult) -> Any:
    """What tells a result from another one."""
    images = [part["image"] for part in result.content if part["type"] == "image"]
    pixels = [(image.mode, image.size, hashlib.sha256(image.tobytes()).digest()) for image in images]
    others = [sorted((key, value) for key, value in part.items() if key != "image") for part in result.content]
    return result.failed, result.timed_out, repr(others), tuple(pixels)


def special_tokens(adapter: FamilyAdapter) -> frozenset[str]:
    """The texts that a tokenizer reads as special tokens: where a tool repeats one, it must stay text."""
    tokenizer = adapter.tokenizer
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    vision = tokenizer.convert_ids_to_tokens(sorted(adapter.vision_ids))
    return frozenset([*added, *tokenizer.all_special_tokens, *vision])


def _seed(seed: int, turn: int) -> int:
    """A seed for each turn, far from the others'."""
    return int.from_bytes(hashlib.sha256(f"{seed} turn {turn}".encode()).digest()[:7], "big")
