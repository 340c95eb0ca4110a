"""``steelyard doctor``: who waits for whom, since when, until which deadline."""

import argparse
import sys

from steelyard import config_file
from steelyard.cli.train import Subparsers
from steelyard.clock import SystemClock
from steelyard.coordinator.doctor import diagnose
from steelyard.coordinator.records import CoordinatorSettings
from steelyard.coordinator.recovery import read_state
from steelyard.run.directory import existing_directory
from steelyard.run.journals import open_journal_reader


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="who waits for whom, since when",
        description="Read the journal of a run, going on or not, print who waits for whom and what is alarming.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    directory = existing_directory(options.run)
    config = config_file.load(directory.config)
    reader = open_journal_reader(config, directory)
    state = read_state(reader)
    settings = CoordinatorSettings.from_config(config)
    diagnosis = diagnose(state, settings, SystemClock().now_s())
    if state.run is None:
        sys.stdout.write("the run has not begun\n")
    elif state.run.is_finished:
        sys.stdout.write("the run is finished; nobody waits\n")
    for line in diagnosis.lines():
        sys.stdout.write(line + "\n")
    return 0
