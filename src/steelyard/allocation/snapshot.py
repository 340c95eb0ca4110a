"""What a policy sees, and what it answers: devices by role. The same records live and in the simulator."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

import msgspec

from steelyard.allocation.work_sketch import WorkSketch
from steelyard.errors import InputError
from steelyard.types.record import Record


class Role(StrEnum):
    """What a device does."""

    ROLLOUT = "rollout"
    TRAIN = "train"
    REWARD = "reward"


class ReplicaSize(Record, frozen=True, kw_only=True):
    """``count`` rollout replicas of ``tp`` devices each."""

    tp: int
    count: int


class Split(Record, frozen=True, kw_only=True):
    """Devices by role.

    Attributes:
        rollout_tp: devices of one rollout replica, where they are all of one size; else of those that come to it.
        replicas: the replicas of a pool of several sizes, largest first, each size once; together they take
            ``rollout`` devices. Empty: all are of ``rollout_tp``. Made by :func:`split_of`, so that equal pools are
            equal records.
    """

    rollout: int
    train: int
    reward: int = 0
    rollout_tp: int = 1
    replicas: tuple[ReplicaSize, ...] = ()

    @property
    def total(self) -> int:
        """Devices that have a role."""
        return self.rollout + self.train + self.reward

    @property
    def sizes(self) -> tuple[ReplicaSize, ...]:
        """The rollout replicas, largest first, whether they are of one size or of several."""
        if self.replicas or not self.rollout:
            return self.replicas
        return (ReplicaSize(tp=self.rollout_tp, count=self.rollout // self.rollout_tp),)

    @property
    def num_replicas(self) -> int:
        """Rollout replicas."""
        return sum(size.count for size in self.sizes)

    @property
    def pool(self) -> str:
        """The replicas for people: ``4 x tp 8 + 1 x tp 4``."""
        return " + ".join(f"{size.count} x tp {size.tp}" for size in self.sizes) or "none"

    def of(self, role: Role) -> int:
        """Devices in ``role``."""
        return {Role.ROLLOUT: self.rollout, Role.TRAIN: self.train, Role.REWARD: self.reward}[role]

    def moved(self, source: Role, target: Role, num_devices: int = 1) -> "Split":
        """The split after ``num_devices`` went from one role to another.

        A pool of several sizes gives its smallest replicas first and gets replicas of ``rollout_tp``; where that does
        not come out even, the limits say so.
        """
        counts = {role: self.of(role) for role in Role}
        counts[source] -= num_devices
        counts[target] += num_devices
        split = Split(
            rollout=counts[Role.ROLLOUT],
            train=counts[Role.TRAIN],
            reward=counts[Role.REWARD],
            rollout_tp=self.rollout_tp,
        )
        if not self.replicas or split.rollout == self.rollout:
            return msgspec.structs.replace(split, replicas=self.replicas)
        return _with_replicas(split, self.replicas, split.rollout - self.rollout)


def split_of(sizes: Iterable[ReplicaSize], train: int, reward: int = 0, rollout_tp: int | None = None) -> Split:
    """The split with these rollout replicas, in the one form that equal pools share.

    Args:
        sizes: in any order; a size may come more than once.
        rollout_tp: of replicas that may come to a pool of several sizes, or to an empty one; None: the largest.
    """
    counts: dict[int, int] = {}
    for size in sizes:
        counts[size.tp] = counts.get(size.tp, 0) + size.count
    kept = tuple(ReplicaSize(tp=tp, count=counts[tp]) for tp in sorted(counts, reverse=True) if counts[tp])
    unit = rollout_tp if rollout_tp is not None else max(counts, default=1)
    return Split(
        rollout=sum(size.tp * size.count for size in kept),
        train=train,
        reward=reward,
        rollout_tp=kept[0].tp if len(kept) == 1 else unit,
        replicas=kept if len(kept) > 1 else (),
    )


def _with_replicas(split: Split, replicas: tuple[ReplicaSize, ...], num_more: int) -> Split:
    """The split whose pool is ``replicas`` with so many devices more, or less."""
    counts = {size.tp: size.count for size in replicas}
    if num_more > 0:
        counts[split.rollout_tp] = counts.get(split.rollout_tp, 0) + num_more // split.rollout_tp
    for tp in sorted(counts):
        number = min(counts[tp], max(0, -num_more) // tp)
        counts[tp] -= number
        num_more += number * tp
    sizes = (ReplicaSize(tp=tp, count=count) for tp, count in counts.items())
    made = split_of(sizes, split.train, split.reward, split.rollout_tp)
    # What did not come out even must show: the replicas do not add up to the devices.
    return made if made.rollout == split.rollout else msgspec.structs.replace(split, replicas=made.sizes)


class Limits(Record, frozen=True, kw_only=True):
    """What no plan may leave. ``total`` counts all devices, idle ones included; maxima None: all of them."""

    total: int
    min_rollout: int = 1
    min_train: int = 1
    min_reward: int = 0
    max_rollout: int | None = None
    max_train: int | None = None

    def __post_init__(self) -> None:
        for field in ("min_rollout", "min_train", "min_reward"):
            if getattr(self, field) < 0:
                raise InputError(f"{field} must be >= 0, got {getattr(self, field)}")
        need = self.min_rollout + self.min_train + self.min_reward
        if need > self.total:
            raise InputError(
                f"min_rollout + min_train + min_reward must be at most the {self.total} devices, got {need}"
            )
        for field, least in (("max_rollout", self.min_rollout), ("max_train", self.min_train)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise InputError(f"{field} must be >= {least}, its minimum, got {value}")

    def broken_by(self, split: Split) -> str | None:
        """What of the limits ``split`` breaks; None if nothing."""
        for role, least, most in (
            (Role.ROLLOUT, self.min_rollout, self.max_rollout),
            (Role.TRAIN, self.min_train, self.max_train),
            (Role.REWARD, self.min_reward, None),
        ):
            count = split.of(role)
            if count < least:
                return f"{role} must have at least {least} devices, got {count}"
            if most is not None and count > most:
                return f"{role} must have at most {most} devices, got {count}"
        if split.total > self.total:
            return f"a plan must use at most {self.total} devices, got {split.total}"
        if split.replicas:
            return _not_a_pool(split)
        if split.rollout_tp < 1 or split.rollout % split.rollout_tp:
            return _not_whole(split)
        return None


def _not_a_pool(split: Split) -> str | None:
    """What is wrong with a pool of several sizes; None: nothing."""
    before: int | None = None
    for index, size in enumerate(split.replicas):
        for field, value in (("tp", size.tp), ("count", size.count)):
            if value < 1:
                return f"replicas[{index}].{field} must be >= 1, got {value}"
        if before is not None and size.tp >= before:
            return f"replicas must be largest first, each size once, got tp {size.tp} after {before}"
        before = size.tp
    devices = sum(size.tp * size.count for size in split.replicas)
    if devices != split.rollout:
        return f"replicas must take the rollout = {split.rollout} devices together, got {devices}"
    return None


def _not_whole(split: Split) -> str:
    tp = split.rollout_tp
    if tp < 1:
        return f"rollout_tp must be >= 1, got {tp}"
    below = split.rollout // tp * tp
    would = f"{below} or {below + tp}" if below else str(tp)
    return f"rollout must be a multiple of rollout_tp = {tp}, got {split.rollout}; {would} would fit"


class StageTimes(Record, frozen=True, kw_only=True):
    """Seconds that each stage takes for one training batch with the devices that it has now; None: not yet measured.

    Both are measured over the same window, while the stage worked: waiting for another stage does not count.
    """

    rollout_s: float | None = None
    train_s: float | None = None
    reward_s: float | None = None

    def of(self, role: Role) -> float | None:
        """The stage's seconds."""
        return {Role.ROLLOUT: self.rollout_s, Role.TRAIN: self.train_s, Role.REWARD: self.reward_s}[role]


class Snapshot(Record, frozen=True, kw_only=True):
    """The system at one instant, between two optimizer steps.

    Attributes:
        step: optimizer steps done.
        split: devices by role as they are, moves under way counted as done.
        rollout_queue: rollouts that are admitted and do not generate yet: waiting for a place in an engine.
        train_backlog: trajectories of complete groups, if the trainer could begin a step with them now; else 0, for
        then
            they wait for a group that is still sampled, and not for the trainer.
        reward_queue: trajectories that wait for their score.
        times: what the stages take.
        switch_s: what it costs a device to change its role, drained work included; measured, or predicted at first.
        is_moving: a move is under way.
        work: what the run has seen of its work and what is under way; None: nothing is known.
    """

    at_s: float
    step: int
    split: Split
    limits: Limits
    rollout_queue: int = 0
    train_backlog: int = 0
    reward_queue: int = 0
    times: StageTimes = StageTimes()
    switch_s: float = 0.0
    is_moving: bool = False
    work: WorkSketch | None = None


class Plan(Record, frozen=True, kw_only=True):
    """What a policy wants. ``reason`` is one line for people; ``gain_frac`` the predicted gain in steps per second.

    ``is_due`` False: nothing was to be decided at this step, and no line is logged.
    """

    split: Split
    reason: str
    gain_frac: float | None = None
    is_due: bool = True

    def log_line(self, snapshot: Snapshot) -> str:
        """``step=15 rollout_queue=6 train_backlog=9 => adjust rollout=3 train=5``, or ``=> keep ...``.

        Where the sizes of replicas change it ends with the pool: ``(4 x tp 8 + 1 x tp 4)``.
        """
        verb = "keep" if self.split == snapshot.split else "adjust"
        before, after = ({size.tp for size in split.sizes} for split in (snapshot.split, self.split))
        pool = f" ({self.split.pool})" if before != after else ""
        queues = f"rollout_queue={snapshot.rollout_queue} train_backlog={snapshot.train_backlog}"
        return f"step={snapshot.step} {queues} => {verb} rollout={self.split.rollout} train={self.split.train}{pool}"


class Policy(Protocol):
    """Decides on devices. A pure function: the same snapshot and state give the same answer, live and simulated."""

    def decide(self, snapshot: Snapshot) -> Plan:
        """The split to have from now on. Called after each optimizer step. It must keep within ``snapshot.limits``."""
        ...


def checked(policy_name: str, plan: Plan, snapshot: Snapshot) -> Plan:
    """The plan, if it can be.

    Raises:
        InputError: it leaves the limits; names the policy and the limit.
    """
    broken = snapshot.limits.broken_by(plan.split)
    if broken is not None:
        raise InputError(f"policy {policy_name} at step {snapshot.step}: {broken}")
    return plan


def predicted_period_s(split: Split, snapshot: Snapshot) -> float | None:
    """Seconds per training batch under another split, if each stage's time is in inverse proportion to its devices.

    The slowest stage sets the pace. None where a stage that has devices is not measured yet.
    """
    slowest = 0.0
    for role in Role:
        present, wanted = snapshot.split.of(role), split.of(role)
        measured_s = snapshot.times.of(role)
        if present == 0 and wanted == 0:
            continue
        if measured_s is None or present == 0:
            return None
        slowest = max(slowest, float("inf") if wanted == 0 else measured_s * present / wanted)
    return slowest
