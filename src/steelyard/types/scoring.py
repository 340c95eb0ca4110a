"""Jobs for graders, and their verdicts."""

from steelyard.types.outcomes import EndReason, Outcome
from steelyard.types.record import Record


class ScoreJob(Record, frozen=True, kw_only=True):
    """Permission to score one sealed artifact until ``expires_at_s``."""

    job_id: str
    attempt_id: str
    task_id: str
    artifact_digest: str
    end_reason: EndReason
    expires_at_s: float


class Verdict(Record, frozen=True, kw_only=True):
    """What a grader says of one artifact. ``value`` must be finite.

    ``end_reason`` is set where the answer itself timed out or crashed; it overrides the attempt's own.
    """

    value: float
    success: bool
    end_reason: EndReason | None = None
    detail: str = ""


class Score(Record, frozen=True, kw_only=True):
    """A verdict. ``value`` is finite and present exactly when ``outcome`` is ``scored``.

    ``success`` is the environment's yes or no, which evaluation counts; ``value`` is what is trained.
    ``end_reason`` is set where the grader found that the answer timed out or crashed.
    """

    job_id: str
    attempt_id: str
    outcome: Outcome
    value: float | None
    verifier_version: str
    success: bool = False
    end_reason: EndReason | None = None
    detail: str = ""
    duration_s: float = 0.0
