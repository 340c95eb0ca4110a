"""The planner against every split that there is, and how long it thinks.

exact     random instances of at most 12 devices that have a plan: the period of the planner's split beside the
          shortest of all splits, which are looked at one after the other by another program
          (:mod:`steelyard.testing.exhaustive_plan`). A plan is equal if its period is, to nine digits: several
          splits may have the same.
time      a whole decision, forecast under drift included, at 48, 1,000 and 10,000 devices, dense and of experts,
          batch in proportion, after 2,000 and after 200,000 trajectories. Processor time, the median of several.
predicted seconds a batch by the planner's model beside the simulator's, for fixed splits of scenarios whose whole work
          is known. Virtual time: the same on every machine.

python benchmarks/planner.py            1,000 instances
python benchmarks/planner.py --check    the same; exit code 1 where a floor of floors.toml is missed
python benchmarks/planner.py --quick    100 instances, fewer decisions
"""

import argparse
import logging
import statistics
import sys
import time
import tomllib
from pathlib import Path
from random import Random

import yaml

from steelyard.allocation.cluster_model import ClusterModel
from steelyard.allocation.devices import device_kind
from steelyard.allocation.planner import PlannerPolicy
from steelyard.allocation.policies import FixedPolicy
from steelyard.allocation.snapshot import Limits, Snapshot, Split, StageTimes
from steelyard.allocation.split_search import SplitSearch
from steelyard.allocation.stage_rates import StageRates
from steelyard.allocation.synthetic import LengthSpec, SyntheticSpec, draw_workload
from steelyard.allocation.work_estimate import WorkEstimate
from steelyard.allocation.work_sketch import GroupFacts, WorkSketch, WorkSketcher, facts_of
from steelyard.cli.simulation_input import setup_of
from steelyard.errors import InputError
from steelyard.sim.scenario import KNOWN_MODELS, make_limits, read_scenario
from steelyard.sim.setup import cluster_model
from steelyard.sim.simulation import Simulation
from steelyard.testing.exhaustive_plan import ExhaustivePlan, PlanInstance, random_instance

FLOORS: dict[str, float] = tomllib.loads((Path(__file__).parent / "floors.toml").read_text())["planner"]
DEVICES = (48, 1_000, 10_000)
MODELS = ("qwen2.5-14b", "qwen3-30b-a3b")
HISTORIES = (2_000, 200_000)
EQUAL = 1e-9
SCENARIOS = Path(__file__).parents[1] / "examples" / "scenarios"
PREDICTED = {
    "swe48": ((4, 8, 16, 0), (8, 4, 16, 0), (3, 8, 24, 0), (16, 2, 16, 0)),
    "drift": ((2, 4, 8, 0), (3, 4, 4, 0), (4, 2, 8, 0), (6, 2, 4, 0), (8, 1, 8, 0)),
    "reward_model": ((2, 4, 13, 3), (3, 4, 8, 4), (12, 1, 8, 4)),
    "math_single_turn": ((2, 4, 8, 0), (12, 1, 4, 0)),
}
"""Replicas, their size, devices that train and that score."""


def planned_period_s(instance: PlanInstance) -> float | None:
    """What the planner's split takes; None where it finds none."""
    try:
        work = WorkEstimate(instance.groups, instance.model.group_size)
        rates = StageRates(instance.model, work, instance.limits.total)
        return SplitSearch(rates, instance.limits).best().periods.period_s
    except InputError:
        return None


def shortest_period_s(instance: PlanInstance) -> float | None:
    """The shortest of all splits; None where there is none."""
    try:
        found = ExhaustivePlan(instance).best()
    except InputError:
        return None
    return None if found is None else found[0]


def show_exact(number: int) -> float:
    """Draw until so many instances have a plan; returns how many plans were not equal."""
    seed = num_planned = num_different = num_without = 0
    while num_planned < number:
        instance = random_instance(Random(seed))
        planned_s, shortest_s = planned_period_s(instance), shortest_period_s(instance)
        if planned_s is None and shortest_s is None:
            num_without += 1
        else:
            num_planned += 1
            if planned_s is None or shortest_s is None or abs(planned_s / shortest_s - 1.0) > EQUAL:
                num_different += 1
                print(f"seed {seed}: planned {planned_s} s, shortest {shortest_s} s")
        seed += 1
    print(
        f"exact: {number - num_different:,} of {number:,} plans equal to the best of all splits; of {num_without} more "
        f"instances both say that there is none"
    )
    return float(num_different)


def drifting_sketch(num_trajectories: int) -> WorkSketch:
    """What a run has seen whose trajectories grow longer with every step."""
    length = LengthSpec(median=250, sigma=0.9, longest=8192)
    spec = SyntheticSpec(
        num_groups=200,
        group_size=8,
        turns=LengthSpec(median=12, sigma=0.6, longest=60),
        generated_tokens=length,
        first_prompt_tokens=LengthSpec(median=2500, sigma=0.4),
        tool_result_tokens=LengthSpec(median=350, sigma=1.0),
        tool_s=LengthSpec(median=0.8, sigma=1.6, longest=300),
        max_context_tokens=65_536,
    )
    groups = draw_workload(spec, "drift", Random(3)).groups
    facts = sorted(
        ([facts_of(one) for one in group.trajectories] for group in groups),
        key=lambda members: sum(one.generated_tokens for one in members),
    )
    sketcher = WorkSketcher()
    for number in range(num_trajectories):
        # The latest of a long history are the longest: a trend that the planner has to carry on.
        group, member = divmod(number, 8)
        place = group - (num_trajectories // 8 - len(facts))
        sketcher.add(facts[max(0, place)][member], f"g{group}", step=group // 16)
    return sketcher.sketch()


def decision_s(num_devices: int, model_name: str, work: WorkSketch, num_decisions: int) -> float:
    """Processor seconds of a decision, at the median."""
    model = ClusterModel(
        device=device_kind("A800"),
        architecture=KNOWN_MODELS[model_name],
        groups_per_batch=max(1, num_devices // 3),
        group_size=8,
        max_policy_lag=2,
    )
    policy, taken_s = PlannerPolicy(model), list[float]()
    for number in range(num_decisions + 1):
        snapshot = Snapshot(
            at_s=300.0 * number,
            step=100 + number,
            split=Split(rollout=num_devices // 8 * 4, train=num_devices // 2, rollout_tp=4),
            limits=Limits(total=num_devices),
            times=StageTimes(rollout_s=290.0, train_s=200.0),
            work=work,
        )
        began_s = time.process_time()
        policy.decide(snapshot)
        taken_s.append(time.process_time() - began_s)
    # The first one builds what later ones share.
    return statistics.median(taken_s[1:])


def show_times(num_decisions: int) -> dict[str, float]:
    """Time decisions, print, and return the longest by number of devices, in milliseconds."""
    sketches = {number: drifting_sketch(number) for number in HISTORIES}
    longest = dict.fromkeys(DEVICES, 0.0)
    for num_devices in DEVICES:
        for model_name in MODELS:
            for history, work in sketches.items():
                taken_ms = decision_s(num_devices, model_name, work, num_decisions) * 1e3
                longest[num_devices] = max(longest[num_devices], taken_ms)
                print(f"{num_devices:7,} devices, {model_name:14} {history:8,} trajectories{taken_ms:9.1f} ms")
    return {f"max_ms_at_{number}": longest[number] for number in DEVICES}


def show_predicted(num_scenarios: int) -> None:
    """A table of what the model says and what the simulator does."""
    print("| scenario, split | predicted s a batch | simulated |\n|---|---|---|")
    for name, shapes in list(PREDICTED.items())[-num_scenarios:]:
        path = SCENARIOS / f"{name}.yaml"
        scenario = read_scenario(yaml.safe_load(path.read_text()), str(path))
        setup, limits = setup_of(scenario, SCENARIOS), make_limits(scenario)
        groups = [
            GroupFacts(step=0, members=tuple(facts_of(one) for one in group.trajectories))
            for group in setup.workload.groups
        ]
        rates = StageRates(cluster_model(setup), WorkEstimate(groups, setup.group_size), limits.total)
        for replicas, tp, train, reward in shapes:
            split = Split(rollout=replicas * tp, train=train, reward=reward, rollout_tp=tp)
            result = Simulation(setup, split, limits, FixedPolicy(), "fixed").run()
            words = f"`{name}`, {replicas} x tp {tp}, train {train}" + (f", reward {reward}" if reward else "")
            predicted_s = rates.periods(split).period_s
            print(f"| {words} | {predicted_s:.1f} | {result.makespan_s / setup.num_steps:.1f} |", flush=True)


def main() -> int:
    """Run, print, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a floor is missed")
    parser.add_argument("--quick", action="store_true", help="100 instances, fewer decisions")
    arguments = parser.parse_args()
    logging.getLogger("steelyard").setLevel(logging.ERROR)
    figures = show_times(3 if arguments.quick else 15)
    show_predicted(1 if arguments.quick else len(PREDICTED))
    figures["max_plans_not_equal"] = show_exact(100 if arguments.quick else 1000)
    missed = [name for name, figure in figures.items() if figure > FLOORS[name]]
    for name, figure in figures.items():
        verdict = "MISSED" if name in missed else "reached"
        print(f"{name:24}{figure:10.1f}   floor {FLOORS[name]:g}: {verdict}")
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
