"""What a child process is told when it starts, and how it starts: one JSON file, named on its command line."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from steelyard.errors import SteelyardError
from steelyard.log import log_to_stderr
from steelyard.processes.child import ChildProcess, die_with_parent, pin_to_core
from steelyard.processes.faults import FaultPlan
from steelyard.types import Record

logger = logging.getLogger(__name__)


class ChildOptions(Record, frozen=True, kw_only=True):
    """What every child needs. ``core``: position among the allowed cores, None leaves it free."""

    name: str
    socket_path: str
    parent_pid: int
    core: int | None = None
    fault: FaultPlan | None = None


OptionsT = TypeVar("OptionsT", bound=ChildOptions)


async def start_child(module: str, options: ChildOptions, *, log_folder: Path, num_threads: int = 1) -> ChildProcess:
    """Write the options beside the socket and start ``python -m module <options file>``."""
    path = Path(options.socket_path).with_suffix(".json")
    path.write_bytes(msgspec.json.encode(options))
    log_path = log_folder / f"{options.name}.log"
    return await ChildProcess.start(options.name, module, [str(path)], log_path=log_path, num_threads=num_threads)


def run_child(kind: type[OptionsT], serve: Callable[[OptionsT, asyncio.Event], Awaitable[None]]) -> None:
    """Main function of a child: read the options, tie its life to the parent's, serve until told to stop.

    Args:
        kind: the record of its options.
        serve: serves until the event is set, then cleans up.
    """
    options = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=kind)
    die_with_parent(options.parent_pid)
    log_to_stderr()
    pin_to_core(options.core)
    status = 0
    try:
        asyncio.run(_serve_until_told(options, serve))
    except SteelyardError as error:
        # It says what must hold: whoever reads the end of this log has no use for where in our code it came up.
        logger.error("%s", error)
        status = 1
    # All is closed. Taking an interpreter with torch apart takes seconds for which the user would wait.
    logging.shutdown()
    os._exit(status)


async def _serve_until_told(options: OptionsT, serve: Callable[[OptionsT, asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C reaches the whole terminal; control decides how the run ends.
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    await serve(options, stop)
