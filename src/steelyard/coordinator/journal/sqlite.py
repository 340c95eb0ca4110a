"""A journal in one SQLite file: write-ahead log, fsync on every commit, one thread of its own.

An operator can read it while the run goes on::

    sqlite3 journal.sqlite "select number, payload from records order by number desc limit 5"

Snapshots of the state lie as files in the folder ``<journal>.snapshots`` beside it. They are not in the database:
a large one would hold up every commit that waits behind it. Records that neither of the two kept snapshots needs
move into the folder ``<journal>.archive``, compressed, where ``audit`` still reads them; see ``compaction``.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal import sqlite_file as files
from steelyard.coordinator.journal.archive import SEGMENT_RECORDS, ArchiveFiles, archive_folder
from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    KEPT_SNAPSHOTS,
    FaultPoint,
    Head,
    JournalRecord,
    chain,
    never_lost,
    no_fault,
    pass_events,
)
from steelyard.coordinator.journal.compaction import Compaction
from steelyard.coordinator.journal.replaying import Replay
from steelyard.coordinator.journal.snapshot_files import SnapshotFiles
from steelyard.coordinator.journal.sqlite_salvage import rebuild, salvage_if_cut_short
from steelyard.errors import IntegrityError, StorageFailed

_T = TypeVar("_T")


class SqliteJournal:
    """The journal of a run on one machine.

    ``synchronous=FULL`` in WAL mode: a commit returns after its fsync, so what was answered survives a power cut.
    The whole of one ``append`` is one transaction.
    """

    def __init__(
        self, path: Path, fault_point: FaultPoint = no_fault, *, segment_records: int = SEGMENT_RECORDS
    ) -> None:
        self._path = path
        self._fault_point = fault_point
        self._head = EMPTY_HEAD
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        # A thread of their own, and one only: commits do not wait for snapshots, and these are written one at a time.
        self._snapshot_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
        self._snapshots = SnapshotFiles(snapshots_folder(path), fault_point)
        self._archive = ArchiveFiles(archive_folder(path), fault_point)
        self._compaction = Compaction(path, self._archive, segment_records, fault_point)

    async def append(self, events: Sequence[AnyEvent]) -> None:
        await self._call(lambda: self._append(events))

    async def replay(self) -> tuple[AnyEvent, ...]:
        return tuple([event async for page in self.replay_from(EMPTY_HEAD) for event in page])

    async def replay_from(self, head: Head) -> AsyncIterator[Sequence[AnyEvent]]:
        replay = Replay(_Records(self), head)
        while page := await self._call(replay.next_page):
            yield page

    async def head_at(self, number: int) -> Head | None:
        return await self._call(lambda: self._head_at(number))

    async def save_snapshot(self, number: int, data: bytes) -> None:
        await self._call(lambda: self._snapshots.write(number, data), self._snapshot_thread)
        await self._compact()

    async def snapshots(self) -> tuple[int, ...]:
        return await self._call(self._snapshots.numbers, self._snapshot_thread)

    async def read_snapshot(self, number: int) -> bytes:
        return await self._call(lambda: self._snapshots.read(number), self._snapshot_thread)

    async def watch(self) -> None:
        await never_lost()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._call(self._close)
        self._thread.shutdown(wait=False)
        self._snapshot_thread.shutdown(wait=False)

    async def _compact(self) -> None:
        """Archive what no kept snapshot needs. Commits go on between its steps."""
        numbers = await self.snapshots()
        if len(numbers) < KEPT_SNAPSHOTS:
            return
        last = await self._call(lambda: self._compaction.archive_below(numbers[-1]), self._snapshot_thread)
        while await self._call(lambda: self._compaction.delete_some(self._open(), last)):
            pass

    async def _call(self, function: Callable[[], _T], thread: ThreadPoolExecutor | None = None) -> _T:
        return await asyncio.get_running_loop().run_in_executor(thread or self._thread, function)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = self._connect()
            files.warn_of_torn_log(self._path, connection)
            self._head = files.read_head(connection, self._path)
            self._connection = connection
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        try:
            return files.connect(self._path, is_read_only=False)
        except IntegrityError:
            if not salvage_if_cut_short(self._path):
                raise
            return files.connect(self._path, is_read_only=False)

    def _append(self, events: Sequence[AnyEvent]) -> None:
        connection = self._open()
        self._fault_point("journal.before_append")
        pass_events(self._fault_point, events, "before")
        records, head = chain(self._head, events)
        middle = (len(records) + 1) // 2
        try:
            connection.execute("begin immediate")
            files.insert(connection, records[:middle])
            self._fault_point("journal.mid_append")
            files.insert(connection, records[middle:])
            connection.execute("insert or replace into head values (1, ?, ?)", (head.number, head.digest))
            self._fault_point("journal.before_commit")
            connection.execute("commit")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.rollback()
            raise StorageFailed(f"{self._path}: {len(records)} events could not be written: {error}") from error
        self._fault_point("journal.after_commit")
        self._head = head
        pass_events(self._fault_point, events, "after")

    def _head_at(self, number: int) -> Head | None:
        connection = self._open()
        if number == 0:
            return EMPTY_HEAD
        record = files.read_one(connection, number)
        return None if record is None else Head(number=number, digest=record.digest)

    def _cut(self, head: Head) -> None:
        connection = self._open()
        try:
            with _transaction(connection):
                connection.execute("delete from records where number > ?", (head.number,))
                connection.execute("insert or replace into head values (1, ?, ?)", (head.number, head.digest))
        except sqlite3.DatabaseError:
            # The tree of pages itself is damaged: what can be read goes into a new file.
            self._close()
            rebuild(self._path, head)
            self._open()
        self._head = head

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Records:
    """The records of an open journal, for replaying. Called on the journal's own thread."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._journal = journal
        self.name = str(journal._path)

    def head(self) -> Head:
        self._journal._open()
        return self._journal._head

    def page(self, after: int) -> list[JournalRecord]:
        if archived := self._journal._archive.page_after(after):
            return archived
        return files.read_page(self._journal._open(), self._journal._path, after)

    def readable_after(self, number: int) -> Iterator[JournalRecord]:
        connection = self._journal._open()
        return files.readable_after(connection, number, files.last_number(connection, self._journal._head))

    def cut(self, head: Head) -> None:
        self._journal._cut(head)


class SqliteJournalReader:
    """Reads the journal of a run, finished or not, without being able to change it.

    Raises:
        IntegrityError: on any call, where the file is no journal, or of another format.
        StorageFailed: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archive = ArchiveFiles(archive_folder(path))
        self._snapshots = SnapshotFiles(snapshots_folder(path))

    def records(self) -> Iterator[JournalRecord]:
        yield from self.records_after(-1)

    def records_after(self, number: int) -> Iterator[JournalRecord]:
        connection = files.connect(self._path, is_read_only=True)
        after = number
        try:
            while page := self._page(connection, after):
                yield from page
                after = page[-1].number
        finally:
            connection.close()

    def snapshots(self) -> tuple[int, ...]:
        return self._snapshots.numbers()

    def read_snapshot(self, number: int) -> bytes:
        return self._snapshots.read(number)

    def _page(self, connection: sqlite3.Connection, after: int) -> list[JournalRecord]:
        page = files.read_page(connection, self._path, after)
        if page and page[0].number == after + 1:
            return page
        # What is not here any more is in the archive by now: it is written before anything is deleted here.
        return self._archive.readable_page(after) or page

    def head(self) -> Head:
        connection = files.connect(self._path, is_read_only=True)
        try:
            return files.read_head(connection, self._path)
        finally:
            connection.close()


def snapshots_folder(path: Path) -> Path:
    """Where the snapshots of the journal at ``path`` lie."""
    return path.with_name(f"{path.name}.snapshots")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("begin immediate")
    try:
        yield
        connection.execute("commit")
    except sqlite3.Error:
        if connection.in_transaction:
            connection.rollback()
        raise
