"""The ticker looks when something is due, not in a finished run, and its error is the run's."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from steelyard.coordinator.core import Core, FullWait
from steelyard.coordinator.entities import State
from steelyard.coordinator.events import RunFinished
from steelyard.coordinator.journal.base import Head
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.coordinator.ticking import Ticker
from steelyard.errors import JournalFenced, RunError
from steelyard.ids import SeededIds
from steelyard.metrics import Counters
from steelyard.testing.manual_clock import ManualClock, settle
from steelyard.testing.run_rig import WORKER, MemoryStores, RunRig, make_settings


class Alarm:
    """A part of the coordinator that is due once, at ``due_s``, and notes when it was looked at from then on."""

    def __init__(self, clock: ManualClock, due_s: float, error: BaseException | None = None) -> None:
        self._clock = clock
        self._due_s: float | None = clock.now_s() + due_s
        self._error = error
        self.rang_at_s: list[float] = []

    def advance(self) -> None:
        if self._due_s is not None and self._clock.now_s() >= self._due_s:
            self._due_s = None
            self.rang_at_s.append(self._clock.now_s())
            if self._error is not None:
                raise self._error

    def next_due_s(self) -> float | None:
        return self._due_s


def play(scene: Callable[[Core, ManualClock], Awaitable[None]], tick_s: float = 1000.0) -> None:
    async def run() -> None:
        clock = ManualClock()
        core = Core(
            state=State(),
            journal=MemoryJournal(),
            settings=make_settings(tick_s=tick_s),
            clock=clock,
            sleep=clock.sleep,
            ids=SeededIds(0),
            counters=Counters(),
            open_traces=MemoryStores(),
            jitter=FullWait(),
        )
        core.begin("run_x", 0, "c")
        await core.committed()
        await scene(core, clock)
        await core.commits.close()

    asyncio.run(run())


def test_each_part_is_looked_at_when_it_is_due_although_the_next_tick_is_far() -> None:
    async def scene(core: Core, clock: ManualClock) -> None:
        early, late = Alarm(clock, 3.0), Alarm(clock, 5.0)
        ticker = Ticker(core, (late, early), MemoryJournal())
        ticker.start()
        for _ in range(6):
            await settle()
            clock.advance(1.0)
        await settle()
        begun_s = clock.now_s() - 6.0
        assert (early.rang_at_s, late.rang_at_s) == ([begun_s + 3.0], [begun_s + 5.0])
        await ticker.stop()

    play(scene)


def test_nothing_is_due_in_a_finished_run() -> None:
    async def scene(core: Core, clock: ManualClock) -> None:
        alarm = Alarm(clock, 1.0)
        ticker = Ticker(core, (alarm,), MemoryJournal())
        core.record(RunFinished(at_s=core.now_s(), reason="done"))
        ticker.start()
        await settle()
        clock.advance(5.0)
        await settle()
        ticker.advance()
        assert alarm.rang_at_s == []
        await ticker.stop()

    play(scene, tick_s=1.0)


def test_an_error_of_a_part_is_the_error_of_the_run() -> None:
    async def scene(core: Core, clock: ManualClock) -> None:
        ticker = Ticker(core, (Alarm(clock, 1.0, RunError("the part is broken")),), MemoryJournal())
        ticker.start()
        await settle()
        clock.advance(1.0)
        await settle()
        with pytest.raises(RunError, match="the part is broken"):
            core.check()
        with pytest.raises(RunError, match="the part is broken"):
            ticker.advance()
        await ticker.stop()

    play(scene)


def test_a_ticker_that_was_stopped_leaves_nothing_behind_and_fails_nothing() -> None:
    async def scene(core: Core, clock: ManualClock) -> None:
        ticker = Ticker(core, (), MemoryJournal())
        await ticker.stop()
        ticker.start()
        await settle()
        await ticker.stop()
        core.check()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "coordinator-ticker"]

    play(scene)


class LosableJournal(MemoryJournal):
    """Can be taken over by somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = asyncio.Event()

    async def watch(self) -> None:
        await self.taken.wait()
        self._require_ours()

    async def head_at(self, number: int) -> Head | None:
        self._require_ours()
        return await super().head_at(number)

    def _require_ours(self) -> None:
        if self.taken.is_set():
            raise JournalFenced("the journal was taken over by another")


def test_a_journal_that_is_lost_while_nothing_is_appended_fails_every_wait_and_every_later_call() -> None:
    async def run() -> None:
        journal = LosableJournal()
        rig = await RunRig(make_settings(), journal=journal).start()
        await rig.coordinator.lease(WORKER, 100, 0.0)
        waiter = asyncio.ensure_future(rig.coordinator.next_batch(0, 1e6))
        poll = asyncio.ensure_future(rig.coordinator.lease(WORKER, 1, 1e6))
        await settle()
        journal.taken.set()
        for call in (waiter, poll, rig.coordinator.heartbeat(WORKER, ()), rig.coordinator.lease(WORKER, 1, 0.0)):
            with pytest.raises(JournalFenced, match="taken over by another"):
                await call
        await rig.coordinator.close()  # which would write a snapshot
        assert await journal.snapshots() == ()

    asyncio.run(run())


def test_a_journal_is_not_watched_any_more_once_the_coordinator_has_stopped() -> None:
    async def run() -> None:
        for stop in ("close", "crash"):
            rig = await RunRig(make_settings(), journal=LosableJournal()).start()
            await getattr(rig.coordinator, stop)()
            assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "journal-watch"] == []

    asyncio.run(run())
