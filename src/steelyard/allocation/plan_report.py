"""A plan with what stands beside it: the runner-ups, and what one more device in each role would bring."""

from collections.abc import Iterator

import msgspec

from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.snapshot import Limits, ReplicaSize, Role, Split, split_of
from steelyard.allocation.split_search import Planned, SplitSearch
from steelyard.allocation.stage_rates import Periods, StageRates
from steelyard.allocation.training_cost import TrainLayout
from steelyard.allocation.work_estimate import WorkEstimate
from steelyard.errors import InputError
from steelyard.types.record import Record

_NUM_RUNNER_UPS = 4
_MOST_COUNTS = 256
"""Pools of one size that are looked at for runner-ups."""


class MoreDevices(Record, frozen=True, kw_only=True):
    """What one more device in a role would bring, the others as they are. ``gain_frac``: of batches a second."""

    role: Role
    planned: Planned | None
    gain_frac: float


class PlanReport(Record, frozen=True, kw_only=True):
    """The answer of ``steelyard plan``.

    Attributes:
        train_layout: the fastest for the devices that train.
        given: what the split in the file achieves; None: the file has none.
        runner_ups: other splits, the best first.
        more: what one more device would bring, by role.
    """

    batch_trajectories: int
    planned: Planned
    train_layout: TrainLayout
    given: Planned | None
    runner_ups: tuple[Planned, ...]
    more: tuple[MoreDevices, ...]


def plan_report(model: ClusterModel, work: WorkEstimate, limits: Limits, given: Split | None = None) -> PlanReport:
    """The best split for a known work, and what stands beside it.

    Args:
        given: to be compared.

    Raises:
        InputError: no split can do the work, or ``given`` cannot; says what would fit.
    """
    rates = StageRates(model, work, limits.total)
    planned = SplitSearch(rates, limits).best()
    compared = None if given is None else Planned(split=given, periods=_checked(rates, limits, given))
    return PlanReport(
        batch_trajectories=model.batch_trajectories,
        planned=planned,
        train_layout=rates.train_table.layout(planned.split.train),
        given=compared,
        runner_ups=tuple(_runner_ups(rates, limits, planned)),
        more=tuple(_more(StageRates(model, work, limits.total + 1), limits, planned)),
    )


def _checked(rates: StageRates, limits: Limits, split: Split) -> Periods:
    broken = limits.broken_by(split)
    if broken is not None:
        raise InputError(f"split: {broken}")
    try:
        return rates.periods(split)
    except InputError as error:
        raise InputError(f"split: {error}") from None


def _runner_ups(rates: StageRates, limits: Limits, best: Planned) -> list[Planned]:
    """For each other pool of one size its best number of replicas, and the best with one replica more or less."""
    found: dict[tuple[ReplicaSize, ...], Planned] = {}
    for tp in rates.sizes:
        most = min(limits.total, limits.max_rollout or limits.total) // tp
        for count in range(1, most + 1, max(1, most // _MOST_COUNTS)):
            for split in _with_pool(best, limits, ReplicaSize(tp=tp, count=count)):
                one = _achieves(rates, limits, split)
                before = found.get(split.sizes)
                if one is not None and (before is None or one.periods.period_s < before.periods.period_s):
                    found[split.sizes] = one
    others = (one for one in found.values() if one.split != best.split)
    return sorted(others, key=lambda one: one.periods.period_s)[:_NUM_RUNNER_UPS]


def _with_pool(best: Planned, limits: Limits, size: ReplicaSize) -> Iterator[Split]:
    """What the pool leaves goes to training, scoring as the best has it or with a device more or less."""
    reward = best.split.reward
    for number in dict.fromkeys((reward, max(limits.min_reward, reward - 1), reward + bool(reward))):
        train = limits.total - size.tp * size.count - number
        if limits.max_train is not None:
            train = min(train, limits.max_train)
        if train > 0:
            yield split_of([size], train, number)


def _more(rates: StageRates, limits: Limits, best: Planned) -> Iterator[MoreDevices]:
    for role in Role:
        if role is Role.REWARD and not best.split.reward:
            continue
        split = best.split
        room = msgspec.structs.replace(
            limits,
            total=split.total + 1,
            min_rollout=0,
            min_train=split.train + (role is Role.TRAIN),
            min_reward=split.reward + (role is Role.REWARD),
            max_rollout=split.rollout + (role is Role.ROLLOUT),
            max_train=split.train + (role is Role.TRAIN),
        )
        try:
            planned = SplitSearch(rates, room).best()
        except InputError:
            yield MoreDevices(role=role, planned=None, gain_frac=0.0)
            continue
        gain = best.periods.period_s / planned.periods.period_s - 1.0
        yield MoreDevices(role=role, planned=planned, gain_frac=max(0.0, gain))


def _achieves(rates: StageRates, limits: Limits, split: Split) -> Planned | None:
    if limits.broken_by(split) is not None:
        return None
    try:
        return Planned(split=split, periods=rates.periods(split))
    except InputError:
        return None
