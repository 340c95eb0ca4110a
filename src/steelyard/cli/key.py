"""``steelyard key``: print a key with which a worker, scorer, trainer or operator may call the coordinator."""

import argparse
import sys

from steelyard.cli.train import Subparsers
from steelyard.clock import SystemClock
from steelyard.coordinator.capability import Role
from steelyard.errors import InputError
from steelyard.run.directory import existing_directory
from steelyard.run.secret import issue_key

_DAY_S = 86_400.0
_MAX_DAYS = 3660.0


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "key",
        help="a key for a worker, scorer, trainer or operator elsewhere",
        description=(
            "Print a key for the coordinator of a run. It is a password until it expires and cannot be called back: "
            "write it into a file of mode 600 on the machine that uses it."
        ),
    )
    parser.add_argument("run", metavar="RUN", help="run directory, with the secret that signs")
    parser.add_argument("role", metavar="ROLE", choices=[str(role) for role in Role], help=", ".join(Role))
    parser.add_argument("name", metavar="NAME", help="of the one process that uses it: letters, digits, _ and -")
    parser.add_argument("--days", type=float, default=30.0, metavar="N", help="until it expires (default: 30)")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if not 0 < options.days <= _MAX_DAYS:
        raise InputError(f"--days must be > 0 and <= {_MAX_DAYS:.0f}, got {options.days}")
    directory = existing_directory(options.run)
    expires_at_s = SystemClock().now_s() + options.days * _DAY_S
    sys.stdout.write(issue_key(directory, Role(options.role), options.name, expires_at_s) + "\n")
    return 0
