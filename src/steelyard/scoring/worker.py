"""The scoring worker: takes jobs, fetches artifacts, has them graded, delivers.

*consumes* score jobs; *waits for* jobs, artifacts, verdicts and the coordinator's receipt, each with a deadline;
*unblocked by* their arrival; *produces* one score a job, or the news that its artifact is lost.
"""

import asyncio
import logging
from collections import deque
from typing import Any, Protocol

from steelyard.errors import IntegrityError, Refused, SteelyardError, StorageFailed
from steelyard.metrics import Counters
from steelyard.scoring.base import ArtifactSource, ScoreSource
from steelyard.scoring.verifier import no_score
from steelyard.types import Outcome, Record, Score, ScoreJob

logger = logging.getLogger(__name__)

_ALARM_WINDOW = 50
_MIN_FOR_ALARM = 10


class JobGrader(Protocol):
    """Grades one job, always with a score; see :class:`steelyard.scoring.pool.GraderPool`."""

    @property
    def capacity(self) -> int: ...

    async def grade(self, job: ScoreJob, artifact: bytes) -> Score: ...


class WorkerSettings(Record, frozen=True, kw_only=True):
    """``poll_s`` bounds one wait for jobs. Alarm: this share of the last gradings gave no verdict.

    ``drain_deadline_s``: how long gradings may go on once the worker is told to stop. ``call_deadline_s``: for handing
    back those that are not done by then.
    """

    worker_id: str
    alarm_failure_frac: float
    poll_s: float = 5.0
    artifact_deadline_s: float = 30.0
    drain_deadline_s: float = 30.0
    call_deadline_s: float = 10.0


class FailureAlarm:
    """Watches the share of gradings without a verdict, over a sliding window."""

    def __init__(self, alarm_frac: float) -> None:
        self._alarm_frac = alarm_frac
        self._recent: deque[bool] = deque(maxlen=_ALARM_WINDOW)
        self.is_on = False

    def note(self, score: Score) -> bool:
        """Count one grading; True where the alarm goes on with it."""
        self._recent.append(score.outcome is not Outcome.SCORED)
        was_on = self.is_on
        self.is_on = len(self._recent) >= _MIN_FOR_ALARM and self.failed_frac > self._alarm_frac
        return self.is_on and not was_on

    @property
    def failed_frac(self) -> float:
        """Share of recent gradings without a verdict."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0


class ScoringWorker:
    """Runs until cancelled; jobs under way are then dropped, and offered again by the coordinator.

    Told to stop it takes no more jobs, ends those that it has, and hands back what is not done in time.
    """

    def __init__(
        self, source: ScoreSource, artifacts: ArtifactSource, grader: JobGrader, settings: WorkerSettings,
        counters: Counters,
    ) -> None:  # fmt: skip
        self._source = source
        self._artifacts = artifacts
        self._grader = grader
        self._settings = settings
        self._counters = counters
        self._jobs: dict[asyncio.Task[None], ScoreJob] = {}
        self.alarm = FailureAlarm(settings.alarm_failure_frac)

    @property
    def num_live(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Work until cancelled, or until ``stop`` is set and what is under way has ended.

        Raises:
            SteelyardError: the coordinator cannot be reached, or refuses to lease.
        """
        told = stop if stop is not None else asyncio.Event()
        stopping = asyncio.create_task(told.wait(), name="stop")
        try:
            while not told.is_set():
                free = self._grader.capacity - len(self._jobs)
                if free <= 0:
                    await self._reap(stopping, timeout_s=None)
                    continue
                for job in await self._source.lease_scores(self._settings.worker_id, free, self._settings.poll_s):
                    self._jobs[asyncio.create_task(self._work(job), name=f"score {job.job_id}")] = job
                await self._reap(stopping, timeout_s=0)
            await self._drain()
        finally:
            for task in (*self._jobs, stopping):
                task.cancel()
            await asyncio.gather(*self._jobs, stopping, return_exceptions=True)

    async def _reap(self, stopping: asyncio.Task[Any], timeout_s: float | None) -> None:
        """Take up failures of finished jobs; with no ``timeout_s`` wait until one has finished, or for the stop."""
        if self._jobs:
            await asyncio.wait({*self._jobs, stopping}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self._jobs if task.done()]:
                del self._jobs[task]
                task.result()

    async def _drain(self) -> None:
        """Let gradings end; those that are late are cancelled, and the coordinator is told so that others grade."""
        if not self._jobs:
            return
        done, late = await asyncio.wait(self._jobs, timeout=self._settings.drain_deadline_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await asyncio.gather(*(self._hand_back(self._jobs.pop(task)) for task in late))
        for task in done:
            del self._jobs[task]
            task.result()

    async def _hand_back(self, job: ScoreJob) -> None:
        self._counters.add("scoring.handed_back")
        score = no_score(job, Outcome.CANCELLED, "", "the scorer was told to stop")
        try:
            async with asyncio.timeout(self._settings.call_deadline_s):
                await self._source.score(score)
        except (SteelyardError, TimeoutError) as error:
            logger.warning("job %s could not be handed back, it will expire: %s", job.job_id, error)

    async def _work(self, job: ScoreJob) -> None:
        try:
            artifact = await self._fetch(job)
            if artifact is None:
                return
            score = await self._grader.grade(job, artifact)
            self._note(score)
            await self._source.score(score)
        except Refused as refusal:
            # Somebody was faster, or the attempt is over: counted, and nothing else to do.
            self._counters.add(f"scoring.refused.{refusal.reason}")
            logger.info("job %s: %s", job.job_id, refusal)

    async def _fetch(self, job: ScoreJob) -> bytes | None:
        try:
            async with asyncio.timeout(self._settings.artifact_deadline_s):
                return await self._artifacts.get(job.artifact_digest)
        except (IntegrityError, StorageFailed, OSError) as error:
            # OSError includes the deadline: the artifact is out of reach either way.
            self._counters.add("scoring.artifact_lost")
            logger.error("the artifact of %s cannot be read: %s", job.attempt_id, error)
            await self._source.artifact_lost(job.attempt_id, f"{type(error).__name__}: {error}")
            return None

    def _note(self, score: Score) -> None:
        self._counters.add(f"scoring.{score.outcome}")
        if self.alarm.note(score):
            self._counters.add("scoring.alarms")
            logger.error(
                "%.0f%% of recent gradings gave no verdict (allowed: %.0f%%); the last one: %s",
                100 * self.alarm.failed_frac, 100 * self._settings.alarm_failure_frac, score.detail,
            )  # fmt: skip
