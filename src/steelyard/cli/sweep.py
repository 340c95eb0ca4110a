"""``steelyard sweep``: delete what a run stored and never handed in."""

import argparse
import asyncio
import sys

from steelyard import config_file
from steelyard.cli.train import Subparsers
from steelyard.clock import SystemClock
from steelyard.errors import InputError
from steelyard.run.directory import RunLock, existing_directory
from steelyard.run.sweeping import sweep_run


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "sweep",
        help="delete what a run stored and never handed in",
        description="Delete traces and artifacts that the journal does not refer to, of attempts that are over. The run"
        " must not be going on. A resume does the same by itself.",
        epilog="exit codes: 0 done, 2 no run there or it is going on, 3 a store did not answer",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--min-age",
        type=float,
        metavar="SECONDS",
        help="leave what is younger, for another process may be about to report it (default: blobs.max_upload_s)",
    )
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if options.min_age is not None and not options.min_age >= 0:
        raise InputError(f"--min-age must be >= 0, got {options.min_age}")
    directory = existing_directory(options.run)
    with RunLock(directory):
        config = config_file.load(directory.config)
        swept = asyncio.run(sweep_run(directory, config, SystemClock().now_s(), options.min_age))
    sys.stdout.write(f"deleted {len(swept.attempt_ids)} traces and {len(swept.artifact_digests)} artifacts\n")
    return 0
