"""What is particular to the journal in a SQLite file; what all kinds promise is in test_journal.py."""

import asyncio
from pathlib import Path

import pytest

from steelyard.coordinator.journal.sqlite import SqliteJournal
from steelyard.errors import IntegrityError, StorageFailed
from steelyard.testing.journals import SqliteStore, events, replayed, write


def test_a_head_that_is_gone_is_found(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "journal.sqlite")
    asyncio.run(write(store.open(), 4))
    store.edit("delete from head")
    with pytest.raises(IntegrityError, match="must end with record 0, ends with 4"):
        replayed(store.open())


def test_a_full_disk_is_a_storage_failure_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def run() -> None:
        journal = SqliteJournal(path)
        await journal.append(events(0, 2))
        await journal._call(lambda: journal._open().execute("pragma max_page_count = 4"))
        with pytest.raises(StorageFailed, match=r"500 events could not be written: .*full"):
            await journal.append(events(2, 500))
        await journal.close()

    asyncio.run(run())
    assert replayed(SqliteJournal(path)) == tuple(events(0, 2))


def test_a_folder_that_is_not_there_is_a_storage_failure(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="cannot be opened"):
        replayed(SqliteJournal(tmp_path / "absent" / "journal.sqlite"))


def test_a_file_that_is_no_journal_is_an_integrity_error(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"this is no database, however long it may be" * 100)
    with pytest.raises(IntegrityError, match="must be a journal"):
        replayed(SqliteJournal(path))
