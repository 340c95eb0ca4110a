"""Rollout pools of several tensor-parallel sizes: what moves, what stays, and that nothing is lost on the way."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.policies import FixedPolicy
from steelyard.allocation.roofline import IDEAL
from steelyard.allocation.snapshot import Limits, Plan, Policy, ReplicaSize, Role, Snapshot, Split, split_of
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.errors import InputError
from steelyard.sim.faults import DeviceFailure, Faults
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import SimResult, Simulation
from steelyard.testing.toy_devices import TOY_MODEL, toy_device

LIMITS = Limits(total=16, min_rollout=2, min_train=2)
SPEC = SyntheticSpec(
    num_groups=12,
    group_size=3,
    turns=LengthSpec(median=3, sigma=0.6),
    generated_tokens=LengthSpec(median=60, sigma=0.8),
    first_prompt_tokens=LengthSpec(median=200, sigma=0.3),
    tool_result_tokens=LengthSpec(median=50, sigma=0.5),
    tool_s=LengthSpec(median=0.05, sigma=1.0, longest=2.0),
    max_context_tokens=4096,
)


def setup(seed: int = 1, **changes: Any) -> SimSetup:
    made: dict[str, Any] = {
        "name": "s", "device": toy_device(4e9), "num_devices": 16, "model": TOY_MODEL, "corrections": IDEAL,
        "num_steps": 5, "groups_per_batch": 2, "max_policy_lag": 1,
        "workload": draw_workload(SPEC, "w", random.Random(seed)),
        "rates": MovingRates(start_s=0.1, release_s=0.05),
    }  # fmt: skip
    return SimSetup(**{**made, **changes})


def pool(*tps: int, train: int = 4) -> Split:
    return split_of([ReplicaSize(tp=tp, count=1) for tp in tps], train)


class Follows:
    """Asks for the splits of a list, one after each step, and keeps the last."""

    def __init__(self, *splits: Split) -> None:
        self._splits = splits
        self.seen = list[Snapshot]()

    def decide(self, snapshot: Snapshot) -> Plan:
        self.seen.append(snapshot)
        wanted = self._splits[min(snapshot.step, len(self._splits)) - 1]
        return Plan(split=wanted if snapshot.limits.broken_by(wanted) is None else snapshot.split, reason="listed")


def run(made: SimSetup, split: Split, policy: Policy) -> tuple[Simulation, SimResult]:
    simulation = Simulation(made, split, LIMITS, policy, "test")
    return simulation, simulation.run()


def test_replicas_of_every_size_that_a_split_names_serve() -> None:
    simulation, result = run(setup(), pool(4, 2, 2, 1), FixedPolicy())
    assert simulation.coordinator_state.prompts.trained == 10
    assert simulation.snapshot().split == pool(4, 2, 2, 1)
    assert 0.0 < result.idle_frac["rollout"] < 1.0


def test_a_replica_that_both_pools_have_is_not_touched() -> None:
    simulation, _ = run(setup(), pool(4, 4, 2), Follows(pool(4, 2, 2, 2)))
    replicas = simulation.coordinator_state.replicas
    downs = [name for name, replica in replicas.items() if not replica.held]
    assert len(replicas) == 3 + 2
    assert len(downs) == 1


def test_one_large_replica_makes_way_for_small_ones_though_nobody_can_take_over() -> None:
    simulation, result = run(setup(num_devices=12), pool(8, train=4), Follows(pool(4, 2, 2)))
    assert simulation.snapshot().split == pool(4, 2, 2)
    assert simulation.coordinator_state.prompts.trained == 10
    assert result.tokens.gap == 0


def test_a_pool_that_changes_all_its_sizes_keeps_half_of_it_at_work() -> None:
    made = setup(num_steps=8)
    simulation = Simulation(made, pool(4, 4, 4), LIMITS, Follows(pool(2, 2, 2, 2, 2, 2)), "test")
    at_work = list[int]()
    simulation.run(lambda sample: at_work.append(sample.rollout))
    assert min(at_work) >= 6
    assert simulation.snapshot().split == pool(2, 2, 2, 2, 2, 2)


def test_small_replicas_make_way_for_a_large_one_all_at_once_and_not_one_after_the_other() -> None:
    small, large = pool(*[1] * 8, train=8), pool(8, train=8)
    policy = Follows(large)
    simulation, result = run(setup(num_steps=6), small, policy)
    assert simulation.snapshot().split == large
    assert simulation.coordinator_state.prompts.trained == 12
    asked_s = policy.seen[0].at_s
    longest_call_s = 2.0
    after = [sample for sample in result.timeline if sample.at_s > asked_s + longest_call_s]
    assert after and all((sample.rollout, sample.moving) == (8, 0) for sample in after)


def test_a_decision_names_the_pool_where_its_sizes_change() -> None:
    _, result = run(setup(), pool(4, 4), Follows(pool(4, 4), pool(4, 2, 2)))
    lines = [decision.line for decision in result.decisions]
    assert lines[0].endswith("=> keep rollout=8 train=4")
    assert lines[1].endswith("=> adjust rollout=8 train=4 (1 x tp 4 + 2 x tp 2)")


def test_a_plan_with_a_size_that_cannot_serve_the_work_leaves_the_pool_as_it_was_and_says_why() -> None:
    simulation, result = run(setup(), pool(4, 4), Follows(pool(4, 3)))
    assert simulation.snapshot().split == pool(4, 4)
    assert "refused: s: rollout_tp cannot be 3: tp must divide the 8 heads" in result.decisions[0].reason
    with pytest.raises(InputError, match="s: rollout_tp cannot be 3"):
        run(setup(), pool(4, 3), FixedPolicy())


def test_a_snapshot_says_what_the_run_has_seen_and_what_is_under_way() -> None:
    policy = Follows(pool(4, 4))
    run(setup(num_steps=3), pool(4, 4), policy)
    works = [snapshot.work for snapshot in policy.seen]
    assert all(work is not None for work in works)
    ended = [work.num_ended for work in works if work is not None]
    assert ended == sorted(ended) and ended[0] >= 6
    last = works[-1]
    assert last is not None
    live = last.live
    assert live.num_generating + live.num_in_tools + live.num_waiting <= 2 * 2 * 3
    admitted = {t.generated_tokens for group in setup().workload.groups for t in group.trajectories}
    assert {member.generated_tokens for group in last.groups for member in group.members} <= admitted


pools = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=6).filter(lambda tps: 2 <= sum(tps) <= 14)
splits = st.builds(lambda tps, train: pool(*tps, train=min(train, 16 - sum(tps))), pools, st.integers(2, 14))
deaths = st.lists(
    st.builds(
        DeviceFailure,
        at_s=st.floats(0.0, 4.0),
        role=st.sampled_from([Role.ROLLOUT, Role.TRAIN]),
        num_devices=st.integers(1, 8),
        returns_after_s=st.floats(0.0, 2.0),
    ),
    max_size=3,
)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1000), st.integers(0, 2), splits, st.lists(splits, min_size=1, max_size=4), deaths)
def test_whatever_pools_follow_each_other_no_device_is_lost_and_no_bound_is_beaten(
    seed: int, lag: int, start: Split, asked: list[Split], failures: list[DeviceFailure]
) -> None:
    made = setup(seed, max_policy_lag=lag, faults=Faults(failures=tuple(failures)))
    simulation = Simulation(made, start, LIMITS, Follows(*asked), "test", seed)
    known = list[int]()
    result = simulation.run(lambda _: known.append(simulation.num_devices_known))
    assert known and set(known) == {16}
    assert result.bound_share <= 1.0
    assert max(step.max_lag for step in result.steps) <= lag
    prompts = simulation.coordinator_state.prompts
    assert (prompts.trained, prompts.not_dropped) == (10, 10)
    assert (result.tokens.gap, result.tokens.in_flight, result.tokens.rejected) == (0, 0, {})
