"""Group commit: company shares a commit, order is kept, failures reach everybody who waits."""

import asyncio
from collections.abc import Sequence

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.commits import CommitQueue
from steelyard.coordinator.journal.memory import MemoryJournal
from steelyard.errors import StorageFailed
from steelyard.testing.manual_clock import settle


def event(n: int) -> e.AnyEvent:
    return e.Running(at_s=float(n), attempt_id=f"att_{n}")


class SlowJournal(MemoryJournal):
    """Commits only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Semaphore(0)
        self.sizes: list[int] = []

    async def append(self, events: Sequence[e.AnyEvent]) -> None:
        await self.gate.acquire()
        self.sizes.append(len(events))
        await super().append(events)


class FullDisk(MemoryJournal):
    async def append(self, events: Sequence[e.AnyEvent]) -> None:
        raise StorageFailed("disk full")


def queue(journal: MemoryJournal, failures: list[BaseException] | None = None) -> CommitQueue:
    return CommitQueue(
        journal,
        num_committed=0,
        delay_s=0.0,
        sleep=asyncio.sleep,
        on_failure=(failures if failures is not None else []).append,
        on_commit=lambda number: None,
    )


def test_events_that_arrive_during_a_commit_share_the_next_one() -> None:
    async def run() -> None:
        journal = SlowJournal()
        commits = queue(journal)
        commits.add(event(1))
        await settle()
        for n in range(2, 50):
            commits.add(event(n))
        for _ in range(2):
            journal.gate.release()
        await commits.reached(49)
        assert journal.sizes == [1, 48]
        assert await journal.replay() == tuple(event(n) for n in range(1, 50))
        await commits.close()

    asyncio.run(run())


def test_an_answer_waits_for_exactly_its_commit() -> None:
    async def run() -> None:
        journal = SlowJournal()
        commits = queue(journal)
        commits.add(event(1))
        first = asyncio.ensure_future(commits.reached(1))
        await settle()
        commits.add(event(2))
        second = asyncio.ensure_future(commits.reached(2))
        journal.gate.release()
        await settle()
        assert first.done() and not second.done()
        journal.gate.release()
        await second
        await commits.close()

    asyncio.run(run())


def test_a_commit_wakes_nobody_who_waits_for_a_later_one() -> None:
    async def run() -> None:
        journal = SlowJournal()
        commits = queue(journal)
        commits.add(event(1))
        await settle()
        commits.add(event(2))
        later = commits.reached(2)
        woken_by: asyncio.Future[None] = later.send(None)
        journal.gate.release()
        await commits.reached(1)
        assert not woken_by.done()
        journal.gate.release()
        await commits.reached(2)
        assert woken_by.done()
        later.close()
        await commits.close()

    asyncio.run(run())


def test_one_who_gives_up_waiting_takes_nobody_else_along() -> None:
    async def run() -> None:
        journal = SlowJournal()
        commits = queue(journal)
        commits.add(event(1))
        waiters = [asyncio.ensure_future(commits.reached(1)) for _ in range(3)]
        await settle()
        waiters[1].cancel()
        journal.gate.release()
        await asyncio.gather(*waiters, return_exceptions=True)
        assert [waiter.cancelled() for waiter in waiters] == [False, True, False]
        await commits.close()

    asyncio.run(run())


def test_who_waits_for_an_event_that_is_not_in_line_yet_waits_until_it_is_durable() -> None:
    async def run() -> None:
        journal = MemoryJournal()
        commits = queue(journal)
        waiter = asyncio.ensure_future(commits.reached(3))
        for number in (1, 2):
            commits.add(event(number))
            await commits.reached(number)
        await settle()
        assert not waiter.done()
        commits.add(event(3))
        await waiter
        await commits.close()

    asyncio.run(run())


def test_a_refusing_disk_fails_all_who_wait_and_all_who_come_later() -> None:
    async def run() -> None:
        failures: list[BaseException] = []
        commits = queue(FullDisk(), failures)
        commits.add(event(1))
        with pytest.raises(StorageFailed, match="disk full"):
            await commits.reached(1)
        with pytest.raises(StorageFailed, match="disk full"):
            commits.add(event(2))
        assert [str(failure) for failure in failures] == ["disk full"]
        await commits.close()

    asyncio.run(run())


def test_closing_commits_what_is_in_line() -> None:
    async def run() -> None:
        journal = MemoryJournal()
        commits = queue(journal)
        for n in range(1, 4):
            commits.add(event(n))
        await commits.close()
        assert len(journal.stored) == 3

    asyncio.run(run())


def test_stopping_loses_what_is_in_line_and_says_so() -> None:
    async def run() -> None:
        journal = SlowJournal()
        commits = queue(journal)
        commits.add(event(1))
        waiter = asyncio.ensure_future(commits.reached(1))
        await settle()
        commits.stop()
        with pytest.raises(StorageFailed, match="closed before"):
            await waiter
        assert journal.stored == []

    asyncio.run(run())


def test_a_delay_gathers_company() -> None:
    async def run() -> None:
        journal = SlowJournal()
        journal.gate.release()
        gate = asyncio.Event()

        async def sleep(seconds: float) -> None:
            assert seconds == 0.5
            await gate.wait()

        commits = CommitQueue(
            journal,
            num_committed=0,
            delay_s=0.5,
            sleep=sleep,
            on_failure=lambda error: None,
            on_commit=lambda number: None,
        )
        for n in range(1, 6):
            commits.add(event(n))
            await settle()
        gate.set()
        await commits.reached(5)
        assert journal.sizes == [5]
        commits.stop()

    asyncio.run(run())


def test_what_came_in_line_during_a_commit_is_not_delayed_again() -> None:
    async def run() -> None:
        journal, num_delays = SlowJournal(), 0

        async def sleep(seconds: float) -> None:
            nonlocal num_delays
            num_delays += 1

        commits = CommitQueue(
            journal,
            num_committed=0,
            delay_s=0.5,
            sleep=sleep,
            on_failure=lambda error: None,
            on_commit=lambda number: None,
        )
        commits.add(event(1))
        await settle()
        commits.add(event(2))
        for _ in range(3):
            journal.gate.release()
        await commits.reached(2)
        assert (num_delays, journal.sizes) == (1, [1, 1])
        commits.add(event(3))
        await commits.reached(3)
        assert num_delays == 2, "after a pause there is company to wait for"
        await commits.close()

    asyncio.run(run())
