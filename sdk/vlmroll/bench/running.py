"""Run both sides in turn, each run in a fresh process, and gather the records."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vlmroll.bench.report import BenchReport
from vlmroll.bench.runs import Run
from vlmroll.bench.sides import Side

_TAIL = 30  # lines of a failed run's output


class RunFailed(RuntimeError):
    """A run did not end well, or trained nothing; the message has the side, the seed and the end of its output."""


def run_sides(
    sides: Sequence[Side],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    repeats: int = 1,
    warmup_steps: int = 1,
    out: Path | str | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> BenchReport:
    """Run A B A B ... over the seeds, as often as `repeats` says, and write what came out.

    Args:
        sides: two; the second is compared with the first.
        seeds: filled in for `{seed}`; of one seed alone `repeats` are the runs that tell the variance.
        repeats: runs of each side with each seed.
        warmup_steps: steps at the beginning of each run that no time is taken of.
        out: a new or empty folder, which gets `report.json`, `report.md`, `curves.png` (where matplotlib is installed)
            and `runs/NAME-SEED-REPEAT.json`, each with what made it; default: a folder named after the time.
        say: gets a line for each run.

    Raises:
        ValueError: the sides or numbers cannot be compared; nothing has run then.
        RunFailed: a run failed; the records of those before it are in `out`.
    """
    first, second = _checked(sides, seeds=seeds, repeats=repeats, warmup_steps=warmup_steps)
    folder = _fresh_folder(out)
    if find_spec("matplotlib") is None:
        say('curves.png will not be drawn, because matplotlib is not installed: pip install "vlmroll[bench]"')
    plan = [(side, seed, repeat) for repeat in range(repeats) for seed in seeds for side in (first, second)]
    runs: list[Run] = []
    for number, (side, seed, repeat) in enumerate(plan, start=1):
        run = _run(side, seed, repeat, warmup_steps, folder / "runs")
        seconds = run.record["seconds"]
        say(f"run {number} of {len(plan)}: {run.title}: {run.seconds_per_step:.4g} s per step, {seconds:.1f} s in all")
        runs.append(run)
    report = BenchReport(sides=(first, second), runs=tuple(runs))
    (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "report.md").write_text(f"{report}\n", encoding="utf-8")
    if find_spec("matplotlib") is not None:
        report.plot(folder / "curves.png")
    say(f"written to {folder}")
    return report


def _checked(sides: Sequence[Side], *, seeds: Sequence[int], repeats: int, warmup_steps: int) -> tuple[Side, Side]:
    if len(sides) != 2 or sides[0].name == sides[1].name:
        names = ", ".join(side.name for side in sides) or "none"
        raise ValueError(f"two sides of different names are compared, not {len(sides)}: {names}")
    if not seeds or len(set(seeds)) < len(seeds) or repeats < 1 or warmup_steps < 0:
        raise ValueError(
            f"needed are seeds that differ, 1 repeat or more and 0 warm-up steps or more, not seeds={list(seeds)}, "
            f"repeats={repeats}, warmup_steps={warmup_steps}"
        )
    for side in sides:
        if len(seeds) > 1 and not side.takes_seed:
            raise ValueError(
                f"side {side.name}: the command holds no {{seed}}, so that seeds {list(seeds)} would not reach it; "
                "write it where the script takes its seed, or give one seed and several repeats"
            )
    return sides[0], sides[1]


def _fresh_folder(out: Path | str | None) -> Path:
    folder = Path(time.strftime("bench-%Y%m%d-%H%M%S") if out is None else out).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: runs of two comparisons would be mixed up there")
    (folder / "runs").mkdir(parents=True)
    return folder


def _run(side: Side, seed: int, repeat: int, warmup_steps: int, folder: Path) -> Run:
    """One run: its output goes to a log, its record beside it."""
    name = f"{side.name}-{seed}-{repeat}"
    path, log, out = folder / f"{name}.json", folder / f"{name}.log", folder / name
    out.mkdir()
    variables, words = side.filled(seed=seed, out=out, record=path)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with log.open("wb") as output:
        env = {**os.environ, **variables}
        done = subprocess.run(
            words, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    what = f"side {side.name}, seed {seed}, repeat {repeat}"
    if done.returncode != 0 or not path.is_file():
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:])
        raise RunFailed(f"{what}: the command ended with status {done.returncode}; the end of {log}:\n{tail}")
    made_by: dict[str, Any] = {"side": side.name, "seed": seed, "repeat": repeat, "started": started}
    made_by |= {"command": list(side.command), "variables": variables, "words": words, "folder": os.getcwd()}
    record = made_by | json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not any(out.iterdir()):
        out.rmdir()
    try:
        return Run(side=side.name, seed=seed, repeat=repeat, warmup_steps=warmup_steps, record=record)
    except ValueError as error:
        raise RunFailed(str(error)) from error
