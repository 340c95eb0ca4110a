"""Handlers of the events of the run and of groups."""

from typing import TypeAlias

from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import Evaluation, Group, MemberResult, Run, State
from steelyard.coordinator.moves import (
    accepted_tokens,
    find_group,
    find_ready,
    forget_group,
    forget_rollouts,
    index_group,
    open_rollouts,
    require,
    require_new_rollouts,
)
from steelyard.coordinator.transitions import GROUP_TABLE, next_state
from steelyard.types import Outcome, Purpose

_Closing: TypeAlias = e.GroupCompleted | e.GroupDropped | e.GroupParked | e.GroupRestarted | e.GroupEvaluated


def run_started(state: State, event: e.RunStarted) -> tuple[fx.Effect, ...]:
    require(state.run is None, event, "the run has started already")
    state.run = Run(
        run_id=event.run_id,
        seed=event.seed,
        config_digest=event.config_digest,
        rules=event.rules,
        started_at_s=event.at_s,
    )
    return ()


def run_resumed(state: State, event: e.RunResumed) -> tuple[fx.Effect, ...]:
    run = state.run
    assert run is not None
    run.is_finished, run.rules, run.config_digest = False, event.rules, event.config_digest
    run.num_resumes += 1
    return ()


def run_finished(state: State, event: e.RunFinished) -> tuple[fx.Effect, ...]:
    require(not state.live_groups, event, f"all groups must be closed, {len(state.live_groups)} are live")
    assert state.run is not None
    state.run.is_finished = True
    return ()


def group_admitted(state: State, event: e.GroupAdmitted) -> tuple[fx.Effect, ...]:
    require(event.group_id not in state.groups, event, f"group {event.group_id} exists")
    require_new_rollouts(state, event, event.rollout_ids)
    is_known = abs(event.priority) <= e.MAX_PRIORITY
    require(is_known, event, f"priority must be from -{e.MAX_PRIORITY} to {e.MAX_PRIORITY}, got {event.priority}")
    is_train = event.purpose is Purpose.TRAIN
    if is_train:
        at = event.stream_position
        require(at == state.next_position, event, f"stream_position must be {state.next_position}, got {at}")
    else:
        whole = event.label is not None and event.bound_version is not None
        require(whole, event, "an evaluation group needs label and bound_version")
        find_ready(state, event, event.bound_version if event.bound_version is not None else -1)
    admitted = find_ready(state, event, event.admitted_version)
    group = Group(
        group_id=event.group_id,
        task_id=event.task_id,
        task_index=event.task_index,
        stream_position=event.stream_position,
        purpose=event.purpose,
        label=event.label,
        sampling=event.sampling,
        max_turns=event.max_turns,
        bound_version=event.bound_version,
        order=state.num_events + 1,
        admitted_version=event.admitted_version,
        admitted_step=admitted.step,
        admitted_at_s=event.at_s,
        priority=event.priority,
    )
    state.groups[group.group_id] = state.live_groups[group.group_id] = group
    index_group(state, group)
    if is_train:
        state.next_position += 1
        state.prompts.issued += 1
    else:
        evaluation = state.evaluations.setdefault(event.label or "", Evaluation(version=event.bound_version or 0))
        evaluation.task_of[group.group_id] = group.task_id
        evaluation.open_groups.add(group.group_id)
    return open_rollouts(state, group, event.rollout_ids, event.at_s)


def _close_group(state: State, event: _Closing) -> Group:
    """Check what all closings have in common; changes the group's state only, and takes it out of the index."""
    group = find_group(state, event, event.group_id)
    target = next_state(GROUP_TABLE, group.state, event, f"group {group.group_id}")
    require(group.num_open == 0, event, f"all rollouts of {group.group_id} must be terminal, {group.num_open} are not")
    is_train = group.purpose is Purpose.TRAIN
    allowed = isinstance(event, e.GroupDropped) or is_train is not isinstance(event, e.GroupEvaluated)
    require(allowed, event, f"group {group.group_id} is for {group.purpose}")
    if isinstance(event, e.GroupRestarted):
        require_new_rollouts(state, event, event.rollout_ids)
        find_ready(state, event, event.admitted_version)
    state.standing.take_out(group)
    group.state = target
    return group


def group_completed(state: State, event: e.GroupCompleted) -> tuple[fx.Effect, ...]:
    group = _close_group(state, event)
    index_group(state, group)
    return (fx.GroupChanged(group.group_id),)


def group_evaluated(state: State, event: e.GroupEvaluated) -> tuple[fx.Effect, ...]:
    group = _close_group(state, event)
    state.tokens.evaluated += accepted_tokens(group)
    evaluation = state.evaluations[group.label or ""]
    evaluation.open_groups.discard(group.group_id)
    evaluation.results[group.group_id] = [
        MemberResult(
            member_index=rollout.member_index,
            attempt_id=rollout.attempt_id,
            outcome=rollout.score.outcome if rollout.score else rollout.last_outcome or Outcome.CANCELLED,
            report=rollout.report,
            score=rollout.score,
        )
        for rollout in group.rollouts
    ]
    forget_group(state, group)
    return (fx.GroupChanged(group.group_id),)


def group_dropped(state: State, event: e.GroupDropped) -> tuple[fx.Effect, ...]:
    group = _close_group(state, event)
    state.tokens.rejected[event.reason.value] += accepted_tokens(group)
    if group.purpose is Purpose.TRAIN:
        state.prompts.dropped[event.reason] += 1
    else:
        evaluation = state.evaluations[group.label or ""]
        evaluation.open_groups.discard(group.group_id)
        del evaluation.task_of[group.group_id]
    forget_group(state, group)
    return (fx.GroupChanged(group.group_id),)


def group_parked(state: State, event: e.GroupParked) -> tuple[fx.Effect, ...]:
    group = _close_group(state, event)
    state.tokens.rejected[event.reason.value] += accepted_tokens(group)
    group.num_rollouts_parked = forget_rollouts(state, group)
    group.num_accepted = 0
    group.parked_for = event.reason
    index_group(state, group)
    return (fx.GroupChanged(group.group_id),)


def group_restarted(state: State, event: e.GroupRestarted) -> tuple[fx.Effect, ...]:
    group = _close_group(state, event)
    state.tokens.rejected[event.reason.value] += accepted_tokens(group)
    state.prompts.restarted += 1
    forget_rollouts(state, group)
    group.num_stale_restarts += event.reason is e.RestartReason.STALE
    group.parked_for = None
    group.order = state.num_events + 1
    group.admitted_version = event.admitted_version
    group.admitted_step = state.versions[event.admitted_version].step
    group.admitted_at_s = event.at_s
    index_group(state, group)
    return (*open_rollouts(state, group, event.rollout_ids, event.at_s), fx.GroupChanged(group.group_id))
