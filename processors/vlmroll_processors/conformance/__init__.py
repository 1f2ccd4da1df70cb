"""Proves that an adapter keeps its contract, on CPU, with a tiny random model or with none.

    from vlmroll_processors import load_adapter
    from vlmroll_processors.conformance import check

    report = check(load_adapter("path/or/hub-id"), model=model)
    print(report)               # a table
    report.raise_for_failures()

On the command line: `python -m vlmroll_processors.conformance MODEL`, and as tests of your own suite, with the model in
an environment variable: `CONFORMANCE_MODEL=MODEL python -m pytest --pyargs vlmroll_processors.conformance`.
"""

from vlmroll_processors.conformance.kit import CHECKS, check
from vlmroll_processors.conformance.report import ConformanceError, Outcome, Report

__all__ = ["CHECKS", "ConformanceError", "Outcome", "Report", "check"]
