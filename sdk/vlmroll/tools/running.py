"""Running the tool calls of many rollouts: whatever a tool does, the model gets an answer it can read."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial

from vlmroll.tools.jobs import Job, NotRun, Outcome, run_jobs
from vlmroll.tools.results import content_of
from vlmroll.tools.toolbox import Tool, Toolbox
from vlmroll.tools.types import ToolCall, ToolResult, failure


def run_calls(work: Sequence[tuple[Toolbox, Sequence[ToolCall]]], *, seconds: float | None) -> list[list[ToolResult]]:
    """Run the calls of one turn of each rollout, all rollouts at the same time.

    The calls of one rollout run at the same time, too, but for those of tools with a state, which run in the order in
    which they were written. When one of these passes its time limit, its toolbox is stuck: it may still be changing
    the state, so no such tool of this toolbox is called any more.

    A failure is a result like any other: a call that was written wrongly, a name that is no tool, wrong arguments, a
    tool that raises, hangs or returns what cannot be told. What is raised by no tool, such as an interrupt by the
    user, goes through.

    Args:
        work: for each rollout what it may call, and its calls.
        seconds: for each call, from when it starts; None for no limit. A sync tool that passes it is left behind in
            its thread, an async one is cancelled.

    Returns:
        For each rollout one result for each call.
    """
    planned = [[_planned(toolbox, call, seconds) for call in calls] for toolbox, calls in work]
    chains: list[list[Job]] = []
    for (toolbox, calls), jobs in zip(work, planned, strict=True):
        ordered: list[Job] = []
        for call, job in zip(calls, jobs, strict=True):
            if isinstance(job, Job):
                chain = ordered if toolbox.tools[call.name].in_order else []
                chain.append(job)
                chains += [chain] if len(chain) == 1 else []
    run_jobs(chains, seconds)
    return [
        [_result(call, job, seconds) if isinstance(job, Job) else job for call, job in zip(calls, jobs, strict=True)]
        for (_, calls), jobs in zip(work, planned, strict=True)
    ]


def _planned(toolbox: Toolbox, call: ToolCall, seconds: float | None) -> Job | ToolResult:
    """The job of a call, or at once what is wrong with it."""
    if call.error:
        return failure(call.error)
    tool = toolbox.tools.get(call.name)
    if tool is None:
        known = ", ".join(toolbox.names) or "none"
        return failure(f"there is no tool {call.name!r}; the tools are: {known}")
    if fault := tool.fault(call.arguments):
        return failure(fault)
    function = partial(tool.function, **deepcopy(dict(call.arguments)))  # the turn keeps its own
    if not tool.in_order:
        return Job(function=function, is_async=tool.is_async, convert=content_of)

    return Job(
        function=function,
        is_async=tool.is_async,
        convert=content_of,
        refused=partial(_refusal, toolbox, tool),
        on_left=toolbox.stick,
    )


def _refusal(toolbox: Toolbox, tool: Tool) -> str:
    if not toolbox.stuck:
        return ""
    return f"{tool.name} was not run: an earlier call passed its time limit and may still be changing the state"


def _result(call: ToolCall, job: Job, seconds: float | None) -> ToolResult:
    outcome = job.outcome
    if outcome.timed_out:
        return failure(f"{call.name} did not finish within {seconds:g} seconds", timed_out=True)
    if outcome.error is not None:
        return failure(words_of(outcome.error))
    return ToolResult(outcome.value)


def words_of(error: BaseException) -> str:
    """An error in one line: its type and what it says."""
    if isinstance(error, NotRun):
        return str(error)
    with Outcome() as said:  # its own text may raise as well
        said.value = str(error)
    kind = type(error).__name__
    return f"{kind}: {said.value}" if said.value else kind
