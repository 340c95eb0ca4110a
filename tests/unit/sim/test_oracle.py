"""The oracle: all schedules where there are few, never worse than the simple policies where there are many."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.policies import FixedPolicy, QueuePolicy, RatioPolicy
from steelyard.allocation.roofline import IDEAL
from steelyard.allocation.snapshot import Limits, Policy, Snapshot, Split
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.errors import InputError
from steelyard.sim.oracle import Player, SchedulePolicy, all_splits, exhaustive_optimum, find_oracle
from steelyard.sim.setup import RewardWork, SimSetup
from steelyard.sim.simulation import Simulation
from steelyard.testing.toy_devices import TOY_MODEL, toy_device

START = Split(rollout=1, train=3)


def setup(seed: int = 0, **changes: Any) -> SimSetup:
    spec = SyntheticSpec(
        num_groups=4,
        group_size=2,
        turns=LengthSpec(median=2, sigma=0.6),
        generated_tokens=LengthSpec(median=80, sigma=0.8),
        first_prompt_tokens=LengthSpec(median=200, sigma=0.3),
        tool_result_tokens=LengthSpec(median=50),
        tool_s=LengthSpec(median=0.05, sigma=1.0, longest=2.0),
    )
    made: dict[str, Any] = {
        "name": "s", "device": toy_device(4e9), "num_devices": 4, "model": TOY_MODEL, "corrections": IDEAL,
        "num_steps": 2, "groups_per_batch": 2, "max_policy_lag": 1,
        "workload": draw_workload(spec, "w", random.Random(seed)),
        "rates": MovingRates(start_s=0.05, release_s=0.01),
    }  # fmt: skip
    return SimSetup(**{**made, **changes})


def makespan_s(made: SimSetup, policy: Policy, limits: Limits) -> float:
    return Simulation(made, START, limits, policy, "test").run().makespan_s


def test_every_split_is_within_the_limits_and_idle_devices_are_allowed() -> None:
    found = {(one.rollout, one.train) for one in all_splits(setup(), Limits(total=4, min_train=2), 1)}
    assert found == {(1, 2), (1, 3), (2, 2)}
    assert {one.rollout for one in all_splits(setup(), Limits(total=4), 2)} == {2}
    scored = setup(reward=RewardWork(model=TOY_MODEL))
    assert {one.reward for one in all_splits(scored, Limits(total=4, min_reward=1), 1)} == {1, 2}


def test_where_there_are_few_schedules_the_oracle_plays_all_of_them() -> None:
    limits = Limits(total=4)
    oracle = find_oracle(setup(), START, limits)
    assert (oracle.is_exhaustive, oracle.num_runs) == (True, 6)
    every = exhaustive_optimum(Player(setup(), limits), setup(), limits, (1,))
    assert len(every) == 36
    from_start = [play.result.makespan_s for play in every if play.start == START]
    assert oracle.best.result.makespan_s == min(from_start)
    assert every[0].result.makespan_s == min(play.result.makespan_s for play in every)


@settings(deadline=None, max_examples=6)
@given(st.integers(0, 100))
def test_where_there_are_many_it_is_never_worse_than_the_simple_policies_and_can_be_played_again(seed: int) -> None:
    made, limits = setup(seed, num_steps=6), Limits(total=4)
    oracle = find_oracle(made, START, limits, max_runs=8)
    assert not oracle.is_exhaustive
    assert oracle.num_runs <= 8
    simple = [makespan_s(made, policy, limits) for policy in (FixedPolicy(), QueuePolicy(), RatioPolicy())]
    assert oracle.best.result.makespan_s <= min(simple)
    assert makespan_s(made, oracle.policy, limits) == oracle.best.result.makespan_s
    assert oracle.best.result.bound_share <= 1.0


def test_a_schedule_keeps_what_there_is_where_the_limits_forbid_it() -> None:
    policy = SchedulePolicy((Split(rollout=3, train=1), Split(rollout=4, train=0)))
    snapshots = [Snapshot(at_s=0.0, step=step, split=START, limits=Limits(total=4)) for step in (1, 2, 3)]
    assert [policy.decide(one).split for one in snapshots] == [Split(rollout=3, train=1), START, START]
    assert "train must have at least 1 devices, got 0" in policy.decide(snapshots[1]).reason


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(InputError, match=r"policy\.options\.max_runs must be >= 4, got 3"):
        find_oracle(setup(), START, Limits(total=4), max_runs=3)
