"""A SQLite journal whose file is damaged below the rows: cut short, or with pages that cannot be read.

What can be read from the start goes into a new file, which takes the place of the old one in one rename; the old one
stays beside it as ``<name>.damaged``. The write-ahead log goes into the old file first, so that none is left that a
new file could be taken for.
"""

import logging
import os
import sqlite3
from pathlib import Path

from steelyard.coordinator.journal.base import EMPTY_HEAD, DamagedRecord, Head, check_format
from steelyard.coordinator.journal.replaying import first_intact
from steelyard.coordinator.journal.sqlite_file import (
    make_tables,
    raw_connection,
    read_head,
    read_page,
    readable_after,
)
from steelyard.durable import storage_errors, sync_directory
from steelyard.errors import IntegrityError

logger = logging.getLogger(__name__)


def salvage_if_cut_short(path: Path) -> bool:
    """Mend a file that is shorter than it says, which SQLite refuses as a whole; whether it was one.

    The records are not checked here: replaying does that, and finds the end missing.

    Raises:
        IntegrityError: it is cut short so far that no table can be read.
    """
    connection = raw_connection(path, is_read_only=False)
    try:
        connection.execute("select count(*) from sqlite_master").fetchone()
        return False
    except sqlite3.DatabaseError as error:
        if "malformed" not in str(error):
            return False
    finally:
        connection.close()
    rebuild(path, None)
    return True


def rebuild(path: Path, end: Head | None) -> None:
    """Put a new file with the first records in the place of a damaged one.

    Args:
        end: of the new journal; None takes all that can be read and keeps the head, so that replaying sees what is
            missing.

    Raises:
        IntegrityError: intact records follow what cannot be read; names its number. Or not even the
            tables can be read, or the write-ahead log cannot be taken in.
        StorageFailed: the new file cannot be written.
    """
    new = path.with_name(f"{path.name}.rebuilt")
    new.unlink(missing_ok=True)
    old = raw_connection(path, is_read_only=False)
    try:
        # Without it SQLite refuses a file that is shorter than its header says.
        old.execute("pragma writable_schema=on")
        check_format(old.execute("pragma user_version").fetchone()[0], str(path))
        if old.execute("pragma wal_checkpoint(truncate)").fetchone()[0]:
            raise IntegrityError(f"{path}: the write-ahead log of the damaged journal is in use")
        num_records = _copy(old, path, new, end)
    except sqlite3.Error as error:
        raise IntegrityError(f"{path} must be a journal: {error}") from error
    finally:
        old.close()
    damaged = path.with_name(f"{path.name}.damaged")
    with storage_errors(str(path)):
        damaged.unlink(missing_ok=True)
        os.link(path, damaged)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        new.replace(path)
        sync_directory(path.parent)
    logger.warning(
        "%s was damaged and has been written anew with the %d records that could be read; the old file is %s",
        path,
        num_records,
        damaged.name,
    )


def _copy(old: sqlite3.Connection, path: Path, new: Path, end: Head | None) -> int:
    """Copy the records up to ``end``, or as far as they can be read; how many."""
    head = end or read_head(old, path)
    target = raw_connection(new, is_read_only=False)
    try:
        target.execute("pragma synchronous=full")
        target.execute("begin")
        make_tables(target)
        after = 0
        while after < head.number:
            try:
                page = read_page(old, path, after, limit=min(4096, head.number - after))
            except DamagedRecord as damage:
                _refuse_if_intact_behind(old, path, damage, head)
                break
            if not page:
                break
            rows = [(record.number, record.payload.decode(), record.digest) for record in page]
            target.executemany("insert into records values (?, ?, ?)", rows)
            after = page[-1].number
        if head != EMPTY_HEAD:
            target.execute("insert into head values (1, ?, ?)", (head.number, head.digest))
        target.execute("commit")
    finally:
        target.close()
    return after


def _refuse_if_intact_behind(old: sqlite3.Connection, path: Path, damage: DamagedRecord, head: Head) -> None:
    intact = first_intact(readable_after(old, damage.number, head.number), damage.number, head)
    if intact is not None:
        message = f"{path}: {damage}; record {intact} after it is intact, so it is refused"
        raise DamagedRecord(damage.number, message) from damage
