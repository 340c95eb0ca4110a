"""The vLLM engine against the fake server: what it refuses, what faults become, and that nothing hangs."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from steelyard.clock import SystemClock
from steelyard.errors import EngineError, IntegrityError, RemoteFailed
from steelyard.ids import SeededIds
from steelyard.inference.engine import KvRule
from steelyard.inference.vllm_engine import VllmEngine, VllmSettings
from steelyard.testing.versions import request_for
from steelyard.testing.vllm_server import FakeVllm, serving_fake
from steelyard.types import FinishReason, GenerateRequest, Manifest, ParameterDigest, Probe, TokenChunk, VersionSpan
from steelyard.weights.manifest import MANIFEST_NAME, check_same_parameters, encode_manifest, read_manifest
from steelyard.weights.manifest import weights_digest as digest_of

PROMPT = (5, 6, 7)
SHAPES = {
    "model.embed_tokens.weight": (80, 4),
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.self_attn.k_proj.weight": (4, 4),
    "model.layers.0.self_attn.v_proj.weight": (4, 4),
    "model.layers.0.self_attn.o_proj.weight": (4, 8),
    "model.norm.weight": (4,),
}


def manifest_of(version: int) -> Manifest:
    parameters = tuple(
        ParameterDigest(name=name, shape=shape, dtype="float32", digest=f"{name} of {version}")
        for name, shape in SHAPES.items()
    )
    return Manifest(
        version=version,
        step=version,
        parent_version=None,
        files=(),
        parameters=parameters,
        weights_digest=digest_of(parameters),
        model_config_digest="",
        tokenizer_digest="",
        template_digest="",
        dtype="float32",
        probe=Probe(sequences=((1, 2, 3), (4, 5, 6)), logprobs=((-1.0, -2.0), (-3.0, -0.5)), separates_parent=True),
    )


class Reader:
    """Reads manifests, and compares as the real one does."""

    def read(self, version_dir: str) -> Manifest:
        return read_manifest(Path(version_dir))

    def check_parameters(self, manifest: Manifest, found: Sequence[ParameterDigest], where: str) -> None:
        check_same_parameters(manifest, found, where)

    def weights_digest(self, found: Sequence[ParameterDigest]) -> str:
        return digest_of(found)


@dataclass
class Scene:
    """A fake server with an engine on it; versions 0 to 2 are published, version 0 is loaded."""

    fake: FakeVllm
    engine: VllmEngine
    folder: Path

    def dir_of(self, version: int) -> str:
        return str(self.folder / f"v{version}")

    async def ask(self, name: str = "req_a", **wishes: Any) -> Any:
        return await self.engine.generate(asking(name, **wishes))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def asking(name: str, *, follows: bool = False, deadline_s: float = 20.0, **wishes: Any) -> GenerateRequest:
    wishes = {"temperature": 1.0, "max_tokens": 8, **wishes}
    wishes.setdefault("prompt", PROMPT)
    request = request_for(name, wishes.pop("prompt"), **wishes, deadline_at_s=SystemClock().now_s() + deadline_s)
    return GenerateRequest(
        **{**{key: getattr(request, key) for key in request.__struct_fields__}, "follows_updates": follows}
    )


def play(scene: Callable[[Scene], Awaitable[None]], **faults: Any) -> None:
    async def main(folder: Path) -> None:
        for version in range(3):
            (folder / f"v{version}").mkdir()
            (folder / f"v{version}" / MANIFEST_NAME).write_bytes(encode_manifest(manifest_of(version)))
        fake = FakeVllm()
        async with serving_fake(fake, folder) as api:
            settings = VllmSettings(probe_tolerance=1e-4, change_deadline_s=20.0, abort_deadline_s=1.0)
            engine = VllmEngine(api, Reader(), settings, replica_id="rep_fake", clock=SystemClock(), ids=SeededIds(0))
            await engine.load(str(folder / "v0"), 0)
            for name, value in faults.items():
                setattr(fake, name, value)
            async with asyncio.timeout(60.0):
                await scene(Scene(fake, engine, folder))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder)))


def test_ids_and_log_probabilities_come_as_the_server_sampled_them() -> None:
    async def scene(world: Scene) -> None:
        chunks: list[TokenChunk] = []
        result = await world.engine.generate(asking("req_a", stream=True), chunks.append)
        assert len(result.token_ids) == 8 and result.finish_reason is FinishReason.LENGTH
        expected = [world.fake.expected_logprob(0, 3 + at, token) for at, token in enumerate(result.token_ids)]
        assert list(result.logprobs) == expected and result.kept_logmass == (0.0,) * 8
        assert result.version_spans == (VersionSpan(start=0, version=0),)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids
        stopped = await world.ask("req_b", stop=(result.token_ids[2],))
        assert stopped.token_ids == result.token_ids[:3] and stopped.finish_reason is FinishReason.STOP

    play(scene)


def test_the_server_is_told_to_sample_as_asked_and_by_nothing_of_its_own() -> None:
    async def scene(world: Scene) -> None:
        await world.ask("req_a", temperature=0.5, stop=(63,), seed=-3)
        sampling = world.fake.bodies[-1]["sampling_params"]
        assert sampling["ignore_eos"] is True and sampling["stop_token_ids"] == [63]
        assert (sampling["temperature"], sampling["top_p"], sampling["seed"]) == (0.5, 1.0, 2**63 - 3)
        assert world.fake.bodies[-1]["cache_salt"] == world.fake.label

    play(scene)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("token_ids", None, "must come with token_ids"),
        ("logprobs", None, "one log-probability per token id, got 0 for 1"),
        ("logprobs", {"content": []}, "one log-probability per token id, got 0 for 1"),
        ("logprobs", {"content": [{"token_id": 999, "logprob": -1.0}]}, "one log-probability per token id"),
    ],
)
def test_v6_missing_ids_or_log_probabilities_name_backend_and_request(field: str, value: Any, words: str) -> None:
    async def scene(world: Scene) -> None:
        world.fake.spoil_choice = lambda choice: {**choice, field: value}
        with pytest.raises(EngineError, match=r"rep_fake \(vllm\): request req_a") as failure:
            await world.ask()
        assert words in str(failure.value)

    play(scene)


@pytest.mark.parametrize("value", [-9999.0, None, 0.5])
def test_a_log_probability_that_is_no_number_ends_the_request_before_it(value: float | None) -> None:
    async def scene(world: Scene) -> None:
        def spoil(choice: dict[str, Any]) -> dict[str, Any]:
            if world.fake.bodies[-1]["request_id"] != "req_a" or choice["token_ids"] == [(5 * 7) % 64]:
                return choice
            return {**choice, "logprobs": {"content": [{"token_id": choice["token_ids"][0], "logprob": value}]}}

        world.fake.spoil_choice = spoil
        result = await world.ask()
        assert result.finish_reason is FinishReason.ENGINE_ERROR
        assert "the log-probability of token 1 must be a number" in result.detail
        assert len(result.token_ids) == len(result.logprobs) == 1
        assert result.version_spans == (VersionSpan(start=0, version=0),)

    play(scene)


def test_a_server_that_breaks_off_in_mid_stream_gives_what_it_sampled() -> None:
    async def scene(world: Scene) -> None:
        result = await world.ask()
        assert result.finish_reason is FinishReason.ENGINE_ERROR and "req_a" in result.detail
        assert len(result.token_ids) == 3 and result.version_spans == (VersionSpan(start=0, version=0),)

    play(scene, die_after=3)


def test_a_server_that_breaks_off_before_a_token_is_the_callers_error() -> None:
    async def scene(world: Scene) -> None:
        with pytest.raises(RemoteFailed, match="req_a"):
            await world.ask()

    play(scene, die_after=0)


@pytest.mark.parametrize(("status", "kind"), [(500, RemoteFailed), (503, RemoteFailed), (400, EngineError)])
def test_a_status_is_a_typed_error(status: int, kind: type[Exception]) -> None:
    async def scene(world: Scene) -> None:
        with pytest.raises(kind, match=f"req_a: status {status}"):
            await world.ask()
        assert (await world.engine.health()).is_healthy is False

    play(scene, status=status)


def test_tokens_under_a_label_that_is_not_ours_are_refused() -> None:
    async def scene(world: Scene) -> None:
        world.fake.label = "0:somebody_else"
        with pytest.raises(EngineError, match="the server says 0:somebody_else"):
            await world.ask()

    play(scene)


def test_spans_that_leave_tokens_out_are_refused() -> None:
    async def scene(world: Scene) -> None:
        def spoil(choice: dict[str, Any]) -> dict[str, Any]:
            spans = choice["weight_versions"]
            return {**choice, "weight_versions": spans and [{**spans[0], "end": 5}]}

        world.fake.spoil_choice = spoil
        with pytest.raises(EngineError, match="version spans over 8 tokens, got 5"):
            await world.ask()

    play(scene)


@pytest.mark.parametrize("is_deaf", [False, True])
def test_the_deadline_ends_a_request_with_what_it_has(is_deaf: bool) -> None:
    async def scene(world: Scene) -> None:
        result = await world.ask(max_tokens=10_000, deadline_s=0.3)
        assert result.finish_reason is FinishReason.GENERATION_TIMEOUT and len(result.token_ids) > 0
        assert result.version_spans == (VersionSpan(start=0, version=0),)
        await world.until(lambda: world.fake.num_open == 0)

    play(scene, token_s=0.01, is_deaf_to_aborts=is_deaf)


def test_a_request_that_never_got_a_token_waited_in_the_queue() -> None:
    async def scene(world: Scene) -> None:
        await world.engine.pause()
        assert (await world.ask(deadline_s=0.05)).finish_reason is FinishReason.QUEUE_TIMEOUT

    play(scene)


def test_an_abort_that_overtakes_its_request_arrives_all_the_same() -> None:
    async def scene(world: Scene) -> None:
        running = asyncio.create_task(world.ask(max_tokens=10_000))
        await asyncio.sleep(0)
        await world.engine.abort("req_a")
        await world.engine.abort("unknown")
        assert (await running).finish_reason is FinishReason.CANCELLED

    play(scene, token_s=0.01)


def test_cancelling_the_call_closes_the_stream() -> None:
    async def scene(world: Scene) -> None:
        running = asyncio.create_task(world.ask(max_tokens=10_000))
        await world.until(lambda: world.fake.num_open == 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await world.until(lambda: world.fake.num_open == 0)
        await world.engine.unload(0)

    play(scene, token_s=0.01)


@pytest.mark.parametrize("kv", [KvRule.RECOMPUTE, KvRule.KEEP])
def test_an_update_changes_the_weights_under_requests_that_follow(kv: KvRule) -> None:
    async def scene(world: Scene) -> None:
        running = asyncio.create_task(world.ask(max_tokens=12, follows=True))
        await world.until(lambda: world.fake.num_held == 1)
        world.fake.calls.clear()
        await world.engine.update(world.dir_of(2), 2, kv)
        world.fake.hold_at = None
        result = await running
        first, second = result.version_spans
        assert (first.version, second.start, second.version, second.kv_version) == (
            0,
            5,
            2,
            0 if kv is KvRule.KEEP else None,
        )
        expected = [
            world.fake.expected_logprob(0 if at < second.start else 2, 3 + at, token)
            for at, token in enumerate(result.token_ids)
        ]
        assert list(result.logprobs) == expected
        # Nothing is computed from before the label changes until memory is proven.
        order = ["pause", "label", "reload_weights", "steelyard_parameters", "steelyard_digests", "reset", "resume"]
        assert world.fake.calls == [one for one in order if kv is KvRule.RECOMPUTE or one != "reset"]

    play(scene, hold_at=5)


def test_an_update_under_a_pinned_request_is_refused_and_names_it() -> None:
    async def scene(world: Scene) -> None:
        running = asyncio.create_task(world.ask(max_tokens=12))
        await world.until(lambda: world.fake.num_held == 1)
        with pytest.raises(EngineError, match="req_a"):
            await world.engine.update(world.dir_of(1), 1, KvRule.RECOMPUTE)
        with pytest.raises(EngineError, match="one version at a time"):
            await world.engine.load(world.dir_of(1), 1)
        with pytest.raises(EngineError, match="no open requests"):
            await world.engine.unload(0)
        world.fake.hold_at = None
        assert (await running).version_spans == (VersionSpan(start=0, version=0),)

    play(scene, hold_at=5)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"is_stale": True}, "digest of parameter"),
        ({"probe_shift": 0.01}, "probe"),
        ({"probe_shift": float("nan")}, "probe"),
    ],
)
def test_a_load_that_is_not_what_was_published_serves_nobody(fault: dict[str, Any], words: str) -> None:
    async def scene(world: Scene) -> None:
        running = asyncio.create_task(world.ask(max_tokens=12, follows=True))
        await world.until(lambda: world.fake.num_held == 1)
        for name, value in fault.items():
            setattr(world.fake, name, value)
        with pytest.raises(IntegrityError, match=words):
            await world.engine.update(world.dir_of(1), 1, KvRule.RECOMPUTE)
        spoilt = await running
        assert spoilt.finish_reason is FinishReason.ENGINE_ERROR and spoilt.token_ids == ()
        health = await world.engine.health()
        assert (health.is_healthy, health.versions) == (False, ()) and words in health.detail
        with pytest.raises(EngineError, match="could not be loaded"):
            await world.ask("req_b")
        world.fake.is_stale, world.fake.probe_shift, world.fake.hold_at = False, 0.0, None
        await world.engine.load(world.dir_of(1), 1)
        assert (await world.engine.health()).versions == (1,)
        assert (await world.ask("req_c", version=1)).version_spans == (VersionSpan(start=0, version=1),)

    play(scene, hold_at=5)


def test_a_version_that_does_not_verify_leaves_the_one_before_serving() -> None:
    async def scene(world: Scene) -> None:
        with pytest.raises(IntegrityError, match=r"manifest\.version must be 2, got 1"):
            await world.engine.update(world.dir_of(1), 2, KvRule.RECOMPUTE)
        assert (await world.ask()).version_spans == (VersionSpan(start=0, version=0),)

    play(scene)


def test_results_wait_for_the_proof_of_the_weights_that_sampled_them() -> None:
    async def scene(world: Scene) -> None:
        running = asyncio.create_task(world.ask(max_tokens=12, follows=True))
        await world.until(lambda: world.fake.num_held == 1)
        world.fake.are_probes_held = True
        world.fake.calls.clear()
        proving = asyncio.create_task(world.engine.update(world.dir_of(1), 1, KvRule.RECOMPUTE))
        await world.until(lambda: "resume" in world.fake.calls[-1:])
        world.fake.hold_at = None
        await world.until(lambda: world.fake.num_open == 0)
        assert not running.done() and not proving.done()
        world.fake.are_probes_held = False
        assert [span.version for span in (await running).version_spans] == [0, 1]
        assert proving.done()

    play(scene, hold_at=5)


def test_what_the_server_cannot_do_is_refused_before_it_is_asked() -> None:
    async def scene(world: Scene) -> None:
        asked = len(world.fake.bodies)
        for wish, words in (
            ({"top_p": 0.5}, "sampling.top_p must be 1 on vllm, got 0.5"),
            ({"temperature": 0.001}, "sampling.temperature must be 0 or >= 0.01 on vllm"),
            ({"version": 1}, "policy_version must be loaded in rep_fake, got 1"),
            ({"prompt": ()}, "one or more ids below 80, got none"),
            ({"prompt": (80,)}, "one or more ids below 80, got 80 to 80"),
            ({"prompt": (1,) * 256}, "fewer than max_model_len"),
        ):
            with pytest.raises(EngineError, match=words):
                await world.ask(**wish)
        assert len(world.fake.bodies) == asked

    play(scene)
