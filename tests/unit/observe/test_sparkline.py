"""Series as block characters."""

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.observe.sparkline import sparkline


def test_a_rising_series_rises_over_all_blocks() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"


def test_a_gap_is_a_space_and_a_flat_series_is_level() -> None:
    assert sparkline([1.0, None, 1.0], 8) == "▄ ▄"
    assert sparkline([None, None], 8) == "  "


def test_a_fixed_scale_is_kept_to() -> None:
    assert sparkline([0.5, 2.0, -1.0], 8, 0.0, 1.0) == "▅█▁"


def test_nothing_and_no_room_give_nothing() -> None:
    assert sparkline([], 8) == "" and sparkline([1.0], 0) == ""


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(1, 60))
def test_it_is_never_wider_than_asked_and_uses_the_room_there_is(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)
