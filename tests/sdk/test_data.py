"""Which rows each micro-step names, in each epoch and after a run was stopped."""

from collections.abc import Iterator
from typing import Any

import pytest
from accelerate import skip_first_batches  # pyright: ignore[reportMissingTypeStubs]
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from vlmroll.data import EvalStep, MicroStep, Schedule, eval_loader, round_loader

ROWS = [{"prompt": f"question {i}"} for i in range(7)]


class Endless:
    """Rows without a length, in an order that the epoch decides, as a stream of `datasets` has it."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self._rows = rows
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, str]]:
        start = self._epoch % max(1, len(self._rows))
        return iter(self._rows[start:] + self._rows[:start])


def schedule(prompts: int = 3, steps: int = 4, *, shuffle: bool = True, seed: int = 0) -> Schedule:
    return Schedule(prompts_per_round=prompts, micro_steps_per_round=steps, shuffle=shuffle, seed=seed)


def steps_of(loader: DataLoader[Any], epoch: int = 0) -> list[MicroStep]:
    """The micro-steps of an epoch, chosen as `transformers.Trainer` chooses it."""
    for part in (loader, getattr(loader.batch_sampler, "batch_sampler", None)):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)  # pyright: ignore
    return list(loader)


def rounds_of(steps: list[MicroStep]) -> list[tuple[int, ...]]:
    return [step.row_ids for step in steps if step.index == 0]


def test_each_round_has_its_micro_steps_in_order() -> None:
    loader = round_loader(ROWS, schedule(shuffle=False))
    steps = steps_of(loader, 5)
    assert len(loader) == len(steps) == 8
    assert [(step.epoch, step.round, step.index) for step in steps] == [(5, r, i) for r in range(2) for i in range(4)]
    assert [step.row_ids for step in steps] == [(0, 1, 2)] * 4 + [(3, 4, 5)] * 4
    assert {step.rows for step in steps} == {None}


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_an_epoch_asks_each_row_at_most_once(num_rows: int, prompts: int, steps: int, shuffle: bool) -> None:
    if num_rows < prompts:
        num_rows = prompts
    loader = round_loader(list(range(num_rows)), schedule(prompts, steps, shuffle=shuffle))
    found = steps_of(loader)
    asked = [row for ids in rounds_of(found) for row in ids]
    assert len(found) == len(loader) == num_rows // prompts * steps
    assert len(set(asked)) == len(asked) == num_rows // prompts * prompts
    assert set(asked) <= set(range(num_rows))


def test_each_epoch_and_seed_has_an_order_of_its_own() -> None:
    orders = {
        tuple(rounds_of(steps_of(round_loader(list(range(30)), schedule(seed=seed)), epoch)))
        for seed, epoch in ((0, 0), (0, 1), (0, 2), (50, 0))
    }
    assert len(orders) == 4
    again = [rounds_of(steps_of(round_loader(list(range(30)), schedule()), epoch)) for epoch in (1, 1)]
    assert again[0] == again[1]


def test_a_stream_brings_its_rows() -> None:
    loader = round_loader(Endless(ROWS), schedule())
    steps = steps_of(loader)
    assert [(step.round, step.index) for step in steps] == [(r, i) for r in range(2) for i in range(4)]
    assert [step.row_ids for step in steps] == [(0, 1, 2)] * 4 + [(3, 4, 5)] * 4
    assert [step.rows for step in steps] == [tuple(ROWS[:3])] * 4 + [tuple(ROWS[3:6])] * 4
    with pytest.raises(TypeError):
        len(loader)


def test_a_stream_of_datasets_shuffles_by_epoch() -> None:
    rows = Dataset.from_list([{"prompt": str(i)} for i in range(40)]).to_iterable_dataset()
    loader = round_loader(rows.shuffle(seed=1, buffer_size=40), schedule())
    seen = [[step.rows for step in steps_of(loader, epoch)] for epoch in (0, 1, 0)]
    assert seen[0] == seen[2]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("skipped", [1, 4, 6])
@pytest.mark.parametrize("stream", [False, True])
def test_a_resumed_epoch_goes_on_where_it_was(stream: bool, skipped: int, epoch: int) -> None:
    rows = Endless(ROWS) if stream else ROWS
    whole = steps_of(round_loader(rows, schedule()), epoch)
    resumed = skip_first_batches(round_loader(Endless(ROWS) if stream else ROWS, schedule()), skipped)
    assert steps_of(resumed, epoch) == whole[skipped:]
    assert whole[0].epoch == epoch


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_too_few_rows_for_a_round(stream: bool, num_rows: int) -> None:
    rows = Endless(ROWS[:num_rows]) if stream else ROWS[:num_rows]
    message = f"the dataset has {num_rows} rows but one generation round takes 3 prompts; lower generation_batch_size"
    message = message if num_rows else "the dataset has no rows"
    with pytest.raises(ValueError, match=message):
        list(round_loader(rows, schedule()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("size", "batches"), [(3, [3, 3, 1]), (7, [7]), (10, [7]), (1, [1] * 7)])
def test_evaluation_takes_every_row_once(stream: bool, size: int, batches: list[int]) -> None:
    loader = eval_loader(Endless(ROWS) if stream else ROWS, size)
    steps: list[EvalStep] = list(loader)
    assert [len(step.rows) for step in steps] == batches
    assert [row for step in steps for row in step.rows] == ROWS
    assert [row for step in steps for row in step.row_ids] == list(range(7))
    assert [step.number for step in steps] == list(range(len(batches)))
    if stream:
        with pytest.raises(TypeError):
            len(loader)
    else:
        assert len(loader) == len(batches)
