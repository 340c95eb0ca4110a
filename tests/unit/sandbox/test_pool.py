import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.config import SandboxConfig
from steelyard.errors import DeadlineExceeded, InputError, SandboxLost
from steelyard.sandbox.pool import WarmPool
from steelyard.testing.sandbox import FakeStarter

FOREVER_S = 60.0


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(FOREVER_S):
            await body()

    asyncio.run(main())


def make(num_warm: int = 2, max_alive: int = 4, failures: tuple[Exception, ...] = ()) -> tuple[WarmPool, FakeStarter]:
    starter = FakeStarter(failures=failures)
    return WarmPool(starter, SandboxConfig(num_warm=num_warm, max_alive=max_alive)), starter


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_sandbox_is_given_out_once_and_carries_its_label() -> None:
    async def body() -> None:
        pool, _ = make()
        one, other = await pool.acquire("att_1", FOREVER_S), await pool.acquire("att_2", FOREVER_S)
        assert one is not other
        assert (one.label, other.label) == ("att_1", "att_2")
        await pool.close()

    run(body)


def test_sandboxes_are_started_ahead_up_to_the_bound() -> None:
    async def body() -> None:
        pool, starter = make(num_warm=3, max_alive=4)
        await pool.acquire("att_1", FOREVER_S)
        await settle()
        assert (len(starter.started), pool.num_alive) == (4, 4)
        await pool.acquire("att_2", FOREVER_S)
        await settle()
        assert len(starter.started) == 4
        await pool.close()

    run(body)


def test_a_slot_is_free_only_when_the_processes_are_gone() -> None:
    async def body() -> None:
        pool, starter = make(num_warm=0, max_alive=1)
        first = await pool.acquire("att_1", FOREVER_S)
        starter.started[0].may_end.clear()
        closing = asyncio.create_task(first.close())
        second = asyncio.create_task(pool.acquire("att_2", FOREVER_S))
        await settle()
        assert not second.done()
        assert len(starter.started) == 1
        closing.cancel()
        await settle()
        assert not second.done()
        starter.started[0].may_end.set()
        await starter.started[0].close()
        assert (await second).label == "att_2"
        await pool.close()

    run(body)


def test_waiting_too_long_names_those_who_hold_the_sandboxes() -> None:
    async def body() -> None:
        pool, _ = make(num_warm=0, max_alive=1)
        await pool.acquire("att_holder", FOREVER_S)
        with pytest.raises(DeadlineExceeded, match=r"1 of at most 1 exist.*att_holder"):
            await pool.acquire("att_2", 0.01)
        await pool.close()

    run(body)


def test_a_start_that_fails_fails_those_who_wait_with_its_own_reason() -> None:
    async def body() -> None:
        pool, _ = make(num_warm=0, failures=(InputError("allow user namespaces"), OSError("out of descriptors")))
        with pytest.raises(InputError, match="allow user namespaces"):
            await pool.acquire("att_1", FOREVER_S)
        with pytest.raises(SandboxLost, match="out of descriptors"):
            await pool.acquire("att_1", FOREVER_S)
        assert (await pool.acquire("att_1", FOREVER_S)).label == "att_1"
        await pool.close()

    run(body)


def test_a_warm_sandbox_that_died_is_not_given_out() -> None:
    async def body() -> None:
        pool, starter = make(num_warm=1)
        await settle()
        await starter.started[0].close()
        given = await pool.acquire("att_1", FOREVER_S)
        assert given is not starter.started[0]
        await pool.close()

    run(body)


def test_a_cancelled_wait_loses_no_sandbox() -> None:
    async def body() -> None:
        pool, _ = make(num_warm=0, max_alive=1)
        holder = await pool.acquire("att_1", FOREVER_S)
        waiting = [asyncio.create_task(pool.acquire(f"att_{index}", FOREVER_S)) for index in (2, 3)]
        await settle()
        waiting[0].cancel()
        await holder.close()
        given = await waiting[1]
        assert given.label == "att_3"
        await given.close()
        assert (await pool.acquire("att_4", FOREVER_S)).label == "att_4"
        await pool.close()

    run(body)


def test_closing_destroys_all_and_fails_those_who_wait() -> None:
    async def body() -> None:
        pool, starter = make(num_warm=0, max_alive=1)
        await pool.acquire("att_1", FOREVER_S)
        waiting = asyncio.create_task(pool.acquire("att_2", FOREVER_S))
        await settle()
        await pool.close()
        with pytest.raises(SandboxLost, match="closed"):
            await waiting
        with pytest.raises(SandboxLost, match="closed"):
            await pool.acquire("att_3", FOREVER_S)
        assert starter.is_closed
        assert all(sandbox.is_closed for sandbox in starter.started)

    run(body)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["acquire", "close", "cancel", "settle"]), max_size=30),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_whatever_the_order_the_bound_holds_and_nobody_waits_beside_a_free_slot(
    actions: list[str], num_warm: int, max_alive: int
) -> None:
    async def body() -> None:
        pool, starter = make(num_warm, max_alive)
        asked: list[asyncio.Task[object]] = []
        for action in actions:
            open_ones = [sandbox for sandbox in starter.started if sandbox.label and not sandbox.is_closed]
            if action == "acquire":
                asked.append(asyncio.create_task(pool.acquire(f"att_{len(asked)}", FOREVER_S)))
            elif action == "cancel" and asked:
                asked[-1].cancel()
            elif action == "close" and open_ones:
                await open_ones[0].close()
            await (settle() if action == "settle" else asyncio.sleep(0))
            alive = [sandbox for sandbox in starter.started if not sandbox.gone.done()]
            assert len(alive) <= max_alive
        await settle()
        in_use = [sandbox for sandbox in starter.started if sandbox.label and not sandbox.is_closed]
        if any(not task.done() for task in asked):
            assert len(in_use) == max_alive
        await pool.close()
        await asyncio.gather(*asked, return_exceptions=True)

    run(body)
