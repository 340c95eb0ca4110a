"""Lease and epoch: of all who ever held a journal, only the last one can write."""

import asyncio
import contextlib
import itertools
import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.journal.postgres import PostgresJournal
from steelyard.errors import DeadlineExceeded, JournalFenced, StorageFailed
from steelyard.testing.journals import PostgresStore, closing, events, replay, replayed
from steelyard.testing.postgres import PostgresServer, postgres_server


def event(name: str) -> e.AnyEvent:
    return e.Running(at_s=0.0, attempt_id=name)


def test_a_standby_waits_for_the_lease_to_end_and_the_old_writer_can_append_no_more(
    postgres_store: PostgresStore,
) -> None:
    async def run() -> None:
        # Its renewals come too late to tell it.
        async with closing(postgres_store.open(lease_s=3600.0)) as old, closing(postgres_store.open()) as new:
            await old.append(events(0, 2))
            taking = asyncio.create_task(new.replay())
            await old.append(events(2, 1))
            assert not taking.done()
            postgres_store.end_lease()
            assert await taking == tuple(events(0, 3))
            await new.append(events(3, 1))
            with pytest.raises(JournalFenced, match="taken over by writer 2 at epoch 2; this writer has epoch 1"):
                await old.append(events(3, 1))
            with pytest.raises(JournalFenced):
                await old.watch()
            with pytest.raises(JournalFenced):
                await old.save_snapshot(3, b"old")
            await new.append(events(4, 1))

    asyncio.run(run())
    assert replayed(postgres_store.open()) == tuple(events(0, 5))


def test_an_old_writer_that_learns_of_it_by_its_snapshot_writes_none(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        async with closing(postgres_store.open()) as old:
            await old.append(events(0, 2))
            postgres_store.end_lease()
            async with closing(postgres_store.open()) as new:
                await new.replay()
                with pytest.raises(JournalFenced):
                    await old.save_snapshot(2, b"old")
                assert await new.snapshots() == ()

    asyncio.run(run())


def test_an_old_writer_cuts_no_torn_end_off_under_the_new_one(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        async with closing(postgres_store.open()) as old:
            await old.append(events(0, 3))
            postgres_store.edit(
                "update records set payload = '{}' where number = 3",
                "update journals set epoch = epoch + 1, owner = 'another'",
            )
            with pytest.raises(JournalFenced):
                await old.replay()
            assert postgres_store.reader().head().number == 3

    asyncio.run(run())


def test_of_many_that_come_for_a_free_journal_at_once_one_takes_it(postgres_store: PostgresStore) -> None:
    async def come(journal: Journal) -> bool:
        try:
            await journal.replay()
        except DeadlineExceeded:
            return False
        return True

    async def run() -> None:
        await replay(postgres_store.open())
        async with contextlib.AsyncExitStack() as stack:
            journals = [await stack.enter_async_context(closing(postgres_store.open(wait_s=0.0))) for _ in range(8)]
            taken = await asyncio.gather(*map(come, journals))
            assert sum(taken) == 1
            await journals[taken.index(True)].append(events(0, 1))

    asyncio.run(run())


def test_a_lease_that_was_given_back_is_free_at_once(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        await replay(postgres_store.open(lease_s=3600.0))
        await replay(postgres_store.open(lease_s=3600.0, wait_s=0.0))

    asyncio.run(run())


def test_who_waits_for_too_long_is_told_who_holds_the_journal(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        async with closing(postgres_store.open()) as old, closing(postgres_store.open(wait_s=0.0)) as new:
            await old.append(events(0, 1))
            with pytest.raises(
                DeadlineExceeded, match=rf"the lease of journal {postgres_store.name} to end; still missing: writer 1"
            ):
                await new.append(events(1, 1))
            await old.append(events(1, 1))

    asyncio.run(run())


def test_a_writer_whose_lease_is_over_goes_on_while_nobody_has_taken_it(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        async with closing(postgres_store.open()) as journal:
            await journal.append(events(0, 1))
            postgres_store.end_lease()
            await journal.append(events(1, 1))
            async with closing(postgres_store.open(wait_s=0.0)) as other:
                with pytest.raises(DeadlineExceeded):  # the append has renewed it
                    await other.replay()

    asyncio.run(run())


def test_a_writer_renews_its_lease_while_nothing_is_appended(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        async with closing(postgres_store.open(lease_s=3.0)) as journal:
            await journal.replay()
            postgres_store.end_lease()
            await asyncio.to_thread(until_renewed, postgres_store)

    asyncio.run(run())


def until_renewed(store: PostgresStore) -> None:
    """The deadline is the test's."""
    while not store.ask("select expires_at > '2000-01-01' from journals"):
        pass


def test_a_writer_that_appends_nothing_learns_that_it_was_fenced(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        async with closing(postgres_store.open(lease_s=3.0)) as journal:
            await journal.replay()
            watching = asyncio.create_task(journal.watch())
            postgres_store.edit("update journals set epoch = epoch + 1, owner = 'another'")
            with pytest.raises(JournalFenced, match="taken over by another at epoch 2"):
                await watching

    asyncio.run(run())


def test_a_writer_that_closes_does_not_give_back_what_another_has_taken(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        old, new = postgres_store.open(), postgres_store.open()
        await old.replay()
        postgres_store.end_lease()
        async with closing(new):
            await new.replay()
            await old.close()
            async with closing(postgres_store.open(wait_s=0.0)) as third:
                with pytest.raises(DeadlineExceeded, match="still missing: writer 2"):
                    await third.replay()

    asyncio.run(run())


def test_a_closed_journal_refuses_everything(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        journal = postgres_store.open()
        await journal.append(events(0, 1))
        await journal.close()
        await journal.close()
        with pytest.raises(StorageFailed, match="is closed"):
            await journal.append(events(1, 1))

    asyncio.run(run())


def test_a_standby_that_is_closed_while_it_waits_takes_nothing(postgres_store: PostgresStore) -> None:
    async def run() -> None:
        said = heard("is held by writer 1")
        async with closing(postgres_store.open()) as old:
            await old.append(events(0, 1))
            standby = postgres_store.open()
            taking = asyncio.create_task(standby.replay())
            await said
            await standby.close()
            postgres_store.end_lease()
            with pytest.raises(StorageFailed, match="is closed"):
                await taking
        await replay(postgres_store.open(wait_s=0.0))

    asyncio.run(run())


def test_a_standby_outlasts_a_restart_of_the_server() -> None:
    with postgres_server() as server:
        store = PostgresStore(server)

        async def run() -> None:
            said = heard("is held by writer 1")
            async with closing(store.open()) as old, closing(store.open()) as standby:
                await old.append(events(0, 2))
                taking = asyncio.create_task(standby.replay())
                await said
                missed = heard("cannot be reached")
                server.stop()
                await missed
                server.start()
                assert not taking.done()
                store.end_lease()
                assert await taking == tuple(events(0, 2))
                with pytest.raises(StorageFailed):
                    await old.append(events(2, 1))
                await standby.append(events(2, 1))

        asyncio.run(run())


def heard(text: str) -> "asyncio.Future[None]":
    """Done when the writer logs ``text``."""
    said = asyncio.get_running_loop().create_future()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage() and not said.done():
                said.set_result(None)

    logger = logging.getLogger("steelyard.coordinator.journal.postgres_writer")
    logger.setLevel(logging.INFO)
    ear = Ear()
    logger.addHandler(ear)
    said.add_done_callback(lambda _: logger.removeHandler(ear))
    return said


WRITERS = 3
ACTIONS = st.sampled_from(["open", "append", "append", "end lease", "close"])


@settings(max_examples=40, deadline=None)
@given(schedule=st.lists(st.tuples(ACTIONS, st.integers(0, WRITERS - 1)), min_size=4, max_size=14))
def test_whatever_the_order_only_the_last_holder_appends_and_the_journal_is_what_was_acknowledged(
    postgres: PostgresServer, schedule: list[tuple[str, int]]
) -> None:
    asyncio.run(carry_out(PostgresStore(postgres), schedule))


async def carry_out(store: PostgresStore, schedule: list[tuple[str, int]]) -> None:
    """Do what the schedule says, and hold each outcome to a model of one integer: whose lease it is."""
    numbers = itertools.count()
    journals: dict[int, PostgresJournal] = {}
    acknowledged: list[e.AnyEvent] = []
    holder, is_free = None, True  # the last who took it; whether another may
    async with contextlib.AsyncExitStack() as stack:
        for action, index in schedule:
            if action == "end lease":
                store.end_lease()
                is_free = True
            elif action == "open" and index not in journals:
                journal = store.open(lease_s=600.0, wait_s=0.0)
                stack.push_async_callback(journal.close)
                if is_free:
                    assert await journal.replay() == tuple(acknowledged)
                    journals[index], holder, is_free = journal, index, False
                else:
                    with pytest.raises(DeadlineExceeded):
                        await journal.replay()
            elif action == "append" and index in journals:
                new = [event(f"att_{next(numbers)}") for _ in range(2)]
                if index == holder:
                    await journals[index].append(new)
                    acknowledged += new
                    is_free = False  # an append renews
                else:
                    with pytest.raises(JournalFenced):
                        await journals[index].append(new)
                    await journals.pop(index).close()
            elif action == "close" and index in journals:
                await journals.pop(index).close()
                if index == holder:
                    holder, is_free = None, True
    store.end_lease()
    assert await replay(store.open()) == tuple(acknowledged)


NO_TIME = (
    "create function steelyard.no_time() returns trigger language plpgsql as "
    "'begin new.expires_at := timestamptz ''epoch''; return new; end'",
    "create trigger no_time before insert or update on steelyard.journals for each row execute "
    "function steelyard.no_time()",
)
"""Leases that are over as soon as they are taken: anybody can take the journal at any moment."""


@pytest.mark.parametrize("seed", range(4))
def test_writers_that_race_for_a_journal_append_each_event_once_or_are_fenced(
    postgres: PostgresServer, seed: int
) -> None:
    draw, postgres_store = random.Random(seed), PostgresStore(postgres, own_database=True)
    acknowledged: list[str] = []
    num_fenced = 0

    async def append(journal: Journal, name: str, numbers: list[int]) -> None:
        while numbers:
            number = numbers.pop(0)
            await journal.append([event(f"{name}-{number}-{part}") for part in range(3)])
            acknowledged.append(f"{name}-{number}")

    async def race(name: str, journal: Journal) -> None:
        nonlocal num_fenced
        numbers = list(range(30))
        while True:
            async with closing(journal):
                try:
                    await append(journal, name, numbers)
                    return
                except JournalFenced:
                    num_fenced += 1
            await asyncio.sleep(draw.random() * 0.02)  # or nobody would come to append
            journal = postgres_store.open(wait_s=0.0)

    async def run() -> None:
        journals = [postgres_store.open(wait_s=0.0) for _ in range(3)]
        for journal in journals:
            await journal.replay()
        await asyncio.gather(*(race(name, journal) for name, journal in zip("abc", journals, strict=True)))

    asyncio.run(replay(postgres_store.open()))
    postgres_store.edit(*NO_TIME)
    asyncio.run(run())
    found = [item.attempt_id for item in replayed(postgres_store.open()) if isinstance(item, e.Running)]
    names = [name.rpartition("-")[0] for name in found[::3]]
    assert num_fenced >= 2, "two of the three were fenced before the race began"
    assert len(set(found)) == len(found) == 3 * len(names)
    assert sorted(names) == sorted(acknowledged)
    assert len(names) == 3 * 30 - num_fenced
    for name in "abc":
        numbers = [int(one.partition("-")[2]) for one in names if one.startswith(name)]
        assert numbers == sorted(numbers)
