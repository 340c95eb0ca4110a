"""Writing snapshots while the run goes on."""

import asyncio
import logging
from collections.abc import Callable

from steelyard.coordinator.commits import Commits
from steelyard.coordinator.entities import State
from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.snapshot import Capture, capture, pack
from steelyard.errors import IntegrityError, StorageFailed

logger = logging.getLogger(__name__)


class SnapshotWriter:
    """Writes a snapshot every so many committed events, from one background task, and one at ``close``.

    *Consumes* the live state, in slices between which everybody else runs; ``before`` lets it read what an event is
    about to change. Writing happens in a thread. *Waits for* the commit of what it took, bounded by the journal.
    *Unblocked by* ``committed``. *Produces* snapshots in the journal. A store that refuses one is reported and costs
    nothing but time at the next recovery.

    Args:
        state: the live state.
        journal: where snapshots are kept.
        commits: knows what is durable.
        every_events: committed events from one snapshot to the next.
        num_covered: number of the event that the newest snapshot covers.
        on_failure: told the error that ended the task, if one did.
    """

    def __init__(
        self,
        state: State,
        journal: Journal,
        commits: Commits,
        *,
        every_events: int,
        num_covered: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.num_covered = num_covered
        self._state = state
        self._journal = journal
        self._commits = commits
        self._every_events = every_events
        self._on_failure = on_failure
        self._due = asyncio.Event()
        self._is_closing = False
        self._capture: Capture | None = None
        self._task = asyncio.create_task(self._run(), name="journal-snapshots")
        self._task.add_done_callback(self._on_done)

    def committed(self, num_committed: int) -> None:
        """So many events are durable now.

        A state of many rollouts waits for as many events, so that snapshots cost each event the same.
        """
        if num_committed - self.num_covered >= max(self._every_events, len(self._state.rollouts)):
            self._due.set()

    def before(self, event: AnyEvent) -> None:
        """``event`` is about to be applied to the live state."""
        if self._capture is not None:
            self._capture.before(event)

    async def close(self) -> None:
        """Finish what is being written, then cover all that is committed. After a failure nothing is written."""
        if self._task.done():
            return
        self._is_closing = True
        self._due.set()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._task.exception() is None and self._commits.num_committed == self._state.num_events > self.num_covered:
            await self._write(capture(self._state))

    async def stop(self) -> None:
        """Stop at once, as in a crash."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._is_closing:
            await self._due.wait()
            self._due.clear()
            if not self._is_closing:
                await self._write(await self._read())

    async def _read(self) -> Capture:
        """The state as it is now, however much it changes until all of it has been read."""
        self._capture = captured = Capture(self._state)
        while not captured.is_whole:
            captured.read_slice()
            await asyncio.sleep(0)
        self._capture = None
        return captured

    async def _write(self, captured: Capture) -> None:
        number = captured.num_events
        await self._commits.reached(number)
        try:
            head = await self._journal.head_at(number)
            if head is None:
                raise IntegrityError(f"the journal must hold record {number}, which it has committed")
            data = await asyncio.to_thread(pack, captured, head)
            self.num_covered = number
            await self._journal.save_snapshot(number, data)
        except StorageFailed as error:
            logger.warning("no snapshot at event %d, the next recovery takes longer: %s", number, error)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
