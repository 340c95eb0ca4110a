"""Verdicts by what was judged: many rollouts of a group end with the same artifact.

Only for graders that declare ``deterministic``. A verdict that a clock had a part in is never kept, nor is
anything but a verdict.
"""

from collections import OrderedDict

from steelyard.types import EndReason, Outcome, Score, ScoreJob

Key = tuple[str, str, str]


class VerdictCache:
    """The ``capacity`` verdicts that were used last, by task, artifact digest and verifier version."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._scores: OrderedDict[Key, Score] = OrderedDict()

    def find(self, job: ScoreJob, verifier_version: str) -> Score | None:
        """The verdict on an equal artifact of the same task, as a score of ``job``."""
        key = (job.task_id, job.artifact_digest, verifier_version)
        score = self._scores.get(key)
        if score is None:
            return None
        self._scores.move_to_end(key)
        return Score(
            job_id=job.job_id,
            attempt_id=job.attempt_id,
            outcome=score.outcome,
            value=score.value,
            verifier_version=score.verifier_version,
            success=score.success,
            end_reason=score.end_reason,
            detail=score.detail,
        )

    def keep(self, job: ScoreJob, score: Score) -> None:
        """Remember a verdict, if it is one that can be used again."""
        if score.outcome is not Outcome.SCORED or score.end_reason is EndReason.ANSWER_TIMED_OUT:
            return
        self._scores[job.task_id, job.artifact_digest, score.verifier_version] = score
        while len(self._scores) > self._capacity:
            self._scores.popitem(last=False)
