"""The oracle: knows all lengths in advance, for it plays whole runs before it decides. Simulator only.

It is a reference and no bound. What it searches are *schedules*: the split to go over to after each optimizer step.
Every policy is a schedule once it has played, for a policy's answer is all that it does. So the best schedule is the
best that any policy can do with this simulator: its router, its trainer, its decisions after steps only. Where there
are few schedules the oracle plays all of them; else it begins with what the simple policies did, so that it is never
worse than they are, and goes on from the best one by pattern search (Hooke, Jeeves, JACM 8(2), 1961): the splits from
some step on are shifted, by ever fewer devices, until nothing gets better.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from steelyard.allocation.policies import FixedPolicy, QueuePolicy, RatioPolicy
from steelyard.allocation.snapshot import Limits, Plan, Policy, Role, Snapshot, Split
from steelyard.errors import InputError
from steelyard.sim.bound import Bound, lower_bound
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import SimResult, Simulation
from steelyard.types.record import Record

Schedule = tuple[Split, ...]
"""The split after step 1, 2, ..., one fewer than there are steps: what is decided after the last has no effect."""


class SchedulePolicy:
    """Asks for the splits of a schedule, one after each step; keeps what there is where that is forbidden."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def decide(self, snapshot: Snapshot) -> Plan:
        """See :class:`steelyard.allocation.snapshot.Policy`."""
        if not 1 <= snapshot.step <= len(self._schedule):
            return Plan(split=snapshot.split, reason="the schedule is over")
        wanted = self._schedule[snapshot.step - 1]
        broken = snapshot.limits.broken_by(wanted)
        if broken is not None:
            return Plan(split=snapshot.split, reason=f"the schedule has {wanted}, but {broken}")
        return Plan(split=wanted, reason="by the schedule")


class Play(Record, frozen=True, kw_only=True):
    """A run that was played, and what it did."""

    start: Split
    schedule: Schedule
    result: SimResult


class Oracle(Record, frozen=True, kw_only=True):
    """The best run that was found, out of ``num_runs``; ``is_exhaustive``: there are no others."""

    best: Play
    num_runs: int
    is_exhaustive: bool

    @property
    def policy(self) -> Policy:
        """Plays it again."""
        return SchedulePolicy(self.best.schedule)


class _Recorder:
    """Writes down what another policy asks for, by steps: after some nobody is asked."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.asked = dict[int, Split]()

    def decide(self, snapshot: Snapshot) -> Plan:
        plan = self._policy.decide(snapshot)
        self.asked[snapshot.step] = plan.split
        return plan


class Player:
    """Plays runs of one setup, and remembers them.

    Args:
        seed: of ids and failures: all runs have the same.
    """

    def __init__(self, setup: SimSetup, limits: Limits, seed: int = 0) -> None:
        self._setup, self._limits, self._seed = setup, limits, seed
        self._bound: Bound = lower_bound(setup, limits)
        self._played: dict[tuple[Split, Schedule], Play] = {}

    @property
    def num_runs(self) -> int:
        """Runs that were played."""
        return len(self._played)

    def play(self, start: Split, policy: Policy, name: str) -> Play:
        """A run under a policy."""
        recorder = _Recorder(policy)
        simulation = Simulation(self._setup, start, self._limits, recorder, name, self._seed, bound=self._bound)
        result = simulation.run()
        schedule = tuple(recorder.asked.get(step, start) for step in range(1, self._setup.num_steps))
        play = Play(start=start, schedule=schedule, result=result)
        return self._played.setdefault((start, schedule), play)

    def play_schedule(self, start: Split, schedule: Schedule) -> Play:
        """A run by a schedule, once."""
        found = self._played.get((start, schedule))
        if found is None:
            play = self.play(start, SchedulePolicy(schedule), "oracle")
            # A split that is forbidden while devices are dead was not asked for: it is the same run under both names.
            found = self._played.setdefault((start, schedule), play)
        return found


def find_oracle(setup: SimSetup, start: Split, limits: Limits, seed: int = 0, max_runs: int = 24) -> Oracle:
    """The best schedule that begins with ``start``.

    Raises:
        InputError: ``start`` cannot be; or ``max_runs`` is below 4, the simple policies and one more.
    """
    if max_runs < 4:
        raise InputError(f"policy.options.max_runs must be >= 4, got {max_runs}")
    player = Player(setup, limits, seed)
    reachable = [split for split in all_splits(setup, limits, start.rollout_tp) if split.reward or not start.reward]
    if len(reachable) ** (setup.num_steps - 1) <= max_runs:
        best = _first([player.play_schedule(start, one) for one in _schedules(reachable, setup.num_steps)])
        return Oracle(best=best, num_runs=player.num_runs, is_exhaustive=True)
    simple = (("fixed", FixedPolicy()), ("queue", QueuePolicy()), ("ratio", RatioPolicy()))
    best = _first([player.play(start, policy, name) for name, policy in simple])
    best = _improved(player, best, limits, max_runs)
    return Oracle(best=best, num_runs=player.num_runs, is_exhaustive=False)


def exhaustive_optimum(player: Player, setup: SimSetup, limits: Limits, tp_sizes: Sequence[int]) -> tuple[Play, ...]:
    """Every run that there is: all sizes of replicas, all splits to begin with, idle devices included, and all
    schedules; the best first.
    """
    plays = [
        player.play_schedule(start, schedule)
        for tp in tp_sizes
        for start in all_splits(setup, limits, tp)
        for schedule in _schedules(all_splits(setup, limits, tp), setup.num_steps)
    ]
    return tuple(sorted(plays, key=lambda play: play.result.makespan_s))


def all_splits(setup: SimSetup, limits: Limits, rollout_tp: int) -> list[Split]:
    """Every split within the limits; a reward pool only where a model scores."""
    most_reward = limits.total if setup.reward.model is not None else 0
    wanted = (
        Split(rollout=rollout, train=train, reward=reward, rollout_tp=rollout_tp)
        for reward in range(limits.min_reward, most_reward + 1)
        for rollout in range(rollout_tp, limits.total + 1, rollout_tp)
        for train in range(1, limits.total - rollout - reward + 1)
    )
    return [split for split in wanted if limits.broken_by(split) is None]


def _schedules(splits: Sequence[Split], num_steps: int) -> Iterator[Schedule]:
    return product(splits, repeat=num_steps - 1)


def _improved(player: Player, best: Play, limits: Limits, max_runs: int) -> Play:
    unit = best.start.rollout_tp
    step = max(1, (best.start.rollout + best.start.train) // unit // 4)
    while step and player.num_runs < max_runs:
        better = _first([best, *_neighbours(player, best, limits, step * unit, max_runs)])
        if better.result.makespan_s >= best.result.makespan_s:
            step //= 2
        best = better
    return best


def _neighbours(player: Player, best: Play, limits: Limits, number: int, max_runs: int) -> Iterator[Play]:
    """Runs in which ``number`` devices more, or fewer, are in another role from some step on."""
    pairs = [(Role.TRAIN, Role.ROLLOUT), (Role.ROLLOUT, Role.TRAIN)]
    if best.start.reward:
        pairs += [(Role.TRAIN, Role.REWARD), (Role.REWARD, Role.TRAIN)]
    length = len(best.schedule)
    for since, (source, target) in product(dict.fromkeys((0, length // 2, length // 4, length * 3 // 4)), pairs):
        changed = tuple(
            split.moved(source, target, number) if index >= since else split
            for index, split in enumerate(best.schedule)
        )
        # Where the limits forbid it a step keeps the split that it had.
        allowed = tuple(
            wanted if limits.broken_by(wanted) is None else split
            for wanted, split in zip(changed, best.schedule, strict=True)
        )
        if allowed != best.schedule and player.num_runs < max_runs:
            yield player.play_schedule(best.start, allowed)


def _first(plays: Sequence[Play]) -> Play:
    return min(plays, key=lambda play: play.result.makespan_s)
