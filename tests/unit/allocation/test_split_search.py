"""The planner's split is the best of all splits; bad clusters are told what would fit."""

from random import Random

import msgspec
import pytest

from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.devices import device_kind
from steelyard.allocation.snapshot import Limits, Split
from steelyard.allocation.split_search import Planned, SplitSearch
from steelyard.allocation.stage_rates import STAGES, Factors, StageRates
from steelyard.allocation.work_estimate import Growth, WorkEstimate
from steelyard.errors import InputError
from steelyard.sim.scenario import KNOWN_MODELS
from steelyard.testing.exhaustive_plan import ExhaustivePlan, random_instance
from steelyard.testing.planned_work import agent_groups

MODEL = ClusterModel(
    device=device_kind("A800"),
    architecture=KNOWN_MODELS["qwen2.5-14b"],
    groups_per_batch=16,
    group_size=8,
    max_policy_lag=2,
)


def best(model: ClusterModel, limits: Limits, growth: Growth | None = None, factors: Factors | None = None) -> Planned:
    work = WorkEstimate(agent_groups(32), model.group_size, growth)
    return SplitSearch(StageRates(model, work, limits.total, factors), limits).best()


@pytest.mark.parametrize("start", range(0, 120, 12))
def test_no_split_is_better_than_the_one_that_is_found(start: int) -> None:
    for seed in range(start, start + 12):
        instance = random_instance(Random(seed))
        try:
            exhaustive = ExhaustivePlan(instance)
            shortest = exhaustive.best()
        except InputError:
            shortest = None
        try:
            work = WorkEstimate(instance.groups, instance.model.group_size)
            rates = StageRates(instance.model, work, instance.limits.total)
            found = SplitSearch(rates, instance.limits).best()
        except InputError:
            assert shortest is None, seed
            continue
        assert shortest is not None, seed
        assert found.periods.period_s == pytest.approx(shortest[0], rel=1e-9), seed
        assert exhaustive.period_s(found.split) == pytest.approx(shortest[0], rel=1e-9), seed
        assert instance.limits.broken_by(found.split) is None, seed


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_more_devices_are_never_slower(lag: int) -> None:
    model = msgspec.structs.replace(MODEL, max_policy_lag=lag)
    periods_s = [best(model, Limits(total=total)).periods.period_s for total in (12, 13, 24, 48, 96, 400)]
    assert periods_s == sorted(periods_s, reverse=True)


@pytest.mark.parametrize("lag", [0, 2])
def test_the_period_is_that_of_the_slowest_stage(lag: int) -> None:
    periods = best(msgspec.structs.replace(MODEL, max_policy_lag=lag), Limits(total=48)).periods
    assert periods.period_s == max(getattr(periods, f"{name}_s") for name in STAGES)
    assert getattr(periods, f"{periods.bottleneck}_s") == periods.period_s


def test_longer_answers_move_devices_to_rollout_and_longer_prompts_to_training() -> None:
    limits = Limits(total=24)
    usual = best(MODEL, limits).split
    assert best(MODEL, limits, Growth(generated=3.0, context=1.5)).split.rollout > usual.rollout
    assert best(MODEL, limits, Growth(prompt=8.0, context=4.0)).split.train > usual.train


def test_a_trainer_that_is_slower_than_predicted_gets_more_devices() -> None:
    limits = Limits(total=24)
    assert best(MODEL, limits, factors=Factors(train=2.0)).split.train > best(MODEL, limits).split.train


def test_limits_are_kept_where_the_best_split_leaves_them() -> None:
    limits = Limits(total=48, min_rollout=8, min_train=8, max_rollout=20, max_train=12)
    split = best(MODEL, limits).split
    assert limits.broken_by(split) is None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(total=6), r"train must be a number of devices .* fits, got at most 6; \d+ would fit"),
        (Limits(total=16, min_rollout=12), r"devices must be >= \d+ \(train \d+, rollout 12, reward 0\), got 16"),
        (Limits(total=48, max_train=4, min_train=1), r"max_train must be >= \d+, with which a layout fits, got 4"),
    ],
)
def test_a_cluster_that_is_too_small_is_told_what_would_fit(limits: Limits, message: str) -> None:
    with pytest.raises(InputError, match=message):
        best(MODEL, limits)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Split(rollout=0, train=40), "rollout must have at least one replica, got none"),
        (Split(rollout=9, train=16, rollout_tp=3), r"rollout_tp must be one that holds the longest context \(1, 2"),
        (Split(rollout=8, train=1), r"train must be >= \d+, with which a layout fits, got 1"),
    ],
)
def test_a_split_that_cannot_do_the_work_is_named(split: Split, message: str) -> None:
    rates = StageRates(MODEL, WorkEstimate(agent_groups(8), 8), 48)
    with pytest.raises(InputError, match=message):
        rates.periods(split)


def test_without_work_nothing_is_planned() -> None:
    with pytest.raises(InputError, match="must have work to go by"):
        WorkEstimate([], 8)
