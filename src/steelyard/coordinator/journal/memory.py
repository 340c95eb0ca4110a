"""A journal that lives as long as its object: for tests and the simulator."""

from collections.abc import AsyncIterator, Iterable, Sequence

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    FORMAT_VERSION,
    KEPT_SNAPSHOTS,
    PAGE_RECORDS,
    FaultPoint,
    Head,
    JournalRecord,
    chain,
    check_format,
    never_lost,
    no_fault,
)
from steelyard.coordinator.journal.replaying import Replay
from steelyard.errors import IntegrityError


class MemoryJournal:
    """Keeps encoded records, so that every event passes through its wire form as it does on disk.

    Outlives a coordinator: open another one on it to recover. All that is ``stored`` may be edited by tests that
    corrupt it.
    """

    name = "journal in memory"

    def __init__(self, fault_point: FaultPoint = no_fault) -> None:
        self.stored: list[JournalRecord] = []
        self.stored_head = EMPTY_HEAD
        self.stored_snapshots: dict[int, bytes] = {}
        self.stored_format = FORMAT_VERSION
        self._fault_point = fault_point

    async def append(self, events: Sequence[AnyEvent]) -> None:
        self._fault_point("journal.before_append")
        records, head = chain(self.stored_head, events)
        self._fault_point("journal.mid_append")
        self._fault_point("journal.before_commit")
        self.stored.extend(records)
        self.stored_head = head
        self._fault_point("journal.after_commit")

    async def replay(self) -> tuple[AnyEvent, ...]:
        return tuple([event async for page in self.replay_from(EMPTY_HEAD) for event in page])

    async def replay_from(self, head: Head) -> AsyncIterator[Sequence[AnyEvent]]:
        check_format(self.stored_format, self.name)
        replay = Replay(self, head)
        while page := replay.next_page():
            yield page

    async def head_at(self, number: int) -> Head | None:
        if number == 0:
            return EMPTY_HEAD
        if number > len(self.stored):
            return None
        return Head(number=number, digest=self.stored[number - 1].digest)

    async def save_snapshot(self, number: int, data: bytes) -> None:
        self._fault_point("snapshot.before_write")
        self._fault_point("snapshot.mid_write")
        self._fault_point("snapshot.before_rename")
        kept = {**self.stored_snapshots, number: data}
        self.stored_snapshots = {n: kept[n] for n in sorted(kept)[-KEPT_SNAPSHOTS:]}
        self._fault_point("snapshot.written")

    async def snapshots(self) -> tuple[int, ...]:
        return tuple(sorted(self.stored_snapshots, reverse=True))

    async def read_snapshot(self, number: int) -> bytes:
        if number not in self.stored_snapshots:
            raise IntegrityError(f"{self.name}: there is no snapshot {number}")
        return self.stored_snapshots[number]

    async def watch(self) -> None:
        await never_lost()

    async def close(self) -> None:
        """Nothing to release."""

    def records(self) -> list[JournalRecord]:
        return list(self.stored)

    def head(self) -> Head:
        return self.stored_head

    def page(self, after: int) -> Sequence[JournalRecord]:
        return self.stored[after : after + PAGE_RECORDS]

    def readable_after(self, number: int) -> Iterable[JournalRecord]:
        return self.stored[number:]

    def cut(self, head: Head) -> None:
        del self.stored[head.number :]
        self.stored_head = head
