"""From the rows of a round to the prompts that its rollouts begin with: which are this process's, what is in them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vlmroll import data
from vlmroll.observations import is_chat, last_text, with_observation
from vlmroll.tools import Environment, EnvironmentPool, Part, Toolbox, defused, reset_all
from vlmroll_processors import ProcessorAdapter, Prompt, PromptTooLong
from vlmroll_processors.messages import placed_row
from vlmroll_processors.rendering import template_kwargs_of
from vlmroll_processors.types import Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one process generates of one prompt: `count` completions for the round's prompt number `group`.

    `first` says whether the first completion of the group is among them.
    """

    group: int
    count: int
    first: bool = True


def share_of(num_prompts: int, num_generations: int, rank: int, world_size: int) -> list[Share]:
    """Cut a round into equal runs of completions, one for each process; a group may lie on two processes.

    Example:
        >>> [(share.group, share.count) for share in share_of(2, 4, rank=0, world_size=2)]
        [(0, 4)]
    """
    total = num_prompts * num_generations
    size = -(-total // world_size)
    first, last = min(rank * size, total), min((rank + 1) * size, total)
    shares: list[Share] = []
    for group in range(num_prompts):
        start, end = group * num_generations, (group + 1) * num_generations
        if (count := min(end, last) - max(start, first)) > 0:
            shares.append(Share(group=group, count=count, first=first <= start))
    return shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What one rollout begins with.

    Attributes:
        prompt: its prompt; siblings share one object, unless an environment told them different things.
        environment: where it takes place, already reset; None without one.
        observation: what the environment added to the row's prompt.
        options: the row's own arguments for the chat template.
    """

    prompt: Prompt
    environment: Environment | None = None
    observation: tuple[Part, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Opener:
    """Makes the starts of rollouts: tools go into the chat template, environments are reset and may add to the prompt.

    Args:
        adapter: encodes.
        toolbox: the tools that every rollout may call; None for none.
        pool: the environments; None for none.
        seconds: time limit of a reset.
        special: texts that the tokenizer reads as special tokens, which an environment cannot write.
    """

    def __init__(
        self,
        adapter: ProcessorAdapter,
        toolbox: Toolbox | None = None,
        pool: EnvironmentPool | None = None,
        seconds: float | None = None,
        special: frozenset[str] = frozenset(),
    ) -> None:
        self.adapter, self._toolbox, self._pool, self._seconds = adapter, toolbox, pool, seconds
        self._special = special
        self._taken: list[Environment] = []

    def open(self, rows: Sequence[Row], row_ids: Sequence[int], counts: Sequence[int]) -> list[tuple[Start, ...]]:
        """For each row as many starts as its count says.

        Raises:
            ValueError: names the row.
            PromptTooLong: the same.
        """
        places, before = [i for i, count in enumerate(counts) for _ in range(count)], len(self._taken)
        chosen, ids = [rows[i] for i in places], [row_ids[i] for i in places]
        environments, observed = self._reset(chosen, ids)
        distinct: list[tuple[int, tuple[Part, ...]]] = []  # each is encoded once, and siblings mostly see the same
        for seen in zip(places, observed, strict=True):
            if seen not in distinct[-1:] and seen not in distinct:
                distinct.append(seen)
        asked = [self.asked(rows[i], row_ids[i], its) for i, its in distinct]
        try:
            encoded = self.adapter.encode(asked, [row_ids[i] for i, _ in distinct])
        except PromptTooLong:
            self._release(before)  # other rows will take the places of these
            raise
        starts = iter(
            Start(
                prompt=encoded[distinct.index((i, observation))],
                environment=environment,
                observation=observation,
                options=template_kwargs_of(rows[i], where=f"row {row_ids[i]}"),
            )
            for i, environment, observation in zip(places, environments, observed, strict=True)
        )
        return [tuple(islice(starts, count)) for count in counts]

    def _reset(
        self, rows: Sequence[Row], row_ids: Sequence[int]
    ) -> tuple[Sequence[Environment | None], Sequence[tuple[Part, ...]]]:
        """For each rollout its environment, and what that said."""
        if self._pool is None:
            return [None] * len(rows), [()] * len(rows)
        where = [f"row {row_id}" for row_id in row_ids]
        taken = [self._take(self._pool, row, its) for row, its in zip(rows, where, strict=True)]
        said = reset_all(taken, rows, seconds=self._seconds, where=where)
        texts = [last_text(row.get("prompt")) for row in rows]
        return taken, [defused(its, self._special, text) for its, text in zip(said, texts, strict=True)]

    def asked(self, row: Row, row_id: int, observation: Sequence[Part] = ()) -> Row:
        """The row as it is encoded: with the tools, and with what its environment added."""
        schemas: Sequence[Any] = () if self._toolbox is None else self._toolbox.schemas
        if self._pool is not None:
            schemas = self._pool.schemas_of(self._pool.kind_of(row, where=f"row {row_id}"))
        if not schemas and not observation:
            return row
        where, options = f"row {row_id}", template_kwargs_of(row, where=f"row {row_id}")
        if isinstance(row.get("prompt"), str):
            raise ValueError(
                f"{where}, column 'prompt': it is a plain string, and tools and environments need chat messages; "
                "give [{'role': 'user', 'content': ...}]"
            )
        changed = {**row}
        if schemas:
            changed["chat_template_kwargs"] = {**options, "tools": list(schemas)}
        if observation and is_chat(row.get("prompt")):  # what is no chat is refused when it is encoded
            changed = {**placed_row(changed, where=where)}
            changed["prompt"] = with_observation(changed["prompt"], observation, where=f"{where}, column 'prompt'")
        return changed

    def toolbox_of(self, start: Start) -> Toolbox | None:
        """The tools of a rollout."""
        return self._toolbox if start.environment is None else start.environment.toolbox

    def _take(self, pool: EnvironmentPool, row: Row, where: str) -> Environment:
        self._taken.append(pool.take(pool.kind_of(row, where=where)))
        return self._taken[-1]

    def release(self) -> None:
        """Give all environments back for the next round."""
        self._release(0)

    def _release(self, keep: int) -> None:
        while len(self._taken) > keep:
            assert self._pool is not None
            self._pool.give_back(self._taken.pop())


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The starts of some shares, with the rows that they come from; each has one entry for each share.

    Attributes:
        num_skipped: rows that were left out because their prompts were too long.
    """

    shares: tuple[Share, ...]
    starts: tuple[tuple[Start, ...], ...]
    rows: tuple[Row, ...]
    row_ids: tuple[int, ...]
    num_skipped: int = 0


def open_shares(
    opener: Opener,
    rows: Sequence[Row],
    row_ids: Sequence[int],
    shares: Sequence[Share],
    *,
    skip: bool = False,
    replace: bool = True,
) -> Opened:
    """Open the rows of a round that belong to some shares.

    Args:
        skip: leave out rows whose prompts are too long.
        replace: put another row in the place of one that is left out (`data.stand_ins`, the same in all processes);
            else its share is left out.

    Raises:
        PromptTooLong: a prompt is too long, and it is not to be skipped, or there is no other row that fits.
    """
    places = [share.group for share in shares]
    if not skip:
        chosen, ids = [rows[place] for place in places], [row_ids[place] for place in places]
        starts = opener.open(chosen, ids, [share.count for share in shares])
        return Opened(shares=tuple(shares), starts=tuple(starts), rows=tuple(chosen), row_ids=tuple(ids))
    found: list[tuple[Share, tuple[Start, ...], Row, int]] = []
    skipped = 0
    for share in shares:
        others: Iterator[tuple[int, Row]] = data.stand_ins(rows, row_ids, share.group) if replace else iter(())
        row_id, row = row_ids[share.group], rows[share.group]
        while True:
            try:
                (its,) = opener.open([row], [row_id], [share.count])
                found.append((share, its, row, row_id))
                break
            except PromptTooLong as error:
                skipped += share.first
                logger.warning("skipped: %s", error)
                other = next(others, None)
                if other is None and replace:
                    raise
            if other is None:
                break
            row_id, row = other
    columns = list(zip(*found, strict=True)) or [(), (), (), ()]
    return Opened(shares=columns[0], starts=columns[1], rows=columns[2], row_ids=columns[3], num_skipped=skipped)


def check_lengths(opened: Opened, max_new: int, context: int | None) -> None:
    """Refuse prompts that leave no room for the longest completion in the model's context.

    Args:
        max_new: `max_completion_length`.
        context: positions that the model has; None for models without a limit.

    Raises:
        ValueError: names the row.
    """
    for starts, row_id in zip(opened.starts, opened.row_ids, strict=True):
        longest = max((start.prompt for start in starts), key=lambda prompt: prompt.num_tokens)
        if context is not None and longest.num_tokens + max_new > context:
            raise ValueError(
                f"row {row_id}: its prompt has {longest.num_tokens} tokens ({longest.num_image_tokens} of pictures), "
                f"and with max_completion_length={max_new} that is more than the model's {context} positions; shorten "
                "the row, lower max_pixels or max_completion_length, or leave the row out"
            )
