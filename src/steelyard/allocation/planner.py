"""`planner`: the best split for the work that the run has seen and will see, changed when the change pays.

::

    Snapshot.work --estimate, forecast--> StageRates at each point --SplitSearch--> the best split
                                              |                                        |
    Snapshot.times --OnlineCalibration--------+         expected period over the points, price of the change
                                                                                       |
                                                        pays within the horizon? --> Plan, else the split stays

Between plans a feedback rule gives the trainer a replica's devices, or takes them, where what was observed twice in a
row says so: the trainer never waits while batches wait for it, or has less to do than fewer devices would manage.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.drift_forecast import ForecastPoint, forecast
from steelyard.allocation.observed_periods import ObservedPeriods
from steelyard.allocation.snapshot import Limits, Plan, Role, Snapshot, Split
from steelyard.allocation.split_search import SplitSearch
from steelyard.allocation.stage_rates import StageRates
from steelyard.allocation.transition import Price, num_changed, price_of
from steelyard.allocation.work_estimate import Growth, WorkEstimate
from steelyard.allocation.work_sketch import WorkSketch
from steelyard.errors import InputError
from steelyard.types.record import Record

_EARLY_GAIN_FRAC = 0.2
"""What a change must gain at least while the trajectories that were admitted first are not through; there is one such
change: the short ones end first, so what has been seen is not yet what there is."""

_BUSY_FRAC = 0.97
"""A trainer that works for so much of a period has no slack."""


class PlannerOptions(Record, frozen=True, kw_only=True):
    """What may be set.

    Attributes:
        horizon_steps: optimizer steps over which a change has to pay for itself.
        margin: by how much more than its price a change must bring.
        min_gain_frac: a change must shorten the period by so much at least: against moves to and fro.
        forecast_steps: how far trends are carried on; 0: not at all.
        half_life_steps: of the weight of what the run has seen.
        has_planning, has_feedback: whether plans are made, and whether the feedback rule acts between them.
    """

    horizon_steps: int = 10
    margin: float = 1.5
    min_gain_frac: float = 0.15
    forecast_steps: float = 2.0
    half_life_steps: float = 2.0
    has_planning: bool = True
    has_feedback: bool = True

    def __post_init__(self) -> None:
        if self.horizon_steps < 1:
            raise InputError(f"horizon_steps must be >= 1, got {self.horizon_steps}")
        for field, least in (("margin", 1.0), ("min_gain_frac", 0.0), ("forecast_steps", 0.0)):
            if not least <= getattr(self, field) < math.inf:
                raise InputError(f"{field} must be finite and >= {least:g}, got {getattr(self, field)}")
        if not 0.0 < self.half_life_steps < math.inf:
            raise InputError(f"half_life_steps must be finite and > 0, got {self.half_life_steps}")


class _Choice(Record, frozen=True, kw_only=True):
    """A split with its expected period and the price of going there."""

    split: Split
    period_s: float
    price: Price

    def worth_s(self, stay_s: float, horizon_steps: int, margin: float) -> float:
        """Seconds that going there brings over so many of the present periods: from when it is there, less its
        price."""
        left_s = max(0.0, horizon_steps * stay_s - self.price.taken_s)
        return left_s * (1.0 - self.period_s / stay_s) - margin * self.price.lost_s


class PlannerPolicy:
    """The policy for one cluster. Its answers depend on nothing but the snapshots that it has seen.

    Args:
        model: hardware and rules.
        options: None: as they stand in :class:`PlannerOptions`.
    """

    def __init__(self, model: ClusterModel, options: PlannerOptions | None = None) -> None:
        self._model = model
        self._options = options if options is not None else PlannerOptions()
        self._observed = ObservedPeriods()
        self._last: Split | None = None
        self._num_busy = self._num_idle = 0
        self._has_changed_early = False

    def decide(self, snapshot: Snapshot) -> Plan:
        """See :class:`steelyard.allocation.snapshot.Policy`. A snapshot with holes keeps what there is and says why."""
        hole = self._observed.hole(snapshot)
        if hole is not None:
            return self._stay(snapshot, hole)
        self._observed.see(snapshot)
        if snapshot.is_moving:
            return self._stay(snapshot, "a move is under way")
        work = snapshot.work
        if work is None or not work.groups:
            return self._stay(snapshot, "nothing is known of the work yet")
        try:
            plan = self._plan(snapshot, work)
        except InputError as error:
            return self._stay(snapshot, f"no plan can be made: {error}")
        self._last = plan.split
        return plan

    def _stay(self, snapshot: Snapshot, reason: str) -> Plan:
        """The last valid plan; where devices that it needs are gone, what there is, or the nearest to it that fits."""
        limits, present = snapshot.limits, snapshot.split
        kept = self._last if self._last is not None and limits.broken_by(self._last) is None else present
        broken = limits.broken_by(kept)
        if broken is not None:
            kept = _fitted(kept, limits)
            reason = f"{reason}; of the split that there is, {broken}"
        return Plan(split=kept, reason=reason)

    # --- plans ----------------------------------------------------------------------------------------

    def _plan(self, snapshot: Snapshot, work: WorkSketch) -> Plan:
        points = self._points(snapshot, work)
        models = [self._rates(snapshot, work, point) for point in points]
        search = SplitSearch(models[0], snapshot.limits)
        present = snapshot.split
        if snapshot.step == 0 and self._options.has_planning:
            # Nothing runs yet, so nothing is lost.
            best = search.best()
            words = f"{best.periods.bottleneck} takes longest, {best.periods.period_s:.1f} s a batch"
            return Plan(split=best.split, reason=f"the best to begin with: {words} with {words_of(best.split)}")
        stay_s = _expected_s(present, points, models)
        if stay_s is None:
            return Plan(split=search.best().split, reason="the split that there is cannot do the work")
        self._observed.compare(snapshot, models[0])
        choices = self._choices(snapshot, search, points, models, stay_s) if self._options.has_planning else []
        where = models[0].periods(present)
        now = f"{where.bottleneck} takes longest, {stay_s:.1f} s a batch"
        best_choice = self._best(choices, stay_s, self._least_gain_frac(snapshot, work))
        if best_choice is not None:
            self._has_changed_early = self._has_changed_early or self._seen_frac(snapshot, work) < 1.0
            return _change(snapshot, best_choice, now, stay_s)
        adjusted = self._feedback(snapshot, models[0]) if self._options.has_feedback else None
        return adjusted or Plan(split=present, reason=f"{now}: no change pays for itself", gain_frac=0.0)

    def _choices(
        self,
        snapshot: Snapshot,
        search: SplitSearch,
        points: Sequence[ForecastPoint],
        models: Sequence[StageRates],
        stay_s: float,
    ) -> list[_Choice]:
        """Splits that shorten the period: the best of all, and what moves of whole replicas reach."""
        choices, present = list[_Choice](), snapshot.split
        for split in (search.best().split, *_neighbours(present, snapshot.limits)):
            period_s = _expected_s(split, points, models)
            if period_s is not None and period_s < stay_s:
                price = price_of(models[0], present, split, snapshot.switch_s)
                choices.append(_Choice(split=split, period_s=period_s, price=price))
        return choices

    def _points(self, snapshot: Snapshot, work: WorkSketch) -> tuple[ForecastPoint, ...]:
        seen = self._seen_frac(snapshot, work)
        if seen < 1.0:
            # The short ones end first. Those that run still are longer: the more, the fewer have ended.
            longer = 2.0 - seen
            growth = Growth(turns=longer, prompt=longer, generated=longer, tool=longer, context=longer)
            return (ForecastPoint(growth=growth, weight=1.0),)
        # What seems to grow until the first have been forgotten is no drift either.
        is_early = snapshot.step <= 2 * (self._model.max_policy_lag + 1)
        if self._options.forecast_steps == 0.0 or is_early:
            return (ForecastPoint(growth=Growth(), weight=1.0),)
        return forecast(work, self._options.forecast_steps)

    def _seen_frac(self, snapshot: Snapshot, work: WorkSketch) -> float:
        """How much of the work that is admitted at first has been seen to its end: all of it is due after L + 1
        steps."""
        if snapshot.step == 0:
            # What is known before a run was seen elsewhere, to its end.
            return 1.0
        steps = self._model.max_policy_lag + 1
        return min(1.0, snapshot.step / steps, work.num_ended / (steps * self._model.batch_trajectories))

    def _rates(self, snapshot: Snapshot, work: WorkSketch, point: ForecastPoint) -> StageRates:
        estimate = WorkEstimate(work.groups, self._model.group_size, point.growth, self._options.half_life_steps)
        return StageRates(self._model, estimate, snapshot.limits.total, self._observed.factors())

    def _least_gain_frac(self, snapshot: Snapshot, work: WorkSketch) -> float:
        least = self._options.min_gain_frac
        if self._seen_frac(snapshot, work) == 1.0:
            return least
        return 1.0 if self._has_changed_early else max(least, _EARLY_GAIN_FRAC)

    def _best(self, choices: Sequence[_Choice], stay_s: float, least_gain_frac: float) -> _Choice | None:
        """The one that is worth most over the horizon, if it pays for itself and is no trifle."""
        horizon, margin = self._options.horizon_steps, self._options.margin

        def worth_s(choice: _Choice) -> float:
            return choice.worth_s(stay_s, horizon, margin)

        best = max(choices, key=worth_s, default=None)
        if best is None or worth_s(best) <= 0.0 or best.period_s > stay_s * (1.0 - least_gain_frac):
            return None
        return best

    # --- feedback -------------------------------------------------------------------------------------

    def _feedback(self, snapshot: Snapshot, rates: StageRates) -> Plan | None:
        """One replica's devices to or from training, where two steps in a row say so."""
        period_s, train_s = self._observed.period_s, snapshot.times.train_s
        if period_s is None or train_s is None or period_s <= 0.0:
            self._num_busy = self._num_idle = 0
            return None
        unit = snapshot.split.sizes[-1].tp
        busy = train_s / period_s
        after = busy * snapshot.split.train / max(1, snapshot.split.train - unit)
        is_waiting = snapshot.train_backlog >= self._model.batch_trajectories
        self._num_busy = self._num_busy + 1 if busy >= _BUSY_FRAC and is_waiting else 0
        self._num_idle = self._num_idle + 1 if after < _BUSY_FRAC**4 and not is_waiting else 0
        if self._num_busy >= 2:
            wanted, words = snapshot.split.moved(Role.ROLLOUT, Role.TRAIN, unit), f"the trainer is busy for {busy:.0%}"
        elif self._num_idle >= 2:
            wanted, words = snapshot.split.moved(Role.TRAIN, Role.ROLLOUT, unit), f"the trainer is busy for {busy:.0%}"
        else:
            return None
        self._num_busy = self._num_idle = 0
        return self._checked(snapshot, rates, wanted, words)

    def _checked(self, snapshot: Snapshot, rates: StageRates, wanted: Split, words: str) -> Plan | None:
        """The adjustment, where the limits allow it and the model does not say that it costs more than it brings."""
        if snapshot.limits.broken_by(wanted) is not None:
            return None
        try:
            before_s, after_s = rates.periods(snapshot.split).period_s, rates.periods(wanted).period_s
        except InputError:
            return None
        price = price_of(rates, snapshot.split, wanted, snapshot.switch_s)
        choice = _Choice(split=wanted, period_s=after_s, price=price)
        gain = 1.0 - after_s / before_s
        worth_s = choice.worth_s(before_s, self._options.horizon_steps, self._options.margin)
        if worth_s <= 0.0 or gain < self._options.min_gain_frac / 2:
            return None
        return Plan(split=wanted, reason=f"feedback: {words} of a period", gain_frac=gain)


def make_planner(model: ClusterModel, **options: Any) -> PlannerPolicy:
    """The policy with options by name.

    Raises:
        InputError: an option is out of its range.
        TypeError: there is no such option, or it is of another type.
    """
    return PlannerPolicy(model, PlannerOptions(**options))


def _change(snapshot: Snapshot, choice: _Choice, now: str, stay_s: float) -> Plan:
    gain, moved = 1.0 - choice.period_s / stay_s, num_changed(snapshot.split, choice.split)
    words = f"{now}; {choice.period_s:.1f} s with {words_of(choice.split)}"
    price = f"{moved} devices change, {choice.price.lost_s:.1f} s are lost"
    return Plan(split=choice.split, reason=f"{words}, {price}", gain_frac=gain)


def words_of(split: Split) -> str:
    """A split for people: ``rollout 4 x tp 8 + 1 x tp 4, train 12``."""
    reward = f", reward {split.reward}" if split.reward else ""
    return f"rollout {split.pool}, train {split.train}{reward}"


def _expected_s(split: Split, points: Sequence[ForecastPoint], models: Sequence[StageRates]) -> float | None:
    """The period over all ways that the work may go; None: the split cannot do the work."""
    try:
        periods_s = [rates.periods(split).period_s for rates in models]
    except InputError:
        return None
    return sum(point.weight * period_s for point, period_s in zip(points, periods_s, strict=True))


def _neighbours(split: Split, limits: Limits) -> Iterator[Split]:
    """What moves of whole replicas reach without another size: changes that cost little."""
    unit = split.sizes[-1].tp if split.sizes else split.rollout_tp
    pairs = [(Role.TRAIN, Role.ROLLOUT), (Role.ROLLOUT, Role.TRAIN)]
    if split.reward:
        pairs += [(Role.TRAIN, Role.REWARD), (Role.REWARD, Role.TRAIN), (Role.ROLLOUT, Role.REWARD)]
    for source, target in pairs:
        number = unit if Role.ROLLOUT in (source, target) else 1
        while number <= split.of(source):
            wanted = split.moved(source, target, number)
            if limits.broken_by(wanted) is None:
                yield wanted
            number = number + unit if number < 8 * unit else number * 2


def _fitted(split: Split, limits: Limits) -> Split:
    """The split with replicas and devices taken from the roles that are above their minimum until it fits, the largest
    first; unchanged where nothing fits."""
    fitted = split
    while fitted.total > limits.total:
        unit = fitted.sizes[-1].tp if fitted.sizes else 1
        least = {
            Role.ROLLOUT: limits.min_rollout + unit,
            Role.TRAIN: limits.min_train + 1,
            Role.REWARD: limits.min_reward + 1,
        }
        giving = [role for role in Role if fitted.of(role) >= least[role]]
        if not giving:
            return split
        role = max(giving, key=fitted.of)
        if role is Role.ROLLOUT:
            moved = fitted.moved(Role.ROLLOUT, Role.TRAIN, unit)
            fitted = msgspec.structs.replace(moved, train=fitted.train)
        else:
            fitted = msgspec.structs.replace(fitted, **{str(role): fitted.of(role) - 1})
    return fitted if limits.broken_by(fitted) is None else split
