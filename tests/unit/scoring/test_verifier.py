import asyncio
from typing import Any

import pytest

from steelyard.errors import DeadlineExceeded, SandboxLost
from steelyard.scoring.base import GradeRequest
from steelyard.scoring.verifier import grade_once
from steelyard.testing.sandbox import FakePool
from steelyard.testing.scoring import job
from steelyard.types import EndReason, Outcome, Score, Verdict


class OneVerdict:
    verifier_version = "one-1"
    deterministic = True

    def __init__(self, answer: Verdict | Exception | None) -> None:
        self.answer = answer
        self.sandboxes: list[Any] = []

    async def grade(self, task_id: str, artifact: bytes, sandbox: Any) -> Verdict:
        self.sandboxes.append(sandbox)
        if self.answer is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert isinstance(self.answer, Verdict)
        return self.answer


def grade(answer: Verdict | Exception | None, deadline_s: float = 60.0) -> tuple[Score, OneVerdict, FakePool]:
    async def main() -> tuple[Score, OneVerdict, FakePool]:
        grader, pool = OneVerdict(answer), FakePool()
        request = GradeRequest(job=job(), artifact=b"x", deadline_s=deadline_s)
        return await grade_once(grader, pool, request), grader, pool

    return asyncio.run(main())


def test_a_verdict_becomes_a_score_with_all_that_it_says() -> None:
    verdict = Verdict(value=0.5, success=False, end_reason=EndReason.ANSWER_CRASHED, detail="half")
    score, _, _ = grade(verdict)
    assert score == Score(
        job_id="score_one", attempt_id="att_one", outcome=Outcome.SCORED, value=0.5, verifier_version="one-1",
        end_reason=EndReason.ANSWER_CRASHED, detail="half", duration_s=score.duration_s,
    )  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_a_failure_of_the_grader(value: float) -> None:
    score, _, _ = grade(Verdict(value=value, success=True))
    assert (score.outcome, score.value, score.success) == (Outcome.GRADER_FAILED, None, False)
    assert "must be finite" in score.detail


def test_a_grader_that_raises_gives_no_number() -> None:
    score, _, _ = grade(KeyError("expected"))
    assert (score.outcome, score.value) == (Outcome.GRADER_FAILED, None)
    assert score.detail == "KeyError: 'expected'"


def test_a_sandbox_that_fails_by_itself_is_a_failure_of_the_grader() -> None:
    score, _, _ = grade(SandboxLost("no room"))
    assert (score.outcome, score.value) == (Outcome.GRADER_FAILED, None)


def test_an_answer_that_brings_its_sandbox_down_is_a_wrong_answer() -> None:
    score, _, _ = grade(SandboxLost("brought down by its program", is_by_program=True))
    assert (score.outcome, score.value, score.success) == (Outcome.SCORED, 0.0, False)
    assert score.end_reason is EndReason.ANSWER_CRASHED


def test_a_grader_that_waits_too_long_is_timed_out_and_not_a_zero() -> None:
    score, _, pool = grade(None, deadline_s=0.0)
    assert (score.outcome, score.value) == (Outcome.TIMED_OUT, None)
    assert all(sandbox.is_closed for sandbox in pool.given)


def test_every_grading_gets_a_fresh_sandbox_and_destroys_it() -> None:
    async def main() -> None:
        grader, pool = OneVerdict(Verdict(value=1.0, success=True)), FakePool()
        for name in ("one", "two"):
            await grade_once(grader, pool, GradeRequest(job=job(name), artifact=b"x", deadline_s=60.0))
        assert grader.sandboxes == pool.given
        assert [sandbox.label for sandbox in pool.given] == ["score_one", "score_two"]
        assert all(sandbox.is_closed for sandbox in pool.given)

    asyncio.run(main())


class NoSandboxes:
    async def acquire(self, label: str, deadline_s: float) -> Any:
        raise DeadlineExceeded(f"a sandbox for {label}", ("att_a",), deadline_s)


def test_no_sandbox_is_a_failure_of_the_grader() -> None:
    request = GradeRequest(job=job(), artifact=b"x", deadline_s=60.0)
    score = asyncio.run(grade_once(OneVerdict(None), NoSandboxes(), request))
    assert (score.outcome, score.value) == (Outcome.GRADER_FAILED, None)
    assert "att_a" in score.detail
