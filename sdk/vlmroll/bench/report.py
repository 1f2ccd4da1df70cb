"""What a comparison found: as a table, as JSON and as a picture."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmroll.bench.runs import MEASURES, Run, values_of
from vlmroll.bench.sides import Side
from vlmroll.bench.verdicts import Comparison

_UNTOLD = {"output_dir", "logging_dir", "run_name", "seed", "data_seed"}  # options that differ between any two runs
_MOST_OPTIONS = 12
_LONGEST = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """Two sides and all of their runs; prints as a table.

    Attributes:
        sides: the first is what the second is compared with.
        runs: of both sides, in the order in which they ran.
    """

    sides: tuple[Side, Side]
    runs: tuple[Run, ...]

    def of(self, side: Side) -> tuple[Run, ...]:
        """The runs of a side."""
        return tuple(run for run in self.runs if run.side == side.name)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Of each measure that all runs have: time per step, peak memory, reward."""
        first, second = (self.of(side) for side in self.sides)
        pairs = ((measure, values_of(first, measure), values_of(second, measure)) for measure in MEASURES)
        return tuple(Comparison(measure=m, first=a, second=b) for m, a, b in pairs if a is not None and b is not None)

    def comparison(self, name: str) -> Comparison:
        """The comparison of a measure, such as "time per step".

        Raises:
            KeyError: not all runs have such a measure.
        """
        found = {comparison.measure.name: comparison for comparison in self.comparisons}
        return found[name]

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know before one believes the numbers: other work, a busy machine, other options and versions."""
        return tuple(_notes(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: sides, comparisons, notes, and each run with its whole record."""
        return {
            "sides": [{"name": side.name, "command": list(side.command)} for side in self.sides],
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
            "notes": list(self.notes),
            "runs": [
                {"seconds_per_step": run.seconds_per_step, "warmup_steps": run.warmup_steps, **run.record}
                for run in self.runs
            ],
        }

    def to_json(self) -> str:
        """The text of `report.json`."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def plot(self, path: Path | str) -> None:
        """Draw the curves of reward and of time per step, with the band of each side's runs.

        Raises:
            ImportError: matplotlib is not installed; `pip install "vlmroll[bench]"` brings it.
        """
        from vlmroll.bench.curves import draw

        draw(self, Path(path))

    def __str__(self) -> str:
        one, other = (side.name for side in self.sides)
        rows = [["", one, other, f"{other} / {one}", "same side", "verdict"]]
        rows += [_cells(comparison) for comparison in self.comparisons]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        seeds, counts = {run.seed for run in self.runs}, len(self.runs) // 2
        explained = (
            f"{counts} runs a side, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}, in turn. Columns: median and "
            f"standard deviation between runs of the side; {other} over {one}, or for rewards {other} minus {one}; "
            "what two sides that are the same would show in 99 of 100 comparisons."
        )
        return "\n".join([*lines, "", explained, *(f"- {note}" for note in self.notes)])


def _cells(comparison: Comparison) -> list[str]:
    measure, inside = comparison.measure, comparison.inside
    form = "{:.3f}" if measure.is_ratio else "{:+.4f}"
    sides = [
        _number(median) + _spread(spread, measure.is_ratio)
        for median, spread in zip(comparison.medians, comparison.spreads, strict=True)
    ]
    chance = "-" if inside is None else " to ".join(form.format(bound) for bound in inside)
    name = f"{measure.name} ({measure.unit})" if measure.unit else measure.name
    return [name, *sides, form.format(comparison.estimate), chance, comparison.verdict]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _spread(spread: float | None, is_ratio: bool) -> str:
    if spread is None:
        return ""
    return f" ± {spread:.1%}" if is_ratio else f" ± {spread:.2g}"


def _notes(report: BenchReport) -> Iterator[str]:
    one, other = report.sides
    tokens = [{run.num_tokens for run in report.of(side)} for side in report.sides]
    if tokens[0] != tokens[1] and None not in tokens[0] | tokens[1]:
        counts = (_range({value for value in counts if value is not None}) for counts in tokens)
        yield "the sides did not do the same work: tokens seen were {} and {}".format(*counts)
    steps = [{len(run.training["step_seconds"]) for run in report.of(side)} for side in report.sides]
    if steps[0] != steps[1]:
        yield "the sides trained for different numbers of steps: {} and {}".format(*map(_range, steps))
    yield from _busy(report)
    if len({run.seed for run in report.runs}) == 1 and any(run.rewards for run in report.runs):
        yield "a verdict on rewards needs several seeds: repeats of one seed are the same draw"
    first, second = (report.of(side)[0] for side in report.sides)
    for kind, ours, theirs in _differing(first, second):
        yield f"{kind}: {_short(ours)} in {one.name}, {_short(theirs)} in {other.name}"


def _busy(report: BenchReport) -> Iterator[str]:
    loads = [load[0] for run in report.runs for load in _loads(run.record["machine"])]
    cores = report.runs[0].record["machine"]["usable_cores"]
    if loads and max(loads) > cores + 0.5:
        yield f"the machine was busy: a load average of up to {max(loads):.1f} on {cores} cores"


def _loads(machine: Mapping[str, Any]) -> list[list[float]]:
    return [load for load in (machine["load_at_start"], machine["load_at_end"]) if load]


def _differing(first: Run, second: Run) -> Iterator[tuple[str, Any, Any]]:
    """Versions, commits and options that both sides have and that differ."""
    for name, ours in first.record["versions"].items():
        theirs = second.record["versions"].get(name)
        if ours != theirs:
            yield name, ours, theirs
    for name, ours in first.record["installations"].items():
        theirs = second.record["installations"].get(name)
        if ours and theirs and ours["commit"] != theirs["commit"]:
            yield f"commit of {name}", ours["commit"], theirs["commit"]
    ours, theirs = first.training["configuration"], second.training["configuration"]
    names = [n for n in ours if n in theirs and n not in _UNTOLD and not n.startswith("_") and ours[n] != theirs[n]]
    for name in names[:_MOST_OPTIONS]:
        yield name, ours[name], theirs[name]
    if len(names) > _MOST_OPTIONS:
        yield "more options", f"{len(names) - _MOST_OPTIONS} of them", "see report.json"


def _range(values: set[Any]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
