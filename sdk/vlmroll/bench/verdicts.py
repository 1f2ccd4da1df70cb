"""From the runs of two sides to a verdict: is the difference more than what runs of the same side differ by?

Runs of a side scatter. Two sides that are the same differ by chance, in 99 of 100 comparisons by at most the margin

    margin = t(0.995, n + m - 2) * s * sqrt(1 / n + 1 / m) * sqrt(pi / 2)

with n and m runs, s the standard deviation between runs of the same side (pooled over both sides) and t Student's
quantile, which is what makes few runs honest: with 3 a side the margin is 4.7 s, with 10 it is 1.6 s. The last factor
is there because medians are compared: one disturbed run does not move them, but they scatter more than means. Ratios
are compared by their logarithms. Runs alternate between the sides, so a machine that becomes slower widens the margin.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

INSIDE = "inside run-to-run variance"
TOO_FEW = "too few runs to tell"

# Student's t at 0.995, by degrees of freedom; between two entries the lower one counts, which widens the margin.
_T = {
    **{1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707, 7: 3.499, 8: 3.355, 9: 3.250, 10: 3.169},
    **{11: 3.106, 12: 3.055, 13: 3.012, 14: 2.977, 15: 2.947, 16: 2.921, 18: 2.878, 20: 2.845, 25: 2.787},
    **{30: 2.750, 40: 2.704, 60: 2.660, 120: 2.617},
}


def student_t(degrees: int) -> float:
    """Student's t quantile at 0.995, or slightly more, for 1 or more degrees of freedom."""
    assert degrees >= 1
    return _T[max(known for known in _T if known <= degrees)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Something that is compared.

    Attributes:
        name: for the table.
        unit: of its values, or "".
        below, above: words for a second side whose value is lower or higher than the first one's.
        is_ratio: sides are compared by the ratio of their (positive) values, not by the difference.
        least: the smallest difference that is called one. For ratios a share: 0.01 is one per cent.
    """

    name: str
    unit: str
    below: str
    above: str
    is_ratio: bool
    least: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One measure of both sides.

    Attributes:
        measure: what was measured.
        first, second: one value for each run that counts (see `vlmroll.bench.runs.values_of`).

    Raises:
        ValueError: a side has no value, or one that is not finite, or not positive where a ratio is formed.
    """

    measure: Measure
    first: tuple[float, ...]
    second: tuple[float, ...]

    def __post_init__(self) -> None:
        values = (*self.first, *self.second)
        if not self.first or not self.second:
            raise ValueError(f"{self.measure.name}: each side needs a value")
        if not all(math.isfinite(value) and (value > 0 or not self.measure.is_ratio) for value in values):
            raise ValueError(f"{self.measure.name}: values must be finite, and positive for a ratio: {values}")

    @property
    def medians(self) -> tuple[float, float]:
        """Of the first and of the second side, in the measure's unit."""
        return statistics.median(self.first), statistics.median(self.second)

    @property
    def spreads(self) -> tuple[float | None, float | None]:
        """Standard deviation between runs of the same side, relative (0.02 is 2 %) for ratios; None for one run."""
        one, other = (
            statistics.stdev(v) if len(v) > 1 else None for v in (self._scale(self.first), self._scale(self.second))
        )
        return one, other

    @property
    def estimate(self) -> float:
        """Second over first for ratios, second minus first for differences, of the medians."""
        first, second = self.medians
        return second / first if self.measure.is_ratio else second - first

    @property
    def margin(self) -> float | None:
        """By how much two sides that are the same may differ, as a logarithm for ratios; None for one run a side."""
        one, other = self._scale(self.first), self._scale(self.second)
        n, m = len(one), len(other)
        if n + m <= 2:
            return None
        squares = sum((value - statistics.fmean(side)) ** 2 for side in (one, other) for value in side)
        s = math.sqrt(squares / (n + m - 2))
        by_chance = student_t(n + m - 2) * s * math.sqrt((1 / n + 1 / m) * math.pi / 2)
        return max(by_chance, math.log1p(self.measure.least) if self.measure.is_ratio else self.measure.least)

    @property
    def inside(self) -> tuple[float, float] | None:
        """Least and greatest `estimate` that is inside run-to-run variance; None for one run a side."""
        margin = self.margin
        if margin is None:
            return None
        return (math.exp(-margin), math.exp(margin)) if self.measure.is_ratio else (-margin, margin)

    @property
    def verdict(self) -> str:
        """The measure's word for the second side, "inside run-to-run variance", or "too few runs to tell"."""
        margin = self.margin
        if margin is None:
            return TOO_FEW
        shift = math.log(self.estimate) if self.measure.is_ratio else self.estimate
        if abs(shift) <= margin:
            return INSIDE
        return self.measure.above if shift > 0 else self.measure.below

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        (first, second), (one, other), inside = self.medians, self.spreads, self.inside
        return {
            "measure": self.measure.name,
            "unit": self.measure.unit,
            "first": {"median": first, "spread": one, "values": list(self.first)},
            "second": {"median": second, "spread": other, "values": list(self.second)},
            "ratio" if self.measure.is_ratio else "difference": self.estimate,
            "inside": None if inside is None else list(inside),
            "verdict": self.verdict,
        }

    def _scale(self, values: Sequence[float]) -> list[float]:
        return [math.log(value) if self.measure.is_ratio else value for value in values]
