"""Which rows are generated for when: rounds, and the micro-steps that train on a round.

A round generates for `generation_batch_size / num_generations` prompts over all processes and is trained on for
`steps_per_generation * num_iterations` micro-steps. The loaders here yield micro-steps, which name rows and touch no
picture; the trainer turns the first micro-step of a round into rollouts. So skipping to where a run was stopped costs
nothing, and generates nothing.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from vlmroll_processors.types import Row

logger = logging.getLogger(__name__)


class ChosenRows(Sequence[Row]):
    """Some rows of a dataset, each read when it is asked for: a process reads its own share of a round only."""

    def __init__(self, dataset: Any, row_ids: Sequence[int]) -> None:
        self._dataset = dataset
        self._row_ids = row_ids

    def __len__(self) -> int:
        return len(self._row_ids)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[self._row_ids[index]]

    def others(self, start: int) -> Iterator[tuple[int, Row]]:
        """Number and row of those of the dataset that are not chosen, from the one behind row `start` on."""
        length, chosen = len(self._dataset), set(self._row_ids)
        for step in range(1, length):
            if (row_id := (start + step) % length) not in chosen:
                yield row_id, self._dataset[row_id]


def stand_ins(rows: Sequence[Row], row_ids: Sequence[int], place: int) -> Iterator[tuple[int, Row]]:
    """Number and row of those that may take the place of one in a round.

    They are other rows of the dataset, every place its own, so that no two places take the same; after them, and of a
    stream, which cannot be asked for other rows, they are the others of the round. All processes get the same.
    """
    if isinstance(rows, ChosenRows):
        yield from islice(rows.others(row_ids[0]), place, None, len(rows))
    for step in range(1, len(rows)):
        other = (place + step) % len(rows)
        yield row_ids[other], rows[other]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStep:
    """One micro-batch to train on.

    Attributes:
        epoch, round: the round that it belongs to, counted within the epoch.
        index: its number within the round, over all iterations.
        row_ids: the dataset rows (or numbers in the stream) of the round's prompts, over all processes.
        rows: the rows themselves when they come from a stream.
    """

    epoch: int
    round: int
    index: int
    row_ids: tuple[int, ...]
    rows: tuple[Row, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The numbers that a loader needs.

    Attributes:
        prompts_per_round: over all processes.
        micro_steps_per_round: `steps_per_generation * num_iterations`.
        shuffle: a new order in each epoch.
        seed: of the order.
    """

    prompts_per_round: int
    micro_steps_per_round: int
    shuffle: bool
    seed: int


def _too_small(num_rows: int, prompts_per_round: int) -> ValueError:
    if num_rows == 0:
        return ValueError("the dataset has no rows; give one with at least one generation round of prompts")
    return ValueError(
        f"the dataset has {num_rows} rows but one generation round takes {prompts_per_round} prompts; lower "
        "generation_batch_size (or per_device_train_batch_size, gradient_accumulation_steps) or raise num_generations"
    )


class RoundSampler(Sampler[list[MicroStep]]):
    """Micro-steps over a dataset with a length.

    Rows that do not fill a last round are left out of the epoch: with `shuffle` others in each epoch, else always the
    last ones, which is warned of.

    Raises:
        ValueError: the dataset has fewer rows than one round needs.
    """

    def __init__(self, num_rows: int, schedule: Schedule) -> None:
        self.num_rounds = num_rows // schedule.prompts_per_round
        if self.num_rounds == 0:
            raise _too_small(num_rows, schedule.prompts_per_round)
        if (left := num_rows % schedule.prompts_per_round) and not schedule.shuffle:
            logger.warning("the last %d rows do not fill a generation round and are never trained on", left)
        self._num_rows = num_rows
        self._schedule = schedule
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rounds * self._schedule.micro_steps_per_round

    def __iter__(self) -> Iterator[list[MicroStep]]:
        plan = self._schedule
        order = list(range(self._num_rows))
        if plan.shuffle:
            generator = torch.Generator().manual_seed(plan.seed + self.epoch)
            order = torch.randperm(self._num_rows, generator=generator).tolist()
        for number in range(self.num_rounds):
            row_ids = tuple(order[number * plan.prompts_per_round : (number + 1) * plan.prompts_per_round])
            for index in range(plan.micro_steps_per_round):
                yield [MicroStep(epoch=self.epoch, round=number, index=index, row_ids=row_ids)]


class RoundStream(Sampler[list[MicroStep]]):
    """Micro-steps over a dataset without a length, in the order of the stream.

    A sampler as `RoundSampler` is, and not a dataset, since a resumed run skips micro-steps through a copy of the
    loader that keeps the sampler, and tells the epoch to nothing else.

    Raises:
        ValueError: the stream ends before it has filled one round.
    """

    def __init__(self, rows: Any, schedule: Schedule) -> None:
        self._rows = rows
        self._schedule = schedule
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; a stream of `datasets` shuffles anew by it."""
        self.epoch = epoch
        if hasattr(self._rows, "set_epoch"):
            self._rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[MicroStep]]:
        plan, chunk, number = self._schedule, list[Row](), 0
        for row in self._rows:
            chunk.append(row)
            if len(chunk) < plan.prompts_per_round:
                continue
            first = number * plan.prompts_per_round
            row_ids = tuple(range(first, first + plan.prompts_per_round))
            for index in range(plan.micro_steps_per_round):
                yield [MicroStep(epoch=self.epoch, round=number, index=index, row_ids=row_ids, rows=tuple(chunk))]
            chunk, number = [], number + 1
        if number == 0:
            raise _too_small(len(chunk), plan.prompts_per_round)


class _Same:
    """A dataset whose item is its own index, so that a batch sampler can yield values instead of numbers."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, item: Any) -> Any:
        return item


def _only(items: Sequence[Any]) -> Any:
    return items[0]


def _itself(item: Any) -> Any:
    return item


class RoundLoader(DataLoader[Any]):
    """A data loader of micro-steps that passes the epoch on to its sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self.batch_sampler.set_epoch(epoch)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def round_loader(rows: Any, schedule: Schedule) -> RoundLoader:
    """The loader of a dataset, with or without a length."""
    sized = hasattr(rows, "__len__")
    return RoundLoader(
        _Same(len(rows) if sized else 0),  # pyright: ignore[reportArgumentType]
        batch_sampler=RoundSampler(len(rows), schedule) if sized else RoundStream(rows, schedule),  # pyright: ignore[reportArgumentType]
        collate_fn=_only,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalStep:
    """One batch of rows to evaluate on, over all processes; `number` counts them."""

    number: int
    row_ids: tuple[int, ...]
    rows: tuple[Row, ...]


class EvalStream(IterableDataset[EvalStep]):
    """The rows of an evaluation set in batches of `prompts_per_batch`, the last one as short as it comes."""

    def __init__(self, rows: Any, prompts_per_batch: int) -> None:
        self._rows = rows
        self._size = prompts_per_batch

    def __iter__(self) -> Iterator[EvalStep]:
        chunk: list[Row] = []
        number = 0
        for row in self._rows:
            chunk.append(row)
            if len(chunk) == self._size:
                yield self._step(number, chunk)
                chunk, number = [], number + 1
        if chunk:
            yield self._step(number, chunk)

    def _step(self, number: int, chunk: list[Row]) -> EvalStep:
        first = number * self._size
        return EvalStep(number=number, row_ids=tuple(range(first, first + len(chunk))), rows=tuple(chunk))


class SizedEvalStream(EvalStream):
    """An evaluation set with a length, so that progress bars know their end."""

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)


def eval_loader(rows: Any, prompts_per_batch: int) -> DataLoader[Any]:
    """The loader of an evaluation set."""
    kind = SizedEvalStream if hasattr(rows, "__len__") else EvalStream
    return DataLoader(kind(rows, prompts_per_batch), batch_size=None, collate_fn=_itself)
