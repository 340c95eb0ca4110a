"""What ``steelyard worker`` and ``steelyard scorer`` have in common on the command line."""

import argparse
import asyncio
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypedDict

import uvloop

from steelyard import config_file
from steelyard.config import Config
from steelyard.errors import InputError
from steelyard.run.directory import existing_directory

EPILOG = "exit codes: 0 told to stop, 2 bad input or no fit, 3 the coordinator is lost or the run has failed"


class Common(TypedDict):
    """Options of both commands."""

    coordinators: tuple[str, ...]
    key_file: str
    home: str
    artifacts: str | None
    lost_after_s: float
    drain_s: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands."""
    parser.add_argument("config", metavar="CONFIG", help="configuration file of the run (YAML), or run directory")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, in order")
    parser.add_argument(
        "--coordinator",
        action="append",
        required=True,
        metavar="URL",
        help="where the coordinator is; given several times, whichever answers",
    )
    parser.add_argument("--key-file", required=True, metavar="FILE", help="holds the key; one key, one process")
    parser.add_argument(
        "--artifacts", metavar="URL", help="where artifacts lie as this machine sees it (default: what the run says)"
    )
    parser.add_argument(
        "--home",
        metavar="DIR",
        default="~/.cache/steelyard/workers",
        help="where notes of sandboxes and logs are kept, in a folder for each key (default: %(default)s)",
    )
    parser.add_argument(
        "--lost-after",
        type=float,
        default=120.0,
        metavar="S",
        help="give up once the coordinator has been silent for so many seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--drain", type=float, metavar="S", help="seconds for which work under way may go on after a stop"
    )


def common(options: argparse.Namespace) -> Common:
    """The options that both commands take.

    Raises:
        InputError: a number is out of its range, or a URL is none.
    """
    for url in options.coordinator:
        require_url("--coordinator", url)
    if not 0 < options.lost_after < math.inf:
        raise InputError(f"--lost-after must be a number of seconds > 0, got {options.lost_after}")
    if options.drain is not None and not 0 <= options.drain < math.inf:
        raise InputError(f"--drain must be a number of seconds >= 0, got {options.drain}")
    return Common(
        coordinators=tuple(options.coordinator),
        key_file=options.key_file,
        home=options.home,
        artifacts=options.artifacts,
        lost_after_s=options.lost_after,
        drain_s=options.drain,
    )


def require_url(option: str, url: str) -> None:
    """Refuse what is no URL of a server.

    Raises:
        InputError: names the option.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{option} must be http://HOST:PORT or https://HOST, got {url}")


def read_config(options: argparse.Namespace) -> Config:
    """The configuration at CONFIG, a file or a run directory, with the overrides.

    Raises:
        InputError: it cannot be used.
    """
    path = Path(options.config)
    if path.is_dir():
        path = existing_directory(options.config).config
    return config_file.load(path, options.overrides)


def run_until_told(work: Coroutine[Any, Any, None]) -> int:
    """Run to the end; returns the exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)
    return 0
