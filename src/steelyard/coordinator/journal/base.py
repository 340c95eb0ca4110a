"""What a journal is: contiguous records, each chained to the one before it by a digest.

``digest(n) = xxh3-128(digest(n-1) || n || payload(n))``, so that a record that was changed, dropped, doubled or moved
breaks the chain at a place that can be named. The head (number and digest of the last record) is kept beside the
records in the same transaction, so that a missing end is seen too.

A journal also keeps the last snapshots of the state. They save replaying what lies before them; no record is ever
lost for them (one may be moved to where only a replay of everything and the audit read it), and what they say is never
believed against the records.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from steelyard.coordinator.events import AnyEvent, kind_of
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import Record

FaultPoint = Callable[[str], None]
"""Called at named places inside a write, so that a test can stop the process exactly there."""

FAULT_POINTS = ("journal.before_append", "journal.mid_append", "journal.before_commit", "journal.after_commit")
"""Beside these, ``event:<KIND>:before`` and ``event:<KIND>:after`` are called for each event around its commit."""

SNAPSHOT_FAULT_POINTS = ("snapshot.before_write", "snapshot.mid_write", "snapshot.before_rename", "snapshot.written")
"""Called around the writing of a snapshot; a process that dies at any of them leaves older snapshots as they were."""

FORMAT_VERSION = 1
"""Of the records and their chain. A journal that says nothing is of version 1, which did not say it at first."""

KEPT_SNAPSHOTS = 2
"""So many of the newest snapshots are kept: the older one serves where the newer one is damaged."""

PAGE_RECORDS = 4096
"""So many records are replayed at a time, so that a long journal is never in memory as a whole."""

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def no_fault(name: str) -> None:
    """The fault point of real runs: nothing happens."""


def pass_events(fault_point: FaultPoint, events: Sequence[AnyEvent], when: str) -> None:
    """Call the fault points of each event; ``when`` is ``before`` or ``after`` its commit."""
    if fault_point is no_fault:
        return
    for event in events:
        fault_point(f"event:{kind_of(event)}:{when}")


class JournalRecord(Record, frozen=True, kw_only=True):
    """One record as stored: ``payload`` is the event as JSON, ``digest`` covers it and all before it."""

    number: int
    payload: bytes
    digest: str


class Head(Record, frozen=True, kw_only=True):
    """Number and digest of the last record; 0 and the digest of nothing for an empty journal."""

    number: int
    digest: str


EMPTY_HEAD = Head(number=0, digest="")


class Journal(Protocol):
    """An append-only store of events. One writer at a time."""

    async def append(self, events: Sequence[AnyEvent]) -> None:
        """Make all of ``events`` durable, or none of them.

        Raises:
            StorageFailed: the store refused the write, and holds what it held before; or its answer was lost, and it
                holds all of them or none. Only a recovery tells which: nothing more may be appended.
            JournalFenced: another writer has taken the journal over; it holds none of them.
        """
        ...

    async def replay(self) -> tuple[AnyEvent, ...]:
        """All events in order, with the chain checked.

        Raises:
            IntegrityError: as of ``replay_from``.
        """
        ...

    def replay_from(self, head: Head) -> AsyncIterator[Sequence[AnyEvent]]:
        """The events after ``head``, in pages and in order, with the chain checked from ``head`` on.

        A torn end (records that are damaged or missing, and none intact after them) is cut off with a warning.

        Args:
            head: of the journal at some number, ``EMPTY_HEAD`` for all events; from ``head_at``, or compared with it.

        Raises:
            IntegrityError: a record is damaged, and intact ones follow it; names its number. Or the journal is of
                another format, or nothing of it can be read.
        """
        ...

    async def head_at(self, number: int) -> Head | None:
        """Number and stored digest of one record, ``EMPTY_HEAD`` for 0; None where there is no such record."""
        ...

    async def save_snapshot(self, number: int, data: bytes) -> None:
        """Keep a snapshot of the state after event ``number``, wholly or not at all, and the newest one before it.

        Raises:
            StorageFailed: the store refused the write; older snapshots are as they were.
        """
        ...

    async def snapshots(self) -> tuple[int, ...]:
        """Event numbers of the kept snapshots, newest first."""
        ...

    async def read_snapshot(self, number: int) -> bytes:
        """One snapshot as it is stored, unchecked.

        Raises:
            IntegrityError: it cannot be read.
        """
        ...

    async def watch(self) -> None:
        """Wait until the journal can be written no more, though nothing is being appended. Ends only by an error.

        Bounded by its caller, who cancels it. A store that no other process can take away never ends it.

        Raises:
            JournalFenced: another writer has taken the journal over.
            StorageFailed: the store is out of reach, for so long that another writer may have taken over.
        """
        ...

    async def close(self) -> None:
        """Release the store; nothing can be appended afterwards. Idempotent."""
        ...


class JournalReader(Protocol):
    """Read access for ``audit``, which wants to see broken records too."""

    def records(self) -> Iterable[JournalRecord]:
        """All records in stored order, unchecked."""
        ...

    def head(self) -> Head:
        """What the journal says its last record is."""
        ...


class StateReader(JournalReader, Protocol):
    """Read access that need not begin at the beginning, for who wants to know how things stand."""

    def records_after(self, number: int) -> Iterable[JournalRecord]:
        """The records above ``number`` in stored order, unchecked."""
        ...

    def snapshots(self) -> tuple[int, ...]:
        """Event numbers of the kept snapshots, newest first."""
        ...

    def read_snapshot(self, number: int) -> bytes:
        """One snapshot as it is stored, unchecked.

        Raises:
            IntegrityError: it cannot be read, or has been replaced by a newer one meanwhile.
        """
        ...


async def never_lost() -> None:
    """The ``watch`` of a journal that no other process can take away."""
    await asyncio.get_running_loop().create_future()


def chain(head: Head, events: Sequence[AnyEvent]) -> tuple[tuple[JournalRecord, ...], Head]:
    """The records of ``events`` after ``head``, and the new head."""
    records = []
    number, digest = head.number, head.digest
    for event in events:
        payload = _ENCODER.encode(event)
        number += 1
        digest = link(digest, number, payload)
        records.append(JournalRecord(number=number, payload=payload, digest=digest))
    return tuple(records), Head(number=number, digest=digest)


def link(previous_digest: str, number: int, payload: bytes) -> str:
    """The digest of record ``number``."""
    return digest_bytes(previous_digest.encode() + number.to_bytes(8, "big") + payload)


def decode(payload: bytes) -> AnyEvent:
    """The event of one record.

    Raises:
        IntegrityError: the payload is no event.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise IntegrityError(f"a journal record must be an event: {error}") from error


class DamagedRecord(IntegrityError):
    """A record does not fit its chain, or cannot be read.

    Args:
        number: which one.
    """

    def __init__(self, number: int, message: str) -> None:
        self.number = number
        super().__init__(message)


def check_format(found: int, name: str) -> None:
    """Refuse a journal of another format.

    Args:
        found: the format version that it says, 0 where it says none.
        name: of the journal, for the message.

    Raises:
        IntegrityError: names both versions.
    """
    if found not in (0, FORMAT_VERSION):
        raise IntegrityError(f"{name}: the journal must have format version {FORMAT_VERSION}, has {found}")


def next_event(head: Head, record: JournalRecord) -> tuple[Head, AnyEvent]:
    """Check one record against the head before it; the head after it, and its event.

    Raises:
        DamagedRecord: it does not follow.
    """
    number = head.number + 1
    if record.number != number:
        raise DamagedRecord(number, f"journal record {number} is missing, found {record.number} in its place")
    digest = link(head.digest, number, record.payload)
    if record.digest != digest:
        raise DamagedRecord(number, f"journal record {number} must have digest {digest}, has {record.digest}")
    try:
        event = decode(record.payload)
    except IntegrityError as error:
        raise DamagedRecord(number, f"journal record {number}: {error}") from error
    return Head(number=number, digest=digest), event


def checked_events(records: Iterable[JournalRecord], head: Head) -> Iterator[AnyEvent]:
    """The events of ``records``, each checked against the chain and the last against ``head``.

    Raises:
        IntegrityError: names the first record that does not fit.
    """
    reached = EMPTY_HEAD
    for record in records:
        reached, event = next_event(reached, record)
        yield event
    check_end(reached, head)


def check_end(reached: Head, head: Head) -> None:
    """Hold the end of the records to what the journal says its head is.

    Raises:
        DamagedRecord: records are missing at the end.
        IntegrityError: there are more records than there should be, or the last one has another digest.
    """
    message = f"the journal must end with record {head.number}, ends with {reached.number}"
    if reached.number < head.number:
        raise DamagedRecord(reached.number + 1, message)
    if reached != head:
        raise IntegrityError(message)
