"""Scoring through the coordinator: typed outcomes, budgets, fences. A failure of ours is never a reward of zero."""

import asyncio
import math

import msgspec
import pytest

from steelyard.coordinator.transitions import RolloutState
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_score, play, refusal_of
from steelyard.types import Outcome, ScoreJob


async def one_job(rig: RunRig) -> ScoreJob:
    (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
    await rig.coordinator.artifact_ready(rig.seal(lease))
    (job,) = await rig.coordinator.lease_scores(SCORER, 5, 0.0)
    return job


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_value_that_is_not_finite_is_a_failed_grading(value: float | None) -> None:
    async def scene(rig: RunRig) -> None:
        job = await one_job(rig)
        await rig.coordinator.score(make_score(job, value))
        assert rig.coordinator.counters.read() == {"grader_failed.not_finite": 1}
        (again,) = await rig.coordinator.lease_scores(SCORER, 5, 0.0)
        assert (again.attempt_id, again.artifact_digest) == (job.attempt_id, job.artifact_digest)
        assert again.job_id != job.job_id
        await rig.coordinator.score(make_score(again, 1.0))

    play(scene)


def test_a_grader_that_always_fails_costs_the_rollout_not_a_reward() -> None:
    async def scene(rig: RunRig) -> None:
        job = await one_job(rig)
        for _ in range(rig.settings.max_grader_attempts):
            await rig.coordinator.score(make_score(job, None, Outcome.GRADER_FAILED))
            jobs = await rig.coordinator.lease_scores(SCORER, 5, 0.0)
            job = jobs[0] if jobs else job
        rollout = rig.coordinator.state.attempts[job.attempt_id]
        assert rollout.state is RolloutState.CANCELLED
        assert rollout.score is None
        assert rig.coordinator.state.tokens.rejected["grader_failed"] > 0
        assert await refusal_of(rig.coordinator.score(make_score(job, 1.0))) == "late"

    play(scene, group_size=3)


def test_a_verdict_without_a_verifier_version_is_a_failed_grading() -> None:
    async def scene(rig: RunRig) -> None:
        job = await one_job(rig)
        score = make_score(job, 1.0)
        await rig.coordinator.score(msgspec.structs.replace(score, verifier_version=""))
        assert rig.coordinator.counters.read() == {"grader_failed.no_verifier_version": 1}

    play(scene)


def test_a_silent_scorer_loses_its_job_and_its_late_verdict_is_refused() -> None:
    async def scene(rig: RunRig) -> None:
        job = await one_job(rig)
        rig.clock.advance(rig.settings.score_lease_s + 0.1)
        await settle()
        assert rig.coordinator.state.tallies.num_grader_failed == 1
        assert await refusal_of(rig.coordinator.score(make_score(job, 1.0))) == "late"
        (again,) = await rig.coordinator.lease_scores("other", 1, 0.0)
        await rig.coordinator.score(make_score(again, 0.0))
        assert await refusal_of(rig.coordinator.score(make_score(job, 1.0))) == "double"
        assert rig.coordinator.state.attempts[job.attempt_id].score == make_score(again, 0.0)

    play(scene)


def test_unknown_and_foreign_verdicts_are_refused() -> None:
    async def scene(rig: RunRig) -> None:
        job = await one_job(rig)
        stranger = msgspec.structs.replace(make_score(job, 1.0), job_id="score_x", attempt_id="att_x")
        assert await refusal_of(rig.coordinator.score(stranger)) == "unknown"
        crossed = msgspec.structs.replace(make_score(job, 1.0), attempt_id="att_x")
        assert await refusal_of(rig.coordinator.score(crossed)) == "foreign"
        await rig.coordinator.score(make_score(job, 1.0))

    play(scene)


def test_after_a_crash_unscored_artifacts_are_offered_again_and_the_budget_survives() -> None:
    async def scene(rig: RunRig) -> None:
        job = await one_job(rig)
        await rig.coordinator.score(make_score(job, None, Outcome.GRADER_FAILED))
        await rig.coordinator.crash()
        await rig.open()
        for _ in range(rig.settings.max_grader_attempts - 1):
            (job,) = await rig.coordinator.lease_scores(SCORER, 5, 0.0)
            await rig.coordinator.score(make_score(job, None, Outcome.GRADER_FAILED))
        assert await rig.coordinator.lease_scores(SCORER, 5, 0.0) == ()
        assert rig.coordinator.state.attempts[job.attempt_id].state is RolloutState.CANCELLED

    play(scene, group_size=3)


def test_a_lost_artifact_is_a_lost_attempt_and_the_rollout_is_tried_again() -> None:
    async def scene(rig: RunRig) -> None:
        job = await one_job(rig)
        await rig.coordinator.artifact_lost(job.attempt_id, "blob is gone")
        assert await refusal_of(rig.coordinator.score(make_score(job, 1.0))) == "late"
        rig.clock.advance(1.0)
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        assert lease.attempt_number == 2

    play(scene)


def test_scorers_wait_for_artifacts() -> None:
    async def scene(rig: RunRig) -> None:
        waiter = asyncio.ensure_future(rig.coordinator.lease_scores(SCORER, 5, 60.0))
        await settle()
        assert not waiter.done()
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.coordinator.artifact_ready(rig.seal(lease))
        (job,) = await waiter
        assert job.attempt_id == lease.attempt_id

    play(scene)
