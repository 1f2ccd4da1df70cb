"""The command `vlmroll`, also `python -m vlmroll`."""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    from vlmroll import check, serve

    parser = argparse.ArgumentParser(prog="vlmroll", description="GRPO and RLOO for vision-language and text models.")
    commands = parser.add_subparsers(dest="command", required=True)
    check.add_arguments(commands.add_parser("check", help="compare generators with the policy, before a long run"))
    serve.add_arguments(commands.add_parser("serve", help="start vLLM's server so that training can use it"))
    args, more = parser.parse_known_args(arguments)
    if args.command == "serve":
        serve.run(args, more)
        return 0
    if more:
        parser.error(f"unknown arguments: {' '.join(more)}")
    return check.run(args)


if __name__ == "__main__":
    sys.exit(main())
