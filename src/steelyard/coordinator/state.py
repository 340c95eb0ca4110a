"""The coordinator's state machine: ``apply(state, event) -> (state, effects)``.

Deterministic, without I/O or clock: the live service, its recovery, ``audit`` and the simulator run this same
function over the same events. A handler checks everything before it changes anything, so a refused event leaves
the state as it was.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from steelyard.coordinator import apply_groups, apply_replicas, apply_rollouts, apply_versions
from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import State
from steelyard.coordinator.moves import require
from steelyard.coordinator.transitions import HELD, RolloutState


def apply(state: State, event: e.AnyEvent) -> tuple[State, tuple[fx.Effect, ...]]:
    """Apply one event.

    The state is changed in place and returned; the caller must not keep the earlier one.

    Raises:
        IllegalTransition: the transition tables do not have it, or it contradicts what went before.
    """
    if not event.at_s >= state.at_s:  # without the message made ahead: printing two floats costs more than the rest
        require(False, event, f"at_s must not go back: {event.at_s} after {state.at_s}")
    if state.run is None:
        require(isinstance(event, e.RunStarted), event, "the first event must be RUN_STARTED")
    elif state.run.is_finished:
        require(isinstance(event, e.RunResumed), event, "after RUN_FINISHED only RUN_RESUMED may follow")
    effects = _HANDLERS[type(event)](state, event)
    state.at_s = event.at_s
    state.num_events += 1
    return state, effects


_HANDLERS: Mapping[type[e.Event], Callable[[State, Any], tuple[fx.Effect, ...]]] = {
    e.RunStarted: apply_groups.run_started,
    e.RunResumed: apply_groups.run_resumed,
    e.RunFinished: apply_groups.run_finished,
    e.GroupAdmitted: apply_groups.group_admitted,
    e.GroupCompleted: apply_groups.group_completed,
    e.GroupEvaluated: apply_groups.group_evaluated,
    e.GroupDropped: apply_groups.group_dropped,
    e.GroupParked: apply_groups.group_parked,
    e.GroupRestarted: apply_groups.group_restarted,
    e.Leased: apply_rollouts.leased,
    e.Running: apply_rollouts.running,
    e.ArtifactReady: apply_rollouts.artifact_ready,
    e.Scored: apply_rollouts.scored,
    e.GraderFailed: apply_rollouts.grader_failed,
    e.InfraFailed: apply_rollouts.infra_failed,
    e.LeaseExpired: apply_rollouts.lease_expired,
    e.RolloutRetried: apply_rollouts.rollout_retried,
    e.RolloutCancelled: apply_rollouts.rollout_cancelled,
    e.Accepted: apply_rollouts.accepted,
    e.Rejected: apply_rollouts.rejected,
    e.StepBegun: apply_versions.step_begun,
    e.StepVoided: apply_versions.step_voided,
    e.Checkpointed: apply_versions.checkpointed,
    e.BatchDeleted: apply_versions.batch_deleted,
    e.VersionPublished: apply_versions.version_published,
    e.VersionLoaded: apply_versions.version_loaded,
    e.VersionReady: apply_versions.version_ready,
    e.VersionReleased: apply_versions.version_released,
    e.VersionDeleted: apply_versions.version_deleted,
    e.VersionOrphaned: apply_versions.version_orphaned,
    e.VersionPinned: apply_versions.version_pinned,
    e.VersionUnpinned: apply_versions.version_unpinned,
    e.ReplicaStarted: apply_replicas.replica_started,
    e.ReplicaDraining: apply_replicas.replica_draining,
    e.ReplicaLoading: apply_replicas.replica_loading,
    e.ReplicaUnloaded: apply_replicas.replica_unloaded,
    e.ReplicaRefused: apply_replicas.replica_refused,
    e.ReplicaDown: apply_replicas.replica_down,
}


def outbox(state: State) -> Iterator[fx.Effect]:
    """The effects that still matter, derived from the state alone; emitted again on recovery."""
    for group in state.live_groups.values():
        for rollout in group.rollouts:
            if rollout.state is RolloutState.PENDING:
                is_retry = rollout.attempt_number > 0
                yield fx.WorkWaits(rollout.rollout_id, group.order, is_retry, rollout.not_before_s)
            elif rollout.attempt_id is not None and rollout.state in HELD:
                yield fx.AttemptBegan(rollout.attempt_id, rollout.expires_at_s)
            elif rollout.attempt_id is not None and rollout.state is RolloutState.ARTIFACT_READY:
                yield fx.ScoreWaits(rollout.attempt_id)
