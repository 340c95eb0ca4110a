"""What a tool call and a sandbox cost.

    python benchmarks/sandbox.py            three rounds, medians
    python benchmarks/sandbox.py --check    the same; exit code 1 where a figure misses its floor
    python benchmarks/sandbox.py --quick    one short round

A call is what the environment's tool does: a small function is sent into a warm sandbox, called on four
inputs in a fresh process, and its results come back as data. CPU time is that of the host process and of
all that it carries.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import psutil

from steelyard.config import SandboxConfig
from steelyard.sandbox.base import Sandbox
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.sandbox.opening import open_pool
from steelyard.sandbox.pool import WarmPool
from steelyard.types import CallStatus

FLOORS = Path(__file__).with_name("floors.toml")
NUM_ROUNDS = 3
NUM_CONCURRENT = 4
DEADLINE_S = 60.0
SOURCE = """
def total(items, limit):
    result = 0
    for item in items:
        if item <= limit:
            result += item
    return result
"""
INPUTS = [([1, 2, 3], 2), ([], 0), ([5, -1, 4], 4), (list(range(20)), 9)]
EXPECTED = [3, 0, 3, 45]


@dataclass(frozen=True)
class Round:
    """Figures of one round, in milliseconds and per second."""

    call_p50_ms: float
    call_p99_ms: float
    call_cpu_ms: float
    calls_per_s: float
    create_p50_ms: float
    create_cpu_ms: float
    creates_per_s: float


def cpu_s() -> float:
    """CPU seconds of this process and of its descendants, those included that they have reaped."""
    total = 0.0
    myself = psutil.Process()
    for process in (myself, *myself.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + (times.children_user + times.children_system if process != myself else 0)
    return total


async def call(sandbox: Sandbox) -> float:
    """One tool call; its milliseconds."""
    started = time.perf_counter()
    results = await run_function_calls(sandbox, SOURCE, "total", INPUTS, DEADLINE_S)
    duration_ms = 1000 * (time.perf_counter() - started)
    assert [(each.status, each.value) for each in results] == [(CallStatus.RETURNED, value) for value in EXPECTED]
    return duration_ms


async def calls(pool: WarmPool, num: int) -> list[float]:
    """``num`` calls one after another in one sandbox; milliseconds of each."""
    sandbox = await pool.acquire("bench_calls", DEADLINE_S)
    try:
        return [await call(sandbox) for _ in range(num)]
    finally:
        await sandbox.close()


async def creates(pool: WarmPool, num: int) -> list[float]:
    """``num`` sandboxes taken and destroyed one after another; milliseconds of each."""
    durations_ms = []
    for index in range(num):
        started = time.perf_counter()
        await (await pool.acquire(f"bench_{index}", DEADLINE_S)).close()
        durations_ms.append(1000 * (time.perf_counter() - started))
    return durations_ms


async def measure(pool: WarmPool, num: int) -> Round:
    """One round over ``num`` calls and creations of each kind."""
    await calls(pool, 5)
    # The sandbox is closed at the end of the calls, so that what its processes used has been added up.
    cpu_before_s = cpu_s()
    alone_ms = await calls(pool, num)
    call_cpu_ms = 1000 * (cpu_s() - cpu_before_s) / num
    started = time.perf_counter()
    await asyncio.gather(*(calls(pool, num // NUM_CONCURRENT) for _ in range(NUM_CONCURRENT)))
    calls_per_s = num // NUM_CONCURRENT * NUM_CONCURRENT / (time.perf_counter() - started)
    cpu_before_s, started = cpu_s(), time.perf_counter()
    create_ms = await creates(pool, num)
    return Round(
        call_p50_ms=statistics.median(alone_ms),
        call_p99_ms=sorted(alone_ms)[int(0.99 * len(alone_ms))],
        call_cpu_ms=call_cpu_ms,
        calls_per_s=calls_per_s,
        create_p50_ms=statistics.median(create_ms),
        create_cpu_ms=1000 * (cpu_s() - cpu_before_s) / num,
        creates_per_s=num / (time.perf_counter() - started),
    )


async def run(num_rounds: int, num: int) -> list[Round]:
    """All rounds, on one pool."""
    with tempfile.TemporaryDirectory() as directory:
        pool = await open_pool(SandboxConfig(), Path(directory))
        try:
            return [await measure(pool, num) for _ in range(num_rounds)]
        finally:
            await pool.close()


def report(rounds: list[Round]) -> bool:
    """Print each figure, beside its floor where it has one; whether all floors are met."""
    floors = tomllib.loads(FLOORS.read_text())["sandbox"]
    bounds = {
        "call_p50_ms": (floors["max_call_p50_ms"], "<="),
        "calls_per_s": (floors["min_calls_per_s"], ">="),
    }
    is_met = True
    for name in Round.__dataclass_fields__:
        value = statistics.median(getattr(each, name) for each in rounds)
        line = f"{name:16} {value:10.2f}"
        if name in bounds:
            bound, sign = bounds[name]
            is_good = value <= bound if sign == "<=" else value >= bound
            is_met = is_met and is_good
            line += f"   floor {sign} {bound:g}   {'met' if is_good else 'MISSED'}"
        print(line)
    return is_met


def main() -> int:
    """0, or 1 where ``--check`` finds a floor missed."""
    parser = argparse.ArgumentParser(description="What a tool call and a sandbox cost.")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a figure misses its floor")
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    rounds = asyncio.run(run(1, 40) if options.quick else run(NUM_ROUNDS, 400))
    is_met = report(rounds)
    return 1 if options.check and not is_met else 0


if __name__ == "__main__":
    sys.exit(main())
