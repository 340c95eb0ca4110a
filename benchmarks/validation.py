"""What the simulator says a run takes, beside what it takes.

The same trajectories (turns, lengths, tool times) run twice: for real, as scripted agents that call one replica process
through the real router and wait on timers for their tools; and in the simulator, with the real coordinator and router
on virtual time and the cost model as it was calibrated, on bursts of equal calls, in a replica process before. Nothing
of the runs themselves is fitted to. Compared is the makespan: from the first call to the end of the last.

A run is disturbed if its replica got less than 0.85 of its cores: CPU seconds of its processes / (seconds in which a
call was open x cores that it keeps busy by itself, at least 1). A disturbed run is repeated up to 3 times; of its
runs the one with the largest share counts, whatever its error. That is the whole rule.

    python benchmarks/validation.py                      local engine, 3.3M parameters: 12 workloads
    python benchmarks/validation.py --vllm-python PYTHON --model DIR
                                                         vLLM on this CPU, too, with the policy in DIR
    python benchmarks/validation.py --check              exit code 1 where an error is above floors.toml
    python benchmarks/validation.py --quick              3 small workloads, a shorter calibration
    python benchmarks/validation.py --docs docs/validation.md
                                                         writes the tables between the file's marks
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from steelyard import config_file
from steelyard.allocation.calibration import Calibration
from steelyard.allocation.policies import FixedPolicy
from steelyard.allocation.snapshot import Limits, Split
from steelyard.allocation.workload import GroupWork, TrajectoryWork, TurnWork, Workload
from steelyard.config import Config
from steelyard.run.calibrating import architecture_of, calibrate_serving
from steelyard.run.directory import RunDirectory
from steelyard.run.measured_work import Calls
from steelyard.run.one_replica import OneReplica, opened_replica
from steelyard.run.scratch import scratch_folder
from steelyard.sim.setup import SimSetup
from steelyard.sim.simulation import Simulation
from steelyard.testing.tiny_model import write_small_model

FLOORS = Path(__file__).parent / "floors.toml"
LEAST_SHARE, MAX_REPEATS = 0.85, 3
NUM_ROUNDS, NUM_QUICK_ROUNDS = 5, 1
MARKS = ("<!-- tables of benchmarks/validation.py -->", "<!-- end of tables -->")
Draw = Callable[[random.Random], float]


# --- workloads ------------------------------------------------------------------------------------------


def always(value: float) -> Draw:
    """No spread."""
    return lambda _rng: value


def log_uniform(low: float, high: float) -> Draw:
    """As many from 10 to 20 as from 20 to 40."""
    return lambda rng: math.exp(rng.uniform(math.log(low), math.log(high)))


def log_normal(median: float, sigma: float) -> Draw:
    """As tools and answers roughly are."""
    return lambda rng: median * math.exp(sigma * rng.gauss(0.0, 1.0))


def pareto(least: float, shape: float, most: float) -> Draw:
    """A heavy tail, cut at ``most``."""
    return lambda rng: min(most, least * rng.paretovariate(shape))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload: so many trajectories that begin at once, with so many turns each."""

    name: str
    num: int
    turns: int = 1
    first_prompt: Draw = field(default=always(64))
    new_prompt: Draw = field(default=always(32))
    answer: Draw = field(default=always(128))
    tool_s: Draw = field(default=always(0.0))

    def trajectories(self, max_context: int) -> tuple[TrajectoryWork, ...]:
        """Drawn by the case's name; a trajectory that would outgrow the context ends before."""
        rng = random.Random(self.name)
        return tuple(self._trajectory(rng, max_context) for _ in range(self.num))

    def _trajectory(self, rng: random.Random, max_context: int) -> TrajectoryWork:
        turns, held = list[TurnWork](), 0
        for index in range(self.turns):
            prompt = max(1, round((self.new_prompt if index else self.first_prompt)(rng)))
            answer, tool_s = max(1, round(self.answer(rng))), self.tool_s(rng)
            held += prompt + answer
            if held > max_context and turns:
                break
            is_last = index + 1 == self.turns
            turns.append(TurnWork(new_prompt_tokens=prompt, generated_tokens=answer, tool_s=0.0 if is_last else tool_s))
        return TrajectoryWork(turns=tuple(turns))


LOCAL_CASES = (
    Case(name="one alone", num=1, answer=always(400)),
    Case(name="8 at once", num=8, answer=always(256)),
    Case(name="64 at once", num=64, answer=always(192)),
    Case(name="256, a long tail, 64 at a time", num=256, answer=log_uniform(8, 192)),
    Case(name="24 long prompts", num=24, first_prompt=always(880), answer=always(64)),
    Case(name="48 prompts of mixed lengths", num=48, first_prompt=log_uniform(16, 800), answer=always(96)),
    Case(name="32 episodes without tool time", num=32, turns=5, first_prompt=always(150), answer=always(40)),
    Case(name="32 episodes, tools of 0.3 s", num=32, turns=5, answer=always(40), tool_s=always(0.3)),
    Case(name="64 episodes, log-normal tools", num=64, turns=5, answer=always(48), tool_s=log_normal(0.5, 0.8)),
    Case(name="4 episodes, slow tools", num=4, turns=4, answer=always(64), tool_s=always(1.5)),
    Case(
        name="128 episodes, log-normal answers and tools", num=128, turns=4, new_prompt=log_uniform(8, 64),
        answer=log_normal(40, 0.7), tool_s=log_normal(0.3, 1.0),
    ),
    Case(
        name="48 episodes, heavy tail of tools", num=48, turns=6, new_prompt=always(48),
        answer=log_normal(32, 0.6), tool_s=pareto(0.1, 1.2, 5.0),
    ),
)  # fmt: skip

VLLM_CASES = (
    Case(name="one alone", num=1, answer=always(96)),
    Case(name="8 at once", num=8, answer=always(96)),
    Case(name="24, a long tail, 16 at a time", num=24, answer=log_uniform(8, 128)),
    Case(name="8 long prompts", num=8, first_prompt=always(400), answer=always(32)),
    Case(name="8 episodes, tools of 1 s", num=8, turns=3, answer=always(40), tool_s=always(1.0)),
    Case(
        name="16 episodes, log-normal answers and tools", num=16, turns=3,
        answer=log_normal(32, 0.5), tool_s=log_normal(1.0, 0.7),
    ),
)  # fmt: skip

WARM_UP = Case(name="warm up", num=16, answer=always(16))

QUICK_CASES = (
    Case(name="16 at once", num=16, answer=always(64)),
    Case(name="48, a long tail, 32 at a time", num=48, answer=log_uniform(8, 96)),
    Case(name="16 episodes, log-normal tools", num=16, turns=3, answer=always(32), tool_s=log_normal(0.2, 0.5)),
)


# --- for real -------------------------------------------------------------------------------------------


class OpenCalls:
    """Seconds in which a call was open."""

    def __init__(self) -> None:
        self._num_open = 0
        self._since_s = 0.0
        self.open_s = 0.0

    def begin(self) -> None:
        """A call begins."""
        if self._num_open == 0:
            self._since_s = time.perf_counter()
        self._num_open += 1

    def end(self) -> None:
        """A call has ended."""
        self._num_open -= 1
        if self._num_open == 0:
            self.open_s += time.perf_counter() - self._since_s


@dataclass(frozen=True)
class Real:
    """One real run: its makespan, and the share of its cores that the replica got."""

    makespan_s: float
    share: float


async def run_once(one: OneReplica, calls: Calls, trajectories: tuple[TrajectoryWork, ...], cores: float) -> Real:
    """All agents at once."""
    open_calls = OpenCalls()
    # Drawn beforehand, and anew for every run: nothing of an earlier one may be in a prefix cache.
    texts = [[calls.tokens(turn.new_prompt_tokens) for turn in work.turns] for work in trajectories]
    names = [calls.new_attempt() for _ in trajectories]

    async def agent(name: str, work: TrajectoryWork, prompts: list[tuple[int, ...]]) -> None:
        context: tuple[int, ...] = ()
        for index, (turn, prompt) in enumerate(zip(work.turns, prompts, strict=True)):
            context += prompt
            open_calls.begin()
            result = await calls.call(name, index, context, turn.generated_tokens)
            open_calls.end()
            context += result.token_ids
            if index + 1 < len(work.turns):
                await asyncio.sleep(turn.tool_s)
        # As a run does: what an attempt that goes on has in the cache must not be taken from it by one that has ended.
        await one.router.release(name)

    cpu_before_s, started_s = one.cpu_s(), time.perf_counter()
    await asyncio.gather(*map(agent, names, trajectories, texts))
    took_s, cpu_s = time.perf_counter() - started_s, one.cpu_s() - cpu_before_s
    return Real(took_s, cpu_s / (open_calls.open_s * cores))


async def run_for_real(
    one: OneReplica, calls: Calls, trajectories: tuple[TrajectoryWork, ...], cores: float
) -> tuple[Real, int]:
    """The run that counts, and how many there were."""
    runs = [await run_once(one, calls, trajectories, cores)]
    while runs[-1].share < LEAST_SHARE and len(runs) <= MAX_REPEATS:
        runs.append(await run_once(one, calls, trajectories, cores))
    return max(runs, key=lambda run: run.share), len(runs)


# --- in the simulator -----------------------------------------------------------------------------------


def predict(calibration: Calibration, trajectories: tuple[TrajectoryWork, ...]) -> float:
    """Makespan of the same: until the trainer could begin, all scored in no time."""
    setup = SimSetup(
        name="validation",
        device=calibration.device,
        num_devices=2,
        model=calibration.model,
        corrections=calibration.corrections,
        workload=Workload(name="validation", groups=(GroupWork(task_id="0", trajectories=trajectories),)),
        num_steps=1,
        groups_per_batch=1,
        max_policy_lag=0,
        rates=calibration.rates,
        max_running=calibration.max_running,
        element_bytes=calibration.element_bytes,
        max_tokens=1,
        engine=calibration.limits,
    )
    split = Split(rollout=1, train=1)
    return Simulation(setup, split, Limits(total=2), FixedPolicy(), "fixed").run().steps[0].began_at_s


# --- both -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    num_turns: int
    real: Real
    predicted_s: float
    num_runs: int

    @property
    def error(self) -> float:
        """Of the prediction, in shares of what the run took."""
        return self.predicted_s / self.real.makespan_s - 1.0


@dataclass(frozen=True)
class Found:
    """One engine's table."""

    engine: str
    calibration: Calibration
    rows: tuple[Row, ...]

    @property
    def errors(self) -> list[float]:
        """Sizes alone."""
        return [abs(row.error) for row in self.rows]


async def validate(config: Config, model_dir: Path, cases: tuple[Case, ...], num_rounds: int) -> Found:
    """Calibrate on one replica, then run everything on another."""
    model = architecture_of(model_dir)
    with scratch_folder() as first, scratch_folder() as second, tempfile.TemporaryDirectory() as folder:
        directories = [RunDirectory(Path(folder) / name) for name in ("calibration", "runs")]
        for directory in directories:
            directory.path.mkdir()
            directory.make_folders()
        async with opened_replica(config, model_dir, directories[0], first) as one:
            calibration = await calibrate_serving(one, model, num_rounds, lambda _: None)
        print_calibration(calibration)
        async with opened_replica(config, model_dir, directories[1], second) as one:
            calls = Calls(one, model.vocab_size, seed=1)
            await run_once(one, calls, WARM_UP.trajectories(config.model.max_context_tokens), 1.0)
            rows = [await compare(one, calls, calibration, case) for case in cases]
    return Found(config.inference.engine, calibration, tuple(rows))


async def compare(one: OneReplica, calls: Calls, calibration: Calibration, case: Case) -> Row:
    """One workload, for real and in the simulator."""
    trajectories = case.trajectories(one.config.model.max_context_tokens)
    real, num_runs = await run_for_real(one, calls, trajectories, max(1.0, calibration.busy_cores))
    num_turns = sum(len(work.turns) for work in trajectories)
    row = Row(case.name, num_turns, real, predict(calibration, trajectories), num_runs)
    print(f"  {table_line(row)}", flush=True)
    return row


def print_calibration(calibration: Calibration) -> None:
    """Its own error, before it is used."""
    errors = ", ".join(f"{one.term} {one.median_frac:.1%} (worst {one.worst_frac:.1%})" for one in calibration.errors)
    print(f"{calibration.engine}: {calibration.busy_cores:.2f} cores busy; error on held-out points: {errors}")


def table_line(row: Row) -> str:
    """As a row of the table in docs."""
    return (
        f"| {row.name} | {row.num_turns} | {row.real.makespan_s:.2f} | {row.predicted_s:.2f} | {row.error:+.1%} | "
        f"{row.real.share:.2f} | {row.num_runs} |"
    )


def table(found: Found) -> str:
    """Markdown."""
    model = found.calibration.model
    lines = [
        f"{found.engine} engine, {model.num_parameters / 1e6:.1f}M parameters, one replica: error "
        f"{statistics.median(found.errors):.1%} at the median, {max(found.errors):.1%} at worst.",
        "",
        "| workload | calls | real s | predicted s | error | share of cores | runs |",
        "|---|---|---|---|---|---|---|",
        *map(table_line, found.rows),
    ]
    return "\n".join(lines)


def write_tables(path: Path, text: str) -> None:
    """Put the tables between the marks of a file."""
    whole = path.read_text()
    before, rest = whole.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    path.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}")


def local_config(model_dir: Path, *, is_quick: bool) -> Config:
    """A run's defaults; smaller where it must be quick."""
    overrides = [f"model.policy={model_dir}"]
    if is_quick:
        overrides += ["model.max_context_tokens=256", "inference.max_running=32", "inference.kv_tokens=16384"]
    return config_file.load(None, overrides)


def vllm_config(model_dir: Path, python: str) -> Config:
    """16 at a time, contexts of 640 tokens."""
    return config_file.load(
        None,
        [
            f"model.policy={model_dir}",
            "model.max_context_tokens=640",
            "inference.engine=vllm",
            f"inference.vllm.python={python}",
            "inference.max_running=16",
            "admission.max_policy_lag=0",
        ],
    )


async def run_all(arguments: argparse.Namespace, root: Path) -> list[Found]:
    """All tables."""
    small = root / "model"
    write_small_model(small)
    rounds = NUM_QUICK_ROUNDS if arguments.quick else NUM_ROUNDS
    cases = QUICK_CASES if arguments.quick else LOCAL_CASES
    found = [await validate(local_config(small, is_quick=arguments.quick), small, cases, rounds)]
    if arguments.vllm_python is not None:
        config = vllm_config(arguments.model, arguments.vllm_python)
        found.append(await validate(config, arguments.model, VLLM_CASES, rounds))
    return found


def figures(found: list[Found]) -> dict[str, float]:
    """By the names of the floors."""
    by_name: dict[str, float] = {}
    for one in found:
        by_name[f"max_{one.engine}_median_error"] = statistics.median(one.errors)
        by_name[f"max_{one.engine}_worst_error"] = max(one.errors)
    return by_name


def main() -> int:
    """Run, print the tables, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 above a floor")
    parser.add_argument("--quick", action="store_true", help="3 small workloads")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory of a decoder for vLLM")
    parser.add_argument("--vllm-python", help="python of an environment with vLLM; without it there is no such table")
    parser.add_argument("--docs", type=Path, help="file to write the tables into")
    arguments = parser.parse_args()
    if arguments.vllm_python is not None and arguments.model is None:
        parser.error("--vllm-python must come with --model DIR; docs/vllm.md says how to make SmolLM2-135M")
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(run_all(arguments, Path(directory)))
    text = "\n\n".join(map(table, found))
    print(f"\n{text}\n")
    if arguments.docs is not None:
        write_tables(arguments.docs, text)
    reached, is_good = figures(found), True
    for name, floor in tomllib.loads(FLOORS.read_text())["validation"].items():
        if name not in reached:
            print(f"{name.removeprefix('max_')}: not measured without --vllm-python")
            continue
        is_good &= reached[name] <= floor
        verdict = "reached" if reached[name] <= floor else "MISSED"
        print(f"{name.removeprefix('max_'):24}{reached[name]:7.1%}   floor {floor:.0%}: {verdict}")
    return 0 if is_good or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
