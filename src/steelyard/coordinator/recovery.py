"""The state that a journal holds: from the newest good snapshot and the events after it, else from all events."""

import logging

from steelyard.coordinator.entities import State
from steelyard.coordinator.journal.base import EMPTY_HEAD, Head, Journal
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
            found = await journal.head_at(head.number)
            if found != head:
                is_behind = "has no such record" if found is None else f"has digest {found.digest} there"
                raise IntegrityError(f"a snapshot at {head.number} has digest {head.digest}, the journal {is_behind}")
        except IntegrityError as error:
            logger.warning("snapshot %d is ignored, recovery takes longer: %s", number, error)
        else:
            return state, head
    return State(), EMPTY_HEAD
