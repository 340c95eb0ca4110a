"""Sampling: what is drawn, and what is recorded of it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from steelyard.errors import EngineError
from steelyard.inference.model_runner import Draw, check_attention, lay_out_weights, sample, sample_greedy, uniforms
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.versions import MemoryVersions


def draw(uniform: list[float], temperature: float = 1.0, top_p: float = 1.0) -> Draw:
    return Draw(
        temperatures=np.full(len(uniform), temperature, dtype=np.float32),
        top_ps=np.full(len(uniform), top_p, dtype=np.float32),
        uniforms=np.array(uniform),
    )


def grid(num_points: int) -> list[float]:
    """Evenly spread uniforms: what they give are exact shares, without chance."""
    return [(index + 0.5) / num_points for index in range(num_points)]


def test_uniforms_depend_on_seed_and_position_alone_and_spread_evenly() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100, dtype=np.uint64), 100)
    numbers = uniforms(seeds, positions)
    assert ((numbers >= 0.0) & (numbers < 1.0)).all()
    assert len(np.unique(numbers)) == len(numbers)
    counts, _ = np.histogram(numbers, bins=20, range=(0.0, 1.0))
    # 500 expected in each bin, standard deviation 22; the numbers are fixed, so this cannot flicker.
    assert abs(counts - 500).max() < 110
    by_seed = numbers.reshape(100, 100)
    correlations = np.asarray(np.corrcoef(by_seed))[np.triu_indices(100, 1)]
    assert abs(correlations).max() < 0.5
    assert uniforms(seeds[4321:4322], positions[4321:4322])[0] == numbers[4321]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_tokens_come_in_the_shares_of_their_probabilities_after_temperature(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5])
    points = grid(10_000)
    sampled = sample(logits.repeat(len(points), 1), draw(points, temperature))
    expected = torch.softmax(logits / temperature, -1)
    shares = np.bincount(sampled.token_ids, minlength=5) / len(points)
    np.testing.assert_allclose(shares, expected.numpy(), atol=2e-4)
    recorded = dict(zip(sampled.token_ids, sampled.logprobs, strict=True))
    for token, logprob in recorded.items():
        assert logprob == pytest.approx(float(expected.log()[token]), abs=1e-5)
    assert set(sampled.kept_logmass) == {0.0}


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_records_over_the_full_vocabulary() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    points = grid(1_000)
    sampled = sample(probabilities.log().repeat(len(points), 1), draw(points, top_p=0.7))
    shares = np.bincount(sampled.token_ids, minlength=4) / len(points)
    np.testing.assert_allclose(shares, [0.0, 0.5 / 0.8, 0.0, 0.3 / 0.8], atol=2e-3)
    assert sampled.kept_logmass == pytest.approx([float(np.log(0.8))] * len(points), abs=1e-6)
    by_token = dict(zip(sampled.token_ids, sampled.logprobs, strict=True))
    assert by_token == {1: pytest.approx(np.log(0.5), abs=1e-6), 3: pytest.approx(np.log(0.3), abs=1e-6)}


def test_top_p_below_the_largest_probability_keeps_one_token() -> None:
    sampled = sample(torch.tensor([[0.0, 4.0, 1.0]]), draw([0.999], top_p=0.01))
    assert sampled.token_ids == [1]
    assert sampled.kept_logmass == pytest.approx(sampled.logprobs, abs=1e-6)


def test_greedy_takes_the_largest_logit_and_records_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    expected = torch.log_softmax(logits, -1)
    for sampled in (sample(logits, draw([0.9, 0.9], temperature=0.0)), sample_greedy(logits)):
        assert sampled.token_ids == [1, 0]
        assert sampled.logprobs == pytest.approx([float(expected[0, 1]), float(expected[1, 0])], abs=1e-6)
        assert sampled.kept_logmass == [0.0, 0.0]


def test_each_row_is_sampled_as_if_it_were_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 50, generator=generator) * 3
    mixed = Draw(
        temperatures=np.array([1.0, 0.7, 0.0, 1.3], dtype=np.float32),
        top_ps=np.array([1.0, 0.9, 1.0, 0.5], dtype=np.float32),
        uniforms=np.array([0.1, 0.5, 0.9, 0.99]),
    )
    together = sample(logits, mixed)
    for row in range(4):
        one = slice(row, row + 1)
        alone = sample(logits[one], Draw(mixed.temperatures[one], mixed.top_ps[one], mixed.uniforms[one]))
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.logprobs == pytest.approx([together.logprobs[row]], abs=1e-6)
        assert alone.kept_logmass == pytest.approx([together.kept_logmass[row]], abs=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-np.inf, 0.0, -np.inf, 0.0, -np.inf]])
    for uniform in (0.0, 0.5, 1.0 - 2.0**-48):
        assert sample(logits, draw([uniform])).token_ids[0] in (1, 3)


def test_the_order_of_weights_in_memory_changes_no_bit_of_them() -> None:
    module: Any = tiny_module()
    laid_out = copy.deepcopy(module)
    lay_out_weights(laid_out)
    assert laid_out.model.layers[0].mlp.up_proj.weight.stride() != module.model.layers[0].mlp.up_proj.weight.stride()
    assert laid_out.lm_head.weight is laid_out.model.embed_tokens.weight, "tied weights stay tied"
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, laid_out.get_parameter(name))
    loader = MemoryVersions()
    assert loader.loaded_digest(laid_out) == loader.loaded_digest(module)


def test_attention_that_the_cache_does_not_compute_is_refused() -> None:
    check_attention(transformers.LlamaConfig())
    check_attention(transformers.Qwen2Config())
    with pytest.raises(EngineError, match="full attention in every layer"):
        check_attention(transformers.MistralConfig(sliding_window=64))
    with pytest.raises(EngineError, match="sliding_attention"):
        check_attention(transformers.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=1))
