"""Names of test cases that are the same in every process, as running tests in several of them asks for."""

import re
from typing import Any, cast


def steady(value: Any) -> str:
    """A value as text, without addresses in memory and in an order that does not change."""
    value = sorted(cast("set[Any]", value), key=str) if isinstance(value, set) else value
    return re.sub(r"( at)? 0x[0-9A-Fa-f]+", "", str(value)).replace("\0", "0")[:60]
