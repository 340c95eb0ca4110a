"""AdamW and its state."""

import pytest
import torch

from steelyard.errors import IntegrityError, RunError
from steelyard.trainer.optim import apply_step, learning_rate, make_optimizer, optimizer_tensors, restore_optimizer
from steelyard.trainer.records import OptimizerSettings


def one_layer() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_the_rate_warms_up_linearly_and_then_stays() -> None:
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=3)
    assert [learning_rate(step, settings) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(0, OptimizerSettings(learning_rate=0.5)) == 0.5


def test_a_step_follows_the_adamw_formula_with_decay_on_matrices_only() -> None:
    module = one_layer()
    settings = OptimizerSettings(weight_decay=0.1)
    optimizer = make_optimizer(module, settings)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    norm = apply_step(module, optimizer, 0.5, 100.0, "step 0")
    assert norm == pytest.approx(0.01 * 8**0.5)
    for name, parameter in module.named_parameters():
        decay = 0.1 if name == "weight" else 0.0
        expected = before[name] * (1 - 0.5 * decay) - 0.5  # the first Adam direction is the gradient's sign
        assert torch.allclose(parameter, expected, atol=1e-5)


def test_the_gradient_is_clipped_to_the_norm() -> None:
    module = one_layer()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    apply_step(module, make_optimizer(module, OptimizerSettings()), 0.1, 0.5, "step 0")
    total = sum(float((p.grad**2).sum()) for p in module.parameters() if p.grad is not None)
    assert total**0.5 == pytest.approx(0.5, rel=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    module = one_layer()
    before = [p.detach().clone() for p in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(RunError, match="step 7: the gradient norm must be finite, got nan"):
        apply_step(module, make_optimizer(module, OptimizerSettings()), 0.1, 1.0, "step 7")
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_state_goes_out_and_in_without_a_change() -> None:
    module = one_layer()
    optimizer = make_optimizer(module, OptimizerSettings())
    apply_step(module, optimizer, 0.1, 1.0, "step 0")
    state = {name: tensor.clone() for name, tensor in optimizer_tensors(module, optimizer).items()}
    other = make_optimizer(module, OptimizerSettings())
    restore_optimizer(module, other, state)
    restored = optimizer_tensors(module, other)
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[name], state[name]) for name in state)


def test_a_state_that_lacks_a_tensor_is_refused() -> None:
    module = one_layer()
    optimizer = make_optimizer(module, OptimizerSettings())
    apply_step(module, optimizer, 0.1, 1.0, "step 0")
    state = optimizer_tensors(module, optimizer)
    del state["bias/exp_avg"]
    with pytest.raises(IntegrityError, match="bias/exp_avg"):
        restore_optimizer(module, optimizer, state)
    state["bias/exp_avg"] = torch.zeros(5)
    with pytest.raises(IntegrityError, match="state of bias must have shape"):
        restore_optimizer(module, optimizer, state)


def test_the_rate_rises_then_falls_in_a_line_and_stays_at_its_end() -> None:
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=2, decay_steps=12, final_rate_frac=0.5)
    rates = [learning_rate(step, settings) for step in range(15)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[7] == pytest.approx(0.75)
    assert rates[12:] == pytest.approx([0.5, 0.5, 0.5])


def test_without_a_fall_the_rate_is_constant() -> None:
    assert [learning_rate(step, OptimizerSettings(learning_rate=0.1)) for step in (0, 5, 500)] == [0.1, 0.1, 0.1]
