"""vlmroll against TRL 1.16: time per step, time of the training pass alone, peak memory, on the same work.

    python -m pip install -e ".[bench]"
    python examples/benchmarks/against_trl.py --out compared                  # everything
    python examples/benchmarks/against_trl.py --out compared w1 w2 --rounds 6  # some workloads
    python examples/benchmarks/against_trl.py --out compared w5               # scaling, with its picture

Each run is a fresh process (see `workloads.py`) under the recorder of `vlmroll bench`; the sides run in turn, once for
each seed. Steps of the first round warm up and are left out. A comparison counts only if both sides saw the number of
tokens that the workload says and every completion had its full length; else the command ends with an error.

Printed for each workload: the median over the runs of the seconds per step of each side, TRL / vlmroll with the least
and greatest ratio of a pair of runs, the same for the training pass alone, and peak memory (resident, of the process,
libraries included). `against_trl.json` holds all of it, `w1/report.md` and so on what `vlmroll bench` says, and
`scaling.png` time and memory against completions and pictures.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmroll.bench import BenchReport, Run, Side, run_sides
from workloads import PASS, SIDES, WORKLOADS, Workload, tiny

SCRIPT = Path(__file__).with_name("workloads.py")
COMPLETIONS = {2: "w5-g2", 4: "w5-g4", 8: "w1", 16: "w5-g16", 32: "w5-g32"}
PICTURES = {1: "w5-p1", 2: "w1", 4: "w5-p4", 8: "w5-p8"}
"""The workloads of the two scalings."""
SCALING = tuple(dict.fromkeys([*COMPLETIONS.values(), *PICTURES.values(), "w5-p8-g16"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One quantity of both sides.

    Attributes:
        vlmroll, trl: one value for each run, paired by seed.
    """

    vlmroll: tuple[float, ...]
    trl: tuple[float, ...]

    @property
    def medians(self) -> tuple[float, float]:
        """Of vlmroll and of TRL."""
        return statistics.median(self.vlmroll), statistics.median(self.trl)

    @property
    def ratios(self) -> tuple[float, ...]:
        """TRL / vlmroll for each pair of runs."""
        return tuple(theirs / ours for ours, theirs in zip(self.vlmroll, self.trl, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain data: values, medians, ratio of the medians, spread of the pairs' ratios."""
        ours, theirs = self.medians
        return {
            "vlmroll": {"median": ours, "values": self.vlmroll},
            "trl": {"median": theirs, "values": self.trl},
            "trl / vlmroll": {"of the medians": theirs / ours, "least": min(self.ratios), "most": max(self.ratios)},
        }


def compare(workload: Workload, *, steps: int, seeds: Sequence[int], out: Path, small: bool) -> dict[str, Measured]:
    """Run both sides and check that they did the same work.

    Raises:
        ValueError: a run saw other tokens, or completions of another length, than the workload says.
    """
    options = f"--workload {workload.name} --seed {{seed}} --steps {steps}".split() + ["--tiny"] * small
    sides = [Side(name=side, command=(sys.executable, str(SCRIPT), "--side", side, *options)) for side in SIDES]
    report = run_sides(sides, seeds=seeds, warmup_steps=workload.iterations, out=out)
    for run in report.runs:
        check_work(run, tiny(workload) if small else workload, steps)
    return {
        "seconds per step": _measured(report, lambda run: run.seconds_per_step),
        "seconds of the training pass": _measured(report, lambda run: _pass_seconds(run, workload.iterations)),
        "peak memory in MiB": _measured(report, lambda run: run.memory),
    }


def check_work(run: Run, workload: Workload, steps: int) -> None:
    """Raise ValueError unless the run did what the workload says, by its own logs."""
    rounds = steps // workload.iterations
    tokens = workload.warmup.num_tokens + (rounds - 1) * workload.num_tokens
    logs = run.training["logs"]
    lengths = {log[key] for log in logs for key in ("completions/min_length", "completions/max_length") if key in log}
    done = {
        "optimizer steps": (len(run.training["step_seconds"]), steps),
        "training passes": (sum(PASS in log for log in logs), steps),
        "tokens of prompts and completions": (run.num_tokens, tokens),
        "lengths of completions": (lengths, {workload.new_tokens}),
    }
    for what, (found, expected) in done.items():
        if found != expected:
            raise ValueError(f"{workload.name}, {run.title}: {what} {found}, not {expected}")


def _measured(report: BenchReport, value: Callable[[Run], float]) -> Measured:
    ours, theirs = (tuple(value(run) for run in report.of(side)) for side in report.sides)
    return Measured(vlmroll=ours, trl=theirs)


def _pass_seconds(run: Run, warmup: int) -> float:
    return statistics.median([log[PASS] for log in run.training["logs"] if PASS in log][warmup:])


Results = dict[str, dict[str, Measured]]


def table(results: Results) -> str:
    """The results for people."""
    lines = [
        "| workload | what | vlmroll | TRL | TRL / vlmroll | least to most |",
        "|---|---|---|---|---|---|",
    ]
    for name, quantities in results.items():
        for what, measured in quantities.items():
            ours, theirs = (f"{value:.4g}" if value < 1000 else f"{value:.0f}" for value in measured.medians)
            ratio = measured.medians[1] / measured.medians[0]
            spread = f"{min(measured.ratios):.2f} to {max(measured.ratios):.2f}"
            lines.append(f"| {name} | {what} | {ours} | {theirs} | {ratio:.2f} | {spread} |")
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """Time and memory against completions (left) and pictures (right), both tools in each panel.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    scalings = {"completions of a prompt of 2 pictures": COMPLETIONS, "pictures of a prompt, 8 completions": PICTURES}
    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col")
    for column, (label, points) in enumerate(scalings.items()):
        for row, what in enumerate(("seconds per step", "peak memory in MiB")):
            panel = panels[row][column]
            found = {number: results[name][what] for number, name in points.items() if name in results}
            for i, side in enumerate(SIDES):
                panel.plot(list(found), [measured.medians[i] for measured in found.values()], "o-", label=side)
            panel.set_xscale("log", base=2)
            panel.set_xticks(list(points), [str(number) for number in points])
            panel.set_ylim(bottom=0)
            panel.set_ylabel(what)
            panel.grid(alpha=0.3)
        panels[1][column].set_xlabel(label)
    panels[0][0].legend()
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["all", "w5", *WORKLOADS]
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", default=["all"], help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for records and results")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side, with seeds from 0")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of generation in a run, the first to warm up")
    parser.add_argument("--tiny", action="store_true", help="the same kind of work, very small: only tries the command")
    args = parser.parse_args(arguments)
    if unknown := set(args.workloads) - set(names):
        parser.error(f"no workload {sorted(unknown)}; there are {', '.join(names)}")
    chosen = [name for word in args.workloads for name in {"all": WORKLOADS, "w5": SCALING}.get(word, (word,))]
    results: Results = {}
    for name in dict.fromkeys(chosen):
        workload = WORKLOADS[name]
        steps = args.rounds * workload.iterations
        results[name] = compare(workload, steps=steps, seeds=range(args.repeats), out=args.out / name, small=args.tiny)
        plain = {name: {what: m.to_dict() for what, m in quantities.items()} for name, quantities in results.items()}
        (args.out / "against_trl.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    if set(SCALING) & set(results):
        draw(results, args.out / "scaling.png")


if __name__ == "__main__":
    main()
