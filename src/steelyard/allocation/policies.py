"""The simple policies: `fixed`, `queue`, `ratio`. Others are judged against them."""

from steelyard.allocation.snapshot import Plan, Role, Snapshot, Split, predicted_period_s
from steelyard.errors import InputError


class FixedPolicy:
    """The split that there is, for ever."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """See :class:`steelyard.allocation.snapshot.Policy`."""
        return Plan(split=snapshot.split, reason="the split is fixed", gain_frac=0.0, is_due=False)


class QueuePolicy:
    """Moves one rollout replica's devices between rollout and training towards the larger backlog.

    After every ``adjust_interval_steps`` optimizer steps::

        backlog = (rollout_queue - train_backlog) / (rollout_queue + train_backlog)      0 where both are 0
        gain    = gain of a move to rollout - gain of a move to training, in [-1, 1]     0 while not measured
        score   = queue_weight * backlog + (1 - queue_weight) * gain

    where the gain of a move is ``1 - period after / period before`` with :func:`predicted_period_s`, at least 0. A
    score above ``dead_band`` moves devices to rollout, one below ``-dead_band`` to training; nothing moves in
    between, while another move is under way, or where the limits forbid it. The reward pool is left alone.

    Args:
        adjust_interval_steps: optimizer steps between two decisions.
        queue_weight: 1 looks at queues only, 0 at predicted gains only.
        dead_band: scores within it keep the split.
    """

    def __init__(self, adjust_interval_steps: int = 5, queue_weight: float = 0.6, dead_band: float = 0.05) -> None:
        if adjust_interval_steps < 1:
            raise InputError(f"scheduler.adjust_interval_steps must be >= 1, got {adjust_interval_steps}")
        if not 0.0 <= queue_weight <= 1.0:
            raise InputError(f"scheduler.queue_weight must be between 0 and 1, got {queue_weight}")
        if not 0.0 <= dead_band <= 1.0:
            raise InputError(f"dead_band must be between 0 and 1, got {dead_band}")
        self._interval_steps = adjust_interval_steps
        self._queue_weight = queue_weight
        self._dead_band = dead_band

    def decide(self, snapshot: Snapshot) -> Plan:
        """See :class:`steelyard.allocation.snapshot.Policy`."""
        if snapshot.step == 0 or snapshot.step % self._interval_steps:
            return Plan(split=snapshot.split, reason=f"decides every {self._interval_steps} steps", is_due=False)
        if snapshot.is_moving:
            return Plan(split=snapshot.split, reason="a move is under way")
        score = self._queue_weight * _backlog(snapshot) + (1.0 - self._queue_weight) * _gain(snapshot)
        words = f"score {score:+.2f}"
        if abs(score) <= self._dead_band:
            return Plan(split=snapshot.split, reason=f"{words} is within the dead band of {self._dead_band}")
        source, target = (Role.TRAIN, Role.ROLLOUT) if score > 0 else (Role.ROLLOUT, Role.TRAIN)
        wanted = snapshot.split.moved(source, target, snapshot.split.rollout_tp)
        broken = snapshot.limits.broken_by(wanted)
        if broken is not None:
            return Plan(split=snapshot.split, reason=f"{words} asks for {target}, but {broken}")
        return Plan(split=wanted, reason=f"{words}: to {target}", gain_frac=_gain_of(wanted, snapshot))


class RatioPolicy:
    """Moves devices when the time that it saves over a horizon exceeds the measured cost of the switch.

    Looks at every split that one move between rollout and training reaches, any number of replicas at once. With
    ``T`` seconds per batch now and ``T'`` predicted, a move of ``n`` devices pays if::

        horizon_steps * (T - T') > margin * (n / total) * switch_s

    and the one with the largest difference is taken: the right side is the device time that the switch loses, in
    batches' terms.

    Args:
        horizon_steps: steps over which a move has to pay for itself.
        margin: above 1 it must pay by more, against moves to and fro.
    """

    def __init__(self, horizon_steps: int = 10, margin: float = 1.5) -> None:
        if horizon_steps < 1:
            raise InputError(f"horizon_steps must be >= 1, got {horizon_steps}")
        if not margin >= 1.0:
            raise InputError(f"margin must be >= 1, got {margin}")
        self._horizon_steps = horizon_steps
        self._margin = margin

    def decide(self, snapshot: Snapshot) -> Plan:
        """See :class:`steelyard.allocation.snapshot.Policy`."""
        present_s = predicted_period_s(snapshot.split, snapshot)
        if present_s is None:
            return Plan(split=snapshot.split, reason="the stages are not measured yet")
        if snapshot.is_moving:
            return Plan(split=snapshot.split, reason="a move is under way")
        best, best_worth_s = snapshot.split, 0.0
        for wanted in _reachable(snapshot):
            after_s = predicted_period_s(wanted, snapshot)
            if after_s is None:
                continue
            moved = abs(wanted.rollout - snapshot.split.rollout)
            lost_s = moved / snapshot.limits.total * snapshot.switch_s
            worth_s = self._horizon_steps * (present_s - after_s) - self._margin * lost_s
            if worth_s > best_worth_s:
                best, best_worth_s = wanted, worth_s
        if best == snapshot.split:
            return Plan(split=best, reason=f"no move pays for its switch within {self._horizon_steps} steps")
        words = f"saves {best_worth_s:.1f} s over {self._horizon_steps} steps"
        return Plan(split=best, reason=words, gain_frac=_gain_of(best, snapshot))


def _backlog(snapshot: Snapshot) -> float:
    total = snapshot.rollout_queue + snapshot.train_backlog
    return (snapshot.rollout_queue - snapshot.train_backlog) / total if total else 0.0


def _gain(snapshot: Snapshot) -> float:
    num_devices = snapshot.split.rollout_tp
    gains = [
        _gain_of(snapshot.split.moved(source, target, num_devices), snapshot)
        for source, target in ((Role.TRAIN, Role.ROLLOUT), (Role.ROLLOUT, Role.TRAIN))
    ]
    to_rollout, to_train = (max(0.0, gain or 0.0) for gain in gains)
    return to_rollout - to_train


def _gain_of(wanted: Split, snapshot: Snapshot) -> float | None:
    before_s, after_s = predicted_period_s(snapshot.split, snapshot), predicted_period_s(wanted, snapshot)
    return None if before_s is None or after_s is None or before_s == 0.0 else 1.0 - after_s / before_s


def _reachable(snapshot: Snapshot) -> list[Split]:
    """Splits within the limits that differ in rollout and training only."""
    split, tp = snapshot.split, snapshot.split.rollout_tp
    both = split.rollout + split.train
    wanted = (
        split.moved(Role.TRAIN, Role.ROLLOUT, rollout - split.rollout)
        for rollout in range(split.rollout % tp, both + 1, tp)
    )
    return [one for one in wanted if one != split and snapshot.limits.broken_by(one) is None]
