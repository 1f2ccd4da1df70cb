"""`vlmroll bench`: its options and exit status."""

import argparse
import sys
from pathlib import Path

_EPILOG = """
Sides run in turn, A B A B. A COMMAND is `[VAR=VALUE ...] PYTHON (SCRIPT | -m MODULE) ARGS` of any interpreter; {seed}
and {out} (a folder of the run's own) are filled in. Every transformers.Trainer is recorded, TRL's too. The exit status
is 1 when a run failed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlmroll bench`."""
    parser.add_argument(
        "--side", action="append", required=True, metavar="NAME=COMMAND", help="given twice; the second is judged"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs a side and seed (default: 1)")
    parser.add_argument("--warmup-steps", type=int, default=1, metavar="N", help="steps not timed (default: 1)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for tables, curves and records")
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    """Run both sides and print the table; the exit status."""
    from vlmroll.bench import RunFailed, Side, run_sides

    try:
        sides = [Side.parse(text) for text in args.side]
        report = run_sides(sides, seeds=args.seeds, repeats=args.repeats, warmup_steps=args.warmup_steps, out=args.out)
    except (ValueError, OSError, RunFailed) as error:
        print(f"vlmroll bench: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0
