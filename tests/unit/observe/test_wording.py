"""Numbers and times as people read them."""

import math

import pytest

from steelyard.observe.progress_estimate import TimeLeft
from steelyard.observe.rows import EvaluationSplit
from steelyard.observe.wording import (
    MISSING,
    clean,
    decimals,
    duration,
    integer,
    percent,
    rough,
    rough_range,
    signed,
    significant,
    split_name,
    stopwatch,
    time_left,
    words,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (0.0123, "12 ms"), (0.42, "0.42 s"), (0.996, "1.0 s"), (8.12, "8.1 s"), (59.94, "59.9 s"),
        (59.97, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (None, MISSING), (math.inf, MISSING),
    ],
)  # fmt: skip
def test_durations_have_the_unit_that_fits_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "5 s"), (33, "35 s"), (58, "1 min"), (100, "2 min"), (5399, "90 min"), (6000, "1.7 h")]
)
def test_estimates_are_no_finer_than_they_can_be_known(seconds: float, text: str) -> None:
    assert rough(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(185, 250, "3 to 5 min"), (31, 41, "30 to 45 s"), (50, 130, "50 s to 3 min"), (5000, 9001, "83 min to 2.6 h")],
)
def test_bounds_are_rounded_away_from_each_other(low: float, high: float, text: str) -> None:
    assert rough_range(low, high) == text


def test_the_time_left_is_said_with_its_bounds_and_its_gaps() -> None:
    left = TimeLeft(expected_s=240, low_s=200, high_s=290)
    assert time_left(left) == "about 4 min left (3 to 5 min)"
    assert time_left(TimeLeft(expected_s=240, low_s=200, high_s=290, without_evaluation=True)).endswith(
        "(3 to 5 min), and the evaluation"
    )
    assert "unknown" in time_left(TimeLeft(expected_s=240, low_s=200, high_s=290, is_late=True))
    assert "not known yet" in time_left(None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.000812, "0.000812"), (3.2e-7, "3.20e-07"), (1.2345, "1.23"), (123.4, "123"), (0.05, "0.0500"),
        (45_678.0, "45,678"), (7.5e6, "7.50e+06"), (-0.25, "-0.250"), (None, MISSING), (math.nan, MISSING),
    ],
)  # fmt: skip
def test_numbers_of_unknown_size_keep_their_significant_digits(value: float | None, text: str) -> None:
    assert significant(value) == text


def test_shares_counts_and_changes_are_written_alike_everywhere() -> None:
    assert decimals(0.8225) == "0.82" and decimals(-0.001) == "0.00" and decimals(None) == MISSING
    assert signed(0.05) == "+0.05" and signed(-0.05) == "-0.05" and signed(None) == MISSING
    assert percent(0.61) == "61%" and percent(None) == MISSING
    assert integer(1234567) == "1,234,567" and integer(math.nan) == MISSING


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0:00"), (9.9, "0:09"), (187, "3:07"), (3787, "1:03:07")])
def test_the_stopwatch_shows_hours_only_where_there_are_any(seconds: float, text: str) -> None:
    assert stopwatch(seconds) == text


def test_control_characters_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[2Jb\x07c\r\nd\u202ee") == "a [2Jb c \nd e"


def test_identifiers_are_said_as_words() -> None:
    assert words("bad_call") == "bad call"
    assert [split_name(split) for split in EvaluationSplit] == ["held-out tasks", "unseen templates"]
