"""The cost model corrected while a run goes on, from what it predicted and what was observed.

Each term has one factor, a running mean of the logarithms of observed over predicted:

- *robust*: an observation counts at most ``clip`` away from the factor as it is (the bounded score of Huber's
  M-estimator, 1964), so a step that stood still for an hour moves it as little as one that was a bit slow;
- *bounded*: it never leaves ``1 / limit .. limit``: what is further off is no miscalibration, but a fault to be looked
  at;
- *forgetting*: after ``half_life`` observations the past counts half (the first ones are a plain mean).

It knows its own error: the running mean of what the corrected prediction was off by, before it learnt.
"""

import math
from collections.abc import Mapping

import msgspec

from steelyard.errors import InputError
from steelyard.types.record import Record


class OnlineRules(Record, frozen=True, kw_only=True):
    """How factors are learnt. ``clip`` and ``limit`` are ratios above 1, ``half_life`` a number of observations."""

    half_life: float = 20.0
    clip: float = 1.5
    limit: float = 10.0

    def __post_init__(self) -> None:
        for field in ("clip", "limit"):
            if not 1.0 < getattr(self, field) < math.inf:
                raise InputError(f"rules.{field} must be a finite ratio > 1, got {getattr(self, field)}")
        if not 0.0 < self.half_life < math.inf:
            raise InputError(f"rules.half_life must be finite and > 0, got {self.half_life}")


class OnlineFactor(Record, frozen=True, kw_only=True):
    """What is known of one term.

    Attributes:
        log_factor: of observed over predicted.
        log_error: mean size of the logarithm of observed over corrected prediction.
        num_observed: observations that counted.
    """

    log_factor: float = 0.0
    log_error: float = 0.0
    num_observed: int = 0

    @property
    def factor(self) -> float:
        """By what a prediction is multiplied."""
        return math.exp(self.log_factor)

    @property
    def error_frac(self) -> float:
        """What corrected predictions are off by, typically: 0.1 is a tenth."""
        return math.expm1(self.log_error)


class OnlineError(Record, frozen=True, kw_only=True):
    """A term as it is told: observed is ``factor`` times predicted, give or take ``error_frac``."""

    term: str
    factor: float
    error_frac: float
    num_observed: int


class OnlineCalibration(Record, frozen=True, kw_only=True):
    """Factors by term. A value: observing gives a new one."""

    rules: OnlineRules = OnlineRules()
    factors: Mapping[str, OnlineFactor] = msgspec.field(default_factory=dict)

    def corrected_s(self, term: str, predicted_s: float) -> float:
        """A prediction with what is known of its term; unchanged where nothing is."""
        return predicted_s * self.of(term).factor

    def of(self, term: str) -> OnlineFactor:
        """What is known of a term."""
        return self.factors.get(term, OnlineFactor())

    def errors(self) -> "tuple[OnlineError, ...]":
        """What is known of each term, by its name."""
        return tuple(
            OnlineError(term=term, factor=known.factor, error_frac=known.error_frac, num_observed=known.num_observed)
            for term, known in sorted(self.factors.items())
        )

    def observed(self, term: str, predicted_s: float, observed_s: float) -> "OnlineCalibration":
        """With one more observation. ``predicted_s`` is the cost model's own, without correction.

        A pair that is no pair of durations (not finite, or not above 0) says nothing, and changes nothing.
        """
        if not (0.0 < predicted_s < math.inf and 0.0 < observed_s < math.inf):
            return self
        found = _learnt(self.of(term), math.log(observed_s) - math.log(predicted_s), self.rules)
        return msgspec.structs.replace(self, factors={**self.factors, term: found})


def _learnt(known: OnlineFactor, log_ratio: float, rules: OnlineRules) -> OnlineFactor:
    rate = max(1.0 / (known.num_observed + 1), 1.0 - 0.5 ** (1.0 / rules.half_life))
    clip, limit = math.log(rules.clip), math.log(rules.limit)
    surprise = max(-clip, min(clip, log_ratio - known.log_factor))
    return OnlineFactor(
        log_factor=max(-limit, min(limit, known.log_factor + rate * surprise)),
        log_error=known.log_error + rate * (abs(surprise) - known.log_error),
        num_observed=known.num_observed + 1,
    )
