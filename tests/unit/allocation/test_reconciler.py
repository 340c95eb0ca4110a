"""The reconciler: whatever is there, the plan is reached by allowed steps, or refused before anything is moved."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.allocation.reconciler import (
    Action,
    ActionKind,
    Group,
    Observed,
    apply_action,
    check_action,
    reconcile,
)
from steelyard.allocation.snapshot import Limits, Role, Split
from steelyard.errors import InputError


def group(name: str, role: Role, *devices: int) -> Group:
    return Group(name=name, role=role, devices=devices)


def split_of(observed: Observed, tp: int) -> Split:
    return Split(
        rollout=observed.count(Role.ROLLOUT),
        train=observed.count(Role.TRAIN),
        reward=observed.count(Role.REWARD),
        rollout_tp=tp,
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[Observed, Split, Limits]:
    """Devices in any groups, some lost, and a split that fits what lives."""
    total = draw(st.integers(3, 12))
    groups: list[Group] = []
    device = 0
    while device < total:
        size = draw(st.integers(1, 3))
        role = draw(st.sampled_from([*Role, None]))
        devices = tuple(range(device, min(total, device + size)))
        if role is Role.ROLLOUT:
            groups.append(group(f"old-{device}", role, *devices))
        elif role is not None:
            groups += [group(f"old-{one}", role, one) for one in devices]
        device += size
    lost = tuple(sorted(draw(st.sets(st.integers(0, total - 1), max_size=2))))
    alive = total - len(lost)
    tp = draw(st.integers(1, 2))
    replicas = draw(st.integers(0, alive // tp))
    train = draw(st.integers(0, alive - replicas * tp))
    reward = draw(st.integers(0, alive - replicas * tp - train))
    wanted = Split(rollout=replicas * tp, train=train, reward=reward, rollout_tp=tp)
    limits = Limits(
        total=total,
        min_rollout=draw(st.integers(0, min(1, wanted.rollout))),
        min_train=draw(st.integers(0, min(2, wanted.train))),
        min_reward=draw(st.integers(0, min(1, wanted.reward))),
    )
    return Observed(num_devices=total, groups=tuple(groups), lost=lost), wanted, limits


def minimums_kept(before: Observed, after: Observed, limits: Limits) -> bool:
    """No role falls below its minimum that was not below it before."""
    least = {Role.ROLLOUT: limits.min_rollout, Role.TRAIN: limits.min_train, Role.REWARD: limits.min_reward}
    return all(after.count(role) >= min(least[role], before.count(role)) for role in Role)


@settings(max_examples=300)
@given(situation=situations())
def test_every_action_is_allowed_when_its_turn_comes_and_the_plan_is_reached(
    situation: tuple[Observed, Split, Limits],
) -> None:
    observed, wanted, limits = situation
    try:
        actions = reconcile(observed, wanted, limits)
    except InputError as error:
        assert "below its minimum" in str(error) or "needs as many idle devices" in str(error)
        return
    state = observed
    for action in actions:
        check_action(state, action, limits)
        after = apply_action(state, action)
        assert minimums_kept(state, after, limits)
        state = after
    assert split_of(state, wanted.rollout_tp) == wanted
    assert all(len(one.devices) == wanted.rollout_tp for one in state.whole(Role.ROLLOUT))
    assert reconcile(state, wanted, limits) == []


@settings(max_examples=200)
@given(situation=situations(), data=st.data())
def test_after_a_crash_anywhere_the_rest_is_what_would_have_come(
    situation: tuple[Observed, Split, Limits], data: st.DataObject
) -> None:
    observed, wanted, limits = situation
    try:
        actions = reconcile(observed, wanted, limits)
    except InputError:
        return
    done = data.draw(st.integers(0, len(actions)))
    state = observed
    for action in actions[:done]:
        state = apply_action(state, action)
    read_again = msgspec.json.decode(msgspec.json.encode(state), type=Observed)
    assert reconcile(read_again, wanted, limits) == actions[done:]


def test_what_stays_is_not_touched() -> None:
    observed = Observed(
        num_devices=6,
        groups=(
            group("a", Role.ROLLOUT, 0, 1), group("b", Role.ROLLOUT, 2, 3), group("t", Role.TRAIN, 4),
            group("u", Role.TRAIN, 5),
        ),
    )  # fmt: skip
    actions = reconcile(observed, Split(rollout=2, train=4, rollout_tp=2), Limits(total=6))
    assert [(a.kind, a.group.role, a.group.devices) for a in actions] == [
        (ActionKind.RELEASE, Role.ROLLOUT, (2, 3)),
        (ActionKind.ASSIGN, Role.TRAIN, (2,)),
        (ActionKind.ASSIGN, Role.TRAIN, (3,)),
    ]


def test_a_role_at_its_minimum_gets_before_it_gives() -> None:
    """The only rollout replica changes its size: the new one stands before the old one goes."""
    observed = Observed(
        num_devices=4,
        groups=(group("r", Role.ROLLOUT, 0), group("t", Role.TRAIN, 1), group("u", Role.TRAIN, 2)),
    )
    actions = reconcile(observed, Split(rollout=2, train=1, rollout_tp=2), Limits(total=4))
    assert [(a.kind, a.group.role, a.group.devices) for a in actions] == [
        (ActionKind.RELEASE, Role.TRAIN, (2,)),
        (ActionKind.ASSIGN, Role.ROLLOUT, (2, 3)),
        (ActionKind.RELEASE, Role.ROLLOUT, (0,)),
    ]


def test_a_group_lies_on_one_node() -> None:
    observed = Observed(num_devices=8, groups=tuple(group(f"t{i}", Role.TRAIN, i) for i in (0, 1, 2, 5)))
    split = Split(rollout=2, train=4, rollout_tp=2)
    (action,) = reconcile(observed, split, Limits(total=8), devices_per_node=4)
    assert action.group.devices == (4, 6)
    full = Observed(num_devices=4, groups=(group("t", Role.TRAIN, 0), group("u", Role.TRAIN, 2)))
    with pytest.raises(InputError, match="a group of 2 in rollout needs as many idle devices of one node, got 1"):
        reconcile(full, Split(rollout=2, train=2, rollout_tp=2), Limits(total=4), devices_per_node=2)


def test_a_group_with_a_lost_device_goes_first_and_is_replaced() -> None:
    observed = Observed(num_devices=4, groups=(group("r", Role.ROLLOUT, 0), group("t", Role.TRAIN, 1)), lost=(0,))
    actions = reconcile(observed, Split(rollout=1, train=1), Limits(total=4))
    assert [(a.kind, a.group.devices) for a in actions] == [(ActionKind.RELEASE, (0,)), (ActionKind.ASSIGN, (2,))]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Split(rollout=3, train=2), "plan: a plan must use at most 4 devices, got 5"),
        (Split(rollout=4, train=0), "plan: train must have at least 1 devices, got 0"),
        (Split(rollout=3, train=1), "plan: it must need at most the 3 devices that live, got 4"),
        (Split(rollout=1, train=1, rollout_tp=2), "rollout must be a multiple of rollout_tp = 2, got 1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_is_moved(wanted: Split, message: str) -> None:
    observed = Observed(num_devices=4, groups=(group("r", Role.ROLLOUT, 0),), lost=(3,))
    with pytest.raises(InputError, match=message):
        reconcile(observed, wanted, Limits(total=4))


def test_an_action_that_the_world_has_overtaken_is_refused() -> None:
    limits = Limits(total=3)
    observed = Observed(num_devices=3, groups=(group("r", Role.ROLLOUT, 0), group("t", Role.TRAIN, 1)), lost=(2,))
    for kind, one, message in (
        (ActionKind.ASSIGN, group("x", Role.TRAIN, 1), r"devices must be idle, got \[1\]"),
        (ActionKind.ASSIGN, group("x", Role.TRAIN, 2), r"devices must be idle, got \[2\]"),
        (ActionKind.ASSIGN, group("x", Role.TRAIN), "at least one device, got none"),
        (ActionKind.RELEASE, group("t", Role.TRAIN, 1), "train must keep at least 1 devices, got 0"),
        (ActionKind.RELEASE, group("gone", Role.TRAIN, 1), "it must be there"),
    ):
        with pytest.raises(InputError, match=message):
            check_action(observed, Action(kind=kind, group=one, reason="test"), limits)


def test_a_device_in_two_groups_is_no_observation() -> None:
    with pytest.raises(InputError, match=r"a device must be in one group, got \[1\]"):
        Observed(num_devices=2, groups=(group("a", Role.ROLLOUT, 0, 1), group("b", Role.TRAIN, 1)))
    with pytest.raises(InputError, match=r"devices must be 0 to 1, got \[2\]"):
        Observed(num_devices=2, groups=(group("a", Role.ROLLOUT, 2),))
