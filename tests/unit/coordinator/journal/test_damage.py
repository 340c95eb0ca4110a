"""Damaged journals: a torn end is cut off with a warning, anything else is refused and named; all kinds alike."""

import asyncio
import logging
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.coordinator.journal.base import FORMAT_VERSION, JournalRecord
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.journal.sqlite import SqliteJournal, SqliteJournalReader
from steelyard.errors import IntegrityError
from steelyard.testing.journals import (
    JournalStore,
    MemoryStore,
    PostgresStore,
    SqliteStore,
    closing,
    events,
    replayed,
    write,
)


def memory_with(*changes: Callable[[list[JournalRecord]], None], count: int = 8) -> MemoryJournal:
    journal = MemoryJournal()
    asyncio.run(write(journal, count))
    for change in changes:
        change(journal.stored)
    return journal


def spoil(number: int) -> Callable[[list[JournalRecord]], None]:
    def change(stored: list[JournalRecord]) -> None:
        stored[number - 1] = msgspec.structs.replace(stored[number - 1], payload=b"{}")

    return change


def garble(number: int) -> Callable[[list[JournalRecord]], None]:
    def change(stored: list[JournalRecord]) -> None:
        stored[number - 1] = msgspec.structs.replace(stored[number - 1], payload=b"{}", digest="torn")

    return change


def drop(number: int) -> Callable[[list[JournalRecord]], None]:
    def change(stored: list[JournalRecord]) -> None:
        del stored[number - 1]

    return change


def sqlite_with(path: Path, *statements: str, count: int = 8) -> SqliteJournal:
    asyncio.run(write(SqliteJournal(path), count))
    SqliteStore(path).edit(*statements)
    return SqliteJournal(path)


def damaged(
    request: pytest.FixtureRequest,
    kind: str,
    path: Path,
    *changes: Callable[[list[JournalRecord]], None],
    statements: list[str],
) -> JournalStore:
    """A journal of eight events, damaged by ``changes`` in memory and else by ``statements``, which do the same."""
    if kind == "memory":
        return MemoryStore(memory_with(*changes))
    store = SqliteStore(path) if kind == "sqlite" else PostgresStore(request.getfixturevalue("postgres"))
    asyncio.run(write(store.open(), 8))
    store.edit(*statements)
    return store


SPOIL = "update records set payload = '{{}}' where number = {}"
GARBLE = "update records set payload = '{{}}', digest = 'torn' where number {}"
DROP = "delete from records where number {}"

KINDS = ["memory", "sqlite", "postgres"]
TORN_ENDS = [
    ([spoil(8)], [SPOIL.format(8)], 7),
    ([drop(8)], [DROP.format("= 8")], 7),
    ([garble(8), garble(7)], [GARBLE.format("> 6")], 6),
    ([drop(8), drop(7), drop(6)], [DROP.format("> 5")], 5),
    ([drop(8), spoil(7)], [DROP.format("= 8"), SPOIL.format(7)], 6),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_memory", "statements", "num_left"), TORN_ENDS)
def test_a_torn_end_is_cut_off_with_a_warning_and_the_journal_goes_on(
    request: pytest.FixtureRequest,
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    in_memory: list[Callable[[list[JournalRecord]], None]],
    statements: list[str],
    num_left: int,
) -> None:
    store = damaged(request, kind, tmp_path / "journal.sqlite", *in_memory, statements=statements)
    with caplog.at_level(logging.WARNING):
        assert replayed(store.open()) == tuple(events(0, num_left))
    assert f"now ends with record {num_left}, {8 - num_left} records are lost" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        asyncio.run(write(store.open(), 2, start=num_left))
        assert replayed(store.open()) == tuple(events(0, num_left + 2))
    assert caplog.text == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("in_memory", "statements", "num_left"), TORN_ENDS)
def test_after_a_torn_end_was_cut_off_the_same_writer_can_append(
    request: pytest.FixtureRequest,
    kind: str,
    tmp_path: Path,
    in_memory: list[Callable[[list[JournalRecord]], None]],
    statements: list[str],
    num_left: int,
) -> None:
    store = damaged(request, kind, tmp_path / "journal.sqlite", *in_memory, statements=statements)

    async def run() -> None:
        async with closing(store.open()) as journal:
            assert len(await journal.replay()) == num_left
            await journal.append(events(num_left, 2))

    asyncio.run(run())
    assert replayed(store.open()) == tuple(events(0, num_left + 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("in_memory", "statement", "number"),
    [
        (spoil(1), SPOIL.format(1), 1),
        (spoil(4), SPOIL.format(4), 4),
        (spoil(7), SPOIL.format(7), 7),
        (drop(1), DROP.format("= 1"), 1),
        (drop(4), DROP.format("= 4"), 4),
        (drop(7), DROP.format("= 7"), 7),
    ],
)
def test_a_damaged_middle_is_refused_with_its_number_and_nothing_is_changed(
    request: pytest.FixtureRequest,
    kind: str,
    tmp_path: Path,
    in_memory: Callable[[list[JournalRecord]], None],
    statement: str,
    number: int,
) -> None:
    store = damaged(request, kind, tmp_path / "journal.sqlite", in_memory, statements=[statement])
    before = list(store.reader().records())
    for _ in range(2):
        with pytest.raises(IntegrityError, match=rf"journal record {number} .*after it is intact, so it is refused"):
            replayed(store.open())
        assert list(store.reader().records()) == before


@settings(max_examples=120, deadline=None)
@given(damaged=st.sets(st.integers(1, 8), max_size=8), dropped=st.sets(st.integers(1, 8), max_size=3))
def test_what_is_replayed_is_always_a_prefix_and_what_is_cut_had_nothing_intact_behind_it(
    damaged: set[int], dropped: set[int]
) -> None:
    changes = [garble(number) for number in damaged - dropped]
    changes += [drop(number) for number in sorted(dropped, reverse=True)]
    journal = memory_with(*changes)
    bad = damaged | dropped
    first = min(bad, default=9)
    is_end = bad == set(range(first, 9))
    try:
        found = replayed(journal)
    except IntegrityError as error:
        assert not is_end or first == 1
        assert first == 1 or f"record {first} " in str(error)
    else:
        assert found == tuple(events(0, first - 1))
        assert journal.stored_head.number == first - 1
        assert 8 not in set(range(first, 9)) - bad, "the last record was intact, and was cut off"


def test_a_format_of_the_future_is_refused_with_both_versions_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    memory = memory_with()
    memory.stored_format = 7
    message = f"must have format version {FORMAT_VERSION}, has 7"
    with pytest.raises(IntegrityError, match=message):
        replayed(memory)
    with pytest.raises(IntegrityError, match=message):
        replayed(sqlite_with(path, "pragma user_version = 7"))
    with pytest.raises(IntegrityError, match=message):
        list(SqliteJournalReader(path).records())
    with pytest.raises(IntegrityError, match=message):
        asyncio.run(write(SqliteJournal(path), 1))


def test_a_journal_that_says_no_format_counts_as_version_1_and_says_so_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    assert replayed(sqlite_with(path, "pragma user_version = 0")) == tuple(events(0, 8))
    with sqlite3.connect(path) as connection:
        assert connection.execute("pragma user_version").fetchone() == (1,)
    connection.close()


def copy_of_a_killed_journal(tmp_path: Path, *batches: int) -> Path:
    """Database and write-ahead log as a killed process leaves them."""
    path, copied = tmp_path / "journal.sqlite", tmp_path / "copy.sqlite"

    async def run() -> None:
        journal = SqliteJournal(path)
        start = 0
        for count in batches:
            await journal.append(events(start, count))
            start += count
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copied}{suffix}")
        await journal.close()

    asyncio.run(run())
    return copied


# SQLite pads a commit by repeating its last frame, so that less than a page cut off costs nothing yet.
@pytest.mark.parametrize("num_bytes", [5000, 6000, 8000])
def test_a_log_that_is_cut_off_loses_the_last_commit_whole_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_bytes: int
) -> None:
    path = copy_of_a_killed_journal(tmp_path, 5, 3)
    log = Path(f"{path}-wal")
    data = log.read_bytes()
    log.write_bytes(data[:-num_bytes])
    with caplog.at_level(logging.WARNING):
        assert replayed(SqliteJournal(path)) == tuple(events(0, 5))
    assert "write-ahead log had a torn end" in caplog.text


def test_a_log_that_is_whole_is_no_reason_for_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copy_of_a_killed_journal(tmp_path, 5, 3)
    with caplog.at_level(logging.WARNING):
        assert replayed(SqliteJournal(path)) == tuple(events(0, 8))
    assert caplog.text == ""


@pytest.mark.parametrize("num_bytes", [4096, 3 * 4096, 10 * 4096])
def test_a_file_that_is_cut_short_keeps_what_can_be_read_and_the_old_file_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_bytes: int
) -> None:
    path = tmp_path / "journal.sqlite"
    asyncio.run(write(SqliteJournal(path), 2000))
    data = path.read_bytes()
    path.write_bytes(data[:-num_bytes])
    with caplog.at_level(logging.WARNING):
        found = replayed(SqliteJournal(path))
    assert 500 < len(found) < 2000
    assert found == tuple(events(0, len(found)))
    assert "written anew" in caplog.text
    assert f"now ends with record {len(found)}, {2000 - len(found)} records are lost" in caplog.text
    assert (tmp_path / "journal.sqlite.damaged").read_bytes() == data[:-num_bytes]
    asyncio.run(write(SqliteJournal(path), 1, start=len(found)))
    assert replayed(SqliteJournal(path)) == tuple(events(0, len(found) + 1))


def test_a_page_in_the_middle_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    asyncio.run(write(SqliteJournal(path), 2000))
    data = bytearray(path.read_bytes())
    middle = len(data) // 4096 // 2 * 4096
    data[middle : middle + 4096] = random.Random(0).randbytes(4096)
    path.write_bytes(bytes(data))
    with pytest.raises(IntegrityError, match=r"journal record \d+ .*so it is refused"):
        replayed(SqliteJournal(path))
    assert path.read_bytes()[middle : middle + 4096] == data[middle : middle + 4096]
