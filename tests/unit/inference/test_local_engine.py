"""The front of the local engine: its thread, its requests, their ends."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from steelyard.clock import SystemClock
from steelyard.errors import EngineError, IntegrityError
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import request_for, run_core, tiny_core
from steelyard.types import FinishReason, GenerateResult

PROMPTS = [tuple(range(number, 3 * number + 1)) for number in range(20)]
"""Of 1 to 39 tokens."""


def in_engine(work: Callable[[LocalEngine], Any], *, answer_deadline_s: float = 20.0) -> Any:
    """Run ``await work(engine)`` with a fresh engine around a tiny core."""
    clock = SystemClock()
    settings = EngineSettings(
        max_running=8, row_tokens=2048, kv_tokens=32_768, prefill_chunk_tokens=64, answer_deadline_s=answer_deadline_s
    )
    core, loader = tiny_core(clock, settings)

    async def main() -> Any:
        engine = LocalEngine(core, loader, clock)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


async def until_waiting(engine: LocalEngine) -> None:
    async with asyncio.timeout(20.0):
        while (await engine.stats()).num_waiting == 0:
            pass


def test_the_front_answers_many_requests_at_once() -> None:
    async def work(engine: LocalEngine) -> list[GenerateResult]:
        requests = [request_for(f"r{index}", prompt) for index, prompt in enumerate(PROMPTS)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    results = in_engine(work)
    core, _ = tiny_core(ManualClock())
    expected = run_core(core, [request_for(f"r{index}", prompt) for index, prompt in enumerate(PROMPTS)])
    assert {result.request_id: result.token_ids for result in results} == {
        name: result.token_ids for name, result in expected.items()
    }


def test_paused_requests_wait_and_go_on_after_resume() -> None:
    async def work(engine: LocalEngine) -> None:
        await engine.pause()
        running = asyncio.create_task(engine.generate(request_for("a", (1, 2, 3))))
        await until_waiting(engine)
        assert (await engine.health()).is_paused
        assert (await engine.stats()).decode_tokens == 0
        await engine.resume()
        assert len((await running).token_ids) == 16

    in_engine(work)


def test_a_deadline_passes_in_a_paused_engine_too() -> None:
    async def work(engine: LocalEngine) -> GenerateResult:
        await engine.pause()
        return await engine.generate(request_for("a", (1, 2, 3), deadline_at_s=SystemClock().now_s() + 0.05))

    assert in_engine(work).finish_reason is FinishReason.QUEUE_TIMEOUT


def test_an_abort_returns_what_was_sampled_so_far() -> None:
    async def work(engine: LocalEngine) -> GenerateResult:
        seen = asyncio.Event()
        request = request_for("a", (1, 2, 3), max_tokens=2000, stream=True)
        running = asyncio.create_task(engine.generate(request, lambda _chunk: seen.set()))
        await seen.wait()
        await engine.abort("a")
        return await running

    result = in_engine(work)
    assert result.finish_reason is FinishReason.CANCELLED
    assert 0 < len(result.token_ids) < 2000


def test_a_cancelled_caller_frees_its_place() -> None:
    async def work(engine: LocalEngine) -> None:
        seen = asyncio.Event()
        request = request_for("a", (1, 2, 3), max_tokens=2000, stream=True)
        running = asyncio.create_task(engine.generate(request, lambda _chunk: seen.set()))
        await seen.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_tokens_in_use) == (0, 0, 0)

    in_engine(work)


def test_a_refused_double_does_not_end_the_first() -> None:
    async def work(engine: LocalEngine) -> GenerateResult:
        await engine.pause()
        first = asyncio.create_task(engine.generate(request_for("a", (1, 2, 3))))
        await until_waiting(engine)
        with pytest.raises(EngineError, match="request_id must be new"):
            await engine.generate(request_for("a", (1, 2, 3)))
        await engine.resume()
        return await first

    assert in_engine(work).finish_reason is FinishReason.LENGTH


def test_closing_ends_open_requests_as_engine_errors_and_refuses_new_ones() -> None:
    async def work(engine: LocalEngine) -> None:
        seen = asyncio.Event()
        request = request_for("a", (1, 2, 3), max_tokens=2000, stream=True)
        running = asyncio.create_task(engine.generate(request, lambda _chunk: seen.set()))
        await seen.wait()
        await engine.close()
        assert (await running).finish_reason is FinishReason.ENGINE_ERROR
        with pytest.raises(EngineError, match="engine rep_tiny must be running: closed"):
            await engine.generate(request_for("b", (1,)))
        assert not (await engine.health()).is_healthy

    in_engine(work)


class BrokenCore(EngineCore):
    """A core whose steps fail outside a forward pass."""

    def step(self) -> Any:
        raise ValueError("broken on purpose")


def test_a_dead_thread_fails_its_requests_at_once_and_says_why() -> None:
    clock = SystemClock()
    core, loader = tiny_core(clock)
    core.__class__ = BrokenCore

    async def main() -> None:
        engine = LocalEngine(core, loader, clock)
        result = await engine.generate(request_for("a", (1, 2, 3)))
        assert result.finish_reason is FinishReason.ENGINE_ERROR
        assert "ValueError: broken on purpose" in result.detail
        health = await engine.health()
        assert not health.is_healthy
        assert "broken on purpose" in health.detail
        await engine.close()

    asyncio.run(main())


def test_versions_are_loaded_and_unloaded_beside_generation() -> None:
    clock = SystemClock()
    core, loader = tiny_core(clock)
    name = loader.put(1, tiny_module(1))

    async def main() -> None:
        engine = LocalEngine(core, loader, clock)
        running = asyncio.create_task(engine.generate(request_for("a", (1, 2, 3), max_tokens=60)))
        proof = await engine.load(name, 1)
        assert proof.version == 1
        result = await engine.generate(request_for("b", (1, 2, 3), version=1))
        assert result.load_id == proof.load_id
        await running
        await engine.unload(0)
        assert (await engine.health()).versions == (1,)
        with pytest.raises(IntegrityError, match="version_dir must be one of"):
            await engine.load("v000009", 9)
        await engine.close()

    asyncio.run(main())


def test_a_prepared_process_has_its_threads_and_frees_its_imports_from_collection() -> None:
    script = (
        "import gc, torch\n"
        "from steelyard.inference.local_engine import prepare_process\n"
        "prepare_process(1)\n"
        "assert torch.get_num_threads() == 1\n"
        "assert gc.get_freeze_count() > 100_000\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr


THREADS_SCRIPT = """
import asyncio, torch
from steelyard.clock import SystemClock
from steelyard.ids import SeededIds
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine, prepare_process
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import MemoryVersions

class Watched(MemoryVersions):
    reading, proving = [], []

    def load(self, version_dir):
        self.reading.append(torch.get_num_threads())
        return super().load(version_dir)

    def loaded_digest(self, module):
        self.proving.append(torch.get_num_threads())
        return super().loaded_digest(module)

class WatchedCore(EngineCore):
    serving = []

    def hold(self, proven):
        self.serving.append(torch.get_num_threads())
        return super().hold(proven)

async def main():
    prepare_process(2)
    clock = SystemClock()
    loader = Watched()
    names = [loader.put(version, tiny_module(version)) for version in (1, 2)]
    loader.proving.clear()
    sizes = EngineSettings(max_running=8, row_tokens=128, kv_tokens=2048)
    core = WatchedCore(sizes, loader, replica_id="rep_tiny", clock=clock, ids=SeededIds(0))
    engine = LocalEngine(core, loader, clock)
    for version, name in enumerate(names, 1):
        await engine.load(name, version)
    await engine.close()
    assert loader.reading == [1, 1], loader.reading
    assert loader.proving == [1, 1], loader.proving
    assert core.serving == [2, 2], core.serving

asyncio.run(main())
"""


def test_only_the_thread_that_computes_uses_several_threads() -> None:
    command = [sys.executable, "-c", THREADS_SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
