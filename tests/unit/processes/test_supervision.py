"""Tests of supervision."""

import asyncio

import pytest

from steelyard.errors import DeadlineExceeded
from steelyard.processes.supervision import end_all, supervise, task_group


def test_the_first_failure_of_a_supervised_loop_ends_the_others_and_is_raised() -> None:
    ended: list[str] = []

    async def patient() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("patient")

    async def failing() -> None:
        raise ValueError("producer is gone")

    with pytest.raises(ValueError, match="producer is gone"):
        asyncio.run(supervise(patient(), failing()))
    assert ended == ["patient"]


def test_a_loop_that_loses_its_cancellation_is_cancelled_again() -> None:
    lost: list[str] = []

    async def forgetful() -> None:
        while len(lost) < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost.append("a cancellation")
        await asyncio.Event().wait()

    async def done() -> None:
        await asyncio.sleep(0)

    asyncio.run(supervise(forgetful(), done(), again_s=0.01))
    assert len(lost) == 2


def test_a_loop_that_does_not_end_is_named_after_a_deadline() -> None:
    release = False

    async def deaf() -> None:
        while not release:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def done() -> None:
        await asyncio.sleep(0)

    async def run() -> None:
        nonlocal release
        with pytest.raises(DeadlineExceeded, match=r"still missing: .*deaf"):
            await supervise(deaf(), done(), deadline_s=0.05, again_s=0.01)
        release = True

    asyncio.run(run())


def test_a_failure_is_raised_although_another_loop_does_not_end() -> None:
    release = False

    async def deaf() -> None:
        while not release:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def failing() -> None:
        raise ValueError("producer is gone")

    async def run() -> None:
        nonlocal release
        with pytest.raises(ValueError, match="producer is gone"):
            await supervise(deaf(), failing(), deadline_s=0.05, again_s=0.01)
        release = True

    asyncio.run(run())


def test_ending_nothing_waits_for_nobody() -> None:
    assert asyncio.run(end_all([])) == ()


def test_a_task_group_raises_the_failure_itself() -> None:
    async def failing() -> None:
        raise ValueError("one of them")

    async def run() -> None:
        async with task_group() as group:
            group.create_task(failing())
            group.create_task(asyncio.Event().wait())

    with pytest.raises(ValueError, match="one of them"):
        asyncio.run(run())
