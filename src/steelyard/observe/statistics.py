"""Small statistics for people: intervals, quantiles, moving means. Pure, without numpy."""

import math
from collections.abc import Sequence

import msgspec

Z_95 = 1.959963984540054
"""Two-sided 95% point of the standard normal distribution."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate and its bounds."""

    estimate: float
    low: float
    high: float


def share(part: float, whole: float) -> float | None:
    """``part / whole``, or None where ``whole`` is 0."""
    return part / whole if whole else None


def wilson_interval(num_success: int, num_trials: int, z: float = Z_95) -> Interval | None:
    """Score interval of a proportion; None without trials.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of the
    American Statistical Association 22 (1927), 209-212: all p with |p_hat - p| <= z sqrt(p (1 - p) / n), thus

        (p_hat + z^2 / 2n -+ z sqrt(p_hat (1 - p_hat) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Raises:
        ValueError: not ``0 <= num_success <= num_trials``.
    """
    if not 0 <= num_success <= num_trials:
        raise ValueError(f"num_success must be between 0 and num_trials ({num_trials}), got {num_success}")
    if num_trials == 0:
        return None
    estimate = num_success / num_trials
    scale = 1 + z * z / num_trials
    centre = (estimate + z * z / (2 * num_trials)) / scale
    half = z * math.sqrt(estimate * (1 - estimate) / num_trials + z * z / (4 * num_trials**2)) / scale
    # At 0 and n the bound is exact; rounding must not push it past the estimate.
    low = 0.0 if num_success == 0 else max(0.0, centre - half)
    high = 1.0 if num_success == num_trials else min(1.0, centre + half)
    return Interval(estimate=estimate, low=low, high=high)


class PairedGain(msgspec.Struct, frozen=True, kw_only=True):
    """What changed between two evaluations of the same tasks, in tasks: solved after less solved before.

    ``where_valid`` counts the tasks in whose episode every call was well formed before too. A gain there is no
    gain of form: the agent could say what it wanted, and now wants the right thing.
    """

    total: int
    where_valid: int

    @property
    def valid_share(self) -> float | None:
        """The share of the gain that is no gain of form; None where nothing was gained."""
        return share(self.where_valid, self.total) if self.total > 0 else None


def paired_gain(solved_before: str, valid_before: str, solved_after: str) -> PairedGain:
    """Compare two evaluations task by task; each text holds a 1 or a 0 for each task, in the same order.

    Raises:
        ValueError: they are not of the same length.
    """
    changes = [
        (int(after) - int(before), valid == "1")
        for before, valid, after in zip(solved_before, valid_before, solved_after, strict=True)
    ]
    return PairedGain(
        total=sum(change for change, _ in changes),
        where_valid=sum(change for change, was_valid in changes if was_valid),
    )


def difference_interval(before: Interval, after: Interval) -> Interval:
    """Interval of the gain from ``before`` to ``after``, from their two Wilson intervals.

    Source: R. G. Newcombe, "Interval estimation for the difference between independent proportions", Statistics in
    Medicine 17 (1998), 873-890, method 10. It treats the two as independent; where both were measured on
    the same tasks it is wider than need be, never narrower in the usual case of positive correlation.
    """
    gain = after.estimate - before.estimate
    down = math.hypot(after.estimate - after.low, before.high - before.estimate)
    up = math.hypot(after.high - after.estimate, before.estimate - before.low)
    return Interval(estimate=gain, low=gain - down, high=gain + up)


def weighted_quantile(values: Sequence[float], weights: Sequence[float], level: float) -> float | None:
    """The smallest value at or below which at least ``level`` of all weight lies; None where there is no weight.

    The inverse of the weighted empirical distribution function; with equal weights the nearest-rank quantile.

    Raises:
        ValueError: ``level`` is not in [0, 1], the lengths differ, or a weight is negative.
    """
    if not 0 <= level <= 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    if len(values) != len(weights):
        raise ValueError(f"values and weights must be equally many, got {len(values)} and {len(weights)}")
    if any(weight < 0 for weight in weights):
        raise ValueError(f"weights must be >= 0, got {min(weights)}")
    total = math.fsum(weights)
    if total == 0:
        return None
    pairs = sorted((value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0)
    reached = 0.0
    for value, weight in pairs:
        reached += weight
        # The slack absorbs the rounding of the running sum.
        if reached >= level * total * (1 - 1e-12):
            return value
    return pairs[-1][0]


def quantile(values: Sequence[float], level: float) -> float | None:
    """:func:`weighted_quantile` with equal weights."""
    return weighted_quantile(values, [1.0] * len(values), level)


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, or None of nothing."""
    return math.fsum(values) / len(values) if values else None


def moving_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """At each place the mean of the last ``window`` values up to it; missing values are left out, not counted as 0.

    Raises:
        ValueError: ``window`` is below 1.
    """
    if window < 1:
        raise ValueError(f"window must be >= 1, got {window}")
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        means.append(mean([value for value in values[max(0, end - window) : end] if value is not None]))
    return means


def standard_deviation(values: Sequence[float]) -> float:
    """Sample standard deviation (divisor n - 1); 0 for fewer than two values."""
    centre = mean(values)
    if centre is None or len(values) < 2:
        return 0.0
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))
