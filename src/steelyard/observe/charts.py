"""Plots as plain geometry that a template draws as inline SVG.

Drawn by hand and not by a plotting library for three reasons: the page's own colours apply (light, dark and
print from one picture), the text stays text, and a report needs no more than the base install.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from steelyard.observe.axes import Axes, Scale, ScaleKind, Tick, place_scale, value_scale
from steelyard.observe.rows import finite
from steelyard.observe.statistics import mean
from steelyard.observe.wording import significant

WIDTH, HEIGHT = 400, 214
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34
_MAX_POINTS = 240
_MAX_HOVERS = 120

Look = Literal["line", "faint", "bar"]
Merge = Literal["mean", "max"]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Values over the chart's places; None and not finite numbers are gaps. ``colour`` is 0 to 6.

    ``merge`` says what one point shows where a long series has to be thinned out.
    """

    name: str
    values: tuple[float | None, ...]
    colour: int = 0
    look: Look = "line"
    merge: Merge = "mean"
    is_hidden_in_legend: bool = False


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """An SVG path with the class that colours it."""

    path: str
    css: str


class Hover(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the plot and the numbers that it shows under the pointer."""

    x: float
    width: float
    text: str


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """A line of text inside the plot."""

    x: float
    y: float
    text: str


class LegendEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A name and the class of its swatch."""

    name: str
    css: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """All that is drawn. ``alt`` says in words what the picture shows."""

    title: str
    alt: str
    height: int
    x_name: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    shapes: tuple[Shape, ...]
    note: str = ""
    hovers: tuple[Hover, ...] = ()
    labels: tuple[Label, ...] = ()
    legend: tuple[LegendEntry, ...] = ()
    width: int = WIDTH
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What a chart is called and how its axes run. ``bounds`` fixes the value axis; ``from_zero`` begins it at 0."""

    title: str
    x_name: str = "step"
    note: str = ""
    scale: ScaleKind = "linear"
    bounds: tuple[float, float] | None = None
    from_zero: bool = False


def line_chart(frame: Frame, places: Sequence[float], series: Sequence[Series]) -> Chart | None:
    """Lines over ``places``; None where no series has a value."""
    places, series = _thinned(places, [_finite(one) for one in series])
    known = [value for one in series for value in one.values if value is not None]
    if not known:
        return None
    x, x_ticks = place_scale(places, _LEFT, WIDTH - _RIGHT)
    shown = [0.0, *known] if frame.from_zero else known
    y, y_ticks = value_scale(shown, HEIGHT - _BOTTOM, _TOP, kind=frame.scale, bounds=frame.bounds)
    axes = Axes(x=x, y=y, x_ticks=x_ticks, y_ticks=y_ticks)
    shapes = tuple(Shape(path=_line(axes, places, one.values), css=_css(one)) for one in series)
    return _chart(frame, axes, shapes, series, places)


def stacked_chart(frame: Frame, places: Sequence[float], parts: Sequence[Series], whole: Series) -> Chart | None:
    """Bars of ``parts`` upon each other, with ``whole`` as a line; None without values."""
    *parts, whole = [_finite(one) for one in (*parts, whole)]
    places, thinned = _thinned(places, [*parts, whole])
    parts, whole = thinned[:-1], thinned[-1]
    sums = [sum(one.values[index] or 0.0 for one in parts) for index in range(len(places))]
    known = [*sums, *(value for value in whole.values if value is not None)]
    if not known:
        return None
    slot = (WIDTH - _RIGHT - _LEFT) / len(places)
    x, x_ticks = place_scale(places, _LEFT + slot / 2, WIDTH - _RIGHT - slot / 2)
    y, y_ticks = value_scale([0.0, *known], HEIGHT - _BOTTOM, _TOP, bounds=None)
    axes = Axes(x=x, y=y, x_ticks=x_ticks, y_ticks=y_ticks)
    floors = [0.0] * len(places)
    shapes = []
    for part in parts:
        shapes.append(Shape(path=_bars(axes, places, floors, part.values), css=_css(part)))
        floors = [floor + (value or 0.0) for floor, value in zip(floors, part.values, strict=True)]
    shapes.append(Shape(path=_line(axes, places, whole.values), css=_css(whole)))
    return _chart(frame, axes, tuple(shapes), [*parts, whole], places)


def _chart(
    frame: Frame, axes: Axes, shapes: tuple[Shape, ...], series: Sequence[Series], places: Sequence[float]
) -> Chart:
    named = [one for one in series if not one.is_hidden_in_legend]
    return Chart(
        title=frame.title,
        note=frame.note,
        alt=f"{frame.title}. " + "; ".join(_told(one, places, frame.x_name) for one in named) + ".",
        height=HEIGHT,
        x_name=frame.x_name,
        x_ticks=axes.x_ticks,
        y_ticks=axes.y_ticks,
        shapes=shapes,
        hovers=_hovers(axes.x, places, series, frame.x_name),
        legend=tuple(LegendEntry(name=one.name, css=_css(one)) for one in named),
    )


def _css(series: Series) -> str:
    return f"{series.look} c{series.colour}"


def _finite(series: Series) -> Series:
    return msgspec.structs.replace(series, values=tuple(finite(value) for value in series.values))


def _thinned(places: Sequence[float], series: Sequence[Series]) -> tuple[list[float], list[Series]]:
    """At most 240 places; each new one stands for an equal stretch of old ones."""
    stretch = -(-len(places) // _MAX_POINTS)
    if stretch <= 1:
        return list(places), list(series)
    starts = range(0, len(places), stretch)
    return [places[start] for start in starts], [
        msgspec.structs.replace(
            one, values=tuple(_merged(one.values[start : start + stretch], one.merge) for start in starts)
        )
        for one in series
    ]


def _merged(values: Sequence[float | None], how: Merge) -> float | None:
    known = [value for value in values if value is not None]
    return max(known, default=None) if how == "max" else mean(known)


def _line(axes: Axes, places: Sequence[float], values: Sequence[float | None]) -> str:
    """A path with a gap for each missing value; a lone value is a dot (a line of no length with round ends)."""
    pieces: list[str] = []
    is_open = False
    for index, (place, value) in enumerate(zip(places, values, strict=True)):
        if value is None:
            is_open = False
            continue
        pieces.append(f"{'L' if is_open else 'M'}{axes.x.place(place):g} {axes.y.place(value):g}")
        is_last = index + 1 == len(values) or values[index + 1] is None
        if is_last and not is_open:
            pieces.append("h.01")
        is_open = True
    return "".join(pieces)


def _bars(axes: Axes, places: Sequence[float], floors: Sequence[float], values: Sequence[float | None]) -> str:
    width = round(max((WIDTH - _RIGHT - _LEFT) / len(places) * 0.86, 0.5), 2)
    pieces = []
    for place, floor, value in zip(places, floors, values, strict=True):
        if not value:
            continue
        bottom, top = axes.y.place(floor), axes.y.place(floor + value)
        pieces.append(f"M{axes.x.place(place) - width / 2:.2f} {top:g}h{width:g}V{bottom:g}h{-width:g}z")
    return "".join(pieces)


def _hovers(x: Scale, places: Sequence[float], series: Sequence[Series], x_name: str) -> tuple[Hover, ...]:
    stride = -(-len(places) // _MAX_HOVERS)
    centres = [x.place(place) for place in places]
    hovers = []
    for index in range(0, len(places), stride):
        following = centres[min(index + stride, len(places) - 1)]
        width = following - centres[index] or (WIDTH - _RIGHT - _LEFT) / max(1, len(places))
        told = [f"{one.name} {significant(one.values[index])}" for one in series if one.values[index] is not None]
        text = f"{x_name} {places[index]:g}: " + ", ".join(told)
        hovers.append(Hover(x=round(centres[index] - width / 2, 2), width=round(width, 2), text=text))
    return tuple(hovers)


def _told(series: Series, places: Sequence[float], x_name: str) -> str:
    known = [(place, value) for place, value in zip(places, series.values, strict=True) if value is not None]
    if not known:
        return f"{series.name}: no values"
    (first_place, first), (last_place, last) = known[0], known[-1]
    if len(known) == 1:
        return f"{series.name}: {significant(first)} at {x_name} {first_place:g}"
    low, high = min(value for _, value in known), max(value for _, value in known)
    return (
        f"{series.name}: {significant(first)} at {x_name} {first_place:g}, "
        f"{significant(last)} at {x_name} {last_place:g}, between {significant(low)} and {significant(high)}"
    )
