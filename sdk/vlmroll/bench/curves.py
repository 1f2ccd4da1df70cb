"""The picture of a comparison; needs matplotlib."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmroll.bench.runs import Run

if TYPE_CHECKING:
    from vlmroll.bench.report import BenchReport

_COLOURS = ("#0072b2", "#d55e00")  # told apart with any colour vision


def draw(report: "BenchReport", path: Path) -> None:
    """Curves of the reward, where it was logged, and of the time per step: each side's median and its runs' range."""
    from matplotlib.figure import Figure  # not pyplot: that would choose a window system

    kinds: list[tuple[str, Callable[[Run], Sequence[tuple[int, float]]]]] = [
        ("time per step (s)", lambda r: r.step_seconds)
    ]
    if any(run.rewards for run in report.runs):
        kinds.insert(0, ("reward", lambda r: r.rewards))
    figure = Figure(figsize=(6 * len(kinds), 4), layout="constrained")
    for index, (label, read) in enumerate(kinds):
        axes: Any = figure.add_subplot(1, len(kinds), index + 1)
        for side, colour in zip(report.sides, _COLOURS, strict=True):
            steps, low, middle, high = band([read(run) for run in report.of(side)])
            axes.plot(steps, middle, color=colour, label=side.name)
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("median of the runs, and their range")
    figure.savefig(path, dpi=120)


def band(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps, and at each the least value of the curves, their median and the greatest.

    Example:
        >>> band([[(1, 0.0), (2, 4.0)], [(1, 1.0), (2, 2.0)]])
        ([1, 2], [0.0, 2.0], [0.5, 3.0], [1.0, 4.0])
    """
    at: defaultdict[int, list[float]] = defaultdict(list)
    for curve in curves:
        for step, value in curve:
            at[step].append(value)
    steps = sorted(at)
    values = [at[step] for step in steps]
    return steps, [min(v) for v in values], [statistics.median(v) for v in values], [max(v) for v in values]
