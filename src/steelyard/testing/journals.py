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
    """A database of its own with one journal; ``wait_s`` is long, for nobody here holds a lease for good."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.url = server.new_database()
        self.database = self.url.partition("?")[0].rpartition("/")[2]
        self._owners = map("writer {}".format, itertools.count(1))

    def place(self, url: str | None = None, deadline_s: float = 30.0) -> PostgresPlace:
        return PostgresPlace(url=url or self.url, name="run-1", deadline_s=deadline_s)

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
        self.server.run(self.database, "set search_path to steelyard", *statements)

    def ask(self, question: str) -> Any:
        """The one value that a query finds."""
        with psycopg.connect(self.url) as connection:
            row = connection.execute(question.encode()).fetchone()
        assert row is not None
        return row[0]

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
