"""Invariants of what was trained: each batch is what the journal says, and holds what the traces and scores say."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from steelyard.coordinator.audit_evidence import AttemptFacts, AuditStores, Facts, Findings, StepFacts
from steelyard.errors import IntegrityError
from steelyard.types import MicroBatch, Purpose, Score, StepBatch, Trace, TrainingSample

_Row = tuple[str, bytes, bytes, bytes, bytes, bytes]
_ADVANTAGE_TOLERANCE = 1e-9


def check_batches(stores: AuditStores, facts: Facts, findings: Findings) -> None:
    """Every surviving step: first what the journal says of it, then its stored batch."""
    trained: dict[str, int] = {}
    for step, step_facts in sorted(facts.steps.items()):
        _check_groups(step, step_facts, facts, trained, findings)
        if step in facts.deleted_batches:
            continue
        read = findings.read("batches_stored", stores.batches.read, step)
        if read is None:
            continue
        batch, digest = read
        _check_identity(step, step_facts, batch, digest, findings)
        _check_samples(stores, facts, step_facts, batch, findings)
        _check_advantages(stores, facts, step_facts, batch, findings)
        _check_micro_batches(step, batch, findings)


def _check_groups(step: int, step_facts: StepFacts, facts: Facts, trained: dict[str, int], findings: Findings) -> None:
    begun, rules = step_facts.begun, step_facts.rules
    message = f"step {step} must consume {rules.groups_per_batch} groups, consumes {len(begun.group_ids)}"
    findings.check("groups_whole", len(begun.group_ids) == rules.groups_per_batch, message)
    for group_id in begun.group_ids:
        group = facts.groups.get(group_id)
        is_train = group is not None and group.admitted.purpose is Purpose.TRAIN
        findings.check("evaluation_never_trained", is_train, f"step {step} consumes {group_id}, no training group")
        before = trained.setdefault(group_id, step)
        findings.check("trained_once", before == step, f"group {group_id} is in steps {before} and {step}")
        accepted = facts.accepted(group_id)
        message = f"group {group_id} needs {rules.min_scored} accepted members, has {len(accepted)}"
        findings.check("groups_whole", len(accepted) >= rules.min_scored, message)
        for attempt in accepted:
            for version in _versions_of(attempt):
                _check_lag(step, rules.max_policy_lag, attempt.attempt_id, version, facts, findings)
    twice = len(set(begun.sample_ids)) != len(begun.sample_ids)
    findings.check("trained_once", not twice, f"step {step} holds a sample twice")


def _versions_of(attempt: AttemptFacts) -> tuple[int, ...]:
    """The oldest and the newest version of its tokens; the one that it was bound to where it has none."""
    trace = attempt.report.trace if attempt.report is not None else None
    if trace is None or not trace.num_tokens:
        return (attempt.policy_version,)
    return tuple(sorted({trace.oldest_version, trace.newest_version}))


def _check_lag(step: int, bound: int, attempt_id: str, version: int, facts: Facts, findings: Findings) -> None:
    version_step = facts.step_of(version)
    lag = None if version_step is None else step - version_step
    within = lag is not None and 0 <= lag <= bound
    message = f"step {step} consumes {attempt_id}, sampled from version {version}: lag {lag}, allowed is {bound}"
    findings.check("lag_bound", within, message)
    message = f"step {step} consumes {attempt_id}, sampled from version {version}, which is orphaned"
    findings.check("lag_bound", version not in facts.orphaned, message)


def _check_identity(step: int, step_facts: StepFacts, batch: StepBatch, digest: str, findings: Findings) -> None:
    begun = step_facts.begun
    message = f"the batch of step {step} must have digest {begun.batch_digest}, has {digest}"
    findings.check("batches_stored", digest == begun.batch_digest, message)
    found, wanted = (batch.step, batch.parent_version), (step, begun.parent_version)
    message = f"the batch of step {step} must be of (step, version) {wanted}, is of {found}"
    findings.check("batches_stored", found == wanted, message)
    names = tuple(f"{sample.attempt_id}/{sample.segment_index}" for sample in batch.samples)
    where = _first(names, begun.sample_ids)
    message = f"the batch of step {step} must hold the samples of STEP_BEGUN in order, differs at {where}"
    findings.check("batches_stored", names == begun.sample_ids, message)
    denominator = float(sum(sum(sample.loss_mask) for sample in batch.samples))
    message = f"the loss of step {step} must be divided by {denominator}, is by {batch.loss_denominator}"
    findings.check("batches_stored", batch.loss_denominator == denominator, message)


def _check_samples(
    stores: AuditStores, facts: Facts, step_facts: StepFacts, batch: StepBatch, findings: Findings
) -> None:
    """Token for token against the sealed traces, and no accepted token left out."""
    members = {a.attempt_id: a for group_id in step_facts.begun.group_ids for a in facts.accepted(group_id)}
    num_tokens: Counter[str] = Counter()
    for sample in batch.samples:
        name = f"sample {sample.attempt_id}/{sample.segment_index} of step {batch.step}"
        purpose = facts.purpose(sample.attempt_id)
        findings.check("evaluation_never_trained", purpose is Purpose.TRAIN, f"{name} is for {purpose}")
        findings.check("groups_whole", sample.attempt_id in members, f"{name} is of no accepted member of the step")
        num_tokens[sample.attempt_id] += sum(sample.loss_mask)
        bound = step_facts.rules.max_policy_lag
        for version in {v for v, is_sampled in zip(sample.versions, sample.loss_mask, strict=True) if is_sampled}:
            _check_lag(batch.step, bound, sample.attempt_id, version, facts, findings)
        try:
            trace, _ = stores.traces.read(sample.attempt_id)
        except IntegrityError as error:
            findings.check("batch_tokens", False, f"{name}: {error}")
            continue
        _check_sample(name, sample, expected_segment(trace, sample.segment_index), findings)
    for attempt_id, attempt in members.items():
        sealed = attempt.report.trace.num_tokens if attempt.report else 0
        message = f"step {batch.step} must train all {sealed} tokens of {attempt_id}, trains {num_tokens[attempt_id]}"
        findings.check("groups_whole", num_tokens[attempt_id] == sealed, message)


@dataclass(frozen=True, slots=True)
class Segment:
    """What a sample of one segment must hold; derived here from the trace, independently of assembly."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    temperatures: frozenset[float]


def expected_segment(trace: Trace, segment_index: int) -> Segment | None:
    """The sequences of a segment; None where the trace has no such segment."""
    turns = [turn for turn in trace.turns if turn.segment_index == segment_index]
    if not turns:
        return None
    token_ids = turns[-1].prompt_token_ids + turns[-1].token_ids
    mask, logprobs, versions = [0] * len(token_ids), [0.0] * len(token_ids), [-1] * len(token_ids)
    for turn in turns:
        version = -1
        starts = {span.start: span.version for span in turn.version_spans}
        for offset, logprob in enumerate(turn.logprobs):
            version = starts.get(offset, version)
            at = len(turn.prompt_token_ids) + offset
            if at < len(token_ids):
                mask[at], logprobs[at], versions[at] = 1, logprob, version
    return Segment(
        token_ids=token_ids,
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        temperatures=frozenset(turn.sampling.temperature for turn in turns),
    )


def _check_sample(name: str, sample: TrainingSample, expected: Segment | None, findings: Findings) -> None:
    if not findings.check("batch_tokens", expected is not None, f"{name}: its trace has no such segment"):
        return
    assert expected is not None
    pairs = (
        ("batch_tokens", "token_ids", sample.token_ids, expected.token_ids),
        ("batch_tokens", "loss_mask", sample.loss_mask, expected.loss_mask),
        ("batch_tokens", "versions", sample.versions, expected.versions),
        ("batch_logprobs", "logprobs", sample.logprobs, expected.logprobs),
    )
    for invariant, field, found, wanted in pairs:
        message = f"{name}: {field} differ from the sealed trace at {_first(found, wanted)}"
        findings.check(invariant, found == wanted, message)
    is_same = expected.temperatures == {sample.temperature}
    message = f"{name}: temperature {sample.temperature}, sampled at {sorted(expected.temperatures)}"
    findings.check("batch_logprobs", is_same, message)


def _check_advantages(
    stores: AuditStores, facts: Facts, step_facts: StepFacts, batch: StepBatch, findings: Findings
) -> None:
    wanted: dict[str, float] = {}
    for group_id in step_facts.begun.group_ids:
        scores: list[Score] = [a.score for a in facts.accepted(group_id) if a.score is not None]
        try:
            wanted.update(stores.advantages(scores))
        except IntegrityError as error:
            findings.check("advantages_recomputed", False, f"group {group_id}: {error}")
    for sample in batch.samples:
        expected = wanted.get(sample.attempt_id, math.nan)
        message = f"{sample.attempt_id} in step {batch.step}: advantage {sample.advantage}, its scores give {expected}"
        same = abs(sample.advantage - expected) <= _ADVANTAGE_TOLERANCE
        findings.check("advantages_recomputed", same, message)


def _check_micro_batches(step: int, batch: StepBatch, findings: Findings) -> None:
    """The rows that are computed are the samples, each once."""
    wanted = Counter(_sample_row(sample) for sample in batch.samples)
    found: Counter[_Row] = Counter()
    for index, micro_batch in enumerate(batch.micro_batches):
        try:
            found.update(_rows(micro_batch))
        except (ValueError, IndexError) as error:
            findings.check("micro_batch_rows", False, f"micro-batch {index} of step {step}: {error}")
    missing = [row[0] for row in (wanted - found)] or [row[0] for row in (found - wanted)]
    message = f"the micro-batches of step {step} differ from its samples, first at {missing[:1]}"
    findings.check("micro_batch_rows", found == wanted, message)


def _sample_row(sample: TrainingSample) -> _Row:
    return (
        sample.attempt_id,
        np.array(sample.token_ids, dtype="<i4").tobytes(),
        np.array(sample.loss_mask, dtype=np.uint8).tobytes(),
        np.array(sample.logprobs, dtype="<f4").tobytes(),
        np.array(sample.versions, dtype="<i4").tobytes(),
        np.array([sample.advantage, sample.temperature], dtype="<f4").tobytes(),
    )


def _rows(batch: MicroBatch) -> list[_Row]:
    shape = (batch.num_rows, batch.num_columns)
    token_ids = np.frombuffer(batch.token_ids, dtype="<i4").reshape(shape)
    loss_mask = np.frombuffer(batch.loss_mask, dtype=np.uint8).reshape(shape)
    logprobs = np.frombuffer(batch.logprobs, dtype="<f4").reshape(shape)
    versions = np.frombuffer(batch.versions, dtype="<i4").reshape(shape)
    advantages = np.frombuffer(batch.advantages, dtype="<f4")
    temperatures = np.frombuffer(batch.temperatures, dtype="<f4")
    lengths = np.frombuffer(batch.num_tokens, dtype="<i4")
    rows = []
    for row, attempt_id in enumerate(batch.attempt_ids):
        length = int(lengths[row])
        both = np.array([advantages[row], temperatures[row]], dtype="<f4").tobytes()
        rows.append(
            (
                attempt_id,
                token_ids[row, :length].tobytes(),
                loss_mask[row, :length].tobytes(),
                logprobs[row, :length].tobytes(),
                versions[row, :length].tobytes(),
                both,
            )
        )
    return rows


def _first(found: "tuple[object, ...]", wanted: "tuple[object, ...]") -> str:
    """Where two sequences first differ."""
    for index, (left, right) in enumerate(zip(found, wanted, strict=False)):
        if left != right:
            return f"position {index}: {left} instead of {right}"
    return f"their lengths: {len(found)} instead of {len(wanted)}"
