"""``steelyard audit``: prove a run from its journal and stores alone."""

import argparse
import sys

from steelyard.cli.train import Subparsers
from steelyard.run.auditing import audit_run
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
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    report = audit_run(existing_directory(options.run))
    for line in report.lines():
        sys.stdout.write(line + "\n")
    verdict = "passed" if report.is_passed else f"FAILED: {', '.join(report.broken)}"
    sys.stdout.write(f"audit {verdict}\n")
    return 0 if report.is_passed else 1
