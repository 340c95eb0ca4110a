"""The best fixed split: what a careful user would have found with a cost model and some trial runs.

All layouts with one size of replicas are ranked by a cost model that knows every length beforehand; the first of them
are simulated on a part of the work, and the best of those on all of it. It is what policies that move devices are
judged against, with the router as it is: new conversations go where the least is open.

*Cost model.* Let a replica's batch be n sequences. Work: a step's trajectories take ``sum(prefill + decoded * step(n) /
n)`` seconds of a replica. Latency: a trajectory takes ``decoded * step(n)``, the prompts that the others compute
meanwhile, and its tools; its group holds its place for its slowest member, a training step and a publication, and there
are places for ``max_policy_lag + 1`` batches (Little). The more are in a batch the less work there is and the longer
the latency: the batch settles where both ask for the same period. The slowest of rollout, training, scoring and tools
sets the pace.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from steelyard.allocation.moving_cost import MovingCost
from steelyard.allocation.policies import FixedPolicy
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.allocation.snapshot import Limits, Split
from steelyard.allocation.work_sketch import TrajectoryFacts, facts_of
from steelyard.allocation.workload import GroupWork
from steelyard.errors import InputError
from steelyard.sim.bound import lower_bound, serving_layouts, train_batch
from steelyard.sim.faults import Faults
from steelyard.sim.fit import check_fit
from steelyard.sim.oracle import all_splits
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import SimResult, Simulation
from steelyard.sim.train_stage import TrainLayouts
from steelyard.types.record import Record

_NUM_BATCHES = 40
"""Batches of a replica that the cost model looks at, in equal ratios from 1 to the largest."""

_FEWEST_STEPS = 2

Floats = NDArray[np.float64]


class RankedSplit(Record, frozen=True, kw_only=True):
    """A split, and the seconds a step that the cost model expects of it."""

    split: Split
    period_s: float


class FixedSplit(Record, frozen=True, kw_only=True):
    """The best fixed split that was found.

    Attributes:
        result: of the whole run with it.
        num_ranked: layouts that the cost model looked at.
        short: makespans of the short runs, the best first.
        full: makespans of the whole runs, the best first.
    """

    split: Split
    result: SimResult
    num_ranked: int
    short: tuple[tuple[Split, float], ...]
    full: tuple[tuple[Split, float], ...]


def find_fixed_split(
    setup: SimSetup,
    limits: Limits,
    seed: int = 0,
    *,
    num_short: int = 20,
    num_full: int = 3,
    short_frac: float = 0.1,
    on_run: Callable[[str], None] = lambda _: None,
) -> FixedSplit:
    """Rank all layouts, simulate the best ``num_short`` on ``short_frac`` of the work and the best ``num_full`` whole.

    The short run has batches from all over the work, so that what comes late counts, and nothing dies in it.

    Args:
        on_run: called with a line before each run.

    Raises:
        InputError: no layout can do the work.
    """
    ranked = rank_splits(setup, limits)
    first = [one.split for one in ranked[:num_short]]
    short = _played(shortened(setup, short_frac), first, limits, seed, "short", on_run)
    full = _played(setup, [split for split, _ in short[:num_full]], limits, seed, "whole", on_run)
    return FixedSplit(
        split=full[0][0],
        result=full[0][1],
        num_ranked=len(ranked),
        short=tuple((split, result.makespan_s) for split, result in short),
        full=tuple((split, result.makespan_s) for split, result in full),
    )


def rank_splits(setup: SimSetup, limits: Limits) -> tuple[RankedSplit, ...]:
    """Every split into which the work fits that leaves no more devices idle than it must, by the cost model.

    Raises:
        InputError: there is none; says why the last one cannot be.
    """
    model, reason = _CostModel(setup), "there is no split within the limits"
    found = list[RankedSplit]()
    for layout in serving_layouts(setup):
        for split in _full_splits(setup, limits, layout.tp):
            try:
                check_fit(setup, split, limits)
                found.append(RankedSplit(split=split, period_s=model.period_s(split, layout)))
            except InputError as error:
                reason = str(error)
    if not found:
        raise InputError(f"{setup.name}: a fixed split must exist: {reason}")
    return tuple(sorted(found, key=lambda one: (one.period_s, one.split.rollout, one.split.rollout_tp)))


def shortened(setup: SimSetup, frac: float) -> SimSetup:
    """The same with so much of its steps, on batches that lie evenly over its work."""
    size, num_steps = setup.groups_per_batch, setup.num_steps
    fewest = min(num_steps, max(_FEWEST_STEPS, setup.max_policy_lag + 1))
    number = max(fewest, round(num_steps * frac))
    groups = setup.admitted_groups()
    batches = [round((index + 0.5) * num_steps / number - 0.5) for index in range(number)]
    chosen = tuple(group for batch in batches for group in groups[batch * size : (batch + 1) * size])
    return replace(setup, workload=replace(setup.workload, groups=chosen), num_steps=number, faults=Faults())


def _full_splits(setup: SimSetup, limits: Limits, tp: int) -> list[Split]:
    """Those to which no device can be added: rollout grows by whole replicas, training up to its maximum."""
    splits = [split for split in all_splits(setup, limits, tp) if limits.total - split.total < tp]
    most: dict[tuple[int, int], Split] = {}
    for split in splits:
        key = split.rollout, split.reward
        if key not in most or split.train > most[key].train:
            most[key] = split
    return list(most.values())


def _played(
    setup: SimSetup,
    splits: Sequence[Split],
    limits: Limits,
    seed: int,
    length: str,
    on_run: Callable[[str], None],
) -> list[tuple[Split, SimResult]]:
    """The splits with their runs, the best first."""
    bound, found = lower_bound(setup, limits), list[tuple[Split, SimResult]]()
    for index, split in enumerate(splits):
        on_run(f"{length} run {index + 1} of {len(splits)}: {split.rollout} rollout (tp {split.rollout_tp})")
        found.append((split, Simulation(setup, split, limits, FixedPolicy(), "fixed", seed, bound=bound).run()))
    return sorted(found, key=lambda pair: pair[1].makespan_s)


class _CostModel:
    """Knows all of the work."""

    def __init__(self, setup: SimSetup) -> None:
        self._setup = setup
        roofline = Roofline(setup.device, setup.corrections)
        self._moving = MovingCost(setup.model, roofline, setup.rates, setup.element_bytes)
        self._groups = setup.admitted_groups()
        facts = [[facts_of(one) for one in group.trajectories] for group in self._groups]
        self._facts = [one for group in facts for one in group]
        self._decoded = _array(facts, lambda one: one.decoded_tokens + one.num_turns)
        self._kv_read = _array(facts, lambda one: one.kv_read_tokens)
        self._tools_s = _array(facts, lambda one: one.tool_s) + setup.start_s + setup.end_s + setup.reward.function_s
        size = setup.groups_per_batch
        batches = [self._groups[start : start + size] for start in range(0, len(self._groups), size)]
        self._batches = [train_batch(batch) for batch in batches]
        self._layouts = TrainLayouts(setup)
        self._trained_s = dict[int, float]()
        self._reward_device_s = self._scored_s(batches)
        self._prefill = dict[int, Floats]()

    def period_s(self, split: Split, layout: ServingCost) -> float:
        """Seconds an optimizer step.

        Raises:
            InputError: training does not fit.
        """
        setup = self._setup
        train_s = self._train_s(split.train)
        slowest = [train_s, self._slots_s()]
        if setup.reward.model is not None:
            slowest.append(self._reward_device_s / max(1, split.reward))
        num_replicas = split.rollout // split.rollout_tp
        rollout_s = self._rollout_s(layout, num_replicas, train_s)
        return max(*slowest, rollout_s)

    def _rollout_s(self, layout: ServingCost, num_replicas: int, train_s: float) -> float:
        """The least period over the batches of a replica that both work and latency allow."""
        setup = self._setup
        prefill = self._prefill_s(layout)
        mean_context = float(self._kv_read.sum() / max(1.0, self._decoded.sum()))
        room = layout.kv_capacity_tokens if setup.engine.kv_tokens is None else setup.engine.kv_tokens
        most = max(1.0, min(setup.max_running, room / max(1.0, mean_context)))
        tail_s = train_s + self._moving.publish_s(layout, num_replicas)
        batch_size, best = setup.groups_per_batch * setup.group_size, float("inf")
        mean_share = float(prefill.sum() / self._decoded.sum())
        for batch in np.geomspace(1.0, most, _NUM_BATCHES).tolist():
            step_s = layout.step_s(StepWork(num_decoding=round(batch), kv_tokens=batch * mean_context))
            work_s = float(prefill.mean() + self._decoded.mean() * step_s / batch) * batch_size / num_replicas
            paths = self._decoded * (step_s + batch * mean_share) + prefill + self._tools_s
            slowest = paths.max(axis=1)
            if setup.max_policy_lag == 0:
                # All of a batch are admitted at once, and the step waits for the slowest of them.
                size = setup.groups_per_batch
                ends = [float(slowest[start : start + size].max()) for start in range(0, len(slowest), size)]
                held_s = sum(ends) / len(ends) + tail_s
            else:
                held_s = float(slowest.mean() + tail_s) / (setup.max_policy_lag + 1)
            best = min(best, max(work_s, held_s))
        return best

    def _prefill_s(self, layout: ServingCost) -> Floats:
        """Seconds that the prompts of each trajectory take a replica, alone."""
        found = self._prefill.get(layout.tp)
        if found is None:
            times = [
                layout.step_s(
                    StepWork(
                        prefill_tokens=one.prompt_tokens, prefill_pairs=one.prompt_pairs, num_prompts=one.num_turns
                    )
                )
                for one in self._facts
            ]
            found = self._prefill[layout.tp] = np.array(times).reshape(self._decoded.shape)
        return found

    def _train_s(self, num_devices: int) -> float:
        """The mean over the run's batches."""
        if num_devices not in self._trained_s:
            times = [self._layouts.best(num_devices, batch).step_s(batch) for batch in self._batches]
            self._trained_s[num_devices] = sum(times) / len(times)
        return self._trained_s[num_devices]

    def _scored_s(self, batches: Sequence[Sequence[GroupWork]]) -> float:
        """Device-seconds a step of the reward model."""
        setup = self._setup
        if setup.reward.model is None:
            return 0.0
        cost = ServingCost(setup.reward.model, Roofline(setup.device, setup.corrections), 1, setup.element_bytes)
        tokens = [one.trained_tokens for one in self._facts]
        return sum(cost.prefill_s(number) for number in tokens) / len(batches)

    def _slots_s(self) -> float:
        slots, graders = self._setup.tool_slots, self._setup.reward.num_slots
        tools_s = 0.0 if slots is None else sum(one.tool_s for one in self._facts) / slots
        graded_s = 0.0 if graders is None else len(self._facts) * self._setup.reward.function_s / graders
        return max(tools_s, graded_s) / len(self._batches)


def _array(facts: Sequence[Sequence[TrajectoryFacts]], of: Callable[[TrajectoryFacts], float]) -> Floats:
    """Groups times members."""
    return np.array([[of(one) for one in group] for group in facts], dtype=np.float64)
