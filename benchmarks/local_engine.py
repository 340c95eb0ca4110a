"""The local engine beside ``transformers`` ``generate`` and a bare loop of forward calls.

    equal     64 requests of 64 prompt and 128 new tokens            engine / generate, engine / bare loop
    long tail 512 requests of 64 prompt and log-uniform 8 to 128     engine / generate in batches of 64
              new tokens, all waiting; only useful tokens count
    episodes  128 episodes of 4 turns, each with 150 new prompt      engine, which keeps the prefix between turns /
              and 40 generated tokens                                generate in batches of 64, called once a turn

Fair terms: one random-weight decoder of 3.3M parameters for all; greedy, and the tokens compared; every measurement in
fresh processes with the number of threads that is best for ``generate``, after a warm-up; sides take turns (A B A B
...), each ratio is of one turn, and medians are of ratios. ``generate`` and the bare loop use a static cache.

The engine takes its threads as a run does: where it has two, these are two replica processes of one thread, each on a
core of its own, behind the router, with the default settings: 64 requests at once in each. It is the engine that
serves a run: loaded from a published version with its proof, asked through the router and over sockets. ``generate``
gets batches of 64; 128 were seen to be slower for it. Printed beside it, and not compared with a floor, is one engine
that has all threads and runs 64 requests at once, in the process that asks it.

    python benchmarks/local_engine.py            3 turns
    python benchmarks/local_engine.py --check    the same; exit code 1 below the floors of floors.toml
    python benchmarks/local_engine.py --quick    1 turn of smaller loads
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from steelyard.clock import SystemClock
from steelyard.ids import SeededIds
from steelyard.inference.client import ClientDeadlines, EngineClient
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine, prepare_process
from steelyard.inference.router import Router
from steelyard.processes.child import thread_environment
from steelyard.run.children import start_child
from steelyard.run.replica_options import ReplicaOptions
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.types import GenerateRequest, Sampling
from steelyard.weights.loader import VersionLoader
from steelyard.weights.publisher import VersionPublisher

FLOORS = Path(__file__).parent / "floors.toml"
BATCH = 64
VOCAB_SIZE = 1024
TIE = 1e-4
START_DEADLINE_S, STOP_DEADLINE_S, SIDE_DEADLINE_S = 60.0, 10.0, 600.0

Tokens = list[int]


@dataclass(frozen=True)
class Job:
    """One conversation: for each turn the new prompt tokens and how many tokens to generate."""

    turns: tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True)
class Outcome:
    """What one process measured: useful tokens a second, and the generated tokens, [job][turn][token]."""

    tokens_per_s: float
    generated: list[list[Tokens]]


# --- loads --------------------------------------------------------------------------------------------


def equal_load(num_jobs: int) -> list[Job]:
    """Equal lengths."""
    rng = random.Random(1)
    return [Job(((prompt_of(rng, 64), 128),)) for _ in range(num_jobs)]


def long_tail_load(num_jobs: int) -> list[Job]:
    """Log-uniform 8 to 128 new tokens."""
    rng = random.Random(2)
    lengths = [round(math.exp(rng.uniform(math.log(8), math.log(128)))) for _ in range(num_jobs)]
    return [Job(((prompt_of(rng, 64), length),)) for length in lengths]


def episode_load(num_jobs: int) -> list[Job]:
    """Four turns each."""
    rng = random.Random(3)
    return [Job(tuple((prompt_of(rng, 150), 40) for _ in range(4))) for _ in range(num_jobs)]


def prompt_of(rng: random.Random, length: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))


LOADS: dict[str, tuple[Callable[[int], list[Job]], int, int]] = {
    "equal": (equal_load, BATCH, BATCH),
    "long_tail": (long_tail_load, 512, 128),
    "episodes": (episode_load, 2 * BATCH, 16),
}


# --- the model ----------------------------------------------------------------------------------------


def build_model(directory: Path) -> None:
    """Write a random decoder of 3.3M parameters to ``model``, and publish it as version 0 under ``weights``."""
    model_dir = directory / "model"
    model_dir.mkdir()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module: Any = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # Logits of a few units, as a trained decoder has them; so that greedy tokens are not ties.
        module.model.embed_tokens.weight.mul_(4.0)
    module.save_pretrained(model_dir)
    write_tokenizer(model_dir, vocab_size=512)
    VersionPublisher(directory / "weights", model_dir, 1e-4).publish(module, version=0, step=0, parent_version=None)
    print(f"{sum(parameter.numel() for parameter in module.parameters()):,} parameters")


def plain_module(directory: Path) -> Any:
    """The decoder as ``transformers`` loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory / "model", local_files_only=True).eval()


# --- the sides ----------------------------------------------------------------------------------------


def run_engine(directory: Path, jobs: list[Job]) -> Outcome:
    """All jobs through the router over one replica process for each thread, as a run serves them."""
    return asyncio.run(serve_by_replicas(directory, jobs, torch.get_num_threads()))


async def serve_by_replicas(directory: Path, jobs: list[Job], num_replicas: int) -> Outcome:
    """Start replicas with the default settings, each on a core of its own with one thread."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as sockets:
        options = [
            ReplicaOptions(
                name=f"replica-{index}",
                socket_path=f"{sockets}/{index}.sock",
                parent_pid=os.getpid(),
                core=index,
                max_running=EngineSettings.max_running,
                row_tokens=EngineSettings.row_tokens,
                kv_tokens=EngineSettings.kv_tokens,
                prefill_chunk_tokens=EngineSettings.prefill_chunk_tokens,
                max_versions=EngineSettings.max_versions,
                probe_tolerance=EngineSettings.probe_tolerance,
            )
            for index in range(num_replicas)
        ]
        children, engines = [], {}
        try:
            for option in options:
                child = await start_child("steelyard.run.replica_process", option, log_folder=Path(sockets))
                children.append(child)
                client = await child.connect(Path(option.socket_path), START_DEADLINE_S)
                engines[option.name] = EngineClient(client, clock, ClientDeadlines())
            router = Router(engines, clock)
            for replica in router.replicas.values():
                await replica.load(str(directory / "weights" / "v000000"), 0)
            return await measure(router, jobs)
        finally:
            await asyncio.gather(*(child.stop(STOP_DEADLINE_S) for child in children))


def run_in_process(directory: Path, jobs: list[Job]) -> Outcome:
    """All jobs through one engine with all threads, in the process that asks."""
    return asyncio.run(serve_in_process(directory, jobs))


async def serve_in_process(directory: Path, jobs: list[Job]) -> Outcome:
    """The engine's asynchronous front, without another process."""
    clock, loader = SystemClock(), VersionLoader()
    settings = EngineSettings(max_running=BATCH)
    core = EngineCore(settings, loader, replica_id="rep_bench", clock=clock, ids=SeededIds(0))
    engine = LocalEngine(core, loader, clock)
    try:
        await engine.load(str(directory / "weights" / "v000000"), 0)
        return await measure(engine, jobs)
    finally:
        await engine.close()


async def measure(engine: Router | LocalEngine, jobs: list[Job]) -> Outcome:
    """Warm up, then hand over all jobs at once."""
    await asyncio.gather(*(converse(engine, f"warm_{index}", job) for index, job in enumerate(warm_up(jobs))))
    started_s = time.perf_counter()
    generated = await asyncio.gather(*(converse(engine, f"job_{index}", job) for index, job in enumerate(jobs)))
    return Outcome(num_useful(jobs) / (time.perf_counter() - started_s), list(generated))


async def converse(engine: Router | LocalEngine, name: str, job: Job) -> list[Tokens]:
    """All turns of a job, one after the other; then its KV may go."""
    context: tuple[int, ...] = ()
    generated: list[Tokens] = []
    for number, (new, num_tokens) in enumerate(job.turns):
        context += new
        request = GenerateRequest(
            request_id=f"{name}_{number}",
            attempt_id=name,
            sequence_key=name,
            policy_version=0,
            prompt_token_ids=context,
            sampling=Sampling(temperature=0.0, max_tokens=num_tokens),
            stop_token_ids=(),
            deadline_at_s=SystemClock().now_s() + SIDE_DEADLINE_S,
        )
        result = await engine.generate(request)
        generated.append(list(result.token_ids))
        context += result.token_ids
    await engine.release(name)
    return generated


def run_generate(directory: Path, jobs: list[Job]) -> Outcome:
    """All jobs through ``generate`` in batches, called once a turn."""
    module = plain_module(directory)
    generate_jobs(module, warm_up(jobs))
    started_s = time.perf_counter()
    generated: list[list[Tokens]] = []
    for first in range(0, len(jobs), BATCH):
        generated.extend(generate_jobs(module, jobs[first : first + BATCH]))
    return Outcome(num_useful(jobs) / (time.perf_counter() - started_s), generated)


@torch.inference_mode()
def generate_jobs(module: Any, jobs: list[Job]) -> list[list[Tokens]]:
    """One batch: every turn of all its jobs, each as long as its longest."""
    contexts: list[tuple[int, ...]] = [()] * len(jobs)
    generated: list[list[Tokens]] = [[] for _ in jobs]
    for number in range(len(jobs[0].turns)):
        turns = [job.turns[number] for job in jobs]
        contexts = [context + new for context, (new, _) in zip(contexts, turns, strict=True)]
        input_ids = torch.tensor(contexts)
        longest = max(num_tokens for _, num_tokens in turns)
        output = module.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=longest,
            do_sample=False,
            cache_implementation="static",
        )
        for index, (_, num_tokens) in enumerate(turns):
            tokens = output[index, input_ids.shape[1] :][:num_tokens].tolist()
            generated[index].append(tokens)
            contexts[index] += tuple(tokens)
    return generated


def run_bare(directory: Path, jobs: list[Job]) -> Outcome:
    """Jobs of equal lengths through a loop of forward calls."""
    module = plain_module(directory)
    bare_loop(module, warm_up(jobs))
    started_s = time.perf_counter()
    generated = bare_loop(module, jobs)
    return Outcome(num_useful(jobs) / (time.perf_counter() - started_s), generated)


@torch.inference_mode()
def bare_loop(module: Any, jobs: list[Job]) -> list[list[Tokens]]:
    """Prefill, then one forward call a token with the largest logit fed back."""
    prompts = torch.tensor([job.turns[0][0] for job in jobs])
    num_tokens = jobs[0].turns[0][1]
    cache = transformers.StaticCache(config=module.config, max_cache_len=prompts.shape[1] + num_tokens)
    tokens = module(prompts, cache=cache, logits_to_keep=1).logits.argmax(-1)
    chosen = [tokens]
    for _ in range(num_tokens - 1):
        tokens = module(tokens, cache=cache, logits_to_keep=1).logits.argmax(-1)
        chosen.append(tokens)
    return [[row] for row in torch.cat(chosen, 1).tolist()]


SIDES: dict[str, Callable[[Path, list[Job]], Outcome]] = {
    "engine": run_engine,
    "in_process": run_in_process,
    "generate": run_generate,
    "bare": run_bare,
}


def warm_up(jobs: list[Job]) -> list[Job]:
    """The first batch with short answers: the same shapes, and the memory that they need."""
    return [Job(tuple((new, min(8, num_tokens)) for new, num_tokens in job.turns)) for job in jobs[:BATCH]]


def num_useful(jobs: list[Job]) -> int:
    """Tokens that were asked for."""
    return sum(num_tokens for job in jobs for _, num_tokens in job.turns)


# --- measuring ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Threads of every side, and whether waiting threads spin."""

    num_threads: int
    spins: bool = False

    def environment(self) -> dict[str, str]:
        """Environment of a process with this setting."""
        environment = {**os.environ, **thread_environment(self.num_threads)}
        if self.spins:
            environment["OMP_WAIT_POLICY"] = "ACTIVE"
            del environment["KMP_BLOCKTIME"], environment["GOMP_SPINCOUNT"]
        return environment

    def __str__(self) -> str:
        return f"{self.num_threads} thread(s), {'spinning' if self.spins else 'passive'}"


class Bench:
    """Runs sides in fresh processes."""

    def __init__(self, directory: Path, is_quick: bool) -> None:
        self.directory = directory
        self.is_quick = is_quick
        self.num_rounds = 1 if is_quick else 3
        self.num_ties = 0
        self.setting = Setting(1)

    def measure(self, side: str, load: str, setting: Setting | None = None) -> Outcome:
        """One side on one load."""
        used = setting or self.setting
        _, full, quick = LOADS[load]
        output = self.directory / "outcome.json"
        command = [
            sys.executable, __file__, "--side", side, "--load", load, "--jobs", str(quick if self.is_quick else full),
            "--threads", str(used.num_threads), "--directory", str(self.directory), "--output", str(output),
        ]  # fmt: skip
        subprocess.run(command, env=used.environment(), check=True, timeout=SIDE_DEADLINE_S)
        found = json.loads(output.read_bytes())
        return Outcome(found["tokens_per_s"], found["generated"])

    def choose_setting(self) -> None:
        """The thread setting that is best for ``generate``."""
        num_cores = os.cpu_count() or 1
        candidates = [Setting(1), Setting(num_cores), Setting(num_cores, spins=True)]
        if self.is_quick or num_cores == 1:
            return
        speeds = {setting: self.measure("generate", "equal", setting).tokens_per_s for setting in candidates}
        for setting, speed in speeds.items():
            print(f"generate with {setting}: {speed:,.0f} tokens/s")
        self.setting = max(speeds, key=speeds.__getitem__)

    def compare(self, load: str, *others: str) -> list[float]:
        """Median over rounds of engine / other, for each other side."""
        ratios: list[list[float]] = []
        for _ in range(self.num_rounds):
            outcomes = {side: self.measure(side, load) for side in ("engine", *others)}
            speeds = "  ".join(f"{side} {outcome.tokens_per_s:,.0f}" for side, outcome in outcomes.items())
            print(f"{load:10}{speeds} tokens/s")
            ratios.append([outcomes["engine"].tokens_per_s / outcomes[other].tokens_per_s for other in others])
            self.num_ties += count_ties(self.directory, load, outcomes["engine"], outcomes["generate"])
            if self.setting.num_threads > 1:
                alone = self.measure("in_process", load).tokens_per_s
                print(f"{'':10}one engine with all threads {alone:,.0f} tokens/s, not judged")
        return [statistics.median(column) for column in zip(*ratios, strict=True)]


def count_ties(directory: Path, load: str, engine: Outcome, other: Outcome) -> int:
    """Places where greedy tokens part at two logits within ``TIE``.

    Raises:
        AssertionError: they part where the logits are further apart.
    """
    build, _, _ = LOADS[load]
    jobs = build(len(engine.generated))
    ties = 0
    module = plain_module(directory) if engine.generated != other.generated else None
    for job, ours, theirs in zip(jobs, engine.generated, other.generated, strict=True):
        context: list[int] = []
        for (new, _), one, two in zip(job.turns, ours, theirs, strict=True):
            context += new
            if one != two:
                place = next(index for index in range(len(one)) if one[index] != two[index])
                check_tie(module, context + one[:place], one[place], two[place])
                ties += 1
                # From here on the two conversations are different texts.
                break
            context += one
    return ties


@torch.inference_mode()
def check_tie(module: Any, context: list[int], one: int, two: int) -> None:
    """Two tokens' logits after ``context`` lie within ``TIE``."""
    logits = module(torch.tensor([context]), use_cache=False, logits_to_keep=1).logits[0, -1]
    gap = abs(float(logits[one] - logits[two]))
    assert gap <= TIE, f"greedy tokens may differ only at logits within {TIE}, got {gap}"


def run_all(directory: Path, is_quick: bool) -> dict[str, float]:
    """All figures, by the names of their floors."""
    build_model(directory)
    bench = Bench(directory, is_quick)
    bench.choose_setting()
    print(f"all sides with {bench.setting}")
    of_generate, of_bare = bench.compare("equal", "generate", "bare")
    (long_tail,) = bench.compare("long_tail", "generate")
    (episodes,) = bench.compare("episodes", "generate")
    print(f"greedy tokens equal, but for {bench.num_ties} ties")
    return {
        "min_equal_of_generate": of_generate,
        "min_equal_of_bare": of_bare,
        "min_long_tail_of_generate": long_tail,
        "min_episodes_of_generate": episodes,
    }


def main() -> int:
    """Run, print a table, and compare with the floors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 below a floor")
    parser.add_argument("--quick", action="store_true", help="one turn of smaller loads")
    for name in ("side", "load", "directory", "output"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("jobs", "threads"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        torch.set_num_threads(arguments.threads)
        if arguments.side == "in_process":
            # What a replica's process does before it serves.
            prepare_process(arguments.threads)
        build, _, _ = LOADS[arguments.load]
        outcome = SIDES[arguments.side](Path(arguments.directory), build(arguments.jobs))
        found = {"tokens_per_s": outcome.tokens_per_s, "generated": outcome.generated}
        Path(arguments.output).write_text(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        figures = run_all(Path(directory), arguments.quick)
    floors = tomllib.loads(FLOORS.read_text())["local_engine"]
    for name, figure in figures.items():
        verdict = "reached" if figure >= floors[name] else "MISSED"
        print(f"{name.removeprefix('min_'):24}{figure:6.2f}   floor {floors[name]}: {verdict}")
    is_good = all(figure >= floors[name] for name, figure in figures.items())
    return 0 if is_good or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
