"""An engine behind a socket behaves as the engine itself."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from steelyard.clock import SystemClock
from steelyard.errors import EngineError, RemoteFailed, StorageFailed
from steelyard.inference.client import ClientDeadlines, EngineClient
from steelyard.inference.service import serve_engine
from steelyard.processes.channel import Client
from steelyard.testing.engine import FakeEngine
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, TokenChunk

Work = Callable[[EngineClient, FakeEngine], Awaitable[None]]
DEADLINES = ClientDeadlines(answer_s=20.0, load_s=20.0)


def over_socket(work: Work) -> None:
    async def main(path: Path) -> None:
        clock = SystemClock()
        fake = FakeEngine(clock)
        stop = asyncio.Event()
        serving = asyncio.create_task(serve_engine(fake, path, stop))
        client = await Client.connect(path, name="rep_fake", deadline_s=20.0)
        try:
            await work(EngineClient(client, clock, DEADLINES), fake)
        finally:
            stop.set()
            await serving
            await client.close()

    # Unix socket paths are short; pytest's temporary directories may not be.
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "engine.sock"))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition must come true")


def test_every_call_crosses_and_comes_back() -> None:
    async def work(client: EngineClient, fake: FakeEngine) -> None:
        proof = await client.load("some/dir", 3)
        assert (proof.version, fake.loaded_dirs) == (3, {3: "some/dir"})
        request = request_for("a", (1, 2), version=3, seed=1)
        assert await client.generate(request) == await fake.generate(request)
        await client.release("a")
        assert fake.released == ["a"]
        await client.pause()
        assert (await client.health()).is_paused
        await client.resume()
        assert not (await client.health()).is_paused
        assert await client.stats() == await fake.stats()
        await client.unload(3)
        assert fake.loaded_dirs == {}

    over_socket(work)


def test_streamed_tokens_come_in_order_before_the_result() -> None:
    async def work(client: EngineClient, fake: FakeEngine) -> None:
        await client.load("some/dir", 0)
        chunks: list[TokenChunk] = []
        result = await client.generate(request_for("a", (1, 2), stream=True), chunks.append)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids

    over_socket(work)


def test_an_abort_ends_the_request_as_cancelled() -> None:
    async def work(client: EngineClient, fake: FakeEngine) -> None:
        await client.load("some/dir", 0)
        fake.is_holding = True
        running = asyncio.create_task(client.generate(request_for("a", (1, 2))))
        await until(lambda: bool(fake.requests))
        await client.abort("a")
        assert (await running).finish_reason is FinishReason.CANCELLED

    over_socket(work)


def test_a_cancelled_call_is_cancelled_in_the_engine() -> None:
    async def work(client: EngineClient, fake: FakeEngine) -> None:
        await client.load("some/dir", 0)
        fake.is_holding = True
        running = asyncio.create_task(client.generate(request_for("a", (1, 2))))
        await until(lambda: bool(fake.requests))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(20.0):
            while (await client.stats()).num_running:
                pass

    over_socket(work)


def test_errors_keep_their_kind_across_the_socket() -> None:
    async def work(client: EngineClient, fake: FakeEngine) -> None:
        with pytest.raises(EngineError, match="version 8 must be loaded"):
            await client.generate(request_for("a", (1, 2), version=8))
        fake.failure = StorageFailed("disk full")
        with pytest.raises(StorageFailed, match="disk full"):
            await client.load("some/dir", 0)

    over_socket(work)


def test_the_end_of_the_service_fails_open_calls_at_once() -> None:
    async def main(path: Path) -> None:
        clock = SystemClock()
        fake = FakeEngine(clock, is_holding=True)
        stop = asyncio.Event()
        serving = asyncio.create_task(serve_engine(fake, path, stop))
        connection = await Client.connect(path, name="rep_fake", deadline_s=20.0)
        client = EngineClient(connection, clock, DEADLINES)
        await client.load("some/dir", 0)
        running = asyncio.create_task(client.generate(request_for("a", (1, 2))))
        await until(lambda: bool(fake.requests))
        stop.set()
        await serving
        with pytest.raises(RemoteFailed, match="rep_fake"):
            await running
        await connection.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "engine.sock"))
