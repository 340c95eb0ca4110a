"""A journal in one SQLite file: write-ahead log, fsync on every commit, one thread of its own.

An operator can read it while the run goes on::

    sqlite3 journal.sqlite "select number, payload from records order by number desc limit 5"
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from steelyard.coordinator.events import AnyEvent, kind_of
from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    FaultPoint,
    Head,
    JournalRecord,
    chain,
    checked_events,
    no_fault,
)
from steelyard.errors import IntegrityError, StorageFailed

_SCHEMA = (
    "create table if not exists records (number integer primary key, payload text not null, digest text not null)",
    "create table if not exists head (id integer primary key check (id = 1), number integer, digest text)",
)
_PAGE_RECORDS = 4096

_T = TypeVar("_T")


class SqliteJournal:
    """The journal of a run on one machine.

    ``synchronous=FULL`` in WAL mode: a commit returns after its fsync, so what was answered survives a power cut.
    The whole of one ``append`` is one transaction.
    """

    def __init__(self, path: Path, fault_point: FaultPoint = no_fault) -> None:
        self._path = path
        self._fault_point = fault_point
        self._head = EMPTY_HEAD
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    async def append(self, events: Sequence[AnyEvent]) -> None:
        await self._call(lambda: self._append(events))

    async def replay(self) -> tuple[AnyEvent, ...]:
        return await self._call(self._replay)

    async def close(self) -> None:
        await self._call(self._close)
        self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = _connect(self._path, is_read_only=False)
            self._head = _read_head(connection, self._path)
            self._connection = connection
        return self._connection

    def _append(self, events: Sequence[AnyEvent]) -> None:
        connection = self._open()
        self._fault_point("journal.before_append")
        self._pass_events(events, "before")
        records, head = chain(self._head, events)
        rows = [(record.number, record.payload.decode(), record.digest) for record in records]
        middle = (len(rows) + 1) // 2
        try:
            connection.execute("begin immediate")
            connection.executemany("insert into records values (?, ?, ?)", rows[:middle])
            self._fault_point("journal.mid_append")
            connection.executemany("insert into records values (?, ?, ?)", rows[middle:])
            connection.execute("insert or replace into head values (1, ?, ?)", (head.number, head.digest))
            self._fault_point("journal.before_commit")
            connection.execute("commit")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.rollback()
            raise StorageFailed(f"{self._path}: {len(rows)} events could not be written: {error}") from error
        self._fault_point("journal.after_commit")
        self._head = head
        self._pass_events(events, "after")

    def _pass_events(self, events: Sequence[AnyEvent], when: str) -> None:
        for event in events:
            self._fault_point(f"event:{kind_of(event)}:{when}")

    def _replay(self) -> tuple[AnyEvent, ...]:
        connection = self._open()
        return tuple(checked_events(_read_records(connection, self._path), self._head))

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class SqliteJournalReader:
    """Reads the journal of a run, finished or not, without being able to change it.

    Raises:
        IntegrityError: on any call, where the file is no journal.
        StorageFailed: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def records(self) -> Iterator[JournalRecord]:
        connection = _connect(self._path, is_read_only=True)
        try:
            yield from _read_records(connection, self._path)
        finally:
            connection.close()

    def head(self) -> Head:
        connection = _connect(self._path, is_read_only=True)
        try:
            return _read_head(connection, self._path)
        finally:
            connection.close()


def _connect(path: Path, is_read_only: bool) -> sqlite3.Connection:
    mode = "ro" if is_read_only else "rwc"
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise StorageFailed(f"{path}: the journal cannot be opened: {error}") from error
    if is_read_only:
        return connection
    try:
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=full")
        for statement in _SCHEMA:
            connection.execute(statement)
    except sqlite3.OperationalError as error:
        connection.close()
        raise StorageFailed(f"{path}: the journal cannot be written: {error}") from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise IntegrityError(f"{path} must be a journal: {error}") from error
    return connection


def _read_head(connection: sqlite3.Connection, path: Path) -> Head:
    try:
        row = connection.execute("select number, digest from head").fetchone()
    except sqlite3.Error as error:
        raise IntegrityError(f"{path} must be a journal: {error}") from error
    return Head(number=row[0], digest=row[1]) if row else EMPTY_HEAD


def _read_records(connection: sqlite3.Connection, path: Path) -> Iterator[JournalRecord]:
    """In pages, so that a long journal is never in memory twice."""
    after = -1
    while True:
        try:
            query = "select number, payload, digest from records where number > ? order by number limit ?"
            rows = connection.execute(query, (after, _PAGE_RECORDS)).fetchall()
        except sqlite3.Error as error:
            raise IntegrityError(f"{path}: records after {after} cannot be read: {error}") from error
        for number, payload, digest in rows:
            yield JournalRecord(number=number, payload=str(payload).encode(), digest=str(digest))
        if len(rows) < _PAGE_RECORDS:
            return
        after = rows[-1][0]
