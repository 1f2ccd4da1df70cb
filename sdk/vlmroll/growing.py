"""A rollout on its way: its turns so far, and what waits to be done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmroll.tools import ResponseParser, Toolbox, ToolCall, ToolResult
from vlmroll.types import Completion, FinishReason, Turns
from vlmroll_processors import Continuation, FamilyAdapter, Prompt


@dataclass(kw_only=True, slots=True)
class Growing:
    """A rollout on its way.

    Attributes:
        start: the prompt it began with.
        toolbox: the tools that it may call.
        limit: most ids of the completion, over all turns.
        options: the row's own arguments for the chat template.
        prompt: of its last turn.
        ids, logprobs, sampled, messages: of the completion so far.
        calls: of its last turn, which wait to be run.
        results: of all calls so far.
        num_rolled_back: calls whose results did not fit.
        finish_reason, last: of its last turn, and all of that.
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
