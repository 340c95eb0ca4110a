"""The global planner of Libra: when it plans, what it takes, and what it leaves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.libra import LibraPolicy
from steelyard.allocation.roofline import IDEAL
from steelyard.allocation.snapshot import Limits, Snapshot, Split
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.allocation.work_sketch import WorkSketch, WorkSketcher, facts_of
from steelyard.errors import InputError
from steelyard.testing.toy_devices import TOY_MODEL, toy_device

CLUSTER = ClusterModel(
    device=toy_device(4e9),
    architecture=TOY_MODEL,
    corrections=IDEAL,
    groups_per_batch=4,
    group_size=4,
    max_policy_lag=1,
)


def work(generated: float, prompt: float, seed: int = 1) -> WorkSketch:
    spec = SyntheticSpec(
        num_groups=12,
        group_size=4,
        turns=LengthSpec(median=1),
        generated_tokens=LengthSpec(median=generated, sigma=0.6),
        first_prompt_tokens=LengthSpec(median=prompt, sigma=0.2),
        tool_result_tokens=LengthSpec(median=1),
        tool_s=LengthSpec(median=0.001),
        max_context_tokens=4096,
    )
    sketcher = WorkSketcher()
    for group in draw_workload(spec, "w", random.Random(seed)).groups:
        for trajectory in group.trajectories:
            sketcher.add(facts_of(trajectory), group.task_id, 1)
    return sketcher.sketch()


def snapshot(sketch: WorkSketch | None, step: int = 2, rollout: int = 4, total: int = 8) -> Snapshot:
    return Snapshot(
        at_s=10.0,
        step=step,
        split=Split(rollout=rollout, train=total - rollout),
        limits=Limits(total=total, min_rollout=1, min_train=1),
        switch_s=0.01,
        work=sketch,
    )


def test_work_that_is_mostly_sampled_gets_devices_to_sample_and_work_that_is_mostly_read_to_train() -> None:
    sampled = LibraPolicy(CLUSTER).decide(snapshot(work(generated=800, prompt=50)))
    read = LibraPolicy(CLUSTER).decide(snapshot(work(generated=4, prompt=3000)))
    assert sampled.split.rollout > read.split.rollout
    assert read.split.train > 4
    assert read.gain_frac is not None and read.gain_frac >= 0.05


def test_it_plans_at_its_interval_only_and_not_before_enough_has_ended() -> None:
    policy = LibraPolicy(CLUSTER, plan_interval_steps=2, min_history=40)
    sketch = work(generated=4, prompt=3000)
    assert not policy.decide(snapshot(sketch, step=3)).is_due
    assert policy.decide(snapshot(sketch, step=4)).split != snapshot(sketch).split
    patient = LibraPolicy(CLUSTER, min_history=49).decide(snapshot(sketch))
    assert patient.reason == "fewer than 49 trajectories have ended"
    assert "fewer than" in policy.decide(snapshot(None)).reason


def test_a_plan_that_does_not_pay_for_its_reconfiguration_is_left() -> None:
    sketch = work(generated=4, prompt=3000)
    dear = LibraPolicy(CLUSTER).decide(
        Snapshot(
            at_s=10.0,
            step=2,
            split=Split(rollout=4, train=4),
            limits=Limits(total=8),
            switch_s=1e6,
            work=sketch,
        )
    )
    assert dear.split == Split(rollout=4, train=4)
    assert "does not pay for 1000000.0 s of reconfiguration" in dear.reason


def test_options_that_cannot_be_are_refused_by_name() -> None:
    for options, words in (
        ({"plan_interval_steps": 0}, "plan_interval_steps must be >= 1, got 0"),
        ({"min_gain_frac": 1.0}, "min_gain_frac must be >= 0 and below 1, got 1.0"),
        ({"sizes": (3,)}, r"sizes must have one into which small fits, got \(3,\)"),
    ):
        with pytest.raises(InputError, match=words):
            LibraPolicy(CLUSTER, **options)


@settings(deadline=None, max_examples=40)
@given(
    st.floats(2, 800), st.floats(10, 2500), st.integers(2, 24), st.integers(1, 23), st.integers(0, 3), st.integers(0, 9)
)
def test_every_plan_is_within_the_limits_and_the_same_for_the_same_snapshot(
    generated: float, prompt: float, total: int, rollout: int, reserved: int, seed: int
) -> None:
    rollout = min(rollout, total - 1)
    limits = Limits(total=total, min_rollout=1, min_train=min(1 + reserved, total - rollout))
    seen = Snapshot(
        at_s=1.0,
        step=2,
        split=Split(rollout=rollout, train=total - rollout),
        limits=limits,
        work=work(generated, prompt, seed),
    )
    plan = LibraPolicy(CLUSTER).decide(seen)
    assert limits.broken_by(plan.split) is None
    assert plan == LibraPolicy(CLUSTER).decide(seen)
