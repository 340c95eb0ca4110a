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

    ``token_ids`` int32; ``loss_mask`` uint8; ``logprobs`` float32; ``versions`` int32 (-1 where masked);
    ``advantages`` and ``temperatures`` float32 [num_rows]; ``num_tokens`` int32 [num_rows] real tokens a row. Raw
    little-endian bytes.
    """

    num_rows: int
    num_columns: int
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
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


class LogRatios(Record, frozen=True, kw_only=True):
    """How far the trainer's log-probabilities are from the recorded ones, over ``num_tokens`` sampled tokens; nats.

    ``abs_p01`` to ``abs_max``: quantiles of the absolute log of the ratio r (trained to sampling policy).
    ``kl_k1``, the mean of -log r, and ``kl_k3``, the mean of r - 1 - log r, both estimate KL(sampling || trained)
    without bias; k1 scatters more and may be negative. http://joschu.net/blog/kl-approx.html
    """

    num_tokens: int
    abs_p01: float
    abs_p50: float
    abs_p99: float
    abs_max: float
    kl_k1: float
    kl_k3: float


class StepReport(Record, frozen=True, kw_only=True):
    """What the trainer says of one step; ``version`` is the version that it produced.

    ``num_tokens`` and ``num_loss_tokens`` count the whole batch; of it, ``num_skipped_samples`` (with
    ``num_skipped_tokens``) had advantage 0 and were trained without computing, as they add exactly nothing.
    ``kl``, ``ratio_*``, ``clip_frac`` and ``entropy`` are over the tokens that were computed. Of these, ``mismatch`` is
    over the ones sampled from the weights of the gradient, so that only engine and trainer differ, and
    ``policy_change`` over those of older weights; None where there are none. The step was cut into ``num_units`` lease
    units: ``num_units_elsewhere`` of them were computed by helpers, ``num_units_leased_again`` counts leases of units
    that somebody had before.
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
    num_units: int = 0
    num_units_elsewhere: int = 0
    num_units_leased_again: int = 0
    mismatch: LogRatios | None = None
    policy_change: LogRatios | None = None
