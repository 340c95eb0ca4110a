"""The vLLM engine against a real vLLM server on a CPU: what it serves is what was published, token for token."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from steelyard.clock import SystemClock
from steelyard.errors import EngineError, IntegrityError, ProcessDied, RunError
from steelyard.inference.engine import KvRule
from steelyard.inference.vllm_engine import VllmEngine
from steelyard.testing.versions import request_for
from steelyard.testing.vllm import TOLERANCE, PublishedPolicies, VllmLab, running_vllm
from steelyard.types import FinishReason, GenerateRequest, Manifest, TokenChunk, VersionSpan
from steelyard.weights.manifest import read_manifest
from steelyard.weights.reader import VersionReader

PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
PROMPT = tuple(range(10, 58))
ENDLESS = 8000
"""Tokens of a request that is still running at whatever moment the test comes to it."""

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"needs {PYTHON}, which `make venv-vllm` makes"),
    pytest.mark.timeout(400),
]


@dataclass
class Scene:
    """A server, versions 0 to 2, and the loop that all tests share."""

    lab: VllmLab
    policies: PublishedPolicies
    runner: asyncio.Runner

    def play(self, scene: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(scene)

    def asking(self, name: str, version: int = 0, follows: bool = False, **wishes: Any) -> GenerateRequest:
        wishes = {"temperature": 0.7, "deadline_at_s": SystemClock().now_s() + 60, **wishes}
        request = request_for(name, PROMPT, version=version, **wishes)
        return GenerateRequest(
            **{**{f: getattr(request, f) for f in request.__struct_fields__}, "follows_updates": follows}
        )

    def differ(self, version: int, tokens: tuple[int, ...], logprobs: tuple[float, ...], skip: int = 0) -> float:
        """Largest difference to what the trainer gives the tokens after the first ``skip``."""
        wanted = self.policies.logprobs(version, PROMPT, tokens, 0.7)
        return max(abs(a - b) for a, b in list(zip(wanted, logprobs, strict=True))[skip:])


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        policies = PublishedPolicies(Path(folder)).publish(range(3))
        running = running_vllm(PYTHON, policies.dirs[0], Path(folder))
        lab = runner.run(running.__aenter__())
        try:
            yield Scene(lab, policies, runner)
        finally:
            runner.run(running.__aexit__(None, None, None))


async def holding(scene: Scene, version: int) -> VllmEngine:
    engine = scene.lab.engine()
    await engine.load(scene.policies.dirs[version], version)
    return engine


async def until_running(engine: VllmEngine, number: int) -> None:
    """Wait until the server itself says that so many requests run there."""
    while (await engine.stats()).num_running != number:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


class Heard:
    """The tokens that a stream has brought."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._has_more = asyncio.Event()

    def __call__(self, chunk: TokenChunk) -> None:
        self.token_ids.extend(chunk.token_ids)
        self._has_more.set()

    async def until_more(self) -> None:
        """Wait for the next tokens, and for some after them: the first may have been on their way."""
        for _ in range(8):
            self._has_more.clear()
            await self._has_more.wait()


def test_a_load_is_proven_by_what_is_in_memory_and_by_the_path_that_serves(scene: Scene) -> None:
    async def main() -> None:
        engine = scene.lab.engine()
        for version in (1, 0):
            proof = await engine.load(scene.policies.dirs[version], version)
            manifest = read_manifest(Path(scene.policies.dirs[version]))
            assert proof.weights_digest == manifest.weights_digest
            assert proof.probe_max_error <= TOLERANCE
            await engine.unload(version)

    scene.play(main())


def test_tokens_come_with_their_log_probability_after_temperature(scene: Scene) -> None:
    async def main() -> None:
        engine = await holding(scene, 0)
        result = await engine.generate(scene.asking("a", max_tokens=64, seed=3))
        again = await engine.generate(scene.asking("b", max_tokens=64, seed=3))
        assert len(result.token_ids) == 64 and result.finish_reason is FinishReason.LENGTH
        assert scene.differ(0, result.token_ids, result.logprobs) <= TOLERANCE
        assert result.version_spans == (VersionSpan(start=0, version=0),)
        assert again.token_ids == result.token_ids
        assert again.num_cached_tokens == 32

        stop = result.token_ids[5]
        stopped = await engine.generate(scene.asking("c", max_tokens=64, seed=3, stop=(stop,)))
        assert stopped.token_ids[-1] == stop and stopped.finish_reason is FinishReason.STOP
        assert len(stopped.token_ids) == 1 + result.token_ids.index(stop)

    scene.play(main())


@pytest.mark.parametrize("kv", [KvRule.RECOMPUTE, KvRule.KEEP])
def test_a_request_that_follows_updates_says_which_version_sampled_each_token(scene: Scene, kv: KvRule) -> None:
    async def main() -> None:
        engine = await holding(scene, 0)
        heard = Heard()
        request = scene.asking("a", follows=True, max_tokens=ENDLESS, stream=True)
        asking = asyncio.create_task(engine.generate(request, heard))
        await heard.until_more()
        proof = await engine.update(scene.policies.dirs[1], 1, kv)
        await heard.until_more()
        assert not asking.done()
        await engine.abort("a")
        result = await asking
        assert result.finish_reason is FinishReason.CANCELLED
        first, second = result.version_spans
        assert (first.version, second.version) == (0, 1)
        assert second.kv_version == (0 if kv is KvRule.KEEP else None)
        assert tuple(heard.token_ids) == result.token_ids
        before, after = result.token_ids[: second.start], result.logprobs[second.start :]
        assert scene.differ(0, before, result.logprobs[: second.start]) <= TOLERANCE
        all_after = scene.policies.logprobs(1, PROMPT + before, result.token_ids[second.start :], 0.7)
        error = max(abs(a - b) for a, b in zip(all_after, after, strict=True))
        assert (error <= TOLERANCE) == (kv is KvRule.RECOMPUTE), error
        assert proof.version == 1 and (await engine.health()).versions == (1,)

    scene.play(main())


@pytest.mark.parametrize("kv", [KvRule.RECOMPUTE, KvRule.KEEP])
def test_a_new_request_never_reuses_the_prefix_of_another_version(scene: Scene, kv: KvRule) -> None:
    async def main() -> None:
        engine = await holding(scene, 0)
        await engine.generate(scene.asking("a", max_tokens=8))
        waiting = asyncio.create_task(engine.generate(scene.asking("b", follows=True, max_tokens=ENDLESS)))
        await until_running(engine, 1)
        await engine.update(scene.policies.dirs[1], 1, kv)
        result = await engine.generate(scene.asking("c", version=1, max_tokens=8))
        assert result.num_cached_tokens == 0
        assert scene.differ(1, result.token_ids, result.logprobs) <= TOLERANCE
        await engine.abort("b")
        await waiting

    scene.play(main())


class BlindReader(VersionReader):
    """Does not look at file digests: what is in memory must give a wrong load away."""

    def read(self, version_dir: str) -> Manifest:
        return read_manifest(Path(version_dir))


class BlinderReader(BlindReader):
    """Nor at what is in memory: only the probe is left."""

    def check_parameters(self, manifest: Manifest, found: object, where: str) -> None:
        return None


@pytest.mark.parametrize("reader", [BlindReader(), BlinderReader()])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
def test_wrong_weights_are_caught_and_serve_nobody(
    scene: Scene, reader: BlindReader, name: str, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(scene.policies.dirs[1], wrong)
    tensors = safetensors.torch.load_file(wrong / "model.safetensors")
    tensors[name] = tensors[name] * 1.01
    safetensors.torch.save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    expected = "probe" if type(reader) is BlinderReader else name

    async def main() -> None:
        engine = scene.lab.engine(reader)
        await engine.load(scene.policies.dirs[0], 0)
        open_request = asyncio.create_task(engine.generate(scene.asking("a", follows=True, max_tokens=ENDLESS)))
        await until_running(engine, 1)
        with pytest.raises(IntegrityError, match=expected):
            await engine.update(str(wrong), 1, KvRule.RECOMPUTE)
        spoilt = await open_request
        assert spoilt.finish_reason is FinishReason.ENGINE_ERROR and spoilt.token_ids == ()
        health = await engine.health()
        assert not health.is_healthy and health.versions == () and expected in health.detail
        with pytest.raises(EngineError, match="could not be loaded"):
            await engine.generate(scene.asking("b", version=1))
        await engine.load(scene.policies.dirs[1], 1)
        assert (await engine.health()).is_healthy
        result = await engine.generate(scene.asking("c", version=1, max_tokens=8))
        assert scene.differ(1, result.token_ids, result.logprobs) <= TOLERANCE

    scene.play(main())


def test_requests_end_by_deadline_abort_and_cancellation(scene: Scene) -> None:
    async def main() -> None:
        engine = await holding(scene, 0)
        late = await engine.generate(scene.asking("a", max_tokens=ENDLESS, deadline_at_s=SystemClock().now_s() + 0.4))
        assert late.finish_reason is FinishReason.GENERATION_TIMEOUT
        assert late.version_spans[0].version == 0 and len(late.logprobs) == len(late.token_ids) > 0
        aborted = asyncio.create_task(engine.generate(scene.asking("b", max_tokens=ENDLESS)))
        await asyncio.sleep(0)
        await engine.abort("b")
        assert (await aborted).finish_reason is FinishReason.CANCELLED
        cancelled = asyncio.create_task(engine.generate(scene.asking("c", max_tokens=ENDLESS)))
        await until_running(engine, 1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await until_running(engine, 0)
        await engine.unload(0)

    scene.play(main())


def test_a_paused_engine_keeps_requests_and_goes_on(scene: Scene) -> None:
    async def main() -> None:
        engine = await holding(scene, 0)
        await engine.pause()
        assert (await engine.health()).is_paused
        asking = asyncio.create_task(engine.generate(scene.asking("a", max_tokens=8)))
        early = await engine.generate(scene.asking("b", deadline_at_s=SystemClock().now_s() + 0.3))
        assert early.finish_reason is FinishReason.QUEUE_TIMEOUT and not asking.done()
        await engine.resume()
        assert len((await asking).token_ids) == 8

    scene.play(main())


def test_what_the_server_cannot_do_is_refused_before_it_is_asked(scene: Scene) -> None:
    async def main() -> None:
        engine = await holding(scene, 0)
        for wish, words in (
            ({"top_p": 0.9}, "top_p must be 1"),
            ({"temperature": 0.001}, "temperature must be"),
            ({"version": 7}, "policy_version must be loaded"),
        ):
            with pytest.raises(EngineError, match=words):
                await engine.generate(scene.asking("a", **wish))
        with pytest.raises(EngineError, match="below 272, got 9 to 272"):
            await engine.generate(request_for("b", (9, 272)))
        with pytest.raises(EngineError, match="fewer than max_model_len"):
            await engine.generate(request_for("c", PROMPT * 200))
        with pytest.raises(EngineError, match="one version at a time"):
            await engine.load(scene.policies.dirs[1], 1)
        assert (await engine.health()).is_healthy

    scene.play(main())


def test_a_server_that_dies_ends_its_requests_at_once_and_says_why(scene: Scene) -> None:
    async def main() -> None:
        engine = await holding(scene, 0)
        heard = Heard()
        request = scene.asking("a", max_tokens=ENDLESS, stream=True)
        asking = asyncio.create_task(engine.generate(request, heard))
        watching = asyncio.create_task(scene.lab.server.watch())
        await heard.until_more()
        await scene.lab.server.stop(0.1)
        with pytest.raises(ProcessDied, match="rep_vllm"):
            await watching
        result = await asking
        assert result.finish_reason is FinishReason.ENGINE_ERROR and result.version_spans[0].version == 0
        assert scene.differ(0, result.token_ids, result.logprobs) <= TOLERANCE
        assert not (await engine.health()).is_healthy
        with pytest.raises(RunError, match="request b"):
            await engine.generate(scene.asking("b"))

    scene.play(main())
