"""Handlers of the events of replicas: what each holds, and what it goes over to."""

from typing import TypeAlias

from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.entities import Replica, State
from steelyard.coordinator.moves import find_version, require
from steelyard.coordinator.transitions import REPLICA_TABLE, ReplicaState, VersionState, next_state
from steelyard.errors import IllegalTransition

_ReplicaEvent: TypeAlias = (
    e.ReplicaStarted | e.ReplicaDraining | e.ReplicaLoading | e.ReplicaUnloaded | e.ReplicaRefused | e.ReplicaDown
)


def _move(replica: Replica, event: _ReplicaEvent) -> None:
    replica.state = next_state(REPLICA_TABLE, replica.state, event, f"replica {replica.replica_id}")
    replica.since_s = event.at_s


def _find(state: State, event: _ReplicaEvent) -> Replica:
    found = state.replicas.get(event.replica_id)
    if found is None:
        raise IllegalTransition(f"{e.kind_of(event)}: replica {event.replica_id} was never started")
    return found


def replica_started(state: State, event: e.ReplicaStarted) -> tuple[fx.Effect, ...]:
    replica = state.replicas.get(event.replica_id) or Replica(replica_id=event.replica_id, state=ReplicaState.DOWN)
    _move(replica, event)
    state.replicas[event.replica_id] = replica
    return (fx.ReplicaChanged(event.replica_id),)


def replica_draining(state: State, event: e.ReplicaDraining) -> tuple[fx.Effect, ...]:
    find_version(state, event, event.version)
    replica = _find(state, event)
    _move(replica, event)
    replica.goal = event.version
    return (fx.ReplicaChanged(event.replica_id),)


def replica_loading(state: State, event: e.ReplicaLoading) -> tuple[fx.Effect, ...]:
    version = find_version(state, event, event.version)
    stored = version.state not in (VersionState.DELETED, VersionState.ORPHANED)
    require(stored, event, f"version {event.version} must be stored and not given up, is {version.state}")
    replica = _find(state, event)
    require(event.version not in replica.held, event, f"replica {event.replica_id} holds version {event.version}")
    _move(replica, event)
    replica.goal = event.version
    return (fx.ReplicaChanged(event.replica_id),)


def replica_unloaded(state: State, event: e.ReplicaUnloaded) -> tuple[fx.Effect, ...]:
    replica = _find(state, event)
    require(event.version in replica.held, event, f"replica {event.replica_id} does not hold version {event.version}")
    _move(replica, event)
    replica.held.discard(event.version)
    return (fx.ReplicaChanged(event.replica_id),)


def replica_refused(state: State, event: e.ReplicaRefused) -> tuple[fx.Effect, ...]:
    replica = _find(state, event)
    same = replica.goal == event.version
    require(same, event, f"replica {event.replica_id} loads version {replica.goal}, not {event.version}")
    _move(replica, event)
    replica.held.clear()
    replica.goal = None
    replica.num_refused += 1
    return (fx.ReplicaChanged(event.replica_id),)


def replica_down(state: State, event: e.ReplicaDown) -> tuple[fx.Effect, ...]:
    replica = _find(state, event)
    _move(replica, event)
    replica.held.clear()
    replica.goal = None
    replica.num_down += 1
    return (fx.ReplicaChanged(event.replica_id),)
