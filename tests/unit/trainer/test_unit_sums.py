"""Sums of units: the same bits in whatever order they come, and nothing without all of them."""

import random

import msgspec
import pytest
import torch

from steelyard.errors import IntegrityError, Refused
from steelyard.testing.tiny_model import tiny_module
from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.loss import LossSums
from steelyard.trainer.records import LossSettings
from steelyard.trainer.step import accumulate_gradients, unit_gradient, units_of
from steelyard.trainer.unit_sums import UnitSums

BATCH = random_step_batch(5, num_samples=40, vocab_size=64)


def gradient_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("seed", range(4))
def test_the_total_has_the_same_bits_in_whatever_order_units_come(seed: int) -> None:
    module, other = tiny_module(vocab_size=64), tiny_module(vocab_size=64)
    _, loss = accumulate_gradients(module, BATCH, LossSettings())
    units = list(units_of(BATCH, LossSettings()).units)
    sums = UnitSums(len(units))
    random.Random(seed).shuffle(units)
    for unit in units:
        sums.deliver(unit.index, *unit_gradient(other, unit, LossSettings()))
        if seed % 2:
            sums.advance()
    total, other_loss = sums.finish()
    assert torch.equal(torch.cat([total[n].flatten() for n, _ in other.named_parameters()]), gradient_of(module))
    assert other_loss.loss == loss.loss and other_loss.num_tokens == loss.num_tokens
    assert sums.waiting_bytes == 0


def test_a_unit_that_is_missing_or_comes_twice_is_no_total() -> None:
    sums = UnitSums(3)
    sums.deliver(2, {"w": torch.ones(2)}, LossSums())
    sums.deliver(0, {"w": torch.ones(2)}, LossSums())
    with pytest.raises(Refused, match="unit 2 is here already"):
        sums.deliver(2, {"w": torch.ones(2)}, LossSums())
    with pytest.raises(Refused, match="one of 3, got 3"):
        sums.deliver(3, {}, LossSums())
    with pytest.raises(IntegrityError, match=r"none of \[1\]"):
        sums.finish()
    assert (sums.num_added, sums.waiting_bytes) == (1, 8)


def test_a_dropped_unit_changes_the_total() -> None:
    """The measure by which runs with helpers are compared sees one unit that is missing."""
    module, other = tiny_module(vocab_size=64), tiny_module(vocab_size=64)
    accumulate_gradients(module, BATCH, LossSettings())
    units = units_of(BATCH, LossSettings()).units
    sums = UnitSums(len(units))
    for unit in units:
        gradients, loss = unit_gradient(other, unit, LossSettings())
        sums.deliver(unit.index, {} if unit.index == 3 else gradients, loss)
    total, _ = sums.finish()
    whole = gradient_of(module)
    without = torch.cat([total[n].flatten() for n, _ in other.named_parameters()])
    assert (whole - without).norm() / whole.norm() > 1e-2


def test_dropout_depends_on_step_and_unit_and_on_nothing_else() -> None:
    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_module(vocab_size=64)

        def forward(self, **inputs: torch.Tensor) -> object:
            output = self.inner(**inputs)
            output.logits = torch.nn.functional.dropout(output.logits, 0.5)
            return output

        def get_output_embeddings(self) -> torch.nn.Module:
            head: torch.nn.Module = self.inner.get_output_embeddings()  # type: ignore[operator]
            return head

    module = Dropping()
    first, second = units_of(BATCH, LossSettings()).units[:2]
    before = torch.get_rng_state()
    one = unit_gradient(module, first, LossSettings())[0]
    unit_gradient(module, second, LossSettings())
    torch.rand(3)
    again = unit_gradient(module, first, LossSettings())[0]
    assert all(torch.equal(one[name], again[name]) for name in one)
    other = unit_gradient(module, msgspec.structs.replace(first, seed=first.seed + 1), LossSettings())[0]
    assert any(not torch.equal(one[name], other[name]) for name in one)
    torch.set_rng_state(before)
