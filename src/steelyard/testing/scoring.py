"""Neighbours of scoring in memory: jobs, a coordinator, artifacts, grader processes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from steelyard.errors import IntegrityError, Refused
from steelyard.scoring.base import GradeRequest
from steelyard.scoring.verifier import score_from
from steelyard.types import EndReason, Score, ScoreJob, Verdict

VERIFIER_VERSION = "fake-1"


def job(name: str = "one", artifact_digest: str = "", task_id: str = "task") -> ScoreJob:
    """A job called ``score_<name>`` about attempt ``att_<name>``."""
    return ScoreJob(
        job_id=f"score_{name}",
        attempt_id=f"att_{name}",
        task_id=task_id,
        artifact_digest=artifact_digest or f"digest of {name}",
        end_reason=EndReason.SUBMITTED,
        expires_at_s=1e12,
    )


class FakeScoreSource:
    """Hands out ``jobs``, records what comes back; ``refusals`` maps job ids to reasons."""

    def __init__(self, jobs: Sequence[ScoreJob] = (), refusals: dict[str, str] | None = None) -> None:
        self.scores: list[Score] = []
        self.lost: list[tuple[str, str]] = []
        self.asked_for: list[int] = []
        self.num_answers = len(jobs)
        self.all_answered = asyncio.Event()
        self._jobs = list(jobs)
        self._refusals = refusals or {}
        self._num_answered = 0

    async def lease_scores(self, worker_id: str, max_jobs: int, wait_s: float) -> Sequence[ScoreJob]:
        """See :class:`steelyard.scoring.base.ScoreSource`; waits for ever once all are given out."""
        self.asked_for.append(max_jobs)
        if not self._jobs:
            await asyncio.get_running_loop().create_future()
        given, self._jobs = self._jobs[:max_jobs], self._jobs[max_jobs:]
        return given

    async def score(self, score: Score) -> None:
        """See :class:`steelyard.scoring.base.ScoreSource`."""
        self._answered()
        if score.job_id in self._refusals:
            raise Refused(self._refusals[score.job_id], f"job {score.job_id} is over")
        self.scores.append(score)

    async def artifact_lost(self, attempt_id: str, detail: str) -> None:
        """See :class:`steelyard.scoring.base.ScoreSource`."""
        self._answered()
        self.lost.append((attempt_id, detail))

    def _answered(self) -> None:
        self._num_answered += 1
        if self._num_answered == self.num_answers:
            self.all_answered.set()


class FakeArtifacts:
    """Artifacts by digest; what is missing raises ``IntegrityError``."""

    def __init__(self, blobs: dict[str, bytes]) -> None:
        self._blobs = blobs

    async def get(self, digest: str) -> bytes:
        """See :class:`steelyard.scoring.base.ArtifactSource`."""
        if digest not in self._blobs:
            raise IntegrityError(f"artifact {digest} does not match its digest")
        return self._blobs[digest]


Judge = Callable[[GradeRequest], Awaitable[Verdict]]


class FakeGraderProcess:
    """A grader process that is none: ``judge`` answers. ``used_cpu_s`` is what :meth:`cpu_s` says."""

    def __init__(self, name: str, judge: Judge, verifier_version: str = VERIFIER_VERSION) -> None:
        self.name = name
        self.used_cpu_s = 0.0
        self.is_killed = False
        self._judge = judge
        self._verifier_version = verifier_version

    async def grade(self, request: GradeRequest, deadline_s: float) -> Score:
        """See :class:`steelyard.scoring.base.GraderHandle`."""
        return score_from(request.job, await self._judge(request), self._verifier_version)

    def cpu_s(self) -> float:
        """See :class:`steelyard.scoring.base.GraderHandle`."""
        return self.used_cpu_s

    async def kill(self) -> None:
        """See :class:`steelyard.scoring.base.GraderHandle`."""
        self.is_killed = True
