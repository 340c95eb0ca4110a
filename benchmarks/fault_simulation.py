"""How many seeds of the fault simulation hold all invariants, and how long that takes.

Each seed is a run of three optimizer steps by the real coordinator, workers, scorers and assembly on a virtual clock,
with a network, disks and processes that fail as the seed says (``steelyard.testing.faultsim``). A seed passes if the
run ends within its virtual time, the audit of journal and stores holds after every death of the coordinator and at the
end, and nothing that a client was told is missing. Every mutation of the logic must be found within the first seeds.

    python benchmarks/fault_simulation.py            10,000 seeds
    python benchmarks/fault_simulation.py --check    the same; exit code 1 if a seed fails, or below the floor
    python benchmarks/fault_simulation.py --quick    500 seeds
    python benchmarks/fault_simulation.py --first N  begin with seed N
"""

import argparse
import json
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

from steelyard.testing.faultsim.mutations import MUTATIONS
from steelyard.testing.faultsim.world import simulate

NUM_SEEDS, NUM_QUICK_SEEDS = 10_000, 500
NUM_SEEDS_PER_MUTATION = 150
FLOORS = Path(__file__).parent / "floors.toml"


def main() -> int:
    """Run the seeds and the mutations, print what came of them, and compare with the floor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a seed fails or the floor is missed")
    parser.add_argument("--quick", action="store_true", help="500 seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    num_seeds = NUM_QUICK_SEEDS if options.quick else NUM_SEEDS
    result = measure(options.first, num_seeds)
    found = {name: first_seed_that_finds(name) for name in MUTATIONS}
    floor = tomllib.loads(FLOORS.read_text())["fault_simulation"]["min_seeds"]
    print(json.dumps({**result, "found_by_seed": found, "floor_seeds": floor}, indent=2))
    is_good = not result["failed"] and None not in found.values() and num_seeds >= floor
    return int(options.check and not is_good)


def measure(first: int, num_seeds: int) -> dict[str, object]:
    """Run ``num_seeds`` seeds from ``first`` on; ``failed`` holds those that do not hold, with the reason."""
    failed: dict[int, str] = {}
    faults: Counter[str] = Counter()
    num_events, virtual_s = 0, 0.0
    started_s = time.perf_counter()
    for seed in range(first, first + num_seeds):
        verdict = simulate(seed)
        faults.update(verdict.faults)
        num_events += verdict.num_events
        virtual_s += verdict.ended_at_s
        if verdict.failure is not None:
            failed[seed] = verdict.failure
    wall_s = time.perf_counter() - started_s
    return {
        "num_seeds": num_seeds,
        "failed": failed,
        "faults": dict(sorted(faults.items())),
        "num_events": num_events,
        "virtual_hours": round(virtual_s / 3600, 2),
        "wall_s": round(wall_s, 1),
        "ms_per_seed": round(1000 * wall_s / num_seeds, 1),
    }


def first_seed_that_finds(name: str) -> int | None:
    """The first seed that fails under the mutation; None where none of the first ones does."""
    seeds = range(NUM_SEEDS_PER_MUTATION)
    return next((seed for seed in seeds if simulate(seed, mutation=MUTATIONS[name]).failure is not None), None)


if __name__ == "__main__":
    sys.exit(main())
