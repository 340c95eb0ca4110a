"""The emulated engine as an engine."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from steelyard.clock import SystemClock
from steelyard.errors import EngineError, IntegrityError
from steelyard.ids import SeededIds
from steelyard.inference.emulated_core import CoreSettings
from steelyard.inference.emulated_engine import EmulatedEngine, EmulatedSettings
from steelyard.inference.emulated_tokens import (
    LengthModel,
    TokenIds,
    emulated_logprobs,
    plain_token_ids,
    seeded_tokens,
)
from steelyard.inference.engine import KvRule
from steelyard.testing.tokenizer import write_tokenizer
from steelyard.testing.versions import request_for
from steelyard.types import FinishReason, GenerateRequest, Manifest, Probe, TokenChunk

IDS = np.arange(100, 400, dtype=np.int64)


class Times:
    """Of a model of 2 GB that is read at 1.5 TB/s, loaded at 10 GB/s."""

    def step_s(self, num_decoding: int, kv_tokens: int, prefill_tokens: int, context_tokens: int) -> float:
        decode_s = 0.001 + (2e9 + kv_tokens * 1e5) / 1.5e12 if num_decoding else 0.0
        return decode_s + prefill_tokens * 4e-6

    def load_s(self) -> float:
        return 0.2


MODEL = Times()


class Files:
    """Versions by directory; ``v3`` is version 3. ``bad``: directories that are not as published."""

    def __init__(self) -> None:
        self.bad: set[str] = set()
        self.changed: dict[str, str] = {}

    def read(self, version_dir: str) -> tuple[Manifest, TokenIds]:
        if version_dir in self.bad:
            raise IntegrityError(f"{version_dir} is damaged")
        number = int(version_dir[1:])
        digest = self.changed.get(version_dir, f"digest {number}")
        manifest = Manifest(
            version=number, step=number, parent_version=None, files=(), parameters=(), weights_digest=digest,
            model_config_digest="", tokenizer_digest="", template_digest="", dtype="float32",
            probe=Probe(sequences=(), logprobs=(), separates_parent=False),
        )  # fmt: skip
        return manifest, IDS


def with_engine(
    work: Callable[[EmulatedEngine, Files], Awaitable[None]], *, scale: float = 1000.0, kv: int = 4096
) -> None:
    async def main() -> None:
        files = Files()
        settings = EmulatedSettings(
            core=CoreSettings(max_running=8, kv_tokens=kv, prefill_chunk_tokens=512),
            lengths=LengthModel(median_tokens=20, sigma=0.5), max_versions=2, time_scale=scale,
        )  # fmt: skip
        engine = EmulatedEngine(settings, MODEL, files, "rep", SystemClock(), SeededIds(0))
        try:
            await engine.load("v0", 0)
            await work(engine, files)
        finally:
            engine.close()

    asyncio.run(main())


def ask(name: str, *, follows: bool = False, max_tokens: int = 64, **options: object) -> GenerateRequest:
    request = request_for(name, range(10), temperature=1.0, stop=(7,), max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    return msgspec.structs.replace(request, follows_updates=follows)


def test_an_answer_holds_the_contract_and_log_probabilities_that_depend_on_the_version() -> None:
    async def work(engine: EmulatedEngine, files: Files) -> None:
        proof = await engine.load("v1", 1)
        zero, one = await asyncio.gather(
            engine.generate(ask("a", seed=5)), engine.generate(ask("a2", version=1, seed=5))
        )
        assert zero.token_ids == one.token_ids and zero.logprobs != one.logprobs
        assert one.load_id == proof.load_id != zero.load_id
        assert zero.finish_reason is FinishReason.STOP and zero.token_ids[-1] == 7
        assert set(zero.token_ids[:-1]) <= set(IDS.tolist())
        assert zero.logprobs == tuple(emulated_logprobs(0, 10, zero.token_ids))
        assert all(value < 0 for value in zero.logprobs) and len(zero.kept_logmass) == len(zero.token_ids)

    with_engine(work)


def test_the_time_of_the_model_passes_on_the_clock() -> None:
    """A lower bound only: a busy machine may be late, never early."""

    async def work(engine: EmulatedEngine, files: Files) -> None:
        started_s = time.monotonic()
        result = await engine.generate(msgspec.structs.replace(ask("a", max_tokens=40), stop_token_ids=()))
        assert time.monotonic() - started_s >= 40 * MODEL.step_s(1, 10, 0, 0) * 0.95
        assert result.finish_reason is FinishReason.LENGTH
        assert result.decode_s == pytest.approx(39 * MODEL.step_s(1, 30, 0, 0), rel=0.05)

    with_engine(work, scale=1.0)


def test_tokens_are_streamed_in_order_before_the_answer() -> None:
    async def work(engine: EmulatedEngine, files: Files) -> None:
        chunks: list[TokenChunk] = []
        result = await engine.generate(ask("a", stream=True), chunks.append)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids

    with_engine(work)


def test_an_abort_and_a_cancelled_call_end_a_request() -> None:
    async def work(engine: EmulatedEngine, files: Files) -> None:
        long = [msgspec.structs.replace(ask(name, max_tokens=2000), stop_token_ids=()) for name in "ab"]
        aborted, left = (asyncio.create_task(engine.generate(request)) for request in long)
        await asyncio.sleep(0)
        await engine.abort("a")
        assert (await aborted).finish_reason is FinishReason.CANCELLED
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert (await engine.stats()).kv_tokens_in_use == 0

    with_engine(work, scale=1.0)


def test_a_version_is_held_only_if_its_files_are_what_was_published_and_it_is_the_one_that_was_meant() -> None:
    async def work(engine: EmulatedEngine, files: Files) -> None:
        files.bad.add("v1")
        with pytest.raises(IntegrityError, match="v1 is damaged"):
            await engine.load("v1", 1)
        with pytest.raises(IntegrityError, match=r"manifest\.version must be 5, got 2"):
            await engine.load("v2", 5)
        files.changed["v0"] = "other"
        with pytest.raises(IntegrityError, match="version 0 must keep weights_digest digest 0, got other"):
            await engine.load("v0", 0)
        await engine.load("v2", 2)
        with pytest.raises(EngineError, match="must hold at most 2 versions"):
            await engine.load("v3", 3)
        assert (await engine.health()).versions == (0, 2)
        await engine.unload(0)
        with pytest.raises(EngineError, match="version 0 must be loaded to be unloaded"):
            await engine.unload(0)
        with pytest.raises(EngineError, match="policy_version must be loaded in rep, got 0"):
            await engine.generate(ask("late"))

    with_engine(work)


def test_an_update_spans_two_versions_and_is_refused_under_a_pinned_request() -> None:
    async def work(engine: EmulatedEngine, files: Files) -> None:
        came = asyncio.Event()
        endless = msgspec.structs.replace(ask("a", follows=True, max_tokens=50_000, stream=True), stop_token_ids=())
        follows = asyncio.create_task(engine.generate(endless, lambda chunk: came.set()))
        await came.wait()
        proof = await engine.update("v1", 1, KvRule.RECOMPUTE)
        came.clear()
        await came.wait()
        await engine.abort("a")
        result = await follows
        assert result.finish_reason is FinishReason.CANCELLED
        assert [span.version for span in result.version_spans] == [0, 1]
        start = result.version_spans[1].start
        assert 1 <= start < len(result.token_ids) and result.load_id == proof.load_id
        expected = emulated_logprobs(0, 10, result.token_ids[:start])
        expected += emulated_logprobs(1, 10 + start, result.token_ids[start:])
        assert result.logprobs == tuple(expected)
        pinned = asyncio.create_task(
            engine.generate(msgspec.structs.replace(ask("b", version=1, max_tokens=50_000), stop_token_ids=()))
        )
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="version 1 must not be replaced while pinned requests use it"):
            await engine.update("v2", 2, KvRule.RECOMPUTE)
        await engine.abort("b")
        await pinned

    with_engine(work, scale=2.0, kv=200_000)


def test_a_closed_engine_fails_what_is_open_and_what_comes() -> None:
    async def work(engine: EmulatedEngine, files: Files) -> None:
        running = asyncio.create_task(engine.generate(ask("a")))
        await asyncio.sleep(0)
        engine.close()
        result = await running
        assert (result.finish_reason, result.token_ids) == (FinishReason.ENGINE_ERROR, ())
        assert not (await engine.health()).is_healthy
        with pytest.raises(EngineError, match="rep must work, but: closed"):
            await engine.generate(ask("b"))

    with_engine(work, scale=1.0)


def test_lengths_follow_their_distribution_and_tokens_their_seed() -> None:
    lengths = LengthModel(median_tokens=50, sigma=0.4)
    drawn = [len(seeded_tokens(ask(f"r{n}", max_tokens=5000, seed=n), IDS, lengths)[0]) for n in range(600)]
    assert statistics.median(drawn) == pytest.approx(50, rel=0.1)
    assert statistics.stdev(np.log(drawn)) == pytest.approx(0.4, rel=0.15)
    assert seeded_tokens(ask("x", seed=3), IDS, lengths) == seeded_tokens(ask("y", seed=3), IDS, lengths)
    assert seeded_tokens(ask("x", seed=3), IDS, lengths) != seeded_tokens(ask("x", seed=4), IDS, lengths)
    greedy = [
        msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, temperature=0.0))
        for one in (ask("x", seed=3), ask("y", seed=4))
    ]
    assert seeded_tokens(greedy[0], IDS, lengths) == seeded_tokens(greedy[1], IDS, lengths)


def test_log_probabilities_are_exponential_with_mean_one_and_differ_by_version_position_and_token() -> None:
    tokens = tuple(range(4000))
    values = emulated_logprobs(3, 0, tokens)
    assert statistics.fmean(values) == pytest.approx(-1.0, abs=0.06)
    assert max(values) <= 0
    assert emulated_logprobs(3, 5, (9,)) == emulated_logprobs(3, 0, (1, 2, 3, 4, 5, 9))[5:]
    assert len({emulated_logprobs(v, p, (t,))[0] for v in range(5) for p in range(5) for t in range(5)}) == 125


def test_control_tokens_are_never_said(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    ids = plain_token_ids(str(directory))
    text = (directory / "tokenizer.json").read_text()
    control = {token["id"] for token in msgspec.json.decode(text)["added_tokens"]}
    assert control and not control & set(ids.tolist())
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"tokenizer\.json must be a tokenizer with a vocabulary"):
        plain_token_ids(str(directory))
