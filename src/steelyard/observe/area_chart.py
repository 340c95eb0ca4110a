"""Areas upon each other over time: what a fixed number of things is doing, as shares of a whole."""

import itertools
from collections.abc import Sequence

import msgspec

from steelyard.observe.axes import Axes, place_scale, value_scale
from steelyard.observe.charts import Chart, Frame, Hover, LegendEntry, Shape
from steelyard.observe.wording import significant

WIDTH, HEIGHT = 860, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34


class Area(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, a value for each stretch of time. ``is_pale`` draws it lightly, for what is idle."""

    name: str
    values: tuple[float, ...]
    colour: int
    is_pale: bool = False

    @property
    def css(self) -> str:
        """The class that colours it."""
        return f"area {'pale ' if self.is_pale else ''}c{self.colour}"


def area_chart(frame: Frame, edges: Sequence[float], areas: Sequence[Area], whole: float) -> Chart | None:
    """Layers from 0 up to ``whole``, each constant between two ``edges``; None where there is no stretch of time.

    Args:
        edges: of the stretches, one more than each layer has values.
    """
    areas = [area for area in areas if any(area.values)]
    if len(edges) < 2 or not areas:
        return None
    x, x_ticks = place_scale(edges, _LEFT, WIDTH - _RIGHT)
    y, y_ticks = value_scale([0.0, whole], HEIGHT - _BOTTOM, _TOP, bounds=(0.0, whole))
    axes = Axes(x=x, y=y, x_ticks=x_ticks, y_ticks=y_ticks)
    floors = [0.0] * (len(edges) - 1)
    shapes = list[Shape]()
    for area in areas:
        tops = [floor + value for floor, value in zip(floors, area.values, strict=True)]
        shapes.append(Shape(path=_between(axes, edges, floors, tops), css=area.css))
        floors = tops
    return Chart(
        title=frame.title,
        note=frame.note,
        alt=f"{frame.title}. " + "; ".join(f"{area.name}: {_mean(edges, area):.1f} on average" for area in areas) + ".",
        height=HEIGHT,
        x_name=frame.x_name,
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        shapes=tuple(shapes),
        hovers=_hovers(axes, edges, areas, frame.x_name),
        legend=tuple(LegendEntry(name=area.name, css=area.css) for area in areas),
        width=WIDTH,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=_TOP,
        bottom=HEIGHT - _BOTTOM,
    )


def _between(axes: Axes, edges: Sequence[float], floors: Sequence[float], tops: Sequence[float]) -> str:
    """Along the tops to the right, and back along the floors, in steps."""
    places = [axes.x.place(edge) for edge in edges]
    there = "".join(f"V{axes.y.place(top):g}H{right:g}" for top, right in zip(tops, places[1:], strict=True))
    back = "".join(
        f"V{axes.y.place(floor):g}H{left:g}"
        for floor, left in zip(reversed(floors), reversed(places[:-1]), strict=True)
    )
    return f"M{places[0]:g} {axes.y.place(floors[0]):g}{there}{back}z"


def _hovers(axes: Axes, edges: Sequence[float], areas: Sequence[Area], x_name: str) -> tuple[Hover, ...]:
    hovers = list[Hover]()
    for index in range(len(edges) - 1):
        left, right = axes.x.place(edges[index]), axes.x.place(edges[index + 1])
        told = ", ".join(f"{area.name} {significant(area.values[index])}" for area in areas)
        text = f"{x_name} {significant(edges[index])}: {told}"
        hovers.append(Hover(x=left, width=round(max(right - left, 0.01), 2), text=text))
    return tuple(hovers)


def _mean(edges: Sequence[float], area: Area) -> float:
    widths = [right - left for left, right in itertools.pairwise(edges)]
    return sum(width * value for width, value in zip(widths, area.values, strict=True)) / sum(widths)
