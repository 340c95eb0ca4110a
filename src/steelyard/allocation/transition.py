"""What a change of split costs: only what it really changes, and for how long."""

from steelyard.allocation.snapshot import ReplicaSize, Split, split_of
from steelyard.allocation.stage_rates import StageRates
from steelyard.errors import InputError


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


def lost_s(rates: StageRates, present: Split, wanted: Split, switch_s: float) -> float:
    """Seconds of work that a change loses: so long as devices drain and switch, only what stays works.

    Args:
        switch_s: of a device that takes up another role, drained work included where it was measured; else 0, for what
            the cost model predicts.
    """
    if num_changed(present, wanted) == 0:
        return 0.0
    predicted_s = max(rates.switch_s[size.tp] for size in wanted.sizes)
    taken_s = max(switch_s, predicted_s) + _drain_s(rates, present)
    try:
        rest_s = rates.periods(staying(present, wanted)).period_s
    except InputError:
        # What stays cannot do the work at all: everything waits.
        return taken_s
    return taken_s * max(0.0, 1.0 - rates.periods(present).period_s / rest_s)


def _drain_s(rates: StageRates, present: Split) -> float:
    """A replica that leaves lets its open calls end: the whole of a mean call."""
    work = rates.work
    return work.mean(work.generated_tokens) / work.mean(work.turns) * rates.periods(present).pace_s
