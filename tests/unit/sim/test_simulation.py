"""Whole simulated runs: the real coordinator and router, any policy, never faster than the bound, nothing lost."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.policies import FixedPolicy, QueuePolicy
from steelyard.allocation.roofline import IDEAL
from steelyard.allocation.snapshot import Limits, Plan, Policy, Role, Snapshot, Split
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.errors import InputError
from steelyard.sim.setup import RewardWork, SimSetup
from steelyard.sim.simulation import SimResult, Simulation
from steelyard.testing.toy_devices import TOY_MODEL, toy_device

LIMITS = Limits(total=8, min_rollout=2, min_train=2)


class RandomPolicy:
    """Moves devices to and fro without sense, within the limits."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def decide(self, snapshot: Snapshot) -> Plan:
        """Any split that is allowed."""
        both = snapshot.split.rollout + snapshot.split.train
        wanted = self._random.randrange(2, both - 1)
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
    with pytest.raises(InputError, match="s: reward must have at least 1 device for small, got 0"):
        run(made, FixedPolicy())


def test_a_policy_that_leaves_the_limits_ends_the_run_by_name() -> None:
    class Greedy:
        def decide(self, snapshot: Snapshot) -> Plan:
            return Plan(split=Split(rollout=8, train=0), reason="all mine")

    with pytest.raises(InputError, match="policy test at step 1: train must have at least 2 devices, got 0"):
        run(setup(), Greedy())
    with pytest.raises(InputError, match="a plan must use at most 8 devices, got 12"):
        run(setup(), FixedPolicy(), Split(rollout=6, train=6))


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
