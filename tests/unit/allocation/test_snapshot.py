"""Splits with pools of several TP sizes."""

import pytest

from steelyard.allocation.snapshot import Limits, ReplicaSize, Role, Split, split_of


def size(tp: int, count: int) -> ReplicaSize:
    return ReplicaSize(tp=tp, count=count)


def test_equal_pools_are_equal_splits_whatever_the_order_they_are_given_in() -> None:
    pool = [size(2, 1), size(4, 1), size(2, 2)]
    assert split_of(pool, train=4) == split_of([size(4, 1), size(2, 3)], train=4)
    assert split_of([size(4, 2)], train=4) == Split(rollout=8, train=4, rollout_tp=4)
    assert split_of(pool, train=4).rollout == 10


def test_the_replicas_of_a_pool_of_one_size_are_told_like_those_of_several() -> None:
    assert Split(rollout=8, train=4, rollout_tp=4).sizes == (size(4, 2),)
    assert split_of([size(4, 1), size(1, 2)], train=4).num_replicas == 3
    assert Split(rollout=0, train=4).sizes == ()


def test_a_pool_of_several_sizes_gives_its_smallest_replicas_first() -> None:
    split = split_of([size(4, 2), size(2, 1), size(1, 1)], train=4)
    assert split.moved(Role.ROLLOUT, Role.TRAIN, 3) == split_of([size(4, 2)], train=7)
    assert split.moved(Role.TRAIN, Role.ROLLOUT, 4).sizes == (size(4, 3), size(2, 1), size(1, 1))
    assert split.moved(Role.TRAIN, Role.REWARD, 1).sizes == split.sizes


def test_what_does_not_come_out_even_breaks_the_limits() -> None:
    split = split_of([size(4, 2), size(2, 1)], train=4)
    broken = Limits(total=14).broken_by(split.moved(Role.ROLLOUT, Role.TRAIN, 1))
    assert broken is not None
    assert "replicas must take the rollout = 9 devices together" in broken


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ((size(4, 1), size(2, 1)), None),
        ((size(2, 1), size(4, 1)), "replicas must be largest first, each size once, got tp 4 after 2"),
        ((size(4, 1), size(2, 0)), r"replicas[1].count must be >= 1, got 0"),
        ((size(4, 1), size(1, 1)), "replicas must take the rollout = 6 devices together, got 5"),
    ],
)
def test_the_limits_name_what_is_wrong_with_a_pool(replicas: tuple[ReplicaSize, ...], message: str | None) -> None:
    assert Limits(total=10).broken_by(Split(rollout=6, train=4, replicas=replicas)) == message
