"""One grading, inside a grader process: a fresh sandbox, the grader, and a look at what it says.

Nothing that goes wrong here becomes a number: a verdict that is not finite, a grader that raises and a
sandbox that fails are ``grader_failed``, a deadline of ours is ``timed_out``, and both are graded again.
"""

import asyncio
import logging
import math
import time

import msgspec

from steelyard.errors import SandboxLost
from steelyard.scoring.base import FAILURE_VALUE, Grader, GradeRequest, SandboxSource
from steelyard.types import EndReason, Outcome, Score, ScoreJob, Verdict

logger = logging.getLogger(__name__)

_MAX_DETAIL_CHARS = 500


async def grade_once(grader: Grader, sandboxes: SandboxSource, request: GradeRequest) -> Score:
    """Grade one artifact; never raises but for cancellation."""
    started = time.monotonic()
    job = request.job
    try:
        async with asyncio.timeout(request.deadline_s):
            verdict = await _grade(grader, sandboxes, request)
        score = score_from(job, verdict, grader.verifier_version)
    except TimeoutError:
        detail = f"no verdict within {request.deadline_s:g} s"
        score = no_score(job, Outcome.TIMED_OUT, grader.verifier_version, detail)
    except SandboxLost as lost:
        if lost.is_by_program:
            score = wrong_answer(job, EndReason.ANSWER_CRASHED, grader.verifier_version, str(lost))
        else:
            score = no_score(job, Outcome.GRADER_FAILED, grader.verifier_version, str(lost))
    except Exception as error:
        # A grader is code of the environment's author: whatever it raises must be seen, and is never a zero.
        logger.exception("the grader failed on job %s (task %s)", job.job_id, job.task_id)
        detail = f"{type(error).__name__}: {error}"
        score = no_score(job, Outcome.GRADER_FAILED, grader.verifier_version, detail)
    return msgspec.structs.replace(score, duration_s=time.monotonic() - started)


async def _grade(grader: Grader, sandboxes: SandboxSource, request: GradeRequest) -> Verdict:
    sandbox = await sandboxes.acquire(request.job.job_id, request.deadline_s)
    try:
        return await grader.grade(request.job.task_id, request.artifact, sandbox)
    finally:
        await sandbox.close()


def score_from(job: ScoreJob, verdict: Verdict, verifier_version: str) -> Score:
    """The score that a verdict makes; ``grader_failed`` where its value is not a finite number."""
    if not math.isfinite(verdict.value):
        detail = f"a verdict must be finite, got {verdict.value}"
        return no_score(job, Outcome.GRADER_FAILED, verifier_version, detail)
    return Score(
        job_id=job.job_id,
        attempt_id=job.attempt_id,
        outcome=Outcome.SCORED,
        value=verdict.value,
        verifier_version=verifier_version,
        success=verdict.success,
        end_reason=verdict.end_reason,
        detail=verdict.detail[:_MAX_DETAIL_CHARS],
    )


def no_score(job: ScoreJob, outcome: Outcome, verifier_version: str, detail: str) -> Score:
    """An outcome that says why there is no verdict."""
    return Score(
        job_id=job.job_id,
        attempt_id=job.attempt_id,
        outcome=outcome,
        value=None,
        verifier_version=verifier_version,
        detail=detail[:_MAX_DETAIL_CHARS],
    )


def wrong_answer(job: ScoreJob, end_reason: EndReason, verifier_version: str, detail: str) -> Score:
    """The score of an answer that made its own grading impossible."""
    verdict = Verdict(value=FAILURE_VALUE, success=False, end_reason=end_reason, detail=detail)
    return score_from(job, verdict, verifier_version)
