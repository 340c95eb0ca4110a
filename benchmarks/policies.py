"""Scenarios times policies: what each achieves beside the proven bound, and that the oracle is never worse.

Every scenario of examples/scenarios (or those named) is played under `fixed`, `queue` and `ratio` with their defaults
and under `oracle`, which looks at up to ``--runs`` schedules. Printed, as a Markdown table, are trained trajectories a
second of virtual time, and in brackets the share of the proven bound; beside them the processor seconds of a run,
without those of the bound. Nothing but these depends on the machine.

    python benchmarks/policies.py            all scenarios
    python benchmarks/policies.py --check    the same; exit code 1 where the oracle is worse than a simple policy
    python benchmarks/policies.py --quick    two small scenarios, 5 runs of the oracle
"""

import argparse
import logging
import sys
import time
from pathlib import Path

import yaml

from steelyard.allocation.policies import FixedPolicy, QueuePolicy, RatioPolicy
from steelyard.allocation.snapshot import Policy
from steelyard.cli.simulation_input import read_workload
from steelyard.sim.oracle import Play, Player, find_oracle
from steelyard.sim.scenario import make_limits, make_setup, read_scenario

SCENARIOS = Path(__file__).parents[1] / "examples" / "scenarios"
QUICK = ("real_airline", "real_subagent")
LARGE = ("scale1k", "scale10k")
"""Left out unless they are named: a run takes minutes."""


def compare(name: str, max_runs: int) -> bool:
    """Play one scenario and print its row; whether the oracle is as good as any."""
    path = SCENARIOS / f"{name}.yaml"
    scenario = read_scenario(yaml.safe_load(path.read_text()), str(path))
    setup = make_setup(scenario, lambda part: read_workload(part, path.parent))
    limits = make_limits(scenario)
    player = Player(setup, limits, scenario.seed)
    policies: dict[str, Policy] = {"fixed": FixedPolicy(), "queue": QueuePolicy(), "ratio": RatioPolicy()}
    plays, cpu_s = dict[str, Play](), 0.0
    for policy_name, policy in policies.items():
        before_s = time.process_time()
        plays[policy_name] = player.play(scenario.split, policy, policy_name)
        cpu_s = max(cpu_s, time.process_time() - before_s)
    oracle = find_oracle(setup, scenario.split, limits, scenario.seed, max_runs)
    plays["oracle"] = oracle.best
    cells = [f"{play.result.trajectories_per_s:.3f} ({play.result.bound_share:.2f})" for play in plays.values()]
    binding = plays["fixed"].result.bound.binding
    print(f"| {name} | {' | '.join(cells)} | {binding} | {oracle.num_runs} | {cpu_s:.1f} |", flush=True)
    simple_s = min(play.result.makespan_s for who, play in plays.items() if who != "oracle")
    return oracle.best.result.makespan_s <= simple_s


def main() -> int:
    """Run, print, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="names in examples/scenarios; all but the largest")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 where the oracle is worse than a simple policy"
    )
    parser.add_argument("--quick", action="store_true", help="two small scenarios, 5 runs of the oracle")
    parser.add_argument("--runs", type=int, default=24, metavar="N", help="schedules that the oracle looks at (24)")
    arguments = parser.parse_args()
    logging.getLogger("steelyard").setLevel(logging.ERROR)
    found = sorted(path.stem for path in SCENARIOS.glob("*.yaml") if path.stem not in LARGE)
    names = arguments.names or (QUICK if arguments.quick else found)
    max_runs = min(arguments.runs, 5) if arguments.quick else arguments.runs
    print("| scenario | fixed | queue | ratio | oracle | bound by | runs of the oracle | processor s a run |")
    print("|---|---|---|---|---|---|---|---|")
    worse = [name for name in names if not compare(name, max_runs)]
    verdict = f"worse in {', '.join(worse)}: MISSED" if worse else "never worse: reached"
    print(f"oracle against fixed, queue and ratio: {verdict}")
    return 1 if worse and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
