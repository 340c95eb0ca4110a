"""What scoring needs from others, and what it calls a grader.

::

    coordinator --ScoreJob--> worker --(job, artifact)--> pool --> grader process: fresh sandbox, Grader.grade
    coordinator <---Score---- worker <------Score-------- pool <-- verdict, or why there is none
"""

from collections.abc import Sequence
from typing import Any, Protocol

from steelyard.types import Record, Score, ScoreJob, Verdict

# What is trained where an answer made grading impossible, and no grader could say more.
FAILURE_VALUE = 0.0


class Grader(Protocol):
    """Judges artifacts of one environment."""

    @property
    def verifier_version(self) -> str:
        """Changes whenever a verdict could."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether equal artifacts of a task always get equal verdicts, so that one may be used again."""
        ...

    async def grade(self, task_id: str, artifact: bytes, sandbox: Any) -> Verdict:
        """Judge an artifact in a fresh sandbox that nobody else has used.

        Whatever the agent caused is a verdict. Raising means that the grader, or something below it, failed.
        """
        ...


class GradingSandbox(Protocol):
    """A sandbox as far as scoring itself cares."""

    async def close(self) -> None: ...


class SandboxSource(Protocol):
    """Gives out fresh sandboxes; see :class:`steelyard.sandbox.base.SandboxPool`."""

    async def acquire(self, label: str, deadline_s: float) -> GradingSandbox: ...


class ScoreSource(Protocol):
    """Where jobs come from and scores go: the coordinator."""

    async def lease_scores(self, worker_id: str, max_jobs: int, wait_s: float) -> Sequence[ScoreJob]:
        """Up to ``max_jobs`` jobs; none where there was none within ``wait_s`` seconds."""
        ...

    async def score(self, score: Score) -> None:
        """Deliver.

        Raises:
            Refused: the job is over; the score is not wanted any more.
        """
        ...

    async def artifact_lost(self, attempt_id: str, detail: str) -> None:
        """The artifact cannot be read back.

        Raises:
            Refused: the attempt is not waiting to be scored.
        """
        ...


class ArtifactSource(Protocol):
    """Sealed artifacts by digest."""

    async def get(self, digest: str) -> bytes:
        """The bytes.

        Raises:
            IntegrityError, OSError, SteelyardError: they are not there or not the same.
        """
        ...


class GradeRequest(Record, frozen=True, kw_only=True):
    """One artifact for a grader process; ``deadline_s`` bounds the getting of a sandbox and the grading."""

    job: ScoreJob
    artifact: bytes
    deadline_s: float


class GraderHandle(Protocol):
    """One running grader process, from outside."""

    async def grade(self, request: GradeRequest, deadline_s: float) -> Score:
        """Have it graded.

        Raises:
            DeadlineExceeded: no answer within ``deadline_s`` seconds; the process may be stuck.
            RunError: the process died or cannot answer.
        """
        ...

    def cpu_s(self) -> float:
        """CPU seconds that the process has used since it started; 0 once it is gone."""
        ...

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        ...
