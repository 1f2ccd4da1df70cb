"""`python -m vlmroll_processors.conformance MODEL`: print the table; exit with 1 when a check fails."""

import argparse
import sys

from vlmroll_processors.conformance.kit import check_by_name


def main(arguments: list[str] | None = None) -> int:
    """Check one model; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vlmroll_processors.conformance", description=__doc__)
    parser.add_argument("model", help="a hub id or a path")
    parser.add_argument("--weights", action="store_true", help="also load the weights and run the checks with a model")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args(arguments)
    report = check_by_name(options.model, weights=options.weights, trust_remote_code=options.trust_remote_code)
    print(report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
