"""The gradient of one lease unit, and of a whole batch as the sum of its units' gradients in their order."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from steelyard.trainer.loss import LossSums, TokenBatch, policy_loss
from steelyard.trainer.model import logits_at
from steelyard.trainer.records import LossSettings
from steelyard.trainer.unit_sums import Gradients, UnitSums
from steelyard.trainer.units import LeaseUnit, StepUnits, cut_units, read_arrays
from steelyard.types import MicroBatch, StepBatch


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch, as the model takes them.

    ``token_ids`` int64 [num_rows, num_columns]; ``positions`` int64 [N], where the logits of the sampled tokens
    stand in the flattened rows; ``tokens`` those tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    tokens: TokenBatch


def units_of(batch: StepBatch, settings: LossSettings, seed: int = 0) -> StepUnits:
    """The units of a batch under a loss; see :func:`steelyard.trainer.units.cut_units`."""
    is_silent = settings.kl_coef == 0.0 and settings.entropy_coef == 0.0
    return cut_units(batch, skip_zero_advantage=is_silent, seed=seed)


def unit_gradient(
    module: torch.nn.Module,
    unit: LeaseUnit,
    settings: LossSettings,
    before_micro_batch: Callable[[], None] = lambda: None,
) -> tuple[Gradients, LossSums]:
    """The gradient sum of one unit, and its figures. The parameters' ``grad`` is None then, whatever it was before.

    Args:
        before_micro_batch: called before each micro-batch; may raise to give the unit up.

    Raises:
        IntegrityError: a micro-batch is malformed.
    """
    loss_sums = LossSums()
    module.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(unit.seed)
        for micro_batch in unit.micro_batches:
            before_micro_batch()
            loss_sums.add(backward(module, micro_batch, unit, settings))
    return take_gradients(module), loss_sums


def backward(
    module: torch.nn.Module, micro_batch: MicroBatch, unit: LeaseUnit, settings: LossSettings, weight: float = 1.0
) -> LossSums:
    """Add one micro-batch's gradient, times ``weight``, to the parameters' ``grad``."""
    rows = read_rows(micro_batch, unit.parent_version)
    logits = logits_at(module, rows.token_ids, rows.positions)
    loss, loss_sums = policy_loss(logits, rows.tokens, unit.loss_denominator, settings)
    torch.autograd.backward(loss if weight == 1.0 else loss * weight)
    return loss_sums


def take_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What stands in the parameters' ``grad``, which is None then."""
    taken = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            taken[name] = parameter.grad
            parameter.grad = None
    return taken


def set_gradients(module: torch.nn.Module, gradients: Gradients) -> None:
    """Make sums the parameters' ``grad``."""
    for name, parameter in module.named_parameters():
        parameter.grad = gradients.get(name)


def accumulate_gradients(
    module: torch.nn.Module, batch: StepBatch, settings: LossSettings, seed: int = 0
) -> tuple[StepUnits, LossSums]:
    """Make the gradient of the whole batch the parameters' ``grad``, every unit computed here.

    Raises:
        IntegrityError: a micro-batch is malformed, or the sampled tokens do not add up to the denominator.
    """
    step = units_of(batch, settings, seed)
    sums = UnitSums(len(step.units))
    for unit in step.units:
        gradients, loss_sums = unit_gradient(module, unit, settings)
        sums.deliver(unit.index, gradients, loss_sums)
        sums.advance()
    total, loss = sums.finish()
    set_gradients(module, total)
    return step, loss


def read_rows(micro_batch: MicroBatch, parent_version: int) -> Rows:
    """The rows of a micro-batch as tensors; ``parent_version`` is that of the gradient.

    Raises:
        IntegrityError: the micro-batch is malformed.
    """
    arrays = read_arrays(micro_batch)
    row_of, column_of = np.nonzero(arrays.loss_mask)
    return Rows(
        token_ids=torch.from_numpy(arrays.token_ids.astype(np.int64)),
        positions=torch.from_numpy(row_of * micro_batch.num_columns + column_of - 1),
        tokens=TokenBatch(
            targets=torch.from_numpy(arrays.token_ids[row_of, column_of].astype(np.int64)),
            behaviour=torch.from_numpy(arrays.logprobs[row_of, column_of]),
            advantages=torch.from_numpy(arrays.advantages[row_of]),
            temperatures=torch.from_numpy(arrays.temperatures[row_of]),
            is_current=torch.from_numpy(arrays.versions[row_of, column_of] == parent_version),
        ),
    )
