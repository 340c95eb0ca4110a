"""Replaying a journal page by page, and what to do about damage: cut off a torn end, refuse anything else.

What tells them apart is whether anything intact stands behind the damage. A write that was torn leaves nothing behind
itself; where intact records follow, something happened to what had been written long before, and going on would
forget what was answered.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import DamagedRecord, Head, JournalRecord, check_end, link, next_event
from steelyard.errors import IntegrityError

logger = logging.getLogger(__name__)


class RecordStore(Protocol):
    """A store of records, as replaying needs it."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def head(self) -> Head:
        """What the journal says its last record is."""
        ...

    def page(self, after: int) -> Sequence[JournalRecord]:
        """The next records whose number is above ``after``, as many as are read at a time; empty behind the last.

        Raises:
            DamagedRecord: record ``after + 1`` cannot be read.
        """
        ...

    def readable_after(self, number: int) -> Iterable[JournalRecord]:
        """Whatever records above ``number`` can still be read, in order."""
        ...

    def cut(self, head: Head) -> None:
        """Remove all records behind ``head`` and make it the journal's head, at once and durably."""
        ...


class Replay:
    """One replay, from a head on. ``reached`` is the head of what has been returned."""

    def __init__(self, store: RecordStore, start: Head) -> None:
        self.reached = start
        self._store = store
        self._is_over = False

    def next_page(self) -> Sequence[AnyEvent]:
        """The next events; empty at the end of the journal.

        Raises:
            IntegrityError: a record is damaged and is not part of a torn end; names its number.
        """
        events: list[AnyEvent] = []
        if self._is_over:
            return events
        try:
            self._read(events)
        except DamagedRecord as damage:
            self._is_over = True
            self._cut_torn_end(damage)
        return events

    def _read(self, events: list[AnyEvent]) -> None:
        records = self._store.page(self.reached.number)
        for record in records:
            self.reached, event = next_event(self.reached, record)
            events.append(event)
        if not records:
            self._is_over = True
            check_end(self.reached, self._store.head())

    def _cut_torn_end(self, damage: DamagedRecord) -> None:
        head, reached = self._store.head(), self.reached
        intact = first_intact(self._store.readable_after(reached.number), damage.number, head)
        if intact is not None:
            raise DamagedRecord(
                damage.number, f"{self._store.name}: {damage}; record {intact} after it is intact, so it is refused"
            ) from damage
        if reached.number == 0:
            raise IntegrityError(f"{self._store.name}: {damage}; nothing of the journal can be read") from damage
        logger.warning(
            "%s: %s; the journal had a torn end and now ends with record %d, %d records are lost",
            self._store.name,
            damage,
            reached.number,
            max(head.number - reached.number, 1),
        )
        self._store.cut(reached)


def first_intact(records: Iterable[JournalRecord], damaged: int, head: Head) -> int | None:
    """The number of the first record that was surely written behind damage; None where there is none.

    Args:
        records: from the damaged one on, as far as they can be read.
        damaged: number of the damaged record.
        head: what the journal says its last record is.
    """
    previous: JournalRecord | None = None
    for record in records:
        follows = previous is not None and record.number == previous.number + 1
        if previous is not None and follows and record.digest == link(previous.digest, record.number, record.payload):
            return record.number
        if record.number > damaged and (record.number, record.digest) == (head.number, head.digest):
            return record.number
        previous = record
    return None
