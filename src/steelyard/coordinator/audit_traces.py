"""Invariants of traces, artifacts and scores: what was sealed is what is stored, whole and of one attempt."""

import math

from steelyard.coordinator.audit_evidence import AttemptFacts, AuditStores, Facts, Findings
from steelyard.types import Outcome, Purpose, Trace, Turn, VersionSpan

_MAX_LOGPROB = 1e-5
"""A log-probability above this is no rounding of 0."""


def check_traces(stores: AuditStores, facts: Facts, findings: Findings) -> None:
    """Every sealed trace, one at a time."""
    requests: dict[str, str] = {}
    for attempt in facts.attempts.values():
        if attempt.report is None or attempt.is_unreadable:
            continue
        read = findings.read("traces_stored", stores.traces.read, attempt.attempt_id)
        if read is None:
            continue
        trace, digest = read
        _check_sealed(attempt, trace, digest, findings)
        _check_unspliced(attempt, trace, requests, findings)
        for turn in trace.turns:
            _check_turn(attempt, turn, facts, findings)


def check_scores(stores: AuditStores, facts: Facts, findings: Findings) -> None:
    """A score is a finite verdict of a named verifier on the artifact that is stored."""
    for attempt in facts.attempts.values():
        if attempt.report is None or attempt.is_unreadable:
            continue
        reported = attempt.report.artifact_digest
        found = findings.read("artifacts_scored", stores.artifacts.digest, reported)
        message = f"the artifact of {attempt.attempt_id} must have digest {reported}, has {found}"
        findings.check("artifacts_scored", found in (None, reported), message)
        if attempt.score is None:
            continue
        message = f"{attempt.attempt_id} handed in artifact {reported}, scored was {attempt.scored_digest}"
        findings.check("artifacts_scored", attempt.scored_digest == reported, message)
        score = attempt.score
        is_finite = score.value is not None and math.isfinite(score.value) and score.outcome is Outcome.SCORED
        findings.check("scores_finite", is_finite, f"{attempt.attempt_id}: {score.outcome} with value {score.value}")
        findings.check("scores_finite", bool(score.verifier_version), f"{attempt.attempt_id}: no verifier version")


def _check_sealed(attempt: AttemptFacts, trace: Trace, digest: str, findings: Findings) -> None:
    assert attempt.report is not None
    sealed = attempt.report.trace
    name = attempt.attempt_id
    message = f"the trace of {name} must have digest {sealed.digest}, has {digest}"
    findings.check("traces_stored", digest == sealed.digest, message)
    versions = [span.version for turn in trace.turns for span in turn.version_spans] or [attempt.policy_version]
    found = (
        len(trace.turns),
        sum(len(turn.token_ids) for turn in trace.turns),
        min(versions),
        max(versions),
        len({turn.segment_index for turn in trace.turns}),
    )
    wanted = (sealed.num_turns, sealed.num_tokens, sealed.oldest_version, sealed.newest_version, sealed.num_segments)
    message = f"the trace of {name} must hold (turns, tokens, oldest, newest, segments) {wanted}, holds {found}"
    findings.check("traces_stored", found == wanted, message)


def _check_unspliced(attempt: AttemptFacts, trace: Trace, requests: dict[str, str], findings: Findings) -> None:
    """One attempt, turns in order, every request once in the whole run, every segment one growing prefix."""
    name = attempt.attempt_id
    owners = sorted({trace.attempt_id, *(turn.attempt_id for turn in trace.turns)})
    findings.check("traces_unspliced", owners == [name], f"the trace of {name} holds turns of {owners}")
    indices = [turn.turn_index for turn in trace.turns]
    findings.check("traces_unspliced", indices == list(range(len(indices))), f"the turns of {name} are {indices}")
    before: dict[int, tuple[int, ...]] = {}
    for turn in trace.turns:
        owner = requests.setdefault(turn.request_id, name)
        unique = owner == name and not any(t is not turn and t.request_id == turn.request_id for t in trace.turns)
        findings.check("traces_unspliced", unique, f"request {turn.request_id} is in {owner} and in {name}")
        prefix = before.get(turn.segment_index, ())
        extends = turn.prompt_token_ids[: len(prefix)] == prefix
        message = f"turn {turn.turn_index} of {name} must extend what was recorded before it in its segment"
        findings.check("traces_unspliced", extends, message)
        before[turn.segment_index] = turn.prompt_token_ids + turn.token_ids


def _check_turn(attempt: AttemptFacts, turn: Turn, facts: Facts, findings: Findings) -> None:
    """Each sampled token has a finite log-probability and a version that the replica had proven to hold."""
    where = f"turn {turn.turn_index} of {attempt.attempt_id}"
    lengths = (len(turn.token_ids), len(turn.logprobs), len(turn.kept_logmass))
    findings.check("logprobs_recorded", len(set(lengths)) == 1, f"{where}: token ids, logprobs, mass: {lengths}")
    finite = all(math.isfinite(value) and value <= _MAX_LOGPROB for value in turn.logprobs)
    findings.check("logprobs_recorded", finite, f"{where}: log-probabilities must be finite and at most 0")
    if not turn.token_ids:
        return
    starts = [span.start for span in turn.version_spans]
    covered = bool(starts) and starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < len(turn.token_ids)
    findings.check("versions_proven", covered, f"{where}: version spans start at {starts}")
    for span in turn.version_spans:
        _check_span(attempt, turn, span, where, facts, findings)


def _check_span(
    attempt: AttemptFacts, turn: Turn, span: VersionSpan, where: str, facts: Facts, findings: Findings
) -> None:
    """A turn names the load of its last span; of those before the replica must have given some proof."""
    version, bound = span.version, attempt.policy_version
    follows = attempt.follows_updates and facts.purpose(attempt.attempt_id) is Purpose.TRAIN
    message = f"{where} was sampled from version {version}, its lease was bound to {bound}"
    findings.check("versions_proven", version == bound or (follows and version > bound), message)
    if span.kv_version is not None:
        message = f"{where} saw KV of version {span.kv_version}, which must lie between {bound} and {version}"
        findings.check("versions_proven", follows and bound <= span.kv_version <= version, message)
    known = version in facts.published and version in facts.ready
    findings.check("versions_proven", known, f"{where} was sampled from version {version}, which was never READY")
    proofs = [proof for proof in facts.proofs.get(version, []) if proof.replica_id == turn.replica_id]
    is_last = span is turn.version_spans[-1]
    message = f"{where}: replica {turn.replica_id} gave no proof of version {version} for load {turn.load_id}"
    holds = any(proof.load_id == turn.load_id or not is_last for proof in proofs)
    findings.check("versions_proven", holds, message)
