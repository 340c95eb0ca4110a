"""A process that appends numbered events to a PostgreSQL journal and says what was acknowledged; tests kill it.

``python -m steelyard.testing.journal_writer URL NAME OWNER LEASE_S`` waits for the lease, replays, prints ``taken``
with the number of the last record, and then ``acknowledged OWNER-<n>`` for the last event of each group. A failure is
printed as ``ended`` with its name, and ends the process as a run ends.
"""

import asyncio
import itertools
import sys

from steelyard.cli.main import EXIT_RUN_FAILED
from steelyard.coordinator.events import AnyEvent, Running
from steelyard.coordinator.journal.postgres import PostgresJournal
from steelyard.coordinator.journal.postgres_database import PostgresPlace
from steelyard.errors import SteelyardError
from steelyard.processes.supervision import supervise

_GROUP_EVENTS = 3
_STANDBY_WAIT_S = 3600.0
_PAUSE_S = 0.005
"""Between groups, so that nobody has to read thousands of lines."""


async def write(url: str, name: str, owner: str, lease_s: float) -> None:
    """Take the journal over and append until the lease is lost."""
    place = PostgresPlace(url=url, name=name, deadline_s=30.0)
    journal = PostgresJournal(place, owner=owner, lease_s=lease_s, wait_s=_STANDBY_WAIT_S)
    try:
        events = await journal.replay()
        sys.stdout.write(f"taken {len(events)}\n")
        sys.stdout.flush()
        await supervise(journal.watch(), _append(journal, owner))
    finally:
        await journal.close()


async def _append(journal: PostgresJournal, owner: str) -> None:
    for group in itertools.count():
        numbers = range(group * _GROUP_EVENTS, (group + 1) * _GROUP_EVENTS)
        events: list[AnyEvent] = [Running(at_s=0.0, attempt_id=f"{owner}-{number}") for number in numbers]
        await journal.append(events)
        sys.stdout.write(f"acknowledged {owner}-{numbers[-1]}\n")
        sys.stdout.flush()
        await asyncio.sleep(_PAUSE_S)


def main() -> int:
    """Returns the exit code of a failed run; nothing but a failure ends it."""
    url, name, owner, lease_s = sys.argv[1:]
    try:
        asyncio.run(write(url, name, owner, float(lease_s)))
    except SteelyardError as error:
        sys.stdout.write(f"ended {type(error).__name__}: {error}\n")
    return EXIT_RUN_FAILED


if __name__ == "__main__":
    sys.exit(main())
