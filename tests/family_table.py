"""Writes the table of families in docs/families.md: `python tests/family_table.py docs/families.md`.

Every cell is what the conformance kit and one step of training found with a tiny random model of the family.
"""

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tiny_models import VISION_FAMILIES, picture, tiny, user
from training_runs import ALGORITHMS, make_trainer
from vlmroll_processors import load_adapter
from vlmroll_processors.conformance import CHECKS, check

HEADER = ("model type", "family", "text only", "1 picture", "many", "mixed batch", "video", "kit", "training step")
START, END = "<!-- families: begin -->", "<!-- families: end -->"
TITLES = {
    "gemma3_panscan": "gemma3, pan and scan",
    "idefics2_split": "idefics2, split pictures",
}


def training(name: str) -> str:
    """One step of each algorithm on a row with three pictures and one with a single picture."""
    sizes = ((64, 48), (120, 40), (40, 100))
    rows = [{"prompt": user("which digit ?", *(picture(*size, 1) for size in sizes[:n]))} for n in (3, 1)]
    done: list[str] = []
    for algorithm in ALGORITHMS:
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"max_steps": 1, "shuffle_dataset": False}
            trainer = make_trainer(algorithm, Path(folder), model=name, data=rows, **options)
            trainer.train()
            (log, *_) = trainer.state.log_history
            assert log["grad_norm"] > 0, (name, algorithm)
            assert log["images/mean_count"] == 2, (name, algorithm)
            done.append(algorithm.upper())
    return ", ".join(done)


@cache
def line_of(name: str) -> str:
    """The family's line of the table."""
    made = tiny(name)
    report = check(load_adapter(made.processor), made.model)
    report.raise_for_failures()
    cells = [value if value.startswith("yes") else "no" for value in report.abilities.values()]
    text, one, many, video, mixed = cells
    passed = sum(outcome.result == "passed" for outcome in report.outcomes)
    kit = f"{passed} of {len(CHECKS)}"
    line = (TITLES.get(name, name), report.family, text, one, many, mixed, video, kit, training(name))
    return f"| {' | '.join(line)} |"


def table() -> str:
    """The whole table."""
    head = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    return "\n".join([*head, *map(line_of, VISION_FAMILIES)])


def main(path: str) -> None:
    """Put the table between its two marks."""
    page = Path(path)
    text = page.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1])
