"""A journal that lives as long as its object: for tests and the simulator."""

from collections.abc import Sequence

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import (
    EMPTY_HEAD,
    FaultPoint,
    Head,
    JournalRecord,
    chain,
    checked_events,
    no_fault,
)


class MemoryJournal:
    """Keeps encoded records, so that every event passes through its wire form as it does on disk.

    Outlives a coordinator: open another one on it to recover. ``stored`` may be edited by tests that corrupt it.
    """

    def __init__(self, fault_point: FaultPoint = no_fault) -> None:
        self.stored: list[JournalRecord] = []
        self.stored_head = EMPTY_HEAD
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
        return tuple(checked_events(self.stored, self.stored_head))

    async def close(self) -> None:
        """Nothing to release."""

    def records(self) -> list[JournalRecord]:
        return list(self.stored)

    def head(self) -> Head:
        return self.stored_head
