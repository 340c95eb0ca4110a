"""Group commit: events that arrive while a commit is under way share the next one."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.waiting import Sleep
from steelyard.errors import StorageFailed


class Commits(Protocol):
    """Where events become durable."""

    num_committed: int
    num_commits: int

    def add(self, event: AnyEvent) -> None:
        """Put one event in line."""
        ...

    async def reached(self, number: int) -> None:
        """Return once the first ``number`` events are durable."""
        ...

    async def close(self) -> None:
        """Commit what is in line, then stop."""
        ...

    def stop(self) -> None:
        """Stop at once."""
        ...


class NothingKept:
    """For virtual time: an event counts as durable once it is applied, and nothing is written."""

    def __init__(self) -> None:
        self.num_committed = 0
        self.num_commits = 0

    def add(self, _event: AnyEvent) -> None:
        """Count the event."""
        self.num_committed += 1

    async def reached(self, number: int) -> None:
        """Return at once: it is applied."""

    async def close(self) -> None:
        """Nothing to do."""

    def stop(self) -> None:
        """Nothing to do."""


class CommitQueue:
    """Feeds the journal from one background task.

    *Consumes* events added without an ``await`` between them as one atomic unit. *Waits for* the journal.
    *Unblocked by* ``add``. *Produces* ``num_committed``, which answers wait for; each commit wakes those whose events
    it holds and nobody else.

    Args:
        journal: where events become durable.
        num_committed: how many events the journal holds already.
        delay_s: how long the first event after a pause waits for company; 0 commits at once. What came in line during
            a commit has had its company, and is committed at once.
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
        # Who waits for the commit under way, whose last event has the number below, and who for a later one.
        self._under_way: list[asyncio.Future[None]] = []
        self._last_under_way = num_committed
        self._in_line: list[asyncio.Future[None]] = []
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
            await self._next_commit(number)

    async def close(self) -> None:
        """Commit what is in line, then stop. An earlier failure was told to ``on_failure`` and is not raised again."""
        while self.num_committed < self._num_added and self._failure is None:
            await self._next_commit(self._num_added)
        self.stop()
        await asyncio.gather(self._task, return_exceptions=True)

    def stop(self) -> None:
        """Stop at once; what is in line is lost, as in a crash."""
        self._task.cancel()

    def _next_commit(self, number: int) -> "asyncio.Future[None]":
        """Done after the commit that holds event ``number``, or the next one for an event that is not in line yet.

        Each who waits has a future of their own: cancelling them must not cancel the others.
        """
        done = asyncio.get_running_loop().create_future()
        (self._under_way if number <= self._last_under_way else self._in_line).append(done)
        return done

    async def _run(self) -> None:
        is_after_pause = True
        try:
            while True:
                await self._wake.wait()
                if self._delay_s and is_after_pause:
                    await self._sleep(self._delay_s)
                batch, self._buffer = self._buffer, []
                self._wake.clear()
                self._under_way, self._in_line = self._in_line, []
                self._last_under_way = self._num_added
                await self._journal.append(batch)
                self.num_committed += len(batch)
                self.num_commits += 1
                self._on_commit(self.num_committed)
                self._release(self._under_way)
                is_after_pause = not self._buffer
        except asyncio.CancelledError:
            self._end(StorageFailed("the journal was closed before this was committed"))
            raise
        except BaseException as error:
            self._end(error)
            self._on_failure(error)
            raise

    def _end(self, error: BaseException) -> None:
        self._failure = error
        self._release(self._under_way)
        self._release(self._in_line)

    def _release(self, waiting: "list[asyncio.Future[None]]") -> None:
        for done in waiting:
            if not done.done():
                done.set_result(None)
        waiting.clear()
