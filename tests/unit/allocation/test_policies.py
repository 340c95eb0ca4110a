"""The simple policies: what they decide, and that no decision leaves the limits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.allocation.policies import FixedPolicy, QueuePolicy, RatioPolicy
from steelyard.allocation.snapshot import Limits, Plan, Policy, Snapshot, Split, StageTimes, checked
from steelyard.errors import InputError

LIMITS = Limits(total=10, min_rollout=2, min_train=2, min_reward=2, max_rollout=8)


def snapshot(**changes: Any) -> Snapshot:
    settings: dict[str, Any] = {
        "at_s": 0.0, "step": 15, "split": Split(rollout=4, train=4, reward=2), "limits": LIMITS,
        "rollout_queue": 6, "train_backlog": 9,
    }  # fmt: skip
    return Snapshot(**{**settings, **changes})


def test_an_adjustment_is_logged_in_the_form_that_people_know() -> None:
    seen = snapshot()
    assert QueuePolicy().decide(seen).log_line(seen) == (
        "step=15 rollout_queue=6 train_backlog=9 => adjust rollout=3 train=5"
    )
    kept = snapshot(rollout_queue=7, train_backlog=7)
    assert QueuePolicy().decide(kept).log_line(kept) == (
        "step=15 rollout_queue=7 train_backlog=7 => keep rollout=4 train=4"
    )


def test_the_queue_policy_moves_towards_the_larger_backlog_at_its_interval_only() -> None:
    policy = QueuePolicy()
    assert policy.decide(snapshot(rollout_queue=9, train_backlog=1)).split == Split(rollout=5, train=3, reward=2)
    assert policy.decide(snapshot(step=16, rollout_queue=9, train_backlog=1)).split == snapshot().split
    assert policy.decide(snapshot(is_moving=True, rollout_queue=9, train_backlog=1)).split == snapshot().split


def test_predicted_gain_counts_by_its_weight() -> None:
    slow_rollout = StageTimes(rollout_s=100.0, train_s=20.0, reward_s=1.0)
    by_gain, by_queue = QueuePolicy(queue_weight=0.0), QueuePolicy(queue_weight=1.0)
    seen = snapshot(times=slow_rollout, rollout_queue=0, train_backlog=5)
    assert by_gain.decide(seen).split.rollout == 5
    assert by_gain.decide(seen).gain_frac == pytest.approx(0.2)
    assert by_queue.decide(seen).split.rollout == 3


def test_limits_hold_a_move_back_and_the_reason_says_so() -> None:
    seen = snapshot(split=Split(rollout=2, train=6, reward=2), rollout_queue=0, train_backlog=9)
    plan = QueuePolicy().decide(seen)
    assert plan.split == seen.split
    assert plan.reason == "score -0.60 asks for train, but rollout must have at least 2 devices, got 1"


def test_the_ratio_policy_moves_when_it_pays_and_as_far_as_it_pays() -> None:
    times = StageTimes(rollout_s=60.0, train_s=10.0, reward_s=1.0)
    cheap = RatioPolicy().decide(snapshot(times=times, switch_s=1.0))
    assert cheap.split == Split(rollout=6, train=2, reward=2)
    dear = RatioPolicy().decide(snapshot(times=times, switch_s=1e6))
    assert dear.split == snapshot().split
    assert RatioPolicy().decide(snapshot()).reason == "the stages are not measured yet"


splits = st.builds(
    Split, rollout=st.integers(2, 6), train=st.integers(2, 4), reward=st.integers(0, 2), rollout_tp=st.just(1)
)
seconds = st.one_of(st.none(), st.floats(0.0, 1e4))


@given(
    splits, st.integers(0, 100), st.integers(0, 100), st.integers(0, 40), seconds, seconds, st.floats(0, 1e4),
    st.sampled_from([FixedPolicy(), QueuePolicy(), QueuePolicy(queue_weight=0.0), RatioPolicy()]),
)  # fmt: skip
def test_no_policy_leaves_the_limits_or_loses_a_device(
    split: Split, queue: int, backlog: int, step: int, rollout_s: float | None, train_s: float | None, switch_s: float,
    policy: Policy,
) -> None:  # fmt: skip
    limits = Limits(total=12, min_rollout=2, min_train=2, max_rollout=7)
    times = StageTimes(rollout_s=rollout_s, train_s=train_s, reward_s=1.0)
    seen = snapshot(
        split=split,
        limits=limits,
        rollout_queue=queue,
        train_backlog=backlog,
        step=step,
        times=times,
        switch_s=switch_s,
    )
    plan = policy.decide(seen)
    assert limits.broken_by(plan.split) is None
    assert plan.split.total == split.total
    assert policy.decide(seen) == plan


def test_a_plan_that_leaves_the_limits_is_refused_by_name() -> None:
    bad = Plan(split=Split(rollout=9, train=2, reward=2), reason="")
    with pytest.raises(InputError, match="policy mine at step 15: rollout must have at most 8 devices, got 9"):
        checked("mine", bad, snapshot())
    odd = Plan(split=Split(rollout=3, train=4, reward=2, rollout_tp=2), reason="")
    with pytest.raises(InputError, match="rollout must be a multiple of rollout_tp = 2, got 3"):
        checked("mine", odd, snapshot())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QueuePolicy(adjust_interval_steps=0), "scheduler.adjust_interval_steps must be >= 1, got 0"),
        (lambda: QueuePolicy(queue_weight=1.5), "scheduler.queue_weight must be between 0 and 1, got 1.5"),
        (lambda: RatioPolicy(margin=0.5), "margin must be >= 1, got 0.5"),
        (lambda: Limits(total=3, min_rollout=2, min_train=2), "must be at most the 3 devices, got 4"),
        (lambda: Limits(total=9, min_rollout=4, max_rollout=3), "max_rollout must be >= 4, its minimum, got 3"),
    ],
)
def test_impossible_settings_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
