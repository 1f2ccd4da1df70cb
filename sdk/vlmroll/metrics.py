"""Numbers between two log lines, aggregated by what they are: means weighted by count, minima, maxima, sums."""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

Kind = Literal["mean", "min", "max", "sum"]
Entry = tuple[Kind, float, float]  # kind, running value (the total for a mean), weight
_RESERVED = "loss grad_norm learning_rate epoch step reward reward_std frac_reward_zero_std entropy kl num_tokens"
RESERVED = (*_RESERVED.split(), "step_time", "cispo_clip_ratio")
_PREFIXES = "rewards/ completions/ prompts/ images/ batch/ clip_ratio/ sampling/ profiling/ eval_"
RESERVED_PREFIXES = tuple(_PREFIXES.split())
"""Names of the trainer's own metrics, which a reward function must not mix its numbers into."""

Gather = Callable[[list[Any]], list[Any]]


class Metrics:
    """Collects metrics of one mode, train or eval, until they are logged.

    Example:
        >>> metrics = Metrics("GRPOTrainer")
        >>> metrics.add_mean("reward", 1.0)
        ... metrics.add_mean("reward", 0.0, weight=3)
        >>> metrics.flush(lambda x: x)
        {'reward': 0.25}
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._entries: dict[str, Entry] = {}
        self._said: set[str] = set()
        self.columns: dict[str, list[Any]] = {}

    def add(self, kind: Kind, name: str, value: float, weight: float = 1.0) -> None:
        """Take a number in; NaN is left out, for it means that there was nothing to measure."""
        if math.isnan(value) or (kind == "mean" and weight == 0):
            return
        entry: Entry = (kind, value * weight if kind == "mean" else value, weight)
        known = self._entries.get(name)
        self._entries[name] = entry if known is None else _merge(name, known, entry)

    def add_mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add to a mean, weighted by how many things `value` is the mean of."""
        self.add("mean", name, value, weight)

    def add_spread(self, prefix: str, values: Sequence[float], suffix: str = "") -> None:
        """Mean, minimum and maximum of some values, as `{prefix}mean{suffix}` and so on."""
        if values:
            self.add_mean(f"{prefix}mean{suffix}", sum(values) / len(values), len(values))
            self.add("min", f"{prefix}min{suffix}", min(values))
            self.add("max", f"{prefix}max{suffix}", max(values))

    def mean_so_far(self, name: str) -> tuple[float, float]:
        """A mean of this process since the last log line, and its weight."""
        _, total, weight = self._entries[name]
        return total / weight, weight

    def first_time(self, what: str) -> bool:
        """Whether nobody has asked about `what` before; for warnings that are given once."""
        known = what in self._said
        self._said.add(what)
        return not known

    def log_metric(self, name: str, value: Any) -> None:
        """Add a number that a reward function logs, to the mean under its name.

        Raises:
            ValueError: not a number, or a name of the trainer's own metrics.
        """
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"log_metric: {name!r} is a metric of the trainer itself; choose another name")
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"log_metric: {name!r} needs a number, got {value!r}") from error
        self.add_mean(name, number)

    def add_column(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completions table: one value for each completion."""
        self.columns.setdefault(column, []).extend(values)

    def take_columns(self) -> dict[str, list[Any]]:
        """The columns added since the last call."""
        columns, self.columns = self.columns, {}
        return columns

    @contextlib.contextmanager
    def timed(self, what: str) -> Generator[None]:
        """Measure the seconds that the block takes."""
        start = time.perf_counter()
        yield
        self.add_time(what, time.perf_counter() - start)

    def add_time(self, what: str, seconds: float) -> None:
        """Add the seconds that something took."""
        self.add_mean(f"profiling/Time taken: {self._owner}.{what}", seconds)

    def flush(self, gather: Gather) -> dict[str, float]:
        """The values over all processes; starts anew.

        Args:
            gather: list -> the concatenated lists of all processes.
        """
        merged: dict[str, Entry] = {}
        for name, entry in sorted(gather(list(self._entries.items()))):
            merged[name] = entry if name not in merged else _merge(name, merged[name], entry)
        self._entries = {}
        return {name: total / weight if kind == "mean" else total for name, (kind, total, weight) in merged.items()}


def _merge(name: str, one: Entry, other: Entry) -> Entry:
    if one[0] != other[0]:
        raise ValueError(f"metric {name!r} is both a {one[0]} and a {other[0]}")
    if one[0] in ("mean", "sum"):
        return one[0], one[1] + other[1], one[2] + other[2]
    return one[0], (min if one[0] == "min" else max)(one[1], other[1]), one[2] + other[2]
