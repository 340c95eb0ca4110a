"""Placement, dead replicas, weights."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from steelyard.errors import EngineError, ProcessDied, RemoteFailed
from steelyard.inference.router import Router
from steelyard.testing.engine import FakeEngine
from steelyard.testing.manual_clock import ManualClock, settle
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, GenerateRequest

Work = Callable[[Router, list[FakeEngine]], Awaitable[None]]


def with_replicas(number: int, work: Work, versions: tuple[int, ...] = (0,)) -> None:
    """Run ``work`` with a router over fakes ``rep0``, ``rep1``, ... that all hold ``versions``."""

    async def main() -> None:
        clock = ManualClock()
        fakes = [FakeEngine(clock, replica_id=f"rep{index}") for index in range(number)]
        router = Router({fake.replica_id: fake for fake in fakes})
        for replica in router.replicas.values():
            for version in versions:
                await replica.load("somewhere", version)
        await work(router, fakes)

    asyncio.run(main())


def ask(name: str, key: str | None = None, **options: Any) -> GenerateRequest:
    return request_for(name, (1, 2, 3), key=key, **options)


def test_an_attempt_stays_with_its_replica_though_another_is_idle() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        first = await router.generate(ask("t1", "talk"))
        home = next(fake for fake in fakes if fake.replica_id == first.replica_id)
        home.is_holding = True
        busy = [asyncio.create_task(router.generate(ask(f"b{index}"))) for index in range(6)]
        await settle()
        second = asyncio.create_task(router.generate(ask("t2", "talk")))
        await settle()
        home.let_go()
        assert (await second).replica_id == first.replica_id
        await asyncio.gather(*busy)

    with_replicas(3, work)


def test_new_attempts_go_to_the_least_projected_load() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for fake in fakes:
            fake.is_holding = True
        large = asyncio.create_task(router.generate(ask("large", max_tokens=300)))
        await settle()
        small = [asyncio.create_task(router.generate(ask(f"s{index}", max_tokens=30))) for index in range(6)]
        await settle()
        assert [len(fake.requests) for fake in fakes] == [1, 6]
        for fake in fakes:
            fake.let_go()
        await asyncio.gather(large, *small)
        assert [replica.projected_tokens for replica in router.replicas.values()] == [0, 0]

    with_replicas(2, work)


def test_a_dead_replica_fails_its_own_requests_at_once_and_the_others_go_on() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for fake in fakes:
            fake.is_holding = True
        running = [asyncio.create_task(router.generate(ask(f"r{index}"))) for index in range(4)]
        await settle()
        lost = {request.request_id for request in fakes[0].requests}
        fakes[0].die(ProcessDied("rep0", -9))
        await settle()
        assert {task.result().request_id for task in running if task.done()} == lost
        fakes[1].let_go()
        results = await asyncio.gather(*running)
        for result in results:
            died = result.request_id in lost
            assert result.finish_reason is (FinishReason.ENGINE_ERROR if died else FinishReason.LENGTH)
            assert not died or ("rep0 ended with signal 9" in result.detail and result.token_ids == ())

    with_replicas(2, work)


def test_a_replica_that_fails_fast_draws_a_handful_of_requests_and_comes_back_by_probes() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        fakes[0].failure = RemoteFailed("500")
        for fake in fakes[1:]:
            fake.is_holding = True
        running = [asyncio.create_task(router.generate(ask(f"r{index}"))) for index in range(100)]
        await settle()
        assert router.weights()["rep0"] == 0.0
        for fake in fakes[1:]:
            fake.let_go()
        results = await asyncio.gather(*running)
        failed = [result for result in results if result.finish_reason is FinishReason.ENGINE_ERROR]
        assert len(failed) == 4, "a weight of 1 is halved four times before it is 0"
        await router.probe()
        assert router.weights()["rep0"] == 0.0, "a probe that fails leaves it at zero"
        fakes[0].failure = None
        weights = []
        for _ in range(4):
            await router.probe()
            weights.append(router.weights()["rep0"])
        assert weights == [0.125, 0.25, 0.5, 1.0]

    with_replicas(8, work)


def test_an_attempt_moves_when_its_replica_is_dead() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        first = await router.generate(ask("t1", "talk"))
        home = next(fake for fake in fakes if fake.replica_id == first.replica_id)
        home.failure = RemoteFailed("gone")
        for index in range(4):
            await router.generate(ask(f"d{index}", "talk"))
        moved = await router.generate(ask("t2", "talk"))
        assert moved.replica_id != first.replica_id
        assert moved.finish_reason is FinishReason.LENGTH

    with_replicas(2, work)


def test_only_replicas_that_hold_the_version_are_asked() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        await router.replicas["rep1"].load("somewhere", 5)
        results = [await router.generate(ask(f"r{index}", version=5)) for index in range(4)]
        assert {result.replica_id for result in results} == {"rep1"}
        await router.replicas["rep1"].unload(5)
        with pytest.raises(EngineError, match="request late: a live replica must hold version 5, but rep0 has"):
            await router.generate(ask("late", version=5))

    with_replicas(2, work)


def test_a_request_that_an_engine_refuses_does_not_lower_its_weight() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        del fakes[0].loaded_dirs[0]
        with pytest.raises(EngineError, match="version 0 must be loaded"):
            await router.generate(ask("a"))
        assert router.weights() == {"rep0": 1.0}

    with_replicas(1, work)


def test_a_probe_learns_what_a_restarted_replica_holds() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        fakes[0].failure = RemoteFailed("gone")
        for index in range(4):
            await router.generate(ask(f"r{index}"))
        fakes[0].failure = None
        fakes[0].loaded_dirs.clear()
        await router.probe()
        with pytest.raises(EngineError, match=r"versions \[\], last error: gone"):
            await router.generate(ask("a"))

    with_replicas(1, work)


def test_abort_and_release_reach_the_replica_that_serves() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for fake in fakes:
            fake.is_holding = True
        running = asyncio.create_task(router.generate(ask("a", "talk")))
        await settle()
        await router.abort("a")
        await router.abort("unknown")
        result = await running
        assert result.finish_reason is FinishReason.CANCELLED
        await router.release("talk")
        await router.release("talk")
        assert [fake.aborted for fake in fakes] == [["a"], []]
        assert [fake.released for fake in fakes] == [["talk"], []]

    with_replicas(2, work)


def test_the_probing_loop_asks_after_each_pause() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        clock = ManualClock()
        fakes[0].failure = RemoteFailed("gone")
        for index in range(4):
            await router.generate(ask(f"r{index}"))
        fakes[0].failure = None
        probing = asyncio.create_task(router.run(clock.sleep))
        await settle()
        assert router.weights()["rep0"] == 0.0
        clock.advance(1.0)
        await settle()
        assert router.weights()["rep0"] == 0.125
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)

    with_replicas(1, work)


def test_a_router_without_engines_is_refused() -> None:
    with pytest.raises(EngineError, match="at least one engine"):
        Router({})
