"""The coordinator's protocol over HTTP: records, names and limits. docs/protocol.md says how they are used.

One request carries up to ``MAX_CALLS`` calls and is answered with as many results, in order. A call is named by its
session and its sequence, so that it can be repeated until an answer arrives and has its effect once.
"""

import math
from collections.abc import Mapping
from typing import Annotated, TypeAlias, get_args

from msgspec import Meta

from steelyard.coordinator import protocol_fields
from steelyard.coordinator import trainer_calls as t
from steelyard.coordinator.capability import Role
from steelyard.coordinator.protocol_fields import Count, Id, Number, Seconds
from steelyard.errors import InputError
from steelyard.processes.http_failures import Failed
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Outcome, Record, Score, ScoreJob

PROTOCOL_VERSION = 2
VERSION_HEADER = "Steelyard-Protocol"
CONTENT_TYPE = "application/msgpack"
CALLS_PATH = "/v1/calls"
HEALTH_PATH = "/health"
MAX_CALLS = 32
"""Calls in one request."""
MAX_OPEN_CALLS = 1024
"""Calls of one session from the oldest that its client has no answer to, on."""
MAX_GRANTS = protocol_fields.MAX_GRANTS
"""Leases or jobs in one answer."""


class LeaseCall(Record, frozen=True, kw_only=True, tag_field="call", tag="lease"):
    """Up to ``max_leases`` attempts, at once where there is work, else within ``wait_s``.

    ``unstarted``: attempts that the worker got and whose ``start`` was not answered yet. Any other unstarted attempt
    that it holds was lost on its way, and is handed out again.
    """

    max_leases: Count
    wait_s: Seconds
    unstarted: tuple[Id, ...] = ()


class StartCall(Record, frozen=True, kw_only=True, tag_field="call", tag="start"):
    """The attempt runs now."""

    attempt_id: Id
    attempt_number: Number


class HeartbeatCall(Record, frozen=True, kw_only=True, tag_field="call", tag="heartbeat"):
    """Renew these leases."""

    attempt_ids: tuple[Id, ...]


class ArtifactReadyCall(Record, frozen=True, kw_only=True, tag_field="call", tag="artifact_ready"):
    """The attempt is done; its trace and artifact are durable."""

    report: ArtifactReport


class AttemptFailedCall(Record, frozen=True, kw_only=True, tag_field="call", tag="attempt_failed"):
    """The system could not carry the attempt through."""

    failure: AttemptFailure


class LeaseScoresCall(Record, frozen=True, kw_only=True, tag_field="call", tag="lease_scores"):
    """Up to ``max_jobs`` jobs, at once where there are some, else within ``wait_s``.

    ``held``: jobs that the scorer works on. Any other job that was given to it was lost on its way, and is handed
    out again.
    """

    max_jobs: Count
    wait_s: Seconds
    held: tuple[Id, ...] = ()


class ScoreCall(Record, frozen=True, kw_only=True, tag_field="call", tag="score"):
    """A verdict, or why there is none."""

    score: Score


class ArtifactLostCall(Record, frozen=True, kw_only=True, tag_field="call", tag="artifact_lost"):
    """The artifact of a job that the scorer holds cannot be read back."""

    attempt_id: Id
    detail: str


Call: TypeAlias = (
    LeaseCall
    | StartCall
    | HeartbeatCall
    | ArtifactReadyCall
    | AttemptFailedCall
    | LeaseScoresCall
    | ScoreCall
    | ArtifactLostCall
    | t.TrainerCall
    | t.OperatorCall
)
POLLS = (LeaseCall, LeaseScoresCall, *t.TRAINER_POLLS)
"""Calls that may wait. Withdrawn when nobody waits for their answer any more."""

CALLS_OF: Mapping[Role, tuple[type, ...]] = {
    Role.WORKER: (LeaseCall, StartCall, HeartbeatCall, ArtifactReadyCall, AttemptFailedCall),
    Role.SCORER: (LeaseScoresCall, ScoreCall, ArtifactLostCall),
    Role.TRAINER: get_args(t.TrainerCall),
    Role.OPERATOR: get_args(t.OperatorCall),
}
"""Who may make which call."""


class NumberedCall(Record, frozen=True, kw_only=True):
    """A call under its number, which its client gives out once for each logical call and repeats with it."""

    sequence: Number
    call: Call


class CallRequest(Record, frozen=True, kw_only=True):
    """``answered_below``: the client has the answers of all calls of the session with a smaller sequence."""

    session_id: Id
    answered_below: Number
    calls: Annotated[tuple[NumberedCall, ...], Meta(min_length=1, max_length=MAX_CALLS)]


class Done(Record, frozen=True, kw_only=True, tag_field="result", tag="done"):
    """The call had its effect, now or at an earlier try."""


DONE = Done()


class Leased(Record, frozen=True, kw_only=True, tag_field="result", tag="leased"):
    """Attempts to run; may be none."""

    leases: tuple[Lease, ...]


class Lost(Record, frozen=True, kw_only=True, tag_field="result", tag="lost"):
    """Attempts of a heartbeat that are no longer the worker's and must be stopped."""

    attempt_ids: tuple[str, ...]


class Jobs(Record, frozen=True, kw_only=True, tag_field="result", tag="jobs"):
    """Artifacts to score; may be none."""

    jobs: tuple[ScoreJob, ...]


Result: TypeAlias = Done | Leased | Lost | Jobs | Failed | t.TrainerResult


class Answer(Record, frozen=True, kw_only=True):
    """The result of the call with the same sequence."""

    sequence: int
    result: Result


class CallReply(Record, frozen=True, kw_only=True):
    """One answer for each call of the request, in its order."""

    answers: tuple[Answer, ...]


def check(call: Call) -> None:
    """What the types alone do not say.

    Raises:
        InputError: a number that cannot be kept, or an outcome that is none of this call. Names the field.
    """
    match call:
        case LeaseCall() | LeaseScoresCall() | t.NextBatchCall() | t.RoomCall() | t.EvaluationResultsCall():
            _require_finite("wait_s", call.wait_s)
        case ArtifactReadyCall(report=report):
            trace = report.trace
            _require_finite("report.trace.mean_version", trace.mean_version)
            for name in ("num_turns", "num_tokens", "num_segments", "oldest_version", "newest_version"):
                if getattr(trace, name) < 0:
                    raise InputError(f"report.trace.{name}: must be >= 0, got {getattr(trace, name)}")
        case AttemptFailedCall(failure=failure):
            if failure.outcome in {Outcome.SCORED, Outcome.GRADER_FAILED}:
                raise InputError(f"failure.outcome: must be a failure of an attempt, got {failure.outcome}")
        case ScoreCall(score=score):
            # The value itself may be anything: a score that is no number is a failed grading, not a bad message.
            _require_finite("score.duration_s", score.duration_s)
        case t.PublishedCall(manifest=manifest):
            _require_number("manifest.version", manifest.version)
            _require_number("manifest.step", manifest.step)
            for file in manifest.files:
                _require_number("manifest.files.num_bytes", file.num_bytes)
        case t.LoadedCall(proof=proof):
            _require_number("proof.version", proof.version)
            for name in ("probe_max_error", "probe_tolerance", "loaded_in_s"):
                _require_finite(f"proof.{name}", getattr(proof, name))
        case t.AdmitEvaluationCall(sampling=sampling):
            _require_finite("sampling.temperature", sampling.temperature)
            _require_finite("sampling.top_p", sampling.top_p)
        case _:
            pass


def _require_number(name: str, value: int) -> None:
    if not 0 <= value < 1 << 53:
        raise InputError(f"{name}: must be >= 0 and below 2**53, got {value}")


def _require_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InputError(f"{name}: must be a finite number, got {value}")
