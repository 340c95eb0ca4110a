"""One optimizer step over the micro-batches of a step batch.

Samples whose advantage is exactly 0 contribute exactly 0 to the gradient where neither a KL nor an entropy term is
asked for. Their rows are then not computed at all; they still count in the loss denominator (they are trained, with no
signal) and are counted in the step's sums. The loss denominator never changes with what is left out.
"""

from dataclasses import dataclass

import numpy as np
import torch

from steelyard.errors import IntegrityError
from steelyard.trainer.loss import LossSums, TokenBatch, policy_loss
from steelyard.trainer.model import logits_at
from steelyard.trainer.records import LossSettings
from steelyard.types import MicroBatch, StepBatch


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch that are computed.

    ``token_ids`` int64 [num_rows, num_columns]; ``positions`` int64 [N], where the logits of the sampled tokens
    stand in the flattened rows; ``tokens`` those tokens; ``num_tokens`` real tokens in these rows.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    tokens: TokenBatch
    num_tokens: int


@dataclass
class StepSums:
    """What one step did, over all its micro-batches."""

    loss: LossSums
    num_rows: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_skipped_rows: int = 0
    num_skipped_tokens: int = 0


def accumulate_gradients(module: torch.nn.Module, batch: StepBatch, settings: LossSettings) -> StepSums:
    """Add the gradient of the whole batch to the parameters' ``grad``.

    Raises:
        IntegrityError: a micro-batch is malformed, or the sampled tokens do not add up to the denominator.
    """
    skip_zero = settings.kl_coef == 0.0 and settings.entropy_coef == 0.0
    sums = StepSums(loss=LossSums())
    for micro_batch in batch.micro_batches:
        rows = read_rows(micro_batch, sums, batch.parent_version, skip_zero_advantage=skip_zero)
        if rows is None:
            continue
        logits = logits_at(module, rows.token_ids, rows.positions)
        loss, loss_sums = policy_loss(logits, rows.tokens, batch.loss_denominator, settings)
        torch.autograd.backward(loss)
        sums.loss.add(loss_sums)
    if sums.num_loss_tokens != batch.loss_denominator:
        raise IntegrityError(
            f"step {batch.step}: the micro-batches must hold loss_denominator = {batch.loss_denominator} sampled "
            f"tokens, got {sums.num_loss_tokens}"
        )
    return sums


def read_rows(
    micro_batch: MicroBatch, sums: StepSums, parent_version: int, *, skip_zero_advantage: bool
) -> Rows | None:
    """The rows to compute, trimmed to their longest; None where none is left. Counts all rows in ``sums``."""
    shape = (micro_batch.num_rows, micro_batch.num_columns)
    token_ids = _array(micro_batch.token_ids, "<i4", shape, "token_ids")
    loss_mask = _array(micro_batch.loss_mask, "u1", shape, "loss_mask") != 0
    behaviour = _array(micro_batch.logprobs, "<f4", shape, "logprobs")
    versions = _array(micro_batch.versions, "<i4", shape, "versions")
    advantages = _array(micro_batch.advantages, "<f4", shape[:1], "advantages")
    temperatures = _array(micro_batch.temperatures, "<f4", shape[:1], "temperatures")
    num_tokens = _array(micro_batch.num_tokens, "<i4", shape[:1], "num_tokens")
    if loss_mask[:, 0].any():
        raise IntegrityError("loss_mask must be 0 in column 0: nothing predicts the first token")
    keep = (advantages != 0.0) if skip_zero_advantage else np.ones(shape[0], dtype=bool)
    keep &= loss_mask.any(axis=1)
    sums.num_rows += shape[0]
    sums.num_tokens += int(num_tokens.sum())
    sums.num_loss_tokens += int(loss_mask.sum())
    sums.num_skipped_rows += int((~keep).sum())
    sums.num_skipped_tokens += int(num_tokens[~keep].sum())
    if not keep.any():
        return None
    num_columns = int(num_tokens[keep].max())
    token_ids, loss_mask, behaviour, versions = (
        array[keep, :num_columns] for array in (token_ids, loss_mask, behaviour, versions)
    )
    row_of, column_of = np.nonzero(loss_mask)
    return Rows(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        positions=torch.from_numpy(row_of * num_columns + column_of - 1),
        tokens=TokenBatch(
            targets=torch.from_numpy(token_ids[row_of, column_of].astype(np.int64)),
            behaviour=torch.from_numpy(behaviour[row_of, column_of]),
            advantages=torch.from_numpy(advantages[keep][row_of]),
            temperatures=torch.from_numpy(temperatures[keep][row_of]),
            is_current=torch.from_numpy(versions[row_of, column_of] == parent_version),
        ),
        num_tokens=int(num_tokens[keep].sum()),
    )


def _array(data: bytes, dtype: str, shape: tuple[int, ...], field: str) -> np.ndarray:
    array = np.frombuffer(data, dtype=dtype)
    if array.size != np.prod(shape):
        raise IntegrityError(f"MicroBatch.{field} must hold {np.prod(shape)} values of shape {shape}, got {array.size}")
    return array.reshape(shape)
