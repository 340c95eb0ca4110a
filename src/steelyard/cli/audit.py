"""``steelyard audit``: prove a run from its journal and stores alone."""

import argparse
import sys

from steelyard.cli.train import Subparsers
from steelyard.errors import InputError
from steelyard.run.auditing import audit_run, audit_run_deeply
from steelyard.run.directory import existing_directory


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "audit",
        help="prove a run from its journal and stores alone",
        description="Check every invariant of a run, running or ended, from its journal and stores alone.",
        epilog="exit codes: 0 all hold, 1 one is broken (the first counter-example is printed), 2 no run there",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also run the kept weights again over a sample of the recorded tokens and compare log-probabilities",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the sample of --deep (default: 0)")
    parser.add_argument(
        "--attempts", type=int, default=32, metavar="N", help="attempts that --deep draws of each version (default: 32)"
    )
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if options.attempts < 1:
        raise InputError(f"--attempts must be >= 1, got {options.attempts}")
    directory = existing_directory(options.run)
    if options.deep:
        report = audit_run_deeply(directory, seed=options.seed, num_attempts=options.attempts)
    else:
        report = audit_run(directory)
    for line in report.lines():
        sys.stdout.write(line + "\n")
    verdict = "passed" if report.is_passed else f"FAILED: {', '.join(report.broken)}"
    sys.stdout.write(f"audit {verdict}\n")
    return 0 if report.is_passed else 1
