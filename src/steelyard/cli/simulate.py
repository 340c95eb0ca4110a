"""``steelyard simulate``: what an allocation achieves on a simulated cluster, and how far that is from the bound."""

import argparse
import gzip
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import yaml

from steelyard.allocation.calibration import Calibration, decode_calibration
from steelyard.allocation.trace_lines import read_traces
from steelyard.allocation.workload import Workload
from steelyard.cli.train import Subparsers
from steelyard.errors import InputError
from steelyard.sim.scenario import PolicyPart, Scenario, TracesPart, make_limits, make_setup, policy_of, read_scenario
from steelyard.sim.simulation import SimResult, Simulation
from steelyard.sim.train_stage import StepRecord


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "simulate",
        help="what an allocation achieves on a simulated cluster",
        description=(
            "Run a scenario on virtual time, with the real coordinator and router and models of devices, and print "
            "what it achieves beside a proven bound. Times come from a cost model, a guess until it is calibrated."
        ),
    )
    parser.add_argument("scenario", metavar="SCENARIO", help="YAML file, see examples/scenarios")
    parser.add_argument("--policy", metavar="NAME", help="in the place of the scenario's")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps, in the place of the scenario's")
    parser.add_argument("--seed", type=int, metavar="N", help="of the drawn work, in the place of the scenario's")
    parser.add_argument("--calibration", metavar="FILE", help="what `steelyard calibrate` measured of these devices")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    path = Path(options.scenario)
    scenario = _changed(read_scenario(_read_yaml(path), str(path)), options)
    calibration = read_calibration(scenario, options.calibration, path.parent)
    setup = make_setup(scenario, lambda part: read_workload(part, path.parent), calibration)
    policy = policy_of(scenario, setup)
    simulation = Simulation(setup, scenario.split, make_limits(scenario), policy, scenario.policy.kind, scenario.seed)
    result = simulation.run(None if options.json or not sys.stderr.isatty() else _show_step)
    if options.json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        sys.stdout.write("\n".join(_lines(scenario, result)) + "\n")
    return 0


def _changed(scenario: Scenario, options: argparse.Namespace) -> Scenario:
    changes: dict[str, object] = {}
    if options.policy is not None:
        changes["policy"] = PolicyPart(kind=options.policy)
    if options.steps is not None:
        changes["steps"] = options.steps
    if options.seed is not None:
        changes["seed"] = options.seed
    return msgspec.structs.replace(scenario, **changes)


def _read_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the scenario {path} must be readable, got: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"the scenario {path} must be YAML, got: {' '.join(str(error).split())}") from None


def read_calibration(scenario: Scenario, named: str | None, beside: Path) -> Calibration | None:
    """The calibration that the command line names, or else the scenario, whose file lies in ``beside``.

    Raises:
        InputError: the file cannot be read, or is no calibration.
    """
    if named is None and scenario.calibration is None:
        return None
    path = Path(named) if named is not None else beside / str(scenario.calibration)
    try:
        return decode_calibration(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"the calibration {path} must be readable, got: {error.strerror}") from None


def read_workload(part: TracesPart, beside: Path) -> Workload:
    """The traces of a scenario whose file lies in ``beside``.

    Raises:
        InputError: the file cannot be read, or is no trace.
    """
    path = Path(part.path) if Path(part.path).is_absolute() else beside / part.path
    try:
        return read_traces(_trace_lines(path), path.name, default_tool_s=part.tool_s)
    except OSError as error:
        raise InputError(f"traces.path must be readable, {path} is not: {error.strerror or error}") from None


def _trace_lines(path: Path) -> Iterable[bytes]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from file


def _show_step(step: StepRecord) -> None:
    sys.stderr.write(f"\r  step {step.step + 1}: {step.ended_at_s:,.0f} s of virtual time ")
    sys.stderr.flush()


def _lines(scenario: Scenario, result: SimResult) -> list[str]:
    idle = ", ".join(f"{role} {share:.0%}" for role, share in result.idle_frac.items())
    split = scenario.split
    lines = [
        f"{result.name}: {scenario.devices.total} {scenario.devices.kind}, {scenario.model}, "
        f"policy {scenario.policy.kind}, rollout={split.rollout} (tp {split.rollout_tp}) train={split.train} "
        f"reward={split.reward}",
        f"  {len(result.steps)} steps in {result.makespan_s:,.1f} s: {result.trajectories_per_s:,.3f} trajectories/s, "
        f"{result.generated_tokens / result.makespan_s:,.0f} sampled tokens/s",
        f"  {result.bound_share:.1%} of the proven bound ({result.bound.makespan_s:,.1f} s, by {result.bound.binding})",
        f"  idle: {idle}",
        f"  lag at consumption {result.mean_lag:.2f} of {scenario.max_policy_lag} steps; "
        f"{result.recomputed_tokens:,} tokens computed again",
    ]
    changed = [line for line in result.decisions if "=> adjust" in line]
    lines += [f"  {line}" for line in changed or result.decisions[-1:]]
    return lines
