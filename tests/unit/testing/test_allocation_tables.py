"""Figures and tables over policies, from rows of runs."""

import pytest

from steelyard.testing.allocation_tables import Found, Kinds, figures, geometric, interval, ratios, tables

FLOORS = {
    "min_planner_of_oracle": 0.9,
    "min_steady_share": 0.85,
    "min_drifting_share": 0.75,
    "min_drift_over_fixed": 1.25,
    "min_swe48_over_fixed": 1.1,
    "min_over_wrong": 3.0,
    "min_over_baselines": 1.1,
    "baseline_is_near_above": 0.86,
    "min_share_where_near": 0.95,
    "min_over_fixed": 0.98,
}


def row(makespan_s: float) -> dict[str, float]:
    return {"makespan_s": makespan_s, "bound_s": 50.0}


def found(planner_s: float, queue_s: float) -> Found:
    rows = {"given": row(400.0), "fixed": row(100.0), "queue": row(queue_s), "planner": row(planner_s)}
    return {"drift": {"1": rows, "2": {**rows, "planner": row(planner_s * 1.5)}}}


def test_an_interval_is_that_of_student_and_of_one_value_has_no_width() -> None:
    assert interval([2.0]) == (2.0, 0.0)
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / 3**0.5)
    assert geometric([1.0, 4.0]) == pytest.approx(2.0)


def test_ratios_are_taken_on_the_same_draws_and_where_both_were_played() -> None:
    seeds = found(80.0, 100.0)["drift"]
    assert ratios(seeds, "planner", "fixed") == [1.25, pytest.approx(100 / 120)]
    assert ratios(seeds, "planner", "oracle") == []


def test_the_worst_scenario_counts_and_what_was_not_played_is_missed() -> None:
    kinds = Kinds(steady=(), drifting=("drift",))
    verdicts = {one.name: one for one in figures(found(40.0, 60.0), FLOORS, ("queue", "planner"), ["drift"], kinds)}
    assert set(verdicts) == {
        "min_planner_of_oracle",
        "min_drifting_share",
        "min_drift_over_fixed",
        "min_over_fixed",
        "min_over_queue",
    }
    assert verdicts["min_planner_of_oracle"].line() == "min_planner_of_oracle: not played, floor 0.9: MISSED"
    assert verdicts["min_over_fixed"].figure == pytest.approx((2.5 + 100 / 60) / 2)
    assert verdicts["min_over_fixed"].line().endswith("reached (drift)")
    assert verdicts["min_over_queue"].figure == pytest.approx((1.5 * 1.0) ** 0.5)


def test_where_a_baseline_is_near_the_bound_the_share_of_the_bound_is_asked_for() -> None:
    kinds = Kinds(steady=(), drifting=())
    near = {one.name: one for one in figures(found(51.0, 55.0), FLOORS, ("queue",), ["drift"], kinds)}
    assert "min_over_queue" not in near
    share = near["min_share_where_queue_is_near"]
    assert share.figure == pytest.approx((50 / 51 + 50 / 76.5) / 2)
    assert not share.is_reached


def test_tables_have_a_row_for_each_scenario_and_a_dash_where_nothing_was_played() -> None:
    text = tables(found(80.0, 100.0), ("queue", "planner"), ["planner, no feedback"])
    lines = text.splitlines()
    assert "| `drift` | 0.125 ± 0.000 | 0.500 ± 0.000 | 0.500 ± 0.000 | 0.521 ± 1.324 | - |" in lines
    assert "| geometric mean | - | 1.021 |" in lines
