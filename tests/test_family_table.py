"""The table of families in the docs is what the kit and a training step find today."""

import pytest

from family_table import END, START, line_of
from test_layout import ROOT
from tiny_models import VISION_FAMILIES

PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_the_line_of_a_family(name: str) -> None:
    assert line_of(name) in PAGE.splitlines(), "run `python tests/family_table.py docs/families.md`"


def test_the_table_has_no_other_lines() -> None:
    lines = [line for line in PAGE.split(START)[1].split(END)[0].splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(VISION_FAMILIES)
