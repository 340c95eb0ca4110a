"""A series as one line of block characters."""

import itertools
from collections.abc import Sequence

from steelyard.observe.statistics import mean

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None) -> str:
    """At most ``width`` characters; a longer series is cut into equal stretches and each shown by its mean.

    The scale runs from ``low`` to ``high``, by default the series' own bounds. A gap is a space.
    """
    if width < 1 or not values:
        return ""
    cells = _stretches(values, width)
    known = [cell for cell in cells if cell is not None]
    if not known:
        return " " * len(cells)
    bottom = min(known) if low is None else low
    top = max(known) if high is None else high
    return "".join(" " if cell is None else _block(cell, bottom, top) for cell in cells)


def _block(value: float, low: float, high: float) -> str:
    if high <= low:
        return _BLOCKS[3]
    level = int((value - low) / (high - low) * len(_BLOCKS))
    return _BLOCKS[min(max(level, 0), len(_BLOCKS) - 1)]


def _stretches(values: Sequence[float | None], width: int) -> list[float | None]:
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [
        mean([value for value in values[start:end] if value is not None]) for start, end in itertools.pairwise(edges)
    ]
