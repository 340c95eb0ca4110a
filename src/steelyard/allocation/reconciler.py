"""From the devices as they are to the devices as a plan wants them: one action at a time, each of them checked.

::

    reconcile(observed, wanted, limits) -> the next actions, in order; () when observed is what is wanted
    apply_action(observed, action)      -> what is observed once the action has succeeded

The answer is computed anew from what is observed each time, so there is nothing to resume: after a crash, a device that
died in the middle, or another plan, the next answer starts from what is there. A device has one owner at any time: it
is given to a role only after it was freed, and no action takes a role below its minimum, whatever the order asks for.
Pure: no I/O, no time.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from steelyard.allocation.snapshot import Limits, Role, Split
from steelyard.errors import InputError
from steelyard.types.record import Record


class ActionKind(StrEnum):
    """What is done to the devices of one unit of a role."""

    RELEASE = "release"
    """Stop giving it work, wait for or move what it has, free its memory; its devices are idle then."""
    ASSIGN = "assign"
    """Load what the role needs onto idle devices, prove it, and give it work."""


class Group(Record, frozen=True, kw_only=True):
    """Devices that work as one in a role: a rollout replica of ``len(devices)`` tensor-parallel devices, or one device.

    ``name`` is unlike that of any other group. Devices are in ascending order.
    """

    name: str
    role: Role
    devices: tuple[int, ...]


class Observed(Record, frozen=True, kw_only=True):
    """Devices as they are. ``num_devices`` are numbered from 0; ``lost`` ones are dead; the rest is idle.

    Attributes:
        groups: what has a role, groups on their way into one or out of one included.
        next_name: number of the next group that is made; names are never used again.
    """

    num_devices: int
    groups: tuple[Group, ...] = ()
    lost: tuple[int, ...] = ()
    next_name: int = 0

    def __post_init__(self) -> None:
        counts = Counter(device for group in self.groups for device in group.devices)
        twice = sorted(device for device, count in counts.items() if count > 1)
        if twice:
            raise InputError(f"groups: a device must be in one group, got {twice} in several")
        names = Counter(group.name for group in self.groups)
        if any(count > 1 for count in names.values()):
            raise InputError(f"groups: names must differ, got {sorted(names.elements())}")
        unknown = sorted(device for device in (*counts, *self.lost) if not 0 <= device < self.num_devices)
        if unknown:
            raise InputError(f"groups: devices must be 0 to {self.num_devices - 1}, got {unknown}")

    @property
    def idle(self) -> tuple[int, ...]:
        """Devices that live and have no role."""
        taken = {device for group in self.groups for device in group.devices} | set(self.lost)
        return tuple(device for device in range(self.num_devices) if device not in taken)

    def whole(self, role: Role) -> tuple[Group, ...]:
        """Groups of a role none of whose devices is lost."""
        return tuple(g for g in self.groups if g.role is role and not set(g.devices) & set(self.lost))

    def count(self, role: Role) -> int:
        """Devices that work in a role."""
        return sum(len(group.devices) for group in self.whole(role))


class Action(Record, frozen=True, kw_only=True):
    """One thing to do. It is done, or it is not: on failure what is observed says what is left."""

    kind: ActionKind
    group: Group
    reason: str


def reconcile(observed: Observed, wanted: Split, limits: Limits, devices_per_node: int | None = None) -> list[Action]:
    """The actions that make the split as wanted, in an order in which each of them may be done.

    Groups that stay are not touched; groups with a lost device are released first. Of those that may go, the ones go
    whose devices fit best where devices are needed: the whole node, then the youngest.

    Args:
        devices_per_node: a group of several devices lies on one node of so many; None: all are one node.

    Raises:
        InputError: the wanted split breaks the limits, needs more devices than live, or needs a group of more idle
            devices of one node than there can be; nothing should be done then.
    """
    _check_wanted(observed, wanted, limits)
    actions: list[Action] = []
    state = observed
    for group in observed.groups:
        if set(group.devices) & set(observed.lost):
            actions.append(Action(kind=ActionKind.RELEASE, group=group, reason="a device of it is lost"))
            state = apply_action(state, actions[-1])
    surplus, missing = _difference(state, wanted)
    while surplus or missing:
        action = _next_assignment(state, missing, devices_per_node) or _next_release(state, surplus, limits)
        if action is None:
            raise InputError(_stuck(state, surplus, missing, devices_per_node))
        check_action(state, action, limits)
        actions.append(action)
        state = apply_action(state, action)
        surplus, missing = _difference(state, wanted)
    return actions


def check_action(observed: Observed, action: Action, limits: Limits) -> None:
    """Whether an action may be done now; asked again before each is done, since the world moves on.

    Raises:
        InputError: a device is taken, lost or not there, the group is not, or a role would fall below its minimum.
    """
    group = action.group
    if action.kind is ActionKind.RELEASE:
        if group not in observed.groups:
            raise InputError(f"release {group.name}: it must be there, with devices {list(group.devices)}")
        if set(group.devices) & set(observed.lost):
            return
        left, least = observed.count(group.role) - len(group.devices), _minimum(limits, group.role)
        if left < least:
            raise InputError(f"release {group.name}: {group.role} must keep at least {least} devices, got {left}")
        return
    if not group.devices:
        raise InputError(f"assign {group.name}: it must have at least one device, got none")
    taken = sorted(set(group.devices) - set(observed.idle))
    if taken:
        raise InputError(f"assign {group.name}: devices must be idle, got {taken} that are not")
    if any(group.name == other.name for other in observed.groups):
        raise InputError(f"assign {group.name}: the name must be new")


def apply_action(observed: Observed, action: Action) -> Observed:
    """What is observed once the action has succeeded."""
    if action.kind is ActionKind.RELEASE:
        groups = tuple(group for group in observed.groups if group != action.group)
        return msgspec.structs.replace(observed, groups=groups)
    return msgspec.structs.replace(observed, groups=(*observed.groups, action.group), next_name=observed.next_name + 1)


def sizes_of(wanted: Split, role: Role) -> list[int]:
    """Sizes of the groups that a split wants in a role, largest first."""
    if role is Role.ROLLOUT:
        return [group.tp for group in wanted.sizes for _ in range(group.count)]
    return [1] * wanted.of(role)


def _difference(state: Observed, wanted: Split) -> tuple[list[Group], list[tuple[Role, int]]]:
    """Groups that are too many, youngest first, and groups that are missing, by role and size, largest first."""
    surplus: list[Group] = []
    missing: list[tuple[Role, int]] = []
    for role in Role:
        left = Counter(sizes_of(wanted, role))
        for group in state.whole(role):
            if left[len(group.devices)] > 0:
                left[len(group.devices)] -= 1
            else:
                surplus.append(group)
        missing += [(role, size) for size in left.elements()]
    return surplus[::-1], sorted(missing, key=lambda one: -one[1])


def _next_assignment(
    state: Observed, missing: Sequence[tuple[Role, int]], devices_per_node: int | None
) -> Action | None:
    """The largest missing group for which idle devices of one node are there."""
    for role, size in missing:
        devices = _place(state.idle, size, devices_per_node)
        if devices is not None:
            group = Group(name=f"{role}-{state.next_name}", role=role, devices=devices)
            return Action(kind=ActionKind.ASSIGN, group=group, reason=f"the plan wants one more of {size} in {role}")
    return None


def _next_release(state: Observed, surplus: Sequence[Group], limits: Limits) -> Action | None:
    """A group that is too many and may go now; of the role that has most beyond its minimum."""
    may_go = [g for g in surplus if state.count(g.role) - len(g.devices) >= _minimum(limits, g.role)]
    if not may_go:
        return None
    group = max(may_go, key=lambda one: state.count(one.role) - _minimum(limits, one.role))
    return Action(kind=ActionKind.RELEASE, group=group, reason=f"the plan wants fewer of {len(group.devices)}")


def _place(idle: Sequence[int], size: int, devices_per_node: int | None) -> tuple[int, ...] | None:
    """So many idle devices of one node: of the node with fewest that are enough, so that large ones stay whole."""
    nodes = _by_node(idle, devices_per_node)
    enough = [devices for devices in nodes if len(devices) >= size]
    return tuple(min(enough, key=len)[:size]) if enough else None


def _by_node(devices: Iterable[int], devices_per_node: int | None) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for device in devices:
        nodes.setdefault(device // devices_per_node if devices_per_node else 0, []).append(device)
    return list(nodes.values())


def _minimum(limits: Limits, role: Role) -> int:
    return {Role.ROLLOUT: limits.min_rollout, Role.TRAIN: limits.min_train, Role.REWARD: limits.min_reward}[role]


def _check_wanted(observed: Observed, wanted: Split, limits: Limits) -> None:
    broken = limits.broken_by(wanted)
    if broken is not None:
        raise InputError(f"plan: {broken}")
    num_alive = observed.num_devices - len(set(observed.lost))
    if wanted.total > num_alive:
        raise InputError(f"plan: it must need at most the {num_alive} devices that live, got {wanted.total}")


def _stuck(
    state: Observed, surplus: Sequence[Group], missing: Sequence[tuple[Role, int]], devices_per_node: int | None
) -> str:
    if missing:
        role, size = missing[0]
        most = max((len(node) for node in _by_node(state.idle, devices_per_node)), default=0)
        return f"plan: a group of {size} in {role} needs as many idle devices of one node, got {most} at most"
    names = ", ".join(group.name for group in surplus)
    return f"plan: releasing {names} would take a role below its minimum, and no idle devices are left to keep it"
