"""What the simulator says a run takes, beside what it takes.

The same trajectories (turns, lengths, tool times) run twice: for real, as scripted agents that call one replica process
through the real router and wait on timers for their tools; and in the simulator, with the real coordinator and router
on virtual time and the cost model as it was calibrated, on bursts of equal calls, in a replica process before. Nothing
of the runs themselves is fitted to. Compared is the makespan: from the first call to the end of the last.

A run is disturbed if its replica got less than 0.85 of its cores: CPU seconds of its processes / (seconds in which a
call was open x cores that it keeps busy by itself, at least 1). A disturbed run is repeated up to 3 times; of its
runs the one with the largest share counts, whatever its error. That is the whole rule.

    python benchmarks/validation.py                      local engine, 3.3M parameters: 12 workloads
    python benchmarks/validation.py --engine vllm --vllm-python PYTHON --model DIR
                                                         vLLM on this CPU, with the policy in DIR: 6 workloads
    python benchmarks/validation.py --results FOLDER     keeps the calibration and each run there, and goes on from them
                                    --begin-for 500      begins nothing new after so many seconds
    python benchmarks/validation.py --check              exit code 1 where an error is above floors.toml
    python benchmarks/validation.py --quick              3 small workloads, a shorter calibration
    python benchmarks/validation.py --docs docs/validation.md
                                                         writes the engine's table between the file's marks
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
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from steelyard import config_file
from steelyard.allocation.calibration import Calibration, decode_calibration, encode_calibration
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
from steelyard.types.record import Record

STARTED_S = time.perf_counter()
FLOORS = Path(__file__).parent / "floors.toml"
LEAST_SHARE, MAX_REPEATS = 0.85, 3
NUM_ROUNDS = {"local": 5, "vllm": 2}
NUM_QUICK_ROUNDS = 1
MARKS = ("<!-- benchmarks/validation.py: {engine} -->", "<!-- end of {engine} -->")
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
    Case(name="24, a long tail, 8 at a time", num=24, answer=log_uniform(8, 128)),
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


class Real(Record, frozen=True):
    """A real run: its makespan, the share of its cores that the replica got, and of how many runs it is the one."""

    makespan_s: float
    share: float
    num_runs: int = 1


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


async def run_for_real(one: OneReplica, calls: Calls, trajectories: tuple[TrajectoryWork, ...], cores: float) -> Real:
    """The run that counts."""
    runs = [await run_once(one, calls, trajectories, cores)]
    while runs[-1].share < LEAST_SHARE and len(runs) <= MAX_REPEATS:
        runs.append(await run_once(one, calls, trajectories, cores))
    return msgspec.structs.replace(max(runs, key=lambda run: run.share), num_runs=len(runs))


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
class Plan:
    """How often a burst is measured, and when nothing new is begun any longer (``time.perf_counter``)."""

    num_rounds: int
    until_s: float

    def check(self) -> None:
        """Raises SystemExit where the time is over."""
        if time.perf_counter() >= self.until_s:
            raise SystemExit("the time to begin anything is over; the same command with --results goes on")


class Results:
    """What has been measured of an engine: kept in a folder where there is one, so that another command goes on."""

    def __init__(self, folder: Path | None, engine: str) -> None:
        self._calibration_path = folder and folder / f"{engine}.calibration.json"
        self._runs_path = folder and folder / f"{engine}.runs.json"
        self.calibration: Calibration | None = None
        self.runs: dict[str, Real] = {}
        if self._calibration_path and self._calibration_path.exists():
            self.calibration = decode_calibration(self._calibration_path.read_bytes(), str(self._calibration_path))
        if self._runs_path and self._runs_path.exists():
            self.runs = msgspec.json.decode(self._runs_path.read_bytes(), type=dict[str, Real])

    def keep_calibration(self, found: Calibration) -> None:
        """It is measured."""
        self.calibration = found
        if self._calibration_path:
            self._calibration_path.write_bytes(encode_calibration(found))

    def keep_run(self, name: str, real: Real) -> None:
        """A workload has run."""
        self.runs[name] = real
        if self._runs_path:
            self._runs_path.write_bytes(msgspec.json.encode(self.runs))


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    num_turns: int
    real: Real
    predicted_s: float

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


async def validate(config: Config, model_dir: Path, cases: tuple[Case, ...], results: Results, plan: Plan) -> Found:
    """Calibrate on one replica, then run everything on another; what is there already is not measured again.

    Raises:
        SystemExit: the time to begin anything is over.
    """
    if results.calibration is None:
        model = architecture_of(model_dir)
        async with replica(config, model_dir) as one:
            results.keep_calibration(await calibrate_serving(one, model, plan.num_rounds, say))
    calibration = results.calibration
    assert calibration is not None
    print_calibration(calibration)
    context = config.model.max_context_tokens
    if any(case.name not in results.runs for case in cases):
        plan.check()
        async with replica(config, model_dir) as one:
            calls = Calls(one, calibration.model.vocab_size, seed=1)
            await run_once(one, calls, WARM_UP.trajectories(context), 1.0)
            for case in cases:
                if case.name not in results.runs:
                    plan.check()
                    cores = max(1.0, calibration.busy_cores)
                    results.keep_run(case.name, await run_for_real(one, calls, case.trajectories(context), cores))
                    print(f"  {table_line(row_of(case, calibration, results, context))}", flush=True)
    return Found(
        config.inference.engine, calibration, tuple(row_of(one, calibration, results, context) for one in cases)
    )


@asynccontextmanager
async def replica(config: Config, model_dir: Path) -> AsyncIterator[OneReplica]:
    """One of its own, in folders of its own."""
    with scratch_folder() as sockets, tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        directory.make_folders()
        async with opened_replica(config, model_dir, directory, sockets) as one:
            yield one


def row_of(case: Case, calibration: Calibration, results: Results, max_context: int) -> Row:
    """A workload that has run, and what the simulator says of it."""
    trajectories = case.trajectories(max_context)
    num_turns = sum(len(work.turns) for work in trajectories)
    return Row(case.name, num_turns, results.runs[case.name], predict(calibration, trajectories))


def say(text: str) -> None:
    """Progress, with the seconds since the process began."""
    print(f"  {time.perf_counter() - STARTED_S:5.0f} s  {text}", flush=True)


def print_calibration(calibration: Calibration) -> None:
    """Its own error, before it is used."""
    errors = ", ".join(f"{one.term} {one.median_frac:.1%} (worst {one.worst_frac:.1%})" for one in calibration.errors)
    print(f"{calibration.engine}: {calibration.busy_cores:.2f} cores busy; error on held-out points: {errors}")


def table_line(row: Row) -> str:
    """As a row of the table in docs."""
    return (
        f"| {row.name} | {row.num_turns} | {row.real.makespan_s:.2f} | {row.predicted_s:.2f} | {row.error:+.1%} | "
        f"{row.real.share:.2f} | {row.real.num_runs} |"
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


def write_table(path: Path, found: Found) -> None:
    """Put a table between its marks in a file."""
    begin, end = (mark.format(engine=found.engine) for mark in MARKS)
    before, rest = path.read_text().split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n\n{table(found)}\n\n{end}{after}")


def local_config(model_dir: Path, *, is_quick: bool) -> Config:
    """A run's defaults; smaller where it must be quick."""
    overrides = [f"model.policy={model_dir}"]
    if is_quick:
        overrides += ["model.max_context_tokens=256", "inference.max_running=32", "inference.kv_tokens=16384"]
    return config_file.load(None, overrides)


def vllm_config(model_dir: Path, python: str) -> Config:
    """8 at a time, contexts of 448 tokens: prompts of a real model take a core long."""
    return config_file.load(
        None,
        [
            f"model.policy={model_dir}",
            "model.max_context_tokens=448",
            "inference.engine=vllm",
            f"inference.vllm.python={python}",
            "inference.max_running=8",
            "admission.max_policy_lag=0",
        ],
    )


async def measured(arguments: argparse.Namespace, root: Path) -> Found:
    """The table of the engine that is asked for."""
    results = Results(arguments.results, arguments.engine)
    rounds = NUM_QUICK_ROUNDS if arguments.quick else NUM_ROUNDS[arguments.engine]
    plan = Plan(rounds, STARTED_S + arguments.begin_for)
    if arguments.engine == "vllm":
        config = vllm_config(arguments.model, arguments.vllm_python)
        return await validate(config, arguments.model, VLLM_CASES, results, plan)
    small = root / "model"
    write_small_model(small)
    cases = QUICK_CASES if arguments.quick else LOCAL_CASES
    return await validate(local_config(small, is_quick=arguments.quick), small, cases, results, plan)


def figures(found: Found) -> dict[str, float]:
    """By the names of the floors."""
    return {
        f"max_{found.engine}_median_error": statistics.median(found.errors),
        f"max_{found.engine}_worst_error": max(found.errors),
    }


def read_arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 above a floor")
    parser.add_argument("--quick", action="store_true", help="3 small workloads of the local engine")
    parser.add_argument("--engine", choices=("local", "vllm"), default="local", help="which one (local)")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory of a decoder for vLLM")
    parser.add_argument("--vllm-python", help="python of an environment with vLLM")
    parser.add_argument("--results", type=Path, help="folder to keep what is measured in, and to go on from")
    parser.add_argument("--begin-for", type=float, default=math.inf, help="seconds after which nothing is begun")
    parser.add_argument("--docs", type=Path, help="file to write the table into")
    arguments = parser.parse_args()
    if arguments.engine == "vllm" and (arguments.vllm_python is None or arguments.model is None or arguments.quick):
        parser.error(
            "--engine vllm must come with --vllm-python PYTHON and --model DIR, without --quick; docs/vllm.md says how "
            "to make SmolLM2-135M"
        )
    if arguments.results is not None:
        arguments.results.mkdir(parents=True, exist_ok=True)
    return arguments


def main() -> int:
    """Run, print the table, and compare with the floors."""
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measured(arguments, Path(directory)))
    print(f"\n{table(found)}\n")
    num_disturbed = sum(row.real.share < LEAST_SHARE for row in found.rows)
    if num_disturbed:
        print(f"{num_disturbed} workloads got less than {LEAST_SHARE} of their cores in every run: measure again\n")
    if arguments.docs is not None:
        write_table(arguments.docs, found)
    reached, is_good = figures(found), True
    for name, floor in tomllib.loads(FLOORS.read_text())["validation"].items():
        if name not in reached:
            continue
        is_good &= reached[name] <= floor
        verdict = "reached" if reached[name] <= floor else "MISSED"
        print(f"{name.removeprefix('max_'):24}{reached[name]:7.1%}   floor {floor:.0%}: {verdict}")
    return 0 if is_good or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
