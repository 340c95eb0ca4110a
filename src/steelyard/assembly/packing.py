"""Samples into micro-batches: rows of similar length, right-padded, under a token budget.

Right padding with causal attention needs no mask: a real token never sees the padding behind it. Each sequence keeps
its own row, so no token ever attends to another attempt. Samples are sorted by length and cut where the total
padding, plus a fixed price for each micro-batch, is smallest; for rows sorted by length this cut is optimal among all
groupings, since swapping rows between micro-batches never lowers their largest length.

Samples whose advantage is exactly 0 get micro-batches of their own, behind the others: a trainer whose loss they
cannot change may pass over them whole.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steelyard.assembly.samples import MASKED_VERSION
from steelyard.errors import ConfigError, IntegrityError
from steelyard.types import MicroBatch, TrainingSample

MICRO_BATCH_PRICE_TOKENS = 128
"""What starting one more micro-batch costs, in padded tokens: a few milliseconds of kernel launches at some tens of
thousands of tokens per second."""


def pack(samples: Sequence[TrainingSample], budget_tokens: int) -> tuple[MicroBatch, ...]:
    """Cut ``samples`` into micro-batches of at most ``budget_tokens`` padded tokens each.

    Deterministic: the same samples in the same order give the same bytes. Longest rows come first, so that a
    micro-batch that does not fit in memory fails at once and not after minutes.

    Raises:
        ConfigError: one sample alone is longer than the budget.
        IntegrityError: a sample is empty or its sequences differ in length.
    """
    for sample in samples:
        _check_sample(sample, budget_tokens)
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].token_ids), i))
    micro_batches = []
    for part in (
        [samples[i] for i in order if samples[i].advantage != 0.0],
        [samples[i] for i in order if samples[i].advantage == 0.0],
    ):
        runs = cut_rows([len(sample.token_ids) for sample in part], budget_tokens)
        micro_batches += [_micro_batch(part[start:stop]) for start, stop in runs]
    return tuple(micro_batches)


def cut_rows(lengths: Sequence[int], budget_tokens: int) -> list[tuple[int, int]]:
    """Cut a non-increasing list of lengths into ``[start, stop)`` runs of least total cost.

    The cost of a run is ``(stop - start) * lengths[start] + MICRO_BATCH_PRICE_TOKENS``; the first term is at most
    ``budget_tokens``. Dynamic programming over prefixes, O(n * rows per micro-batch).
    """
    best = [0] + [0] * len(lengths)
    cut = [0] * (len(lengths) + 1)
    for stop in range(1, len(lengths) + 1):
        candidates = []
        for start in range(stop - 1, -1, -1):
            padded = (stop - start) * lengths[start]
            if padded > budget_tokens:
                break  # starting earlier means more and longer rows
            candidates.append((best[start] + padded + MICRO_BATCH_PRICE_TOKENS, start))
        best[stop], cut[stop] = min(candidates)
    runs = []
    stop = len(lengths)
    while stop:
        runs.append((cut[stop], stop))
        stop = cut[stop]
    return runs[::-1]


def _check_sample(sample: TrainingSample, budget_tokens: int) -> None:
    num_tokens = len(sample.token_ids)
    name = f"segment {sample.segment_index} of {sample.attempt_id}"
    if not num_tokens:
        raise IntegrityError(f"{name}: token_ids must not be empty")
    if not num_tokens == len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions):
        raise IntegrityError(
            f"{name}: token_ids, loss_mask, logprobs and versions must have one length, got {num_tokens}, "
            f"{len(sample.loss_mask)}, {len(sample.logprobs)} and {len(sample.versions)}"
        )
    if num_tokens > budget_tokens:
        raise ConfigError(
            f"train.micro_batch_tokens: must be at least the longest sample, {num_tokens} tokens, got {budget_tokens}"
        )


def _micro_batch(rows: Sequence[TrainingSample]) -> MicroBatch:
    num_columns = max(len(row.token_ids) for row in rows)
    shape = (len(rows), num_columns)
    token_ids = np.zeros(shape, dtype="<i4")
    loss_mask = np.zeros(shape, dtype=np.uint8)
    logprobs = np.zeros(shape, dtype="<f4")
    versions = np.full(shape, MASKED_VERSION, dtype="<i4")
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids[index, :length] = row.token_ids
        loss_mask[index, :length] = row.loss_mask
        logprobs[index, :length] = row.logprobs
        versions[index, :length] = row.versions
    return MicroBatch(
        num_rows=len(rows),
        num_columns=num_columns,
        token_ids=token_ids.tobytes(),
        loss_mask=loss_mask.tobytes(),
        logprobs=logprobs.tobytes(),
        versions=versions.tobytes(),
        advantages=_floats([row.advantage for row in rows]),
        temperatures=_floats([row.temperature for row in rows]),
        num_tokens=np.array([len(row.token_ids) for row in rows], dtype="<i4").tobytes(),
        attempt_ids=tuple(row.attempt_id for row in rows),
    )


def _floats(values: Sequence[float]) -> bytes:
    array: npt.NDArray[np.float32] = np.array(values, dtype="<f4")
    return array.tobytes()
