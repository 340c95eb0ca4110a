"""V5: the prefix cache survived a change of weights, and with each step recorded and true log-probabilities fell apart.

A prefix is reused only under the version that computed it: the same prompt on two versions gives on each what a server
gives that never knew the other.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from steelyard.clock import SystemClock
from steelyard.ids import SeededIds
from steelyard.inference.client import ClientDeadlines, EngineClient
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.inference.service import serve_engine
from steelyard.processes.channel import Client
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import MemoryVersions, request_for
from steelyard.types import GenerateResult

PROMPT = tuple(range(100, 148))
TOLERANCE = 1e-4


def on_replica(*versions: int, play: Callable[[EngineClient], Awaitable[None]]) -> None:
    """A replica behind its socket, as control meets it, that loads ``versions``; each has weights of its own."""

    async def main(socket: Path) -> None:
        clock, loader, stop = SystemClock(), MemoryVersions(), asyncio.Event()
        settings = EngineSettings(max_running=4, row_tokens=128, kv_tokens=2048, prefill_chunk_tokens=32)
        core = EngineCore(settings, loader, replica_id="rep_tiny", clock=clock, ids=SeededIds(0))
        engine = LocalEngine(core, loader, clock)
        serving = asyncio.create_task(serve_engine(engine, socket, stop))
        client = await Client.connect(socket, name="rep_tiny", deadline_s=30)
        replica = EngineClient(client, clock, ClientDeadlines())
        try:
            for version in versions:
                await replica.load(loader.put(version, tiny_module(version)), version)
            await play(replica)
        finally:
            await client.close()
            stop.set()
            await serving
            await engine.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "replica.sock"))


async def ask(replica: EngineClient, name: str, version: int, key: str = "talk") -> GenerateResult:
    """The same conversation, prompt and seed each time; only the version differs."""
    request = request_for(name, PROMPT, version=version, temperature=1.0, seed=5, key=key, max_tokens=12)
    return await replica.generate(request)


def alone(version: int) -> GenerateResult:
    """What a replica says that never held another version."""
    results: list[GenerateResult] = []

    async def play(replica: EngineClient) -> None:
        results.append(await ask(replica, "alone", version))

    on_replica(version, play=play)
    return results[0]


def same(found: GenerateResult, expected: GenerateResult) -> bool:
    return found.token_ids == expected.token_ids and found.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_v5_the_same_prompt_on_two_versions_gives_each_its_own_log_probabilities() -> None:
    expected = {version: alone(version) for version in (0, 1)}
    assert not same(expected[0], expected[1]), "the case needs versions that differ"

    async def play(replica: EngineClient) -> None:
        for round_number, version in enumerate((0, 0, 1, 1)):
            found = await ask(replica, f"r{round_number}", version)
            assert same(found, expected[version])
            assert (found.num_cached_tokens > 0) == (round_number % 2 == 1), "reused within a version, and only there"
            assert {span.version for span in found.version_spans} == {version}

    on_replica(0, 1, play=play)


def test_v5_siblings_at_the_same_time_share_their_prompt_only_within_a_version() -> None:
    expected = {version: alone(version) for version in (0, 1)}

    async def play(replica: EngineClient) -> None:
        asked = [(f"{letter}{version}", version) for letter in "abc" for version in (0, 1)]
        found = await asyncio.gather(*(ask(replica, name, version, key=name) for name, version in asked))
        for (_, version), result in zip(asked, found, strict=True):
            assert same(result, expected[version])

    on_replica(0, 1, play=play)


def test_v5_a_prefix_does_not_outlive_its_version() -> None:
    expected = alone(1)

    async def play(replica: EngineClient) -> None:
        await ask(replica, "before", 0)
        await replica.unload(0)
        stats = await replica.stats()
        assert stats.kv_tokens_in_use == 0
        found = await ask(replica, "after", 1)
        assert found.num_cached_tokens == 0
        assert same(found, expected)

    on_replica(0, 1, play=play)
