"""When snapshots are due."""

import asyncio

from steelyard.coordinator import events as e
from steelyard.coordinator.commits import CommitQueue
from steelyard.coordinator.journal.base import Head
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.snapshot import take
from steelyard.coordinator.snapshots import SnapshotWriter
from steelyard.coordinator.transitions import RolloutState
from steelyard.testing.histories import History
from steelyard.testing.manual_clock import settle


class Announcing(MemoryJournal):
    """Says when a snapshot has been kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = asyncio.Event()
        self.asked: list[int] = []

    async def head_at(self, number: int) -> Head | None:
        self.asked.append(number)  # what a snapshot begins with
        return await super().head_at(number)

    async def save_snapshot(self, number: int, data: bytes) -> None:
        await super().save_snapshot(number, data)
        self.kept.set()


def test_a_state_of_many_rollouts_waits_for_as_many_events() -> None:
    async def run() -> None:
        events: list[e.AnyEvent] = []
        history = History(events.append, group_size=40)
        history.start()
        for _ in range(5):
            history.admit()
        journal = Announcing()
        await journal.append(events)
        commits = CommitQueue(
            journal,
            num_committed=len(events),
            delay_s=0.0,
            sleep=asyncio.sleep,
            on_failure=failures.append,
            on_commit=lambda number: None,
        )
        writer = SnapshotWriter(
            history.state, journal, commits, every_events=10, num_covered=0, on_failure=failures.append
        )
        writer.committed(199)
        await settle()
        assert journal.asked == []
        writer.committed(200)
        await journal.kept.wait()
        assert await journal.snapshots() == (len(events),)
        await writer.close()
        await commits.close()
        assert await journal.snapshots() == (len(events),), "nothing new, nothing written"

    failures: list[BaseException] = []
    asyncio.run(asyncio.wait_for(run(), 20))
    assert failures == []


def test_events_go_on_while_a_large_state_is_read_and_the_snapshot_is_that_of_its_beginning() -> None:
    async def run() -> None:
        events: list[e.AnyEvent] = []

        history = History(events.append, group_size=300)
        history.start()
        groups = [history.admit() for _ in range(10)]
        journal = Announcing()
        num_events = len(events)
        await journal.append(events)
        commits = CommitQueue(
            journal,
            num_committed=num_events,
            delay_s=0.0,
            sleep=asyncio.sleep,
            on_failure=failures.append,
            on_commit=lambda number: None,
        )
        writer = SnapshotWriter(
            history.state, journal, commits, every_events=1, num_covered=0, on_failure=failures.append
        )
        history.before = writer.before
        expected = take(history.state, await found_head(journal, num_events))
        writer.committed(3000)
        for group in groups[:4:-1]:
            await asyncio.sleep(0)
            assert not journal.kept.is_set(), "a slice at a time"
            history.carry(group.rollouts[0], RolloutState.RUNNING)
        await journal.kept.wait()
        assert await journal.read_snapshot(num_events) == expected
        assert len(events) > num_events
        await writer.stop()
        await commits.close()

    failures: list[BaseException] = []
    asyncio.run(asyncio.wait_for(run(), 20))
    assert failures == []


async def found_head(journal: MemoryJournal, number: int) -> Head:
    head = await journal.head_at(number)
    assert head is not None
    return head
