"""The plot of shares before and after with their intervals."""

from collections.abc import Sequence

import msgspec

from steelyard.observe.axes import Scale, Tick
from steelyard.observe.charts import WIDTH, Chart, Label, LegendEntry, Shape
from steelyard.observe.statistics import Interval
from steelyard.observe.wording import decimals

_MARGIN = 14
_TOP = 6
_ROW_HEIGHT = 44
_BELOW = 34


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an interval chart."""

    name: str
    before: Interval | None
    after: Interval | None


def interval_chart(title: str, comparisons: Sequence[Comparison]) -> Chart | None:
    """Shares before and after with their intervals, one line for each comparison; None without any."""
    comparisons = [one for one in comparisons if one.before or one.after]
    if not comparisons:
        return None
    left, right = _MARGIN, WIDTH - _MARGIN
    bottom = _TOP + _ROW_HEIGHT * len(comparisons)
    x = Scale(low=0.0, high=1.0, start=left, end=right)
    shapes: list[Shape] = []
    labels = []
    for row, one in enumerate(comparisons):
        y = _TOP + _ROW_HEIGHT * row + 31
        labels.append(Label(x=left, y=y - 15, text=one.name))
        if one.before and one.after:
            path = f"M{x.place(one.before.estimate)} {y}H{x.place(one.after.estimate)}"
            shapes.append(Shape(path=path, css="link"))
        for interval, css in ((one.before, "before"), (one.after, "after")):
            shapes += _whisker(x, y, interval, css) if interval else []
    ticks = tuple(Tick(at=x.place(number / 5), label=f"{number / 5:.1f}") for number in range(6))
    return Chart(
        title=title,
        alt=f"{title}. " + "; ".join(_compared(one) for one in comparisons) + ".",
        height=bottom + _BELOW,
        x_name="share of tasks solved",
        x_ticks=ticks,
        y_ticks=(),
        shapes=tuple(shapes),
        labels=tuple(labels),
        legend=(LegendEntry(name="before", css="before"), LegendEntry(name="after", css="after")),
        left=left,
        right=right,
        top=_TOP,
        bottom=bottom,
    )


def _whisker(x: Scale, y: float, interval: Interval, css: str) -> list[Shape]:
    low, high, centre = x.place(interval.low), x.place(interval.high), x.place(interval.estimate)
    ends = f"M{low:g} {y - 4:g}v8M{high:g} {y - 4:g}v8M{low:g} {y:g}H{high:g}"
    circle = f"M{centre - 5:g} {y:g}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z"
    return [Shape(path=ends, css=f"whisker {css}"), Shape(path=circle, css=f"dot {css}")]


def _compared(one: Comparison) -> str:
    told = [
        f"{label} {decimals(interval.estimate)} ({decimals(interval.low)} to {decimals(interval.high)})"
        for label, interval in (("before", one.before), ("after", one.after))
        if interval
    ]
    return f"{one.name}: {', '.join(told)}"
