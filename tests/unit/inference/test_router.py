"""Placement, dead replicas, weights."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from steelyard.errors import DeadlineExceeded, EngineError, ProcessDied, RemoteFailed
from steelyard.inference.replica_set import RouterSettings
from steelyard.inference.router import Router
from steelyard.testing.engine import FakeEngine
from steelyard.testing.manual_clock import ManualClock, settle
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, GenerateRequest, TokenChunk

Work = Callable[[Router, list[FakeEngine]], Awaitable[None]]


def with_replicas(
    number: int,
    work: Work,
    versions: tuple[int, ...] = (0,),
    *,
    settings: RouterSettings | None = None,
    kv_tokens: int = 0,
) -> None:
    """Run ``work`` with a router over fakes ``rep0``, ``rep1``, ... that all hold ``versions``."""

    async def main() -> None:
        clock = ManualClock()
        fakes = [FakeEngine(clock, replica_id=f"rep{index}", kv_tokens=kv_tokens) for index in range(number)]
        router = Router({fake.replica_id: fake for fake in fakes}, clock, settings)
        for replica in router.replicas.values():
            for version in versions:
                await replica.load("somewhere", version)
        await work(router, fakes)

    asyncio.run(main())


def ask(name: str, key: str | None = None, *, num_prompt: int = 3, **options: Any) -> GenerateRequest:
    return request_for(name, range(num_prompt), key=key, **options)


def test_an_attempt_stays_with_its_replica_though_another_is_idle() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        first = await router.generate(ask("t1", "talk", num_prompt=2000))
        home = next(fake for fake in fakes if fake.replica_id == first.replica_id)
        home.is_holding = True
        busy = [asyncio.create_task(router.generate(ask(f"b{index}"))) for index in range(6)]
        await settle()
        second = asyncio.create_task(router.generate(ask("t2", "talk", num_prompt=2000)))
        await settle()
        home.let_go()
        assert (await second).replica_id == first.replica_id
        await asyncio.gather(*busy)

    with_replicas(3, work)


def test_an_attempt_moves_where_its_home_is_full_and_its_prefix_is_soon_computed() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        first = await router.generate(ask("t1", "talk", num_prompt=50))
        home = next(fake for fake in fakes if fake.replica_id == first.replica_id)
        for fake in fakes:
            fake.is_holding = True
        blockers = [asyncio.create_task(router.generate(ask(f"b{n}", num_prompt=50, max_tokens=900))) for n in "12"]
        await settle()
        assert [len(fake.requests) for fake in fakes] == [2, 1], "both are full"
        next(fake for fake in fakes if fake is not home).let_go()
        await settle()
        moved = await router.generate(ask("t2", "talk", num_prompt=60))
        assert moved.replica_id != first.replica_id
        home.let_go()
        await asyncio.gather(*blockers)

    with_replicas(2, work, kv_tokens=1000)


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
        assert [replica.state.projected_tokens for replica in router.replicas.values()] == [0, 0]

    with_replicas(2, work)


def test_what_a_dead_replica_had_open_is_tried_elsewhere_and_the_others_go_on() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for fake in fakes:
            fake.is_holding = True
        running = [asyncio.create_task(router.generate(ask(f"r{index}"))) for index in range(4)]
        await settle()
        lost = {request.request_id for request in fakes[0].requests}
        fakes[0].die(ProcessDied("rep0", -9))
        await settle()
        assert {request.request_id for request in fakes[1].requests} == {"r0", "r1", "r2", "r3"}
        assert len(lost) == 2 and not any(task.done() for task in running)
        fakes[1].let_go()
        results = await asyncio.gather(*running)
        assert {(one.finish_reason, one.replica_id) for one in results} == {(FinishReason.LENGTH, "rep1")}

    with_replicas(2, work)


def test_a_request_that_has_shown_tokens_is_not_tried_again() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        fakes[0].is_streaming_first = fakes[0].is_holding = True
        shown: list[TokenChunk] = []
        running = asyncio.create_task(router.generate(ask("a", stream=True), shown.append))
        await settle()
        assert shown
        fakes[0].die(ProcessDied("rep0", -9))
        result = await running
        assert result.finish_reason is FinishReason.ENGINE_ERROR and result.token_ids == ()
        assert "rep0 ended with signal 9" in result.detail
        assert fakes[1].requests == []

    with_replicas(2, work)


def test_where_all_replicas_fail_a_request_it_fails_with_the_last_error_after_so_many_tries() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for fake in fakes:
            fake.failure = RemoteFailed(f"500 from {fake.replica_id}")
        result = await router.generate(ask("a"))
        assert (result.finish_reason, result.detail) == (FinishReason.ENGINE_ERROR, "500 from rep1")
        assert router.weights() == {"rep0": 0.5, "rep1": 0.5, "rep2": 1.0}

    with_replicas(3, work)


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
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}, "each is tried once more"
        assert fakes[0].num_failed == 4, "a weight of 1 is halved four times before it is 0"
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


def test_a_request_waits_for_room_and_is_served_when_there_is_some() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        fakes[0].is_holding = True
        running = [asyncio.create_task(router.generate(ask(f"r{index}", max_tokens=37))) for index in range(5)]
        await settle()
        assert len(fakes[0].requests) == 2, "2 x (3 + 37) tokens fit into 100"
        figures = router.take_figures()
        assert (figures.num_waiting, figures.num_open, figures.projected_kv_frac) == (3, 2, {"rep0": 0.8})
        assert router.wait_estimate_s() > 0
        await router.abort("r0")
        await settle()
        assert [request.request_id for request in fakes[0].requests] == ["r0", "r1", "r2"]
        fakes[0].let_go()
        results = await asyncio.gather(*running)
        assert [one.finish_reason for one in results] == [FinishReason.CANCELLED] + 4 * [FinishReason.LENGTH]
        assert router.wait_estimate_s() == 0.0

    with_replicas(1, work, kv_tokens=100)


def test_a_request_larger_than_all_kv_goes_to_an_idle_replica_which_says_why_not() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        result = await router.generate(ask("large", max_tokens=500))
        assert result.finish_reason is FinishReason.LENGTH

    with_replicas(1, work, kv_tokens=100)


@pytest.mark.parametrize("queue_deadline_s", [None, 0.0])
def test_a_request_without_room_ends_as_queue_timeout_at_its_deadline(queue_deadline_s: float | None) -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        fakes[0].is_holding = True
        first = asyncio.create_task(router.generate(ask("first", max_tokens=90)))
        await settle()
        deadline_at_s = 1e12 if queue_deadline_s is not None else 0.0
        result = await router.generate(ask("second", max_tokens=90, deadline_at_s=deadline_at_s))
        assert (result.finish_reason, result.token_ids) == (FinishReason.QUEUE_TIMEOUT, ())
        assert [request.request_id for request in fakes[0].requests] == ["first"]
        fakes[0].let_go()
        assert (await first).finish_reason is FinishReason.LENGTH
        assert (router.take_figures().num_waiting, router.take_figures().num_open) == (0, 0)

    settings = RouterSettings(queue_deadline_s=queue_deadline_s)
    with_replicas(1, work, kv_tokens=100, settings=settings)


def test_abort_and_cancellation_end_a_waiting_request_and_give_its_room_back() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        fakes[0].is_holding = True
        running = {name: asyncio.create_task(router.generate(ask(name, max_tokens=90))) for name in "abcd"}
        await settle()
        await router.abort("b")
        assert (await running["b"]).finish_reason is FinishReason.CANCELLED
        running["c"].cancel()
        await asyncio.gather(running["c"], return_exceptions=True)
        running["a"].cancel()
        await settle()
        assert [request.request_id for request in fakes[0].requests] == ["a", "d"]
        running["d"].cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        figures = router.take_figures()
        assert (figures.num_waiting, figures.num_open) == (0, 0)

    with_replicas(1, work, kv_tokens=100)


def test_a_replica_that_accepts_and_never_answers_counts_as_failed() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        fakes[0].is_holding = True
        result = await router.generate(ask("a", deadline_at_s=1_000_000.01))
        assert result.finish_reason is FinishReason.ENGINE_ERROR and "no answer within 0.0 s" in result.detail
        assert router.weights() == {"rep0": 0.5}

    with_replicas(1, work, settings=RouterSettings(answer_grace_s=0.0))


def test_a_request_waits_a_while_for_a_dead_replica_that_holds_its_version() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for _ in range(4):
            router.replicas["rep0"].state.failed("gone")
        running = asyncio.create_task(router.generate(ask("a")))
        await settle()
        assert not running.done()
        await router.probe()
        assert (await running).replica_id == "rep0"

    with_replicas(1, work)


def test_a_request_whose_version_only_dead_replicas_hold_fails_after_the_wait_for_their_recovery() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for _ in range(4):
            router.replicas["rep0"].state.failed("gone")
        with pytest.raises(EngineError, match=r"a live replica must hold version 0, but rep0 has weight 0\.0"):
            await router.generate(ask("a"))

    with_replicas(1, work, settings=RouterSettings(recovery_wait_s=0.0))


def test_a_request_waits_for_a_replica_that_was_started_anew_to_load_its_version_again() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        router.replace("rep0", FakeEngine(ManualClock(), replica_id="rep0"))
        waiting = asyncio.create_task(router.generate(ask("a")))
        await settle()
        assert not waiting.done()
        router.replace("rep0", FakeEngine(ManualClock(), replica_id="rep0"))
        await settle()
        assert not waiting.done(), "it may be started anew twice"
        with pytest.raises(EngineError, match="a live replica must hold version 7"):
            await router.generate(ask("b", version=7))
        await router.replicas["rep0"].load("somewhere", 0)
        assert (await waiting).replica_id == "rep0"

    with_replicas(1, work)


def test_a_request_does_not_wait_longer_for_a_replica_that_was_started_anew_than_for_a_dead_one() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        router.replace("rep0", FakeEngine(ManualClock(), replica_id="rep0"))
        with pytest.raises(EngineError, match=r"a live replica must hold version 0, but rep0 has weight 1\.0"):
            await router.generate(ask("a"))

    with_replicas(1, work, settings=RouterSettings(recovery_wait_s=0.0))


def test_flows_share_the_replicas_though_one_asks_for_far_more() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        fakes[0].is_holding = True
        many, few = router.flow("many"), router.flow("few")
        blocker = asyncio.create_task(router.generate(ask("blocker", max_tokens=90)))
        await settle()
        running = [asyncio.create_task(many.generate(ask(f"many{index}", max_tokens=90))) for index in range(20)]
        await settle()
        running += [asyncio.create_task(few.generate(ask(f"few{index}", max_tokens=90))) for index in range(3)]
        await settle()
        fakes[0].let_go()
        await asyncio.gather(blocker, *running)
        first_six = [request.request_id for request in fakes[0].requests[1:8]]
        assert sum(name.startswith("few") for name in first_six) == 3

    with_replicas(1, work, kv_tokens=100)


def test_a_drained_replica_gets_no_new_attempts_and_those_at_home_there_go_on_elsewhere() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        first = await router.generate(ask("t1", "talk"))
        home = next(fake for fake in fakes if fake.replica_id == first.replica_id)
        home.is_holding = True
        running = asyncio.create_task(router.generate(ask("t2", "talk")))
        await settle()
        router.drain(home.replica_id)
        draining = asyncio.create_task(router.wait_drained(home.replica_id, 60.0))
        await settle()
        assert not draining.done() and router.take_figures().draining == (home.replica_id,)
        home.let_go()
        await asyncio.gather(running, draining)
        moved = await router.generate(ask("t3", "talk"))
        others = [await router.generate(ask(f"o{index}")) for index in range(4)]
        assert home.replica_id not in {moved.replica_id, *(one.replica_id for one in others)}
        router.undrain(home.replica_id)
        home.is_holding = True
        assert not router.replicas[home.replica_id].is_draining

    with_replicas(2, work)


def test_a_drain_waits_for_attempts_that_nobody_else_can_serve_and_names_them() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        await router.replicas["rep0"].load("somewhere", 7)
        await router.generate(ask("t1", "talk", version=7))
        assert router.home_of("talk") == "rep0" and router.home_of("unknown") is None
        router.drain("rep0")
        with pytest.raises(DeadlineExceeded, match="still missing: talk"):
            await router.wait_drained("rep0", 0.0)
        assert (await router.generate(ask("t2", "talk", version=7))).replica_id == "rep0"
        draining = asyncio.create_task(router.wait_drained("rep0", 60.0))
        await settle()
        assert not draining.done()
        await router.release("talk")
        await draining

    with_replicas(2, work)


def test_replicas_come_and_go_while_requests_run() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        newcomer = FakeEngine(ManualClock(), replica_id="rep9", loaded_dirs={0: "somewhere"})
        await router.add("rep9", newcomer)
        with pytest.raises(EngineError, match="replica rep9 must not be known"):
            await router.add("rep9", newcomer)
        fakes[0].is_holding = True
        running = asyncio.create_task(router.generate(ask("a")))
        await settle()
        router.remove("rep0")
        assert list(router.replicas) == ["rep9"]
        assert (await router.generate(ask("b"))).replica_id == "rep9"
        fakes[0].let_go()
        assert (await running).finish_reason is FinishReason.LENGTH
        with pytest.raises(EngineError, match=r"replica rep0 must be one of \['rep9'\]"):
            router.remove("rep0")
        router.replace("rep9", FakeEngine(ManualClock(), replica_id="rep9"))
        assert router.replicas["rep9"].versions == frozenset()

    with_replicas(1, work)


def test_a_replica_that_does_not_answer_is_not_taken_on() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        with pytest.raises(RemoteFailed, match="not there"):
            await router.add("rep9", FakeEngine(ManualClock(), failure=RemoteFailed("not there")))
        assert list(router.replicas) == ["rep0"]

    with_replicas(1, work)


def test_a_second_replica_is_asked_when_the_first_lets_a_request_wait_too_long() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for index in range(20):
            await router.generate(ask(f"quick{index}"))
        fakes[0].is_holding = True
        result = await router.generate(ask("slow"))
        assert result.replica_id == "rep1"
        assert fakes[0].aborted == ["slow"], "the loser is ended"
        assert sum(request.request_id == "slow" for fake in fakes for request in fake.requests) == 2
        assert router.take_figures().num_open == 0

    with_replicas(2, work, settings=RouterSettings(hedge_quantile=0.95))


def test_no_second_replica_is_asked_once_a_token_was_shown_nor_by_default() -> None:
    async def work(router: Router, fakes: list[FakeEngine]) -> None:
        for index in range(20):
            await router.generate(ask(f"quick{index}"))
        for fake in fakes:
            fake.is_holding = fake.is_streaming_first = True
        shown: list[TokenChunk] = []
        running = asyncio.create_task(router.generate(ask("slow", stream=True), shown.append))
        await settle()
        assert len([request for fake in fakes for request in fake.requests if request.request_id == "slow"]) == 1
        for fake in fakes:
            fake.let_go()
        assert (await running).token_ids == tuple(token for chunk in shown for token in chunk.token_ids)

    with_replicas(2, work, settings=RouterSettings(hedge_quantile=0.95))
    with_replicas(2, work)


def test_a_router_without_engines_is_refused() -> None:
    with pytest.raises(EngineError, match="at least one engine"):
        Router({}, ManualClock())
