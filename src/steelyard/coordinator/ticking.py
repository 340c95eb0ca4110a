"""The coordinator's own clockwork: what runs out is ended on time, whoever else is awake."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from steelyard.coordinator.core import Core
from steelyard.coordinator.journal.base import Journal


class Timed(Protocol):
    """A part of the coordinator with deadlines."""

    def advance(self) -> None:
        """Do what is due."""
        ...

    def next_due_s(self) -> float | None:
        """When there is something to do at the earliest, None for never."""
        ...


class Ticker:
    """One task that looks at the clock whenever something is due, and at least every ``tick_s``; one for the journal.

    *Waits for* the earliest deadline. *Unblocked by* that, and by an earlier one that is new (``core.timers``).
    *Produces* expiries and cancellations. It ends only with an error, which fails the run, or by ``stop``.

    Args:
        core: what is due in it, or is to fail.
        parts: what has deadlines.
        journal: is watched, for it can be lost while nothing is appended: whoever has taken it over gives other answers
            from then on.
    """

    def __init__(self, core: Core, parts: Sequence[Timed], journal: Journal) -> None:
        self._core = core
        self._parts = parts
        self._journal = journal
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        """Begin to tick, in the running event loop."""
        self._tasks = (
            asyncio.create_task(self._run(), name="coordinator-ticker"),
            asyncio.create_task(self._journal.watch(), name="journal-watch"),
        )
        for task in self._tasks:
            task.add_done_callback(self._on_done)

    async def stop(self) -> None:
        """End the tasks and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def advance(self) -> None:
        """Do what is due by now. Nothing is in a finished run, whose leases are never looked at again.

        Raises:
            BaseException: what the run failed with, if it did.
        """
        self._core.check()
        if self._is_going_on():
            now_s = self._core.now_s()
            for part in self._parts:
                due_s = part.next_due_s()
                if due_s is not None and due_s <= now_s:
                    part.advance()

    async def _run(self) -> None:
        core = self._core
        while True:
            self.advance()
            dues_s = [due for part in self._parts if (due := part.next_due_s()) is not None]
            latest_s = core.now_s() + core.settings.tick_s
            await core.wait(core.timers, min([latest_s, *dues_s]) if self._is_going_on() else latest_s)

    def _is_going_on(self) -> bool:
        run = self._core.state.run
        return run is not None and not run.is_finished

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._core.fail(error)
