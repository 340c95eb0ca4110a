"""Whole simulated runs: the real coordinator and router, any policy, never faster than the bound, nothing lost."""

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.policies import FixedPolicy, QueuePolicy
from steelyard.allocation.roofline import IDEAL
from steelyard.allocation.snapshot import Limits, Plan, Policy, Role, Snapshot, Split
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.errors import InputError, RunError
from steelyard.sim.faults import DeviceFailure, FailureRate, Faults, ToolOutage
from steelyard.sim.setup import RewardWork, SimSetup
from steelyard.sim.simulation import SimResult, Simulation
from steelyard.testing.toy_devices import TOY_MODEL, toy_device

LIMITS = Limits(total=8, min_rollout=2, min_train=2)


class RandomPolicy:
    """Moves devices to and fro without sense, within the limits."""

    def __init__(self, seed: int, unit: int = 1) -> None:
        self._random = random.Random(seed)
        self._unit = unit

    def decide(self, snapshot: Snapshot) -> Plan:
        """Any split that is allowed."""
        both = snapshot.split.rollout + snapshot.split.train
        wanted = self._random.randrange(2, max(3, both - 1)) // self._unit * self._unit
        return Plan(
            split=snapshot.split.moved(Role.TRAIN, Role.ROLLOUT, wanted - snapshot.split.rollout), reason="dice"
        )


def setup(seed: int = 1, **changes: Any) -> SimSetup:
    spec = SyntheticSpec(
        num_groups=12,
        group_size=3,
        turns=LengthSpec(median=3, sigma=0.6),
        generated_tokens=LengthSpec(median=60, sigma=0.8),
        first_prompt_tokens=LengthSpec(median=200, sigma=0.3),
        tool_result_tokens=LengthSpec(median=50, sigma=0.5),
        tool_s=LengthSpec(median=0.05, sigma=1.0, longest=2.0),
        max_context_tokens=4096,
    )
    made: dict[str, Any] = {
        "name": "s", "device": toy_device(4e9), "num_devices": 8, "model": TOY_MODEL, "corrections": IDEAL,
        "num_steps": 4, "groups_per_batch": 2, "max_policy_lag": 1,
        "workload": draw_workload(spec, "w", random.Random(seed)),
        "rates": MovingRates(start_s=0.1, release_s=0.05),
    }  # fmt: skip
    return SimSetup(**{**made, **changes})


def run(
    made: SimSetup, policy: Policy, split: Split | None = None, limits: Limits = LIMITS
) -> tuple[Simulation, SimResult]:
    simulation = Simulation(made, split or Split(rollout=4, train=4), limits, policy, "test")
    return simulation, simulation.run()


def test_a_run_trains_every_group_once_within_the_lag_bound() -> None:
    simulation, result = run(setup(), FixedPolicy())
    assert [step.step for step in result.steps] == [0, 1, 2, 3]
    assert max(step.max_lag for step in result.steps) <= 1
    prompts = simulation.coordinator_state.prompts
    assert (prompts.trained, prompts.not_dropped) == (8, 8)
    assert result.num_trajectories == 24
    assert result.generated_tokens == sum(
        trajectory.generated_tokens for group in setup().admitted_groups() for trajectory in group.trajectories
    )


def test_the_same_seed_is_the_same_run() -> None:
    first, second = (run(setup(), RandomPolicy(3))[1] for _ in range(2))
    assert first == second


def test_lag_zero_never_trains_on_older_weights_and_takes_longer() -> None:
    _, synchronous = run(setup(max_policy_lag=0), FixedPolicy())
    _, overlapped = run(setup(max_policy_lag=2), FixedPolicy())
    assert all(step.max_lag == 0 for step in synchronous.steps)
    assert synchronous.makespan_s > overlapped.makespan_s


def test_a_starved_stage_gets_devices_from_the_queue_policy() -> None:
    made = setup(num_steps=12, max_policy_lag=2)
    policy = QueuePolicy(adjust_interval_steps=2, queue_weight=0.0)
    _, result = run(made, policy, Split(rollout=2, train=6))
    assert any("=> adjust" in decision.line for decision in result.decisions)
    assert result.steps[-1].num_devices < 6


def test_tool_slots_hold_attempts_back() -> None:
    _, free = run(setup(), FixedPolicy())
    _, held = run(setup(tool_slots=1), FixedPolicy())
    assert held.makespan_s > free.makespan_s


def test_attempts_take_their_time_before_and_after_their_calls_and_their_places() -> None:
    _, plain = run(setup(), FixedPolicy())
    _, slower = run(setup(start_s=0.5, end_s=0.25), FixedPolicy())
    assert slower.makespan_s >= plain.makespan_s + 0.75
    _, narrow = run(setup(max_live=2), FixedPolicy())
    assert narrow.makespan_s > plain.makespan_s
    assert max(sample.num_live for sample in narrow.timeline) <= 2
    with pytest.raises(InputError, match="max_live must be >= 1, or null for no limit, got 0"):
        setup(max_live=0)
    with pytest.raises(InputError, match="start_s must be finite and >= 0, got nan"):
        setup(start_s=float("nan"))


def test_every_decision_has_a_line_and_a_reason_and_fixed_never_has_to_decide() -> None:
    _, result = run(setup(), FixedPolicy())
    assert [decision.step for decision in result.decisions] == [1, 2, 3, 4]
    assert not any(decision.is_due for decision in result.decisions)
    assert result.decisions[0].line.endswith("=> keep rollout=4 train=4")
    assert result.timeline[-1].at_s == result.makespan_s
    assert result.timeline[-1].generated_tokens == result.generated_tokens


def test_a_reward_model_works_on_its_own_devices() -> None:
    made = setup(reward=RewardWork(model=TOY_MODEL, function_s=0.5))
    limits = Limits(total=8, min_rollout=2, min_train=2, min_reward=1)
    _, result = run(made, FixedPolicy(), Split(rollout=4, train=3, reward=1), limits)
    assert 0.0 < result.idle_frac["reward"] < 1.0
    with pytest.raises(InputError, match=r"s: split\.reward must be >= 1, for small to score, got 0"):
        run(made, FixedPolicy())


def test_a_policy_that_leaves_the_limits_ends_the_run_by_name() -> None:
    class Greedy:
        def decide(self, snapshot: Snapshot) -> Plan:
            return Plan(split=Split(rollout=8, train=0), reason="all mine")

    with pytest.raises(InputError, match="policy test at step 1: train must have at least 2 devices, got 0"):
        run(setup(), Greedy())
    with pytest.raises(InputError, match="a plan must use at most 8 devices, got 12"):
        run(setup(), FixedPolicy(), Split(rollout=6, train=6))


outages = st.lists(
    st.builds(
        ToolOutage, begins_s=st.just(0.0), lasts_s=st.floats(0.01, 2.0), slowdown=st.sampled_from([None, 1.0, 5.0])
    ),
    max_size=1,
)
failures = st.lists(
    st.builds(
        DeviceFailure,
        at_s=st.floats(0.0, 4.0),
        role=st.sampled_from([Role.ROLLOUT, Role.TRAIN]),
        num_devices=st.integers(1, 8),
        returns_after_s=st.floats(0.0, 2.0),
    ),
    max_size=4,
)
STILL = ToolOutage(begins_s=0.0, lasts_s=1.75)
DYING = (
    DeviceFailure(at_s=1.0, role=Role.ROLLOUT, num_devices=2, returns_after_s=1.0),
    DeviceFailure(at_s=2.0, role=Role.TRAIN, num_devices=2, returns_after_s=0.0),
    DeviceFailure(at_s=0.015625, role=Role.ROLLOUT, num_devices=3, returns_after_s=0.0),
)
rates = st.none() | st.builds(FailureRate, mean_between_s=st.floats(8.0, 60.0), returns_after_s=st.floats(0.1, 1.0))


# A draining replica was the only one with a version, and nobody looked again once others had it.
@example(800, 0, 1, [STILL], list(DYING), None)
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(0, 2), st.sampled_from([1, 2]), outages, failures, rates)
def test_whatever_dies_every_group_ends_and_no_device_is_lost(
    seed: int,
    lag: int,
    tp: int,
    stalls: list[ToolOutage],
    deaths: list[DeviceFailure],
    rate: FailureRate | None,
) -> None:
    faults = Faults(outages=tuple(stalls), failures=tuple(deaths), failure_rate=rate)
    made = setup(seed, max_policy_lag=lag, faults=faults, num_steps=4)
    split = Split(rollout=4, train=4, rollout_tp=tp)
    simulation = Simulation(made, split, LIMITS, RandomPolicy(seed, tp), "test", seed)
    known = list[int]()
    result = simulation.run(lambda _: known.append(simulation.num_devices_known))
    assert known and set(known) == {8}
    assert result.bound_share <= 1.0
    assert max(step.max_lag for step in result.steps) <= lag
    prompts = simulation.coordinator_state.prompts
    assert (prompts.trained, prompts.not_dropped) == (8, 8)
    assert (result.tokens.gap, result.tokens.in_flight, result.tokens.rejected) == (0, 0, {})


def test_a_replica_that_dies_has_its_attempts_sampled_again_and_its_device_comes_back() -> None:
    death = DeviceFailure(at_s=0.4, role=Role.ROLLOUT, num_devices=2, returns_after_s=0.5)
    _, whole = run(setup(), FixedPolicy())
    simulation, result = run(setup(faults=Faults(failures=(death,))), FixedPolicy())
    assert simulation.coordinator_state.prompts.trained == 8
    assert result.tokens.trained == whole.generated_tokens
    assert result.tokens.recorded == result.tokens.trained + sum(result.tokens.lost.values())
    assert result.tokens.lost["replica_failed"] > 0
    assert result.idle_frac["dead"] > 0.0
    assert "2 of rollout died at 0.4 s, 2 are dead" in result.faults
    assert "2 returned at 0.9 s, 0 are dead" in result.faults
    assert simulation.snapshot().split == Split(rollout=4, train=4)


def test_a_trainer_that_loses_a_device_trains_the_same_batch_again_with_the_rest() -> None:
    _, whole = run(setup(), FixedPolicy())
    step = whole.steps[1]
    death = DeviceFailure(at_s=(step.began_at_s + step.ended_at_s) / 2, role=Role.TRAIN)
    _, result = run(setup(faults=Faults(failures=(death,))), FixedPolicy())
    again = result.steps[1]
    assert (again.num_tokens, again.num_devices) == (step.num_tokens, 3)
    assert again.ended_at_s > step.ended_at_s
    _, saved = run(setup(faults=Faults(failures=(death,)), checkpoint_every=1), FixedPolicy())
    replayed_s = whole.steps[0].ended_at_s - whole.steps[0].began_at_s
    assert again.ended_at_s - saved.steps[1].ended_at_s == pytest.approx(replayed_s)


def test_a_role_below_its_minimum_is_filled_up_from_another_one() -> None:
    deaths = (
        DeviceFailure(at_s=0.1, role=Role.ROLLOUT, num_devices=2),
        DeviceFailure(at_s=0.2, role=Role.ROLLOUT),
    )
    simulation, result = run(setup(faults=Faults(failures=deaths)), FixedPolicy(), Split(rollout=3, train=5))
    assert simulation.snapshot().split == Split(rollout=2, train=3)
    assert result.steps[-1].num_devices == 3


def test_too_few_live_devices_end_the_run_with_their_number() -> None:
    deaths = (DeviceFailure(at_s=0.1, role=Role.TRAIN, num_devices=4), DeviceFailure(at_s=0.2, role=Role.ROLLOUT))
    with pytest.raises(RunError, match=r"minimums \(2 rollout, 2 train, .* but 5 of 8 devices are dead and none"):
        run(setup(faults=Faults(failures=deaths)), FixedPolicy())
    rate = FailureRate(mean_between_s=1e-4, returns_after_s=1e-4)
    with pytest.raises(RunError, match="devices must fail less often than the work can be done, but 81 died"):
        run(setup(faults=Faults(failure_rate=rate)), FixedPolicy())


def test_a_dead_grader_leaves_its_trajectory_to_another_and_policies_may_move_graders() -> None:
    class ToReward:
        def decide(self, snapshot: Snapshot) -> Plan:
            wanted = Split(rollout=4, train=2, reward=2)
            return Plan(split=wanted if snapshot.limits.total == 8 else snapshot.split, reason="two graders")

    limits = Limits(total=8, min_rollout=2, min_train=2, min_reward=1)
    deaths = tuple(DeviceFailure(at_s=0.3 * index, role=Role.REWARD, returns_after_s=0.2) for index in range(1, 5))
    made = setup(reward=RewardWork(model=TOY_MODEL, function_s=0.2), faults=Faults(failures=deaths))
    simulation, result = run(made, ToReward(), Split(rollout=4, train=3, reward=1), limits)
    assert simulation.coordinator_state.prompts.trained == 8
    assert result.steps[-1].num_devices == 2
    assert simulation.snapshot().split == Split(rollout=4, train=2, reward=2)


def test_tools_that_stand_still_hold_the_run_up_and_slow_ones_less() -> None:
    still, slow = (Faults(outages=(ToolOutage(begins_s=0.0, lasts_s=3.0, slowdown=factor),)) for factor in (None, 3.0))
    makespans = [run(setup(faults=faults), FixedPolicy())[1].makespan_s for faults in (Faults(), slow, still)]
    assert makespans == sorted(makespans)
    assert makespans[2] > 3.0


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1000), st.integers(0, 2), st.integers(1, 3), st.booleans(), st.sampled_from([None, 2]))
def test_no_policy_beats_the_bound_loses_a_device_or_breaks_the_lag(
    seed: int, lag: int, groups: int, recompute: bool, tool_slots: int | None
) -> None:
    made = setup(
        seed, max_policy_lag=lag, groups_per_batch=groups, recompute_kv=recompute, tool_slots=tool_slots, num_steps=5
    )
    simulation, result = run(made, RandomPolicy(seed), Split(rollout=2 + seed % 5, train=6 - seed % 5))
    assert result.bound_share <= 1.0
    assert max(step.max_lag for step in result.steps) <= lag
    assert simulation.num_devices_known == 8
    assert simulation.coordinator_state.prompts.trained == 5 * groups
