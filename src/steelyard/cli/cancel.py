"""``steelyard cancel``: drop a group, or all live groups of a task, from a run that goes on."""

import argparse
import sys
from pathlib import Path

from steelyard.cli.train import Subparsers
from steelyard.errors import InputError
from steelyard.run.cancelling import cancel, local_access, read_key


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "cancel",
        help="drop a group or a task from a run that goes on",
        description=(
            "Cancel a group, or all live groups of a task: their attempts are told to stop, their prompts are booked "
            "as dropped, and others take their places. Needs a run whose coordinator serves others."
        ),
        epilog="exit codes: 0 cancelled, 1 there was nothing to cancel, 2 bad input, 3 the coordinator was not reached",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory on this machine")
    parser.add_argument("--coordinator", metavar="URL", help="in place of RUN, with --key-file; several with commas")
    parser.add_argument("--key-file", metavar="FILE", help="an operator's key (steelyard key RUN operator NAME)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--group", metavar="ID", help="cancel this group")
    what.add_argument("--task", metavar="ID", help="cancel all live groups of this task")
    parser.add_argument("--reason", default="cancelled by hand", help="kept in the journal")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    url, key = _access(options)
    cancelled = cancel(url, key, group_id=options.group, task_id=options.task, reason=options.reason)
    for group_id in cancelled:
        sys.stdout.write(f"cancelled {group_id}\n")
    if not cancelled:
        sys.stdout.write("there was nothing to cancel\n")
    return 0 if cancelled else 1


def _access(options: argparse.Namespace) -> tuple[str, str]:
    if options.run is not None and options.coordinator is None and options.key_file is None:
        return local_access(options.run)
    if options.run is None and options.coordinator is not None and options.key_file is not None:
        return options.coordinator, read_key(Path(options.key_file))
    raise InputError("either RUN must be given, or --coordinator URL with --key-file FILE")
