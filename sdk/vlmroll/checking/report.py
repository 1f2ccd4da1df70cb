"""What `vlmroll check` found, as data and as a table."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Result = Literal["passed", "failed", "refused", "not run"]

STARTS = "starts"
PICTURES = "pictures"
PROMPT_IDS = "prompt ids"
GREEDY = "greedy tokens"
LOGPROBS = "log-probabilities"
VISION_IDS = "vision ids"
SYNCED = "weights synced"
RESTORED = "weights restored"
LINES = (STARTS, PROMPT_IDS, PICTURES, GREEDY, LOGPROBS, VISION_IDS, SYNCED, RESTORED)
"""Names of all outcomes; the first is there where a generator did not start, the third where it takes no pictures."""
_CELLS: Mapping[Result, str] = {"passed": "yes", "failed": "NO", "refused": "refused", "not run": "not run"}
_NONE = "-"


class CheckError(ValueError):
    """A generator does not do what training relies on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One thing that was looked at.

    Attributes:
        name: one of `LINES`.
        result: "refused" where the generator says by design that it cannot; "not run" where there was no way to tell.
        value: what the table shows in place of "yes".
        detail: what is wrong, why it was not run, or what else there is to know.
    """

    name: str
    result: Result
    value: str = ""
    detail: str = ""

    @property
    def cell(self) -> str:
        """What the table shows."""
        return self.value if self.value and self.result == "passed" else _CELLS[self.result]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far a generator's log-probabilities are from the policy's own, for one kind of prompts.

    Attributes:
        kind: "text only", "one picture" or "many pictures".
        temperature: of the samples.
        mean, max: of the absolute differences over all tokens, in nats.
        num_tokens: how many tokens were compared.
    """

    kind: str
    temperature: float
    mean: float
    max: float
    num_tokens: int

    @property
    def name(self) -> str:
        """Its line in the table."""
        return f"  {self.kind}, temperature {self.temperature:g}"

    def __str__(self) -> str:
        return f"{self.mean:.1e} ({self.max:.1e})"


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorReport:
    """What one generator does.

    Attributes:
        name: of the generator.
        outcomes: in the order in which they were found.
        differences: of log-probabilities, by kind of prompts and temperature.
        tokens_per_second: sampled tokens of a few short prompts, to tell a slow set-up; None where nothing was sampled.
    """

    name: str
    outcomes: tuple[Outcome, ...]
    differences: tuple[Difference, ...] = ()
    tokens_per_second: float | None = None

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """What failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.result == "failed")

    def cells(self) -> dict[str, str]:
        """Line of the table -> what it shows."""
        found = {outcome.name: outcome.cell for outcome in self.outcomes}
        found |= {difference.name: str(difference) for difference in self.differences}
        if self.tokens_per_second is not None:
            found["tokens per second"] = f"{self.tokens_per_second:.0f}"
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What all generators do, for one policy; prints as a table.

    Attributes:
        model: what the policy was loaded from.
        dtype: of its weights.
        device: where it is.
        prompts: kind of prompts -> how many were asked.
        tolerance: largest mean difference of log-probabilities that passes.
        generators: one report for each.
    """

    model: str
    dtype: str
    device: str
    prompts: Mapping[str, int]
    tolerance: float
    generators: tuple[GeneratorReport, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing that ran has failed."""
        return not any(generator.failures for generator in self.generators)

    def raise_for_failures(self) -> None:
        """Raise unless everything that ran has passed.

        Raises:
            CheckError: names the generators and what was wrong.
        """
        faults = [f"{g.name}: {o.name}: {o.detail}" for g in self.generators for o in g.failures]
        if faults:
            raise CheckError("; ".join(faults))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with `passed`."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        asked = ", ".join(f"{count} {kind}" for kind, count in self.prompts.items())
        columns = [generator.cells() for generator in self.generators]
        there = {name for column in columns for name in column}
        order = dict.fromkeys([*LINES[: LINES.index(LOGPROBS) + 1], *_difference_names(self), *LINES])
        rows = [["", *(generator.name for generator in self.generators)]]
        rows += [
            [name, *(column.get(name, _NONE) for column in columns)]
            for name in (*order, "tokens per second")
            if name in there
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"{self.model}: {self.dtype} on {self.device}; prompts: {asked}"]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if any(generator.differences for generator in self.generators):
            lines.append(
                "Under log-probabilities: mean (largest) difference to the policy's own, in nats; the mean may be at "
                f"most {self.tolerance:g}."
            )
        lines += [f"{g.name}, {o.name}: {_noted(o)}" for g in self.generators for o in g.outcomes if o.detail]
        return "\n".join(lines)


def _difference_names(report: CheckReport) -> Iterator[str]:
    for generator in report.generators:
        yield from (difference.name for difference in generator.differences)


def _noted(outcome: Outcome) -> str:
    return outcome.detail if outcome.result == "passed" else f"{outcome.result}: {outcome.detail}"
