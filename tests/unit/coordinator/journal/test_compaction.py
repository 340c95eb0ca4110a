"""Compaction: a journal whose old records lie in the archive says the same as one that has them all in its table."""

import asyncio
import contextlib
import functools
import gc
import logging
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.coordinator import events as e
from steelyard.coordinator.audit_evidence import Findings
from steelyard.coordinator.audit_journal import read_events
from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.archive import ARCHIVE_FAULT_POINTS, archive_folder
from steelyard.coordinator.journal.base import EMPTY_HEAD, Head, JournalRecord, chain, no_fault
from steelyard.coordinator.journal.sqlite import SqliteJournal, SqliteJournalReader, snapshots_folder
from steelyard.coordinator.recovery import recover
from steelyard.coordinator.snapshot import take
from steelyard.coordinator.state import apply
from steelyard.errors import IntegrityError
from steelyard.testing.histories import History

SEGMENT = 8


class PowerCut(BaseException):
    """The process is gone."""


@functools.cache
def history() -> tuple[e.AnyEvent, ...]:
    events: list[e.AnyEvent] = []
    run = History(events.append, groups_per_batch=2, group_size=3, failure_frac=0.1)
    run.start()
    while len(events) < 160:
        run.step()
    return tuple(events[:160])


@functools.cache
def records() -> tuple[JournalRecord, ...]:
    return chain(EMPTY_HEAD, history())[0]


def state_after(number: int) -> State:
    state = State()
    for event in history()[:number]:
        apply(state, event)
    return state


def as_bytes(state: State) -> bytes:
    return take(state, Head(number=state.num_events, digest=""))


async def write(path: Path, cuts: Sequence[int], fault: Callable[[str], None] = no_fault) -> None:
    """Append the history, with a snapshot at each cut; closed at the end, or dead in the middle."""
    journal = SqliteJournal(path, fault, segment_records=SEGMENT)
    number = 0
    for cut in sorted({*cuts, len(history())}):
        if cut > number:
            await journal.append(history()[number:cut])
        number = cut
        if cut in cuts:
            head = await journal.head_at(cut)
            assert head is not None
            await journal.save_snapshot(cut, take(state_after(cut), head))
    await journal.close()


def in_table(path: Path) -> list[int]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [number for (number,) in connection.execute("select number from records order by number")]


def segments(path: Path) -> list[Path]:
    return sorted(archive_folder(path).iterdir()) if archive_folder(path).is_dir() else []


async def check_whole(path: Path, num_events: int) -> None:
    """Records, audit, replay and recovery with and without snapshots are those of the first ``num_events`` events."""
    assert list(SqliteJournalReader(path).records()) == list(records()[:num_events])
    findings = Findings({"journal_chain": ""})
    assert tuple(read_events(SqliteJournalReader(path), findings)) == history()[:num_events]
    assert findings.num_checked["journal_chain"] > 0 == findings.num_broken["journal_chain"]
    journal = SqliteJournal(path, segment_records=SEGMENT)
    assert await journal.replay() == history()[:num_events]
    state, _ = await recover(journal)
    assert as_bytes(state) == as_bytes(state_after(num_events))
    for snapshot in snapshots_folder(path).glob("*"):
        snapshot.unlink()
    state, start = await recover(journal)
    assert start == 0
    assert as_bytes(state) == as_bytes(state_after(num_events))
    await journal.close()


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 160), unique=True, max_size=8).map(sorted))
def test_a_compacted_journal_replays_audits_and_recovers_as_one_that_never_was(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        asyncio.run(write(path, cuts))
        oldest = cuts[-2] if len(cuts) >= 2 else 1
        num_archived = (oldest - 1) // SEGMENT * SEGMENT
        assert in_table(path) == list(range(num_archived + 1, 161))
        assert len(segments(path)) == num_archived // SEGMENT
        asyncio.run(check_whole(path, 160))


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("point", ARCHIVE_FAULT_POINTS)
def test_a_crash_at_any_point_of_a_compaction_loses_nothing_and_the_next_one_goes_on(
    tmp_path: Path, point: str, nth: int
) -> None:
    path, num_passed = tmp_path / "journal.sqlite", 0

    def fault(name: str) -> None:
        nonlocal num_passed
        num_passed += name == point
        if name == point and num_passed == nth:
            raise PowerCut

    def die() -> int:
        with pytest.raises(PowerCut):
            asyncio.run(write(path, (40, 60, 80, 100, 120, 140), fault))
        return len(list(SqliteJournalReader(path).records()))

    num_events = die()
    gc.collect()  # the dead process's hold on the file ends
    assert num_events in (60, 80, 100, 120, 140)
    asyncio.run(check_whole(path, num_events))

    async def go_on() -> None:
        journal = SqliteJournal(path, segment_records=SEGMENT)
        await recover(journal)
        await journal.append(history()[num_events:])
        for cut in (num_events, 158, 160):
            head = await journal.head_at(cut)
            assert head is not None
            await journal.save_snapshot(cut, take(state_after(cut), head))
        await journal.close()

    asyncio.run(go_on())
    assert in_table(path) == list(range(153, 161)), "what the crash left over is gone"
    asyncio.run(check_whole(path, 160))


def damaged_segment(path: Path, index: int = -1) -> Path:
    asyncio.run(write(path, (80, 100)))
    segment = segments(path)[index]
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    return segment


def test_a_damaged_segment_is_refused_by_a_replay_and_named_by_the_audit(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    damaged_segment(path)
    findings = Findings({"journal_chain": ""})
    read_events(SqliteJournalReader(path), findings)
    assert findings.examples["journal_chain"] == "record 65 is missing, 73 stands in its place"

    async def run() -> None:
        journal = SqliteJournal(path, segment_records=SEGMENT)
        state, start = await recover(journal)
        assert (start, state.num_events) == (100, 160), "a recovery from a snapshot does not need it"
        with pytest.raises(IntegrityError, match=r"000000000065-000000000072\.segment.*record \d+ after it is intact"):
            await journal.replay()
        await journal.close()

    asyncio.run(run())


@pytest.mark.parametrize(("index", "first"), [(-1, 65), (-2, 57)])
def test_nothing_is_archived_beside_a_damaged_segment_and_nothing_deleted_that_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, index: int, first: int
) -> None:
    path = tmp_path / "journal.sqlite"
    segment = damaged_segment(path, index)
    with contextlib.closing(sqlite3.connect(path)) as connection:  # as a crash before the deletion would leave it
        rows = [(record.number, record.payload.decode(), record.digest) for record in records()[first - 1 : 72]]
        connection.executemany("insert into records values (?, ?, ?)", rows)
        connection.commit()

    async def go_on() -> None:
        journal = SqliteJournal(path, segment_records=SEGMENT)
        for cut in (120, 140):
            head = await journal.head_at(cut)
            assert head is not None
            await journal.save_snapshot(cut, take(state_after(cut), head))
        await journal.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(go_on())
    assert "no more is archived" in caplog.text and segment.name in caplog.text
    assert in_table(path) == list(range(first, 161))


def test_a_damaged_record_is_never_archived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal.sqlite"

    async def run() -> None:
        await write(path, (80,))
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("update records set payload = replace(payload, '1', '2') where number = 30")
            connection.commit()
        journal = SqliteJournal(path, segment_records=SEGMENT)
        head = await journal.head_at(100)
        assert head is not None
        await journal.save_snapshot(100, take(state_after(100), head))
        await journal.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "no more is archived: journal record 30 must have digest" in caplog.text
    assert in_table(path) == list(range(25, 161)), "whole segments before it are"
