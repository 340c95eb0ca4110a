"""V1, where weights may change under a trajectory: its tokens are of three versions, and all of them are in the loss.

Then each token keeps the version that sampled it, and its log-probability is the true one under that version.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from openai import AsyncOpenAI

from steelyard.assembly.samples import trace_samples
from steelyard.clock import SystemClock
from steelyard.inference.engine import KvRule, OnTokens
from steelyard.inference.engine_core import EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.testing.gateway import ATTEMPT, GatewayWorld, binding
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import MemoryVersions, tiny_core
from steelyard.types import GenerateRequest, GenerateResult, Sampling, SealedTrace, TokenChunk, Trace

TEMPERATURE = 0.3
ANSWER_TOKENS = 900


def talkative(seed: int, end_of_turn_id: int) -> Any:
    """A policy that does not end its turn: at a low temperature a logit of 0 is as good as never sampled."""
    module: Any = tiny_module(seed)
    with torch.no_grad():
        module.get_input_embeddings().weight[end_of_turn_id] = 0.0
    return module


class Watched:
    """The engine, and when it has sampled: text may be held back from the client for as long as it could be a mark."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.has_sampled = asyncio.Event()

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        def seen(chunk: TokenChunk) -> None:
            self.has_sampled.set()
            if on_tokens is not None:
                on_tokens(chunk)

        return await self._engine.generate(request, seen)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def update(self, loader: MemoryVersions, version: int, module: Any, kv: KvRule) -> None:
        """Once the version before has sampled; paused, so that the answer cannot end before."""
        async with asyncio.timeout(60):
            await self.has_sampled.wait()
        await self._engine.pause()
        await self._engine.update(loader.put(version, module), version, kv)
        self.has_sampled.clear()
        await self._engine.resume()


async def read_answer(client: AsyncOpenAI) -> None:
    stream: Any = await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Count."}], stream=True
    )
    async for _ in stream:
        pass


async def play(directory: Path, kv: KvRule) -> tuple[Trace, SealedTrace, list[Any]]:
    """One answer over HTTP, streamed; weights change twice while it comes.

    Returns its trace, the record of its sealing, and the three policies.
    """
    clock = SystemClock()
    sampling = Sampling(temperature=TEMPERATURE, max_tokens=ANSWER_TOKENS)
    bound = msgspec.structs.replace(binding(policy_version=0, sampling=sampling), follows_updates=True)
    sizes = EngineSettings(max_running=4, row_tokens=1536, kv_tokens=6144, prefill_chunk_tokens=64)
    end_of_turn_id = GatewayWorld(directory / "first").renderer.end_of_turn_id
    modules = [talkative(seed, end_of_turn_id) for seed in range(3)]
    core, loader = tiny_core(clock, sizes, modules[:1])
    engine = LocalEngine(core, loader, clock)
    watched = Watched(engine)
    world = GatewayWorld(directory / "second", engine=watched, bindings={ATTEMPT: bound})
    try:
        url = await world.server.start()
        async with AsyncOpenAI(base_url=url, api_key=world.key(), max_retries=0, timeout=120) as client:
            reading = asyncio.create_task(read_answer(client))
            for version in (1, 2):
                await watched.update(loader, version, modules[version], kv)
            await reading
        sealed = await world.seal()
        return (await world.store.read(ATTEMPT))[0], sealed, modules
    finally:
        await world.close()
        await engine.close()


@torch.no_grad()
def plain_logprobs(module: Any, token_ids: tuple[int, ...]) -> list[float]:
    """Log-probability of each token but the first, as a plain forward pass over the whole text gives it."""
    logits = module(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, :-1] / TEMPERATURE
    found: list[float] = torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
    return found


def test_v1_every_token_of_the_loss_has_the_version_and_the_log_probability_that_sampled_it(tmp_path: Path) -> None:
    trace, sealed, modules = asyncio.run(play(tmp_path, KvRule.RECOMPUTE))
    (turn,) = trace.turns
    assert [span.version for span in turn.version_spans] == [0, 1, 2]
    assert all(span.kv_version is None for span in turn.version_spans)
    assert (sealed.oldest_version, sealed.newest_version) == (0, 2)
    (sample,) = trace_samples(trace, 1.0)
    expected = [plain_logprobs(module, sample.token_ids) for module in modules]
    trained = [index for index, mask in enumerate(sample.loss_mask) if mask]
    assert len(trained) == len(turn.token_ids)
    assert {sample.versions[index] for index in trained} == {0, 1, 2}
    for index in trained:
        assert sample.logprobs[index] == pytest.approx(expected[sample.versions[index]][index - 1], abs=1e-3)


def test_v1_kept_kv_is_said_so_that_nobody_takes_its_log_probabilities_for_a_plain_versions(tmp_path: Path) -> None:
    trace, _, _ = asyncio.run(play(tmp_path, KvRule.KEEP))
    (turn,) = trace.turns
    assert [(span.version, span.kv_version) for span in turn.version_spans] == [(0, None), (1, 0), (2, 0)]
