"""``steelyard train``: start a run, resume one, or only check its configuration."""

import argparse
import sys
from pathlib import Path

from steelyard import config_file
from steelyard.config_notes import notes
from steelyard.errors import InputError
from steelyard.run import launch
from steelyard.run.blob_place import check_place

Subparsers = argparse._SubParsersAction  # the only name that argparse gives this type


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train",
        help="train a policy; with --resume go on with a run",
        description="Train a policy. Overrides are dotted keys, such as train.max_steps=10.",
        epilog="exit codes: 0 done, 2 bad input, 3 the run failed and can be resumed, 130 interrupted",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="configuration file (YAML)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, in order")
    parser.add_argument(
        "--resume", metavar="RUN", help="go on with the run in this directory, with its own configuration"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved configuration, stop"
    )
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="where built policies are kept (default: ~/.cache/steelyard)"
    )
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    cache_dir = Path(options.cache_dir) if options.cache_dir else default_cache_dir()
    if options.resume is not None:
        if options.config is not None:
            raise InputError(
                f"--resume RUN takes the run's own configuration, got CONFIG {options.config} and overrides beside it"
            )
        return launch.resume(options.resume, cache_dir=cache_dir)
    if options.config is None:
        raise InputError(
            "CONFIG must be given (or --resume RUN), for example: steelyard train examples/quickstart.yaml"
        )
    config = config_file.load(Path(options.config), options.overrides)
    launch.check_environment(config)
    if options.dry_run:
        check_place(config.blobs)
        sys.stdout.write(config_file.to_yaml(config))
        for note in notes(config):
            sys.stderr.write(f"note: {note}\n")
        return 0
    return launch.start(config, cache_dir=cache_dir)


def default_cache_dir() -> Path:
    """``~/.cache/steelyard``."""
    return Path.home() / ".cache" / "steelyard"
