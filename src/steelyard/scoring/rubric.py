"""A value from weighted parts."""

import math
from collections.abc import Sequence

from steelyard.types import Record


class Part(Record, frozen=True, kw_only=True):
    """One thing that is judged; ``value`` from 0 (failed) to 1 (met)."""

    name: str
    weight: float
    value: float


def weigh(parts: Sequence[Part]) -> tuple[float, str]:
    """The weighted mean of ``parts`` in [0, 1], and one line that shows them.

    Raises:
        ValueError: there is no part, a weight is not positive, or a value lies outside [0, 1].
    """
    if not parts:
        raise ValueError("a rubric must have at least one part, got none")
    for part in parts:
        if not (math.isfinite(part.weight) and part.weight > 0):
            raise ValueError(f"part {part.name!r}: weight must be finite and > 0, got {part.weight}")
        if not 0 <= part.value <= 1:
            raise ValueError(f"part {part.name!r}: value must lie in [0, 1], got {part.value}")
    total = math.fsum(part.weight for part in parts)
    value = math.fsum(part.weight * part.value for part in parts) / total
    return min(1.0, value), " ".join(f"{part.name}={part.value:g}" for part in parts)
