"""``steelyard coordinator``: serve the coordinator of a run to workers, scorers and a trainer elsewhere."""

import argparse
import sys

from steelyard.cli.train import Subparsers
from steelyard.run.coordinating import coordinate


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "coordinator",
        help="serve the coordinator of a run to workers, scorers and a trainer elsewhere",
        description=(
            "Serve the coordinator of a new run of CONFIG, or of the run in RUN, until SIGTERM or Ctrl-C. On a journal "
            "in PostgreSQL a second one stands by and takes over when the first is gone."
        ),
        epilog="exit codes: 0 told to stop, 2 bad input, 3 the run failed; serving RUN again goes on with it",
    )
    parser.add_argument("target", metavar="CONFIG|RUN", help="configuration file (YAML), or run directory")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, such as coordinator.port=8410")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    coordinate(options.target, list(options.overrides), _say)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
