"""``steelyard plan``: how to share out the devices of a cluster, and what that achieves."""

import argparse
import sys
from pathlib import Path

from steelyard.allocation.plan_report import plan_report
from steelyard.allocation.work_estimate import WorkEstimate
from steelyard.allocation.work_sketch import GroupFacts, facts_of
from steelyard.cli.simulation_input import Wanted, read_file, setup_of, split_overrides
from steelyard.cli.train import Subparsers
from steelyard.observe.plan_text import plan_json, plan_lines
from steelyard.sim.bound import lower_bound
from steelyard.sim.scenario import make_limits
from steelyard.sim.setup import SimSetup, cluster_model

_STEPS = 10
"""Where the file does not say how long the run is: for the bound, which knows that a run begins and ends."""


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="how to share out devices between rollout, training and scoring",
        description=(
            "Find the split of a cluster's devices, the sizes of its replicas and the trainer's layout with which a "
            "training batch takes the shortest time, by a model of steady rates; print it with the rates of all "
            "stages, the bottleneck, a proven bound, runner-ups and what one more device would bring."
        ),
        epilog="see docs/planner.md",
    )
    parser.add_argument("cluster", metavar="CLUSTER", help="YAML file: a scenario (split may be left out) or a CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, such as devices.total=64")
    parser.add_argument("--device", metavar="KIND", help="kind of all devices: A100, A800, H100, H200, B200, CPU")
    parser.add_argument("--traces", metavar="FILE", help="recorded trajectories as the work (JSON lines, may be .gz)")
    parser.add_argument("--tool-s", type=float, metavar="S", help="of calls in --traces that were not timed")
    parser.add_argument("--calibration", metavar="FILE", help="what `steelyard calibrate` measured of these devices")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    path = Path(options.cluster)
    wanted = Wanted(
        overrides=split_overrides(options.overrides),
        device=options.device,
        traces=options.traces,
        tool_s=options.tool_s,
        policy="planner",
        defaults={"split": {"rollout": 0, "train": 0}, "steps": _STEPS},
    )
    assumed = read_file(path, wanted)
    scenario = assumed.scenario
    setup = setup_of(scenario, path.parent, options.calibration)
    limits, model = make_limits(scenario), cluster_model(setup)
    given = scenario.split if scenario.split.total else None
    report = plan_report(model, _work(setup), limits, given)
    bound = lower_bound(setup, limits)
    notes = [f"note: {note}\n" for note in assumed.notes]
    if options.json:
        sys.stderr.write("".join(notes))
        sys.stdout.write(plan_json(report, bound, setup.num_steps) + "\n")
    else:
        head = (
            f"{scenario.name}: {limits.total} {setup.device.name}, {setup.model.name}, batches of "
            f"{model.groups_per_batch} groups of {model.group_size}, lag at most {model.max_policy_lag}\n"
        )
        sys.stdout.write(head + "".join(notes) + "\n".join(plan_lines(report, bound, setup.num_steps)) + "\n")
    return 0


def _work(setup: SimSetup) -> WorkEstimate:
    """All groups of the work, each counted once."""
    groups = [
        GroupFacts(step=0, members=tuple(facts_of(one) for one in group.trajectories))
        for group in setup.workload.groups
    ]
    return WorkEstimate(groups, setup.group_size)
