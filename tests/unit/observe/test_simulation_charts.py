"""Plots of a simulation: what they add up to."""

import pytest

from steelyard.observe.simulation_charts import Amount, time_unit


def test_an_amount_grows_in_straight_lines_and_stays_at_its_ends() -> None:
    amount = Amount([(1.0, 0.0), (3.0, 10.0), (5.0, 10.0)])
    assert [amount.at(at_s) for at_s in (0.0, 1.0, 2.0, 3.0, 4.0, 9.0)] == [0.0, 0.0, 5.0, 10.0, 10.0, 10.0]
    assert amount.rates([1.0, 2.0, 4.0]) == [5.0, 2.5]


@pytest.mark.parametrize(("makespan_s", "unit"), [(0.5, "s"), (299.0, "s"), (300.0, "min"), (1e5, "h")])
def test_the_unit_suits_the_length(makespan_s: float, unit: str) -> None:
    assert time_unit(makespan_s)[1] == unit
