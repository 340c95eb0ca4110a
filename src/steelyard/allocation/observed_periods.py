"""What snapshots say of real periods, held against predicted ones; and whether a snapshot can be trusted at all."""

import math
from collections import deque

from steelyard.allocation.online import OnlineCalibration, OnlineRules
from steelyard.allocation.snapshot import Role, Snapshot, Split
from steelyard.allocation.stage_rates import Factors, StageRates
from steelyard.errors import InputError

_WINDOW_STEPS = 4
_SETTLING_STEPS = 1
"""After a change the first period is of both splits."""
_SLACK_FRAC = 0.9
"""A trainer that works for less of a period did not set it: the rollout side did."""
_RULES = OnlineRules(half_life=4.0, clip=1.5, limit=4.0)


class ObservedPeriods:
    """Factors by which the stages are slower than predicted, from the snapshots so far."""

    def __init__(self) -> None:
        self._known = OnlineCalibration(rules=_RULES)
        self._ends: deque[tuple[int, float]] = deque(maxlen=_WINDOW_STEPS + 1)
        self._split: Split | None = None
        self._num_settling = 0
        self._last: tuple[int, float] | None = None
        self._sizes = dict[int, str]()

    @property
    def period_s(self) -> float | None:
        """Of the last steps under the present split, on average; None: not known yet."""
        if len(self._ends) < 2:
            return None
        (first, first_s), (last, last_s) = self._ends[0], self._ends[-1]
        return (last_s - first_s) / (last - first)

    def hole(self, snapshot: Snapshot) -> str | None:
        """What makes a snapshot useless: a clock or a count of steps that jumped back, numbers that are none."""
        if not math.isfinite(snapshot.at_s):
            return f"at_s must be finite, got {snapshot.at_s}"
        if self._last is not None:
            step, at_s = self._last
            if snapshot.at_s < at_s or snapshot.step < step:
                self._forget()
                return (
                    f"the clock must not go back, got step {snapshot.step} at {snapshot.at_s:.1f} s after step {step}"
                )
        for role in Role:
            seconds = snapshot.times.of(role)
            if seconds is not None and not (math.isfinite(seconds) and seconds >= 0.0):
                return f"times.{role}_s must be finite and >= 0, got {seconds}"
        if not math.isfinite(snapshot.switch_s) or snapshot.switch_s < 0.0:
            return f"switch_s must be finite and >= 0, got {snapshot.switch_s}"
        return None

    def see(self, snapshot: Snapshot) -> None:
        """One more snapshot without holes."""
        self._last = (snapshot.step, snapshot.at_s)
        if snapshot.split != self._split or snapshot.is_moving:
            self._split = snapshot.split
            self._ends.clear()
            self._num_settling = _SETTLING_STEPS
            return
        if self._num_settling:
            self._num_settling -= 1
            return
        if not self._ends or snapshot.step > self._ends[-1][0]:
            self._ends.append((snapshot.step, snapshot.at_s))

    def compare(self, snapshot: Snapshot, rates: StageRates) -> None:
        """Learn from the last periods, predicted with the factors as they are. A stage that reports nothing, or no
        time at all, teaches nothing."""
        period_s, train_s = self.period_s, snapshot.times.train_s
        if period_s is None or not period_s > 0.0 or not train_s:
            return
        try:
            predicted = rates.periods(snapshot.split)
        except InputError:
            return
        self._learn("train", predicted.train_s, train_s)
        if train_s < _SLACK_FRAC * period_s:
            size = min(size.tp for size in snapshot.split.sizes)
            sampled_s = max(predicted.rollout_s, predicted.path_s)
            self._sizes[size] = term = f"rollout/{size}"
            self._learn(term, sampled_s, period_s)
            self._learn("rollout", sampled_s * self._known.of("rollout").factor / self._known.of(term).factor, period_s)

    def factors(self) -> Factors:
        """What is known now."""
        return Factors(
            rollout=self._known.of("rollout").factor,
            train=self._known.of("train").factor,
            by_size={size: self._known.of(term).factor for size, term in self._sizes.items()},
        )

    def _learn(self, term: str, predicted_s: float, observed_s: float) -> None:
        # Predictions hold the factor already; what is learnt is the factor that would have been right.
        self._known = self._known.observed(term, predicted_s / self._known.of(term).factor, observed_s)

    def _forget(self) -> None:
        self._ends.clear()
        self._last, self._num_settling = None, _SETTLING_STEPS
