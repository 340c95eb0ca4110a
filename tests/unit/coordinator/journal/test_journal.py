"""Journals: contiguous, chained, durable; both kinds behave alike."""

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import FAULT_POINTS, Journal, JournalReader, checked_events
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.journal.sqlite import SqliteJournal, SqliteJournalReader
from steelyard.errors import IntegrityError, StorageFailed


def events(start: int, count: int) -> list[e.AnyEvent]:
    return [e.Running(at_s=float(n), attempt_id=f"att_{n}") for n in range(start, start + count)]


def append(journal: Journal, *batches: Sequence[e.AnyEvent]) -> None:
    async def run() -> None:
        for batch in batches:
            await journal.append(batch)
        await journal.close()

    asyncio.run(run())


def replayed(journal: Journal) -> tuple[e.AnyEvent, ...]:
    async def run() -> tuple[e.AnyEvent, ...]:
        found = await journal.replay()
        await journal.close()
        return found

    return asyncio.run(run())


def edit(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


def test_events_come_back_in_order_after_a_reopening(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    append(SqliteJournal(path), events(0, 3), events(3, 4))
    append(SqliteJournal(path), events(7, 2))
    assert replayed(SqliteJournal(path)) == tuple(events(0, 9))


def test_a_long_journal_is_read_in_pages_without_loss(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    append(SqliteJournal(path), events(0, 9000))
    assert replayed(SqliteJournal(path)) == tuple(events(0, 9000))


def test_both_kinds_write_the_same_chain(tmp_path: Path) -> None:
    memory = MemoryJournal()
    append(memory, events(0, 5))
    append(SqliteJournal(tmp_path / "j"), events(0, 2), events(2, 3))
    reader = SqliteJournalReader(tmp_path / "j")
    assert list(reader.records()) == memory.records()
    assert reader.head() == memory.head()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "update records set payload = replace(payload, 'att_1', 'att_9') where number = 2",
            "record 2 must have digest",
        ),
        ("delete from records where number = 2", "record 2 is missing, found 3"),
        ("delete from records", "nothing of the journal can be read"),
        ("update records set digest = 'x' where number = 3", "record 3 must have digest"),
        ("update records set number = 0 where number = 1", "record 1 is missing, found 2"),
        ("delete from head", "must end with record 0, ends with 4"),
    ],
)
def test_an_edit_of_the_file_is_found_and_named(tmp_path: Path, statement: str, message: str) -> None:
    path = tmp_path / "journal.sqlite"
    append(SqliteJournal(path), events(0, 4))
    edit(path, statement)
    with pytest.raises(IntegrityError, match=message):
        replayed(SqliteJournal(path))


def test_a_record_that_is_no_event_is_named() -> None:
    journal = MemoryJournal()
    append(journal, events(0, 1))
    payload = b'{"kind":"NONSENSE","at_s":1.0}'
    from steelyard.coordinator.journal.base import Head, link

    record = msgspec.structs.replace(journal.stored[0], payload=payload, digest=link("", 1, payload))
    with pytest.raises(IntegrityError, match="must be an event"):
        list(checked_events([record], Head(number=1, digest=record.digest)))


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_an_append_that_is_cut_short_is_there_wholly_or_not_at_all(tmp_path: Path, point: str) -> None:
    class Cut(BaseException):
        pass

    seen: list[str] = []

    def fault(name: str) -> None:
        if not name.startswith("event:"):
            seen.append(name)
        if name == point and len(seen) > len(FAULT_POINTS):
            raise Cut

    path = tmp_path / "journal.sqlite"
    with pytest.raises(Cut):
        append(SqliteJournal(path, fault), events(0, 2), events(2, 3))
    expected = 5 if point == "journal.after_commit" else 2
    assert replayed(SqliteJournal(path)) == tuple(events(0, expected))
    assert seen[: len(FAULT_POINTS)] == list(FAULT_POINTS)


@pytest.mark.parametrize("point", ["event:RUNNING:before", "event:RUNNING:after"])
def test_an_append_can_be_cut_short_before_and_after_the_commit_of_an_event(tmp_path: Path, point: str) -> None:
    class Cut(BaseException):
        pass

    def fault(name: str) -> None:
        if name == point:
            raise Cut

    path = tmp_path / "journal.sqlite"
    with pytest.raises(Cut):
        append(SqliteJournal(path, fault), events(0, 2))
    expected = 2 if point.endswith("after") else 0
    assert replayed(SqliteJournal(path)) == tuple(events(0, expected))


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


def test_a_reader_works_beside_the_writer_and_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def run() -> None:
        journal = SqliteJournal(path)
        await journal.append(events(0, 3))
        reader: JournalReader = SqliteJournalReader(path)
        assert len(list(reader.records())) == 3
        await journal.append(events(3, 1))
        assert reader.head().number == 4
        await journal.close()

    asyncio.run(run())
