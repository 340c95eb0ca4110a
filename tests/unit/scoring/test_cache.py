import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.scoring.cache import VerdictCache
from steelyard.scoring.verifier import no_score, score_from, wrong_answer
from steelyard.testing.scoring import job
from steelyard.types import EndReason, Outcome, Score, Verdict

GOOD = Verdict(value=0.75, success=True, detail="three of four")


def test_an_equal_artifact_of_the_same_task_gets_the_same_verdict_under_its_own_job() -> None:
    cache = VerdictCache(4)
    cache.keep(job("one", "same"), score_from(job("one", "same"), GOOD, "v1"))
    found = cache.find(job("two", "same"), "v1")
    assert found == score_from(job("two", "same"), GOOD, "v1")


@pytest.mark.parametrize(
    ("other", "version"),
    [(job("two", "another"), "v1"), (job("two", "same", task_id="other task"), "v1"), (job("two", "same"), "v2")],
)
def test_another_artifact_task_or_verifier_is_not_found(other: object, version: str) -> None:
    cache = VerdictCache(4)
    cache.keep(job("one", "same"), score_from(job("one", "same"), GOOD, "v1"))
    assert cache.find(msgspec.convert(other, type(job())), version) is None


@pytest.mark.parametrize(
    "score",
    [
        no_score(job(), Outcome.GRADER_FAILED, "v1", "it raised"),
        no_score(job(), Outcome.TIMED_OUT, "v1", "too late"),
        wrong_answer(job(), EndReason.ANSWER_TIMED_OUT, "v1", "it hung"),
    ],
)
def test_what_is_no_verdict_or_depends_on_a_clock_is_not_kept(score: Score) -> None:
    cache = VerdictCache(4)
    cache.keep(job(), score)
    assert cache.find(job(), "v1") is None


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(0, 4))
def test_the_cache_keeps_exactly_the_last_used_ones(uses: list[int], capacity: int) -> None:
    cache = VerdictCache(capacity)
    recent: list[int] = []
    for number in uses:
        this = job(str(number))
        found = cache.find(this, "v1")
        assert (found is not None) == (number in recent[:capacity])
        if found is None:
            cache.keep(this, score_from(this, GOOD, "v1"))
        recent = [number, *(other for other in recent if other != number)]
