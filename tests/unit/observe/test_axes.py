"""Scales and ticks."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.observe.axes import Scale, log_ticks, place_scale, round_ticks, value_scale

numbers = st.floats(-1e9, 1e9).filter(lambda number: number == 0 or abs(number) > 1e-6)


@settings(deadline=None)
@given(numbers, numbers)
def test_round_ticks_are_evenly_spaced_cover_the_range_and_are_few(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    ticks = round_ticks(low, high)
    steps = [after - before for before, after in itertools.pairwise(ticks)]
    assert 2 <= len(ticks) <= 7
    assert all(step == pytest.approx(steps[0], rel=1e-6) for step in steps)
    slack = 1e-6 * steps[0]
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 59, [0, 20, 40, 60]), (0, 0.0027, [0, 0.001, 0.002, 0.003])],
)
def test_round_ticks_are_the_numbers_one_would_choose(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)


@settings(deadline=None)
@given(st.floats(1e-6, 1e6), st.floats(1, 1e6))
def test_logarithmic_ticks_cover_the_range(low: float, factor: float) -> None:
    high = low * factor
    ticks = log_ticks(low, high)
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low * (1 + 1e-6) and ticks[-1] >= high * (1 - 1e-6) and len(ticks) >= 2


@settings(deadline=None)
@given(st.floats(-100, 100), st.floats(0.1, 100), st.floats(-500, 500))
def test_a_scale_keeps_order_and_stays_between_its_pixels(low: float, width: float, value: float) -> None:
    scale = Scale(low=low, high=low + width, start=180, end=10)
    assert scale.place(low) == 180 and scale.place(low + width) == 10
    assert 10 <= scale.place(value) <= 180
    assert scale.place(value) >= scale.place(value + 1)


def test_a_logarithmic_scale_gives_each_factor_of_ten_the_same_room() -> None:
    scale = Scale(low=1, high=100, start=0, end=200, kind="log")
    assert [scale.place(value) for value in (0.001, 1, 10, 100)] == [0, 0, 100, 200]


def test_a_value_axis_begins_at_zero_where_zero_is_not_far() -> None:
    near, _ = value_scale([3.0, 10.0], 180, 10, bounds=None)
    far, _ = value_scale([9.0, 10.0], 180, 10, bounds=None)
    assert near.low == 0 and far.low > 8


def test_zero_on_a_logarithmic_axis_makes_it_linear() -> None:
    scale, _ = value_scale([0.0, 10.0], 180, 10, kind="log", bounds=None)
    assert scale.kind == "linear"


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 1.0], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.0, 25_000.0], ["0k", "5k", "10k", "15k", "20k", "25k"]),
        ([0.0, 0.0005], ["0", "1e-4", "2e-4", "3e-4", "4e-4", "5e-4"]),
        ([-0.05, 0.03], ["-0.06", "-0.04", "-0.02", "0.00", "0.02", "0.04"]),
    ],
)
def test_labels_tell_neighbours_apart_and_no_more(values: list[float], labels: list[str]) -> None:
    _, ticks = value_scale(values, 180, 10, bounds=None)
    assert [tick.label for tick in ticks] == labels


@pytest.mark.parametrize("steps", [[0.0], [0.0, 1.0], [float(step) for step in range(60)], [41.0, 42.0, 43.0]])
def test_steps_are_labelled_with_whole_numbers_within_the_axis(steps: list[float]) -> None:
    scale, ticks = place_scale(steps, 46, 388)
    assert ticks and all(float(tick.label).is_integer() for tick in ticks)
    assert all(46 <= tick.at <= 388 for tick in ticks)
    assert scale.place(steps[0]) == 46 and math.isfinite(scale.place(steps[-1]))
