"""The state that a journal holds: from the newest good snapshot and the events after it, else from all events."""

import itertools
import logging

from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.base import EMPTY_HEAD, Head, Journal, StateReader, check_end, next_event
from steelyard.coordinator.snapshot import restore
from steelyard.coordinator.state import apply
from steelyard.errors import IntegrityError

logger = logging.getLogger(__name__)


async def recover(journal: Journal) -> tuple[State, int]:
    """Bring back the state, and the number of the event from which it was replayed.

    Records before the snapshot are not read; ``audit`` reads all of them.

    Raises:
        IntegrityError: the journal is damaged elsewhere than at its end, or of another format.
        IllegalTransition: it holds an event that cannot follow.
    """
    state, head = await _newest_good(journal)
    start = head.number
    async for events in journal.replay_from(head):
        for event in events:
            apply(state, event)
    return state, start


async def _newest_good(journal: Journal) -> tuple[State, Head]:
    """The newest snapshot that can be trusted; the empty state where there is none."""
    for number in await journal.snapshots():
        try:
            state, head = restore(await journal.read_snapshot(number))
            _require_same(head, await journal.head_at(head.number))
        except IntegrityError as error:
            logger.warning("snapshot %d is ignored, recovery takes longer: %s", number, error)
        else:
            return state, head
    return State(), EMPTY_HEAD


def read_state(reader: StateReader) -> State:
    """The state as the journal says it is now; nothing is changed, and the run may go on meanwhile.

    Only what came after the newest good snapshot is read.

    Raises:
        IntegrityError: a record is damaged or missing, at the end of the journal too.
        IllegalTransition: it holds an event that cannot follow.
    """
    end = reader.head()
    state, reached = _newest_readable(reader, end)
    # What is written after the head was read is left for the next look.
    for record in itertools.takewhile(lambda record: record.number <= end.number, reader.records_after(reached.number)):
        reached, event = next_event(reached, record)
        apply(state, event)
    check_end(reached, end)
    return state


def _newest_readable(reader: StateReader, end: Head) -> tuple[State, Head]:
    for number in reader.snapshots():
        if number > end.number:
            continue  # newer than what is to be read
        try:
            state, head = restore(reader.read_snapshot(number))
            record = next(iter(reader.records_after(head.number - 1)), None)
            is_there = record is not None and record.number == head.number
            _require_same(head, Head(number=head.number, digest=record.digest) if record and is_there else None)
        except IntegrityError as error:
            logger.info("snapshot %d is left out: %s", number, error)
        else:
            return state, head
    return State(), EMPTY_HEAD


def _require_same(head: Head, found: Head | None) -> None:
    if found != head:
        is_behind = "has no such record" if found is None else f"has digest {found.digest} there"
        raise IntegrityError(f"a snapshot at {head.number} has digest {head.digest}, the journal {is_behind}")
