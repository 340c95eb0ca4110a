"""T2: agents evicted each other's KV and prefilled again and again.

Admission goes by projected KV. Where contexts outgrow the pool, younger agents wait until older ones have ended;
whoever is evicted is evicted whole, and its answers stay as they were.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from openai import AsyncOpenAI

from steelyard.clock import SystemClock
from steelyard.inference.engine_core import EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.testing.agent import Agent
from steelyard.testing.gateway import GatewayWorld, binding
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import tiny_core
from steelyard.types import EngineStats, Sampling, Trace

NUM_AGENTS = 8
NUM_TURNS = 6
ANSWER_TOKENS = 40
MODULE = tiny_module()
OBSERVATION = "The file holds these lines, and the next one differs from them in its number only: " * 2


async def play(directory: Path, kv_tokens: int) -> tuple[list[Trace], EngineStats]:
    """Agents over HTTP, none waits for another; their sealed traces, and the engine's counters at the end."""
    clock = SystemClock()
    sizes = EngineSettings(max_running=NUM_AGENTS, row_tokens=1536, kv_tokens=kv_tokens, prefill_chunk_tokens=64)
    core, loader = tiny_core(clock, sizes, [MODULE])
    engine = LocalEngine(core, loader, clock)
    names = [f"att_{index}" for index in range(NUM_AGENTS)]
    sampling = Sampling(temperature=1.0, max_tokens=ANSWER_TOKENS)
    bindings = {name: binding(policy_version=0, max_context_tokens=1536, sampling=sampling) for name in names}
    world = GatewayWorld(directory, engine=engine, bindings=bindings)
    try:
        url = await world.server.start()

        async def talk(name: str) -> None:
            async with AsyncOpenAI(base_url=url, api_key=world.key(name), max_retries=0, timeout=120) as client:
                agent = Agent(client)
                for turn in range(NUM_TURNS):
                    await agent.say(f"{name}, turn {turn}. {OBSERVATION}")
            await world.seal(name)
            await engine.release(name)

        await asyncio.gather(*map(talk, names))
        traces = [(await world.store.read(name))[0] for name in names]
        return traces, await engine.stats()
    finally:
        await world.close()
        await engine.close()


def context_tokens(trace: Trace) -> int:
    """Tokens of an agent's last turn."""
    return len(trace.turns[-1].prompt_token_ids) + len(trace.turns[-1].token_ids)


@torch.no_grad()
def check_log_probabilities(trace: Trace) -> None:
    """Each recorded number is that of a plain forward pass over the whole text."""
    for turn in trace.turns:
        tokens = torch.tensor([turn.prompt_token_ids + turn.token_ids])
        rows = torch.log_softmax(MODULE(input_ids=tokens, use_cache=False).logits[0], -1)
        places = range(len(turn.prompt_token_ids) - 1, tokens.shape[1] - 1)
        expected = [float(rows[place, token]) for place, token in zip(places, turn.token_ids, strict=True)]
        assert turn.logprobs == pytest.approx(expected, abs=1e-4)


def test_t2_contexts_that_grow_to_twice_the_pool_are_not_computed_again_and_again(tmp_path: Path) -> None:
    traces, _ = asyncio.run(play(tmp_path / "ample", 1536 * NUM_AGENTS))
    pool = sum(map(context_tokens, traces)) // 2
    traces, stats = asyncio.run(play(tmp_path / "half", pool))
    assert [len(trace.turns) for trace in traces] == [NUM_TURNS] * NUM_AGENTS
    assert sum(map(context_tokens, traces)) > 1.8 * pool, "the case needs contexts that outgrow the pool"
    once = sum(map(context_tokens, traces))
    always = sum(len(turn.prompt_token_ids) for trace in traces for turn in trace.turns)
    assert always > 3 * once, "the case needs prompts that repeat their beginnings"
    assert stats.prefill_tokens <= 1.3 * once
    for trace in traces:
        check_log_probabilities(trace)
