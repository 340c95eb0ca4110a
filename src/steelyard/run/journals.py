"""The journal that a configuration names: opened for the coordinator, or for reading."""

import importlib
import os
import socket
from typing import TYPE_CHECKING

from steelyard.config import Config
from steelyard.coordinator.journal.base import FaultPoint, Journal, StateReader, no_fault
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.journal.sqlite import SqliteJournal, SqliteJournalReader
from steelyard.errors import ConfigError, InputError, RunDirectoryError
from steelyard.run.directory import RunDirectory

if TYPE_CHECKING:
    from steelyard.coordinator.journal.postgres_database import PostgresPlace


def open_journal(
    config: Config, directory: RunDirectory, fault: FaultPoint = no_fault, *, wait_s: float | None = None
) -> Journal:
    """The journal of a run, to be written by this process. Nothing is opened before its first call.

    Args:
        wait_s: how long a standby waits for another process's lease to end; None waits long enough for the lease of a
            dead process. Without a meaning where there is no lease.

    Raises:
        ConfigError: psycopg is missing.
    """
    check_journal(config)
    match config.journal.kind:
        case "memory":
            return MemoryJournal(fault)
        case "sqlite":
            return SqliteJournal(directory.journal, fault)
        case "postgres":
            from steelyard.coordinator.journal.postgres import PostgresJournal  # noqa: PLC0415 (needs the extra)

            return PostgresJournal(
                _place(config),
                owner=f"{socket.gethostname()} process {os.getpid()}",
                lease_s=config.journal.lease_s,
                wait_s=wait_s,
                fault_point=fault,
            )


def open_journal_reader(config: Config, directory: RunDirectory) -> StateReader:
    """Read access to the journal of a run, which may be going on.

    Raises:
        ConfigError: psycopg is missing.
        InputError: the journal is kept nowhere.
    """
    check_journal(config)
    match config.journal.kind:
        case "memory":
            raise InputError("journal.kind must be sqlite or postgres for a run that is to be read, got memory")
        case "sqlite":
            return SqliteJournalReader(directory.journal)
        case "postgres":
            from steelyard.coordinator.journal.postgres_reader import PostgresJournalReader  # noqa: PLC0415 (as above)

            return PostgresJournalReader(_place(config))


def check_journal(config: Config) -> None:
    """Refuse a journal for which a package is missing.

    Raises:
        ConfigError: says how to install it.
    """
    if config.journal.kind != "postgres":
        return
    try:
        importlib.import_module("psycopg")
    except ImportError as error:  # also where libpq is missing
        raise ConfigError(
            f"journal.kind postgres needs psycopg (pip install 'steelyard[postgres]'), which cannot be used: {error}"
        ) from None


def require_new_journal(config: Config, directory: RunDirectory) -> None:
    """Refuse a new run whose journal holds another one.

    Raises:
        RunDirectoryError: names the field to change.
        StorageFailed: the database cannot be reached.
    """
    if config.journal.kind != "postgres":
        return  # it lies in the directory, which is new
    number = open_journal_reader(config, directory).head().number
    if number:
        raise RunDirectoryError(
            f"journal.name must be new for a new run, got {config.journal.name}, whose journal holds {number} events"
        )


def _place(config: Config) -> "PostgresPlace":
    from steelyard.coordinator.journal.postgres_database import PostgresPlace  # noqa: PLC0415 (as above)

    journal = config.journal
    return PostgresPlace(url=journal.url or "", name=journal.name or "")
