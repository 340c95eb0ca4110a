"""The process of ``steelyard coordinator``: a run's coordinator alone, for workers, scorers and a trainer elsewhere.

::

    lock -> journal (on PostgreSQL: wait for its lease) -> recover -> listen -> serve until told to stop

*Consumes* calls of docs/protocol.md. *Waits for* the journal. *Unblocked by* SIGTERM, Ctrl-C, or a failure of the run,
which ends the process: what the journal holds is then what counts.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from steelyard import config_file
from steelyard.clock import Clock, SystemClock
from steelyard.config import Config
from steelyard.coordinator.capability import Role
from steelyard.coordinator.protocol import PROTOCOL_VERSION
from steelyard.coordinator.service import Coordinator
from steelyard.durable import storage_errors
from steelyard.environments.base import Environment, Services
from steelyard.environments.registry import make_environment
from steelyard.ids import RandomIds
from steelyard.log import log_to_file
from steelyard.metrics import Counters
from steelyard.processes.garbage import collect_rarely
from steelyard.processes.supervision import end_all
from steelyard.run.coordinators import open_coordinator, serving
from steelyard.run.describing import describe_run
from steelyard.run.directory import RunDirectory, RunLock, existing_directory, new_directory, write_config
from steelyard.run.journals import check_journal, open_journal, require_new_journal
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.traces.ledger import read_ledger
from steelyard.traces.shared_ledger import SharedLedger

GO_ON = "steelyard coordinator"
_STANDBY_S = 10 * 365 * 86_400.0
"""A standby waits until it is told to stop."""

Say = Callable[[str], None]
"""Takes a line for people."""


def coordinate(target: str, overrides: list[str], say: Say) -> None:
    """Serve the run in the directory ``target``, or a new one of the configuration file ``target``, until told to stop.

    Raises:
        InputError: the configuration, the directory or the port cannot be used; nothing was started.
        RunError: the run failed; serving it again goes on with it.
    """
    is_new = not Path(target).is_dir()
    directory, config = _begin(target, overrides) if is_new else _find(target, overrides)
    with contextlib.ExitStack() as stack:
        if config.journal.kind == "sqlite":
            # The file has one writer. A journal in a database has a lease of its own, which standbys wait for.
            stack.enter_context(RunLock(directory))
        if is_new:
            require_new_journal(config, directory)
            write_config(config, directory)
        stack.enter_context(contextlib.closing(log_to_file(directory.log)))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, directory, say))


def _find(target: str, overrides: list[str]) -> tuple[RunDirectory, Config]:
    directory = existing_directory(target)
    return directory, config_file.load(directory.config, overrides)


def _begin(target: str, overrides: list[str]) -> tuple[RunDirectory, Config]:
    config = config_file.load(Path(target), overrides)
    check_journal(config)
    return new_directory(config.run.name, config.run.dir, GO_ON), config


async def _serve(config: Config, directory: RunDirectory, say: Say) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait(), name="told to stop")
    served = asyncio.create_task(_serve_until_failure(config, directory, say), name="coordinator")
    try:
        await asyncio.wait((stopped, served), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all((stopped, served))
        say(f"stopped; to go on, type: {GO_ON} {directory.path}")
    if served.done() and not served.cancelled():
        served.result()  # it failed, by itself or while it was ended


async def _serve_until_failure(config: Config, directory: RunDirectory, say: Say) -> None:
    """Returns never: it is cancelled, or raises what the run failed with."""
    clock, counters = SystemClock(), Counters()
    async with AsyncExitStack() as stack:
        environment = make_environment(
            config.environment.kind, config.environment.options, Services(run_function=run_function_calls)
        )
        coordinator = await _open(config, directory, environment, clock, counters, say, stack)
        collect_rarely()
        description = describe_run(config, environment, directory)
        url = await stack.enter_async_context(
            serving(config, directory, coordinator, clock, counters, frozenset(Role), description)
        )
        say(f"the coordinator of {directory.path} listens at {url} (protocol {PROTOCOL_VERSION})")
        say(f"a key for a worker, scorer, trainer or operator: steelyard key {directory.path} ROLE NAME")
        raise await coordinator.failed()


async def _open(
    config: Config,
    directory: RunDirectory,
    environment: Environment,
    clock: Clock,
    counters: Counters,
    say: Say,
    stack: AsyncExitStack,
) -> Coordinator:
    """The coordinator on its journal; what is opened is closed by ``stack``."""
    directory.make_folders()
    journal = open_journal(config, directory, wait_s=_STANDBY_S)
    stack.push_async_callback(journal.close)  # also where the coordinator does not come to own it
    if config.journal.kind == "postgres":
        say("taking the journal; where another coordinator has it, standing by until its lease ends")
    coordinator = await open_coordinator(
        config,
        environment,
        journal,
        Recordings(directory),
        clock=clock,
        ids=RandomIds(),
        counters=counters,
    )
    stack.push_async_callback(coordinator.close)
    return coordinator


class Recordings:
    """Ends recordings of gateways elsewhere, and tells what a control process had recorded that led this run before.

    Nothing but the files of ended attempts is written: others are at work in the same stores.

    Raises:
        StorageFailed: the disk refuses.
        IntegrityError: the ledger of the control process cannot be read.
    """

    def __init__(self, directory: RunDirectory) -> None:
        ledger = directory.traces / "recorded.log"
        self._elsewhere = SharedLedger(directory.recorded)
        if ledger.exists():
            with storage_errors(str(ledger)), ledger.open("rb") as file:
                os.fsync(file.fileno())  # what is booked as lost must not vanish from the count in a power cut
        self._before = read_ledger(ledger)

    def discard(self, attempt_id: str) -> int:
        """As :meth:`OpenTraces.discard`; an attempt was recorded in one of the two places."""
        return self._elsewhere.end(attempt_id) or self._before.get(attempt_id, 0)
