"""C3: a timed-out task was queued again, attempt 2 finished, and then the result of attempt 1 killed the trainer.

A late, a double and an unknown result are each refused and counted; nothing else changes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from steelyard.coordinator.transitions import RolloutState
from steelyard.testing.coordinator_server import ServedRig, serve
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_score, make_settings, play, refusal_of
from steelyard.types import ArtifactReport, AttemptFailure, Outcome

Deliver = Callable[[RunRig, ArtifactReport, ArtifactReport], Awaitable[Any]]


async def second_attempt_finished(rig: RunRig) -> tuple[ArtifactReport, ArtifactReport]:
    """Attempt 1 times out with its result ready; attempt 2 of the same rollout delivers. Both reports."""
    (first,) = await rig.coordinator.lease(WORKER, 1, 0.0)
    late = rig.seal(first)
    rig.clock.advance(rig.settings.lease_s + 1)
    assert first.attempt_id in await rig.coordinator.heartbeat(WORKER, (first.attempt_id,))
    rig.clock.advance(rig.settings.max_backoff_s)
    (second,) = await rig.coordinator.lease(WORKER, 1, 0.0)
    assert (second.rollout_id, second.attempt_number) == (first.rollout_id, 2)
    good = rig.seal(second)
    await rig.coordinator.artifact_ready(good)
    return late, good


def late(rig: RunRig, late: ArtifactReport, good: ArtifactReport) -> Awaitable[Any]:
    return rig.coordinator.artifact_ready(late)


def late_under_the_new_number(rig: RunRig, late: ArtifactReport, good: ArtifactReport) -> Awaitable[Any]:
    return rig.coordinator.artifact_ready(msgspec.structs.replace(late, attempt_number=good.attempt_number))


def double(rig: RunRig, late: ArtifactReport, good: ArtifactReport) -> Awaitable[Any]:
    return rig.coordinator.artifact_ready(msgspec.structs.replace(good, artifact_digest="0" * 32))


def unknown(rig: RunRig, late: ArtifactReport, good: ArtifactReport) -> Awaitable[Any]:
    return rig.coordinator.artifact_ready(msgspec.structs.replace(good, attempt_id="att_nobody"))


def late_failure(rig: RunRig, late: ArtifactReport, good: ArtifactReport) -> Awaitable[Any]:
    failure = AttemptFailure(
        attempt_id=late.attempt_id, attempt_number=late.attempt_number, outcome=Outcome.INFRA_FAILED, reason="slow"
    )
    return rig.coordinator.attempt_failed(failure)


@pytest.mark.parametrize(
    ("deliver", "reason"),
    [
        (late, "expired"),
        (late_under_the_new_number, "expired"),
        (late_failure, "expired"),
        (double, "double"),
        (unknown, "unknown"),
    ],
)
def test_c3_a_result_that_nobody_waits_for_is_refused_counted_and_harmless(deliver: Deliver, reason: str) -> None:
    async def scene(rig: RunRig) -> None:
        late_report, good = await second_attempt_finished(rig)
        num_events = rig.coordinator.state.num_events
        assert await refusal_of(deliver(rig, late_report, good)) == reason
        assert rig.coordinator.counters.read()[f"refused.{reason}"] == 1
        assert rig.coordinator.state.num_events == num_events, "nothing is written of it"
        plan = await rig.train(0)
        attempts = [member.attempt_id for member in plan.members]
        assert good.attempt_id in attempts
        assert late_report.attempt_id not in attempts
        await rig.train(1)

    play(scene)


async def scored_twice(rig: RunRig) -> tuple[str, str]:
    """A job that ran out, and the one that took its place: refusals of the first, and of a second verdict."""
    (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
    await rig.coordinator.artifact_ready(rig.seal(lease))
    (lost,) = await rig.coordinator.lease_scores(SCORER, 1, 0.0)
    rig.clock.advance(rig.settings.score_lease_s + 1)
    (job,) = await rig.coordinator.lease_scores(SCORER, 1, 0.0)
    assert (job.attempt_id, job.job_id != lost.job_id) == (lost.attempt_id, True)
    early = await refusal_of(rig.coordinator.score(make_score(lost, 1.0)))
    await rig.coordinator.score(make_score(job, 0.0))
    return early, await refusal_of(rig.coordinator.score(make_score(job, 1.0)))


def test_c3_late_double_and_unknown_verdicts_are_refused_and_the_first_one_stands() -> None:
    async def scene(rig: RunRig) -> None:
        assert await scored_twice(rig) == ("late", "double")
        (rollout,) = [r for r in rig.coordinator.state.rollouts.values() if r.score is not None]
        assert (rollout.state, rollout.score and rollout.score.value) == (RolloutState.ACCEPTED, 0.0)
        stranger = make_score(
            msgspec.structs.replace((await _next_job(rig)), job_id="score_x", attempt_id="att_nobody"), 1.0
        )
        assert await refusal_of(rig.coordinator.score(stranger)) == "unknown"
        counts = rig.coordinator.counters.read()
        assert [counts[f"refused.{reason}"] for reason in ("late", "double", "unknown")] == [1, 1, 1]

    play(scene)


async def _next_job(rig: RunRig) -> Any:
    await rig.run_attempts(1)
    return (await rig.coordinator.lease_scores(SCORER, 1, 0.0))[0]


def test_c3_whatever_was_refused_the_books_close_and_the_audit_passes() -> None:
    async def scenario() -> None:
        rig = await RunRig(make_settings()).start()
        reports = await second_attempt_finished(rig)
        for deliver in (late, double, unknown, late_failure):
            await refusal_of(deliver(rig, *reports))
        await rig.train(0)
        await rig.checkpoint(1)
        report = rig.audit()
        assert report.is_passed, report.lines()
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_c3_the_same_over_http_where_a_worker_and_a_stranger_report_them() -> None:
    async def scene(served: ServedRig) -> None:
        worker, stranger = await served.worker(), await served.worker("wrk_stranger")
        (first,) = await worker.lease(worker.worker_id, 1, 0.0)
        late_report = served.rig.seal(first)
        served.rig.clock.advance(served.rig.settings.lease_s + 1)
        assert await worker.heartbeat(worker.worker_id, {first.attempt_id: 1}) == (first.attempt_id,)
        served.rig.clock.advance(served.rig.settings.max_backoff_s)
        (second,) = await worker.lease(worker.worker_id, 1, 0.0)
        good = served.rig.seal(second)
        assert await refusal_of(stranger.artifact_ready(good)) == "foreign"
        await worker.artifact_ready(good)
        num_events = served.rig.coordinator.state.num_events
        other = msgspec.structs.replace(good, artifact_digest="0" * 32)
        nobodys = msgspec.structs.replace(good, attempt_id="att_nobody")
        refused = [await refusal_of(worker.artifact_ready(report)) for report in (late_report, other, nobodys)]
        assert refused == ["expired", "double", "unknown"]
        assert served.rig.coordinator.state.num_events == num_events, "nothing is written of them"
        counts = served.rig.coordinator.counters.read()
        assert [counts[f"refused.{reason}"] for reason in ("foreign", *refused)] == [1, 1, 1, 1]
        plan = await served.rig.train(0)
        assert good.attempt_id in [member.attempt_id for member in plan.members]

    serve(scene)
