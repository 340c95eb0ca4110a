"""Which groups, with their rollouts, an event is about to change: what a snapshot must have read before it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steelyard.coordinator import events as e
from steelyard.coordinator.entities import Group, Rollout, State

_Find = Callable[[State, Any], Sequence[Group | None]]


def touched_groups(state: State, event: e.AnyEvent) -> Sequence[Group | None]:
    """The groups that ``apply`` would change in place, read before it does; None for one that there is not."""
    return _TOUCHED[type(event)](state, event)


def _none(_state: State, _event: e.AnyEvent) -> Sequence[Group | None]:
    return ()


def _group_of(rollout: Rollout | None) -> Sequence[Group | None]:
    return () if rollout is None else (rollout.group,)


def _of_rollout(state: State, event: Any) -> Sequence[Group | None]:
    return _group_of(state.rollouts.get(event.rollout_id))


def _of_attempt(state: State, event: Any) -> Sequence[Group | None]:
    return _group_of(state.attempts.get(event.attempt_id))


def _of_group(state: State, event: Any) -> Sequence[Group | None]:
    return (state.groups.get(event.group_id),)


def _of_groups(state: State, event: e.StepBegun) -> Sequence[Group | None]:
    return [state.groups.get(group_id) for group_id in event.group_ids]


def _of_step(state: State, event: e.StepVoided) -> Sequence[Group | None]:
    step = state.steps.get(event.step)
    return () if step is None else [state.groups.get(group_id) for group_id in step.group_ids]


def _of_steps(state: State, _event: e.AnyEvent) -> Sequence[Group | None]:
    """All that a checkpoint may forget: which of them it does is not for us to say."""
    return [state.groups.get(group_id) for step in state.steps.values() for group_id in step.group_ids]


_TOUCHED: Mapping[type[e.Event], _Find] = {
    e.RunStarted: _none,
    e.RunResumed: _none,
    e.RunFinished: _none,
    e.GroupAdmitted: _none,
    e.GroupCompleted: _of_group,
    e.GroupEvaluated: _of_group,
    e.GroupDropped: _of_group,
    e.GroupParked: _of_group,
    e.GroupRestarted: _of_group,
    e.Leased: _of_rollout,
    e.Running: _of_attempt,
    e.ArtifactReady: lambda state, event: _group_of(state.attempts.get(event.report.attempt_id)),
    e.Scored: lambda state, event: _group_of(state.attempts.get(event.score.attempt_id)),
    e.GraderFailed: _of_attempt,
    e.InfraFailed: _of_attempt,
    e.LeaseExpired: _of_attempt,
    e.RolloutRetried: _of_rollout,
    e.RolloutCancelled: _of_rollout,
    e.Accepted: _of_attempt,
    e.Rejected: _of_attempt,
    e.StepBegun: _of_groups,
    e.StepVoided: _of_step,
    e.Checkpointed: _of_steps,
    e.BatchDeleted: _none,
    e.VersionPublished: _none,
    e.VersionLoaded: _none,
    e.VersionReady: _none,
    e.VersionReleased: _none,
    e.VersionDeleted: _none,
    e.VersionOrphaned: _none,
    e.VersionPinned: _none,
    e.VersionUnpinned: _none,
    e.ReplicaStarted: _none,
    e.ReplicaDraining: _none,
    e.ReplicaLoading: _none,
    e.ReplicaUnloaded: _none,
    e.ReplicaRefused: _none,
    e.ReplicaDown: _none,
}
