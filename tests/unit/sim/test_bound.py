"""The bound against simulated replicas, and by hand where the answer is known."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.policies import FixedPolicy
from steelyard.allocation.roofline import IDEAL, Corrections, Roofline
from steelyard.allocation.snapshot import Limits, Split
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.allocation.training_cost import TrainBatch, TrainingCost, TrainLayout
from steelyard.allocation.workload import GroupWork, TrajectoryWork, TurnWork, Workload
from steelyard.errors import InputError
from steelyard.sim.bound import lower_bound, serving_layouts, train_batch
from steelyard.sim.kernel import Kernel
from steelyard.sim.replica import SimCall, SimReplica
from steelyard.sim.setup import RewardWork, SimSetup
from steelyard.sim.simulation import Simulation
from steelyard.testing.toy_devices import TOY_MODEL, toy_device, toy_device_for

LAST = TurnWork(new_prompt_tokens=1, generated_tokens=1)


def one_group(*turns: TurnWork) -> Workload:
    return Workload(name="w", groups=(GroupWork(task_id="t", trajectories=(TrajectoryWork(turns=turns),)),))


def setup(workload: Workload, **changes: Any) -> SimSetup:
    settings: dict[str, Any] = {
        "name": "s", "device": toy_device(), "num_devices": 4, "model": TOY_MODEL, "corrections": IDEAL,
        "workload": workload, "num_steps": 1, "groups_per_batch": 1, "max_policy_lag": 1,
    }  # fmt: skip
    return SimSetup(**{**settings, **changes})


def test_a_long_tool_call_is_a_path_that_no_devices_shorten() -> None:
    turns = (TurnWork(new_prompt_tokens=10, generated_tokens=5, tool_s=100.0), LAST)
    few, many = (lower_bound(setup(one_group(*turns), num_devices=count)) for count in (2, 64))
    assert few.binding == "path"
    assert 100.0 < many.path_s < 100.1
    assert many.makespan_s == pytest.approx(few.makespan_s, rel=0.01)


def test_work_falls_with_devices_and_rises_with_tokens() -> None:
    turn = TurnWork(new_prompt_tokens=100, generated_tokens=200)
    base = lower_bound(setup(one_group(turn))).work_s
    assert lower_bound(setup(one_group(turn), num_devices=8)).work_s == pytest.approx(base / 2)
    longer = TurnWork(new_prompt_tokens=100, generated_tokens=400)
    assert lower_bound(setup(one_group(longer))).work_s > base


def test_the_lag_bound_holds_throughput_to_its_share_of_places() -> None:
    turn = TurnWork(new_prompt_tokens=10, generated_tokens=10, tool_s=0.0)
    slow = (TurnWork(new_prompt_tokens=10, generated_tokens=1, tool_s=50.0), turn)
    bounds = [lower_bound(setup(one_group(*slow), num_steps=100, max_policy_lag=lag)) for lag in (0, 1, 4)]
    assert [round(bound.lag_s / 50.0) for bound in bounds] == [100, 50, 20]
    assert bounds[0].path_s == pytest.approx(bounds[0].lag_s, rel=0.01)


def test_publications_that_nobody_waits_for_are_no_part_of_the_lag_bound() -> None:
    turn = TurnWork(new_prompt_tokens=10, generated_tokens=10)
    slow = MovingRates(storage_bytes_per_s=1e4)
    all_at_once, in_turn = (setup(one_group(turn), num_steps=3, max_policy_lag=lag, rates=slow) for lag in (2, 1))
    results = [
        Simulation(made, Split(rollout=2, train=2), Limits(total=4), FixedPolicy(), "fixed").run()
        for made in (all_at_once, in_turn)
    ]
    assert results[0].bound_share <= 1.0 and results[1].bound_share <= 1.0
    # With places for all three groups the run ends before a version is READY; with two the third waits for one.
    assert results[1].makespan_s > 10 * results[0].makespan_s
    assert results[1].bound.lag_s > 10 * results[0].bound.lag_s


def test_the_slowest_sibling_decides_how_long_a_group_holds_its_place() -> None:
    quick = TrajectoryWork(turns=(TurnWork(new_prompt_tokens=10, generated_tokens=10),))
    waits = TurnWork(new_prompt_tokens=10, generated_tokens=10, tool_s=30.0)
    slow = TrajectoryWork(turns=(waits, *quick.turns))
    group = GroupWork(task_id="t", trajectories=(quick, quick, quick, slow))
    bound = lower_bound(setup(Workload(name="w", groups=(group,)), num_steps=10, max_policy_lag=0))
    assert bound.lag_s > 10 * 30.0


def test_few_tool_slots_are_a_bound_of_their_own() -> None:
    turns = (TurnWork(new_prompt_tokens=10, generated_tokens=1, tool_s=8.0), LAST)
    bound = lower_bound(setup(one_group(*turns), num_steps=20, groups_per_batch=4, tool_slots=2))
    assert bound.slots_s == 20 * 4 * 8.0 / 2
    assert bound.binding == "slots"


def test_few_slots_of_a_function_that_scores_are_a_bound_too() -> None:
    made = setup(one_group(LAST), num_steps=10, reward=RewardWork(function_s=3.0, num_slots=2))
    assert lower_bound(made).slots_s == 10 * 3.0 / 2
    with pytest.raises(InputError, match=r"reward\.num_slots must be >= 1, or null for no limit, got 0"):
        RewardWork(num_slots=0)


def test_a_reward_model_is_work_and_a_function_is_a_path() -> None:
    turn = TurnWork(new_prompt_tokens=1000, generated_tokens=10)
    plain = lower_bound(setup(one_group(turn)))
    assert lower_bound(setup(one_group(turn), reward=RewardWork(model=TOY_MODEL))).work_s > plain.work_s
    assert lower_bound(setup(one_group(turn), reward=RewardWork(function_s=3.0))).path_s == pytest.approx(
        plain.path_s + 3.0
    )


def test_a_model_that_fits_nowhere_is_refused() -> None:
    turn = TurnWork(new_prompt_tokens=1, generated_tokens=1)
    with pytest.raises(InputError, match="s: small fits into no layout of 4 devices: tp must be large enough"):
        lower_bound(setup(one_group(turn), device=toy_device(1e6)))
    with pytest.raises(InputError, match="num_steps must be >= 1, got 0"):
        setup(one_group(turn), num_steps=0)


def drawn(
    num_groups: int,
    turns: float = 1,
    generated_tokens: float = 50,
    first_prompt_tokens: float = 50,
    tool_s: float = 0.01,
) -> Workload:
    spec = SyntheticSpec(
        num_groups=num_groups,
        group_size=2,
        turns=LengthSpec(median=turns),
        generated_tokens=LengthSpec(median=generated_tokens),
        first_prompt_tokens=LengthSpec(median=first_prompt_tokens),
        tool_result_tokens=LengthSpec(median=10),
        tool_s=LengthSpec(median=tool_s),
    )
    return draw_workload(spec, "w", random.Random(1))


HALF, SCORED = Split(rollout=2, train=2), Split(rollout=2, train=4, reward=2)
BINDING: list[tuple[str, Workload, Split, dict[str, Any], float]] = [
    # One batch of long tools: nothing but its path counts.
    ("path", drawn(2, tool_s=3.0, turns=2), HALF, {}, 0.95),
    # One place for each group of a batch, and nothing overlaps: places and path say the same.
    ("lag", drawn(3, tool_s=0.5, turns=2), HALF, {"num_steps": 3, "max_policy_lag": 0}, 0.9),
    ("slots", drawn(4, tool_s=3.0, turns=2), HALF, {"tool_slots": 1, "num_steps": 4, "groups_per_batch": 2}, 0.9),
    # Long prompts and no answers: training takes three times what sampling does.
    ("trainer", drawn(4, first_prompt_tokens=6000, generated_tokens=1), Split(rollout=1, train=3),
     {"num_steps": 8, "groups_per_batch": 4, "max_policy_lag": 3}, 0.8),
    # The same, scored by a model: no role alone is the bottleneck.
    ("work", drawn(8, first_prompt_tokens=3000, generated_tokens=2), SCORED,
     {"num_devices": 8, "num_steps": 4, "groups_per_batch": 8, "max_policy_lag": 3,
      "reward": RewardWork(model=TOY_MODEL)}, 0.6),
    # Long answers in small batches: a larger batch costs time, a smaller one devices.
    ("joint", drawn(8, generated_tokens=1500), HALF,
     {"num_steps": 8, "groups_per_batch": 4, "max_policy_lag": 4, "max_running": 4}, 0.6),
]  # fmt: skip
"""What binds, the work, a split, the setup, and the share of the bound that this split reaches at the least."""


@pytest.mark.parametrize(
    ("term", "work", "split", "changes", "least_share"), BINDING, ids=[term for term, *_ in BINDING]
)
def test_each_term_binds_somewhere_and_is_not_beaten(
    term: str, work: Workload, split: Split, changes: dict[str, Any], least_share: float
) -> None:
    made = setup(work, device=toy_device(4e9), **changes)
    limits = Limits(total=made.num_devices, min_reward=min(1, split.reward))
    bound = lower_bound(made, limits)
    assert getattr(bound, f"{term}_s") >= 0.999 * bound.makespan_s
    result = Simulation(made, split, limits, FixedPolicy(), "fixed").run()
    assert least_share <= result.bound_share <= 1.0


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_throughput_is_held_to_places_over_the_mean_time_of_a_trajectory_and_of_the_slowest_sibling(lag: int) -> None:
    quick = TrajectoryWork(turns=(TurnWork(new_prompt_tokens=10, generated_tokens=5, tool_s=1.0), LAST))
    slow = TrajectoryWork(turns=(TurnWork(new_prompt_tokens=10, generated_tokens=5, tool_s=3.0), LAST))
    work = Workload(name="w", groups=(GroupWork(task_id="t", trajectories=(quick, slow)),))
    made, limits = setup(work, num_steps=24, groups_per_batch=2, max_policy_lag=lag), Limits(total=4)
    places = (lag + 1) * made.groups_per_batch * made.group_size
    of_mean, of_slowest = places / 2.0, places / 3.0
    result = Simulation(made, Split(rollout=2, train=2), limits, FixedPolicy(), "fixed").run()
    proven = result.num_trajectories / result.bound.makespan_s
    assert result.trajectories_per_s <= proven <= of_slowest < of_mean
    assert proven > 0.9 * of_slowest


def test_limits_leave_a_role_fewer_devices_and_raise_the_bound() -> None:
    made = setup(drawn(8, generated_tokens=2000, first_prompt_tokens=20), groups_per_batch=8, num_steps=3)
    free, held = lower_bound(made), lower_bound(made, Limits(total=4, min_train=3))
    assert held.work_s >= free.work_s
    assert held.joint_s > free.joint_s
    assert held.trainer_s > free.trainer_s


@st.composite
def setups(draw: st.DrawFn) -> SimSetup:
    rng = random.Random(draw(st.integers(0, 10_000)))
    spec = SyntheticSpec(
        num_groups=draw(st.integers(1, 5)),
        group_size=draw(st.integers(1, 4)),
        turns=LengthSpec(median=draw(st.integers(1, 4)), sigma=0.5),
        generated_tokens=LengthSpec(median=draw(st.integers(1, 300)), sigma=draw(st.floats(0, 1))),
        first_prompt_tokens=LengthSpec(median=draw(st.integers(1, 2000))),
        tool_result_tokens=LengthSpec(median=draw(st.integers(1, 500))),
        tool_s=LengthSpec(median=draw(st.floats(0.001, 0.5)), sigma=1.0),
        max_context_tokens=8192,
    )
    corrected = Corrections(
        prefill_compute=draw(st.floats(1, 3)),
        decode_compute=draw(st.floats(1, 3)),
        memory=draw(st.floats(1, 3)),
        communication=draw(st.floats(1, 3)),
        launch=draw(st.floats(0, 2)),
        overlap=draw(st.floats(0, 1)),
    )
    device = toy_device_for(draw(st.sampled_from([8192, 20_000, 200_000])))
    workload = draw_workload(spec, "w", rng)
    return setup(
        workload,
        device=device,
        corrections=corrected,
        groups_per_batch=spec.num_groups,
        num_devices=draw(st.sampled_from([2, 4, 8])),
        max_running=draw(st.sampled_from([2, 16, 256])),
        max_policy_lag=draw(st.integers(0, 2)),
    )


@settings(deadline=None, max_examples=150)
@given(setups(), st.randoms(use_true_random=False), st.sampled_from([1, 2, 4]))
def test_no_routing_on_any_layout_samples_and_trains_a_batch_faster_than_the_bound(
    made: SimSetup, rng: random.Random, tp: int
) -> None:
    layouts = [layout for layout in serving_layouts(made) if layout.tp == tp]
    if not layouts:
        return
    kernel = Kernel()
    number = made.num_devices // tp
    replicas = [SimReplica(f"r{index}", kernel, layouts[0], max_running=made.max_running) for index in range(number)]
    for group in made.admitted_groups():
        for number, trajectory in enumerate(group.trajectories):
            _play(kernel, replicas, rng, f"{group.task_id}.{number}", trajectory)
    kernel.run()
    roomy = Roofline(toy_device(1e12), made.corrections)
    layout = TrainLayout(dp=made.num_devices, micro_batch_tokens=65_536)
    trainer_s = TrainingCost(made.model, roomy, layout).step_s(train_batch(made.admitted_groups()))
    assert kernel.now_s() + trainer_s >= lower_bound(made).makespan_s * (1 - 1e-9)


def test_a_batch_counts_each_segment_by_itself() -> None:
    turns = (
        TurnWork(new_prompt_tokens=3, generated_tokens=1),
        TurnWork(new_prompt_tokens=1, generated_tokens=1),
        TurnWork(new_prompt_tokens=2, generated_tokens=2, resets_context=True),
    )
    batch = train_batch(one_group(*turns).groups)
    assert batch == TrainBatch(num_tokens=10, pairs=21 + 10, longest_tokens=6)


def _play(
    kernel: Kernel, replicas: list[SimReplica], rng: random.Random, name: str, trajectory: TrajectoryWork
) -> None:
    contexts = trajectory.contexts()

    def call(index: int) -> None:
        turn = trajectory.turns[index]

        def done() -> None:
            if index + 1 < len(trajectory.turns):
                kernel.after(turn.tool_s, lambda: call(index + 1))

        rng.choice(replicas).submit(
            SimCall(attempt_id=name, prompt_tokens=contexts[index], new_tokens=turn.generated_tokens, on_done=done)
        )

    call(0)
