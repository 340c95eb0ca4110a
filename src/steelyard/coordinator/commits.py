"""Group commit: events that arrive while a commit is under way share the next one."""

import asyncio
from collections.abc import Callable

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.waiting import Signal, Sleep
from steelyard.errors import StorageFailed


class CommitQueue:
    """Feeds the journal from one background task.

    *Consumes* events added without an ``await`` between them as one atomic unit. *Waits for* the journal.
    *Unblocked by* ``add``. *Produces* ``num_committed``, which answers wait for.

    Args:
        journal: where events become durable.
        num_committed: how many events the journal holds already.
        delay_s: how long a commit waits for company; 0 commits at once.
        sleep: waits for so many seconds.
        on_commit: told the number of durable events after each commit, before anybody who waits for it.
        on_failure: told once, with the error, when the journal refuses; nothing is committed afterwards.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        num_committed: int,
        delay_s: float,
        sleep: Sleep,
        on_failure: Callable[[BaseException], None],
        on_commit: Callable[[int], None],
    ) -> None:
        self.num_committed = num_committed
        self.num_commits = 0
        self._journal = journal
        self._delay_s = delay_s
        self._sleep = sleep
        self._on_failure = on_failure
        self._on_commit = on_commit
        self._buffer: list[AnyEvent] = []
        self._num_added = num_committed
        self._wake = asyncio.Event()
        self._committed = Signal()
        self._failure: BaseException | None = None
        self._task = asyncio.create_task(self._run(), name="journal-commits")
        # Its error goes to ``on_failure`` and to all who wait; nobody awaits the task itself.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def add(self, event: AnyEvent) -> None:
        """Put one event in line. Raises the journal's error once it has failed."""
        if self._failure is not None:
            raise self._failure
        self._buffer.append(event)
        self._num_added += 1
        self._wake.set()

    async def reached(self, number: int) -> None:
        """Return once the first ``number`` events are durable; raises the journal's error if they never will be.

        Bounded by the journal: its failure ends the wait.
        """
        while self.num_committed < number:
            if self._failure is not None:
                raise self._failure
            await self._committed.next_event().wait()

    async def close(self) -> None:
        """Commit what is in line, then stop. An earlier failure was told to ``on_failure`` and is not raised again."""
        while self.num_committed < self._num_added and self._failure is None:
            await self._committed.next_event().wait()
        self.stop()
        await asyncio.gather(self._task, return_exceptions=True)

    def stop(self) -> None:
        """Stop at once; what is in line is lost, as in a crash."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                if self._delay_s:
                    await self._sleep(self._delay_s)
                batch, self._buffer = self._buffer, []
                self._wake.clear()
                await self._journal.append(batch)
                self.num_committed += len(batch)
                self.num_commits += 1
                self._on_commit(self.num_committed)
                self._committed.notify()
        except asyncio.CancelledError:
            self._failure = StorageFailed("the journal was closed before this was committed")
            self._committed.notify()
            raise
        except BaseException as error:
            self._failure = error
            self._committed.notify()
            self._on_failure(error)
            raise
