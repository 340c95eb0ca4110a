"""Handlers of the events of rollouts and attempts."""

from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import FailedAttempt, State
from steelyard.coordinator.moves import end_attempt, find_attempt, find_rollout, find_served, move_rollout, require
from steelyard.coordinator.transitions import HELD, ROLLOUT_TABLE, RolloutState, next_state
from steelyard.digests import digest_bytes
from steelyard.types import Outcome


def leased(state: State, event: e.Leased) -> tuple[fx.Effect, ...]:
    rollout = find_rollout(state, event, event.rollout_id)
    is_new = event.attempt_id not in state.attempts and event.attempt_id not in state.ended_attempts
    require(is_new, event, f"attempt {event.attempt_id} exists")
    number = rollout.attempt_number + 1
    require(event.attempt_number == number, event, f"attempt_number must be {number}, got {event.attempt_number}")
    bound = rollout.group.bound_version
    require(bound in (None, event.policy_version), event, f"policy_version must be {bound}, got {event.policy_version}")
    version = find_served(state, event, event.policy_version)
    move_rollout(state, rollout, event)
    version.num_live += 1
    rollout.attempt_id, rollout.attempt_number = event.attempt_id, number
    rollout.worker_id, rollout.policy_version = event.worker_id, event.policy_version
    rollout.issued_at_s, rollout.expires_at_s = event.at_s, event.expires_at_s
    rollout.num_grader_failures = 0
    rollout.report = rollout.score = None
    state.attempts[event.attempt_id] = rollout
    state.tallies.num_leased += 1
    return (fx.AttemptBegan(event.attempt_id, event.expires_at_s),)


def running(state: State, event: e.Running) -> tuple[fx.Effect, ...]:
    move_rollout(state, find_attempt(state, event, event.attempt_id), event)
    return ()


def artifact_ready(state: State, event: e.ArtifactReady) -> tuple[fx.Effect, ...]:
    report = event.report
    rollout = find_attempt(state, event, report.attempt_id)
    number = rollout.attempt_number
    require(report.attempt_number == number, event, f"attempt_number must be {number}, got {report.attempt_number}")
    same = report.trace.attempt_id == report.attempt_id
    require(same, event, f"the trace must be of {report.attempt_id}, is of {report.trace.attempt_id}")
    move_rollout(state, rollout, event)
    rollout.report = report
    rollout.num_tokens += report.trace.num_tokens
    return (fx.AttemptEnded(report.attempt_id), fx.ScoreWaits(report.attempt_id))


def scored(state: State, event: e.Scored) -> tuple[fx.Effect, ...]:
    rollout = find_attempt(state, event, event.score.attempt_id)
    expected = rollout.report.artifact_digest if rollout.report else None
    require(event.score.outcome is Outcome.SCORED, event, f"outcome must be scored, got {event.score.outcome}")
    next_state(ROLLOUT_TABLE, rollout.state, event, f"rollout {rollout.rollout_id}")
    same = event.artifact_digest == expected
    require(same, event, f"artifact_digest must be {expected}, got {event.artifact_digest}")
    move_rollout(state, rollout, event)
    rollout.score = event.score
    state.tallies.num_scored += 1
    return ()


def grader_failed(state: State, event: e.GraderFailed) -> tuple[fx.Effect, ...]:
    rollout = find_attempt(state, event, event.attempt_id)
    move_rollout(state, rollout, event)
    rollout.num_grader_failures += 1
    rollout.last_outcome = event.outcome
    state.tallies.num_grader_failed += 1
    return (fx.ScoreWaits(event.attempt_id),)


def infra_failed(state: State, event: e.InfraFailed) -> tuple[fx.Effect, ...]:
    rollout = find_attempt(state, event, event.attempt_id)
    was = move_rollout(state, rollout, event)
    is_sealed = was is RolloutState.ARTIFACT_READY
    state.tokens.lost[event.reason] += rollout.sealed_tokens if is_sealed else event.lost_tokens
    rollout.num_tokens += 0 if is_sealed else event.lost_tokens
    rollout.num_failures += event.is_counted
    rollout.last_outcome = event.outcome
    rollout.report = None
    state.tallies.num_failed += event.is_counted
    state.failed_attempts[event.attempt_id] = FailedAttempt(
        attempt_number=rollout.attempt_number,
        worker_id=rollout.worker_id or "",
        content_digest=failure_digest(event.outcome, event.reason, event.detail),
    )
    return end_attempt(state, rollout, "late")


def failure_digest(outcome: Outcome, reason: str, detail: str) -> str:
    """What two reports of one failure have in common."""
    return digest_bytes("\0".join((outcome, reason, detail)).encode())


def lease_expired(state: State, event: e.LeaseExpired) -> tuple[fx.Effect, ...]:
    rollout = find_attempt(state, event, event.attempt_id)
    move_rollout(state, rollout, event)
    state.tokens.lost["lease_expired"] += event.lost_tokens
    rollout.num_tokens += event.lost_tokens
    rollout.num_failures += 1
    rollout.last_outcome = Outcome.TIMED_OUT
    state.tallies.num_expired += 1
    return end_attempt(state, rollout, "expired")


def rollout_retried(state: State, event: e.RolloutRetried) -> tuple[fx.Effect, ...]:
    rollout = find_rollout(state, event, event.rollout_id)
    move_rollout(state, rollout, event)
    rollout.not_before_s = event.not_before_s
    return (fx.WorkWaits(rollout.rollout_id, rollout.group.order, True, event.not_before_s),)


def rollout_cancelled(state: State, event: e.RolloutCancelled) -> tuple[fx.Effect, ...]:
    rollout = find_rollout(state, event, event.rollout_id)
    was = move_rollout(state, rollout, event)
    rollout.cancelled_for = event.reason
    if was in HELD:
        state.tokens.lost[event.reason] += event.lost_tokens
        rollout.num_tokens += event.lost_tokens
    elif was is RolloutState.ARTIFACT_READY:
        state.tokens.rejected[event.reason] += rollout.sealed_tokens
    rollout.report = None
    return end_attempt(state, rollout, "late") if was in HELD else ()


def accepted(state: State, event: e.Accepted) -> tuple[fx.Effect, ...]:
    move_rollout(state, find_attempt(state, event, event.attempt_id), event)
    return ()


def rejected(state: State, event: e.Rejected) -> tuple[fx.Effect, ...]:
    rollout = find_attempt(state, event, event.attempt_id)
    move_rollout(state, rollout, event)
    state.tokens.rejected[event.reason.value] += rollout.sealed_tokens
    return ()
