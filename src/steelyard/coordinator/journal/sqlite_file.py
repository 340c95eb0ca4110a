"""The file of a SQLite journal: opening it, its tables and its format version, and reading rows, damaged ones too."""

import itertools
import logging
import os
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    FORMAT_VERSION,
    PAGE_RECORDS,
    DamagedRecord,
    Head,
    JournalRecord,
    check_format,
)
from steelyard.errors import IntegrityError, StorageFailed

logger = logging.getLogger(__name__)

_SCHEMA = (
    "create table if not exists records (number integer primary key, payload text not null, digest text not null)",
    "create table if not exists head (id integer primary key check (id = 1), number integer, digest text)",
)
_NEXT_RECORDS = "select number, payload, digest from records where number > ? order by number limit ?"
_ONE_RECORD = "select number, payload, digest from records where number = ?"
_ROWS_AT_ONCE = 256
_INSERTS = {
    1 << power: f"insert into records values {', '.join(['(?, ?, ?)'] * (1 << power))}"
    for power in range(_ROWS_AT_ONCE.bit_length())
}
_WAL_HEADER_BYTES = 32
_WAL_FRAME_HEADER_BYTES = 24


def connect(path: Path, is_read_only: bool) -> sqlite3.Connection:
    """A connection to a journal; a new one is made where there is none and it may be written.

    Raises:
        IntegrityError: the file is no journal, is damaged as a whole, or of another format.
        StorageFailed: it cannot be opened or written.
    """
    connection = raw_connection(path, is_read_only)
    try:
        check_format(connection.execute("pragma user_version").fetchone()[0], str(path))
        if not is_read_only:
            connection.execute("pragma journal_mode=wal")
            connection.execute("pragma synchronous=full")
            make_tables(connection)
    except sqlite3.OperationalError as error:
        connection.close()
        raise StorageFailed(f"{path}: the journal cannot be written: {error}") from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise IntegrityError(f"{path} must be a journal: {error}") from error
    except IntegrityError:
        connection.close()
        raise
    return connection


def raw_connection(path: Path, is_read_only: bool) -> sqlite3.Connection:
    """A connection on which nothing has been read yet.

    Raises:
        StorageFailed: the file cannot be opened.
    """
    mode = "ro" if is_read_only else "rwc"
    try:
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise StorageFailed(f"{path}: the journal cannot be opened: {error}") from error


def make_tables(connection: sqlite3.Connection) -> None:
    """Make what is missing, and say the format version."""
    for statement in _SCHEMA:
        connection.execute(statement)
    if connection.execute("pragma user_version").fetchone()[0] != FORMAT_VERSION:
        connection.execute(f"pragma user_version = {FORMAT_VERSION}")


def insert(connection: sqlite3.Connection, records: Sequence[JournalRecord]) -> None:
    """Insert records in as few statements as possible.

    Between two statements another thread may take the interpreter, and may keep it for some milliseconds.
    """
    start = 0
    while start < len(records):
        num_rows = min(_ROWS_AT_ONCE, 1 << ((len(records) - start).bit_length() - 1))
        chosen = records[start : start + num_rows]
        values = [value for r in chosen for value in (r.number, r.payload.decode(), r.digest)]
        connection.execute(_INSERTS[num_rows], values)
        start += num_rows


def read_head(connection: sqlite3.Connection, path: Path) -> Head:
    """The stored head.

    Raises:
        IntegrityError: it cannot be read.
    """
    try:
        row = connection.execute("select number, digest from head").fetchone()
    except sqlite3.Error as error:
        raise IntegrityError(f"{path} must be a journal: {error}") from error
    return Head(number=row[0], digest=row[1]) if row else EMPTY_HEAD


def read_page(connection: sqlite3.Connection, path: Path, after: int, limit: int = PAGE_RECORDS) -> list[JournalRecord]:
    """The next records above ``after``, at most ``limit``; fewer where one behind them cannot be read.

    Raises:
        DamagedRecord: the very next one cannot be read.
    """
    try:
        records = [_record(row) for row in connection.execute(_NEXT_RECORDS, (after, limit))]
        numbers = [after, *(record.number for record in records)]
        # A page that was cut off reads as zeros, and can give the same number again and again.
        if any(number <= before for before, number in itertools.pairwise(numbers)):
            raise sqlite3.DatabaseError("rows are out of order")
        return records
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if limit == 1:
            raise DamagedRecord(after + 1, f"journal record {after + 1} cannot be read: {error}") from error
    # Half of the page first: what is readable before the damage is found without reading record by record.
    return read_page(connection, path, after, limit // 2)


def read_one(connection: sqlite3.Connection, number: int) -> JournalRecord | None:
    """Record ``number``, None where it is missing or cannot be read."""
    try:
        row = connection.execute(_ONE_RECORD, (number,)).fetchone()
        return None if row is None else _record(row)
    except (sqlite3.Error, UnicodeDecodeError):
        return None


def _record(row: tuple[int, object, object]) -> JournalRecord:
    payload = row[1] if isinstance(row[1], bytes) else str(row[1]).encode()
    return JournalRecord(number=row[0], payload=payload, digest=str(row[2]))


def readable_after(connection: sqlite3.Connection, number: int, last: int) -> Iterator[JournalRecord]:
    """All records above ``number`` that can be read, at most up to ``last``."""
    for candidate in range(number + 1, last + 1):
        record = read_one(connection, candidate)
        if record is not None:
            yield record


def last_number(connection: sqlite3.Connection, head: Head) -> int:
    """The highest record number that there may be."""
    try:
        found = connection.execute("select max(number) from records").fetchone()[0]
    except sqlite3.Error:
        return head.number
    return max(head.number, found or 0)


def warn_of_torn_log(path: Path, connection: sqlite3.Connection) -> None:
    """Say so where the write-ahead log ends in frames that SQLite has given up.

    A crash in the middle of a commit leaves such an end, and the commit was never answered. Frames of an earlier
    pass over the file carry another salt and are no damage.
    Format: https://www.sqlite.org/fileformat2.html#walformat
    """
    log = path.with_name(path.name + "-wal")
    try:
        with log.open("rb") as file:
            header = file.read(_WAL_HEADER_BYTES)
            if len(header) < _WAL_HEADER_BYTES:
                return
            page_bytes, _, salt = struct.unpack(">8xII8s8x", header)
            num_frames = max(0, connection.execute("pragma wal_checkpoint(passive)").fetchone()[1])
            end = _WAL_HEADER_BYTES + num_frames * (_WAL_FRAME_HEADER_BYTES + page_bytes)
            num_left = os.fstat(file.fileno()).st_size - end
            file.seek(end)
            frame = file.read(_WAL_FRAME_HEADER_BYTES)
    except OSError:
        return
    if num_left > 0 and (len(frame) < _WAL_FRAME_HEADER_BYTES or frame[8:16] == salt):
        logger.warning(
            "%s: the write-ahead log had a torn end; %d bytes behind its last whole commit are given up", path, num_left
        )
