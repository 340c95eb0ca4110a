"""What a change of split costs: only what it really changes, and for how long."""

from steelyard.allocation.snapshot import ReplicaSize, Split, split_of
from steelyard.allocation.stage_rates import StageRates
from steelyard.errors import InputError
from steelyard.types.record import Record


def staying(present: Split, wanted: Split) -> Split:
    """The devices that keep on working all the way: replicas of sizes that both have, and the fewer of each role."""
    before = {size.tp: size.count for size in present.sizes}
    sizes = [
        ReplicaSize(tp=size.tp, count=min(size.count, before[size.tp])) for size in wanted.sizes if size.tp in before
    ]
    train, reward = min(present.train, wanted.train), min(present.reward, wanted.reward)
    return split_of(sizes, train, reward, present.rollout_tp)


def num_changed(present: Split, wanted: Split) -> int:
    """Devices that take up another role, or become part of a replica of another size."""
    return wanted.total - staying(present, wanted).total


class Price(Record, frozen=True, kw_only=True):
    """Of a change: it takes ``taken_s`` until it brings anything, and ``lost_s`` of the present work go meanwhile."""

    taken_s: float = 0.0
    lost_s: float = 0.0


def price_of(rates: StageRates, present: Split, wanted: Split, switch_s: float) -> Price:
    """What a change costs: so long as devices drain and switch, only what stays works.

    Args:
        switch_s: of a device that takes up another role, drained work included where it was measured; else 0, for what
            the cost model predicts.
    """
    if num_changed(present, wanted) == 0:
        return Price()
    predicted_s = max(rates.switch_s[size.tp] for size in wanted.sizes)
    before = rates.periods(present)
    taken_s = max(switch_s, predicted_s) + _drain_s(rates, before.pace_s)
    try:
        rest_s = rates.periods(staying(present, wanted)).period_s
    except InputError:
        # What stays cannot do the work at all: everything waits.
        return Price(taken_s=taken_s, lost_s=taken_s)
    return Price(taken_s=taken_s, lost_s=taken_s * max(0.0, 1.0 - before.period_s / rest_s))


def _drain_s(rates: StageRates, pace_s: float) -> float:
    """A replica that leaves lets its open calls end: the whole of a mean call."""
    work = rates.work
    return work.mean(work.generated_tokens) / work.mean(work.turns) * pace_s
