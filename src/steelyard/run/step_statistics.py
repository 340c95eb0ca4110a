"""The numbers of one step's batch, for people. Pure."""

import statistics
from collections.abc import Sequence

from steelyard.coordinator.records import BatchMember
from steelyard.observe.statistics import quantile
from steelyard.types import Record, StepBatch, Trace


class BatchNumbers(Record, frozen=True, kw_only=True):
    """Over the trajectories of one batch; ``first_try_frac`` is the share with a full value of 1.0."""

    num_tokens: int
    num_loss_tokens: int
    num_trajectories: int
    num_groups: int
    num_no_signal: int
    reward_mean: float
    success_frac: float
    first_try_frac: float
    lag_mean: float
    lag_max: int
    age_mean_s: float
    turns_mean: float
    tokens_p50: float
    tokens_p99: float
    tokens_max: float


def batch_numbers(
    members: Sequence[BatchMember],
    traces: Sequence[Trace],
    batch: StepBatch,
    *,
    lags: Sequence[int],
    num_groups: int,
    num_no_signal: int,
    now_s: float,
) -> BatchNumbers:
    """Count one batch.

    Args:
        members: at least one, with ``traces`` and ``lags`` (optimizer steps) in the same order.
        now_s: when the batch is consumed.
    """
    lengths = sorted(float(member.trace.num_tokens) for member in members)
    starts = [trace.turns[0].started_at_s for trace in traces if trace.turns]
    values = [member.score.value for member in members if member.score.value is not None]
    return BatchNumbers(
        num_tokens=sum(len(sample.token_ids) for sample in batch.samples),
        num_loss_tokens=int(batch.loss_denominator),
        num_trajectories=len(members),
        num_groups=num_groups,
        num_no_signal=num_no_signal,
        reward_mean=statistics.fmean(values),
        success_frac=statistics.fmean(member.score.success for member in members),
        first_try_frac=statistics.fmean(
            member.score.success and member.score.value is not None and member.score.value >= 1.0 for member in members
        ),
        lag_mean=statistics.fmean(lags),
        lag_max=max(lags),
        age_mean_s=now_s - statistics.fmean(starts) if starts else 0.0,
        turns_mean=statistics.fmean(member.trace.num_turns for member in members),
        tokens_p50=quantile(lengths, 0.5) or 0.0,
        tokens_p99=quantile(lengths, 0.99) or 0.0,
        tokens_max=lengths[-1],
    )
