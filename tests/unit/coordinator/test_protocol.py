"""Records of the protocol: they survive the wire, and what the wire must not carry is refused with its field."""

import math
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.coordinator import protocol as p
from steelyard.coordinator import trainer_calls as t
from steelyard.coordinator.records import BatchMember, BatchPlan, EvaluationResult, PendingStep, VersionInfo
from steelyard.errors import InputError
from steelyard.processes.http_failures import Failed
from steelyard.testing.run_rig import make_manifest, make_proof
from steelyard.types import (
    ArtifactReport,
    AttemptFailure,
    EndReason,
    FileDigest,
    Lease,
    LoadProof,
    Manifest,
    Outcome,
    ParameterDigest,
    Probe,
    Purpose,
    Sampling,
    Score,
    ScoreJob,
    SealedTrace,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
NUMBERS = st.integers(0, 2**53 - 1)
FLOATS = st.floats(allow_nan=False)
TIMES = st.floats(0, 1e12)


def of(kind: type[Any], /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **fields)


SAMPLING = of(Sampling, temperature=TIMES, top_p=TIMES, max_tokens=NUMBERS, seed=st.none() | NUMBERS)
TRACE = of(
    SealedTrace, attempt_id=NAMES, digest=NAMES, num_turns=NUMBERS, num_tokens=NUMBERS, oldest_version=NUMBERS,
    newest_version=NUMBERS, mean_version=TIMES, num_segments=NUMBERS, end_reason=st.sampled_from(EndReason),
)  # fmt: skip
REPORT = of(ArtifactReport, attempt_id=NAMES, attempt_number=NUMBERS, trace=TRACE, artifact_digest=NAMES)
FAILURE = of(
    AttemptFailure, attempt_id=NAMES, attempt_number=NUMBERS, outcome=st.sampled_from(Outcome), reason=NAMES,
    detail=NAMES, lost_tokens=NUMBERS, made_external_call=st.booleans(),
)  # fmt: skip
SCORE = of(
    Score, job_id=NAMES, attempt_id=NAMES, outcome=st.sampled_from(Outcome), value=st.none() | FLOATS,
    verifier_version=NAMES, success=st.booleans(), end_reason=st.none() | st.sampled_from(EndReason), detail=NAMES,
    duration_s=TIMES,
)  # fmt: skip
JOB = of(
    ScoreJob, job_id=NAMES, attempt_id=NAMES, task_id=NAMES, artifact_digest=NAMES,
    end_reason=st.sampled_from(EndReason), expires_at_s=TIMES,
)  # fmt: skip
LEASE = of(
    Lease, attempt_id=NAMES, rollout_id=NAMES, group_id=NAMES, task_id=NAMES, purpose=st.sampled_from(Purpose),
    member_index=NUMBERS, attempt_number=NUMBERS, policy_version=NUMBERS, sampling=SAMPLING, max_turns=NUMBERS,
    issued_at_s=TIMES, expires_at_s=TIMES,
)  # fmt: skip
MANY = st.lists(NAMES, max_size=3).map(tuple)


def some(one: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(one, max_size=2).map(tuple)


FILE = of(FileDigest, name=NAMES, num_bytes=NUMBERS, digest=NAMES)
PARAMETER = of(ParameterDigest, name=NAMES, shape=some(NUMBERS), dtype=NAMES, digest=NAMES)
PROBE = of(Probe, sequences=some(some(NUMBERS)), logprobs=some(some(FLOATS)), separates_parent=st.booleans())
MANIFEST = of(
    Manifest, version=NUMBERS, step=NUMBERS, parent_version=st.none() | NUMBERS, files=some(FILE),
    parameters=some(PARAMETER), weights_digest=NAMES, model_config_digest=NAMES, tokenizer_digest=NAMES,
    template_digest=NAMES, dtype=NAMES, probe=PROBE,
)  # fmt: skip
PROOF = of(
    LoadProof, version=NUMBERS, replica_id=NAMES, load_id=NAMES, weights_digest=NAMES, probe_max_error=TIMES,
    probe_tolerance=TIMES, loaded_in_s=TIMES,
)  # fmt: skip
VERSION = of(
    VersionInfo, version=NUMBERS, step=NUMBERS, parent_version=st.none() | NUMBERS, weights_digest=NAMES, state=NAMES,
    num_live=NUMBERS,
)  # fmt: skip
PENDING = of(
    PendingStep, step=NUMBERS, parent_version=NUMBERS, group_ids=MANY, sample_ids=MANY, batch_digest=NAMES,
    published_version=st.none() | NUMBERS, published_digest=st.none() | NAMES,
)  # fmt: skip
MEMBER = of(
    BatchMember, group_id=NAMES, task_id=NAMES, rollout_id=NAMES, attempt_id=NAMES, member_index=NUMBERS, score=SCORE,
    trace=TRACE,
)  # fmt: skip
PLAN = of(
    BatchPlan, step=NUMBERS, parent_version=NUMBERS, group_ids=MANY, members=some(MEMBER), max_lag=NUMBERS,
)  # fmt: skip
EVALUATED = of(
    EvaluationResult, label=NAMES, version=NUMBERS, group_id=NAMES, task_id=NAMES, member_index=NUMBERS,
    attempt_id=st.none() | NAMES, outcome=st.sampled_from(Outcome), score=st.none() | SCORE, trace=st.none() | TRACE,
    artifact_digest=st.none() | NAMES,
)  # fmt: skip
PROGRESS = of(
    t.RunProgress, run_id=NAMES, next_step=NUMBERS, next_version=NUMBERS,
    checkpoints=some(of(t.CheckpointInfo, step=NUMBERS, digest=NAMES)), kept_batches=some(NUMBERS),
    newest_ready=st.none() | VERSION, newest=st.none() | VERSION, evaluating=some(NUMBERS), is_finished=st.booleans(),
)  # fmt: skip
TRAINER_CALL = st.one_of(
    st.just(t.ProgressCall()),
    of(t.VersionCall, version=NUMBERS),
    of(t.VersionAtStepCall, step=NUMBERS),
    of(t.PendingStepsCall, checkpoint_step=NUMBERS),
    of(t.NextBatchCall, step=NUMBERS, wait_s=TIMES),
    of(t.BeginStepCall, step=NUMBERS, parent_version=NUMBERS, group_ids=MANY, sample_ids=MANY, batch_digest=NAMES),
    of(t.PublishedCall, manifest=MANIFEST),
    of(t.LoadedCall, proof=PROOF),
    of(t.ReadyCall, version=NUMBERS),
    of(t.CheckpointedCall, step=NUMBERS, digest=NAMES),
    of(t.OrphanCall, version=NUMBERS, reason=NAMES),
    of(t.PinCall, version=NUMBERS, label=NAMES),
    of(t.UnpinCall, version=NUMBERS, label=NAMES),
    st.just(t.DeletableBatchesCall()),
    of(t.BatchDeletedCall, step=NUMBERS),
    st.just(t.DeletableVersionsCall()),
    of(t.VersionDeletedCall, version=NUMBERS),
    of(t.RoomCall, wait_s=TIMES),
    of(
        t.AdmitEvaluationCall, task_ids=MANY, version=NUMBERS, sampling=SAMPLING, label=NAMES,
        samples_per_task=st.integers(1, p.MAX_GRANTS), max_turns=st.none() | st.integers(1, p.MAX_GRANTS),
        priority=st.integers(-9, 9),
    ),
    of(t.EvaluationResultsCall, label=NAMES, wait_s=TIMES),
    of(t.EvaluationProgressCall, label=NAMES),
    of(t.AbandonCall, reason=NAMES),
    of(t.FinishCall, reason=NAMES),
    of(t.FailCall, reason=NAMES),
    of(t.CancelGroupCall, group_id=NAMES, reason=NAMES),
    of(t.CancelTaskCall, task_id=NAMES, reason=NAMES),
)  # fmt: skip
CALL = TRAINER_CALL | st.one_of(
    of(p.LeaseCall, max_leases=st.integers(1, p.MAX_GRANTS), wait_s=TIMES, unstarted=MANY),
    of(p.StartCall, attempt_id=NAMES, attempt_number=NUMBERS),
    of(p.HeartbeatCall, attempt_ids=MANY),
    of(p.ArtifactReadyCall, report=REPORT),
    of(p.AttemptFailedCall, failure=FAILURE),
    of(p.LeaseScoresCall, max_jobs=st.integers(1, p.MAX_GRANTS), wait_s=TIMES, held=MANY),
    of(p.ScoreCall, score=SCORE),
    of(p.ArtifactLostCall, attempt_id=NAMES, detail=NAMES),
)
TRAINER_RESULT = st.one_of(
    of(t.Progress, progress=PROGRESS),
    of(t.KnownVersion, version=st.none() | VERSION),
    of(t.PendingSteps, steps=some(PENDING)),
    of(t.Batch, plan=st.none() | PLAN, missing=MANY),
    of(t.Numbers, numbers=some(NUMBERS)),
    of(t.Room, is_free=st.booleans(), missing=MANY),
    of(t.Groups, group_ids=MANY),
    of(t.Evaluated, results=st.none() | some(EVALUATED), missing=MANY),
    of(t.EvaluationProgress, num_closed=NUMBERS, num_groups=NUMBERS),
    of(t.Ended, num_attempts=NUMBERS),
)
RESULT = TRAINER_RESULT | st.one_of(
    st.just(p.Done()),
    of(p.Leased, leases=st.lists(LEASE, max_size=2).map(tuple)),
    of(p.Lost, attempt_ids=MANY),
    of(p.Jobs, jobs=st.lists(JOB, max_size=2).map(tuple)),
    of(Failed, kind=NAMES, reason=NAMES, message=NAMES),
)
NUMBERED = of(p.NumberedCall, sequence=NUMBERS, call=CALL)
REQUEST = of(
    p.CallRequest,
    session_id=NAMES,
    answered_below=NUMBERS,
    calls=st.lists(NUMBERED, min_size=1, max_size=4).map(tuple),
)
REPLY = of(p.CallReply, answers=st.lists(of(p.Answer, sequence=NUMBERS, result=RESULT), max_size=4).map(tuple))


@given(request=REQUEST)
def test_every_request_survives_the_wire(request: p.CallRequest) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=p.CallRequest) == request


@given(reply=REPLY)
def test_every_reply_survives_the_wire(reply: p.CallReply) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=p.CallReply) == reply


def request_of(**call: Any) -> dict[str, Any]:
    return {"session_id": "s", "answered_below": 0, "calls": [{"sequence": 0, "call": call}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (request_of(call="lease", max_leases=0, wait_s=1.0), "max_leases"),
        (request_of(call="lease", max_leases=p.MAX_GRANTS + 1, wait_s=1.0), "max_leases"),
        (request_of(call="lease", max_leases=1, wait_s=-1.0), "wait_s"),
        (request_of(call="start", attempt_id="", attempt_number=1), "attempt_id"),
        (request_of(call="start", attempt_id="a" * 201, attempt_number=1), "attempt_id"),
        (request_of(call="start", attempt_id="a", attempt_number="1"), "attempt_number"),
        (request_of(call="start", attempt_id="a", attempt_number=1, worker_id="w"), "worker_id"),
        (request_of(call="stop"), "stop"),
        (request_of(call="next_batch", step=-1, wait_s=1.0), "step"),
        (request_of(call="next_batch", step=2**53, wait_s=1.0), "step"),
        (request_of(call="finish", reason="x" * 2001), "reason"),
        (request_of(call="pin", version=0, label=""), "label"),
        ({**request_of(call="heartbeat", attempt_ids=[]), "answered_below": -1}, "answered_below"),
        ({"session_id": "s", "answered_below": 0, "calls": []}, "calls"),
    ],
)
def test_a_body_that_is_no_request_is_refused_with_its_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=p.CallRequest)


def test_more_calls_than_a_request_holds_are_refused() -> None:
    calls = request_of(call="heartbeat", attempt_ids=[])["calls"] * (p.MAX_CALLS + 1)
    body = {"session_id": "s", "answered_below": 0, "calls": calls}
    with pytest.raises(msgspec.ValidationError, match=f"length <= {p.MAX_CALLS}"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=p.CallRequest)


TRACE_RECORD = SealedTrace(
    attempt_id="a", digest="d", num_turns=1, num_tokens=1, oldest_version=0, newest_version=0, mean_version=0.0,
    num_segments=1, end_reason=EndReason.SUBMITTED,
)  # fmt: skip
REPORT_RECORD = ArtifactReport(attempt_id="a", attempt_number=1, trace=TRACE_RECORD, artifact_digest="d")
FAILURE_RECORD = AttemptFailure(attempt_id="a", attempt_number=1, outcome=Outcome.TIMED_OUT, reason="r")
SCORE_RECORD = Score(job_id="j", attempt_id="a", outcome=Outcome.SCORED, value=math.nan, verifier_version="v")
MANIFEST_RECORD = make_manifest(0, 0, None)
PROOF_RECORD = make_proof(MANIFEST_RECORD)
replaced = msgspec.structs.replace


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (p.LeaseCall(max_leases=1, wait_s=math.inf), "wait_s"),
        (p.LeaseScoresCall(max_jobs=1, wait_s=math.nan), "wait_s"),
        (p.ArtifactReadyCall(report=replaced(REPORT_RECORD, trace=replaced(TRACE_RECORD, mean_version=math.nan))),
         "report.trace.mean_version"),
        (p.ArtifactReadyCall(report=replaced(REPORT_RECORD, trace=replaced(TRACE_RECORD, num_tokens=-1))),
         "report.trace.num_tokens"),
        (p.AttemptFailedCall(failure=replaced(FAILURE_RECORD, outcome=Outcome.SCORED)), "failure.outcome"),
        (p.ScoreCall(score=replaced(SCORE_RECORD, duration_s=math.inf)), "score.duration_s"),
        (t.NextBatchCall(step=0, wait_s=math.inf), "wait_s"),
        (t.RoomCall(wait_s=math.nan), "wait_s"),
        (t.EvaluationResultsCall(label="a", wait_s=math.inf), "wait_s"),
        (t.PublishedCall(manifest=replaced(MANIFEST_RECORD, version=-1)), "manifest.version"),
        (t.PublishedCall(manifest=replaced(MANIFEST_RECORD, step=2**53)), "manifest.step"),
        (t.PublishedCall(manifest=replaced(MANIFEST_RECORD, files=(FileDigest(name="a", num_bytes=-1, digest="d"),))),
         "manifest.files.num_bytes"),
        (t.LoadedCall(proof=replaced(PROOF_RECORD, probe_max_error=math.nan)), "proof.probe_max_error"),
        (t.LoadedCall(proof=replaced(PROOF_RECORD, loaded_in_s=math.inf)), "proof.loaded_in_s"),
        (t.AdmitEvaluationCall(task_ids=("a",), version=0, sampling=Sampling(top_p=math.nan), label="l"),
         "sampling.top_p"),
    ],
)  # fmt: skip
def test_a_number_that_the_journal_could_not_keep_is_bad_input(call: p.Call, field: str) -> None:
    with pytest.raises(InputError, match=field):
        p.check(call)


def test_a_score_that_is_no_number_is_for_the_coordinator_to_judge() -> None:
    p.check(p.ScoreCall(score=SCORE_RECORD))


def test_every_call_belongs_to_exactly_one_role() -> None:
    calls = [kind for kinds in p.CALLS_OF.values() for kind in kinds]
    assert len(calls) == len(set(calls)) == len(get_args(p.Call)) == 34


def test_the_document_names_every_call_result_status_and_field() -> None:
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    unions = [*get_args(p.Call), *get_args(p.Result)]
    carried = [Lease, Sampling, ArtifactReport, SealedTrace, AttemptFailure, ScoreJob, Score, Manifest, FileDigest]
    carried += [ParameterDigest, Probe, LoadProof, VersionInfo, PendingStep, BatchPlan, BatchMember, EvaluationResult]
    carried += [t.RunProgress, t.CheckpointInfo]
    records = [*unions, p.CallRequest, p.NumberedCall, p.CallReply, p.Answer, *carried]
    names = {field.name for record in records for field in msgspec.structs.fields(record)}
    tags = {f"`{record.__struct_config__.tag}`" for record in unions}
    enums = {str(member) for kind in (Outcome, EndReason, Purpose) for member in kind}
    missing = {name for name in names | enums if not re.search(rf"\b{name}\b", text)}
    assert not missing | {tag for tag in tags if tag not in text}
    assert f"Version **{p.PROTOCOL_VERSION}**" in text
    assert p.VERSION_HEADER in text
