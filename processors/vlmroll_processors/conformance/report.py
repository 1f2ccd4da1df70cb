"""What the kit found, as data and as a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Result = Literal["passed", "failed", "not run"]


class ConformanceError(ValueError):
    """An adapter does not keep its contract."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One check.

    Attributes:
        name: of the check.
        result: "not run" where a check needs a model and none was given, or does not apply.
        detail: what was wrong, or why it was not run.
    """

    name: str
    result: Result
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All checks of one adapter.

    Attributes:
        family: its family's name.
        processor: class name of its processor.
        abilities: kind of prompt -> "yes", or why not; the kinds are text only, one picture, many pictures, mixed
            batch and video.
        outcomes: in the order of the checks.
    """

    family: str
    processor: str
    abilities: Mapping[str, str]
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The checks that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.result == "failed")

    def raise_for_failures(self) -> None:
        """Raise unless every check that ran has passed.

        Raises:
            ConformanceError: names the checks and what was wrong.
        """
        if self.failures:
            raise ConformanceError(
                f"{self.processor} does not keep the contract of the family {self.family}: "
                + "; ".join(f"{failure.name}: {failure.detail}" for failure in self.failures)
            )

    def __str__(self) -> str:
        width = max(len(line) for line in (*self.abilities, *(outcome.name for outcome in self.outcomes)))
        lines = [f"{self.family} ({self.processor})"]
        lines += [f"  {name:<{width}}  {value}" for name, value in self.abilities.items()]
        lines += [
            f"  {outcome.name:<{width}}  {outcome.result}" + (f": {outcome.detail}" if outcome.detail else "")
            for outcome in self.outcomes
        ]
        return "\n".join(lines)
