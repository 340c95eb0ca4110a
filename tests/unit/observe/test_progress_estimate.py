"""The estimate of the time left, and that it says what it does not know."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.observe.progress_estimate import WorkLeft, estimate_time_left


def test_equal_steps_give_an_estimate_without_spread() -> None:
    left = estimate_time_left([30.0, 8.0, 8.0, 8.0], WorkLeft(num_steps=10))
    assert left is not None
    assert (left.expected_s, left.low_s, left.high_s) == (80.0, 80.0, 80.0)


def test_the_slow_first_step_does_not_count() -> None:
    slow = estimate_time_left([500.0, 8.0, 8.0, 8.0], WorkLeft(num_steps=10))
    fast = estimate_time_left([1.0, 8.0, 8.0, 8.0], WorkLeft(num_steps=10))
    assert slow == fast


@pytest.mark.parametrize("num_seen", [0, 1, 2, 3])
def test_too_few_steps_give_no_estimate(num_seen: int) -> None:
    assert estimate_time_left([8.0] * num_seen, WorkLeft(num_steps=10)) is None


def test_old_steps_are_forgotten_once_the_pace_has_changed() -> None:
    left = estimate_time_left([100.0] * 20 + [10.0] * 12, WorkLeft(num_steps=5))
    assert left is not None and left.expected_s == 50.0


def test_what_of_the_present_step_is_over_is_taken_off_but_never_more_than_one_step() -> None:
    times_s = [8.0] * 5
    half = estimate_time_left(times_s, WorkLeft(num_steps=3, since_last_step_s=4.0))
    over = estimate_time_left(times_s, WorkLeft(num_steps=3, since_last_step_s=20.0))
    assert half is not None and half.expected_s == 20.0 and not half.is_late
    assert over is not None and over.expected_s == 16.0 and not over.is_late


def test_a_step_that_takes_far_longer_than_the_others_is_called_late() -> None:
    left = estimate_time_left([8.0] * 5, WorkLeft(num_steps=3, since_last_step_s=25.0))
    assert left is not None and left.is_late


def test_an_evaluation_of_unknown_length_is_named_and_not_guessed() -> None:
    unknown = estimate_time_left([8.0] * 5, WorkLeft(num_steps=3, num_evaluations=4))
    known = estimate_time_left([8.0] * 5, WorkLeft(num_steps=3, num_evaluations=4, evaluation_s=5.0))
    assert unknown is not None and unknown.expected_s == 24.0 and unknown.without_evaluation
    assert known is not None and known.expected_s == 44.0 and not known.without_evaluation


def test_after_the_last_step_only_evaluations_are_left() -> None:
    left = estimate_time_left(
        [8.0] * 5, WorkLeft(num_steps=0, num_evaluations=2, evaluation_s=5.0, since_last_step_s=3.0)
    )
    assert left is not None and (left.low_s, left.expected_s, left.high_s) == (7.0, 7.0, 7.0)
    assert estimate_time_left([8.0] * 5, WorkLeft(num_steps=0, num_evaluations=2)) is None


def test_the_bounds_hold_for_about_eight_of_ten_runs() -> None:
    rng = random.Random(5)
    held = 0
    for _ in range(1000):
        times_s = [max(0.1, rng.gauss(8, 2)) for _ in range(43)]
        left = estimate_time_left(times_s[:13], WorkLeft(num_steps=30))
        assert left is not None
        held += left.low_s <= sum(times_s[13:]) <= left.high_s
    assert 720 <= held <= 850


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e5), min_size=4, max_size=40), st.integers(1, 10_000), st.floats(0, 1e6))
def test_the_bounds_are_in_order_and_never_negative(times_s: list[float], num_steps: int, since_s: float) -> None:
    left = estimate_time_left(times_s, WorkLeft(num_steps=num_steps, since_last_step_s=since_s))
    assert left is not None
    assert 0 <= left.low_s <= left.expected_s <= left.high_s
