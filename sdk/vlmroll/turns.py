"""Rollouts of several turns: the model calls tools, reads their results and goes on, until it answers or must stop.

    completion --parse--> calls --run_calls--> results --next_turn--> Prompt --generate--> completion --parse--> ...

What was sampled is never tokenised again: the results of a turn are appended as new ids, with the header of the next
one, and the generator continues from exactly the ids so far. Each completion knows which of its ids were sampled.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmroll.generators.base import Generator
from vlmroll.tools import ResponseParser, Toolbox, ToolCall, ToolResult, run_calls
from vlmroll.tools.types import failure
from vlmroll.types import Completion, FinishReason, GenerationOutput, SamplingParams, Turns
from vlmroll_processors import Continuation, FamilyAdapter, Prompt

Gather = Callable[[list[Any]], list[Any]]


@dataclass(kw_only=True, slots=True)
class _Rollout:
    """A rollout on its way.

    Attributes:
        start: the prompt it began with.
        toolbox: the tools that it may call.
        limit: most ids of the completion, over all turns.
        options: the row's own arguments for the chat template.
        prompt: of its last turn.
        ids, logprobs, sampled: of the completion so far.
        calls: of its last turn, which wait to be run.
    """

    start: Prompt
    toolbox: Toolbox
    limit: int
    options: Mapping[str, Any]
    prompt: Prompt
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    sampled: list[int] = field(default_factory=list[int])
    messages: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    calls: tuple[ToolCall, ...] = ()
    results: list[ToolResult] = field(default_factory=list[ToolResult])
    num_rolled_back: int = 0
    finish_reason: FinishReason = "stop"
    last: Completion | None = None

    @property
    def room(self) -> int:
        """How many ids may still come."""
        return self.limit - len(self.ids)

    @property
    def turn(self) -> tuple[int, ...]:
        """The ids that the model sampled in the last turn."""
        assert self.last is not None
        return self.last.completion_ids

    def take(self, completion: Completion, parser: ResponseParser, adapter: FamilyAdapter) -> None:
        """Add a turn of the model; an engine that gave more than there is room for is cut."""
        cut = completion.completion_ids[: self.room]
        if len(cut) < len(completion.completion_ids):
            completion = replace(
                completion, completion_ids=cut, logprobs=completion.logprobs[: len(cut)], finish_reason="length"
            )
        self.last, self.finish_reason = completion, completion.finish_reason
        self.ids += completion.completion_ids
        self.logprobs += completion.logprobs
        self.sampled += [1] * len(completion.completion_ids)
        reply = parser.parse(completion.completion_ids, self.prompt.prompt_ids, self.toolbox.schemas)
        # A turn that was cut may end inside of a call; none of its calls is run.
        cut_call = bool(reply.calls) and completion.finish_reason == "length"
        text = adapter.decode(completion.completion_ids)
        self.messages.append({"role": "assistant", "content": text} if cut_call else reply.message)
        self.calls = () if cut_call else reply.calls

    def add(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add the results of the last turn's calls, which are in the prompt of the next one."""
        new = prompt.prompt_ids[self.start.num_tokens + len(self.ids) :]
        self.ids += new
        self.logprobs += [0.0] * len(new)
        self.sampled += [0] * len(new)
        self.messages += messages
        self.prompt = prompt

    def completion(self, made: dict[tuple[int, int], Continuation]) -> Completion:
        """All of it.

        Args:
            made: continuations of other rollouts by the identities of their prompts.
        """
        assert self.last is not None
        key = id(self.start), id(self.prompt)
        if key not in made:
            made[key] = Continuation(start=self.start, prompt=self.prompt)
        turns = Turns(
            sampled=tuple(self.sampled),
            continuation=made[key],
            messages=tuple(self.messages),
            num_calls=len(self.results),
            num_failed=sum(result.failed for result in self.results),
            num_timed_out=sum(result.timed_out for result in self.results),
            num_rolled_back=self.num_rolled_back,
        )
        return replace(
            self.last,
            completion_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            turns=turns,
        )


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
        adapter.check_tools(pictures=False)

    def generate(
        self, prompts: Sequence[Prompt], toolbox: Toolbox, sampling: SamplingParams, num_generations: int
    ) -> GenerationOutput:
        """`num_generations` completions for each prompt, with as many turns as they take.

        Args:
            prompts: encoded with the toolbox's schemas as `tools` for the chat template.
            toolbox: what may be called.
            sampling: `max_tokens` counts all turns, and what tools return.
        """
        first = self._generator.generate(prompts, sampling, num_generations)
        flat = [prompt for prompt in prompts for _ in range(num_generations)]
        given = [completion for group in first.completions for completion in group]
        found = self.go_on(flat, given, [toolbox] * len(flat), sampling)
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
            _Rollout(start=prompt, prompt=prompt, toolbox=toolbox, limit=limit, options=own)
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

    def _answered(self, calling: Sequence[_Rollout]) -> list[_Rollout]:
        """Run the calls of these rollouts; those whose results fit, with their next prompt."""
        work = [(rollout.toolbox, rollout.calls) for rollout in calling]
        found = [[its.defused(self._special) for its in turn] for turn in run_calls(work, seconds=self._seconds)]
        known: dict[Any, tuple[Prompt, list[ToolResult]]] = {}  # siblings that did the same share what comes next
        ready: list[_Rollout] = []
        for rollout, results in zip(calling, found, strict=True):
            key = id(rollout.prompt), rollout.turn, tuple(map(_key, results))
            if key not in known:
                known[key] = self._next(rollout, results)
            prompt, shown = known[key]
            rollout.results += shown
            messages = [result.message(call) for call, result in zip(rollout.calls, shown, strict=True)]
            if prompt.num_tokens - rollout.start.num_tokens < rollout.limit:
                rollout.add(prompt, messages)
                ready.append(rollout)
            else:
                rollout.num_rolled_back += len(messages)
                rollout.finish_reason = "length"
            rollout.calls = ()
        return ready

    def _next(self, rollout: _Rollout, results: Sequence[ToolResult]) -> tuple[Prompt, list[ToolResult]]:
        """The prompt of the next turn, and the results in it: those that cannot be shown became error messages."""

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
        return shown(checked), [result for _, result in checked]


def _key(result: ToolResult) -> Any:
    """What tells a result from another one."""
    images = [part["image"] for part in result.content if part["type"] == "image"]
    pixels = [(image.mode, image.size, hashlib.sha256(image.tobytes()).digest()) for image in images]
    kinds = tuple((part["type"], part.get("text")) for part in result.content)
    return result.failed, result.timed_out, kinds, tuple(pixels)


def special_tokens(adapter: FamilyAdapter) -> frozenset[str]:
    """The texts that a tokenizer reads as special tokens: where a tool repeats one, it must stay text."""
    tokenizer = adapter.tokenizer
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    vision = tokenizer.convert_ids_to_tokens(sorted(adapter.vision_ids))
    return frozenset([*added, *tokenizer.all_special_tokens, *vision])


def _seed(seed: int, turn: int) -> int:
    """A seed for each turn, far from the others'."""
    return int.from_bytes(hashlib.sha256(f"{seed} turn {turn}".encode()).digest()[:7], "big")
