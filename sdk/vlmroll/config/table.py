"""The page of options, printed from what the config classes say about themselves.

python -m vlmroll.config.table                  # prints the page
python -m vlmroll.config.table docs/options.md  # writes it, and keeps what stands below the marker
"""

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import GRPOConfig, RLOOConfig
from .generation import GenerationOptions
from .images import ImageOptions
from .logging import LoggingOptions
from .model import ModelOptions
from .objective import ObjectiveOptions
from .options import RETIRED, OptionInfo, describe_options
from .training import TrainingOptions
from .vllm import VLLMOptions

MARKER = "<!-- Written by hand from here on; `python -m vlmroll.config.table docs/options.md` writes what is above. -->"

INTRODUCTION = """# Options

`GRPOConfig` and `RLOOConfig` take every option on this page, and every option of `transformers.TrainingArguments`.
The names are those of TRL 1.16; *new here* marks the others.

* **works**: does what the last column says. A value out of range raises `ValueError`.
* **refused**: any value but the default raises `ValueError`, with the reason given here. Nothing is ignored silently.

A name that is no option raises `TypeError`, with the nearest name."""

SECTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("Model", ModelOptions),
    ("Pictures", ImageOptions),
    ("Generation", GenerationOptions),
    ("Objective", ObjectiveOptions),
    ("Logging", LoggingOptions),
    ("vLLM", VLLMOptions),
    ("`TrainingArguments` with another default, or refused", TrainingOptions),
)


def options_page() -> str:
    """The page up to and including the marker."""
    parts = [INTRODUCTION]
    described = describe_options(GRPOConfig)
    for title, section in SECTIONS:
        parts.append(f"## {title}\n\n" + option_table(described[declared.name] for declared in fields(section)))
    differing = [
        info for name, info in describe_options(RLOOConfig).items() if name not in described or info != described[name]
    ]
    text = "`RLOOConfig` differs from the tables above in these options. The last two exist on `RLOOConfig` only."
    parts.append(f"## RLOO\n\n{text}\n\n" + option_table(differing))
    parts.append("## Retired names\n\nEach of these raises `TypeError` with this text.\n\n" + retired_table())
    return "\n\n".join([*parts, MARKER]) + "\n"


def option_table(options: Iterable[OptionInfo]) -> str:
    """A Markdown table with one row for each option."""
    ordered = sorted(options, key=lambda info: info.refused is not None)  # what works comes first
    rows = [(f"`{info.name}`", f"`{written(info.default)}`", status(info), info.help) for info in ordered]
    return markdown_table([("option", "default", "status", "meaning"), *rows])


def retired_table() -> str:
    """A Markdown table of the names that are gone."""
    return markdown_table([("name", "what to do"), *((f"`{name}`", reason) for name, reason in RETIRED.items())])


def status(info: OptionInfo) -> str:
    """Whether an option works, or why not and what to do."""
    if info.refused is not None:
        return f"refused: {info.refused}"
    return "works, new here" if info.new else "works"


def written(default: object) -> str:
    """A default as one writes it in Python, with double quotes."""
    return f'"{default}"' if isinstance(default, str) else repr(default)


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Rows of cells, the header first, as a Markdown table."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main(arguments: list[str]) -> None:
    """Print the page, or write it to the path in `arguments`."""
    if not arguments:
        print(options_page(), end="")
        return
    page = Path(arguments[0])
    by_hand = page.read_text().partition(MARKER)[2].lstrip("\n") if page.exists() else ""
    page.write_text(options_page() + (f"\n{by_hand}" if by_hand else ""))


if __name__ == "__main__":
    main(sys.argv[1:])
