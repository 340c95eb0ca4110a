"""``steelyard worker``: run attempts for a run that goes on elsewhere."""

import argparse

from steelyard.cli import joining
from steelyard.cli.train import Subparsers
from steelyard.run.remote_worker import WorkerOptions, run_worker


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "worker",
        help="run attempts for a run that goes on elsewhere",
        description=(
            "Lease attempts from a coordinator and carry them through in sandboxes on this machine, until SIGTERM or "
            "Ctrl-C. CONFIG gives environment, sandbox and limits; environment and grader must be those of the run."
        ),
        epilog=joining.EPILOG,
    )
    joining.add_arguments(parser)
    parser.add_argument("--gateway", required=True, metavar="URL", help="where the gateway of the run is")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    joining.require_url("--gateway", options.gateway)
    asked = WorkerOptions(**joining.common(options), gateway=options.gateway)
    return joining.run_until_told(run_worker(joining.read_config(options), asked))
