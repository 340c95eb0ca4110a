"""When snapshots are due."""

import asyncio

from steelyard.coordinator import events as e
from steelyard.coordinator.commits import CommitQueue
from steelyard.coordinator.journal.base import Head
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.snapshots import SnapshotWriter
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
