"""Outages and failures as records: when tools end, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.allocation.snapshot import Role
from steelyard.errors import InputError
from steelyard.sim.faults import DeviceFailure, FailureRate, Faults, ToolOutage

STILL = Faults(outages=(ToolOutage(begins_s=10.0, lasts_s=5.0),))
SLOW = Faults(outages=(ToolOutage(begins_s=10.0, lasts_s=5.0, slowdown=5.0),))


@pytest.mark.parametrize(
    ("faults", "begins_s", "work_s", "ends_s"),
    [
        (STILL, 0.0, 10.0, 10.0),
        (STILL, 8.0, 4.0, 17.0),
        (STILL, 12.0, 4.0, 19.0),
        (STILL, 15.0, 4.0, 19.0),
        (SLOW, 8.0, 2.5, 12.5),
        (SLOW, 8.0, 4.0, 16.0),
        (SLOW, 20.0, 4.0, 24.0),
        (Faults(outages=(*STILL.outages, ToolOutage(begins_s=16.0, lasts_s=1.0))), 9.0, 3.0, 18.0),
    ],
)
def test_a_tool_call_ends_once_it_has_had_its_time(
    faults: Faults, begins_s: float, work_s: float, ends_s: float
) -> None:
    assert faults.tool_ends_s(begins_s, work_s) == pytest.approx(ends_s)


@given(st.floats(0, 30), st.floats(0, 30), st.floats(0, 30), st.floats(0, 30), st.sampled_from([STILL, SLOW]))
def test_calls_are_never_sooner_done_for_an_outage_and_never_overtake_each_other(
    begins_s: float, later_s: float, work_s: float, more_s: float, faults: Faults
) -> None:
    ends_s = faults.tool_ends_s(begins_s, work_s)
    assert ends_s >= begins_s + work_s - 1e-9
    assert faults.tool_ends_s(begins_s + later_s, work_s + more_s) >= ends_s - 1e-9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToolOutage(begins_s=-1.0, lasts_s=1.0), r"outages\.begins_s must be finite and >= 0, got -1\.0"),
        (lambda: ToolOutage(begins_s=0.0, lasts_s=0.0), r"outages\.lasts_s must be finite and > 0, got 0\.0"),
        (lambda: ToolOutage(begins_s=0.0, lasts_s=1.0, slowdown=0.5), r"outages\.slowdown must be finite and >= 1, or"),
        (lambda: DeviceFailure(at_s=float("nan"), role=Role.TRAIN), r"failures\.at_s must be finite and >= 0, got nan"),
        (lambda: DeviceFailure(at_s=0.0, role=Role.TRAIN, num_devices=0), r"failures\.num_devices must be >= 1, got 0"),
        (
            lambda: DeviceFailure(at_s=0.0, role=Role.TRAIN, returns_after_s=-1.0),
            r"failures\.returns_after_s must be finite and >= 0, got -1\.0",
        ),
        (lambda: FailureRate(mean_between_s=0.0), r"failure_rate\.mean_between_s must be finite and > 0, got 0\.0"),
        (
            lambda: Faults(outages=(*STILL.outages, ToolOutage(begins_s=12.0, lasts_s=1.0))),
            r"outages\[1\]\.begins_s must be >= 15\.0, the end of the one before, got 12\.0",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_field(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
