"""Scales and ticks of a plot: from numbers to places in the picture. Pure."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import msgspec

ScaleKind = Literal["linear", "log"]


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """A labelled place on an axis."""

    at: float
    label: str


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Maps ``low..high`` to pixels ``start..end``, linearly or by logarithm (then ``low`` > 0)."""

    low: float
    high: float
    start: float
    end: float
    kind: ScaleKind = "linear"

    def place(self, value: float) -> float:
        """Pixel of ``value``; values outside are put at the edge."""
        if self.kind == "log":
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + (self.end - self.start) * min(max(share, 0.0), 1.0), 2)


class Axes(msgspec.Struct, frozen=True, kw_only=True):
    """Both axes of a plot."""

    x: Scale
    y: Scale
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def round_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most ``most`` + 1 multiples of 1, 2 or 5 times a power of ten that cover ``low..high``.

    The first is <= ``low`` and the last >= ``high``, so that they can be the ends of the axis.
    """
    if not high > low:
        width = abs(low) or 1.0
        low, high = low - width / 2, high + width / 2
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * power
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= most:
            return [number * step for number in range(first, last + 1)]
    return [low, high]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that cover ``low..high``, with 2 and 5 times them where that leaves few enough."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    start = max((index for index, tick in enumerate(ticks) if tick <= low * (1 + 1e-9)), default=0)
    end = min((index for index, tick in enumerate(ticks) if tick >= high * (1 - 1e-9)), default=len(ticks) - 1)
    # Equal values on a tick still need an axis with two ends.
    return ticks[start : max(end, start + 1) + 1]


def value_scale(
    values: Sequence[float], start: float, end: float, *, kind: ScaleKind = "linear", bounds: tuple[float, float] | None
) -> tuple[Scale, tuple[Tick, ...]]:
    """The value axis for ``values`` between pixels ``start`` and ``end``, with its ticks.

    ``bounds`` fixes the axis; without them it covers the values, and 0 where they are not far from it.
    """
    if kind == "log" and values and min(values) > 0:
        numbers = log_ticks(min(values), max(values))
    elif bounds is not None:
        numbers = round_ticks(*bounds)
    else:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if 0 < low < high * 0.6:
            low = 0.0
        numbers = round_ticks(low, high)
        kind = "linear"
    scale = Scale(low=numbers[0], high=numbers[-1], start=start, end=end, kind=kind)
    return scale, tuple(Tick(at=scale.place(number), label=label) for number, label in _labels(numbers))


def place_scale(numbers: Sequence[float], start: float, end: float) -> tuple[Scale, tuple[Tick, ...]]:
    """The axis of steps or minutes: it ends where the numbers end, with ticks at whole round numbers within."""
    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    if high == low:
        high = low + 1
    scale = Scale(low=low, high=high, start=start, end=end)
    ticks = [tick for tick in round_ticks(low, high, most=6) if low - 1e-9 <= tick <= high + 1e-9]
    if high - low < 6:
        ticks = [tick for tick in ticks if float(tick).is_integer()]
    return scale, tuple(Tick(at=scale.place(number), label=label) for number, label in _labels(ticks))


def _labels(numbers: Sequence[float]) -> list[tuple[float, str]]:
    """Labels with as many decimals as tell neighbours apart."""
    largest = max((abs(number) for number in numbers), default=0.0)
    if largest >= 10_000:
        return [(number, f"{number / 1000:g}k") for number in numbers]
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    smallest = min((step for step in steps if step > 0), default=1.0)
    if largest and largest < 1e-3:
        return [(number, "0" if number == 0 else f"{number:.0e}".replace("e-0", "e-")) for number in numbers]
    digits = min(6, max(0, math.ceil(-math.log10(smallest) - 1e-9)))
    return [(number, f"{number + 0.0:,.{digits}f}") for number in numbers]
