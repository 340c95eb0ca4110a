"""``steelyard whatif``: a run as it would have been under another allocation."""

import argparse
import sys
from pathlib import Path

import msgspec

from steelyard import config_file
from steelyard.allocation.devices import device_kind
from steelyard.cli.simulation_input import read_model
from steelyard.cli.train import Subparsers
from steelyard.config import Config
from steelyard.errors import InputError
from steelyard.observe.simulation_display import SimulationDisplay
from steelyard.observe.simulation_text import decision_lines, header_lines, result_lines, to_json
from steelyard.observe.wording import duration, integer
from steelyard.run.directory import RunDirectory, existing_directory
from steelyard.run.observed import ObservedRun, observe
from steelyard.run.replaying import Agreement, Speeds, agreement, element_bytes, learn_speeds, with_speeds
from steelyard.sim.from_config import Choices, scenario_of
from steelyard.sim.scenario import PolicyPart, Scenario, TracesPart, make_limits, make_setup, policy_of
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import SimResult, Simulation

_SECTIONS = ("resources", "scheduler", "allocation", "admission", "scoring", "weights")
_KEYS = (
    *("train.batch_size", "train.max_steps", "train.grad_accum_steps"),
    *("rollout.group_size", "rollout.max_concurrent", "inference.max_running"),
)
_TRUSTED_ERROR_FRAC = 0.2


def add_parser(commands: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "whatif",
        help="a run as it would have been under another allocation",
        description=(
            "Simulate the recorded work of a run, first as it was, to see how well the simulation predicts it, then "
            "under other settings. Speeds are learnt from the first half of the run."
        ),
        epilog=f"--set takes {', '.join(section + '.*' for section in _SECTIONS)}, {', '.join(_KEYS)}",
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument(
        "--set", dest="overrides", action="append", nargs="+", default=[], metavar="KEY=VALUE", help="what is changed"
    )
    parser.add_argument("--policy", metavar="NAME", help="who decides on devices; see docs/simulator.md")
    parser.add_argument("--device", default="CPU", metavar="KIND", help="whose memory and links the devices have (CPU)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run_command=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    directory = existing_directory(options.run)
    overrides = [override for several in options.overrides for override in several]
    changed = _changed_config(directory, overrides)
    observed = observe(directory)
    before = _Replay(directory, observed, observed.config, options.device, None)
    speeds = learn_speeds(observed, before.setup, device_kind(options.device))
    as_it_was = before.simulate(speeds)
    told = agreement(observed, as_it_was.steps, speeds, before.setup)
    after = _Replay(directory, observed, changed, options.device, options.policy)
    is_changed = bool(overrides) or options.policy is not None
    otherwise = after.simulate(speeds) if is_changed else None
    if options.json:
        made = [to_json(before.assumed, as_it_was), *([to_json(after.assumed, otherwise)] if otherwise else [])]
        said = msgspec.json.encode(told).decode()
        sys.stdout.write(f'{{"agreement":{said},"as_it_was":{made[0]},"what_if":{made[1] if otherwise else "null"}}}\n')
        return 0
    lines = _lines_before(directory, observed, speeds, told, as_it_was)
    if otherwise is not None:
        lines += _lines_after(after, otherwise, as_it_was)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


class _Replay:
    """The recorded work under a configuration."""

    def __init__(
        self, directory: RunDirectory, observed: ObservedRun, config: Config, device: str, policy: str | None
    ) -> None:
        stored = directory.first_version()
        if stored is None:
            raise InputError(
                f"RUN must hold a policy version, whose config.json is needed, got none in {directory.path}"
            )
        model = str(stored.absolute())
        traces = TracesPart(path=str(directory.path), group_size=config.rollout.group_size)
        self.assumed = scenario_of(
            config,
            Choices(
                name=directory.path.name,
                model=model,
                architecture=read_model(model, Path()),
                reward_model=None if config.model.reward is None else model,
                device=device,
                traces=traces,
            ),
        )
        if policy is not None and policy != self.scenario.policy.kind:
            scenario = msgspec.structs.replace(self.scenario, policy=PolicyPart(kind=policy))
            self.assumed = msgspec.structs.replace(self.assumed, scenario=scenario)
        if config == observed.config:
            # The run may be going on, or have ended early: what is compared is what was done.
            scenario = msgspec.structs.replace(self.scenario, steps=len(observed.steps))
            self.assumed = msgspec.structs.replace(self.assumed, scenario=scenario)
        architecture = msgspec.structs.replace(read_model(model, Path()), name=config.model.policy)
        setup = make_setup(self.scenario, lambda _: observed.workload, lambda _: architecture)
        self.setup: SimSetup = msgspec.structs.replace(setup, element_bytes=element_bytes(config))

    @property
    def scenario(self) -> Scenario:
        """What is simulated."""
        return self.assumed.scenario

    def simulate(self, speeds: Speeds) -> SimResult:
        """Run it on devices of those speeds."""
        scenario, setup = self.scenario, with_speeds(self.setup, speeds)
        policy = policy_of(scenario, setup)
        simulation = Simulation(
            setup, scenario.split, make_limits(scenario), policy, scenario.policy.kind, scenario.seed
        )
        with SimulationDisplay(sys.stderr, f"{scenario.name}, {scenario.policy.kind}", setup.num_steps) as display:
            return simulation.run(display.show)


def _changed_config(directory: RunDirectory, overrides: list[str]) -> Config:
    """The run's configuration with what is set.

    Raises:
        InputError: something is set that would change what the agents say, and so the recorded work; or cannot be.
    """
    tree = config_file.read_yaml(directory.config)
    for override in overrides:
        config_file.apply_override(tree, override)
    config = config_file.from_tree(tree, is_live=False)
    for override in overrides:
        key = override.partition("=")[0]
        if key.partition(".")[0] not in _SECTIONS and key not in _KEYS:
            raise InputError(
                f"--set must leave the recorded work as it is ({', '.join(section + '.*' for section in _SECTIONS)}, "
                f"{', '.join(_KEYS)}), got {key}"
            )
    return config


def _lines_before(
    directory: RunDirectory, observed: ObservedRun, speeds: Speeds, told: Agreement, result: SimResult
) -> list[str]:
    resources = observed.config.resources
    lines = [
        f"{directory.path.name} as it was: rollout={resources.rollout_gpus} train={resources.train_gpus}, "
        f"{len(observed.steps)} steps, {integer(len(observed.turns))} model calls",
        f"  the simulation predicts {duration(told.predicted_s)} for what took {duration(told.observed_s)} "
        f"({told.error_frac:+.1%})",
    ]
    if told.late_error_frac is not None:
        lines.append(
            f"  of which the last {len(observed.steps) - speeds.num_steps} steps, whose speeds it has not seen: "
            f"{duration(told.predicted_late_s)} for {duration(told.observed_late_s)} ({told.late_error_frac:+.1%})"
        )
    lines.append(
        f"  speeds of the first {speeds.num_steps} steps: {1e3 * speeds.serving.step_s:.2f} ms a step of the engine, "
        f"{1e3 * speeds.serving.sequence_s:.3f} ms more for each sequence in it (calls fit to within "
        f"{speeds.serving.error_frac:.0%} at the median)"
    )
    if told.terms:
        terms = (
            f"{one.term} took {one.factor:.2f} of it (next one to within {one.error_frac:.0%})" for one in told.terms
        )
        lines.append(f"  observed over predicted since then: {', '.join(terms)}")
    lines.append(f"  {result.bound_share:.1%} of the proven bound ({duration(result.bound.makespan_s)})")
    if observed.num_resumed:
        lines.append(f"  note: the run was resumed {observed.num_resumed} times; pauses count as its time")
    if abs(told.error_frac) > _TRUSTED_ERROR_FRAC:
        lines.append(f"  note: the simulation misses this run by {abs(told.error_frac):.0%}: trust what follows less")
    return lines


def _lines_after(after: _Replay, result: SimResult, before: SimResult) -> list[str]:
    rate = result.trajectories_per_s / before.trajectories_per_s
    return [
        *header_lines(after.assumed, after.setup),
        *decision_lines(result),
        *result_lines(after.scenario, result),
        f"  {rate:.2f} times the trajectories per second that are predicted for the run as it was",
    ]
