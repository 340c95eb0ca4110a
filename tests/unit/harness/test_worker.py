"""The rollout worker: leases in, honest reports out, slots freed only when sandboxes are gone."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from steelyard.environments.base import Services as EnvironmentServices
from steelyard.environments.repair.environment import make_repair
from steelyard.environments.repair.grading import decode_artifact
from steelyard.errors import DeadlineExceeded, EngineError, RemoteFailed, SandboxLost, StorageFailed
from steelyard.harness.base import Services, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.metrics import Counters
from steelyard.testing.harness import (
    FakeClock,
    FakeLeases,
    MemoryArtifacts,
    MemorySandboxes,
    MemoryTraces,
    Policy,
    ScriptedChat,
    StepSleep,
    calls,
    make_lease,
)
from steelyard.testing.repair import Oracle, run_in_process
from steelyard.types import ChatRequest, EndReason, Lease, Message, Outcome


def task_of(attempt_id: str) -> str:
    return f"repair/train/{attempt_id.removeprefix('att_')}"


ORACLE = Oracle(task_of)


class Bench:
    """A worker among fakes."""

    def __init__(
        self,
        num_leases: int = 1,
        policy: Policy = ORACLE,
        *,
        leases: FakeLeases | None = None,
        sandboxes: MemorySandboxes | None = None,
        traces: MemoryTraces | None = None,
        gate: Callable[[str], Coroutine[Any, Any, None]] | None = None,
        settings: WorkerSettings | None = None,
    ) -> None:
        self.leases = leases or FakeLeases([make_lease(i, f"repair/train/{i}") for i in range(num_leases)])
        self.sandboxes = sandboxes or MemorySandboxes()
        self.traces = traces or MemoryTraces()
        self.artifacts = MemoryArtifacts()
        self.chat = ScriptedChat(policy, gate)
        self.clock = FakeClock()
        self.counters = Counters()
        self.sleep = StepSleep()
        services = Services(
            leases=self.leases,
            chat=self.chat,
            sandboxes=self.sandboxes,
            traces=self.traces,
            artifacts=self.artifacts,
            tasks=make_repair({}, EnvironmentServices(run_function=run_in_process)),
        )
        limits = settings or WorkerSettings(max_concurrent=4)
        self.worker = HarnessWorker("wrk_0", limits, services, self.clock, self.counters, sleep=self.sleep)

    async def run(self) -> None:
        async with asyncio.timeout(20):
            await self.worker.run(self.leases.stop)

    @property
    def outcomes(self) -> list[Outcome]:
        return [failure.outcome for failure in self.leases.failures]


def failing(error: Exception) -> Policy:
    def policy(attempt_id: str, request: ChatRequest) -> Message:
        raise error

    return policy


async def until(is_true: Callable[[], bool]) -> None:
    """Let other tasks run until something holds; a hang ends in the test's own deadline."""
    async with asyncio.timeout(20):
        while not is_true():  # noqa: ASYNC110 (whatever becomes true here has no event of its own)
            await asyncio.sleep(0)


def test_every_lease_ends_in_a_report_with_trace_and_artifact_stored_before() -> None:
    bench = Bench(num_leases=9)
    asyncio.run(bench.run())
    assert sorted(report.attempt_id for report in bench.leases.reports) == sorted(f"att_{i}" for i in range(9))
    for report in bench.leases.reports:
        assert report.trace.end_reason is EndReason.SUBMITTED
        assert decode_artifact(bench.artifacts.blobs[report.artifact_digest]).submitted
        assert report.attempt_id in bench.traces.sealed
    assert bench.leases.failures == []
    assert bench.sandboxes.num_open == bench.worker.num_live == 0


def test_tool_records_are_sealed_with_the_trace() -> None:
    bench = Bench()
    asyncio.run(bench.run())
    end_reason, tools = bench.traces.sealed["att_0"]
    assert end_reason is EndReason.SUBMITTED
    assert [tool.name for tool in tools] == ["run_tests", "replace_line", "submit"]


def test_never_more_attempts_than_slots() -> None:
    most = 0
    bench: Bench

    async def gate(attempt_id: str) -> None:
        nonlocal most
        most = max(most, bench.worker.num_live)
        await asyncio.sleep(0)

    bench = Bench(num_leases=12, gate=gate, settings=WorkerSettings(max_concurrent=3))
    asyncio.run(bench.run())
    assert most == 3
    assert bench.leases.most_asked == 3
    assert len(bench.leases.reports) == 12


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (EngineError("no token ids"), Outcome.INFRA_FAILED),
        (RemoteFailed("the gateway broke"), Outcome.INFRA_FAILED),
        (KeyError("a bug of ours"), Outcome.INFRA_FAILED),
        (DeadlineExceeded("a token", ("replica",), 60.0), Outcome.TIMED_OUT),
    ],
)
def test_a_fault_of_ours_is_reported_with_the_lost_tokens_and_never_scored(error: Exception, outcome: Outcome) -> None:
    bench = Bench(policy=failing(error))
    asyncio.run(bench.run())
    assert bench.outcomes == [outcome]
    assert bench.leases.failures[0].lost_tokens == 7
    assert bench.leases.reports == []
    assert bench.traces.discarded == ["att_0"]
    assert bench.sandboxes.num_open == 0


def test_one_attempt_that_fails_leaves_the_others_alone() -> None:
    def policy(attempt_id: str, request: ChatRequest) -> Message:
        if attempt_id == "att_1":
            raise EngineError("one bad request")
        return ORACLE(attempt_id, request)

    bench = Bench(num_leases=4, policy=policy)
    asyncio.run(bench.run())
    assert len(bench.leases.reports) == 3
    assert bench.outcomes == [Outcome.INFRA_FAILED]


@pytest.mark.parametrize(
    ("sandboxes", "traces"),
    [
        (MemorySandboxes(errors=[SandboxLost("no user namespaces")]), MemoryTraces()),
        (MemorySandboxes(), MemoryTraces(error=StorageFailed("disk full"))),
    ],
)
def test_a_sandbox_or_store_that_fails_is_a_fault_of_ours(sandboxes: MemorySandboxes, traces: MemoryTraces) -> None:
    bench = Bench(sandboxes=sandboxes, traces=traces)
    asyncio.run(bench.run())
    assert bench.outcomes == [Outcome.INFRA_FAILED]
    assert bench.sandboxes.num_open == 0


def test_an_attempt_that_takes_too_long_by_our_clock_is_timed_out_not_scored() -> None:
    async def never(attempt_id: str) -> None:
        await asyncio.Event().wait()

    bench = Bench(gate=never, settings=WorkerSettings(attempt_deadline_s=0.01))
    asyncio.run(bench.run())
    assert bench.outcomes == [Outcome.TIMED_OUT]
    assert bench.sandboxes.num_open == 0


def test_a_refused_start_runs_nothing() -> None:
    bench = Bench()
    bench.leases.refused.add("att_0")
    asyncio.run(bench.run())
    assert bench.sandboxes.given == []
    assert bench.counters.read()["harness.refused.late"] == 1
    assert not bench.leases.failures
    assert not bench.leases.reports


def test_a_late_report_is_refused_and_counted_and_its_turns_are_thrown_away() -> None:
    bench = Bench()

    def policy(attempt_id: str, request: ChatRequest) -> Message:
        bench.leases.refused.add(attempt_id)
        return ORACLE(attempt_id, request)

    bench.chat = ScriptedChat(policy)
    bench = Bench(policy=policy, leases=bench.leases)
    asyncio.run(bench.run())
    assert bench.counters.read()["harness.refused.late"] == 1
    assert bench.traces.discarded == ["att_0"]


class Held:
    """A gate that holds every model call until told, and says how many are held."""

    def __init__(self) -> None:
        self.num_held = 0
        self.open = asyncio.Event()

    async def __call__(self, attempt_id: str) -> None:
        self.num_held += 1
        await self.open.wait()
        self.num_held -= 1


def test_a_lost_lease_cancels_the_attempt_which_reports_nothing() -> None:
    async def play() -> Bench:
        held = Held()
        bench = Bench(num_leases=2, gate=held)
        running = asyncio.create_task(bench.run())
        await until(lambda: held.num_held == 2)
        bench.leases.lost.add("att_0")
        bench.sleep.tick()
        await until(lambda: bench.worker.num_live == 1)
        bench.leases.close_one()
        held.open.set()
        await running
        return bench

    bench = asyncio.run(play())
    assert [report.attempt_id for report in bench.leases.reports] == ["att_1"]
    assert bench.leases.failures == []
    assert bench.traces.discarded == ["att_0"]
    assert bench.sandboxes.num_open == 0
    assert bench.counters.read()["harness.lease_lost"] == 1


def test_a_heartbeat_names_all_live_attempts() -> None:
    async def play() -> Bench:
        held = Held()
        bench = Bench(num_leases=3, gate=held)
        running = asyncio.create_task(bench.run())
        await until(lambda: held.num_held == 3)
        bench.sleep.tick()
        await until(lambda: len(bench.leases.heartbeats) == 1)
        held.open.set()
        await running
        return bench

    bench = asyncio.run(play())
    assert bench.leases.heartbeats == [{"att_0": 1, "att_1": 1, "att_2": 1}]
    assert bench.sleep.asked_s[0] == WorkerSettings().heartbeat_every_s


class DeafLeases(FakeLeases):
    """Its heartbeats fail while ``is_deaf``."""

    is_deaf = True

    async def heartbeat(self, worker_id: str, attempts: Any) -> Sequence[str]:
        if self.is_deaf:
            raise RemoteFailed("the coordinator is gone")
        return await super().heartbeat(worker_id, attempts)


def test_a_lease_that_runs_out_unrenewed_is_lost_though_nobody_said_so() -> None:
    async def play() -> tuple[Bench, list[int]]:
        held, live = Held(), []
        leases = DeafLeases([make_lease(0, "repair/train/0", lease_s=60.0)])
        bench = Bench(leases=leases, gate=held)
        running = asyncio.create_task(bench.run())
        await until(lambda: held.num_held == 1)
        leases.is_deaf = False
        bench.clock.advance(50.0)
        await bench.worker.beat_once()
        leases.is_deaf = True
        for step_s in (55.0, 10.0):
            bench.clock.advance(step_s)
            await bench.worker.beat_once()
            await asyncio.sleep(0)
            live.append(bench.worker.num_live - bench.counters.read().get("harness.lease_lost", 0))
        await until(lambda: bench.worker.num_live == 0)
        leases.stop.set()
        await running
        return bench, live

    bench, live = asyncio.run(play())
    assert live == [1, 0]
    assert not bench.leases.failures
    assert not bench.leases.reports


def test_a_worker_whose_clock_is_ahead_keeps_its_leases_when_one_heartbeat_fails() -> None:
    async def play() -> Bench:
        held = Held()
        bench = Bench(leases=DeafLeases([make_lease(0, "repair/train/0", lease_s=60.0)]), gate=held)
        bench.clock.advance(3600.0)  # the lease was issued by a clock that is an hour behind
        running = asyncio.create_task(bench.run())
        await until(lambda: held.num_held == 1)
        await bench.worker.beat_once()
        held.open.set()
        await running
        return bench

    bench = asyncio.run(play())
    assert bench.counters.read() == {"harness.heartbeat_failed": 1}
    assert [report.attempt_id for report in bench.leases.reports] == ["att_0"]


def test_a_slot_is_free_only_when_the_sandbox_is_gone() -> None:
    async def play() -> None:
        may_close = asyncio.Event()
        bench = Bench(num_leases=2, sandboxes=MemorySandboxes(may_close), settings=WorkerSettings(max_concurrent=1))
        running = asyncio.create_task(bench.run())
        await until(lambda: len(bench.chat.requests) == 3)
        for _ in range(50):
            await asyncio.sleep(0)
        assert bench.worker.num_live == 1
        assert len(bench.sandboxes.given) == 1
        assert bench.leases.reports == []
        may_close.set()
        await running
        assert len(bench.leases.reports) == 2

    asyncio.run(play())


def test_cancelling_an_attempt_does_not_free_its_slot_while_the_sandbox_lives() -> None:
    async def play() -> None:
        held, may_close = Held(), asyncio.Event()
        bench = Bench(sandboxes=MemorySandboxes(may_close), gate=held)
        running = asyncio.create_task(bench.run())
        await until(lambda: held.num_held == 1)
        bench.leases.lost.add("att_0")
        await bench.worker.beat_once()
        await bench.worker.beat_once()
        for _ in range(50):
            await asyncio.sleep(0)
        assert bench.worker.num_live == 1
        may_close.set()
        await until(lambda: bench.worker.num_live == 0)
        bench.leases.stop.set()
        await running

    asyncio.run(play())


def test_a_sandbox_that_never_goes_away_keeps_its_slot_and_fails_the_worker_when_none_is_left() -> None:
    settings = WorkerSettings(max_concurrent=1, sandbox_deadline_s=0.01)
    bench = Bench(num_leases=2, settings=settings, sandboxes=MemorySandboxes(asyncio.Event()))
    with pytest.raises(DeadlineExceeded, match="sandbox of att_0"):
        asyncio.run(bench.run())
    assert bench.counters.read()["harness.sandbox_stuck"] == 1
    assert [report.attempt_id for report in bench.leases.reports] == ["att_0"]


def test_a_worker_that_is_stopped_reports_what_it_cut_short_as_cancelled() -> None:
    async def play() -> Bench:
        held = Held()
        bench = Bench(num_leases=2, gate=held, settings=WorkerSettings(drain_deadline_s=0.01))
        running = asyncio.create_task(bench.run())
        await until(lambda: held.num_held == 2)
        bench.leases.stop.set()
        await running
        return bench

    bench = asyncio.run(play())
    assert bench.outcomes == [Outcome.CANCELLED] * 2
    assert bench.sandboxes.num_open == 0


def test_a_worker_that_is_stopped_lets_attempts_end_that_can() -> None:
    async def play() -> Bench:
        held = Held()
        bench = Bench(num_leases=2, gate=held)
        running = asyncio.create_task(bench.run())
        await until(lambda: held.num_held == 2)
        bench.leases.stop.set()
        held.open.set()
        await running
        return bench

    assert len(asyncio.run(play()).leases.reports) == 2


class GoneLeases(FakeLeases):
    """Cannot be reached after its leases were taken."""

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        if not self.waiting:
            await until(lambda: bool(self.started))
            raise RemoteFailed("the coordinator is gone")
        return await super().lease(worker_id, max_leases, wait_s)


def test_a_coordinator_that_cannot_be_reached_ends_the_worker_and_its_attempts() -> None:
    async def play() -> Bench:
        bench = Bench(leases=GoneLeases([make_lease(0, "repair/train/0")]), gate=Held())
        with pytest.raises(RemoteFailed, match="coordinator"):
            await bench.run()
        return bench

    bench = asyncio.run(play())
    assert bench.sandboxes.num_open == bench.worker.num_live == 0


def test_an_agent_that_never_submits_is_scored_by_its_turns() -> None:
    bench = Bench(policy=lambda attempt_id, request: calls(("run_tests", "{}")))
    asyncio.run(bench.run())
    assert bench.leases.reports[0].trace.end_reason is EndReason.MAX_TURNS
    assert bench.leases.failures == []
