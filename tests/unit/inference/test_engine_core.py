"""The core of the local engine against a plain forward pass of the same weights."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import transformers

from steelyard.errors import EngineError, IntegrityError
from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import MemoryVersions, request_for, run_core, stream_core, tiny_core
from steelyard.types import FinishReason

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
