"""The global resource planner of Libra (Chen et al., arXiv 2606.03077), as a baseline.

A search in two levels over the history of trajectories: outside over the devices of training, each count in its fastest
layout, given up where training alone is slower than the best plan so far; inside over the rollout cluster, instances of
two tensor-parallel sizes, where short trajectories go to the small ones and long ones to the large ones, cut so that
both are busy for equally long. The plan with the least ``max(T_train, T_rollout)`` is taken if it is better by a share
and saves more until the next planning than the reconfiguration costs.

What the public code leaves to external simulators (Vidur, Sailor) is answered by our cost model, and its list of
partitions, cut off after 500, is searched whole over two sizes. It knows neither the places of the staleness bound nor
what is under way: that is what our planner is measured against.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from steelyard.allocation.architecture import check_tp
from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.roofline import Roofline
from steelyard.allocation.serving_cost import ServingCost, StepWork
from steelyard.allocation.snapshot import Plan, ReplicaSize, Snapshot, Split, split_of
from steelyard.allocation.train_table import TrainTable
from steelyard.allocation.training_cost import TrainBatch
from steelyard.allocation.work_sketch import TrajectoryFacts
from steelyard.errors import InputError

Floats = npt.NDArray[np.float64]

_ROOM = 1.5
"""A replica must hold so many times the longest context of the history: a longer one may come."""


class LibraPolicy:
    """Plans every ``plan_interval_steps`` optimizer steps.

    Args:
        min_history: trajectories that must have ended.
        min_gain_frac: what a new plan must save of the period.
        sizes: tensor-parallel sizes of instances.
    """

    def __init__(
        self,
        cluster: ClusterModel,
        plan_interval_steps: int = 2,
        min_history: int = 16,
        min_gain_frac: float = 0.05,
        sizes: Sequence[int] = (1, 2, 4, 8),
    ) -> None:
        for field, value in (("plan_interval_steps", plan_interval_steps), ("min_history", min_history)):
            if value < 1:
                raise InputError(f"{field} must be >= 1, got {value}")
        if not 0.0 <= min_gain_frac < 1.0:
            raise InputError(f"min_gain_frac must be >= 0 and below 1, got {min_gain_frac}")
        self._cluster, self._interval_steps = cluster, plan_interval_steps
        self._min_history, self._min_gain_frac = min_history, min_gain_frac
        self._costs = _serving_costs(cluster, sizes)
        self._sizes = frozenset(sizes)

    def decide(self, snapshot: Snapshot) -> Plan:
        """See :class:`steelyard.allocation.snapshot.Policy`."""
        kept, work = snapshot.split, snapshot.work
        if snapshot.step % self._interval_steps:
            return Plan(split=kept, reason=f"plans every {self._interval_steps} steps", is_due=False)
        if work is None or sum(len(group.members) for group in work.groups) < self._min_history:
            return Plan(split=kept, reason=f"fewer than {self._min_history} trajectories have ended")
        if snapshot.is_moving:
            return Plan(split=kept, reason="a move is under way")
        history = [member for group in work.groups for member in group.members]
        search = _Search(self._cluster, self._costs, self._sizes, history, snapshot.limits.total - kept.reward)
        present_s = search.period_s(kept)
        best, best_s = search.best(snapshot)
        if best is None or best == kept:
            return Plan(split=kept, reason="no plan is predicted to be faster", gain_frac=0.0)
        gain_frac = 1.0 - best_s / present_s
        words = f"{best_s:.1f} s a step in the place of {present_s:.1f} s"
        if gain_frac < self._min_gain_frac:
            return Plan(split=kept, reason=f"{words} is less than {self._min_gain_frac:.0%} better")
        if (present_s - best_s) * self._interval_steps <= snapshot.switch_s:
            return Plan(split=kept, reason=f"{words} does not pay for {snapshot.switch_s:.1f} s of reconfiguration")
        return Plan(split=best, reason=words, gain_frac=gain_frac)


class _Search:
    """One planning."""

    def __init__(
        self,
        cluster: ClusterModel,
        costs: dict[int, ServingCost],
        sizes: frozenset[int],
        history: list[TrajectoryFacts],
        num_devices: int,
    ) -> None:
        self._cluster, self._num_devices = cluster, num_devices
        history.sort(key=lambda one: one.decoded_tokens)
        self._history = history
        self._decoded = np.array([one.decoded_tokens + one.num_turns for one in history], dtype=np.float64)
        self._tools_s = np.array([one.tool_s for one in history]) + cluster.start_s + cluster.end_s
        self._kv = float(sum(one.kv_read_tokens for one in history) / max(1.0, self._decoded.sum()))
        longest = _ROOM * max(one.longest_context_tokens for one in history)
        limit = cluster.engine.kv_tokens
        room = {tp: cost.kv_capacity_tokens if limit is None else limit for tp, cost in costs.items()}
        self._costs = {tp: cost for tp, cost in costs.items() if tp in sizes and room[tp] >= longest}
        self._all_costs, self._room = costs, room
        self._prefill: dict[int, Floats] = {}
        self._train_s = self._table(cluster, history, num_devices)

    def best(self, snapshot: Snapshot) -> tuple[Split | None, float]:
        """The plan with the least period within the limits."""
        best, best_s = None, float("inf")
        reward, limits = snapshot.split.reward, snapshot.limits
        for train in range(max(1, limits.min_train), self._num_devices):
            train_s = float(self._train_s[train])
            if train_s >= best_s:
                continue
            for sizes in self._partitions(self._num_devices - train):
                split = split_of(sizes, train, reward)
                if limits.broken_by(split) is not None:
                    continue
                period_s = max(train_s, self._rollout_s(split.sizes))
                if period_s < best_s:
                    best, best_s = split, period_s
        return best, best_s

    def period_s(self, split: Split) -> float:
        """The slower of training and rollout under a split that is there."""
        return max(float(self._train_s[min(split.train, self._num_devices)]), self._rollout_s(split.sizes))

    def _partitions(self, num_devices: int) -> list[tuple[ReplicaSize, ...]]:
        """Instances of one size, or of two, that use all devices; else of one size with the fewest left over."""
        found = list[tuple[ReplicaSize, ...]]()
        for small, large in product(self._costs, self._costs):
            if small == large and num_devices >= small:
                found.append((ReplicaSize(tp=small, count=num_devices // small),))
            for count in range(1, num_devices // large) if small < large else ():
                rest = num_devices - count * large
                if rest >= small and rest % small == 0:
                    found.append((ReplicaSize(tp=large, count=count), ReplicaSize(tp=small, count=rest // small)))
        return found

    def _rollout_s(self, sizes: Sequence[ReplicaSize]) -> float:
        """Seconds of the batch on instances of these sizes; more than two sizes count as the largest and the rest."""
        if not sizes:
            return float("inf")
        cluster, num_replicas = self._cluster, sum(size.count for size in sizes)
        live = (cluster.max_policy_lag + 1) * cluster.batch_trajectories
        scale = cluster.batch_trajectories / len(self._history)
        works, paths = list[Floats](), list[Floats]()
        for size in (sizes[-1], sizes[0]):
            most = min(cluster.max_running, self._room[size.tp] / max(1.0, self._kv))
            batch = max(1.0, min(most, live / num_replicas))
            step_s = self._all_costs[size.tp].step_s(StepWork(num_decoding=round(batch), kv_tokens=batch * self._kv))
            prefill = self._prefill_s(size.tp)
            works.append((prefill + self._decoded * step_s / batch) * scale)
            paths.append((prefill + self._decoded * step_s + self._tools_s) / (cluster.max_policy_lag + 1))
        if len(sizes) == 1:
            return float(max(works[0].sum() / sizes[0].count, paths[0].max()))
        short = np.concatenate([[0.0], np.cumsum(works[0])]) / sum(size.count for size in sizes[1:])
        long = np.concatenate([np.cumsum(works[1][::-1])[::-1], [0.0]]) / sizes[0].count
        slowest_short = np.concatenate([[0.0], np.maximum.accumulate(paths[0])])
        slowest_long = np.concatenate([np.maximum.accumulate(paths[1][::-1])[::-1], [0.0]])
        return float(np.maximum.reduce([short, long, slowest_short, slowest_long]).min())

    def _prefill_s(self, tp: int) -> Floats:
        if tp not in self._prefill:
            cost = self._all_costs[tp]
            works = (
                StepWork(prefill_tokens=one.prompt_tokens, prefill_pairs=one.prompt_pairs, num_prompts=one.num_turns)
                for one in self._history
            )
            self._prefill[tp] = np.array([cost.step_s(work) for work in works])
        return self._prefill[tp]

    def _table(self, cluster: ClusterModel, history: list[TrajectoryFacts], num_devices: int) -> Floats:
        scale = cluster.batch_trajectories / len(history)
        batch = TrainBatch(
            num_tokens=max(1, round(scale * sum(one.trained_tokens for one in history))),
            pairs=scale * sum(one.train_pairs for one in history),
            longest_tokens=max(one.longest_train_tokens for one in history),
        )
        roofline = Roofline(cluster.device, cluster.corrections)
        return TrainTable(cluster.architecture, roofline, batch, num_devices, cluster.element_bytes).step_s


def _serving_costs(cluster: ClusterModel, sizes: Sequence[int]) -> dict[int, ServingCost]:
    """All that can be: a pool may begin with a size that is never planned."""
    roofline, found = Roofline(cluster.device, cluster.corrections), dict[int, ServingCost]()
    for tp in range(1, cluster.device.devices_per_node + 1):
        try:
            check_tp(cluster.architecture, tp, roofline.device.devices_per_node)
            found[tp] = ServingCost(cluster.architecture, roofline, tp, cluster.element_bytes)
        except InputError:
            continue
    if not set(sizes) & set(found):
        raise InputError(f"sizes must have one into which {cluster.architecture.name} fits, got {tuple(sizes)}")
    return found
