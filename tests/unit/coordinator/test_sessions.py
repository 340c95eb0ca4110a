"""The memory of calls, against a plain model: each number begins one call, whatever comes again and in which order."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.coordinator import protocol as p
from steelyard.coordinator.sessions import MAX_SESSIONS_PER_WORKER, Session, Sessions
from steelyard.errors import InputError, Refused

STEPS = st.lists(st.tuples(st.sampled_from(["enter", "forget"]), st.integers(0, 6), st.booleans()), max_size=40)


def start(sequence: int, attempt_id: str = "att_one") -> p.NumberedCall:
    return p.NumberedCall(sequence=sequence, call=p.StartCall(attempt_id=attempt_id, attempt_number=1))


def poll(sequence: int) -> p.NumberedCall:
    return p.NumberedCall(sequence=sequence, call=p.LeaseCall(max_leases=1, wait_s=1.0))


async def done() -> p.Result:
    return p.Done()


async def never() -> p.Result:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("the wait must be cancelled")


def begin(_: p.Call) -> "asyncio.Task[p.Result]":
    return asyncio.create_task(done())


def begin_poll(_: p.Call) -> "asyncio.Task[p.Result]":
    return asyncio.create_task(never())


@given(steps=STEPS)
def test_a_number_begins_one_call_until_it_is_forgotten_and_none_after(steps: list[tuple[str, int, bool]]) -> None:
    async def scene() -> None:
        session, begun, floor = Session(), dict[int, str](), 0
        for action, number, is_first in steps:
            if action == "forget":
                session.forget_below(number)
                floor = max(floor, number)
                continue
            attempt_id = "att_one" if is_first else "att_two"
            try:
                _, is_repeated = session.enter(start(number, attempt_id), begin)
            except Refused as refused:
                assert refused.reason == ("late" if number < floor else "double")
                assert number < floor or begun[number] != attempt_id
                continue
            assert number >= floor
            assert is_repeated == (number in begun)
            begun[number] = attempt_id
        assert session.num_open == sum(number >= floor for number in begun)

    asyncio.run(scene())


def test_a_number_too_far_ahead_is_refused_so_that_memory_stays_bounded() -> None:
    async def scene() -> None:
        session = Session()
        with pytest.raises(InputError, match=f"answered_below \\+ {p.MAX_OPEN_CALLS}"):
            session.enter(start(p.MAX_OPEN_CALLS), begin)
        session.forget_below(1)
        session.enter(start(p.MAX_OPEN_CALLS), begin)

    asyncio.run(scene())


def test_a_poll_that_is_forgotten_is_withdrawn_and_any_other_call_is_carried_through() -> None:
    async def scene() -> None:
        session = Session()
        waiting, _ = session.enter(poll(0), begin_poll)
        working, _ = session.enter(start(1), begin)
        session.forget_below(2)
        assert isinstance(waiting.outcome, asyncio.Task) and isinstance(working.outcome, asyncio.Task)
        await asyncio.wait([waiting.outcome, working.outcome])
        assert waiting.outcome.cancelled()
        assert working.outcome.result() == p.Done()

    asyncio.run(scene())


def test_of_each_worker_the_sessions_used_last_are_remembered() -> None:
    async def scene() -> None:
        sessions = Sessions()
        first = sessions.session("worker.a", "ses_0")
        first.enter(start(0), begin)
        for number in range(1, MAX_SESSIONS_PER_WORKER):
            sessions.session("worker.a", f"ses_{number}")
        assert sessions.session("worker.a", "ses_0") is first
        assert sessions.session("worker.b", "ses_0") is not first
        for number in range(MAX_SESSIONS_PER_WORKER):
            sessions.session("worker.a", f"ses_later_{number}")
        assert sessions.session("worker.a", "ses_0") is not first

    asyncio.run(scene())
