"""Policies over all scenarios: how near the bound, against the best fixed split, each other and an oracle.

Every scenario of examples/scenarios but the largest is played under each policy on ten draws of its work (recorded
trajectories in ten orders). Beside the policies stand

    given     the scenario's own split, for ever
    fixed     the best fixed split of that very draw: all layouts ranked by the cost model, the best 20 simulated at a
              tenth of the length, the best 3 at full length (steelyard/sim/fixed_split.py)
    oracle    the best schedule of splits that a search over whole runs finds, or the best run of anybody

and the parts of our planner alone, as benchmarks/allocation_settings.toml names them under ``ablation``. A policy
has the options that its tuning chose, by scenario, with the same number of runs for each, on draws that the table does
not use (--tune). Virtual time only: nothing depends on the machine but how long it takes.

What a policy begins with is its own answer (--start own, the default): it is asked before the run, with the scenario's
split as the present one and a sketch of how another draw of the work begins, as from an earlier run. Rules that look at
queues and measured times keep the scenario's split, planners plan. Or tuning chooses the best of two splits for every
policy alike, the scenario's and the best fixed one of a tuning draw (--start tuned): then what is left is what changes
of the split bring. Results of both must not be mixed in one directory.

Results are written as they come, one file a scenario, and what is there is not played again: an interrupted run goes on
where it was, and several may work on different scenarios at once.

    python benchmarks/allocation.py --results DIR                       play what is missing, print the table
    python benchmarks/allocation.py --results DIR SCENARIO ...          these scenarios only
    python benchmarks/allocation.py --results DIR --report              print what is there, play nothing
    python benchmarks/allocation.py --results DIR --report --check      exit code 1 where a floor is missed
    python benchmarks/allocation.py --results DIR --report --docs docs/allocation.md
    python benchmarks/allocation.py --tune                              choose the settings anew
    python benchmarks/allocation.py --quick                             two small scenarios, two draws, no oracle
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from steelyard.allocation.policies import FixedPolicy
from steelyard.allocation.snapshot import Limits, ReplicaSize, Snapshot, Split, split_of
from steelyard.allocation.work_sketch import WorkSketch, WorkSketcher, facts_of
from steelyard.cli.simulation_input import read_workload
from steelyard.errors import InputError
from steelyard.sim.bound import Bound, lower_bound
from steelyard.sim.fit import check_fit
from steelyard.sim.fixed_split import find_fixed_split, shortened
from steelyard.sim.oracle import find_oracle
from steelyard.sim.scenario import PolicyPart, Scenario, make_limits, make_setup, policy_names, policy_of, read_scenario
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import SimResult, Simulation
from steelyard.testing.allocation_tables import Kinds, Verdict, figures, tables

HERE = Path(__file__).parent
SCENARIOS = HERE.parent / "examples" / "scenarios"
FLOORS = HERE / "floors.toml"
SETTINGS = HERE / "allocation_settings.toml"
MARKS = ("<!-- tables: begin -->", "<!-- tables: end -->")
POLICIES = ("queue", "ratio", "libra", "trajectory", "planner")
QUICK = ("real_airline", "no_gain")
FIRST_SEED = 1000
TUNING_SEEDS = (1, 2)
EARLIER_SEED = 3
"""The draw whose beginning policies may have seen before a run."""
MAX_EARLIER = 512
TUNING_FRAC = 0.5
"""Of the steps, evenly over the work: tuning costs half of what the runs of the table do."""

Row = dict[str, Any]
Say = Callable[[str], None]


class Case:
    """One scenario with one draw of its work."""

    def __init__(self, name: str, seed: int) -> None:
        path = SCENARIOS / f"{name}.yaml"
        scenario = read_scenario(yaml.safe_load(path.read_text()), str(path))
        self.scenario: Scenario = replace(scenario, seed=seed)
        setup = make_setup(self.scenario, lambda part: read_workload(part, path.parent))
        if scenario.traces is not None:
            # Recorded work is not drawn: its order is.
            groups = list(setup.workload.groups)
            random.Random(seed).shuffle(groups)
            setup = replace(setup, workload=replace(setup.workload, groups=tuple(groups)))
        self.setup: SimSetup = setup
        self.limits: Limits = make_limits(scenario)
        self.seed = seed
        self._bound: Bound | None = None

    @property
    def bound(self) -> Bound:
        """Computed once for all policies."""
        if self._bound is None:
            self._bound = lower_bound(self.setup, self.limits)
        return self._bound

    def own_start(self, part: PolicyPart, earlier: WorkSketch) -> Split:
        """What a policy answers before the run."""
        split = self.scenario.split
        asked = Snapshot(at_s=0.0, step=0, split=split, limits=self.limits, work=earlier)
        plan = policy_of(replace(self.scenario, policy=part), self.setup).decide(asked)
        # A size that the work does not fit into is refused in the run, and so it is here.
        try:
            check_fit(self.setup, plan.split, self.limits)
        except InputError:
            return split
        return plan.split

    def beginning(self) -> WorkSketch:
        """How this draw begins: as many of its trajectories as are admitted before the first step, and not too many."""
        sketcher, setup = WorkSketcher(max_trajectories=MAX_EARLIER), self.setup
        number = min((setup.max_policy_lag + 1) * setup.groups_per_batch, MAX_EARLIER // setup.group_size)
        for group in setup.admitted_groups()[: max(1, number)]:
            for trajectory in group.trajectories:
                sketcher.add(facts_of(trajectory), group.task_id, 0)
        return sketcher.sketch()

    def play(
        self, part: PolicyPart, start: Split, setup: SimSetup | None = None, bound: Bound | None = None
    ) -> SimResult:
        """One run; of another setup, with its bound, where they are given."""
        played = self.setup if setup is None else setup
        scenario = replace(self.scenario, policy=part, split=start)
        known = self.bound if bound is None else bound
        policy = FixedPolicy() if part.kind == "fixed" else policy_of(scenario, played)
        return Simulation(played, start, self.limits, policy, part.kind, self.seed, bound=known).run()


def kinds_of(names: list[str]) -> Kinds:
    """Which are steady, and which drift; where something fails, or bursts come and go, none of the two."""
    steady, drifting = list[str](), list[str]()
    for name in names:
        path = SCENARIOS / f"{name}.yaml"
        one = read_scenario(yaml.safe_load(path.read_text()), str(path))
        phases = one.synthetic.phases if one.synthetic is not None else ()
        if one.failures or one.failure_rate is not None or one.outages:
            continue
        if phases and all(phase.period_groups is None for phase in phases):
            drifting.append(name)
        elif not phases and one.max_policy_lag >= 2:
            steady.append(name)
    return Kinds(steady=tuple(steady), drifting=tuple(drifting))


def settings() -> Row:
    """What was chosen, by scenario and policy."""
    return tomllib.loads(SETTINGS.read_text())


def part_of(chosen: Row, case: Case, name: str, policy: str, mode: str) -> tuple[PolicyPart, Split]:
    """A policy and the split that it begins with; where nothing was tuned no options, and the scenario's split."""
    found = chosen.get("tuned", {}).get(mode, {}).get(name, {}).get(policy, {})
    part = PolicyPart(kind=policy, options=found.get("options", {}))
    if mode == "own":
        return part, case.own_start(part, Case(name, EARLIER_SEED).beginning())
    return part, _split(found["start"]) if "start" in found else case.scenario.split


def untuned(names: list[str], mode: str) -> list[str]:
    """Policies that were played as they stand, by scenario."""
    tuned, known = settings().get("tuned", {}).get(mode, {}), policy_names()
    return [f"{one} in {name}" for name in names for one in POLICIES if one in known and one not in tuned.get(name, {})]


def ablations(chosen: Row) -> dict[str, PolicyPart]:
    """Rows of the table beside the policies, as the settings name them; those that can be made."""
    known = policy_names()
    rows = {row["name"]: PolicyPart(kind=row["kind"], options=row["options"]) for row in chosen.get("ablation", [])}
    return {name: part for name, part in rows.items() if part.kind in known}


def played_row(case: Case, name: str, label: str, chosen: Row, mode: str) -> Row:
    """What came of one row of the table."""
    given = case.scenario.split
    if label == "fixed":
        return fixed_row(case)
    if label == "given":
        part, start = PolicyPart(kind="fixed"), given
    elif label in POLICIES:
        part, start = part_of(chosen, case, name, label, mode)
    else:
        part, start = ablations(chosen)[label], part_of(chosen, case, name, "planner", mode)[1]
    before_s = time.process_time()
    result = case.play(part, start)
    return row(result, start, time.process_time() - before_s)


def row(result: SimResult, start: Split, cpu_s: float) -> Row:
    """What the table needs of a run."""
    return {
        "makespan_s": result.makespan_s,
        "bound_s": result.bound.makespan_s,
        "binding": result.bound.binding,
        "num_moves": sum(decision.is_change for decision in result.decisions),
        "start": _told(start),
        "cpu_s": round(cpu_s, 2),
    }


def fixed_row(case: Case) -> Row:
    """The best fixed split of this draw."""
    before_s = time.process_time()
    found = find_fixed_split(case.setup, case.limits, case.seed)
    return row(found.result, found.split, time.process_time() - before_s)


def oracle_row(case: Case, done: dict[str, Row], max_runs: int) -> Row:
    """The best schedule that a search finds, from the given and the best fixed split, or the best run of anybody."""
    before_s = time.process_time()
    plays = list[Row]()
    for start in {case.scenario.split, _split(done["fixed"]["start"])}:
        best = find_oracle(case.setup, start, case.limits, case.seed, max_runs).best
        plays.append(row(best.result, start, 0.0))
    plays += [one for key, one in done.items() if key != "oracle"]
    best_row = min(plays, key=lambda one: float(one["makespan_s"]))
    return {**best_row, "cpu_s": round(time.process_time() - before_s, 2)}


def play_scenario(name: str, path: Path, arguments: argparse.Namespace, say: Say) -> None:
    """Play what is missing of a scenario, and write it down run by run."""
    chosen = settings()
    found: dict[str, dict[str, Row]] = json.loads(path.read_text()) if path.exists() else {}
    for index in range(arguments.seeds):
        seed = FIRST_SEED + index
        done = found.setdefault(str(seed), {})
        case: Case | None = None
        for label in missing(done, chosen, has_oracle=index < arguments.oracle_seeds):
            case = case or Case(name, seed)
            before_s = time.process_time()
            if label == "oracle":
                done[label] = oracle_row(case, done, arguments.runs)
            else:
                done[label] = played_row(case, name, label, chosen, arguments.start)
            say(f"{name} {seed} {label}: {done[label]['makespan_s']:.1f} s, {time.process_time() - before_s:.1f} s CPU")
            write(path, found)


def missing(done: dict[str, Row], chosen: Row, *, has_oracle: bool) -> list[str]:
    """Rows that are not there. The oracle comes last, for it knows all others."""
    known = policy_names()
    labels = ["given", "fixed", *(one for one in POLICIES if one in known), *ablations(chosen)]
    return [label for label in [*labels, *(["oracle"] if has_oracle else [])] if label not in done]


def write(path: Path, found: dict[str, dict[str, Row]]) -> None:
    """Whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1))
    part.replace(path)


# --- tuning -----------------------------------------------------------------------------------------------------------


def tune(names: list[str], mode: str, say: Say) -> None:
    """Choose for each policy and scenario the options, and the split to begin with where asked, on draws of their own.

    Each policy may have as many runs as any other: at most four candidates in the settings, times two splits where they
    are chosen (the scenario's, and the best fixed one of the tuning draw), on every tuning draw. What is chosen already
    stays: whoever changes a policy or its candidates takes it out of the settings first.
    """
    known = policy_names()
    for name in names:
        tuned = settings().get("tuned", {}).get(mode, {}).get(name, {})
        wanted = [one for one in POLICIES if one in known and one not in tuned]
        if not wanted:
            continue
        cases = [Case(name, seed) for seed in TUNING_SEEDS]
        starts: list[Split | None] = [None]
        if mode == "tuned":
            fixed = find_fixed_split(cases[0].setup, cases[0].limits, cases[0].seed).split
            starts = list(dict.fromkeys([cases[0].scenario.split, fixed]))
        earlier = Case(name, EARLIER_SEED).beginning()
        short = [(case, setup, lower_bound(setup, case.limits)) for case, setup in _shortened(cases)]
        for policy in wanted:
            best_s, start, options = _best_settings(policy, starts, short, earlier)
            chosen, told = settings(), {"options": options}
            if start is not None:
                told["start"] = _told(start)
            chosen.setdefault("tuned", {}).setdefault(mode, {}).setdefault(name, {})[policy] = told
            SETTINGS.write_text(_toml(chosen))
            say(f"{name} {policy}: {best_s:.1f} s with {told}")


def _shortened(cases: list[Case]) -> list[tuple[Case, SimSetup]]:
    return [(case, shortened(case.setup, TUNING_FRAC)) for case in cases]


def _best_settings(
    policy: str, starts: list[Split | None], short: list[tuple[Case, SimSetup, Bound]], earlier: WorkSketch
) -> tuple[float, Split | None, Row]:
    """The mean makespan, the split to begin with (None: its own) and the options, of the best of all."""
    tried = list[tuple[float, Split | None, Row]]()
    for start in starts:
        for options in settings()["candidates"][policy]:
            part = PolicyPart(kind=policy, options=options)
            runs = [
                case.play(part, start or case.own_start(part, earlier), setup, bound).makespan_s
                for case, setup, bound in short
            ]
            tried.append((sum(runs) / len(runs), start, options))
    return min(tried, key=lambda one: one[0])


def _toml(chosen: Row) -> str:
    """The settings as they are read."""
    head = SETTINGS.read_text().split("\n[tuned", 1)[0].rstrip() + "\n"
    lines = [head]
    for mode, scenarios in sorted(chosen["tuned"].items()):
        for name, policies in sorted(scenarios.items()):
            lines += [f"[tuned.{mode}.{name}]"]
            lines += [f"{policy} = {_inline(policies[policy])}" for policy in POLICIES if policy in policies]
            lines.append("")
    return "\n".join(lines)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(one)}" for key, one in value.items()) + " }" if value else "{}"
    return json.dumps(value)


def _told(split: Split) -> Row:
    """A split as the settings have it: replicas as pairs of size and number."""
    replicas = [[size.tp, size.count] for size in split.sizes]
    return {"replicas": replicas, "train": split.train, "reward": split.reward}


def _split(told: Row) -> Split:
    sizes = [ReplicaSize(tp=tp, count=count) for tp, count in told["replicas"]]
    return split_of(sizes, told["train"], told["reward"])


# --- the whole --------------------------------------------------------------------------------------------------------


def main() -> int:
    """Play, print, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="names in examples/scenarios; all but scale*")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where results are kept, one file a scenario")
    parser.add_argument("--report", action="store_true", help="play nothing")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a floor of floors.toml is missed")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the tables between its marks")
    parser.add_argument("--start", choices=("own", "tuned"), default="own", help="what policies begin with (own)")
    parser.add_argument("--tune", action="store_true", help="choose the settings anew, on draws of their own")
    parser.add_argument("--quick", action="store_true", help="two small scenarios, two draws, no oracle")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="draws of the work (10)")
    parser.add_argument("--oracle-seeds", type=int, default=2, metavar="N", help="draws with an oracle (2)")
    parser.add_argument("--runs", type=int, default=24, metavar="N", help="schedules that an oracle looks at (24)")
    arguments = parser.parse_args()
    logging.getLogger("steelyard").setLevel(logging.ERROR)
    names = arguments.names or sorted(one.stem for one in SCENARIOS.glob("*.yaml") if "scale" not in one.stem)
    if arguments.quick:
        names, arguments.seeds, arguments.oracle_seeds = arguments.names or list(QUICK), 2, 0
    if arguments.tune:
        tune(names, arguments.start, lambda line: print(line, flush=True))
        return 0
    if arguments.results is None and not arguments.quick:
        parser.error("--results DIR must say where results are kept")
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.results or Path(scratch)
        return report(names, directory, arguments)


def report(names: list[str], directory: Path, arguments: argparse.Namespace) -> int:
    """Play what is missing, print, and compare."""
    for name in names:
        if not arguments.report:
            play_scenario(name, directory / f"{name}.json", arguments, lambda line: print(line, flush=True))
    found = {one.stem: json.loads(one.read_text()) for one in sorted(directory.glob("*.json")) if one.stem in names}
    if not found:
        raise SystemExit(f"--results must be a directory with results of {', '.join(names)}, got {directory}")
    text = tables(found, POLICIES, list(ablations(settings())))
    bare = untuned(list(found), arguments.start)
    if bare:
        text += f"\n\nNot tuned, as they stand: {', '.join(bare)}."
    print(text)
    floors = tomllib.loads(FLOORS.read_text())["allocation"]
    verdicts: list[Verdict] = figures(found, floors, POLICIES, names, kinds_of(names))
    for verdict in verdicts:
        print(verdict.line())
    if arguments.docs is not None:
        before, rest = arguments.docs.read_text().split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        lines = "\n".join(f"- {verdict.line()}" for verdict in verdicts)
        arguments.docs.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{lines}\n\n{MARKS[1]}{after}")
    return 1 if arguments.check and not all(verdict.is_reached for verdict in verdicts) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"benchmarks/allocation.py: {error}")
