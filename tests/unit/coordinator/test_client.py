"""The client against the real server on the loopback, over a network that loses answers: exactly one effect."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from steelyard.coordinator.client import CoordinatorClient
from steelyard.coordinator.events import AnyEvent, Event, InfraFailed, Leased, Running, Scored
from steelyard.coordinator.events import ArtifactReady as ArtifactReadyEvent
from steelyard.errors import InputError, Refused, RunError
from steelyard.testing.coordinator_server import ServedRig, serve
from steelyard.testing.fault_proxy import Fault
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import SCORER, WORKER, make_score, refusal_of
from steelyard.types import AttemptFailure, Lease, Outcome, Score

FAULTS = (Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.TWICE)


async def events_of(served: ServedRig, kind: type[Event]) -> list[AnyEvent]:
    return [event for event in await served.rig.journal.replay() if type(event) is kind]


def failure(lease: Lease) -> AttemptFailure:
    return AttemptFailure(
        attempt_id=lease.attempt_id,
        attempt_number=lease.attempt_number,
        outcome=Outcome.INFRA_FAILED,
        reason="sandbox_died",
    )


def test_a_whole_life_of_a_rollout_passes_through_http() -> None:
    async def scene(served: ServedRig) -> None:
        worker, scorer = await served.worker(), await served.scorer()
        (lease,) = await worker.lease(WORKER, 1, 0.0)
        await worker.start(lease.attempt_id, lease.attempt_number)
        assert await worker.heartbeat(WORKER, {lease.attempt_id: 1, "att_gone": 1}) == ("att_gone",)
        await worker.artifact_ready(served.rig.seal(lease))
        (job,) = await scorer.lease_scores(SCORER, 4, 0.0)
        assert job.attempt_id == lease.attempt_id
        await scorer.score(make_score(job, 1.0))
        assert served.rig.coordinator.state.tallies.num_scored == 1

    serve(scene)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_call_has_one_effect_whatever_is_lost_or_doubled(fault: Fault) -> None:
    async def scene(served: ServedRig) -> None:
        rig, worker, scorer = served.rig, await served.worker(), await served.scorer()

        async def lossy(call: Awaitable[object]) -> object:
            served.lose(0, fault=fault)
            return await call

        leases = await worker_lease(lossy, worker, 2)
        good, bad = leases
        for lease in leases:
            await lossy(worker.start(lease.attempt_id, lease.attempt_number))
        assert await lossy(worker.heartbeat(WORKER, {good.attempt_id: 1, "att_gone": 1})) == ("att_gone",)
        await lossy(worker.artifact_ready(rig.seal(good)))
        await lossy(worker.attempt_failed(failure(bad)))
        served.lose(0, fault=fault)
        (job,) = await scorer.lease_scores(SCORER, 4, 0.0)
        await lossy(scorer.score(make_score(job, 1.0)))
        for kind, number in ((Leased, 2), (Running, 2), (ArtifactReadyEvent, 1), (InfraFailed, 1), (Scored, 1)):
            assert len(await events_of(served, kind)) == number, kind
        assert not [name for name in rig.coordinator.counters.read() if name.startswith(("refused", "duplicate"))]
        assert served.counters.read().get("coordinator.repeated", 0) == (0 if fault is Fault.LOSE_REQUEST else 8)

    serve(scene)


async def worker_lease(
    lossy: Callable[[Awaitable[object]], Awaitable[object]], worker: CoordinatorClient, number: int
) -> list[Lease]:
    leases = await lossy(worker.lease(WORKER, number, 0.0))
    return msgspec.convert(msgspec.to_builtins(leases), list[Lease])


def test_a_lost_artifact_is_reported_once_though_its_answer_is_lost() -> None:
    async def scene(served: ServedRig) -> None:
        worker, scorer = await served.worker(), await served.scorer()
        (lease,) = await worker.lease(WORKER, 1, 0.0)
        await worker.artifact_ready(served.rig.seal(lease))
        await scorer.lease_scores(SCORER, 1, 0.0)
        served.lose(0)
        await scorer.artifact_lost(lease.attempt_id, "unreadable")
        assert len(await events_of(served, InfraFailed)) == 1

    serve(scene)


def test_an_answer_to_a_lease_that_never_arrived_is_handed_out_again_after_a_restart() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        (started,) = await worker.lease(WORKER, 1, 0.0)
        await worker.start(started.attempt_id, started.attempt_number)
        (known,) = await worker.lease(WORKER, 1, 0.0)
        served.proxy.plan = restarting_at(served, served.proxy.num_requests)
        again = await worker.lease(WORKER, 2, 0.0)
        leased = [event.attempt_id for event in await events_of(served, Leased) if isinstance(event, Leased)]
        assert sorted(lease.attempt_id for lease in again) == sorted(leased[2:])
        assert leased[:2] == [started.attempt_id, known.attempt_id]
        assert len(leased) == 4
        assert served.rig.coordinator.counters.read()["leases_handed_out_again"] == 2

    serve(scene)


def restarting_at(served: ServedRig, number: int) -> Callable[[int], Fault]:
    """The answer to this request is lost, and the coordinator restarts before the next one."""
    pass_on = served.proxy.before_pass_on

    async def restart(current: int) -> None:
        await pass_on(current)
        if current == number + 1:
            await served.restart()

    served.proxy.before_pass_on = restart
    return lambda current: Fault.LOSE_ANSWER if current == number else Fault.NONE


@pytest.mark.parametrize("report", ["start", "artifact_ready", "score"])
def test_a_report_is_accepted_again_by_its_content_after_a_restart(report: str) -> None:
    async def scene(served: ServedRig) -> None:
        rig, worker, scorer = served.rig, await served.worker(), await served.scorer()
        (lease,) = await worker.lease(WORKER, 1, 0.0)
        calls: dict[str, Callable[[], Awaitable[None]]] = {
            "start": lambda: worker.start(lease.attempt_id, lease.attempt_number),
            "artifact_ready": lambda: worker.artifact_ready(sealed),
        }
        sealed = rig.seal(lease)
        if report == "score":
            await worker.artifact_ready(sealed)
            (job,) = await scorer.lease_scores(SCORER, 1, 0.0)
            calls["score"] = lambda: scorer.score(make_score(job, 1.0))
        served.proxy.plan = restarting_at(served, served.proxy.num_requests)
        await calls[report]()
        kinds: dict[str, type[Event]] = {"start": Running, "artifact_ready": ArtifactReadyEvent, "score": Scored}
        assert len(await events_of(served, kinds[report])) == 1

    serve(scene)


def test_a_job_whose_answer_was_lost_is_given_to_the_same_scorer_again() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        for lease in await worker.lease(WORKER, 2, 0.0):
            await worker.artifact_ready(served.rig.seal(lease))
        lost = await served.rig.coordinator.lease_scores(SCORER, 1, 0.0)
        scorer = await served.scorer()
        jobs = await scorer.lease_scores(SCORER, 4, 0.0)
        assert jobs[0] == lost[0]
        assert len({job.attempt_id for job in jobs}) == len(jobs) == 2
        assert await scorer.lease_scores(SCORER, 4, 0.0) == ()
        assert served.rig.coordinator.counters.read()["jobs_handed_out_again"] == 1
        assert served.rig.coordinator.state.tallies.num_grader_failed == 0

    serve(scene)


def test_a_poll_waits_for_work_and_holds_up_no_other_call() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker(max_requests=1)
        everything = await worker.lease(WORKER, 1000, 0.0)
        poll = asyncio.create_task(worker.lease(WORKER, 1, 20.0))
        # The scorer's poll is answered by the report of the worker, which passes the worker's own poll.
        scorer = await served.scorer()
        jobs = asyncio.create_task(scorer.lease_scores(SCORER, 1, 20.0))
        await worker.artifact_ready(served.rig.seal(everything[0]))
        assert [job.attempt_id for job in await jobs] == [everything[0].attempt_id]
        assert not poll.done()
        await worker.attempt_failed(failure(everything[1]))
        served.rig.clock.advance(1.0)
        (retry,) = await poll
        assert (retry.rollout_id, retry.attempt_number) == (everything[1].rollout_id, 2)

    serve(scene)


def test_a_poll_that_is_given_up_is_withdrawn_and_takes_nothing() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        everything = await worker.lease(WORKER, 1000, 0.0)
        clock = served.rig.clock
        num_before = clock.num_sleepers
        poll = asyncio.create_task(worker.lease(WORKER, 1, 20.0))
        while clock.num_sleepers == num_before:
            await settle()
        poll.cancel()
        await asyncio.wait([poll])
        while clock.num_sleepers > num_before:
            await settle()
        await worker.attempt_failed(failure(everything[0]))
        served.rig.clock.advance(1.0)
        (retry,) = await worker.lease(WORKER, 1, 20.0)
        assert retry.attempt_number == 2
        assert len(await events_of(served, Leased)) == len(everything) + 1

    serve(scene)


def test_calls_that_are_made_together_share_a_request() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        leases = await worker.lease(WORKER, 1000, 0.0)
        before = served.proxy.num_requests
        await asyncio.gather(*(worker.start(lease.attempt_id, lease.attempt_number) for lease in leases))
        assert len(leases) > 4
        assert served.proxy.num_requests - before <= 2

    serve(scene, groups_per_batch=4, group_size=4)


def test_one_call_per_request_is_the_same_code() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker(max_calls_per_request=1)
        leases = await worker.lease(WORKER, 1000, 0.0)
        before = served.proxy.num_requests
        await asyncio.gather(*(worker.start(lease.attempt_id, lease.attempt_number) for lease in leases))
        assert served.proxy.num_requests - before == len(leases)
        assert len(await events_of(served, Running)) == len(leases)

    serve(scene)


def test_a_refusal_arrives_as_itself_and_touches_only_its_own_call() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        (lease,) = await worker.lease(WORKER, 1, 0.0)
        refused, accepted = await asyncio.gather(
            refusal_of(worker.start("att_unknown", 1)), worker.start(lease.attempt_id, 1), return_exceptions=True
        )
        assert (refused, accepted) == ("unknown", None)
        assert served.rig.coordinator.counters.read()["refused.unknown"] == 1

    serve(scene)


def test_what_another_worker_or_scorer_holds_cannot_be_reported() -> None:
    async def scene(served: ServedRig) -> None:
        worker, thief = await served.worker(), await served.worker("wrk_thief")
        one, two = await worker.lease(WORKER, 2, 0.0)
        assert await refusal_of(thief.start(one.attempt_id, 1)) == "foreign"
        assert await refusal_of(thief.artifact_ready(served.rig.seal(one))) == "foreign"
        assert await refusal_of(thief.attempt_failed(failure(two))) == "foreign"
        await worker.artifact_ready(served.rig.seal(two))
        scorer, other = await served.scorer(), await served.scorer("wrk_other")
        (job,) = await scorer.lease_scores(SCORER, 1, 0.0)
        assert await refusal_of(other.score(make_score(job, 1.0))) == "foreign"
        assert await refusal_of(other.artifact_lost(job.attempt_id, "x")) == "foreign"
        await scorer.score(make_score(job, 1.0))

    serve(scene)


def test_a_coordinator_out_of_reach_is_a_run_error_that_names_it() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker(call_deadline_s=0.2)
        served.proxy.plan = lambda _: Fault.LOSE_REQUEST
        with pytest.raises(RunError, match="coordinator"):
            await worker.start("att_one", 1)
        with pytest.raises(RunError, match="coordinator"):
            await worker.lease(WORKER, 1, 0.0)

    serve(scene)


def test_a_failed_run_is_a_run_error_at_once() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        served.rig.coordinator.fail(RunError("the trainer is gone"))
        with pytest.raises(RunError, match="the trainer is gone"):
            await worker.lease(WORKER, 1, 20.0)

    with pytest.raises(RunError, match="the trainer is gone"):
        serve(scene)


def test_a_key_without_the_right_is_refused_as_such_and_not_tried_again() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        served.rig.clock.advance(4000.0)
        with pytest.raises(Refused, match="expired"):
            await worker.lease(WORKER, 1, 0.0)
        assert served.client_counters.read() == {}

    serve(scene)


def test_only_the_worker_of_the_key_can_be_named() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        with pytest.raises(InputError, match=f"must be {WORKER}"):
            await worker.lease("wrk_other", 1, 0.0)

    serve(scene)


def test_a_closed_client_ends_its_calls() -> None:
    async def scene(served: ServedRig) -> None:
        worker = await served.worker()
        served.proxy.plan = lambda _: Fault.LOSE_REQUEST
        call = asyncio.create_task(worker.start("att_one", 1))
        await served.proxy.arrived.wait()
        await worker.close()
        with pytest.raises(RunError, match="closed"):
            await call

    serve(scene)


def test_a_score_that_is_no_number_is_a_failed_grading_here_too() -> None:
    async def scene(served: ServedRig) -> None:
        worker, scorer = await served.worker(), await served.scorer()
        (lease,) = await worker.lease(WORKER, 1, 0.0)
        await worker.artifact_ready(served.rig.seal(lease))
        (job,) = await scorer.lease_scores(SCORER, 1, 0.0)
        score: Score = make_score(job, float("nan"))
        await scorer.score(score)
        assert served.rig.coordinator.counters.read()["grader_failed.not_finite"] == 1

    serve(scene)
