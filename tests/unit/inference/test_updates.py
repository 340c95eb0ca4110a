"""Weights that change between two tokens of running sequences, against plain forward passes of the same weights."""

import asyncio
import random
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.clock import SystemClock
from steelyard.errors import EngineError, IntegrityError
from steelyard.inference.engine import KvRule
from steelyard.inference.engine_core import EngineCore, EngineSettings
from steelyard.inference.local_engine import LocalEngine
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import MemoryVersions, request_for, run_core, tiny_core
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, LoadProof, VersionSpan

MODULES = [tiny_module(seed) for seed in range(4)]
PROMPT = tuple(range(100, 130))


def update(core: EngineCore, loader: MemoryVersions, version: int, kv: KvRule = KvRule.RECOMPUTE) -> LoadProof:
    """Go over to a version by hand."""
    loaded = loader.load(loader.put(version, MODULES[version]))
    return core.swap(core.prove(loaded, version, 0.0), kv)


def step_until(core: EngineCore, done: dict[str, GenerateResult], num_tokens: int) -> None:
    """Steps until this many more tokens are sampled."""
    goal = core.scheduler.decode_tokens + num_tokens
    while core.scheduler.decode_tokens < goal:
        done.update({result.request_id: result for result in core.step()[1]})


def finish(core: EngineCore, done: dict[str, GenerateResult]) -> None:
    while core.scheduler.num_running + core.scheduler.num_waiting:
        done.update({result.request_id: result for result in core.step()[1]})


@torch.no_grad()
def plain_logprobs(version: int, prompt: tuple[int, ...], result: GenerateResult) -> list[float]:
    """Log-probabilities of all tokens of a result as one plain forward pass of a version gives them."""
    logits = MODULES[version](input_ids=torch.tensor([prompt + result.token_ids]), use_cache=False).logits[0]
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    found: list[float] = rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0].tolist()
    return found


@torch.no_grad()
def logprobs_over_kept_kv(prompt: tuple[int, ...], result: GenerateResult) -> list[float]:
    """The same where KV stays over changes: each token's KV is of the version that computed it.

    The KV of a token is computed when the one after it is sampled, by the version of that one.
    """
    versions = version_of_each(result)
    cache = transformers.DynamicCache()
    found: list[float] = []
    inputs = [list(prompt), *([token] for token in result.token_ids[:-1])]
    for version, tokens, sampled in zip(versions, inputs, result.token_ids, strict=True):
        output = MODULES[version](input_ids=torch.tensor([tokens]), cache=cache)
        found.append(float(torch.log_softmax(output.logits[0, -1], -1)[sampled]))
    return found


def version_of_each(result: GenerateResult) -> list[int]:
    ends = [*(span.start for span in result.version_spans[1:]), len(result.token_ids)]
    return [span.version for span, end in zip(result.version_spans, ends, strict=True) for _ in range(span.start, end)]


def check_exact(prompt: tuple[int, ...], result: GenerateResult) -> None:
    """Every token's log-probability is that of its span's version over the whole text before it."""
    by_version = {span.version: plain_logprobs(span.version, prompt, result) for span in result.version_spans}
    expected = [by_version[version][index] for index, version in enumerate(version_of_each(result))]
    assert result.logprobs == pytest.approx(expected, abs=1e-4)
    assert all(span.kv_version is None for span in result.version_spans)


def following(name: str, prompt: tuple[int, ...] = PROMPT, **options: Any) -> GenerateRequest:
    return request_for(name, prompt, temperature=1.0, seed=7, follows=True, **options)


# --- recompute ----------------------------------------------------------------------------------------


def test_recomputed_tokens_are_those_of_their_spans_version_over_the_whole_text() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    done: dict[str, GenerateResult] = {}
    core.add(following("a", max_tokens=30))
    step_until(core, done, 8)
    update(core, loader, 1)
    step_until(core, done, 9)
    proof = update(core, loader, 2)
    finish(core, done)
    result = done["a"]
    assert result.version_spans == (
        VersionSpan(start=0, version=0), VersionSpan(start=8, version=1), VersionSpan(start=17, version=2)
    )  # fmt: skip
    assert result.load_id == proof.load_id, "the load that sampled the last token"
    assert core.versions == (2,)
    check_exact(PROMPT, result)


def test_tokens_before_an_update_are_those_of_a_run_without_it() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    done: dict[str, GenerateResult] = {}
    core.add(following("a", max_tokens=20))
    step_until(core, done, 10)
    update(core, loader, 1)
    finish(core, done)
    alone = run_core(tiny_core(ManualClock(), modules=MODULES[:1])[0], [following("a", max_tokens=20)])["a"]
    assert done["a"].token_ids[:10] == alone.token_ids[:10]
    assert done["a"].logprobs[:10] == alone.logprobs[:10]
    assert done["a"].token_ids[10:] != alone.token_ids[10:]


def test_siblings_share_the_computing_of_their_prompt_again_after_an_update() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    done: dict[str, GenerateResult] = {}
    prompt = tuple(range(48))
    for index in range(4):
        core.add(request_for(f"s{index}", prompt, temperature=1.0, seed=index, follows=True, max_tokens=24))
    step_until(core, done, 12)
    before = core.stats()
    update(core, loader, 1)
    finish(core, done)
    known = sum(len(prompt) + result.version_spans[1].start for result in done.values())
    assert core.stats().prefill_tokens - before.prefill_tokens == known - 3 * len(prompt)
    for result in done.values():
        check_exact(prompt, result)


def test_a_waiting_request_that_follows_starts_under_the_new_version() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    core.add(following("a"))
    update(core, loader, 1)
    done: dict[str, GenerateResult] = {}
    finish(core, done)
    assert done["a"].version_spans == (VersionSpan(start=0, version=1),)
    check_exact(PROMPT, done["a"])


def test_a_request_that_follows_is_sampled_by_the_newest_version_that_is_held() -> None:
    core, _ = tiny_core(ManualClock(), modules=MODULES[:2])
    assert run_core(core, [following("a")])["a"].version_spans == (VersionSpan(start=0, version=1),)
    with pytest.raises(EngineError, match=r"policy_version or a later one must be loaded in rep_tiny, got 2"):
        core.add(following("b", version=2))


# --- keep ---------------------------------------------------------------------------------------------


def test_kept_kv_is_said_in_the_spans_and_log_probabilities_are_those_over_it() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    done: dict[str, GenerateResult] = {}
    core.add(following("a", max_tokens=30))
    step_until(core, done, 8)
    prefilled = core.stats().prefill_tokens
    update(core, loader, 1, KvRule.KEEP)
    step_until(core, done, 9)
    update(core, loader, 2, KvRule.KEEP)
    finish(core, done)
    result = done["a"]
    assert core.stats().prefill_tokens == prefilled, "nothing is computed again"
    assert result.version_spans == (
        VersionSpan(start=0, version=0),
        VersionSpan(start=8, version=1, kv_version=0),
        VersionSpan(start=17, version=2, kv_version=0),
    )
    assert result.logprobs == pytest.approx(logprobs_over_kept_kv(PROMPT, result), abs=1e-4)
    assert result.logprobs[20] != pytest.approx(plain_logprobs(2, PROMPT, result)[20], abs=1e-3)


def test_a_prompt_that_was_half_computed_says_of_which_version_its_kv_is() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    prompt = tuple(range(70))
    core.add(following("a", prompt))
    core.step()
    update(core, loader, 1, KvRule.KEEP)
    done: dict[str, GenerateResult] = {}
    finish(core, done)
    assert done["a"].version_spans == (VersionSpan(start=0, version=1, kv_version=0),)


@pytest.mark.parametrize("kv", list(KvRule))
def test_kv_from_before_an_update_is_never_used_by_a_new_request(kv: KvRule) -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    done = run_core(core, [following("ended", key="ended")])
    core.add(following("runs", key="talk"))
    step_until(core, done, 5)
    update(core, loader, 1, kv)
    core.add(following("sibling"))
    core.add(following("same", key="ended"))
    finish(core, done)
    core.add(following("next", (*PROMPT, *done["runs"].token_ids, 3), key="talk"))
    finish(core, done)
    check_exact(PROMPT, done["sibling"])
    check_exact(PROMPT, done["same"])
    check_exact((*PROMPT, *done["runs"].token_ids, 3), done["next"])
    if kv is KvRule.KEEP:
        assert done["next"].num_cached_tokens <= len(PROMPT), "its own KV is of two versions"
    core.scheduler.release("talk")


# --- refusals -----------------------------------------------------------------------------------------


def test_an_update_is_refused_while_a_request_needs_the_old_version_to_the_end() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    done: dict[str, GenerateResult] = {}
    core.add(request_for("pinned", PROMPT))
    core.add(following("a"))
    step_until(core, done, 4)
    with pytest.raises(EngineError, match=r"version 0 must have no requests that need it to the end .* got 1"):
        update(core, loader, 1)
    finish(core, done)
    assert {result.version_spans for result in done.values()} == {(VersionSpan(start=0, version=0),)}
    update(core, loader, 1)
    assert core.versions == (1,)


def test_an_update_needs_a_version_and_goes_forward() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    proof = update(core, loader, 2)
    with pytest.raises(EngineError, match="an update must go to a later version than 2, got 1"):
        update(core, loader, 1)
    assert update(core, loader, 2) == proof, "once more changes nothing"
    core.unload(2)
    with pytest.raises(EngineError, match="a version must be held to be updated to version 3"):
        update(core, loader, 3)


def test_an_aborted_request_keeps_its_load_id_when_its_version_goes_at_once() -> None:
    core, loader = tiny_core(ManualClock(), modules=MODULES[:1])
    done: dict[str, GenerateResult] = {}
    core.add(request_for("pinned", PROMPT))
    step_until(core, done, 2)
    core.abort("pinned")
    update(core, loader, 1)
    (result,) = core.take_results()
    assert (result.finish_reason, len(result.token_ids)) == (FinishReason.CANCELLED, 2)
    assert result.load_id.startswith("load_")


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_spans_and_log_probabilities_are_exact_whatever_happens_when(seed: int) -> None:
    rng = random.Random(seed)
    sizes = EngineSettings(max_running=3, row_tokens=128, kv_tokens=288, prefill_chunk_tokens=16)
    core, loader = tiny_core(ManualClock(), sizes, MODULES[:1])
    prompts = {
        f"r{index}": (*range(rng.randrange(40)), *(rng.randrange(500) for _ in range(rng.randint(1, 20))))
        for index in range(7)
    }
    for index, (name, prompt) in enumerate(prompts.items()):
        core.add(request_for(name, prompt, temperature=1.0, seed=index, follows=True, max_tokens=rng.randint(1, 40)))
    done: dict[str, GenerateResult] = {}
    for version in (1, 2, 3):
        for _ in range(rng.randrange(25)):
            done.update({result.request_id: result for result in core.step()[1]})
        update(core, loader, version)
    finish(core, done)
    assert done.keys() == prompts.keys()
    for name, prompt in prompts.items():
        check_exact(prompt, done[name])


# --- the front ----------------------------------------------------------------------------------------


def with_engine(play: Any) -> None:
    clock = SystemClock()
    core, loader = tiny_core(
        clock, EngineSettings(max_running=8, row_tokens=2048, kv_tokens=32_768, max_versions=1), MODULES[:1]
    )

    async def main() -> None:
        engine = LocalEngine(core, loader, clock)
        try:
            await play(engine, loader)
        finally:
            await engine.close()

    asyncio.run(main())


def test_the_front_updates_under_a_running_request() -> None:
    async def play(engine: LocalEngine, loader: MemoryVersions) -> None:
        seen = asyncio.Event()
        request = following("a", max_tokens=400, stream=True)
        running = asyncio.create_task(engine.generate(request, lambda _chunk: seen.set()))
        await seen.wait()
        proof = await engine.update(loader.put(1, MODULES[1]), 1, KvRule.RECOMPUTE)
        assert (await engine.health()).versions == (1,)
        result = await running
        assert [span.version for span in result.version_spans] == [0, 1]
        assert (result.load_id, len(result.token_ids)) == (proof.load_id, 400)
        check_exact(PROMPT, result)

    with_engine(play)


def test_a_load_that_proves_wrong_leaves_the_old_version_serving() -> None:
    async def play(engine: LocalEngine, loader: MemoryVersions) -> None:
        name = loader.put(1, MODULES[1])
        loader.versions[name].module.get_submodule("model.norm").weight.data[0] += 1e-6
        seen = asyncio.Event()
        running = asyncio.create_task(
            engine.generate(following("a", max_tokens=200, stream=True), lambda _chunk: seen.set())
        )
        await seen.wait()
        with pytest.raises(IntegrityError, match="digest of the loaded parameters must be"):
            await engine.update(name, 1, KvRule.RECOMPUTE)
        assert (await engine.health()).versions == (0,)
        assert (await running).version_spans == (VersionSpan(start=0, version=0),)

    with_engine(play)


def test_a_refused_update_is_refused_before_anything_is_read() -> None:
    async def play(engine: LocalEngine, loader: MemoryVersions) -> None:
        seen = asyncio.Event()
        request = request_for("pinned", PROMPT, max_tokens=1500, stream=True)
        running = asyncio.create_task(engine.generate(request, lambda _chunk: seen.set()))
        await seen.wait()
        with pytest.raises(EngineError, match="need it to the end"):
            await engine.update("a directory that does not exist", 1, KvRule.RECOMPUTE)
        await engine.abort("pinned")
        assert (await running).finish_reason is FinishReason.CANCELLED

    with_engine(play)
