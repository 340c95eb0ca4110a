"""``steelyard scorer``: grade artifacts for a run that goes on elsewhere."""

import argparse

from steelyard.cli import joining
from steelyard.cli.train import Subparsers
from steelyard.errors import InputError
from steelyard.run.remote_scorer import ScorerOptions, run_scorer


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "scorer",
        help="grade artifacts for a run that goes on elsewhere",
        description=(
            "Take jobs from a coordinator and grade their artifacts in processes and sandboxes on this machine, until "
            "SIGTERM or Ctrl-C. CONFIG gives environment, sandbox and limits; the grader must be that of the run."
        ),
        epilog=joining.EPILOG,
    )
    joining.add_arguments(parser)
    parser.add_argument(
        "--processes", type=int, metavar="N", help="grader processes (default: scoring.num_workers, at least one)"
    )
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if options.processes is not None and options.processes < 1:
        raise InputError(f"--processes must be >= 1, got {options.processes}")
    asked = ScorerOptions(**joining.common(options), num_processes=options.processes)
    return joining.run_until_told(run_scorer(joining.read_config(options), asked))
