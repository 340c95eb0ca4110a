"""The batch of one optimizer step, and its digest."""

from collections.abc import Sequence

import msgspec

from steelyard.assembly.packing import pack
from steelyard.assembly.samples import count_sampled_tokens
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.types import StepBatch, TrainingSample


def build_step_batch(
    step: int, parent_version: int, samples: Sequence[TrainingSample], micro_batch_tokens: int
) -> StepBatch:
    """All that optimizer step ``step`` consumes, with a loss denominator fixed over the whole of it.

    Args:
        step: the optimizer step, from 0.
        parent_version: the version that the gradient is computed at.
        samples: in the order that the coordinator consumes them.
        micro_batch_tokens: budget of one micro-batch, in padded tokens.

    Raises:
        IntegrityError: no token was sampled, one segment comes twice, or a token is newer than the weights.
        ConfigError: a sample is longer than the budget.
    """
    names = [(sample.attempt_id, sample.segment_index) for sample in samples]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise IntegrityError(f"step {step} must consume each segment once, got {twice} more than once")
    for sample in samples:
        newest = max(sample.versions, default=-1)
        if newest > parent_version:
            raise IntegrityError(
                f"step {step} at version {parent_version} must not consume tokens of version {newest} "
                f"(attempt {sample.attempt_id})"
            )
    num_loss_tokens = count_sampled_tokens(samples)
    if not num_loss_tokens:
        raise IntegrityError(f"step {step} must consume at least one sampled token, got none")
    return StepBatch(
        step=step,
        parent_version=parent_version,
        samples=tuple(samples),
        micro_batches=pack(samples, micro_batch_tokens),
        loss_denominator=float(num_loss_tokens),
    )


def encode_step_batch(batch: StepBatch) -> tuple[bytes, str]:
    """The msgpack bytes of a batch and their digest, which is the batch digest."""
    data = msgspec.msgpack.encode(batch)
    return data, digest_bytes(data)


def decode_step_batch(data: bytes, digest: str) -> StepBatch:
    """A batch from its bytes.

    Raises:
        IntegrityError: the bytes do not have this digest, or are no batch.
    """
    actual = digest_bytes(data)
    if actual != digest:
        raise IntegrityError(f"batch bytes must have digest {digest}, got {actual}")
    try:
        return msgspec.msgpack.decode(data, type=StepBatch)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"batch {digest} must be a StepBatch: {error}") from error
