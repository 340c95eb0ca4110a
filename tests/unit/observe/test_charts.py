"""Plots as geometry: what is drawn, where, and what it says."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.observe.charts import HEIGHT, WIDTH, Chart, Frame, Series, line_chart, stacked_chart

FRAME = Frame(title="Success")


def drawn(chart: Chart | None) -> Chart:
    assert chart is not None
    return chart


def series(*values: float | None, name: str = "success", **more: object) -> Series:
    return Series(name=name, values=values, **more)  # type: ignore[arg-type]


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def test_a_line_goes_through_its_values() -> None:
    chart = drawn(line_chart(FRAME, [0, 1, 2], [series(0.0, 0.5, 1.0)]))
    assert points(chart.shapes[0].path) == [
        (chart.left, chart.bottom),
        ((chart.left + chart.right) / 2, (chart.top + chart.bottom) / 2),
        (chart.right, chart.top),
    ]


def test_a_gap_breaks_the_line_and_a_lone_value_is_a_dot() -> None:
    chart = drawn(line_chart(FRAME, [0, 1, 2, 3, 4], [series(0.1, 0.2, None, 0.4, math.nan)]))
    assert re.sub(r"[\d. ]+", "", chart.shapes[0].path.replace("h.01", "h")) == "MLMh"


def test_there_is_no_chart_without_values() -> None:
    assert line_chart(FRAME, [], [series()]) is None
    assert line_chart(FRAME, [0.0, 1.0], [series(None, math.inf)]) is None
    assert stacked_chart(FRAME, [], [series()], series()) is None


def test_the_alternative_text_says_where_a_series_began_and_ended_and_its_bounds() -> None:
    chart = drawn(line_chart(FRAME, [0, 1, 2], [series(0.36, 0.9, 0.82)]))
    assert chart.alt == "Success. success: 0.360 at step 0, 0.820 at step 2, between 0.360 and 0.900."
    single = drawn(line_chart(FRAME, [7], [series(0.5), series(None, name="first try")]))
    assert single.alt == "Success. success: 0.500 at step 7; first try: no values."


def test_each_step_tells_its_numbers_under_the_pointer() -> None:
    chart = drawn(line_chart(FRAME, [0, 1], [series(0.25, 0.5), series(None, 3.0, name="reward")]))
    assert [hover.text for hover in chart.hovers] == ["step 0: success 0.250", "step 1: success 0.500, reward 3.00"]


def test_a_hidden_series_is_drawn_but_not_in_the_legend() -> None:
    faint = series(0.1, 0.2, name="raw", look="faint", is_hidden_in_legend=True)
    chart = drawn(line_chart(FRAME, [0, 1], [faint, series(0.1, 0.15)]))
    assert [entry.name for entry in chart.legend] == ["success"] and len(chart.shapes) == 2
    assert "raw" not in chart.alt


def test_bars_stand_upon_each_other() -> None:
    parts = [series(2.0, name="wait", look="bar"), series(3.0, name="train", look="bar")]
    chart = drawn(stacked_chart(FRAME, [0], parts, series(10.0, name="whole")))
    ends = [re.findall(r"M[\d.]+ ([\d.]+)h[\d.]+V([\d.]+)", shape.path)[0] for shape in chart.shapes[:2]]
    (wait_top, wait_bottom), (train_top, train_bottom) = ends
    assert float(wait_bottom) == chart.bottom and wait_top == train_bottom
    assert chart.bottom - float(train_top) == pytest.approx((chart.bottom - chart.top) / 2)


def test_a_part_that_took_no_time_has_no_bar() -> None:
    parts = [series(0.0, None, name="checkpoint", look="bar"), series(1.0, 2.0, name="train", look="bar")]
    chart = drawn(stacked_chart(FRAME, [0, 1], parts, series(1.0, 2.0, name="whole")))
    assert chart.shapes[0].path == "" and chart.shapes[1].path.count("z") == 2


def test_a_long_run_is_thinned_by_mean_or_by_maximum() -> None:
    values = [1.0 if step % 10 == 9 else 0.0 for step in range(2400)]
    steps = [float(step) for step in range(2400)]
    by_mean = drawn(line_chart(FRAME, steps, [series(*values)]))
    by_max = drawn(line_chart(FRAME, steps, [series(*values, merge="max")]))
    assert len(points(by_mean.shapes[0].path)) == 240 and len(by_mean.hovers) <= 120
    assert by_mean.hovers[0].text == "step 0: success 0.100" and by_max.hovers[0].text == "step 0: success 1.00"


@settings(deadline=None)
@given(st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=500))
def test_whatever_the_values_all_is_drawn_inside_the_picture(values: list[float | None]) -> None:
    chart = line_chart(Frame(title="Loss"), [float(step) for step in range(len(values))], [series(*values)])
    known = [value for value in values if value is not None and math.isfinite(value)]
    assert (chart is None) == (not known)
    if chart is None:
        return
    for x, y in points(chart.shapes[0].path):
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
    for hover in chart.hovers:
        assert hover.width > 0 and 0 <= hover.x + hover.width / 2 <= WIDTH
    assert "nan" not in repr(chart) and "inf" not in repr(chart)
