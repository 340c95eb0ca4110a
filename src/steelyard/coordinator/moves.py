"""Look-ups and moves that the event handlers share."""

import math

from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import MAX_ENDED_ATTEMPTS, Group, Rollout, State, Version
from steelyard.coordinator.transitions import (
    HELD,
    ROLLOUT_TABLE,
    TERMINAL,
    GroupState,
    RolloutState,
    VersionState,
    next_state,
)
from steelyard.errors import IllegalTransition


def require(holds: bool, event: e.Event, message: str) -> None:
    """Refuse ``event`` with ``message`` unless it holds.

    Raises:
        IllegalTransition: it does not hold.
    """
    if not holds:
        raise IllegalTransition(f"{e.kind_of(event)}: {message}")


def find_attempt(state: State, event: e.Event, attempt_id: str) -> Rollout:
    """The rollout whose newest attempt this is; IllegalTransition otherwise."""
    rollout = state.attempts.get(attempt_id)
    if rollout is None:
        was = state.ended_attempts.get(attempt_id)
        raise IllegalTransition(
            f"{e.kind_of(event)}: {attempt_id} must be the newest attempt of a rollout, "
            f"got {'an ended attempt' if was else 'an unknown attempt'}"
        )
    return rollout


def find_rollout(state: State, event: e.Event, rollout_id: str) -> Rollout:
    """The rollout of a group that is still remembered; IllegalTransition otherwise."""
    rollout = state.rollouts.get(rollout_id)
    if rollout is None:
        raise IllegalTransition(f"{e.kind_of(event)}: unknown or closed rollout {rollout_id}")
    return rollout


def find_group(state: State, event: e.Event, group_id: str) -> Group:
    """The group, if it is still remembered; IllegalTransition otherwise."""
    group = state.groups.get(group_id)
    if group is None:
        raise IllegalTransition(f"{e.kind_of(event)}: unknown or closed group {group_id}")
    return group


def find_version(state: State, event: e.Event, version: int) -> Version:
    """The published version; IllegalTransition otherwise."""
    found = state.versions.get(version)
    if found is None:
        raise IllegalTransition(f"{e.kind_of(event)}: version {version} was never published")
    return found


def find_ready(state: State, event: e.Event, version: int) -> Version:
    """The version, which must be READY; IllegalTransition otherwise."""
    found = find_version(state, event, version)
    require(found.state is VersionState.READY, event, f"version {version} must be READY, is {found.state}")
    return found


def find_served(state: State, event: e.Event, version: int) -> Version:
    """The version, which must be READY and held by a live replica; IllegalTransition otherwise."""
    found = find_ready(state, event, version)
    require(state.is_served(version), event, f"a live replica that takes attempts must hold version {version}")
    return found


def move_rollout(state: State, rollout: Rollout, event: e.Event) -> RolloutState:
    """Move one rollout and keep the counts that depend on its state; returns the state that it left."""
    target = next_state(ROLLOUT_TABLE, rollout.state, event, f"rollout {rollout.rollout_id}")
    was = rollout.state
    if was in HELD and target not in HELD:
        state.versions[rollout.policy_version or 0].num_live -= 1
    if target in TERMINAL and was not in TERMINAL:
        rollout.group.num_open -= 1
        rollout.group.num_accepted += target is RolloutState.ACCEPTED
    rollout.state = target
    rollout.since_s = event.at_s
    rollout.changed = state.num_events + 1
    return was


def end_attempt(state: State, rollout: Rollout, why: str) -> tuple[fx.Effect, ...]:
    """Forget the newest attempt but for its id and ``why`` (``late`` or ``expired``) its messages are refused."""
    if rollout.attempt_id is None:
        return ()
    state.attempts.pop(rollout.attempt_id, None)
    state.ended_attempts[rollout.attempt_id] = why
    if len(state.ended_attempts) > MAX_ENDED_ATTEMPTS:
        oldest = next(iter(state.ended_attempts))
        del state.ended_attempts[oldest]
        state.failed_attempts.pop(oldest, None)
    return (fx.AttemptEnded(rollout.attempt_id),)


def forget_rollouts(state: State, group: Group) -> int:
    """Forget the rollouts of a group, and their attempts but for their ids. Returns their number.

    The group lets go of them, so that no circle is left for which the whole heap would have to be searched.
    """
    rollouts, group.rollouts = group.rollouts, []
    for rollout in rollouts:
        del state.rollouts[rollout.rollout_id]
        if rollout.attempt_id in state.attempts:
            end_attempt(state, rollout, "late")
    return len(rollouts)


def index_group(state: State, group: Group) -> None:
    """Note how a live group stands now; whoever changes that takes it out of ``state.standing`` before."""
    oldest = oldest_step(state, group) if group.state is GroupState.COMPLETE else math.inf
    state.standing.put_in(group, oldest)


def oldest_step(state: State, group: Group) -> float:
    """The step of the oldest version that sampled a token of an accepted member; infinite where none has a trace."""
    reports = [rollout.report for rollout in group.accepted()]
    steps = [state.versions[report.trace.oldest_version].step for report in reports if report is not None]
    return min(steps, default=math.inf)


def forget_group(state: State, group: Group) -> None:
    """Forget a closed group; only counts and attempt ids remain."""
    forget_rollouts(state, group)
    del state.groups[group.group_id]
    state.live_groups.pop(group.group_id, None)


def open_rollouts(state: State, group: Group, rollout_ids: tuple[str, ...], at_s: float) -> tuple[fx.Effect, ...]:
    """Give an OPEN group its (new) rollouts, all PENDING."""
    number = state.num_events + 1
    group.rollouts = [
        Rollout(rollout_id=rollout_id, group=group, member_index=index, since_s=at_s, changed=number)
        for index, rollout_id in enumerate(rollout_ids)
    ]
    group.num_open, group.num_accepted = len(rollout_ids), 0
    for rollout in group.rollouts:
        state.rollouts[rollout.rollout_id] = rollout
    return tuple(fx.WorkWaits(rollout_id, group.order, False, 0.0) for rollout_id in rollout_ids)


def accepted_tokens(group: Group) -> int:
    """Sampled tokens in the sealed traces of accepted members."""
    return sum(rollout.sealed_tokens for rollout in group.accepted())


def require_new_rollouts(state: State, event: e.Event, rollout_ids: tuple[str, ...]) -> None:
    """Refuse rollout ids that are in use, repeated or none at all."""
    fresh = len(set(rollout_ids)) == len(rollout_ids) > 0 and not any(r in state.rollouts for r in rollout_ids)
    require(fresh, event, f"rollout_ids must be new and distinct, got {rollout_ids}")
