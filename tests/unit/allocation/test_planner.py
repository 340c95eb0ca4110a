"""The planner policy: changes that pay, no to and fro, corrections, and snapshots with holes."""

import math

import msgspec
import pytest

from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.devices import device_kind
from steelyard.allocation.observed_periods import ObservedPeriods
from steelyard.allocation.planner import PlannerOptions, PlannerPolicy, make_planner
from steelyard.allocation.snapshot import Limits, ReplicaSize, Snapshot, Split, StageTimes, split_of
from steelyard.allocation.stage_rates import StageRates
from steelyard.allocation.transition import Price, num_changed, price_of, staying
from steelyard.allocation.work_estimate import WorkEstimate
from steelyard.allocation.work_sketch import GroupFacts, WorkSketch
from steelyard.errors import InputError
from steelyard.sim.scenario import KNOWN_MODELS
from steelyard.testing.planned_work import agent_groups

MODEL = ClusterModel(
    device=device_kind("A800"),
    architecture=KNOWN_MODELS["qwen2.5-14b"],
    groups_per_batch=16,
    group_size=8,
    max_policy_lag=2,
)
WRONG = Split(rollout=8, train=40, rollout_tp=4)
GROUPS = agent_groups(64)


def snapshot(step: int = 20, split: Split = WRONG, groups: tuple[GroupFacts, ...] = GROUPS) -> Snapshot:
    return Snapshot(
        at_s=300.0 * step,
        step=step,
        split=split,
        limits=Limits(total=48),
        work=WorkSketch(num_ended=10_000, groups=groups),
    )


def planned() -> Split:
    return PlannerPolicy(MODEL).decide(snapshot()).split


def test_a_split_that_is_badly_wrong_is_changed_and_the_reason_says_what_it_brings() -> None:
    plan = PlannerPolicy(MODEL).decide(snapshot())
    assert plan.split.rollout > WRONG.rollout
    assert plan.gain_frac is not None
    assert plan.gain_frac > 0.3
    assert "rollout takes longest" in plan.reason
    assert "devices change" in plan.reason


def test_the_same_snapshots_give_the_same_plans() -> None:
    first, second = PlannerPolicy(MODEL), PlannerPolicy(MODEL)
    assert [first.decide(snapshot(step)) for step in range(5)] == [second.decide(snapshot(step)) for step in range(5)]


def test_the_best_split_stays() -> None:
    policy, best = PlannerPolicy(MODEL), planned()
    for step in range(20, 24):
        plan = policy.decide(snapshot(step, best))
        assert plan.split == best
        assert "no change pays for itself" in plan.reason


def test_before_the_first_step_the_best_split_costs_nothing() -> None:
    dear = msgspec.structs.replace(snapshot(0), switch_s=1e6)
    plan = PlannerPolicy(MODEL).decide(dear)
    assert plan.split == planned()
    assert plan.reason.startswith("the best to begin with: ")


def test_noise_in_the_work_moves_nobody() -> None:
    policy, best = PlannerPolicy(MODEL), planned()
    for step in range(20, 32):
        assert policy.decide(snapshot(step, best, agent_groups(64, seed=step))).split == best


def test_a_change_that_does_not_pay_within_the_horizon_is_not_made() -> None:
    slow = msgspec.structs.replace(snapshot(), switch_s=1e6)
    plan = PlannerPolicy(MODEL).decide(slow)
    assert num_changed(WRONG, plan.split) == 0


def test_while_the_first_trajectories_run_only_large_gains_count() -> None:
    best = planned()
    near = split_of([ReplicaSize(tp=8, count=max(1, best.rollout // 8 - 1))], train=best.train)
    early = msgspec.structs.replace(snapshot(1, near), work=WorkSketch(num_ended=64, groups=GROUPS))
    assert PlannerPolicy(MODEL).decide(early).split == near


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"work": None}, "nothing is known of the work yet"),
        ({"work": WorkSketch()}, "nothing is known of the work yet"),
        ({"is_moving": True}, "a move is under way"),
        ({"at_s": math.nan}, "at_s must be finite, got nan"),
        ({"at_s": 10.0}, "the clock must not go back, got step 21 at 10.0 s after step 20"),
        ({"step": 3}, "the clock must not go back, got step 3"),
        ({"times": StageTimes(train_s=math.inf)}, "times.train_s must be finite and >= 0, got inf"),
        ({"times": StageTimes(rollout_s=-1.0)}, "times.rollout_s must be finite and >= 0, got -1.0"),
        ({"switch_s": math.nan}, "switch_s must be finite and >= 0, got nan"),
    ],
)
def test_a_snapshot_with_a_hole_keeps_the_last_plan_and_says_why(changes: dict[str, object], reason: str) -> None:
    policy = PlannerPolicy(MODEL)
    last = policy.decide(snapshot(20)).split
    holed = msgspec.structs.replace(snapshot(21, last), **changes)
    plan = policy.decide(holed)
    assert plan.split == last
    assert reason in plan.reason
    # And it goes on from there.
    assert policy.decide(snapshot(22, last)).split == last


@pytest.mark.parametrize("times", [StageTimes(), StageTimes(rollout_s=0.0, train_s=0.0), StageTimes(train_s=0.0)])
def test_stages_that_report_nothing_or_stand_still_teach_nothing(times: StageTimes) -> None:
    policy, best = PlannerPolicy(MODEL), planned()
    for step in range(20, 30):
        still = msgspec.structs.replace(snapshot(step, best), times=times, at_s=100.0)
        assert policy.decide(still).split == best


def test_after_failures_the_nearest_split_that_fits_stays() -> None:
    policy = PlannerPolicy(MODEL)
    last = policy.decide(snapshot(20)).split
    limits = Limits(total=40, min_rollout=8, min_train=8)
    plan = policy.decide(msgspec.structs.replace(snapshot(21, last), limits=limits, work=None))
    assert limits.broken_by(plan.split) is None
    assert "a plan must use at most 40 devices, got" in plan.reason
    # What lives may do the work in another way once the work is known again.
    assert (
        limits.broken_by(policy.decide(msgspec.structs.replace(snapshot(22, plan.split), limits=limits)).split) is None
    )


def test_devices_that_no_longer_fit_any_layout_keep_the_split_with_the_reason() -> None:
    split = Split(rollout=2, train=2, rollout_tp=2)
    few = msgspec.structs.replace(snapshot(20, split), limits=Limits(total=4))
    plan = PlannerPolicy(MODEL).decide(few)
    assert plan.split == split
    assert "no plan can be made: train must be a number of devices" in plan.reason


def test_periods_that_are_longer_than_predicted_correct_the_model() -> None:
    observed, split = ObservedPeriods(), planned()
    rates = StageRates(MODEL, WorkEstimate(GROUPS, 8), 48)
    predicted = rates.periods(split)
    for step in range(40):
        times = StageTimes(train_s=predicted.train_s * 1.5)
        one = msgspec.structs.replace(snapshot(step, split), at_s=step * predicted.period_s * 3.0, times=times)
        observed.see(one)
        rates = StageRates(MODEL, WorkEstimate(GROUPS, 8), 48, observed.factors())
        observed.compare(one, rates)
    factors = observed.factors()
    assert factors.train == pytest.approx(1.5, rel=0.1)
    assert rates.periods(split).period_s == pytest.approx(3.0 * predicted.period_s, rel=0.25)


def test_only_what_changes_is_priced() -> None:
    rates = StageRates(MODEL, WorkEstimate(GROUPS, 8), 48)
    present = split_of([ReplicaSize(tp=8, count=2), ReplicaSize(tp=4, count=1)], train=20)
    wanted = split_of([ReplicaSize(tp=8, count=3), ReplicaSize(tp=4, count=1)], train=12)
    assert num_changed(present, wanted) == 8
    assert staying(present, wanted) == split_of([ReplicaSize(tp=8, count=2), ReplicaSize(tp=4, count=1)], train=12)
    assert price_of(rates, present, present, 0.0) == Price()
    whole = split_of([ReplicaSize(tp=2, count=10)], train=20)
    assert price_of(rates, present, whole, 60.0).lost_s > price_of(rates, present, wanted, 60.0).lost_s > 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon_steps": 0}, "horizon_steps must be >= 1, got 0"),
        ({"margin": 0.5}, "margin must be finite and >= 1, got 0.5"),
        ({"min_gain_frac": -0.1}, "min_gain_frac must be finite and >= 0, got -0.1"),
        ({"half_life_steps": 0.0}, "half_life_steps must be finite and > 0, got 0.0"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_planner(MODEL, **options)


def test_the_feedback_rule_can_be_left_out() -> None:
    assert not PlannerOptions(has_feedback=False).has_feedback
    assert PlannerPolicy(MODEL, PlannerOptions(has_feedback=False)).decide(snapshot()).split == planned()
