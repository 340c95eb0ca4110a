"""``steelyard simulate``: what an allocation achieves on a simulated cluster, and how far that is from the bound."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steelyard.cli.simulation_input import Wanted, read_file, setup_of, split_overrides
from steelyard.cli.train import Subparsers
from steelyard.clock import SystemClock
from steelyard.errors import InputError
from steelyard.observe.simulation_display import SimulationDisplay
from steelyard.observe.simulation_report import SimulationReport, write_simulation_report
from steelyard.observe.simulation_text import comparison_lines, decision_lines, header_lines, result_lines, to_json
from steelyard.sim.from_config import Assumed
from steelyard.sim.scenario import PolicyPart, Scenario, make_limits, policy_names, policy_of
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import SimResult, Simulation


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="what an allocation achieves on a simulated cluster",
        description=(
            "Run a scenario, or the run that a configuration describes, on virtual time, with the real coordinator and "
            "router and models of devices, and print what it achieves beside a proven bound. Times come from a cost "
            "model, a guess until it is calibrated."
        ),
        epilog=f"policies: {', '.join(policy_names())}; see docs/simulator.md",
    )
    parser.add_argument("scenario", metavar="SCENARIO", help="YAML file: a scenario (examples/scenarios) or a CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, such as split.rollout=3")
    parser.add_argument("--policy", metavar="NAME", help="in the place of the file's")
    parser.add_argument("--compare", metavar="NAMES", help="policies, such as fixed,queue: a table, one line for each")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps, in the place of the file's")
    parser.add_argument("--seed", type=int, metavar="N", help="of the drawn work, in the place of the file's")
    parser.add_argument("--device", metavar="KIND", help="kind of all devices: A100, A800, H100, H200, B200, CPU")
    parser.add_argument("--traces", metavar="FILE", help="recorded trajectories as the work (JSON lines, may be .gz)")
    parser.add_argument("--tool-s", type=float, metavar="S", help="of calls in --traces that were not timed")
    parser.add_argument("--calibration", metavar="FILE", help="what `steelyard calibrate` measured of these devices")
    parser.add_argument("--report", metavar="FILE", help="write a page with plots, HTML that needs nothing else")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    path = Path(options.scenario)
    wanted = Wanted(
        overrides=split_overrides(options.overrides),
        steps=options.steps,
        device=options.device,
        traces=options.traces,
        tool_s=options.tool_s,
    )
    assumed = read_file(path, wanted)
    assumed = msgspec.structs.replace(assumed, scenario=_changed(assumed.scenario, options))
    setup = setup_of(assumed.scenario, path.parent, options.calibration)
    if options.compare is not None:
        return _compare(assumed, setup, options)
    result = simulate(assumed.scenario, setup)
    if options.report is not None:
        write_simulation_report(
            Path(options.report), SimulationReport.of(assumed, setup, result, SystemClock().now_s())
        )
    if options.json:
        sys.stderr.write("".join(f"note: {note}\n" for note in assumed.notes))
        sys.stdout.write(to_json(assumed, result) + "\n")
    else:
        lines = [*header_lines(assumed, setup), *decision_lines(result), *result_lines(assumed.scenario, result)]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


def simulate(scenario: Scenario, setup: SimSetup) -> SimResult:
    """Run a scenario, with its progress on a terminal.

    Raises:
        InputError: what was asked for cannot be.
        RunError: nothing can happen any more and steps are left, or the policy failed.
    """
    kind = scenario.policy.kind
    policy = policy_of(scenario, setup)
    simulation = Simulation(setup, scenario.split, make_limits(scenario), policy, kind, scenario.seed)
    with SimulationDisplay(sys.stderr, f"{scenario.name}, {kind}", setup.num_steps) as display:
        return simulation.run(display.show)


def _compare(assumed: Assumed, setup: SimSetup, options: argparse.Namespace) -> int:
    """One scenario under several policies."""
    if options.report is not None or options.policy is not None:
        raise InputError("--compare must stand without --policy and --report, which are of one policy")
    results = list[tuple[Assumed, SimResult]]()
    for kind in _names(options.compare):
        part = assumed.scenario.policy
        part = part if part.kind == kind else PolicyPart(kind=kind)
        one = msgspec.structs.replace(assumed, scenario=msgspec.structs.replace(assumed.scenario, policy=part))
        results.append((one, simulate(one.scenario, setup)))
    if options.json:
        sys.stdout.write("[" + ",\n".join(to_json(one, result) for one, result in results) + "]\n")
    else:
        named = [(one.scenario.policy.kind, result) for one, result in results]
        sys.stdout.write("\n".join([*header_lines(assumed, setup), *comparison_lines(named)]) + "\n")
    return 0


def _names(words: str) -> Sequence[str]:
    names = [name.strip() for name in words.split(",") if name.strip()]
    if not names:
        raise InputError(f"--compare must name policies, such as fixed,queue, got {words!r}")
    return names


def _changed(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    changes: dict[str, object] = {}
    if options.policy is not None and options.policy != scenario.policy.kind:
        changes["policy"] = PolicyPart(kind=options.policy)
    if options.seed is not None:
        changes["seed"] = options.seed
    return msgspec.structs.replace(scenario, **changes)
