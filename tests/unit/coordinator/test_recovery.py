"""Recovery from snapshots: the same state as from all events, whatever became of the snapshots."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.base import SNAPSHOT_FAULT_POINTS, Head, Journal, JournalRecord
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.journal.snapshot_files import SnapshotFiles
from steelyard.coordinator.journal.sqlite import SqliteJournal, snapshots_folder
from steelyard.coordinator.recovery import recover
from steelyard.coordinator.snapshot import restore, take
from steelyard.coordinator.state import apply
from steelyard.errors import StorageFailed
from steelyard.testing.run_rig import WORKER, RunRig, make_settings, play


class Announcing(MemoryJournal):
    """Says when a snapshot has been kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = asyncio.Event()

    async def save_snapshot(self, number: int, data: bytes) -> None:
        await super().save_snapshot(number, data)
        self.kept.set()


async def run_with_two_snapshots(journal: MemoryJournal) -> RunRig:
    """A run that was killed some time after its second snapshot."""
    rig = await run_of(journal, 1_000_000)
    await rig.coordinator.crash()
    for number in (20, 60):
        await save(journal, number)
    return rig


async def run_of(journal: Journal, every_events: int, steps: int = 4) -> RunRig:
    rig = await RunRig(make_settings(snapshot_every_events=every_events), journal=journal).start()
    for step in range(steps):
        await rig.train(step)
    return rig


async def state_by_replay(journal: Journal) -> State:
    state = State()
    for event in await journal.replay():
        apply(state, event)
    return state


def same(one: State, other: State) -> bool:
    head = Head(number=one.num_events, digest="")
    return one.num_events == other.num_events and take(one, head) == take(other, head)


def test_a_run_writes_snapshots_as_it_goes_and_one_at_its_end_and_keeps_two() -> None:
    async def run() -> None:
        journal = Announcing()
        rig = await run_of(journal, 20, steps=0)
        for step in range(4):
            journal.kept.clear()
            await rig.train(step)
            await asyncio.wait_for(journal.kept.wait(), 20)
        during = await journal.snapshots()
        assert len(during) == 2
        await rig.coordinator.close()
        newest, older = await journal.snapshots()
        assert newest == journal.stored_head.number > older >= during[0]
        state, start = await recover(journal)
        assert start == newest
        assert same(state, await state_by_replay(journal))
        state, head = restore(journal.stored_snapshots[older])
        assert head == await journal.head_at(older)

    asyncio.run(run())


def test_a_snapshot_of_a_large_run_that_goes_on_meanwhile_is_the_state_at_its_event() -> None:
    async def run() -> None:
        journal = Announcing()
        settings = make_settings(lag=0, group_size=300, groups_per_batch=8, snapshot_every_events=10)
        rig = await RunRig(settings, journal=journal).start()
        leases = await rig.coordinator.lease(WORKER, 2400, 0.0)
        for lease in reversed(leases):
            await rig.coordinator.start(lease.attempt_id, lease.attempt_number)
            if journal.kept.is_set():
                break
        (number,) = await journal.snapshots()
        assert number < rig.coordinator.state.num_events, "it went on meanwhile"
        state, _ = restore(journal.stored_snapshots[number])
        expected = State()
        for event in (await journal.replay())[:number]:
            apply(expected, event)
        assert same(state, expected)
        await rig.coordinator.crash()

    asyncio.run(run())


def test_records_before_a_snapshot_are_not_read_at_recovery_and_stay_for_the_audit() -> None:
    class Counting(MemoryJournal):
        def __init__(self) -> None:
            super().__init__()
            self.pages: list[int] = []

        def page(self, after: int) -> Sequence[JournalRecord]:
            self.pages.append(after)
            return super().page(after)

    async def run() -> None:
        journal = Counting()
        rig = await run_with_two_snapshots(journal)
        newest = (await journal.snapshots())[0]
        num_pages = len(journal.pages)
        state, start = await recover(journal)
        assert journal.pages[num_pages] == start == newest
        assert 1 < newest < state.num_events
        rig.memory_journal = journal
        assert rig.audit().is_passed
        assert len(journal.records()) == state.num_events

    asyncio.run(run())


def cut_in_half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def with_another_chain(data: bytes) -> bytes:
    state, head = restore(data)
    return take(state, Head(number=head.number, digest="0" * 32))


@pytest.mark.parametrize("spoil", [cut_in_half, with_another_chain, lambda data: b"", lambda data: data[:-1] + b"x"])
@pytest.mark.parametrize("num_spoilt", [1, 2])
def test_a_snapshot_that_cannot_be_trusted_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture, spoil: Callable[[bytes], bytes], num_spoilt: int
) -> None:
    async def run() -> None:
        journal = MemoryJournal()
        await run_with_two_snapshots(journal)
        numbers = await journal.snapshots()
        for number in numbers[:num_spoilt]:
            journal.stored_snapshots[number] = spoil(journal.stored_snapshots[number])
        with caplog.at_level(logging.WARNING):
            state, start = await recover(journal)
        assert start == (numbers[1] if num_spoilt == 1 else 0)
        assert same(state, await state_by_replay(journal))
        assert caplog.text.count("is ignored, recovery takes longer") == num_spoilt

    asyncio.run(run())


def test_a_snapshot_ahead_of_the_journal_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        journal = MemoryJournal()
        rig = await run_of(journal, 20)
        await rig.coordinator.close()
        newest = (await journal.snapshots())[0]
        del journal.stored[newest - 3 :]
        with caplog.at_level(logging.WARNING):
            state, start = await recover(journal)
        assert start < newest
        assert state.num_events == newest - 3
        assert "the journal has no such record" in caplog.text
        assert "torn end" in caplog.text

    asyncio.run(run())


class PowerCut(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("point", SNAPSHOT_FAULT_POINTS)
def test_a_crash_while_a_snapshot_is_written_is_harmless(tmp_path: Path, point: str) -> None:
    countdown = 3

    def fault(name: str) -> None:
        nonlocal countdown
        countdown -= name == point
        if countdown == 0 and name == point:
            raise PowerCut

    async def run() -> None:
        path = tmp_path / "journal.sqlite"
        rig = await run_of(SqliteJournal(path, fault), 1_000_000)
        for number in (10, 20):
            await save(rig.journal, number)
        with pytest.raises(PowerCut):
            await save(rig.journal, 30)
        await rig.coordinator.crash()
        reopened = SqliteJournal(path)
        expected = 30 if point == "snapshot.written" else 20
        state, start = await recover(reopened)
        assert start == expected
        assert same(state, await state_by_replay(reopened))
        await save(reopened, 40)
        assert (await reopened.snapshots())[0] == 40
        assert len(list(snapshots_folder(path).iterdir())) == 2, "what the crash left is swept"
        await reopened.close()

    asyncio.run(asyncio.wait_for(run(), 30))


async def save(journal: Journal, number: int) -> None:
    state = State()
    for event in (await journal.replay())[:number]:
        apply(state, event)
    head = await journal.head_at(number)
    assert head is not None
    await journal.save_snapshot(number, take(state, head))


def test_a_disk_that_takes_no_snapshot_costs_the_run_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(MemoryJournal):
        async def save_snapshot(self, number: int, data: bytes) -> None:
            raise StorageFailed("the disk is full")

    async def run() -> None:
        journal = Refusing()
        rig = await run_of(journal, 20)
        await rig.coordinator.close()
        state, start = await recover(journal)
        assert start == 0
        assert state.num_events == len(journal.stored)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "the next recovery takes longer: the disk is full" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_storage_failure(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="could not be written"):
        SnapshotFiles(tmp_path / "absent" / "snapshots").write(1, b"data")


def test_snapshots_lie_beside_the_journal_of_a_run_and_survive_its_reopening(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "journal.sqlite"
        rig = await run_of(SqliteJournal(path), 20, steps=2)
        await rig.coordinator.close()
        reopened = SqliteJournal(path)
        state, start = await recover(reopened)
        assert start == state.num_events > 0
        assert same(state, await state_by_replay(reopened))
        await reopened.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_finished_run_that_is_opened_again_stays_finished_and_records_nothing() -> None:
    async def scene(rig: RunRig) -> None:
        with rig.coordinator.reading(0):  # so it cannot be released before the end, and must not be after it
            await rig.train(0)
            await rig.coordinator.finish("done")
            num_events = rig.coordinator.state.num_events
            await rig.coordinator.crash()
        await rig.open()
        await rig.coordinator.finish("done")
        assert await rig.coordinator.admit() == 0
        assert await rig.coordinator.lease(WORKER, 10, 0.0) == ()
        assert rig.coordinator.state.num_events == num_events

    assert play(scene, lag=0).audit().is_passed
