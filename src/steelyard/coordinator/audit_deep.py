"""The deep part of an audit: what was recorded follows from the weights that are still kept.

The digests of the shallow audit prove that nothing changed since it was written. This proves that what was written is
true: the stored weights are run again over a sample of the recorded turns, by the trainer's own forward pass.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steelyard.coordinator.audit_evidence import AttemptFacts, AuditStores, Facts, Findings
from steelyard.errors import IntegrityError
from steelyard.types import Turn

INVARIANT = "logprobs_recomputed"
STATEMENT = (
    "Each sampled token that was drawn has, under the stored weights, the log-probability that was recorded "
    "(tokens over KV that was kept from an older version are left out)."
)

RecomputeFunction = Callable[[int, Sequence[Turn]], Sequence[Sequence[float]]]
"""Of a version and turns sampled from it: the log-probability of each sampled token, as the recorder defines it.

Raises IntegrityError where the version cannot be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepAudit:
    """How to recompute, and how much.

    ``num_attempts``: attempts drawn per version, all turns of each. ``tolerance``: largest allowed difference of two
    log-probabilities, in nats.
    """

    recompute: RecomputeFunction
    rng: random.Random
    num_attempts: int
    tolerance: float


def check_recomputed(stores: AuditStores, facts: Facts, deep: DeepAudit, findings: Findings) -> None:
    """Every kept version, each with its own draw of accepted attempts (trained and evaluated ones alike)."""
    for version in sorted(set(facts.published) - facts.deleted):
        accepted = [a for a in facts.attempts.values() if a.is_accepted and _may_hold(a, version)]
        drawn = deep.rng.sample(accepted, min(deep.num_attempts, len(accepted)))
        turns = [turn for attempt in drawn for turn in _turns_of(stores, attempt, version, findings)]
        if not turns:
            continue
        try:
            found = deep.recompute(version, turns)
        except IntegrityError as error:
            findings.check(INVARIANT, False, f"version {version}: {error}")
            continue
        for turn, logprobs in zip(turns, found, strict=True):
            _compare(version, turn, logprobs, deep.tolerance, findings)


def _may_hold(attempt: AttemptFacts, version: int) -> bool:
    """Whether tokens of an attempt may come from ``version``."""
    trace = attempt.report.trace if attempt.report is not None else None
    if trace is None or not trace.num_tokens:
        return attempt.policy_version == version
    return trace.oldest_version <= version <= trace.newest_version


def _turns_of(stores: AuditStores, attempt: AttemptFacts, version: int, findings: Findings) -> list[Turn]:
    """Its turns with tokens that ``version`` sampled."""
    try:
        trace, _ = stores.traces.read(attempt.attempt_id)
    except IntegrityError as error:
        findings.check(INVARIANT, False, f"{attempt.attempt_id}: {error}")
        return []
    return [turn for turn in trace.turns if any(_tokens_of(turn, version))]


def _tokens_of(turn: Turn, version: int) -> list[bool]:
    """For each token of a turn whether ``version`` alone made it: not where it saw KV that an older one had left."""
    ends = [span.start for span in turn.version_spans[1:]] + [len(turn.token_ids)]
    return [
        span.version == version and span.kv_version in (None, version)
        for span, end in zip(turn.version_spans, ends, strict=True)
        for _ in range(span.start, end)
    ]


def _compare(version: int, turn: Turn, found: Sequence[float], tolerance: float, findings: Findings) -> None:
    where = f"turn {turn.turn_index} of {turn.attempt_id}"
    message = f"{where} must have {len(turn.token_ids)} log-probabilities, recorded are {len(turn.logprobs)}"
    if not findings.check(INVARIANT, len(found) == len(turn.logprobs) == len(turn.token_ids), message):
        return
    by_version = _tokens_of(turn, version)
    for index, (recorded, recomputed) in enumerate(zip(turn.logprobs, found, strict=True)):
        if not by_version[index]:
            continue
        difference = abs(recorded - recomputed)
        # Not "difference > tolerance": a NaN must fail too.
        holds = difference <= tolerance and math.isfinite(recorded)
        message = (
            f"{where}, token {index}: recorded log-probability {recorded:.6f}, version {version} gives "
            f"{recomputed:.6f}; they may differ by {tolerance}"
        )
        findings.check(INVARIANT, holds, message)
