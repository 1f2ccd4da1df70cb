"""Compare two ways to train by running them in turn, and say what is more than the variance between runs.

Example:
    >>> from vlmroll.bench import Side, run_sides  # doctest: +SKIP
    >>> sides = [
    ...     Side.parse("dense=python train.py --seed {seed}"),
    ...     Side.parse("shared=python train.py --seed {seed} ..."),
    ... ]
    >>> report = run_sides(sides, seeds=(0, 1, 2), out="compared")  # doctest: +SKIP
    >>> print(report)  # doctest: +SKIP
"""

from vlmroll.bench.report import BenchReport
from vlmroll.bench.running import RunFailed, run_sides
from vlmroll.bench.runs import Run
from vlmroll.bench.sides import Side
from vlmroll.bench.verdicts import Comparison, Measure

__all__ = ["BenchReport", "Comparison", "Measure", "Run", "RunFailed", "Side", "run_sides"]
