import asyncio
from collections.abc import Sequence

import pytest

from steelyard.metrics import Counters
from steelyard.scoring.verifier import no_score, score_from
from steelyard.scoring.worker import FailureAlarm, ScoringWorker, WorkerSettings
from steelyard.testing.scoring import FakeArtifacts, FakeScoreSource, job
from steelyard.types import Outcome, Score, ScoreJob, Verdict

SETTINGS = WorkerSettings(worker_id="wrk_1", alarm_failure_frac=0.1)
JOBS = [job(str(index)) for index in range(6)]
BLOBS = {each.artifact_digest: each.job_id.encode() for each in JOBS}


class FakeGrader:
    def __init__(self, capacity: int = 2, outcome: Outcome = Outcome.SCORED) -> None:
        self.capacity = capacity
        self.outcome = outcome
        self.most = 0
        self.num_now = 0

    async def grade(self, job: ScoreJob, artifact: bytes) -> Score:
        assert artifact == BLOBS[job.artifact_digest]
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        await asyncio.sleep(0)
        self.num_now -= 1
        if self.outcome is not Outcome.SCORED:
            return no_score(job, self.outcome, "v1", "it raised")
        return score_from(job, Verdict(value=1.0, success=True), "v1")


def work(
    source_jobs: Sequence[ScoreJob], grader: FakeGrader, blobs: dict[str, bytes], refusals: dict[str, str] | None = None
) -> tuple[FakeScoreSource, Counters, ScoringWorker]:
    async def main() -> tuple[FakeScoreSource, Counters, ScoringWorker]:
        source, counters = FakeScoreSource(source_jobs, refusals), Counters()
        worker = ScoringWorker(source, FakeArtifacts(blobs), grader, SETTINGS, counters)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            await source.all_answered.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return source, counters, worker

    return asyncio.run(main())


def test_every_job_is_scored_and_never_more_at_a_time_than_fit() -> None:
    grader = FakeGrader(capacity=2)
    source, counters, _ = work(JOBS, grader, BLOBS)
    assert sorted(score.job_id for score in source.scores) == sorted(each.job_id for each in JOBS)
    assert grader.most == 2
    assert max(source.asked_for) == 2
    assert min(source.asked_for) >= 1
    assert counters.read() == {"scoring.scored": 6}


def test_a_refused_score_is_counted_and_the_worker_goes_on() -> None:
    source, counters, _ = work(JOBS, FakeGrader(), BLOBS, refusals={"score_0": "late", "score_3": "double"})
    assert len(source.scores) == 4
    assert counters.read() == {"scoring.scored": 6, "scoring.refused.late": 1, "scoring.refused.double": 1}


def test_a_lost_artifact_is_reported_and_not_scored() -> None:
    blobs = {digest: data for digest, data in BLOBS.items() if digest != JOBS[2].artifact_digest}
    source, counters, _ = work(JOBS, FakeGrader(), blobs)
    assert [attempt_id for attempt_id, _ in source.lost] == ["att_2"]
    assert "IntegrityError" in source.lost[0][1]
    assert len(source.scores) == 5
    assert counters.read()["scoring.artifact_lost"] == 1


def test_failed_gradings_are_delivered_as_such_and_raise_the_alarm_once() -> None:
    jobs = [job(str(index), JOBS[0].artifact_digest) for index in range(30)]
    source, counters, worker = work(jobs, FakeGrader(outcome=Outcome.GRADER_FAILED), BLOBS)
    assert {score.outcome for score in source.scores} == {Outcome.GRADER_FAILED}
    assert all(score.value is None for score in source.scores)
    assert counters.read() == {"scoring.grader_failed": 30, "scoring.alarms": 1}
    assert worker.alarm.is_on


def test_the_alarm_goes_off_when_gradings_succeed_again_and_can_come_back() -> None:
    alarm = FailureAlarm(0.1)
    failed = no_score(job(), Outcome.GRADER_FAILED, "v1", "")
    fine = score_from(job(), Verdict(value=0.0, success=False), "v1")
    assert [alarm.note(failed) for _ in range(10)] == [False] * 9 + [True]
    assert not any(alarm.note(fine) for _ in range(50))
    assert not alarm.is_on
    assert sum(alarm.note(failed) for _ in range(10)) == 1


def test_an_error_of_the_coordinator_ends_the_worker() -> None:
    class Gone(FakeScoreSource):
        async def lease_scores(self, worker_id: str, max_jobs: int, wait_s: float) -> Sequence[ScoreJob]:
            raise ConnectionResetError("the coordinator is gone")

    async def main() -> None:
        worker = ScoringWorker(Gone(), FakeArtifacts({}), FakeGrader(), SETTINGS, Counters())
        with pytest.raises(ConnectionResetError):
            await worker.run()

    asyncio.run(main())
