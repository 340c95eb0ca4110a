"""What a journal is: contiguous records, each chained to the one before it by a digest.

``digest(n) = xxh3-128(digest(n-1) || n || payload(n))``, so that a record that was changed, dropped, doubled or moved
breaks the chain at a place that can be named. The head (number and digest of the last record) is kept beside the
records in the same transaction, so that a missing end is seen too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from steelyard.coordinator.events import AnyEvent
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import Record

FaultPoint = Callable[[str], None]
"""Called at named places inside a write, so that a test can stop the process exactly there."""

FAULT_POINTS = ("journal.before_append", "journal.mid_append", "journal.before_commit", "journal.after_commit")
"""Beside these, ``event:<KIND>:before`` and ``event:<KIND>:after`` are called for each event around its commit."""

_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def no_fault(name: str) -> None:
    """The fault point of real runs: nothing happens."""


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
            StorageFailed: the store refused the write; what it holds is what it held before.
        """
        ...

    async def replay(self) -> tuple[AnyEvent, ...]:
        """All events in order, with the chain checked.

        Raises:
            IntegrityError: a record does not fit its chain, or is no event.
        """
        ...

    async def close(self) -> None:
        """Release the store; nothing can be appended afterwards."""
        ...


class JournalReader(Protocol):
    """Read access for ``audit``, which wants to see broken records too."""

    def records(self) -> Iterable[JournalRecord]:
        """All records in stored order, unchecked."""
        ...

    def head(self) -> Head:
        """What the journal says its last record is."""
        ...


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


def checked_events(records: Iterable[JournalRecord], head: Head) -> Iterator[AnyEvent]:
    """The events of ``records``, each checked against the chain and the last against ``head``.

    Raises:
        IntegrityError: names the first record that does not fit.
    """
    number, digest = 0, ""
    for record in records:
        number += 1
        if record.number != number:
            raise IntegrityError(f"journal record {number} is missing, found {record.number} in its place")
        digest = link(digest, number, record.payload)
        if record.digest != digest:
            raise IntegrityError(f"journal record {number} must have digest {digest}, has {record.digest}")
        yield decode(record.payload)
    if (number, digest) != (head.number, head.digest):
        raise IntegrityError(f"the journal must end with record {head.number}, ends with {number}")
