"""A round of rollouts: starts to completions, by the generator alone, with tools, or by a `rollout_func`."""

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlmroll.generators.base import Generator
from vlmroll.starts import Opened, Opener, Start
from vlmroll.tools import Environment, Toolbox
from vlmroll.turns import Gather, ToolLoop
from vlmroll.types import Completion, Rollout, SamplingParams
from vlmroll_processors import Prompt

Sample = Callable[[Sequence[int], Sequence[Prompt], SamplingParams, int], Sequence[tuple[Completion, ...]]]
"""(which shares, their prompts, sampling, number) -> for each of them so many completions."""


def sample_from(generator: Generator) -> Sample:
    """The first turns of a generator."""
    return lambda shares, prompts, sampling, number: generator.generate(prompts, sampling, number).completions


def generate_shares(
    opened: Opened, sample: Sample, sampling: SamplingParams, gather: Gather = list, *, together: bool = False
) -> list[list[Completion]]:
    """A completion for each start; prompts that need as many completions are sampled together.

    Args:
        gather: list -> the concatenated lists of all processes.
        together: all processes have to call `sample` together, one of them perhaps without prompts.
    """
    units: list[tuple[int, Prompt, list[int]]] = []
    for share, starts in enumerate(opened.starts):
        own: dict[int, tuple[int, Prompt, list[int]]] = {}
        for place, start in enumerate(starts):
            own.setdefault(id(start.prompt), (share, start.prompt, []))[2].append(place)
        units += own.values()
    found = [dict[int, Completion]() for _ in opened.starts]
    counts = [len(places) for _, _, places in units]
    for count in sorted(set(gather(counts) if together else counts)):
        chosen = [unit for unit in units if len(unit[2]) == count]
        # Calls of one round must not draw the same random numbers.
        seed = None if sampling.seed is None else sampling.seed + count
        asked = replace(sampling, seed=seed)
        groups = sample([share for share, _, _ in chosen], [prompt for _, prompt, _ in chosen], asked, count)
        for (share, _, places), group in zip(chosen, groups, strict=True):
            if len(group) != count:
                raise ValueError(
                    f"row {opened.row_ids[share]}: {len(group)} completions came back where {count} were asked for; "
                    "give `num_generations` for each prompt"
                )
            found[share] |= dict(zip(places, group, strict=True))
    return [[its[place] for place in range(len(its))] for its in found]


def assemble(
    opened: Opened,
    completions: Sequence[Sequence[Completion]],
    banned_ids: Container[int] = (),
    vision_ids: Container[int] = (),
) -> list[Rollout]:
    """One rollout for each completion, siblings side by side.

    Args:
        banned_ids: ids that must not be sampled.
        vision_ids: ids that may only be where a turn has brought a picture.

    Raises:
        ValueError: a completion holds such an id.
    """
    for group, row_id in zip(completions, opened.row_ids, strict=True):
        for completion in group:
            pairs = list(zip(completion.completion_ids, completion.sampled, strict=True))
            if found := [i for i, its in pairs if its and i in banned_ids]:
                raise ValueError(
                    f"row {row_id}: the generator sampled the id {found[0]}, which stands for a picture or is banned; "
                    "it must forbid the adapter's vision_ids"
                )
            if found := [i for i, _ in pairs[completion.num_added :] if i in vision_ids]:
                raise ValueError(
                    f"row {row_id}: the completion holds the id {found[0]} of a picture that none of its turns has "
                    "brought; make later prompts with adapter.next_turn"
                )
    columns = zip(opened.shares, opened.starts, completions, opened.rows, opened.row_ids, strict=True)
    return [
        Rollout(
            prompt=start.prompt,
            completion=completion,
            row=row,
            row_id=row_id,
            group=share.group,
            observation=start.observation,
        )
        for share, starts, group, row, row_id in columns
        for start, completion in zip(starts, group, strict=True)
    ]


class Episodes:
    """How the rollouts of a run come about.

    Args:
        generator: samples.
        opener: opened the rows, and knows the tools of each rollout.
        loop: takes completions on while they call tools; None without tools.
        own: makes completions in the place of generator and loop; see `vlmroll.own_rollouts`.
    """

    def __init__(self, generator: Generator, opener: Opener, *, loop: ToolLoop | None = None, own: Any = None) -> None:
        self._generator, self._opener, self._loop, self._own = generator, opener, loop, own

    def run(self, opened: Opened, sampling: SamplingParams, gather: Gather = list) -> list[Rollout]:
        """One rollout for each start, siblings side by side, without rewards."""
        if self._own is not None:
            found = generate_shares(opened, partial(self._own, opened), sampling)
            return self._assemble(opened, found)
        together = bool(getattr(self._generator, "collective", False))
        found = generate_shares(opened, sample_from(self._generator), sampling, gather, together=together)
        if self._loop is not None:
            starts = [start for starts in opened.starts for start in starts]
            prompts, boxes = [start.prompt for start in starts], [self._toolbox(start) for start in starts]
            completions = [completion for group in found for completion in group]
            options = [start.options for start in starts]
            going = iter(self._loop.go_on(prompts, completions, boxes, sampling, gather, options=options))
            found = [[next(going) for _ in group] for group in found]
        return self._assemble(opened, found)

    def _assemble(self, opened: Opened, found: Sequence[Sequence[Completion]]) -> list[Rollout]:
        return assemble(opened, found, self._generator.banned_ids, self._opener.adapter.vision_ids)

    def _toolbox(self, start: Start) -> Toolbox:
        toolbox = self._opener.toolbox_of(start)
        assert toolbox is not None
        return toolbox


def environments_of(opened: Opened) -> list[Environment]:
    """For each rollout where it took place; empty without environments."""
    return [start.environment for starts in opened.starts for start in starts if start.environment is not None]
