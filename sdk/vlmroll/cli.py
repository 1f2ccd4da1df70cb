"""The command `vlmroll`, also `python -m vlmroll`."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    from vlmroll import check, serve
    from vlmroll.bench import command as bench

    parser = argparse.ArgumentParser(prog="vlmroll", description="GRPO and RLOO for vision-language and text models.")
    commands = parser.add_subparsers(dest="command", required=True)
    check.add_arguments(commands.add_parser("check", help="compare generators with the policy, before a long run"))
    bench.add_arguments(commands.add_parser("bench", help="compare two ways to train by running them in turn"))
    serve.add_arguments(commands.add_parser("serve", help="start vLLM's server so that training can use it"))
    args, more = parser.parse_known_args(arguments)
    if args.command == "serve":
        serve.run(args, more)
        return 0
    if more:
        parser.error(f"unknown arguments: {' '.join(more)}")
    return bench.run(args) if args.command == "bench" else check.run(args)


if __name__ == "__main__":
    sys.exit(main())
