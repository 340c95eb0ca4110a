"""What one optimizer step consumes and reports."""

from steelyard.types.record import Record


class TrainingSample(Record, frozen=True, kw_only=True):
    """One segment of one attempt, ready for the loss.

    All sequences have one length L. ``loss_mask[i]`` is 1 where ``token_ids[i]`` was sampled;
    ``logprobs[i]`` (behaviour, 0.0 where masked) and ``versions[i]`` (-1 where masked) belong to
    that token. ``temperature`` is that of sampling.
    """

    attempt_id: str
    segment_index: int
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    advantage: float
    temperature: float


class MicroBatch(Record, frozen=True, kw_only=True):
    """Rows of similar length, right-padded: every array is C-contiguous [num_rows, num_columns].

    ``token_ids`` int32; ``loss_mask`` uint8; ``logprobs`` float32; ``advantages`` and ``temperatures``
    float32 [num_rows]; ``num_tokens`` int32 [num_rows] real tokens a row. Raw little-endian bytes.
    """

    num_rows: int
    num_columns: int
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    advantages: bytes
    temperatures: bytes
    num_tokens: bytes
    attempt_ids: tuple[str, ...]


class StepBatch(Record, frozen=True, kw_only=True):
    """All that one optimizer step consumes, in order; kept until a checkpoint covers it.

    ``loss_denominator`` is the number of sampled tokens over the whole batch, fixed beforehand so that
    the update does not depend on how the batch is cut. The batch digest is over these msgpack bytes.
    """

    step: int
    parent_version: int
    samples: tuple[TrainingSample, ...]
    micro_batches: tuple[MicroBatch, ...]
    loss_denominator: float


class StepReport(Record, frozen=True, kw_only=True):
    """What the trainer says of one step; ``version`` is the version that it produced.

    ``num_tokens`` and ``num_loss_tokens`` count the whole batch; of it, ``num_skipped_samples`` (with
    ``num_skipped_tokens``) had advantage 0 and were trained without computing, as they add exactly nothing.
    ``kl``, ``ratio_*``, ``clip_frac`` and ``entropy`` are over the tokens that were computed.
    """

    step: int
    version: int
    loss: float
    grad_norm: float
    kl: float
    ratio_mean: float
    ratio_max: float
    clip_frac: float
    entropy: float
    learning_rate: float
    num_tokens: int
    num_loss_tokens: int
    duration_s: float
    num_skipped_samples: int = 0
    num_skipped_tokens: int = 0
