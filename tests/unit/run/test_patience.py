"""A coordinator that is lost for a while: nothing is leased, reports are made until they arrive, and it has an end."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from steelyard.errors import DeadlineExceeded, Refused, RunError, StorageFailed
from steelyard.run.patience import Patience, PatientLeases, PatientScores
from steelyard.scoring.verifier import no_score
from steelyard.testing.harness import FakeClock, FakeLeases, make_lease
from steelyard.testing.scoring import FakeScoreSource, job
from steelyard.types import (
    ArtifactReport,
    AttemptFailure,
    EndReason,
    Lease,
    Outcome,
    Score,
    ScoreJob,
    SealedTrace,
)

LOST_AFTER_S = 100.0
CALL_S = 30.0

REPORT = ArtifactReport(
    attempt_id="att_0",
    attempt_number=1,
    trace=SealedTrace(
        attempt_id="att_0", digest="d", num_turns=0, num_tokens=0, oldest_version=0, newest_version=0,
        mean_version=0.0, num_segments=0, end_reason=EndReason.SUBMITTED,
    ),
    artifact_digest="a",
)  # fmt: skip
FAILURE = AttemptFailure(attempt_id="att_0", attempt_number=1, outcome=Outcome.INFRA_FAILED, reason="x")


class Silence:
    """Of the next ``num_silent`` calls no answer arrives, and each takes ``CALL_S`` seconds."""

    def __init__(self, clock: FakeClock, num_silent: int) -> None:
        self.clock = clock
        self.num_silent = num_silent

    def meet(self) -> None:
        if self.num_silent:
            self.num_silent -= 1
            self.clock.advance(CALL_S)
            raise DeadlineExceeded("an answer of the coordinator", ("http://there",), CALL_S)


class SilentLeases(FakeLeases):
    """Leases that are out of reach for some calls."""

    def __init__(self, silence: Silence) -> None:
        super().__init__([make_lease(0, "task")])
        self._silence = silence

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        self._silence.meet()
        return await super().lease(worker_id, max_leases, wait_s)

    async def start(self, attempt_id: str, attempt_number: int) -> None:
        self._silence.meet()
        await super().start(attempt_id, attempt_number)

    async def heartbeat(self, worker_id: str, attempts: Mapping[str, int]) -> Sequence[str]:
        self._silence.meet()
        return await super().heartbeat(worker_id, attempts)

    async def artifact_ready(self, report: ArtifactReport) -> None:
        self._silence.meet()
        await super().artifact_ready(report)

    async def attempt_failed(self, failure: AttemptFailure) -> None:
        self._silence.meet()
        await super().attempt_failed(failure)


class SilentScores(FakeScoreSource):
    """Jobs that are out of reach for some calls."""

    def __init__(self, silence: Silence) -> None:
        super().__init__([job()])
        self._silence = silence

    async def lease_scores(self, worker_id: str, max_jobs: int, wait_s: float) -> Sequence[ScoreJob]:
        self._silence.meet()
        return await super().lease_scores(worker_id, max_jobs, wait_s)

    async def score(self, score: Score) -> None:
        self._silence.meet()
        await super().score(score)

    async def artifact_lost(self, attempt_id: str, detail: str) -> None:
        self._silence.meet()
        await super().artifact_lost(attempt_id, detail)


class Bench:
    """Patient sources over silent ones, with what was said to the user."""

    def __init__(self, num_silent: int) -> None:
        self.said: list[str] = []
        self.clock = FakeClock()
        self.silence = Silence(self.clock, num_silent)
        self.source = SilentLeases(self.silence)
        self.jobs = SilentScores(self.silence)
        patience = Patience(LOST_AFTER_S, self.clock, self.said.append)
        self.leases = PatientLeases(self.source, patience)
        self.scores = PatientScores(self.jobs, patience)


def test_while_the_coordinator_is_silent_there_is_nothing_to_lease_and_the_user_hears_of_it_once() -> None:
    async def scene() -> None:
        bench = Bench(num_silent=3)
        for _ in range(3):
            assert list(await bench.leases.lease("w", 4, 0.0)) == []
        assert [lease.attempt_id for lease in await bench.leases.lease("w", 4, 0.0)] == ["att_0"]
        assert len(bench.said) == 2
        assert "does not answer; trying for up to 100 s" in bench.said[0]
        assert bench.said[1] == "the coordinator answers again"
        bench.silence.num_silent = 3
        assert list(await bench.scores.lease_scores("w", 1, 0.0)) == [], "the time counts from the last answer"

    asyncio.run(scene())


def test_silence_for_too_long_is_an_error_that_says_since_when() -> None:
    async def scene() -> None:
        bench = Bench(num_silent=9)
        for _ in range(3):
            await bench.leases.lease("w", 4, 0.0)
        with pytest.raises(
            RunError, match=r"the coordinator must answer within 100 s, was silent for 120 s: .*http://there"
        ):
            await bench.leases.lease("w", 4, 0.0)

    asyncio.run(scene())


def test_a_long_time_in_which_nothing_was_asked_is_no_silence() -> None:
    async def scene() -> None:
        bench = Bench(num_silent=0)
        await bench.leases.lease("w", 4, 0.0)
        bench.clock.advance(100 * LOST_AFTER_S)
        bench.silence.num_silent = 3
        for _ in range(3):
            assert list(await bench.leases.lease("w", 4, 0.0)) == []

    asyncio.run(scene())


def test_reports_of_finished_work_are_made_until_they_arrive_and_then_once() -> None:
    async def scene() -> None:
        for call in ("start", "artifact_ready", "score", "artifact_lost"):
            bench = Bench(num_silent=2)
            match call:
                case "start":
                    await bench.leases.start("att_0", 1)
                    assert bench.source.started == ["att_0"]
                case "artifact_ready":
                    await bench.leases.artifact_ready(REPORT)
                    assert (bench.source.reports, bench.leases.num_handed_in) == ([REPORT], 1)
                case "score":
                    await bench.scores.score(no_score(job(), Outcome.GRADER_FAILED, "v", ""))
                    assert (len(bench.jobs.scores), bench.scores.num_scored) == (1, 1)
                    await bench.scores.score(no_score(job(), Outcome.CANCELLED, "", "handed back"))
                    assert (len(bench.jobs.scores), bench.scores.num_scored) == (2, 1)
                case "artifact_lost":
                    await bench.scores.artifact_lost("att_one", "gone")
                    assert bench.jobs.lost == [("att_one", "gone")]
            assert len(bench.said) == 2, call

    asyncio.run(scene())


def test_heartbeats_and_failures_are_tried_once_because_expiry_says_the_same() -> None:
    async def scene() -> None:
        bench = Bench(num_silent=2)
        with pytest.raises(DeadlineExceeded):
            await bench.leases.heartbeat("w", {"att_0": 1})
        with pytest.raises(DeadlineExceeded):
            await bench.leases.attempt_failed(FAILURE)
        assert bench.silence.num_silent == 0
        await bench.leases.attempt_failed(FAILURE)
        assert bench.source.failures == [FAILURE]

    asyncio.run(scene())


def test_what_the_coordinator_itself_says_is_not_borne() -> None:
    class Failed(FakeLeases):
        async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
            raise StorageFailed("the journal is full")

    async def scene() -> None:
        bench = Bench(num_silent=0)
        leases = PatientLeases(Failed([]), Patience(LOST_AFTER_S, bench.clock, bench.said.append))
        with pytest.raises(StorageFailed):
            await leases.lease("w", 1, 0.0)
        bench.source.refused.add("att_0")
        with pytest.raises(Refused):
            await bench.leases.artifact_ready(REPORT)
        assert (bench.said, bench.leases.num_handed_in) == ([], 0)

    asyncio.run(scene())
