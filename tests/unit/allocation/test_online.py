"""Online calibration: robust, bounded, forgetting, whatever is observed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.allocation.online import OnlineCalibration, OnlineRules
from steelyard.errors import InputError

ANY_S = st.floats(allow_nan=True, allow_infinity=True)
SECONDS = st.floats(min_value=1e-6, max_value=1e6)
RULES = st.builds(
    OnlineRules,
    half_life=st.floats(min_value=1.0, max_value=100.0),
    clip=st.floats(min_value=1.1, max_value=4.0),
    limit=st.floats(min_value=1.5, max_value=100.0),
)
PAIRS = st.lists(st.tuples(ANY_S, ANY_S), max_size=60)


def after(rules: OnlineRules, pairs: list[tuple[float, float]]) -> OnlineCalibration:
    found = OnlineCalibration(rules=rules)
    for predicted_s, observed_s in pairs:
        found = found.observed("decode", predicted_s, observed_s)
    return found


@given(RULES, PAIRS)
def test_no_factor_leaves_its_limits_whatever_is_observed(rules: OnlineRules, pairs: list[tuple[float, float]]) -> None:
    known = after(rules, pairs).of("decode")
    assert 1 / rules.limit * (1 - 1e-9) <= known.factor <= rules.limit * (1 + 1e-9)
    assert 0.0 <= known.error_frac <= rules.clip - 1 + 1e-9


@given(RULES, PAIRS, st.tuples(ANY_S, ANY_S))
def test_one_observation_moves_a_factor_by_no_more_than_the_clip(
    rules: OnlineRules, pairs: list[tuple[float, float]], last: tuple[float, float]
) -> None:
    before = after(rules, pairs)
    then = before.observed("decode", *last)
    ratio = then.of("decode").factor / before.of("decode").factor
    assert 1 / rules.clip * (1 - 1e-9) <= ratio <= rules.clip * (1 + 1e-9)


@given(PAIRS, st.floats(min_value=0.2, max_value=5.0), SECONDS)
def test_the_past_is_forgotten_and_the_present_found(
    pairs: list[tuple[float, float]], truth: float, predicted_s: float
) -> None:
    rules = OnlineRules(half_life=5.0)
    found = after(rules, pairs)
    for _ in range(160):
        found = found.observed("decode", predicted_s, predicted_s * truth)
    assert found.corrected_s("decode", predicted_s) == pytest.approx(predicted_s * truth, rel=0.01)
    assert found.of("decode").error_frac < 0.01


@given(st.floats(min_value=0.5, max_value=2.0), st.integers(min_value=0, max_value=39), SECONDS)
def test_one_run_that_stood_still_hardly_counts(truth: float, place: int, stood_s: float) -> None:
    rules = OnlineRules(half_life=20.0)
    pairs = [(1.0, truth)] * 40
    pairs[place] = (1.0, truth * (1.0 + stood_s))
    assert after(rules, pairs).of("decode").factor == pytest.approx(truth, rel=0.45 if place == 0 else 0.25)


@given(PAIRS)
def test_terms_do_not_touch_each_other(pairs: list[tuple[float, float]]) -> None:
    found = after(OnlineRules(), pairs)
    assert found.corrected_s("prefill", 3.0) == 3.0
    assert found.of("prefill").num_observed == 0


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=30), st.floats(min_value=1e-3, max_value=1e3))
def test_units_do_not_matter(pairs: list[tuple[float, float]], unit: float) -> None:
    scaled = [(predicted_s * unit, observed_s * unit) for predicted_s, observed_s in pairs]
    rules = OnlineRules()
    assert after(rules, scaled).of("decode").log_factor == pytest.approx(
        after(rules, pairs).of("decode").log_factor, abs=1e-9
    )


def test_a_pair_that_is_no_pair_of_durations_says_nothing() -> None:
    found = OnlineCalibration()
    for bad in (0.0, -1.0, math.nan, math.inf):
        assert found.observed("decode", bad, 1.0) is found
        assert found.observed("decode", 1.0, bad) is found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": 1.0}, "rules.clip must be a finite ratio > 1, got 1.0"),
        ({"limit": math.inf}, "rules.limit must be a finite ratio > 1, got inf"),
        ({"half_life": 0.0}, "rules.half_life must be finite and > 0, got 0.0"),
    ],
)
def test_rules_that_cannot_be_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        OnlineRules(**changes)


def test_each_term_says_its_factor_and_its_error() -> None:
    found = OnlineCalibration().observed("training", 2.0, 3.0).observed("calls", 1.0, 1.0)
    calls, training = found.errors()
    assert (calls.term, calls.factor, calls.error_frac, calls.num_observed) == ("calls", 1.0, 0.0, 1)
    assert (training.term, training.num_observed) == ("training", 1)
    assert training.factor == pytest.approx(1.5)
