"""What the work will be some steps from now, with how sure that is: trends carried on, shrunk towards no change.

A slope ``b`` with standard error ``e`` is evidence of drift as far as it exceeds its error. Against a prior of no
drift the estimate is shrunk by ``1 - (e / b) ** 2``, at least 0 (James, Stein, 1961, in its positive-part form), so
that noise moves nobody. The uncertainty is carried as three points of equal mean and variance (Gauss-Hermite quadrature
of order three): 0 and plus and minus ``sqrt(3)`` errors, weights 2/3, 1/6 and 1/6.
"""

import math

from steelyard.allocation.work_estimate import Growth
from steelyard.allocation.work_sketch import Trend, WorkSketch
from steelyard.types.record import Record

_MOST_LOG_GROWTH = math.log(2.0)
"""Nothing is forecast to more than double or halve: trends of real runs bend."""


class ForecastPoint(Record, frozen=True, kw_only=True):
    """One way that the work may go, and how probable it is."""

    growth: Growth
    weight: float


def forecast(sketch: WorkSketch, horizon_steps: float) -> tuple[ForecastPoint, ...]:
    """The work ``horizon_steps`` after what was seen, the most probable first; one point where there is no drift."""
    trends = {name: _shrunk(trend) for name, trend in sketch.trends.items()}
    if not any(slope for slope, _ in trends.values()):
        return (ForecastPoint(growth=Growth(), weight=1.0),)
    points = ((0.0, 2.0 / 3.0), (math.sqrt(3.0), 1.0 / 6.0), (-math.sqrt(3.0), 1.0 / 6.0))

    def factor(name: str, at: float) -> float:
        slope, error = trends.get(name, (0.0, 0.0))
        log_growth = (slope + at * error) * horizon_steps
        return math.exp(max(-_MOST_LOG_GROWTH, min(_MOST_LOG_GROWTH, log_growth)))

    return tuple(
        ForecastPoint(
            growth=Growth(
                turns=factor("num_turns", at),
                prompt=factor("prompt_tokens", at),
                generated=factor("generated_tokens", at),
                tool=factor("tool_s", at),
                context=factor("longest_context_tokens", at),
            ),
            weight=weight,
        )
        for at, weight in points
    )


def _shrunk(trend: Trend) -> tuple[float, float]:
    """Slope and error of what is left of a trend; 0 and 0 where it is noise."""
    if not math.isfinite(trend.error) or trend.slope == 0.0:
        return 0.0, 0.0
    kept = max(0.0, 1.0 - (trend.error / trend.slope) ** 2)
    return trend.slope * kept, trend.error if kept else 0.0
