"""Compares generators with the policy that they sample for, before a long run.

    from vlmroll.checking import check_generators

    report = check_generators(model, adapter, {"mine": generator})
    print(report)               # a table
    report.raise_for_failures()

On the command line: `vlmroll check MODEL`.
"""

from vlmroll.checking.kit import Bench, check_generators, examine
from vlmroll.checking.report import CheckError, CheckReport, Difference, GeneratorReport, Outcome

__all__ = [
    "Bench",
    "CheckError",
    "CheckReport",
    "Difference",
    "GeneratorReport",
    "Outcome",
    "check_generators",
    "examine",
]
