"""Intervals against published values, quantiles and means against their definitions."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.observe.statistics import (
    Z_95,
    Interval,
    difference_interval,
    mean,
    moving_mean,
    paired_gain,
    quantile,
    share,
    standard_deviation,
    weighted_quantile,
    wilson_interval,
)


def wilson(num_success: int, num_trials: int) -> Interval:
    interval = wilson_interval(num_success, num_trials)
    assert interval is not None
    return interval


@pytest.mark.parametrize(
    ("num_success", "num_trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_wilson_interval_equals_the_values_that_newcombe_published(
    num_success: int, num_trials: int, low: float, high: float
) -> None:
    interval = wilson(num_success, num_trials)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@pytest.mark.parametrize(
    ("after", "before", "low", "high"),
    [((56, 70), (48, 80), 0.0524, 0.3339), ((9, 10), (3, 10), 0.1705, 0.8090), ((10, 10), (0, 20), 0.6791, 1.0)],
)
def test_the_interval_of_a_gain_equals_the_values_that_newcombe_published(
    after: tuple[int, int], before: tuple[int, int], low: float, high: float
) -> None:
    gain = difference_interval(wilson(*before), wilson(*after))
    assert (round(gain.low, 4), round(gain.high, 4)) == (low, high)


@settings(deadline=None)
@given(st.integers(1, 2000), st.data())
def test_the_wilson_bounds_solve_the_score_equation_and_hold_the_estimate(num_trials: int, data: st.DataObject) -> None:
    num_success = data.draw(st.integers(0, num_trials))
    interval = wilson(num_success, num_trials)
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
    for bound in (interval.low, interval.high):
        distance = abs(bound - interval.estimate)
        if 0 < bound < 1:
            assert distance == pytest.approx(Z_95 * math.sqrt(bound * (1 - bound) / num_trials), abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 500), st.data())
def test_swapping_success_and_failure_mirrors_the_interval(num_trials: int, data: st.DataObject) -> None:
    num_success = data.draw(st.integers(0, num_trials))
    one, other = wilson(num_success, num_trials), wilson(num_trials - num_success, num_trials)
    assert one.low == pytest.approx(1 - other.high) and one.high == pytest.approx(1 - other.low)


def test_no_trials_have_no_interval_and_impossible_counts_are_refused() -> None:
    assert wilson_interval(0, 0) is None
    with pytest.raises(ValueError, match=r"num_trials \(3\), got 4"):
        wilson_interval(4, 3)
    with pytest.raises(ValueError, match="got -1"):
        wilson_interval(-1, 3)


floats = st.floats(-1e6, 1e6)


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=40), st.floats(0, 1))
def test_a_quantile_is_a_value_with_enough_at_or_below_it_and_none_smaller_has(
    values: list[float], level: float
) -> None:
    found = quantile(values, level)
    assert found in values
    assert sum(value <= found for value in values) >= level * len(values) * (1 - 1e-9)
    smaller = [value for value in values if value < found]
    assert not smaller or sum(value <= max(smaller) for value in values) < level * len(values) + 1e-9


@settings(deadline=None)
@given(st.lists(st.tuples(floats, st.integers(0, 4)), max_size=20), st.floats(0, 1))
def test_a_weight_counts_like_that_many_copies(pairs: list[tuple[float, int]], level: float) -> None:
    values, weights = [value for value, _ in pairs], [float(weight) for _, weight in pairs]
    copies = [value for value, weight in pairs for _ in range(weight)]
    assert weighted_quantile(values, weights, level) == quantile(copies, level)


def test_a_quantile_refuses_what_has_no_meaning() -> None:
    with pytest.raises(ValueError, match=r"level must be between 0 and 1, got 1\.5"):
        quantile([1.0], 1.5)
    with pytest.raises(ValueError, match="got 1 and 2"):
        weighted_quantile([1.0], [1.0, 1.0], 0.5)
    with pytest.raises(ValueError, match="weights must be >= 0"):
        weighted_quantile([1.0], [-1.0], 0.5)


def test_a_moving_mean_leaves_missing_values_out() -> None:
    assert moving_mean([1.0, None, 3.0, None, None, 5.0], 2) == [1.0, 1.0, 3.0, 3.0, None, 5.0]
    assert moving_mean([], 3) == []
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        moving_mean([1.0], 0)


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=30), st.integers(1, 40))
def test_a_moving_mean_is_the_mean_of_the_last_values(values: list[float], window: int) -> None:
    for index, found in enumerate(moving_mean(list(values), window)):
        last = values[max(0, index + 1 - window) : index + 1]
        assert found == pytest.approx(sum(last) / len(last), abs=1e-6)


def test_means_shares_and_deviations_of_nothing_are_missing_or_zero() -> None:
    assert mean([]) is None and share(1, 0) is None and share(1, 4) == 0.25
    assert standard_deviation([]) == standard_deviation([3.0]) == 0.0
    assert standard_deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))


def test_a_paired_gain_tells_tasks_that_were_well_formed_before_from_others() -> None:
    gain = paired_gain(solved_before="0011", valid_before="1010", solved_after="1101")
    assert (gain.total, gain.where_valid, gain.valid_share) == (1, 0, 0.0)
    gain = paired_gain(solved_before="0000", valid_before="1110", solved_after="1101")
    assert (gain.total, gain.where_valid, gain.valid_share) == (3, 2, 2 / 3)


def test_a_paired_gain_of_nothing_has_no_share_and_unlike_tasks_are_refused() -> None:
    assert paired_gain("1", "1", "1").valid_share is None
    with pytest.raises(ValueError, match="shorter"):
        paired_gain("10", "11", "1")
