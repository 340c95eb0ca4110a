"""The simulator: how many events a second, how long the large runs take, and how much memory.

Each side runs in a fresh process of one thread that does no I/O, and is charged its CPU seconds: on a core of its own
they are what the clock shows.

    kernel      planned, cancelled and done timers alone: 1,000 chains; every tenth event also plans one and cancels it
    whole       `swe48`, the scenario with most events: coordinator, router, replicas, trainer and bound; kernel events
    hundred     `swe48` with 100 steps of 512 trajectories on its 48 devices
    router      one call of the dispatcher alone (queued, placed, answered), for few and many replicas and waiting calls
    scale10k    10,000 devices, 3 steps, with the peak of its memory
    tables      every other scenario of examples/scenarios, the slowest of them, `whole` among them

    python benchmarks/simulator.py            all of it
    python benchmarks/simulator.py --check    the same; exit code 1 beside a floor of floors.toml that is missed
    python benchmarks/simulator.py --quick    fewer events, a tenth of scale1k for scale10k, 2 steps for hundred

Where a run is not the simulator's (`router`) an event is a call.
"""

import argparse
import math
import random
import resource
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import yaml

from steelyard.cli.simulation_input import read_workload
from steelyard.inference.dispatcher import Dispatcher, Placed, Ticket
from steelyard.inference.projection import Pace
from steelyard.inference.replica_state import ReplicaState
from steelyard.sim.kernel import Kernel
from steelyard.sim.scenario import Scenario, make_limits, make_policy, make_setup, read_scenario
from steelyard.sim.simulation import Simulation
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, Sampling
from steelyard.types.record import Record

FLOORS = Path(__file__).parent / "floors.toml"
SCENARIOS = Path(__file__).parent.parent / "examples" / "scenarios"
LARGE = ("scale1k", "scale10k")
WHOLE = "swe48"
NUM_CHAINS = 1000
NUM_CALLS, REPLICA_TOKENS = 4000, 100_000
ROUTERS = ((8, 0), (64, 0), (512, 0), (24, 10_000), (4096, 0))
"""Replicas, and calls that wait for room."""
SIDE_DEADLINE_S = 3600.0


class Cost(Record, frozen=True, kw_only=True):
    """What one side took. ``peak_bytes`` is of the whole process."""

    num_events: int
    cpu_s: float
    peak_bytes: int

    @property
    def events_per_s(self) -> float:
        """Events of the kernel for each CPU second."""
        return self.num_events / self.cpu_s


def run_kernel(num_events: int) -> int:
    """Chains of timers, each planning its next; returns the events that were done."""
    kernel, rng = Kernel(), random.Random(0)
    delays = [rng.expovariate(1.0) for _ in range(4096)]

    def chain(index: int) -> None:
        def act() -> None:
            done = kernel.num_events
            if done < num_events:
                kernel.after(delays[(done + index) & 4095], act)
                if done % 10 == 0:
                    kernel.after(1.0, act).cancel()

        kernel.after(delays[index & 4095], act)

    for index in range(NUM_CHAINS):
        chain(index)
    kernel.run()
    return kernel.num_events


def tokens(number: int) -> tuple[int, ...]:
    """Stands for so many, of which only the number is asked for."""
    return cast("tuple[int, ...]", range(number))


def run_router(num_replicas: int, num_waiting: int) -> int:
    """Conversations over full replicas, or over some that have room; returns the calls that were answered.

    What fills them is counted too, as it is a call like any other.
    """
    rng, fleet, now_s = random.Random(0), Pace(), 0.0
    dispatcher = Dispatcher(fleet, projection_quantile=0.9, recovery_wait_s=math.inf)
    for number in range(num_replicas):
        state = ReplicaState(f"r{number:05d}", fleet, lambda: None)
        state.capacity_tokens, state.versions = REPLICA_TOKENS, {0}
        dispatcher.add_replica(state)
    placed = list[Placed]()

    def ask(attempt: str, number: int) -> None:
        request = GenerateRequest(
            request_id=f"req{number}", attempt_id=attempt, sequence_key=attempt, policy_version=0,
            prompt_token_ids=tokens(rng.randrange(2000, 6000)), sampling=Sampling(max_tokens=1000), stop_token_ids=(),
            deadline_at_s=math.inf,
        )  # fmt: skip
        dispatcher.submit(Ticket(request, "", now_s))

    num_full = num_replicas * (22 if num_waiting else 16)
    for number in range(num_full + num_waiting):
        ask(f"att{number}", number)
    num_asked = num_full + num_waiting
    while num_asked < num_full + num_waiting + NUM_CALLS:
        placed += [one for one in dispatcher.dispatch(now_s) if isinstance(one, Placed)]
        now_s += 0.05
        one = placed.pop(rng.randrange(len(placed)))
        num_tokens = rng.randrange(50, 900)
        answer = GenerateResult(
            request_id=one.ticket.request.request_id, token_ids=tokens(num_tokens), logprobs=(), kept_logmass=(),
            version_spans=(), finish_reason=FinishReason.STOP, replica_id=one.replica_id, load_id="", prefill_s=0.5,
            decode_s=0.02 * num_tokens,
        )  # fmt: skip
        dispatcher.finish(one.ticket, one.replica_id, answer, now_s)
        attempt = one.ticket.request.attempt_id
        if rng.random() < 0.15:
            dispatcher.homes.release(attempt)
            attempt = f"att{num_asked}"
        ask(attempt, num_asked)
        num_asked += 1
    return num_asked


def load(name: str) -> tuple[Scenario, Path]:
    """A scenario of the examples, and where its traces lie."""
    path = SCENARIOS / f"{name}.yaml"
    return read_scenario(yaml.safe_load(path.read_text()), path.name), path.parent


def run_scenario(scenario: Scenario, where: Path) -> int:
    """Simulate; returns the kernel's events."""
    setup = make_setup(scenario, lambda part: read_workload(part, where))
    policy, limits = make_policy(scenario.policy), make_limits(scenario)
    return Simulation(setup, scenario.split, limits, policy, scenario.policy.kind, scenario.seed).run().num_events


def in_steps(name: str, num_steps: int, num_groups: int) -> int:
    """A scenario with other steps, each of ``num_groups`` groups; its workload grows along."""
    scenario, where = load(name)
    assert scenario.synthetic is not None
    synthetic = msgspec.structs.replace(scenario.synthetic, num_groups=num_steps * num_groups)
    changed = msgspec.structs.replace(scenario, steps=num_steps, groups_per_batch=num_groups, synthetic=synthetic)
    return run_scenario(changed, where)


def sides(is_quick: bool) -> dict[str, Callable[[], int]]:
    """What is measured, by name."""
    hundred_steps = 2 if is_quick else 100
    found: dict[str, Callable[[], int]] = {
        "kernel": lambda: run_kernel(300_000 if is_quick else 3_000_000),
        "whole": lambda: run_scenario(*load(WHOLE)),
        "hundred": lambda: in_steps(WHOLE, hundred_steps, 64),
        "scale10k": lambda: in_steps("scale1k", 1, 64) if is_quick else run_scenario(*load("scale10k")),
    }
    for replicas, waiting in ROUTERS[:3] if is_quick else ROUTERS:
        found[f"router.{replicas}.{waiting}"] = lambda args=(replicas, waiting): run_router(*args)  # type: ignore[misc]
    for path in sorted(SCENARIOS.glob("*.yaml")):
        if path.stem not in (*LARGE, WHOLE):
            found[f"tables.{path.stem}"] = lambda name=path.stem: run_scenario(*load(name))  # type: ignore[misc]
    return found


def measure(side: str, is_quick: bool) -> Cost:
    """One side in a fresh process."""
    command = [sys.executable, __file__, "--side", side, *(["--quick"] if is_quick else [])]
    done = subprocess.run(command, check=True, timeout=SIDE_DEADLINE_S, stdout=subprocess.PIPE)
    cost = msgspec.json.decode(done.stdout, type=Cost)
    print(
        f"{side:28}{cost.num_events:10,} events {cost.cpu_s:8.2f} CPU s {cost.events_per_s:10,.0f} events/s "
        f"{cost.peak_bytes / 1e9:6.2f} GB",
        flush=True,
    )
    return cost


def run_side(side: str, is_quick: bool) -> Cost:
    """One side, here."""
    act = sides(is_quick)[side]
    started_s = time.process_time()
    num_events = act()
    cpu_s = time.process_time() - started_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Cost(num_events=num_events, cpu_s=cpu_s, peak_bytes=peak_bytes)


def figures(is_quick: bool) -> dict[str, float]:
    """Every figure by the name of its floor."""
    num_rounds = 1 if is_quick else 3
    kernel = statistics.median(measure("kernel", is_quick).events_per_s for _ in range(num_rounds))
    whole = [measure("whole", is_quick) for _ in range(num_rounds)]
    for side in sides(is_quick):
        if side.startswith("router."):
            measure(side, is_quick)
    hundred, large = measure("hundred", is_quick), measure("scale10k", is_quick)
    tables = [measure(side, is_quick).cpu_s for side in sides(is_quick) if side.startswith("tables.")]
    return {
        "min_kernel_events_per_s": kernel,
        "min_whole_events_per_s": statistics.median(one.events_per_s for one in whole),
        "max_hundred_steps_s": hundred.cpu_s,
        "max_scale10k_s": large.cpu_s,
        "max_scale10k_bytes": float(large.peak_bytes),
        "max_table_scenario_s": max(*tables, statistics.median(one.cpu_s for one in whole)),
    }


def main() -> int:
    """Run, print, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 beside a floor")
    parser.add_argument("--quick", action="store_true", help="a smaller load")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(msgspec.json.encode(run_side(arguments.side, arguments.quick)).decode())
        return 0
    floors = tomllib.loads(FLOORS.read_text())["simulator"]
    missed = 0
    for name, figure in figures(arguments.quick).items():
        floor = floors[name]
        is_reached = figure >= floor if name.startswith("min_") else figure <= floor
        missed += not is_reached
        print(f"{name:28}{figure:20,.1f}   floor {floor:,}: {'reached' if is_reached else 'MISSED'}")
    return 0 if missed == 0 or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
