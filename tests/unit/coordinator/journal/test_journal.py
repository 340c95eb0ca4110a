"""Journals: contiguous, chained, durable; all kinds keep the same promises."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    FAULT_POINTS,
    KEPT_SNAPSHOTS,
    SNAPSHOT_FAULT_POINTS,
    FaultPoint,
    Head,
    checked_events,
    link,
)
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.errors import IntegrityError
from steelyard.testing.journals import JournalStore, closing, events, replayed, write


class Cut(BaseException):
    """A death in the middle of a call."""


def cut_at(point: str, is_armed: Callable[[], bool] = lambda: True) -> FaultPoint:
    def fault(name: str) -> None:
        if name == point and is_armed():
            raise Cut

    return fault


def test_events_come_back_in_order_after_a_reopening(store: JournalStore) -> None:
    async def run() -> None:
        async with closing(store.open()) as journal:
            await journal.append(events(0, 3))
            await journal.append(events(3, 4))
        await write(store.open(), 2, start=7)

    asyncio.run(run())
    assert replayed(store.open()) == tuple(events(0, 9))


def test_a_long_journal_is_read_in_pages_without_loss(store: JournalStore) -> None:
    asyncio.run(write(store.open(), 9000))
    assert replayed(store.open()) == tuple(events(0, 9000))


def test_a_replay_can_begin_at_any_record(store: JournalStore) -> None:
    async def run() -> None:
        async with closing(store.open()) as journal:
            await journal.append(events(0, 5))
            head = await journal.head_at(3)
            assert head is not None
            assert [event async for page in journal.replay_from(head) for event in page] == events(3, 2)
            assert await journal.head_at(0) == EMPTY_HEAD
            assert await journal.head_at(6) is None

    asyncio.run(run())


def test_nothing_appended_is_nothing_stored(store: JournalStore) -> None:
    async def run() -> None:
        async with closing(store.open()) as journal:
            await journal.append([])
            await journal.append(events(0, 1))

    asyncio.run(run())
    assert replayed(store.open()) == tuple(events(0, 1))


def test_all_kinds_write_the_same_chain(store: JournalStore) -> None:
    async def run() -> None:
        await write(memory, 5)
        async with closing(store.open()) as journal:
            await journal.append(events(0, 2))
            await journal.append(events(2, 3))

    memory = MemoryJournal()
    asyncio.run(run())
    assert list(store.reader().records()) == memory.records()
    assert store.reader().head() == memory.head()


def test_text_of_any_language_comes_back_as_it_was(store: JournalStore) -> None:
    told = "line\nend, tab\t, nul \x00, \\N \\., 'quote', %s, {}, \u20ac, \U0001f600"
    event = e.Running(at_s=0.0, attempt_id=told)

    async def run() -> None:
        async with closing(store.open()) as journal:
            await journal.append([event])

    asyncio.run(run())
    assert replayed(store.open()) == (event,)


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
    ],
)
def test_an_edit_of_the_records_is_found_and_named(sql_store: JournalStore, statement: str, message: str) -> None:
    asyncio.run(write(sql_store.open(), 4))
    sql_store.edit(statement)
    with pytest.raises(IntegrityError, match=message):
        replayed(sql_store.open())


def test_a_record_that_is_no_event_is_named() -> None:
    payload = b'{"kind":"NONSENSE","at_s":1.0}'
    journal = MemoryJournal()
    asyncio.run(write(journal, 1))
    record = msgspec.structs.replace(journal.stored[0], payload=payload, digest=link("", 1, payload))
    with pytest.raises(IntegrityError, match="must be an event"):
        list(checked_events([record], Head(number=1, digest=record.digest)))


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_an_append_that_is_cut_short_is_there_wholly_or_not_at_all(store: JournalStore, point: str) -> None:
    seen: list[str] = []
    cut = cut_at(point, lambda: len(seen) > len(FAULT_POINTS))

    def fault(name: str) -> None:
        if not name.startswith("event:"):
            seen.append(name)
        cut(name)

    async def run() -> None:
        async with closing(store.open(fault)) as journal:
            await journal.append(events(0, 2))
            await journal.append(events(2, 3))

    with pytest.raises(Cut):
        asyncio.run(run())
    expected = 5 if point == "journal.after_commit" else 2
    assert replayed(store.open()) == tuple(events(0, expected))
    assert seen[: len(FAULT_POINTS)] == list(FAULT_POINTS)


@pytest.mark.parametrize("point", ["event:RUNNING:before", "event:RUNNING:after"])
def test_an_append_can_be_cut_short_before_and_after_the_commit_of_an_event(
    sql_store: JournalStore, point: str
) -> None:
    with pytest.raises(Cut):
        asyncio.run(write(sql_store.open(cut_at(point)), 2))
    expected = 2 if point.endswith("after") else 0
    assert replayed(sql_store.open()) == tuple(events(0, expected))


def test_a_reader_works_beside_the_writer(sql_store: JournalStore) -> None:
    async def run() -> None:
        async with closing(sql_store.open()) as journal:
            await journal.append(events(0, 3))
            assert len(list(sql_store.reader().records())) == 3
            await journal.append(events(3, 1))
            assert sql_store.reader().head().number == 4

    asyncio.run(run())


def test_the_newest_snapshots_are_kept_and_come_back_as_they_were(store: JournalStore) -> None:
    contents = {number: bytes([number]) * 9_000_000 if number == 3 else b"" for number in (1, 2, 3)}

    async def run() -> None:
        async with closing(store.open()) as journal:
            await journal.append(events(0, 3))
            for number, data in contents.items():
                await journal.save_snapshot(number, b"another")
                await journal.save_snapshot(number, data)
        async with closing(store.open()) as journal:
            assert await journal.snapshots() == (3, 2)
            assert [await journal.read_snapshot(number) for number in (3, 2)] == [contents[3], contents[2]]
            with pytest.raises(IntegrityError, match="snapshot 1"):
                await journal.read_snapshot(1)

    assert KEPT_SNAPSHOTS == 2
    asyncio.run(run())


@pytest.mark.parametrize("point", SNAPSHOT_FAULT_POINTS)
def test_a_snapshot_that_is_cut_short_leaves_the_older_ones(store: JournalStore, point: str) -> None:
    is_armed = False
    fault = cut_at(point, lambda: is_armed)

    async def run() -> None:
        nonlocal is_armed
        async with closing(store.open(fault)) as journal:
            await journal.append(events(0, 2))
            await journal.save_snapshot(1, b"one")
            is_armed = True
            with pytest.raises(Cut):
                await journal.save_snapshot(2, b"two")
        async with closing(store.open()) as journal:
            expected = (2, 1) if point == "snapshot.written" else (1,)
            assert await journal.snapshots() == expected
            assert await journal.read_snapshot(1) == b"one"

    asyncio.run(run())


def test_watching_a_journal_ends_only_by_being_cancelled_while_all_is_well(store: JournalStore) -> None:
    async def run() -> None:
        async with closing(store.open()) as journal:
            watching = asyncio.create_task(journal.watch())
            await journal.append(events(0, 1))
            assert not watching.done()
            watching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watching

    asyncio.run(run())
