"""Scoring jobs: sealed artifacts offered to scorers, fenced by job id, scored again where a grader fails."""

import heapq
import logging
from collections import deque
from dataclasses import dataclass

from steelyard.coordinator import admission
from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.core import Core, short
from steelyard.coordinator.deliveries import Deliveries
from steelyard.coordinator.entities import Rollout
from steelyard.coordinator.groups import Groups
from steelyard.coordinator.leases import Leases
from steelyard.coordinator.records import is_finite
from steelyard.coordinator.retry_rules import Ending
from steelyard.coordinator.transitions import RolloutState
from steelyard.types import Outcome, Score, ScoreJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that a scorer works on."""

    job: ScoreJob
    worker_id: str
    since_s: float


class Scoring:
    """Job leases are not journalled: after a recovery every sealed artifact without a score is offered again.

    What is journalled is each failed grading, expired jobs included, so that the budget survives.
    """

    def __init__(self, core: Core, groups: Groups, leases: Leases) -> None:
        self._core = core
        self._groups = groups
        self._leases = leases
        self._queue: deque[str] = deque()
        self._jobs: dict[str, HeldJob] = {}
        self._job_of: dict[str, str] = {}
        self._given = Deliveries()
        self._expiries: list[tuple[float, str]] = []
        core.subscribe(fx.ScoreWaits, self._on_waits)

    @property
    def num_waiting(self) -> int:
        """Sealed artifacts that no scorer has taken yet, those of attempts that ended meanwhile included."""
        return len(self._queue)

    def grant(self, worker_id: str, max_jobs: int, held: frozenset[str] | None = None) -> tuple[ScoreJob, ...]:
        """Up to ``max_jobs`` jobs, oldest artifact first.

        ``held``: jobs that the scorer works on; any other that was given to it never arrived, and is handed out
        first. None: nothing gets lost on the way to this scorer.
        """
        granted = [] if held is None else self._lost(worker_id, max_jobs, held)
        while self._queue and len(granted) < max_jobs:
            attempt_id = self._queue[0]
            rollout = self._core.state.attempts.get(attempt_id)
            if rollout is not None and rollout.state is RolloutState.ARTIFACT_READY and attempt_id not in self._job_of:
                granted.append(self._grant_one(worker_id, rollout, attempt_id))
            self._queue.popleft()  # only now: an error on the way must not lose it
        return tuple(granted)

    def _lost(self, worker_id: str, max_jobs: int, known: frozenset[str]) -> list[ScoreJob]:
        lost = self._given.lost(worker_id, known)[:max_jobs]
        if lost:
            self._core.counters.add("jobs_handed_out_again", len(lost))
        return [self._jobs[job_id].job for job_id in lost]

    def finish(self, score: Score, worker_id: str | None = None) -> None:
        """Take a verdict, or the news that there is none; ``worker_id`` says so, where that is known.

        Raises:
            Refused: the job or its attempt is not live; ``double`` where another score came before. An identical
                one is counted and accepted again.
        """
        core = self._core
        held = self._jobs.get(score.job_id)
        if held is None:
            self._refuse_unless_same(score)
            return
        if held.job.attempt_id != score.attempt_id:
            raise core.refuse("foreign", f"job {score.job_id} is about {held.job.attempt_id}, not {score.attempt_id}")
        self._require_holder(held, worker_id)
        rollout = core.attempt(score.attempt_id)
        if rollout.state is not RolloutState.ARTIFACT_READY:
            self._forget(held.job)
            raise core.refuse("late", f"attempt {score.attempt_id} is {rollout.state}")
        if score.outcome is not Outcome.SCORED:
            self._fail(held.job, rollout, score.outcome, "grader", score.detail)
        elif not is_finite(score.value):
            self._fail(held.job, rollout, Outcome.GRADER_FAILED, "not_finite", f"value {score.value}")
        elif not score.verifier_version:
            self._fail(held.job, rollout, Outcome.GRADER_FAILED, "no_verifier_version", score.detail)
        else:
            self._accept(held.job, rollout, score)

    def artifact_lost(self, attempt_id: str, detail: str, worker_id: str | None = None) -> None:
        """The artifact or trace of a sealed attempt cannot be read back: the attempt is lost, its rollout is not.

        Args:
            worker_id: the scorer that says so, which must hold a job of the attempt; None: the run itself.

        Raises:
            Refused: the attempt is not waiting to be scored, or not by this scorer. The same news again is counted
                and accepted.
        """
        if self._leases.has_failed(attempt_id, Outcome.INFRA_FAILED, "artifact_lost", detail):
            self._core.counters.add("duplicate.artifact_lost")
            return
        rollout = self._core.attempt(attempt_id)
        if rollout.state is not RolloutState.ARTIFACT_READY:
            raise self._core.refuse("late", f"attempt {attempt_id} is {rollout.state}")
        if worker_id is not None:
            held = self._jobs.get(self._job_of.get(attempt_id, ""))
            if held is None:
                raise self._core.refuse("late", f"no job of attempt {attempt_id} is held by {worker_id}")
            self._require_holder(held, worker_id)
        self._forget_attempt(attempt_id)
        self._leases.fail(rollout, Ending.INFRA_FAILED, "artifact_lost", detail)

    def advance(self) -> None:
        """Expire jobs whose scorer did not answer in time."""
        now_s = self._core.now_s()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, job_id = heapq.heappop(self._expiries)
            held = self._jobs.get(job_id)
            if held is None:
                continue
            rollout = self._core.state.attempts.get(held.job.attempt_id)
            if rollout is None or rollout.state is not RolloutState.ARTIFACT_READY:
                self._forget(held.job)
                continue
            detail = f"scorer {held.worker_id} did not answer"
            self._fail(held.job, rollout, Outcome.TIMED_OUT, "job_expired", detail)

    def next_due_s(self) -> float | None:
        """When ``advance`` has something to do at the earliest."""
        return self._expiries[0][0] if self._expiries else None

    def held_jobs(self) -> dict[str, HeldJob]:
        """Jobs that scorers work on, by attempt."""
        return {held.job.attempt_id: held for held in self._jobs.values()}

    def _grant_one(self, worker_id: str, rollout: Rollout, attempt_id: str) -> ScoreJob:
        core = self._core
        now_s = core.now_s()
        assert rollout.report is not None
        job = ScoreJob(
            job_id=core.ids.new("score"),
            attempt_id=attempt_id,
            task_id=rollout.group.task_id,
            artifact_digest=rollout.report.artifact_digest,
            end_reason=rollout.report.trace.end_reason,
            expires_at_s=now_s + core.settings.score_lease_s,
        )
        self._jobs[job.job_id] = HeldJob(job=job, worker_id=worker_id, since_s=now_s)
        self._job_of[attempt_id] = job.job_id
        self._given.add(worker_id, job.job_id)
        heapq.heappush(self._expiries, (job.expires_at_s, job.job_id))
        if self._expiries[0][1] == job.job_id:
            core.timers.notify()
        return job

    def _accept(self, job: ScoreJob, rollout: Rollout, score: Score) -> None:
        core = self._core
        core.record(e.Scored(at_s=core.now_s(), score=score, artifact_digest=job.artifact_digest))
        self._forget(job)
        core.record(admission.after_score(core.state, core.settings, rollout, core.now_s()))
        self._groups.settle(rollout.group)

    def _fail(self, job: ScoreJob, rollout: Rollout, outcome: Outcome, reason: str, detail: str) -> None:
        core = self._core
        self._forget(job)
        core.record(
            e.GraderFailed(
                at_s=core.now_s(),
                attempt_id=job.attempt_id,
                job_id=job.job_id,
                outcome=outcome,
                reason=reason,
                detail=short(detail),
            )
        )
        core.counters.add(f"grader_failed.{reason}")
        logger.warning("grading job %s of attempt %s failed: %s", job.job_id, job.attempt_id, reason)
        event = admission.after_grader_failure(core.settings, rollout, core.now_s())
        if event is not None:
            core.record(event)
            self._groups.settle(rollout.group)

    def _refuse_unless_same(self, score: Score) -> None:
        core = self._core
        rollout = core.attempt(score.attempt_id)
        if rollout.score is not None and rollout.score == score:
            core.counters.add("duplicate.score")
            return
        reason = "double" if rollout.score is not None else "late"
        raise core.refuse(reason, f"job {score.job_id} is over; attempt {score.attempt_id} is {rollout.state}")

    def _require_holder(self, held: HeldJob, worker_id: str | None) -> None:
        if worker_id is not None and held.worker_id != worker_id:
            detail = f"job {held.job.job_id} is held by {held.worker_id}, not {worker_id}"
            raise self._core.refuse("foreign", detail)

    def _forget(self, job: ScoreJob) -> None:
        self._jobs.pop(job.job_id, None)
        self._given.remove(job.job_id)
        if self._job_of.get(job.attempt_id) == job.job_id:
            del self._job_of[job.attempt_id]

    def _forget_attempt(self, attempt_id: str) -> None:
        job_id = self._job_of.get(attempt_id)
        if job_id is not None:
            self._forget(self._jobs[job_id].job)

    def _on_waits(self, effect: fx.ScoreWaits) -> None:
        self._queue.append(effect.attempt_id)
        self._core.scores.notify()
