"""The local engine under KV pressure: 64 agents of growing context, KV for half of them.

Each agent plays episodes, one after the other. An episode has 6 turns; a turn brings 100 new prompt tokens, generates
40, and is followed by a tool that takes 50 to 350 ms (seeded). A context grows to 840 tokens. Two sides, in fresh
processes that take turns (A B A B ...):

    ample     KV for all 64 contexts at their full length
    half      KV for 32 of them

Compared are generated tokens a second, as the median over rounds of half / ample. Printed beside it: the prompt tokens
that were computed for each generated one, the share that reuse saved, and how many running requests were evicted.
One random-weight decoder of 3.3M parameters, one thread, greedy.

    python benchmarks/kv_pressure.py            3 rounds of 3 episodes an agent
    python benchmarks/kv_pressure.py --check    the same; exit code 1 below the floor of floors.toml
    python benchmarks/kv_pressure.py --quick    1 round of 1 episode an agent
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from steelyard.clock import SystemClock
from steelyard.ids import SeededIds
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine, prepare_process
from steelyard.processes.child import thread_environment
from steelyard.testing.versions import MemoryVersions
from steelyard.types import EngineStats, GenerateRequest, Sampling

FLOORS = Path(__file__).parent / "floors.toml"
NUM_AGENTS = 64
NUM_TURNS, PROMPT_TOKENS, ANSWER_TOKENS = 6, 100, 40
CONTEXT_TOKENS = NUM_TURNS * (PROMPT_TOKENS + ANSWER_TOKENS)
TOOL_S = (0.05, 0.35)
VOCAB_SIZE = 1024
SIDE_DEADLINE_S = 280.0
KV_TOKENS = {"ample": NUM_AGENTS * (CONTEXT_TOKENS + 16), "half": NUM_AGENTS * CONTEXT_TOKENS // 2}


@dataclass(frozen=True)
class Outcome:
    """What one side measured. ``computed_per_token``: prompt tokens that were computed for each generated one."""

    tokens_per_s: float
    computed_per_token: float
    cached_frac: float
    num_evicted: int


def build_module() -> Any:
    """A random decoder of 3.3M parameters."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


async def run_side(side: str, num_episodes: int) -> Outcome:
    """All agents over one engine, after a quarter of them have played one episode each."""
    clock, loader = SystemClock(), MemoryVersions()
    sizes = EngineSettings(max_running=NUM_AGENTS, row_tokens=1024, kv_tokens=KV_TOKENS[side])
    core = EngineCore(sizes, loader, replica_id="rep_bench", clock=clock, ids=SeededIds(0))
    engine = LocalEngine(core, loader, clock)
    try:
        await engine.load(loader.put(0, build_module()), 0)
        await asyncio.gather(*(agent(engine, f"warm_{index}", 1) for index in range(NUM_AGENTS // 4)))
        before = await engine.stats()
        started_s = time.perf_counter()
        await asyncio.gather(*(agent(engine, f"agent_{index}", num_episodes) for index in range(NUM_AGENTS)))
        return outcome(await engine.stats(), before, time.perf_counter() - started_s)
    finally:
        await engine.close()


def outcome(after: EngineStats, before: EngineStats, elapsed_s: float) -> Outcome:
    """Figures between two readings."""
    generated = after.decode_tokens - before.decode_tokens
    computed = after.prefill_tokens - before.prefill_tokens
    cached = after.cached_tokens - before.cached_tokens
    num_evicted = after.num_evicted - before.num_evicted
    return Outcome(generated / elapsed_s, computed / generated, cached / (cached + computed), num_evicted)


async def agent(engine: LocalEngine, name: str, num_episodes: int) -> None:
    """Episodes one after the other."""
    for number in range(num_episodes):
        await play_episode(engine, f"{name}_{number}")


async def play_episode(engine: LocalEngine, name: str) -> None:
    """Turns with a tool between them; then the KV may go."""
    rng = random.Random(name)
    context: tuple[int, ...] = ()
    for number in range(NUM_TURNS):
        context += tuple(rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS))
        request = GenerateRequest(
            request_id=f"{name}_{number}",
            attempt_id=name,
            sequence_key=name,
            policy_version=0,
            prompt_token_ids=context,
            sampling=Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS),
            stop_token_ids=(),
            deadline_at_s=SystemClock().now_s() + SIDE_DEADLINE_S,
        )
        result = await engine.generate(request)
        assert len(result.token_ids) == ANSWER_TOKENS, f"every token asked for must come, got {result.finish_reason}"
        context += result.token_ids
        # The tool: time is what it takes from the agent, and what the engine may use for the others.
        await asyncio.sleep(rng.uniform(*TOOL_S))
    await engine.release(name)


def measure(side: str, num_episodes: int) -> Outcome:
    """One side in a fresh process."""
    command = [sys.executable, __file__, "--side", side, "--episodes", str(num_episodes)]
    environment = {**os.environ, **thread_environment(1)}
    done = subprocess.run(command, env=environment, check=True, timeout=SIDE_DEADLINE_S, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout, type=Outcome)


def compare(num_rounds: int, num_episodes: int) -> float:
    """Median over rounds of half / ample."""
    ratios = []
    for _ in range(num_rounds):
        found = {side: measure(side, num_episodes) for side in KV_TOKENS}
        for side, one in found.items():
            print(
                f"{side:6}{one.tokens_per_s:8,.0f} tokens/s, {one.computed_per_token:.2f} prompt tokens computed for "
                f"each, {one.cached_frac:.0%} reused, {one.num_evicted} evicted",
                flush=True,
            )
        ratios.append(found["half"].tokens_per_s / found["ample"].tokens_per_s)
    return statistics.median(ratios)


def main() -> int:
    """Run, print, and compare with the floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit with 1 below the floor")
    parser.add_argument("--quick", action="store_true", help="1 round of 1 episode an agent")
    parser.add_argument("--side", choices=sorted(KV_TOKENS), help=argparse.SUPPRESS)
    parser.add_argument("--episodes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is not None:
        prepare_process(1)
        print(msgspec.json.encode(asyncio.run(run_side(arguments.side, arguments.episodes))).decode())
        return 0
    figure = compare(1, 1) if arguments.quick else compare(3, 3)
    floor = tomllib.loads(FLOORS.read_text())["kv_pressure"]["min_half_of_ample"]
    verdict = "reached" if figure >= floor else "MISSED"
    print(f"half of ample{figure:6.2f}   floor {floor}: {verdict}")
    return 0 if figure >= floor or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
