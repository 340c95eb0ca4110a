"""Reading the records of a PostgreSQL journal: blocking, in pages, each a short transaction of its own.

One long transaction would keep the server from cleaning up behind the writer, whose row changes with every commit.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import LiteralString

import psycopg
from psycopg.rows import TupleRow

from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    PAGE_RECORDS,
    DamagedRecord,
    Head,
    JournalRecord,
    check_format,
)
from steelyard.coordinator.journal.postgres_database import (
    Connection,
    PostgresPlace,
    answering,
    connect_for_mending,
    connect_for_reading,
    hang_up,
    is_damage,
    one_line,
    storage_failures,
)
from steelyard.errors import IntegrityError, JournalFenced, StorageFailed
from steelyard.types import Record

_JOURNAL: LiteralString = "select id, format_version, head_number, head_digest from steelyard.journals where name = %s"
_PAGE: LiteralString = """select number, payload, digest from steelyard.records
    where journal_id = %s and number > %s order by number limit %s"""
_ONE: LiteralString = "select number, payload, digest from steelyard.records where journal_id = %s and number = %s"
_LAST: LiteralString = "select max(number) from steelyard.records where journal_id = %s"
_SNAPSHOTS: LiteralString = "select distinct number from steelyard.snapshots where journal_id = %s order by number desc"
_SNAPSHOT_PARTS: LiteralString = """select data from steelyard.snapshots
    where journal_id = %s and number = %s order by part"""
_CUT: LiteralString = """with held as (
        update steelyard.journals set head_number = %(number)s, head_digest = %(digest)s
        where id = %(id)s and epoch = %(epoch)s
        returning id
    ), cut as (
        delete from steelyard.records using held where journal_id = held.id and number > %(number)s
    ) select count(*) from held"""


class _Journal(Record, frozen=True, kw_only=True):
    journal_id: int
    head: Head


class PostgresRecords:
    """The records of one journal on a connection of their own.

    All calls raise StorageFailed where the server cannot be asked.
    """

    def __init__(self, place: PostgresPlace, connection: Connection, journal_id: int) -> None:
        self.name = place.label
        self._place = place
        self._connection = connection
        self._journal_id = journal_id
        self._use = threading.Lock()

    def page(self, after: int) -> list[JournalRecord]:
        """The next records above ``after``; fewer where one behind them cannot be read.

        Raises:
            DamagedRecord: the very next one cannot be read.
        """
        limit = PAGE_RECORDS
        while True:
            try:
                return self._records(_PAGE, after, limit)
            except psycopg.Error as error:
                if limit == 1:
                    message = f"journal record {after + 1} cannot be read: {one_line(error)}"
                    raise DamagedRecord(after + 1, message) from error
            # Half of the page first: what is readable before the damage is found without reading record by record.
            limit //= 2

    def close(self) -> None:
        """Close the connection; what another thread waits for on it ends at once."""
        hang_up(self._connection)
        with self._use:
            self._connection.close()

    def _records(self, query: LiteralString, *values: int) -> list[JournalRecord]:
        """Rows as records; raises as ``_fetch``."""
        rows = self._fetch(query, (self._journal_id, *values))
        return [JournalRecord(number=row[0], payload=row[1].encode(), digest=row[2]) for row in rows]

    def _fetch(self, query: LiteralString, values: tuple[int, ...] | dict[str, object]) -> list[TupleRow]:
        """All rows of a query.

        Raises:
            psycopg.Error: the server says that something that it has stored is damaged; nothing else.
        """
        try:
            with self._use, answering(self._connection, self._place.deadline_s):
                return self._connection.execute(query, values).fetchall()
        except psycopg.Error as error:
            if is_damage(error):
                raise
            raise StorageFailed(f"{self.name}: {one_line(error)}") from error


class RecordsOfWriter(PostgresRecords):
    """The records as the writer replays them, who may cut off a torn end. Made by :meth:`open`."""

    def __init__(self, place: PostgresPlace, connection: Connection, journal_id: int, epoch: int, head: Head) -> None:
        super().__init__(place, connection, journal_id)
        self._epoch = epoch
        self._head = head

    @classmethod
    def open(cls, place: PostgresPlace, journal_id: int, epoch: int, head: Head) -> "RecordsOfWriter":
        """On a new connection.

        Raises:
            ConfigError, StorageFailed: as of ``connect_for_mending``.
        """
        return cls(place, connect_for_mending(place), journal_id, epoch, head)

    def head(self) -> Head:
        """What the journal says its last record is."""
        return self._head

    def readable_after(self, number: int) -> Iterator[JournalRecord]:
        """Whatever records above ``number`` can still be read, in order."""
        after, last = number, self._last_number()
        while after < last:
            try:
                page = self._records(_PAGE, after, PAGE_RECORDS)
            except psycopg.Error:
                page = [record for n in range(after + 1, after + 1 + PAGE_RECORDS) for record in self._readable(n)]
                after += PAGE_RECORDS
            else:
                after = page[-1].number if page else last
            yield from page

    def cut(self, head: Head) -> None:
        """Remove all records behind ``head`` and make it the journal's head, at once and durably.

        Raises:
            IntegrityError: what is to be removed is damaged below the rows; that is the database's operator's to mend.
            JournalFenced: another writer has taken over.
        """
        values = {"id": self._journal_id, "epoch": self._epoch, "number": head.number, "digest": head.digest}
        try:
            ((num_held,),) = self._fetch(_CUT, values)
        except psycopg.Error as error:
            message = f"{self.name} is damaged behind record {head.number} and cannot be cut off there"
            raise IntegrityError(f"{message}: {one_line(error)}") from error
        if not num_held:
            raise JournalFenced(f"{self.name} was taken over while it was replayed; this writer must end")
        self._head = head

    def _readable(self, number: int) -> list[JournalRecord]:
        try:
            return self._records(_ONE, number)
        except psycopg.Error:
            return []

    def _last_number(self) -> int:
        """The highest record number that there may be."""
        try:
            ((last,),) = self._fetch(_LAST, (self._journal_id,))
        except psycopg.Error:
            return self._head.number
        return max(self._head.number, last or 0)


class PostgresJournalReader:
    """Reads a journal, whether it is being written or not, without being able to change it.

    A journal that was not begun yet is empty.

    Raises:
        IntegrityError: on any call, where the journal is of another format.
        ConfigError, StorageFailed: on any call, as of ``connect_for_reading``.
    """

    def __init__(self, place: PostgresPlace) -> None:
        self._place = place

    def records(self) -> Iterable[JournalRecord]:
        yield from self.records_after(-1)

    def records_after(self, number: int) -> Iterable[JournalRecord]:
        connection = connect_for_reading(self._place)
        try:
            journal = self._journal(connection)
            if journal is None:
                return
            records, after = PostgresRecords(self._place, connection, journal.journal_id), number
            while page := records.page(after):
                yield from page
                after = page[-1].number
        finally:
            connection.close()

    def head(self) -> Head:
        connection = connect_for_reading(self._place)
        try:
            journal = self._journal(connection)
        finally:
            connection.close()
        return EMPTY_HEAD if journal is None else journal.head

    def snapshots(self) -> tuple[int, ...]:
        return tuple(row[0] for row in self._rows(_SNAPSHOTS))

    def read_snapshot(self, number: int) -> bytes:
        parts = self._rows(_SNAPSHOT_PARTS, number)
        if not parts:
            raise IntegrityError(f"{self._place.label}: there is no snapshot {number}")
        return b"".join(part for (part,) in parts)

    def _rows(self, query: LiteralString, *values: int) -> list[TupleRow]:
        """Rows that belong to the journal, none where it was not begun yet.

        Raises:
            IntegrityError: they are damaged.
        """
        connection = connect_for_reading(self._place)
        try:
            journal = self._journal(connection)
            if journal is None:
                return []
            with answering(connection, self._place.deadline_s):
                return connection.execute(query, (journal.journal_id, *values)).fetchall()
        except psycopg.Error as error:
            kind = IntegrityError if is_damage(error) else StorageFailed
            raise kind(f"{self._place.label} cannot be read: {one_line(error)}") from error
        finally:
            connection.close()

    def _journal(self, connection: Connection) -> _Journal | None:
        with storage_failures(f"{self._place.label} cannot be read"), answering(connection, self._place.deadline_s):
            try:
                row = connection.execute(_JOURNAL, (self._place.name,)).fetchone()
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                return None
        if row is None:
            return None
        check_format(row[1], self._place.label)
        return _Journal(journal_id=row[0], head=Head(number=row[2], digest=row[3]))
