"""Handlers of the events of optimizer steps and policy versions."""

from collections.abc import Mapping

from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import KEPT_CHECKPOINTS, Replica, Rollout, State, Step, Version
from steelyard.coordinator.moves import (
    accepted_tokens,
    find_group,
    find_version,
    forget_group,
    index_group,
    move_rollout,
    require,
)
from steelyard.coordinator.transitions import (
    GROUP_TABLE,
    REPLICA_TABLE,
    VERSION_TABLE,
    GroupState,
    VersionState,
    next_state,
)
from steelyard.errors import IllegalTransition


def step_begun(state: State, event: e.StepBegun) -> tuple[fx.Effect, ...]:
    require(event.step == state.next_step, event, f"step must be {state.next_step}, got {event.step}")
    parent = state.lineage.get(event.step)
    require(event.parent_version == parent, event, f"parent_version must be {parent}, got {event.parent_version}")
    groups = [find_group(state, event, group_id) for group_id in event.group_ids]
    require(len(set(event.group_ids)) == len(groups) > 0, event, "group_ids must be distinct, at least one")
    for group in groups:
        next_state(GROUP_TABLE, group.state, event, f"group {group.group_id}")
    members = [rollout for group in groups for rollout in group.accepted()]
    _require_samples(event, {rollout.attempt_id or "": rollout for rollout in members})
    for group in groups:
        state.standing.take_out(group)
        group.state = GroupState.CONSUMED
        del state.live_groups[group.group_id]
        state.tokens.trained += accepted_tokens(group)
    for rollout in members:
        move_rollout(state, rollout, event)
    state.prompts.trained += len(groups)
    state.steps[event.step] = Step(
        step=event.step,
        parent_version=event.parent_version,
        group_ids=event.group_ids,
        sample_ids=event.sample_ids,
        batch_digest=event.batch_digest,
        begun_at_s=event.at_s,
    )
    state.kept_batches.add(event.step)
    state.next_step += 1
    return tuple(fx.GroupChanged(group_id) for group_id in event.group_ids)


def _require_samples(event: e.StepBegun, members: Mapping[str, Rollout]) -> None:
    """The samples must be segments of accepted members, each once, and leave out no member with tokens."""
    seen: set[str] = set()
    for sample_id in event.sample_ids:
        attempt_id, _, segment = sample_id.rpartition("/")
        rollout = members.get(attempt_id)
        if rollout is None or rollout.report is None:
            raise IllegalTransition(f"STEP_BEGUN: sample {sample_id} must be of an accepted member of its groups")
        limit = rollout.report.trace.num_segments
        require(segment.isdecimal() and int(segment) < limit, event, f"{sample_id}: segment must be below {limit}")
        seen.add(attempt_id)
    require(len(set(event.sample_ids)) == len(event.sample_ids), event, "sample_ids must be distinct")
    missing = [name for name, rollout in members.items() if rollout.sealed_tokens and name not in seen]
    require(not missing, event, f"accepted members must be in the batch, missing {missing[:3]}")


def step_voided(state: State, event: e.StepVoided) -> tuple[fx.Effect, ...]:
    step = state.steps.get(event.step)
    require(event.step == state.next_step - 1, event, f"only the last step {state.next_step - 1} can be voided")
    if step is None:
        raise IllegalTransition(f"STEP_VOIDED: step {event.step} is covered by a checkpoint")
    orphaned = state.versions[step.parent_version].is_orphaned
    require(orphaned, event, f"its parent version {step.parent_version} must be ORPHANED")
    for group_id in step.group_ids:
        group = state.groups[group_id]
        group.state = next_state(GROUP_TABLE, group.state, event, f"group {group_id}")
        state.live_groups[group_id] = group
        state.tokens.trained -= accepted_tokens(group)
        for rollout in group.accepted():
            move_rollout(state, rollout, event)
        index_group(state, group)
    state.prompts.trained -= len(step.group_ids)
    del state.steps[event.step]
    state.kept_batches.discard(event.step)
    state.next_step -= 1
    return tuple(fx.GroupChanged(group_id) for group_id in step.group_ids)


def checkpointed(state: State, event: e.Checkpointed) -> tuple[fx.Effect, ...]:
    known = event.step in state.lineage
    require(known, event, f"no surviving version has step {event.step}")
    last = state.checkpoints[-1] if state.checkpoints else -1
    require(event.step >= last, event, f"step must not go back: {event.step} after {last}")
    if event.step != last:
        state.checkpoints = [*state.checkpoints, event.step][-KEPT_CHECKPOINTS:]
    state.checkpoint_digests[event.step] = event.digest
    state.checkpoint_digests = {step: state.checkpoint_digests[step] for step in state.checkpoints}
    for step in [step for step in state.steps if step < state.horizon_step]:
        for group_id in state.steps.pop(step).group_ids:
            forget_group(state, state.groups[group_id])
    return ()


def batch_deleted(state: State, event: e.BatchDeleted) -> tuple[fx.Effect, ...]:
    require(event.step in state.kept_batches, event, f"step {event.step} has no kept batch")
    covered = event.step < state.horizon_step
    require(covered, event, f"step {event.step} must be covered by each kept checkpoint, from {state.horizon_step} on")
    state.kept_batches.discard(event.step)
    return ()


def version_published(state: State, event: e.VersionPublished) -> tuple[fx.Effect, ...]:
    number = state.next_version()
    require(event.version == number, event, f"version must be {number}, the next unused, got {event.version}")
    if event.parent_version is None:
        require(event.step == 0 and not state.versions, event, "only version 0 at step 0 has no parent")
    else:
        parent = find_version(state, event, event.parent_version)
        survives = state.lineage.get(event.step - 1) == parent.version
        require(survives, event, f"parent {parent.version} must be the surviving version of step {event.step - 1}")
        begun = event.step <= state.next_step
        require(begun, event, f"step {event.step - 1} must have begun, next to begin is {state.next_step}")
    free = event.step not in state.lineage
    require(free, event, f"step {event.step} has the surviving version {state.lineage.get(event.step)}")
    state.versions[number] = Version(
        version=number,
        step=event.step,
        parent_version=event.parent_version,
        weights_digest=event.weights_digest,
        published_at_s=event.at_s,
        since_s=event.at_s,
    )
    state.lineage[event.step] = number
    state.unreleased.add(number)
    return (fx.VersionChanged(number),)


def _move_version(state: State, event: e.Event, number: int) -> Version:
    version = find_version(state, event, number)
    version.state = next_state(VERSION_TABLE, version.state, event, f"version {number}")
    version.since_s = event.at_s
    return version


def version_loaded(state: State, event: e.VersionLoaded) -> tuple[fx.Effect, ...]:
    proof = event.proof
    version = find_version(state, event, proof.version)
    same = proof.weights_digest == version.weights_digest
    require(same, event, f"weights_digest must be {version.weights_digest}, replica holds {proof.weights_digest}")
    close = proof.probe_max_error <= proof.probe_tolerance
    require(close, event, f"probe_max_error must be at most {proof.probe_tolerance}, got {proof.probe_max_error}")
    replica = state.replicas.get(proof.replica_id) or Replica(replica_id=proof.replica_id)
    target = next_state(REPLICA_TABLE, replica.state, event, f"replica {proof.replica_id}")
    wanted = replica.goal in (None, proof.version)
    require(wanted, event, f"replica {proof.replica_id} must load version {replica.goal}, proved {proof.version}")
    _move_version(state, event, proof.version)
    replica.state, replica.since_s, replica.goal = target, event.at_s, None
    replica.held.add(proof.version)
    state.replicas[proof.replica_id] = replica
    version.proofs.append(proof)
    state.unreleased.add(version.version)
    return (fx.VersionChanged(version.version),)


def version_ready(state: State, event: e.VersionReady) -> tuple[fx.Effect, ...]:
    return (fx.VersionChanged(_move_version(state, event, event.version).version),)


def version_released(state: State, event: e.VersionReleased) -> tuple[fx.Effect, ...]:
    version = find_version(state, event, event.version)
    require(version.num_live == 0, event, f"{version.num_live} live attempts sample from version {event.version}")
    _move_version(state, event, event.version)
    state.unreleased.discard(event.version)
    return (fx.VersionChanged(event.version),)


def version_deleted(state: State, event: e.VersionDeleted) -> tuple[fx.Effect, ...]:
    version = find_version(state, event, event.version)
    require(not version.labels, event, f"version {event.version} is pinned by {sorted(version.labels)}")
    _move_version(state, event, event.version)
    for replica in state.replicas.values():
        replica.held.discard(event.version)
    return (fx.VersionChanged(event.version),)


def version_orphaned(state: State, event: e.VersionOrphaned) -> tuple[fx.Effect, ...]:
    version = find_version(state, event, event.version)
    kept = version.step > (state.checkpoints[0] if state.checkpoints else 0)
    require(kept, event, f"version {event.version} of step {version.step} is held by a checkpoint or is the start")
    require(not version.is_orphaned, event, f"version {event.version} is ORPHANED already")
    _move_version(state, event, event.version)
    version.is_orphaned = True
    state.unreleased.discard(event.version)
    if state.lineage.get(version.step) == event.version:
        del state.lineage[version.step]
    state.checkpoints = [step for step in state.checkpoints if step < version.step]
    return (fx.VersionChanged(event.version),)


def version_pinned(state: State, event: e.VersionPinned) -> tuple[fx.Effect, ...]:
    version = find_version(state, event, event.version)
    exists = version.state is not VersionState.DELETED
    require(exists, event, f"version {event.version} must not be DELETED")
    version.labels.add(event.label)
    return ()


def version_unpinned(state: State, event: e.VersionUnpinned) -> tuple[fx.Effect, ...]:
    find_version(state, event, event.version).labels.discard(event.label)
    return (fx.VersionChanged(event.version),)
