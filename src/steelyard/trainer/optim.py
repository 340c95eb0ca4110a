"""AdamW, its learning-rate schedule, and its state as named tensors."""

import math
from collections.abc import Iterable

import torch

from steelyard.errors import IntegrityError, RunError
from steelyard.trainer.records import OptimizerSettings

_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


def make_optimizer(module: torch.nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW in one fused kernel; weight decay on matrices only, as norms and biases have a scale of their own."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if params
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=1e-8, fused=True
    )


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """The rate of ``step`` (from 0): linear warm-up over ``warmup_steps``, then a line down, or constant."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    num_falling = settings.decay_steps - settings.warmup_steps
    if num_falling <= 0:
        return settings.learning_rate
    fallen = min(1.0, (step - settings.warmup_steps) / num_falling)
    return settings.learning_rate * (1.0 - (1.0 - settings.final_rate_frac) * fallen)


def apply_step(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, rate: float, max_grad_norm: float, name: str
) -> float:
    """Clip the gradient, take one optimizer step, and return the norm before clipping.

    A parameter without a gradient has gradient 0 here, so that the step does not depend on what was left uncomputed.

    Raises:
        RunError: the norm is not finite; the parameters are then unchanged.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm))
    if not math.isfinite(norm):
        raise RunError(f"{name}: the gradient norm must be finite, got {norm}; no parameter was changed")
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm


def optimizer_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as ``<parameter name>/<key>``; empty before the first step."""
    tensors = {}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


def restore_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """Put back what :func:`optimizer_tensors` gave.

    Raises:
        IntegrityError: the tensors do not fit the module's parameters.
    """
    if not tensors:
        return
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    expected = {f"{name}/{key}" for name in names for key in _STATE_KEYS}
    if tensors.keys() != expected:
        wrong = sorted(tensors.keys() ^ expected)
        raise IntegrityError(f"the optimizer state must hold {len(expected)} tensors of the model; wrong: {wrong[:4]}")
    for name, parameter in module.named_parameters():
        state = {key: tensors[f"{name}/{key}"].clone() for key in _STATE_KEYS}
        _check_shapes(name, parameter, (state["exp_avg"], state["exp_avg_sq"]))
        optimizer.state[parameter] = state


def _check_shapes(name: str, parameter: torch.Tensor, moments: Iterable[torch.Tensor]) -> None:
    for moment in moments:
        if moment.shape != parameter.shape:
            raise IntegrityError(
                f"the optimizer state of {name} must have shape {tuple(parameter.shape)}, got {tuple(moment.shape)}"
            )
