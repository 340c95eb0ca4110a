import asyncio
import contextvars
import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.testing.faultsim.loop import OWNER, Owner, Stuck, VirtualLoop, run


def owned(loop: VirtualLoop, name: str) -> tuple[Owner, contextvars.Context]:
    owner, context = Owner(name), contextvars.copy_context()
    context.run(OWNER.set, owner)
    loop.owners.append(owner)
    return owner, context


@given(delays_s=st.lists(st.floats(min_value=0.0, max_value=1e6), max_size=20))
def test_sleepers_wake_in_order_of_their_times_and_the_clock_shows_exactly_those(delays_s: list[float]) -> None:
    loop = VirtualLoop(2e6)
    woken: list[tuple[float, float]] = []

    async def sleeper(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        woken.append((delay_s, loop.time()))

    async def main() -> None:
        await asyncio.gather(*(sleeper(delay_s) for delay_s in delays_s))

    run(main(), loop)
    assert [delay_s for delay_s, _ in woken] == sorted(delays_s)
    assert all(at_s == delay_s for delay_s, at_s in woken)


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    async def wait_in_vain() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.gather(asyncio.create_task(wait_in_vain(), name="the culprit"))

    with pytest.raises(Stuck, match=r"nothing can happen any more at 0\.000 s; .*the culprit: .*wait_in_vain"):
        run(main(), VirtualLoop(10.0))


def test_a_run_that_takes_too_long_is_an_error() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(3.0)

    with pytest.raises(Stuck, match="not ended after 10 virtual seconds; waiting: world"):
        run(main(), VirtualLoop(10.0))


def test_callbacks_without_end_at_one_instant_are_an_error() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match=r"time stands still at 0\.000 s"):
        run(main(), VirtualLoop(10.0))


def test_a_stopped_process_goes_on_later_with_everything_in_order() -> None:
    loop = VirtualLoop(100.0)
    owner, context = owned(loop, "worker")
    seen: list[tuple[int, float]] = []

    async def count() -> None:
        for number in range(4):
            seen.append((number, loop.time()))
            await asyncio.sleep(1.0)

    async def main() -> None:
        counting = loop.create_task(count(), context=context)
        await asyncio.sleep(1.5)
        owner.is_stopped = True
        await asyncio.sleep(10.0)
        loop.go_on(owner)
        await counting

    run(main(), loop)
    assert seen == [(0, 0.0), (1, 1.0), (2, 11.5), (3, 12.5)]


def test_a_killed_process_runs_not_another_line_until_the_world_has_ended() -> None:
    loop = VirtualLoop(100.0)
    owner, context = owned(loop, "worker")
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(5.0)
            seen.append("worked")
        finally:
            seen.append("cleaned up")

    async def main() -> list[str]:
        loop.create_task(work(), context=context)
        await asyncio.sleep(1.0)
        owner.is_dead = True
        await asyncio.sleep(50.0)
        return list(seen)

    assert run(main(), loop) == []
    assert seen == ["cleaned up"], "every task is unwound, so that none is left to the garbage collector"


def test_what_is_meant_for_a_thread_runs_in_this_one_and_takes_no_time() -> None:
    loop = VirtualLoop(10.0)

    async def main() -> tuple[int, int, float]:
        found = await asyncio.to_thread(len, "abc")
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return found, await asyncio.to_thread(threading.get_ident), loop.time()

    started_s = loop.time()
    assert run(main(), loop) == (3, threading.get_ident(), started_s)
