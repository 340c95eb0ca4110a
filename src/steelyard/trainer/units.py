"""A step's batch as lease units: pieces of work that anybody may compute, fixed before any is handed out.

::

    StepBatch --cut_units--> StepUnits: LeaseUnit 0, 1, ... (micro-batches, denominator and seed in each)

A unit holds all that its gradient depends on beside the weights, so the gradient is the same whoever computes it. How
a batch is cut depends on the batch alone, never on who is there. A sequence is never split. Imports no torch.

Samples whose advantage is exactly 0 contribute exactly 0 to the gradient where neither a KL nor an entropy term is
asked for. Their rows are then in no unit; they still count in the loss denominator (they are trained, with no signal).
"""

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import MicroBatch, Record, StepBatch

MIN_UNITS = 8
"""So that a few helpers have enough to share, and what one of them loses is little."""
MAX_UNITS = 32
_MICRO_BATCHES_EACH = 3
_SNAP_FRAC = 0.25
"""A cut moves to the border of a micro-batch that is so near, in units: cutting through one costs a forward pass."""


class LeaseUnit(Record, frozen=True, kw_only=True):
    """The share of one optimizer step that is computed by one worker, all or nothing.

    ``micro_batches`` are computed in order; ``loss_denominator`` is that of the whole batch; ``seed`` that of the
    dropout in this unit, in [0, 2**63).
    """

    step: int
    parent_version: int
    index: int
    micro_batches: tuple[MicroBatch, ...]
    loss_denominator: float
    seed: int


class StepUnits(Record, frozen=True, kw_only=True):
    """All units of a step, by index, and what the whole batch counts. ``num_skipped_*`` is in no unit."""

    units: tuple[LeaseUnit, ...]
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    num_skipped_rows: int
    num_skipped_tokens: int


class BatchArrays(NamedTuple):
    """The arrays of a micro-batch, as :class:`steelyard.types.MicroBatch` gives their shapes."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    temperatures: np.ndarray
    num_tokens: np.ndarray


_DTYPES = ("<i4", "u1", "<f4", "<i4", "<f4", "<f4", "<i4")
_NUM_WIDE = 4
"""So many of the arrays have columns."""


def read_arrays(micro_batch: MicroBatch) -> BatchArrays:
    """Views into the micro-batch's bytes.

    Raises:
        IntegrityError: an array has not the size that the shape says, or the first token of a row counts as sampled.
    """
    shape = (micro_batch.num_rows, micro_batch.num_columns)
    arrays = BatchArrays(
        *(
            _array(getattr(micro_batch, field), dtype, shape if index < _NUM_WIDE else shape[:1], field)
            for index, (field, dtype) in enumerate(zip(BatchArrays._fields, _DTYPES, strict=True))
        )
    )
    if arrays.loss_mask[:, 0].any():
        raise IntegrityError("loss_mask must be 0 in column 0: nothing predicts the first token")
    return arrays


def cut_units(batch: StepBatch, *, skip_zero_advantage: bool, seed: int = 0) -> StepUnits:
    """Cut a batch into 8 to 32 units of about equal work; into fewer where it has fewer rows.

    Args:
        skip_zero_advantage: rows whose advantage is 0 are not computed.
        seed: of the run.

    Raises:
        IntegrityError: a micro-batch is malformed, or the sampled tokens do not add up to the denominator.
    """
    arrays = [read_arrays(micro_batch) for micro_batch in batch.micro_batches]
    num_loss_tokens = sum(int(np.count_nonzero(a.loss_mask)) for a in arrays)
    if num_loss_tokens != batch.loss_denominator:
        raise IntegrityError(
            f"step {batch.step}: the micro-batches must hold loss_denominator = {batch.loss_denominator} sampled "
            f"tokens, got {num_loss_tokens}"
        )
    kept, num_skipped_rows, num_skipped_tokens = [], 0, 0
    for micro_batch, a in zip(batch.micro_batches, arrays, strict=True):
        keep = np.logical_or.reduce(a.loss_mask != 0, axis=1)
        if skip_zero_advantage:
            keep &= a.advantages != 0.0
        num_skipped_rows += int(np.count_nonzero(~keep))
        num_skipped_tokens += int(a.num_tokens[~keep].sum())
        if keep.any():
            kept.append(_rows_of(micro_batch, a, keep))
    return StepUnits(
        units=tuple(
            LeaseUnit(
                step=batch.step,
                parent_version=batch.parent_version,
                index=index,
                micro_batches=part,
                loss_denominator=batch.loss_denominator,
                seed=unit_seed(seed, batch.step, index),
            )
            for index, part in enumerate(_cut(kept))
        ),
        num_rows=sum(len(a.num_tokens) for a in arrays),
        num_tokens=sum(int(a.num_tokens.sum()) for a in arrays),
        num_loss_tokens=num_loss_tokens,
        num_skipped_rows=num_skipped_rows,
        num_skipped_tokens=num_skipped_tokens,
    )


def unit_seed(seed: int, step: int, index: int) -> int:
    """The seed of the dropout in one unit: the same whoever computes it, another for every step and unit."""
    return int(digest_bytes(f"{seed}/{step}/{index}".encode())[:16], 16) >> 1


def cut_rows(micro_batch: MicroBatch, start: int, stop: int) -> MicroBatch:
    """Rows ``[start, stop)``, trimmed to the longest of them."""
    if (start, stop) == (0, micro_batch.num_rows):
        return micro_batch
    keep = np.zeros(micro_batch.num_rows, dtype=bool)
    keep[start:stop] = True
    return _rows_of(micro_batch, read_arrays(micro_batch), keep)


def _rows_of(micro_batch: MicroBatch, arrays: BatchArrays, keep: np.ndarray) -> MicroBatch:
    num_columns = int(arrays.num_tokens[keep].max())
    if keep.all() and num_columns == micro_batch.num_columns:
        return micro_batch
    wide = {f: getattr(arrays, f)[keep, :num_columns].tobytes() for f in BatchArrays._fields[:_NUM_WIDE]}
    narrow = {f: getattr(arrays, f)[keep].tobytes() for f in BatchArrays._fields[_NUM_WIDE:]}
    return msgspec.structs.replace(
        micro_batch,
        num_rows=int(np.count_nonzero(keep)),
        num_columns=num_columns,
        attempt_ids=tuple(name for name, is_kept in zip(micro_batch.attempt_ids, keep, strict=True) if is_kept),
        **wide,
        **narrow,
    )


def _cut(micro_batches: list[MicroBatch]) -> list[tuple[MicroBatch, ...]]:
    """Runs of micro-batches, cut through the rows of one where no border of one is near."""
    starts = [0, *accumulate(micro_batch.num_rows for micro_batch in micro_batches)]
    runs = []
    for first, last in _row_ranges(micro_batches):
        run = []
        for micro_batch, start in zip(micro_batches, starts, strict=False):
            low, high = max(first - start, 0), min(last - start, micro_batch.num_rows)
            if low < high:
                run.append(cut_rows(micro_batch, low, high))
        runs.append(tuple(run))
    return runs


def _row_ranges(micro_batches: list[MicroBatch]) -> list[tuple[int, int]]:
    """Ranges of rows, counted over all micro-batches, of about equal padded tokens."""
    work = [0, *accumulate(m.num_columns for m in micro_batches for _ in range(m.num_rows))]
    num_rows = len(work) - 1
    num_units = min(num_rows, max(MIN_UNITS, min(MAX_UNITS, len(micro_batches) // _MICRO_BATCHES_EACH)))
    borders = [0, *accumulate(micro_batch.num_rows for micro_batch in micro_batches)]
    border_work = [work[border] for border in borders]
    cuts = {0, num_rows}
    for index in range(1, num_units):
        wanted = work[-1] * index / num_units
        near = _nearest(border_work, wanted)
        if abs(border_work[near] - wanted) <= _SNAP_FRAC * work[-1] / num_units:
            cuts.add(borders[near])
        else:
            cuts.add(_nearest(work, wanted))
    ordered = sorted(cuts)
    return list(pairwise(ordered))


def _nearest(values: list[int], wanted: float) -> int:
    """Index of the value nearest to ``wanted`` in a list that rises."""
    right = min(bisect_left(values, wanted), len(values) - 1)
    left = max(right - 1, 0)
    return left if wanted - values[left] <= values[right] - wanted else right


def _array(data: bytes, dtype: str, shape: tuple[int, ...], field: str) -> np.ndarray:
    array = np.frombuffer(data, dtype=dtype)
    if array.size != np.prod(shape):
        raise IntegrityError(f"MicroBatch.{field} must hold {np.prod(shape)} values of shape {shape}, got {array.size}")
    return array.reshape(shape)
