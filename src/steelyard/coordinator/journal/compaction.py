"""Moving old records of a SQLite journal into its archive, while the run goes on.

What recovery needs stays: the records from the oldest kept snapshot on. A segment is durable before the first of its
records is deleted, and whoever reads takes the archive's word where both have a record. So a process may die at any
moment between the two: what was left over is deleted by the next compaction.
"""

import logging
import sqlite3
from pathlib import Path

from steelyard.coordinator.journal import sqlite_file as files
from steelyard.coordinator.journal.archive import ArchiveFiles
from steelyard.coordinator.journal.base import PAGE_RECORDS, FaultPoint, Head, JournalRecord, next_event
from steelyard.errors import IntegrityError, StorageFailed

logger = logging.getLogger(__name__)

_DELETED_AT_ONCE = 1024
"""So many records go in one transaction: a commit of events that waits behind it must not wait long."""


class Compaction:
    """Compacts one journal.

    Args:
        path: of the journal.
        segment_records: only whole segments are archived.
    """

    def __init__(self, path: Path, archive: ArchiveFiles, segment_records: int, fault_point: FaultPoint) -> None:
        self._path = path
        self._archive = archive
        self._segment_records = segment_records
        self._fault_point = fault_point

    def archive_below(self, number: int) -> int:
        """Copy records below ``number`` into the archive, in whole segments; up to where they are safe in it.

        A disk that refuses, or a record that is damaged, ends the copying with a warning and costs only space.
        """
        safe = 0
        try:
            end = self._archive.end()
            connection = files.connect(self._path, is_read_only=True)
            try:
                self._require_readable(connection)
                safe = end.number
                while number - 1 - end.number >= self._segment_records:
                    records = self._next_records(connection, end)
                    self._archive.write(end, records)
                    end = Head(number=records[-1].number, digest=records[-1].digest)
                    safe = end.number
            finally:
                connection.close()
        except (StorageFailed, IntegrityError) as error:
            logger.warning("%s: no more is archived: %s", self._path, error)
        return safe

    def delete_some(self, connection: sqlite3.Connection, last: int) -> bool:
        """Delete some of the records up to ``last``, which are safe in the archive; whether there are more.

        Called on the journal's own thread. A disk that refuses costs only space.
        """
        try:
            first = _first_number(connection)
            if first is None or first > last:
                return False
            self._fault_point("archive.before_delete")
            upto = min(last, first + _DELETED_AT_ONCE - 1)
            connection.execute("begin immediate")
            connection.execute("delete from records where number <= ?", (upto,))
            self._fault_point("archive.mid_delete")
            connection.execute("commit")
        except sqlite3.Error as error:
            logger.warning("%s: archived records are not deleted: %s", self._path, error)
            return False
        finally:
            if connection.in_transaction:
                connection.rollback()
        self._fault_point("archive.deleted")
        return upto < last

    def _require_readable(self, connection: sqlite3.Connection) -> None:
        """Every segment whose records are about to be deleted, or were left over, must be readable.

        Raises:
            DamagedRecord: one is not.
        """
        after = (_first_number(connection) or 1) - 1
        while page := self._archive.page_after(after):
            after = page[-1].number

    def _next_records(self, connection: sqlite3.Connection, end: Head) -> list[JournalRecord]:
        """The records of the next segment, each checked against the chain.

        Raises:
            IntegrityError: one is damaged or missing.
        """
        records: list[JournalRecord] = []
        while len(records) < self._segment_records:
            limit = min(self._segment_records - len(records), PAGE_RECORDS)
            page = files.read_page(connection, self._path, end.number, limit)
            if not page:
                raise IntegrityError(f"{self._path}: record {end.number + 1} must be there to be archived")
            for record in page:
                end, _ = next_event(end, record)
            records += page
        return records


def _first_number(connection: sqlite3.Connection) -> int | None:
    found: int | None = connection.execute("select min(number) from records").fetchone()[0]
    return found
