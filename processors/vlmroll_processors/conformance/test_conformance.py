"""The kit as tests: `CONFORMANCE_MODEL=... python -m pytest --pyargs vlmroll_processors.conformance`.

With `CONFORMANCE_WEIGHTS=1` the weights are loaded too and the checks that need a model are run.
"""

import os

import pytest

from vlmroll_processors.conformance.kit import CHECKS, check_by_name
from vlmroll_processors.conformance.report import Report


@pytest.fixture(scope="module")
def report() -> Report:
    """All checks of the model that the environment names."""
    name = os.environ.get("CONFORMANCE_MODEL")
    if not name:
        pytest.fail("set CONFORMANCE_MODEL to a hub id or a path")
    return check_by_name(name, weights=os.environ.get("CONFORMANCE_WEIGHTS") == "1")


@pytest.mark.parametrize("name", CHECKS)
def test_contract(report: Report, name: str) -> None:
    """One check of the kit."""
    (outcome,) = (outcome for outcome in report.outcomes if outcome.name == name)
    if outcome.result == "not run":
        pytest.skip(outcome.detail)
    assert outcome.result == "passed", outcome.detail
