"""The core against a plain forward pass of the same weights, and the front around it."""

import asyncio
import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import transformers

from steelyard.clock import SystemClock
from steelyard.errors import EngineError, IntegrityError
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import MemoryVersions, request_for, run_core, stream_core, tiny_core
from steelyard.types import FinishReason, GenerateResult

TIE = 1e-4


def prompts(number: int, longest: int = 40, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of lengths 1 to ``longest``."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (number,), generator=generator).tolist()
    return [tuple(torch.randint(0, 512, (length,), generator=generator).tolist()) for length in lengths]


@torch.no_grad()
def plain_logits(module: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits [len(tokens), vocabulary] of one plain forward pass without any cache."""
    logits: torch.Tensor = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def expected_logprobs(module: Any, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> list[float]:
    logits = plain_logits(module, prompt + tokens)[len(prompt) - 1 : -1] / temperature
    found: list[float] = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return found


def num_ties(module: Any, prompt: tuple[int, ...], ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """0 where both are equal, 1 where they part at two logits within ``TIE``; anything else is an error."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            logits = plain_logits(module, prompt + ours[:index])[-1]
            assert abs(float(logits[one] - logits[other])) <= TIE, f"token {index} must be {other}, got {one}"
            return 1
    return 0


def qwen_module() -> Any:
    """Another architecture: biases in the projections, one key head for each query head."""
    config = transformers.Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("build", [tiny_module, qwen_module])
def test_greedy_tokens_equal_those_of_generate(build: Callable[[], Any]) -> None:
    module = build()
    core, _ = tiny_core(ManualClock(), modules=[module])
    asked = {f"r{index}": prompt for index, prompt in enumerate(prompts(20))}
    results = run_core(core, [request_for(name, prompt, max_tokens=24) for name, prompt in asked.items()])
    ties = 0
    for name, prompt in asked.items():
        ids = torch.tensor([prompt])
        out = module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        ties += num_ties(module, prompt, results[name].token_ids, tuple(out[0, len(prompt) :].tolist()))
    assert ties <= 1


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_recorded_log_probabilities_equal_a_plain_forward_pass(temperature: float) -> None:
    module = tiny_module()
    core, _ = tiny_core(ManualClock(), modules=[module])
    asked = {f"r{index}": prompt for index, prompt in enumerate(prompts(12))}
    requests = [
        request_for(name, prompt, temperature=temperature, seed=index)
        for index, (name, prompt) in enumerate(asked.items())
    ]
    results = run_core(core, requests)
    for name, prompt in asked.items():
        expected = expected_logprobs(module, prompt, results[name].token_ids, temperature or 1.0)
        assert results[name].logprobs == pytest.approx(expected, abs=1e-4)
        assert set(results[name].kept_logmass) == {0.0}


def test_the_kept_mass_of_top_p_equals_a_plain_computation() -> None:
    module = tiny_module()
    core, _ = tiny_core(ManualClock(), modules=[module])
    (prompt,) = prompts(1)
    result = run_core(core, [request_for("a", prompt, temperature=0.7, top_p=0.9, seed=3, max_tokens=32)])["a"]
    logits = plain_logits(module, prompt + result.token_ids)[len(prompt) - 1 : -1] / 0.7
    ordered = torch.softmax(logits.double(), -1).sort(-1, descending=True)
    num_kept = (ordered.values.cumsum(-1) < 0.9).sum(-1) + 1
    for row, (token, kept_logmass) in enumerate(zip(result.token_ids, result.kept_logmass, strict=True)):
        kept = int(num_kept[row])
        assert token in ordered.indices[row, :kept].tolist()
        assert kept_logmass == pytest.approx(float(ordered.values[row, :kept].sum().log()), abs=1e-4)
    assert min(result.kept_logmass) < -0.01
    expected = expected_logprobs(module, prompt, result.token_ids, 0.7)
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_seeded_request_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    (prompt,) = prompts(1, seed=9)
    wanted = request_for("a", prompt, temperature=1.0, seed=11, max_tokens=24)
    alone = run_core(tiny_core(ManualClock())[0], [wanted])["a"]
    others = [
        request_for(f"o{index}", other, temperature=1.0, top_p=0.9 if index % 2 else 1.0, max_tokens=3 + index)
        for index, other in enumerate(prompts(20, seed=4))
    ]
    crowd = run_core(tiny_core(ManualClock())[0], [*others[:10], wanted, *others[10:]])["a"]
    assert crowd.token_ids == alone.token_ids
    assert crowd.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_second_turn_reuses_the_first_and_gives_what_a_fresh_engine_gives() -> None:
    module = tiny_module()
    core, _ = tiny_core(ManualClock(), modules=[module])
    (prompt,) = prompts(1, seed=2)
    first = run_core(core, [request_for("t1", prompt, key="talk")])["t1"]
    longer = (*prompt, *first.token_ids, 5, 6, 7)
    second = run_core(core, [request_for("t2", longer, temperature=1.0, seed=1, key="talk")])["t2"]
    fresh, _ = tiny_core(ManualClock(), modules=[module])
    again = run_core(fresh, [request_for("t2", longer, temperature=1.0, seed=1, key="talk")])["t2"]
    assert second.num_cached_tokens == len(prompt) + len(first.token_ids) - 1
    assert again.num_cached_tokens == 0
    assert second.token_ids == again.token_ids
    assert second.logprobs == pytest.approx(again.logprobs, abs=1e-4)
    core.scheduler.release("talk")
    assert core.stats().kv_tokens_in_use == 0


def test_siblings_share_the_computing_of_their_prompt() -> None:
    module = tiny_module()
    core, _ = tiny_core(ManualClock(), modules=[module])
    prompt = tuple(range(40))
    results = run_core(core, [request_for(f"s{index}", prompt, temperature=1.0, seed=index) for index in range(6)])
    # The first computes all 40; the others share its two whole blocks and compute the remaining 8.
    assert core.stats().prefill_tokens == 40 + 5 * 8
    for result in results.values():
        expected = expected_logprobs(module, prompt, result.token_ids, 1.0)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
    assert len({result.token_ids for result in results.values()}) == 6


def test_a_prefix_is_never_reused_across_versions() -> None:
    modules = [tiny_module(0), tiny_module(1)]
    core, _ = tiny_core(ManualClock(), modules=modules)
    prompt = tuple(range(30))
    for version, turn in itertools.product((0, 1), (0, 1)):
        name = f"v{version}t{turn}"
        result = run_core(core, [request_for(name, prompt, version=version, key="talk", temperature=1.0)])[name]
        assert result.version_spans[0].version == version
        expected = expected_logprobs(modules[version], prompt, result.token_ids, 1.0)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
        assert (result.num_cached_tokens > 0) == (turn == 1)


def test_two_versions_are_served_in_the_same_steps() -> None:
    modules = [tiny_module(0), tiny_module(1)]
    core, _ = tiny_core(ManualClock(), modules=modules)
    asked = {f"r{index}": prompt for index, prompt in enumerate(prompts(14, seed=6))}
    requests = [request_for(name, prompt, version=index % 2) for index, (name, prompt) in enumerate(asked.items())]
    results = run_core(core, requests)
    for index, (name, prompt) in enumerate(asked.items()):
        expected = expected_logprobs(modules[index % 2], prompt, results[name].token_ids, 1.0)
        assert results[name].logprobs == pytest.approx(expected, abs=1e-4)


def test_streamed_tokens_are_those_of_the_result_in_order() -> None:
    core, _ = tiny_core(ManualClock())
    chunks, result = stream_core(core, request_for("a", (1, 2, 3), temperature=1.0, stream=True))
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == result.token_ids


# --- versions ---------------------------------------------------------------------------------------


def test_a_load_is_proven_by_digest_and_probe() -> None:
    core, loader = tiny_core(ManualClock())
    loaded = loader.load(loader.put(1, tiny_module(1)))
    proof = core.hold(core.prove(loaded, 1, 0.0))
    assert proof.weights_digest == loaded.manifest.weights_digest
    assert proof.probe_max_error <= 1e-5
    assert core.versions == (0, 1)
    assert core.hold(core.prove(loader.load("v000001"), 1, 0.0)) == proof, "loading it again changes nothing"


def wrong_digest(loader: MemoryVersions, name: str) -> None:
    loader.versions[name].module.model.norm.weight.data[0] += 1e-6


def wrong_probe(loader: MemoryVersions, name: str) -> None:
    held = loader.versions[name]
    rows = held.manifest.probe.logprobs
    probe = msgspec.structs.replace(held.manifest.probe, logprobs=((rows[0][0] + 1e-3, *rows[0][1:]), *rows[1:]))
    manifest = msgspec.structs.replace(held.manifest, probe=probe)
    loader.versions[name] = dataclasses.replace(held, manifest=manifest)


def wrong_number(loader: MemoryVersions, name: str) -> None:
    held = loader.versions[name]
    loader.versions[name] = dataclasses.replace(held, manifest=msgspec.structs.replace(held.manifest, version=9))


def nan_weights(loader: MemoryVersions, name: str) -> None:
    module: Any = tiny_module(1)
    module.get_submodule("model.norm").weight.data[0] = torch.nan
    held = loader.versions[name]
    manifest = msgspec.structs.replace(held.manifest, weights_digest=loader.loaded_digest(module))
    loader.versions[name] = dataclasses.replace(held, module=module, manifest=manifest)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_digest, "digest of the loaded parameters must be"),
        (wrong_probe, "probe log-probabilities must agree within 0.0001, largest difference is 0.00"),
        (wrong_number, "manifest.version must be 1, got 9"),
        (nan_weights, "largest difference is nan"),
    ],
)
def test_a_wrong_load_is_refused_and_leaves_nothing(spoil: Callable[[MemoryVersions, str], None], message: str) -> None:
    core, loader = tiny_core(ManualClock())
    name = loader.put(1, tiny_module(1))
    spoil(loader, name)
    with pytest.raises(IntegrityError, match=message):
        core.hold(core.prove(loader.load(name), 1, 0.0))
    assert core.versions == (0,)
    assert core.hold(core.prove(loader.load(loader.put(1, tiny_module(1))), 1, 0.0)).version == 1


def test_a_version_number_keeps_its_weights() -> None:
    core, loader = tiny_core(ManualClock())
    other = loader.load(loader.put(0, tiny_module(3)))
    with pytest.raises(IntegrityError, match="version 0 must keep weights_digest"):
        core.hold(core.prove(other, 0, 0.0))


def test_only_so_many_versions_are_held_and_one_in_use_is_not_unloaded() -> None:
    core, loader = tiny_core(ManualClock(), modules=[tiny_module(seed) for seed in range(3)])
    with pytest.raises(EngineError, match=r"at most 3 versions .* unload one before version 3"):
        core.hold(core.prove(loader.load(loader.put(3, tiny_module(3))), 3, 0.0))
    core.add(request_for("a", (1, 2)))
    with pytest.raises(EngineError, match="version 0 must have no open requests to be unloaded, got 1"):
        core.unload(0)
    core.unload(1)
    assert core.versions == (0, 2)
    with pytest.raises(EngineError, match=r"policy_version must be loaded in rep_tiny, got 1"):
        core.add(request_for("b", (1, 2), version=1))


def test_a_failed_forward_pass_ends_its_own_batch_only() -> None:
    core, _ = tiny_core(ManualClock(), modules=[tiny_module(0), tiny_module(1)])
    bad = request_for("bad", (1, 10_000), version=0)
    good = request_for("good", (1, 2), version=1)
    results = run_core(core, [bad, good])
    assert results["bad"].finish_reason is FinishReason.ENGINE_ERROR
    assert "rep_tiny: the forward pass failed with IndexError" in results["bad"].detail
    assert results["good"].finish_reason is FinishReason.LENGTH
    assert run_core(core, [request_for("next", (1, 2))])["next"].finish_reason is FinishReason.LENGTH


# --- the front --------------------------------------------------------------------------------------


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
        requests = [request_for(f"r{index}", prompt) for index, prompt in enumerate(prompts(20))]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    results = in_engine(work)
    core, _ = tiny_core(ManualClock())
    expected = run_core(core, [request_for(f"r{index}", prompt) for index, prompt in enumerate(prompts(20))])
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
