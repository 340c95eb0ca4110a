"""What is learnt from answers."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.projection import OutputProjection, Pace, RunningQuantile
from steelyard.types import FinishReason, GenerateResult


def answer(num_tokens: int, *, prefill_s: float = 0.1, decode_s: float = 1.0, cached: int = 0) -> GenerateResult:
    return GenerateResult(
        request_id="r", token_ids=tuple(range(num_tokens)), logprobs=(0.0,) * num_tokens,
        kept_logmass=(0.0,) * num_tokens, version_spans=(), finish_reason=FinishReason.STOP, replica_id="rep",
        load_id="load", num_cached_tokens=cached, prefill_s=prefill_s, decode_s=decode_s,
    )  # fmt: skip


def test_until_enough_was_seen_all_that_a_request_may_sample_is_set_aside() -> None:
    projection = OutputProjection(0.9)
    for _ in range(15):
        projection.note(100, 10)
    assert projection.tokens(200) == 200
    projection.note(100, 10)
    assert projection.tokens(200) == 20


def test_nine_of_ten_requests_stay_within_their_projection() -> None:
    projection = OutputProjection(0.9)
    for used in range(1, 101):
        projection.note(100, used)
    assert projection.tokens(100) == 90


def test_a_projection_is_at_least_one_token_and_at_most_all() -> None:
    projection = OutputProjection(0.9)
    for _ in range(20):
        projection.note(1000, 0)
    assert projection.tokens(50) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(17, 40))
def test_old_values_are_forgotten(few: list[float], times: int) -> None:
    values = few * times * 32
    quantile = RunningQuantile(0.5)
    for value in values:
        quantile.note(value)
    recent = sorted(values[-512:])
    assert quantile.value() == recent[255]


def test_seconds_per_token_become_a_line_over_the_number_of_open_requests() -> None:
    pace = Pace()
    for round_number in range(400):
        num_open = 1 + round_number % 16
        pace.note(answer(10, decode_s=10 * (0.01 + 0.002 * num_open)), 50, num_open, now_s=0.0)
    assert pace.token_s(1, 0.0) == pytest.approx(0.012, rel=0.05)
    assert pace.token_s(20, 0.0) == pytest.approx(0.05, rel=0.05)


def test_prefill_counts_only_what_was_computed() -> None:
    pace = Pace()
    for _ in range(400):
        pace.note(answer(10, prefill_s=0.5, cached=900), 1000, 1, now_s=0.0)
    assert pace.prefill_s(200, 0.0) == pytest.approx(1.0, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 64)), max_size=50), st.integers(0, 100))
def test_a_token_always_takes_some_time_and_no_less_with_more_requests(
    answers: list[tuple[float, int]], num_open: int
) -> None:
    pace = Pace()
    for decode_s, was_open in answers:
        pace.note(msgspec.structs.replace(answer(4), decode_s=decode_s), 10, was_open, now_s=0.0)
    assert 0 < pace.token_s(num_open, 0.0) <= pace.token_s(num_open + 1, 0.0) + 1e-9


def test_a_replica_that_was_never_asked_is_taken_to_be_as_fast_as_the_others() -> None:
    fleet = Pace()
    fast, unknown = Pace(fleet), Pace(fleet)
    for _ in range(200):
        fast.note(answer(10, decode_s=0.01), 100, 1, now_s=0.0)
    assert unknown.token_s(1, 0.0) == fleet.token_s(1, 0.0) == pytest.approx(fast.token_s(1, 0.0), rel=0.2)
    assert unknown.prefill_s(100, 0.0) == fleet.prefill_s(100, 0.0)


def test_what_a_replica_showed_long_ago_counts_less_and_less() -> None:
    fleet = Pace()
    slow, fast = Pace(fleet), Pace(fleet)
    for _ in range(50):
        slow.note(answer(10, decode_s=10.0), 100, 1, now_s=0.0)
    for _ in range(400):
        fast.note(answer(10, decode_s=0.1), 100, 1, now_s=100.0)
    assert slow.token_s(1, 0.0) > 0.8
    assert slow.token_s(1, 1000.0) == pytest.approx(fleet.token_s(1, 1000.0), rel=0.01)
