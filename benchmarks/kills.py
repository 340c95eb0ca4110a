"""Do all invariants hold whoever of a run of real processes is killed or stopped, and is nothing acknowledged lost?

A coordinator, four workers, two scorers and a trainer stub on the loopback, over HTTP, on one run directory
(``steelyard.testing.kills``). 200 times one of them, drawn by a seed, is killed with SIGKILL or stopped with SIGSTOP
for up to one and a half leases. After each time everybody is held still, the audit of journal and stores runs, and what
each process was told is looked for in the journal. The faults are spread over runs of 20, each of which is then carried
to its end: every prompt must be trained or dropped with a reason, once.

    python benchmarks/kills.py            200 faults
    python benchmarks/kills.py --check    the same; exit code 1 if something does not hold, or below the floor
    python benchmarks/kills.py --quick    20 faults, in less than a minute
    python benchmarks/kills.py --first N  begin with seed N
    python benchmarks/kills.py --postgres on a PostgreSQL server that is started for it, with a standby coordinator
"""

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from steelyard.testing.kills.rig import KillPlan, KillRig, Verdict, postgres_plan
from steelyard.testing.postgres import postgres_server

NUM_FAULTS, NUM_QUICK_FAULTS, FAULTS_PER_RUN = 200, 20, 20
FLOORS = Path(__file__).parent / "floors.toml"


def main() -> int:
    """Run the faults, print what came of them, and compare with the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if something fails or the floor is missed")
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK_FAULTS} faults")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL server, with a standby coordinator")
    options = parser.parse_args()
    num_faults = NUM_QUICK_FAULTS if options.quick else NUM_FAULTS
    seeds = range(options.first, options.first + num_faults // FAULTS_PER_RUN)
    if options.postgres:
        with postgres_server() as server:
            result = measure(seeds, lambda _: postgres_plan(server.new_database()))
    else:
        result = measure(seeds, lambda _: KillPlan())
    floor = tomllib.loads(FLOORS.read_text())["kills"]["min_audits_passed"]
    journal = "postgres" if options.postgres else "sqlite"
    print(json.dumps({"journal": journal, **result, "floor_audits_passed": floor}, indent=2))
    is_good = not result["failures"] and result["num_audits_passed"] == num_faults >= floor
    return int(options.check and not is_good)


def measure(seeds: Iterable[int], plan: Callable[[int], KillPlan]) -> dict[str, object]:
    """One run for each seed, summed up; ``failures`` names the seed of each."""
    faults: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    failures: list[str] = []
    totals: Counter[str] = Counter()
    started_s = time.perf_counter()
    for seed in seeds:
        verdict = one_run(seed, plan(seed))
        faults.update(verdict.faults)
        dropped.update(verdict.num_dropped)
        failures += [f"seed {seed}: {failure}" for failure in verdict.failures]
        for name in ("num_faults", "num_audits_passed", "num_events", "num_trained", "num_acknowledged"):
            totals[name] += getattr(verdict, name)
    return {
        **totals,
        "failures": failures,
        "faults": dict(sorted(faults.items())),
        "num_dropped": dict(dropped),
        "wall_s": round(time.perf_counter() - started_s, 1),
    }


def one_run(seed: int, plan: KillPlan) -> Verdict:
    """One run with its faults, in a directory of its own."""
    with tempfile.TemporaryDirectory() as home, KillRig(Path(home), seed, plan) as rig:
        return rig.run(FAULTS_PER_RUN)


if __name__ == "__main__":
    sys.exit(main())
