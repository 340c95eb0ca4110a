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


class HeldGrader(FakeGrader):
    """Grades only what has been released."""

    def __init__(self) -> None:
        super().__init__(capacity=2)
        self.begun = asyncio.Event()
        self.released = asyncio.Event()

    async def grade(self, job: ScoreJob, artifact: bytes) -> Score:
        self.begun.set()
        await self.released.wait()
        return await super().grade(job, artifact)


def stop_while_grading(drain_deadline_s: float, release: bool) -> tuple[FakeScoreSource, Counters]:
    source, grader, counters = FakeScoreSource(JOBS[:4]), HeldGrader(), Counters()

    async def main() -> None:
        settings = WorkerSettings(worker_id="wrk_1", alarm_failure_frac=0.5, drain_deadline_s=drain_deadline_s)
        worker, stop = ScoringWorker(source, FakeArtifacts(BLOBS), grader, settings, counters), asyncio.Event()
        working = asyncio.create_task(worker.run(stop))
        await grader.begun.wait()
        while worker.num_live < 2:  # noqa: ASYNC110 (a job that is taken has no event of its own)
            await asyncio.sleep(0)
        stop.set()
        if release:
            grader.released.set()
        async with asyncio.timeout(20):
            await working
        assert worker.num_live == 0

    asyncio.run(main())
    return source, counters


def test_a_worker_that_is_told_to_stop_ends_what_it_has_and_takes_nothing_more() -> None:
    source, counters = stop_while_grading(20.0, release=True)
    assert [score.job_id for score in source.scores] == [each.job_id for each in JOBS[:2]]
    assert {score.outcome for score in source.scores} == {Outcome.SCORED}
    assert source.asked_for == [2]
    assert "scoring.handed_back" not in counters.read()


def test_what_is_not_graded_when_the_time_is_up_is_handed_back_without_a_verdict() -> None:
    source, counters = stop_while_grading(0.0, release=False)
    assert {score.job_id for score in source.scores} == {each.job_id for each in JOBS[:2]}
    assert {(score.outcome, score.value) for score in source.scores} == {(Outcome.CANCELLED, None)}
    assert counters.read()["scoring.handed_back"] == 2
