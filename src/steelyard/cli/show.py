"""``steelyard show``: what the agent did, one rollout at a time, with its tokens, versions and score."""

import argparse
import sys

from steelyard.cli.train import Subparsers
from steelyard.run.directory import existing_directory
from steelyard.run.showing import list_rollouts, show_rollout


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "show",
        help="what the agent did, one rollout at a time",
        description="List the rollouts of a run, or print one with its tokens, versions, log-probabilities and score.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("rollout", nargs="?", metavar="ROLLOUT", help="id of a rollout or attempt; left out: a list")
    parser.add_argument("--tokens", action="store_true", help="every token with its id, log-probability and version")
    parser.add_argument("--last", type=int, default=20, metavar="N", help="how many of the newest to list (default 20)")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    directory = existing_directory(options.run)
    if options.rollout is None:
        for line in list_rollouts(directory, options.last):
            sys.stdout.write(line + "\n")
    else:
        sys.stdout.write(show_rollout(directory, options.rollout, with_tokens=options.tokens))
    return 0
