"""Figures over log ratios, and which tokens they are over."""

import math

import msgspec
import pytest
import torch

from steelyard.assembly.batch import build_step_batch
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.training_data import make_sample, random_samples
from steelyard.trainer.loss import LossSums
from steelyard.trainer.mismatch import log_ratio_figures
from steelyard.trainer.records import LossSettings
from steelyard.trainer.step import accumulate_gradients

VOCAB = 64


def test_without_tokens_there_are_no_figures() -> None:
    assert log_ratio_figures([]) is None
    assert log_ratio_figures([torch.zeros(0)]) is None


def test_the_figures_are_quantiles_of_the_size_and_two_estimates_of_the_divergence() -> None:
    values = [(-1) ** n * n / 100 for n in range(1, 101)]
    figures = log_ratio_figures([torch.tensor(values[:30]), torch.tensor(values[30:])])
    assert figures is not None
    assert figures.num_tokens == 100
    sizes = (figures.abs_p01, figures.abs_p50, figures.abs_p99, figures.abs_max)
    assert sizes == pytest.approx((0.01, 0.50, 0.99, 1.0))
    assert figures.kl_k1 == pytest.approx(-sum(values) / 100, abs=1e-7)
    assert figures.kl_k3 == pytest.approx(sum(math.exp(v) - 1 - v for v in values) / 100, rel=1e-5)


def test_a_tiny_divergence_is_not_lost_to_rounding() -> None:
    figures = log_ratio_figures([torch.full((1000,), 1e-6)])
    assert figures is not None
    assert figures.kl_k3 == pytest.approx(5e-13, rel=1e-3)


def sums_of(versions: list[int], parent_version: int) -> LossSums:
    samples = [
        msgspec.structs.replace(sample, versions=tuple(version if bit else -1 for bit in sample.loss_mask))
        for sample, version in zip(random_samples(3, len(versions), vocab_size=VOCAB), versions, strict=True)
    ]
    batch = build_step_batch(parent_version, parent_version, samples, 128)
    return accumulate_gradients(tiny_module(vocab_size=VOCAB), batch, LossSettings())[1]


def test_tokens_of_the_newest_weights_are_kept_apart_from_older_ones() -> None:
    mixed, new, old = sums_of([1, 2, 1, 2], 2), sums_of([2, 2, 2, 2], 2), sums_of([1, 1, 1, 1], 2)
    assert log_ratio_figures(new.older_log_ratios) is None
    assert log_ratio_figures(old.current_log_ratios) is None
    both = torch.cat(mixed.current_log_ratios + mixed.older_log_ratios)
    assert len(both) == mixed.num_tokens
    assert sum(map(len, mixed.current_log_ratios)) > 0 < sum(map(len, mixed.older_log_ratios))
    assert torch.equal(both.sort().values, torch.cat(new.current_log_ratios).sort().values)


def test_one_trajectory_may_hold_tokens_of_both() -> None:
    sample = make_sample([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
    sample = msgspec.structs.replace(sample, versions=(-1, 3, 3, -1, 4))
    batch = build_step_batch(4, 4, [sample], 64)
    _, sums = accumulate_gradients(tiny_module(vocab_size=VOCAB), batch, LossSettings())
    assert [sum(map(len, ratios)) for ratios in (sums.current_log_ratios, sums.older_log_ratios)] == [1, 2]
