"""The proven bound against every policy and the exhaustive optimum of small instances; physics of the cost model.

An instance is drawn: 2 to 4 devices, 1 to 3 steps, batches of one group of up to 4 members or two of up to 2, lengths,
tools, KV memory, lag bound, corrections, and in every fourth failures or an outage. On each are played `fixed`,
`queue`, `ratio`, `oracle`, one random policy, and every run that there is:

    allocations   all sizes of replicas, all splits to begin with (idle devices included), and after each step but the
                  last all splits again. A policy is asked after steps only and answers with a split: what it does is
                  one of these schedules, whatever it knows. So the best of them is the optimum of this simulator, with
                  the real router and coordinator. Instances are drawn such that there are at most 64.
    placements    for instances of one step and at most 4 trajectories also the router is left out: all ways to put
                  whole trajectories onto the replicas, in all orders, for all sizes of replicas and all splits. It is
                  the optimum among those that leave a trajectory where it began and let none wait for nothing.

No run may be faster than the bound. Printed is the median, over instances, of the optimum's time over the bound's, by
what binds. Physics: each property of the cost model on random cases that the model does not refuse. All of it counts
and compares times of the simulation; the machine's own speed decides nothing.

    python benchmarks/bound.py            1,000 instances, 2,000 cases for each property
    python benchmarks/bound.py --check    the same; exit code 1 where a floor of floors.toml is missed
    python benchmarks/bound.py --quick    40 instances, 200 cases
"""

import argparse
import logging
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from random import Random

from steelyard.allocation.moving_cost import MovingRates
from steelyard.allocation.policies import FixedPolicy, QueuePolicy, RatioPolicy
from steelyard.allocation.roofline import Corrections
from steelyard.allocation.serving_cost import ServingCost
from steelyard.allocation.snapshot import Limits, Plan, Policy, Role, Snapshot
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.allocation.workload import TrajectoryWork
from steelyard.errors import InputError
from steelyard.sim.bound import lower_bound, serving_layouts, train_batch
from steelyard.sim.faults import DeviceFailure, Faults, ToolOutage
from steelyard.sim.kernel import Kernel
from steelyard.sim.oracle import Player, all_splits, exhaustive_optimum, find_oracle
from steelyard.sim.replica import SimCall, SimReplica
from steelyard.sim.setup import RewardWork, SimSetup
from steelyard.sim.train_stage import TrainLayouts
from steelyard.testing.physics import PROPERTIES, draw_case, holds
from steelyard.testing.toy_devices import TOY_MODEL, toy_device_for

FLOORS: dict[str, float] = tomllib.loads((Path(__file__).parent / "floors.toml").read_text())["bound"]
MAX_PLAYS = 64
MAX_PLACED = 4


class RandomPolicy:
    """Asks for any split that is allowed."""

    def __init__(self, setup: SimSetup, limits: Limits, rng: Random) -> None:
        self._setup, self._limits, self._rng = setup, limits, rng

    def decide(self, snapshot: Snapshot) -> Plan:
        """See :class:`steelyard.allocation.snapshot.Policy`."""
        allowed = [
            split
            for split in all_splits(self._setup, self._limits, snapshot.split.rollout_tp)
            if snapshot.limits.broken_by(split) is None
        ]
        return Plan(split=self._rng.choice(allowed or [snapshot.split]), reason="dice")


@dataclass(frozen=True)
class Found:
    """Of one instance: shares of the bound by who played, what binds, and the optimum's time over the bound's."""

    shares: dict[str, float]
    binding: str
    num_runs: int
    looseness: float
    placed_looseness: float | None


def draw_instance(rng: Random) -> tuple[SimSetup, Limits]:
    """A small instance with at most ``MAX_PLAYS`` runs."""
    num_devices, num_steps = rng.choice([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2)])
    num_groups = rng.choice([1, 2])
    spec = SyntheticSpec(
        num_groups=num_groups * num_steps,
        group_size=rng.randint(1, 4 if num_groups == 1 else 2),
        turns=LengthSpec(median=rng.choice([1, 2, 4]), sigma=0.6),
        generated_tokens=LengthSpec(median=rng.choice([5, 60, 400]), sigma=rng.uniform(0, 1.2)),
        first_prompt_tokens=LengthSpec(median=rng.choice([50, 1000, 4000]), sigma=0.3),
        tool_result_tokens=LengthSpec(median=rng.choice([20, 400]), sigma=0.5),
        tool_s=LengthSpec(median=rng.choice([0.001, 0.05, 0.5]), sigma=1.0, longest=5.0),
        max_context_tokens=8192,
    )
    setup = SimSetup(
        name="instance",
        device=toy_device_for(rng.choice([8192, 20_000, 200_000])),
        num_devices=num_devices,
        model=TOY_MODEL,
        corrections=Corrections(
            **{name: rng.uniform(1, 3) for name in ("prefill_compute", "decode_compute", "train_compute", "memory")},
            overlap=rng.random(),
        ),
        workload=draw_workload(spec, "drawn", rng),
        num_steps=num_steps,
        groups_per_batch=num_groups,
        max_policy_lag=rng.randint(0, 2),
        rates=MovingRates(start_s=rng.choice([0.01, 0.3]), release_s=0.01, storage_bytes_per_s=1e9),
        reward=RewardWork(function_s=rng.choice([0.0, 0.2]), num_slots=rng.choice([None, None, 1])),
        tool_slots=rng.choice([None, None, 1, 2]),
        max_running=rng.choice([2, 16, 256]),
        recompute_kv=rng.random() < 0.5,
        faults=_draw_faults(rng) if rng.random() < 0.25 else Faults(),
    )
    least = TrainLayouts(setup).least_devices(1)
    return setup, Limits(total=num_devices, min_train=least)


def _draw_faults(rng: Random) -> Faults:
    death = DeviceFailure(at_s=rng.uniform(0, 2), role=rng.choice([Role.ROLLOUT, Role.TRAIN]), returns_after_s=0.3)
    outage = ToolOutage(begins_s=rng.uniform(0, 1), lasts_s=0.5, slowdown=rng.choice([None, 4.0]))
    return rng.choice(
        [Faults(failures=(death,)), Faults(outages=(outage,)), Faults(outages=(outage,), failures=(death,))]
    )


def measure(rng: Random) -> Found:
    """Play everything on one instance."""
    setup, limits = draw_instance(rng)
    bound = lower_bound(setup, limits)
    player = Player(setup, limits)
    tp_sizes = [layout.tp for layout in serving_layouts(setup) if all_splits(setup, limits, layout.tp)]
    plays = exhaustive_optimum(player, setup, limits, tp_sizes)
    start = rng.choice(all_splits(setup, limits, rng.choice(tp_sizes)))
    policies: dict[str, Policy] = {
        "fixed": FixedPolicy(),
        "queue": QueuePolicy(adjust_interval_steps=1),
        "ratio": RatioPolicy(),
        "random": RandomPolicy(setup, limits, rng),
    }
    makespans = {name: player.play(start, policy, name).result.makespan_s for name, policy in policies.items()}
    makespans["oracle"] = find_oracle(setup, start, limits).best.result.makespan_s
    makespans["every run"] = plays[0].result.makespan_s
    placed_s = best_placement_s(setup, limits, tp_sizes)
    if placed_s is not None:
        makespans["placements"] = placed_s
    return Found(
        shares={name: bound.makespan_s / makespan_s for name, makespan_s in makespans.items()},
        binding=bound.binding,
        num_runs=len(plays),
        looseness=plays[0].result.makespan_s / bound.makespan_s,
        placed_looseness=None if placed_s is None else placed_s / bound.makespan_s,
    )


def best_placement_s(setup: SimSetup, limits: Limits, tp_sizes: Sequence[int]) -> float | None:
    """The least time of one step over all placements; None where there are too many, or tools and graders queue."""
    trajectories = [one for group in setup.admitted_groups() for one in group.trajectories]
    is_free = setup.tool_slots is None and setup.reward.num_slots is None and setup.faults == Faults()
    if setup.num_steps > 1 or len(trajectories) > MAX_PLACED or not is_free:
        return None
    batch, layouts = train_batch(setup.admitted_groups()), TrainLayouts(setup)
    costs = {layout.tp: layout for layout in serving_layouts(setup)}
    best_s = float("inf")
    for tp in tp_sizes:
        sampled_s: dict[int, float] = {}
        for split in all_splits(setup, limits, tp):
            number = split.rollout // tp
            if number not in sampled_s:
                placements = _placements(len(trajectories), number)
                sampled_s[number] = min(_sample_s(setup, costs[tp], trajectories, one) for one in placements)
            step_s = layouts.best(split.train, batch).step_s(batch)
            best_s = min(best_s, sampled_s[number] + setup.reward.function_s + step_s)
    return best_s


def _placements(num_trajectories: int, num_replicas: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to put numbered trajectories onto alike replicas, in an order on each."""
    seen = set[frozenset[tuple[int, ...]]]()
    for order in permutations(range(num_trajectories)):
        for cuts in _cuts(num_trajectories, num_replicas):
            parts = tuple(order[begin:end] for begin, end in zip((0, *cuts), (*cuts, num_trajectories), strict=True))
            kind = frozenset(part for part in parts if part)
            if kind not in seen:
                seen.add(kind)
                yield parts


def _cuts(length: int, num_parts: int, since: int = 0) -> Iterator[tuple[int, ...]]:
    if num_parts == 1:
        yield ()
        return
    for cut in range(since, length + 1):
        for rest in _cuts(length, num_parts - 1, cut):
            yield (cut, *rest)


def _sample_s(
    setup: SimSetup, cost: ServingCost, trajectories: Sequence[TrajectoryWork], placement: Sequence[Sequence[int]]
) -> float:
    """When the last trajectory ends, each on its replica from the first turn to the last."""
    kernel, ended_s = Kernel(), list[float]()
    for number, members in enumerate(placement):
        replica = SimReplica(f"r{number}", kernel, cost, max_running=setup.max_running)
        for member in members:
            _play(kernel, replica, trajectories[member], str(member), ended_s)
    kernel.run()
    return max(ended_s)


def _play(kernel: Kernel, replica: SimReplica, work: TrajectoryWork, name: str, ended_s: list[float]) -> None:
    contexts = work.contexts()

    def call(index: int) -> None:
        def done() -> None:
            if index + 1 < len(work.turns):
                kernel.after(work.turns[index].tool_s, lambda: call(index + 1))
            else:
                ended_s.append(kernel.now_s())

        new_tokens = work.turns[index].generated_tokens
        replica.submit(SimCall(attempt_id=name, prompt_tokens=contexts[index], new_tokens=new_tokens, on_done=done))

    call(0)


def show_instances(number: int) -> float:
    """Play so many, print, and return the largest share of the bound."""
    rng, found = Random(5), list[Found]()
    while len(found) < number:
        state = rng.getstate()
        try:
            found.append(measure(rng))
        except InputError as error:
            # What was drawn fits into no layout: another one is drawn in its place, from the state after it.
            if rng.getstate() == state:
                raise AssertionError("an instance must be drawn before it is refused") from error
    by_name = defaultdict[str, list[float]](list)
    for one in found:
        for name, share in one.shares.items():
            by_name[name].append(share)
    print(f"{number} instances, {sum(one.num_runs for one in found):,} runs in all of them")
    print(f"{'share of the bound':22}{'median':>10}{'largest':>10}{'instances':>11}")
    for name, shares in by_name.items():
        print(f"{name:22}{statistics.median(shares):10.3f}{max(shares):10.6f}{len(shares):11}")
    show_looseness("allocations", [(one.binding, one.looseness) for one in found])
    placed = [(one.binding, one.placed_looseness) for one in found if one.placed_looseness is not None]
    show_looseness("placements", placed)
    return max(max(shares) for shares in by_name.values())


def show_looseness(what: str, found: Sequence[tuple[str, float]]) -> None:
    """Medians of the optimum's time over the bound's, by what binds."""
    by_term = defaultdict[str, list[float]](list)
    for term, value in found:
        by_term["all"].append(value)
        by_term[term].append(value)
    parts = [f"{term} {statistics.median(values):.3f} ({len(values)})" for term, values in by_term.items()]
    print(f"looseness, optimum of {what} over bound, median by what binds: {', '.join(parts)}")


def show_physics(number: int) -> int:
    """Try each property on so many cases, print, and return how many broke one."""
    num_broken = 0
    for name, check in PROPERTIES.items():
        rng, tried, broken = Random(7), 0, 0
        while tried < number:
            held = holds(check, draw_case(rng))
            tried += held is not None
            broken += held is False
        print(f"{name:66}{tried:6} cases{broken:4} broken")
        num_broken += broken
    return num_broken


def main() -> int:
    """Run, print, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a floor is missed")
    parser.add_argument("--quick", action="store_true", help="40 instances, 200 cases")
    arguments = parser.parse_args()
    logging.getLogger("steelyard").setLevel(logging.ERROR)
    num_instances, num_cases = (40, 200) if arguments.quick else (1000, 2000)
    figures = {
        "max_physics_broken": float(show_physics(num_cases)),
        "max_share_of_bound": show_instances(num_instances),
    }
    missed = [name for name, figure in figures.items() if figure > FLOORS[name]]
    for name, figure in figures.items():
        verdict = "MISSED" if name in missed else "reached"
        print(f"{name:24}{figure:12.9f}   floor {FLOORS[name]:g}: {verdict}")
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
