"""Every kind of journal behind one face, so that one test can hold them all to the same promises."""

import asyncio
import contextlib
import itertools
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import psycopg

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import FaultPoint, Journal, JournalReader, no_fault
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.journal.postgres import PostgresJournal
from steelyard.coordinator.journal.postgres_database import PostgresPlace
from steelyard.coordinator.journal.postgres_reader import PostgresJournalReader
from steelyard.coordinator.journal.sqlite import SqliteJournal, SqliteJournalReader
from steelyard.testing.postgres import PostgresServer


def events(start: int, count: int) -> list[e.AnyEvent]:
    """Events that a number tells apart; no run has these alone."""
    return [e.Running(at_s=float(n), attempt_id=f"att_{n}") for n in range(start, start + count)]


_NUMBERS = itertools.count(1)


class JournalStore(Protocol):
    """One journal, to be opened again and again."""

    def open(self, fault: FaultPoint = no_fault) -> Journal:
        """As a new process does."""
        ...

    def reader(self) -> JournalReader:
        """As ``audit`` does."""
        ...

    def edit(self, *statements: str) -> None:
        """Run SQL on its tables; not for a journal in memory."""
        ...


class MemoryStore:
    """What is stored outlives each journal object."""

    def __init__(self, journal: MemoryJournal | None = None) -> None:
        self._last = journal or MemoryJournal()

    def open(self, fault: FaultPoint = no_fault) -> Journal:
        last, journal = self._last, MemoryJournal(fault)
        journal.stored, journal.stored_head, journal.stored_snapshots = (
            last.stored, last.stored_head, last.stored_snapshots,
        )  # fmt: skip
        self._last = journal
        return journal

    def reader(self) -> JournalReader:
        return self._last

    def edit(self, *statements: str) -> None:
        raise NotImplementedError(statements)


class SqliteStore:
    """A file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, fault: FaultPoint = no_fault) -> Journal:
        return SqliteJournal(self.path, fault)

    def reader(self) -> JournalReader:
        return SqliteJournalReader(self.path)

    def edit(self, *statements: str) -> None:
        with sqlite3.connect(self.path) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()


class PostgresStore:
    """A journal in the server's database for tests. Nobody here holds a lease for good, so who waits waits long.

    Args:
        server: running.
        own_database: a new one, for tests that change more than the journal; making one takes its time.
    """

    def __init__(self, server: PostgresServer, *, own_database: bool = False) -> None:
        self.server = server
        self.url = server.new_database() if own_database else server.shared_database()
        self.database = self.url.partition("?")[0].rpartition("/")[2]
        self.name = f"journal-{next(_NUMBERS)}"
        self._owners = map("writer {}".format, itertools.count(1))

    def place(self, url: str | None = None, deadline_s: float = 30.0) -> PostgresPlace:
        return PostgresPlace(url=url or self.url, name=self.name, deadline_s=deadline_s)

    def open(
        self,
        fault: FaultPoint = no_fault,
        *,
        lease_s: float = 60.0,
        wait_s: float = 60.0,
        place: PostgresPlace | None = None,
    ) -> PostgresJournal:
        return PostgresJournal(
            place or self.place(), owner=next(self._owners), lease_s=lease_s, wait_s=wait_s, fault_point=fault
        )

    def reader(self) -> JournalReader:
        return PostgresJournalReader(self.place())

    def edit(self, *statements: str) -> None:
        """Run SQL; to it, ``journals`` and ``records`` are this journal's alone."""
        self.server.run(self.database, *self._views(), *statements)

    def ask(self, question: str) -> Any:
        """The one value that a query finds; tables are as to ``edit``."""
        with psycopg.connect(self.url) as connection:
            for statement in self._views():
                connection.execute(statement.encode())
            row = connection.execute(question.encode()).fetchone()
        assert row is not None
        return row[0]

    def _views(self) -> tuple[str, ...]:
        schema = f'"{self.name}"'
        ours = f"select * from steelyard.journals where name = '{self.name}'"
        number = f"select id from steelyard.journals where name = '{self.name}'"
        records = f"select number, payload, digest from steelyard.records where journal_id = ({number})"
        return (
            f"create schema if not exists {schema}",
            f"create or replace view {schema}.journals as {ours}",
            f"create or replace view {schema}.records as {records}",
            f"set search_path to {schema}",
        )

    def end_lease(self) -> None:
        """As if its time were over."""
        self.edit("update journals set expires_at = 'epoch'")


@contextlib.asynccontextmanager
async def closing(journal: Journal) -> AsyncIterator[Journal]:
    try:
        yield journal
    finally:
        await journal.close()


async def write(journal: Journal, count: int, start: int = 0) -> None:
    async with closing(journal):
        await journal.append(events(start, count))


async def replay(journal: Journal) -> tuple[e.AnyEvent, ...]:
    async with closing(journal):
        return await journal.replay()


def replayed(journal: Journal) -> tuple[e.AnyEvent, ...]:
    return asyncio.run(replay(journal))
