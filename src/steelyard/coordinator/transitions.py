"""What can follow what. One table each for rollouts, groups and versions; whatever is not here is refused.

::

    PENDING -> LEASED -> RUNNING -> ARTIFACT_READY -> SCORED -> ACCEPTED -> CONSUMED
                 |          |             |   ^          `-> REJECTED
                 |          |             +---+ grader failed: score the same artifact again
                 +----------+-------------+-> INFRA_FAILED -> PENDING (new attempt) | CANCELLED
    group: OPEN -> COMPLETE -> CONSUMED | DROPPED;  OPEN -> EVALUATED
           given up, to be sampled again: OPEN | COMPLETE -> (PARKED ->) OPEN
    replica: DOWN -> SERVING -> (DRAINING ->) LOADING -> SERVING; refused or dead: DOWN
"""

import enum
from collections.abc import Mapping
from typing import TypeVar

from steelyard.coordinator import events as e
from steelyard.errors import IllegalTransition


class RolloutState(enum.StrEnum):
    """Where a rollout stands; the last four are terminal for its group."""

    PENDING = "PENDING"
    LEASED = "LEASED"
    RUNNING = "RUNNING"
    ARTIFACT_READY = "ARTIFACT_READY"
    SCORED = "SCORED"
    INFRA_FAILED = "INFRA_FAILED"
    ACCEPTED = "ACCEPTED"
    REJECTED = "REJECTED"
    CANCELLED = "CANCELLED"
    CONSUMED = "CONSUMED"


class GroupState(enum.StrEnum):
    """Where a group stands."""

    OPEN = "OPEN"
    COMPLETE = "COMPLETE"
    PARKED = "PARKED"
    CONSUMED = "CONSUMED"
    EVALUATED = "EVALUATED"
    DROPPED = "DROPPED"


class VersionState(enum.StrEnum):
    """Where a policy version stands."""

    PUBLISHED = "PUBLISHED"
    LOADED = "LOADED"
    READY = "READY"
    RELEASED = "RELEASED"
    ORPHANED = "ORPHANED"
    DELETED = "DELETED"


class ReplicaState(enum.StrEnum):
    """Where a replica stands. While LOADING it takes attempts for what it still holds."""

    DOWN = "DOWN"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    LOADING = "LOADING"


R, G, V, P = RolloutState, GroupState, VersionState, ReplicaState

ROLLOUT_TABLE: Mapping[tuple[RolloutState, type[e.Event]], RolloutState] = {
    (R.PENDING, e.Leased): R.LEASED,
    (R.LEASED, e.Running): R.RUNNING,
    (R.RUNNING, e.ArtifactReady): R.ARTIFACT_READY,
    (R.ARTIFACT_READY, e.GraderFailed): R.ARTIFACT_READY,
    (R.ARTIFACT_READY, e.Scored): R.SCORED,
    (R.SCORED, e.Accepted): R.ACCEPTED,
    (R.SCORED, e.Rejected): R.REJECTED,
    (R.ACCEPTED, e.StepBegun): R.CONSUMED,
    (R.CONSUMED, e.StepVoided): R.ACCEPTED,
    (R.LEASED, e.InfraFailed): R.INFRA_FAILED,
    (R.LEASED, e.LeaseExpired): R.INFRA_FAILED,
    (R.RUNNING, e.InfraFailed): R.INFRA_FAILED,
    (R.RUNNING, e.LeaseExpired): R.INFRA_FAILED,
    (R.ARTIFACT_READY, e.InfraFailed): R.INFRA_FAILED,
    (R.INFRA_FAILED, e.RolloutRetried): R.PENDING,
    (R.INFRA_FAILED, e.RolloutCancelled): R.CANCELLED,
    (R.PENDING, e.RolloutCancelled): R.CANCELLED,
    (R.LEASED, e.RolloutCancelled): R.CANCELLED,
    (R.RUNNING, e.RolloutCancelled): R.CANCELLED,
    (R.ARTIFACT_READY, e.RolloutCancelled): R.CANCELLED,
}

GROUP_TABLE: Mapping[tuple[GroupState, type[e.Event]], GroupState] = {
    (G.OPEN, e.GroupCompleted): G.COMPLETE,
    (G.OPEN, e.GroupEvaluated): G.EVALUATED,
    (G.OPEN, e.GroupDropped): G.DROPPED,
    (G.OPEN, e.GroupRestarted): G.OPEN,
    (G.OPEN, e.GroupParked): G.PARKED,
    (G.COMPLETE, e.StepBegun): G.CONSUMED,
    (G.COMPLETE, e.GroupDropped): G.DROPPED,
    (G.COMPLETE, e.GroupRestarted): G.OPEN,
    (G.COMPLETE, e.GroupParked): G.PARKED,
    (G.PARKED, e.GroupRestarted): G.OPEN,
    (G.PARKED, e.GroupDropped): G.DROPPED,
    (G.CONSUMED, e.StepVoided): G.COMPLETE,
}

VERSION_TABLE: Mapping[tuple[VersionState, type[e.Event]], VersionState] = {
    (V.PUBLISHED, e.VersionLoaded): V.LOADED,
    (V.LOADED, e.VersionLoaded): V.LOADED,
    (V.READY, e.VersionLoaded): V.READY,
    (V.RELEASED, e.VersionLoaded): V.LOADED,
    (V.LOADED, e.VersionReady): V.READY,
    (V.PUBLISHED, e.VersionReleased): V.RELEASED,
    (V.LOADED, e.VersionReleased): V.RELEASED,
    (V.READY, e.VersionReleased): V.RELEASED,
    (V.RELEASED, e.VersionDeleted): V.DELETED,
    (V.ORPHANED, e.VersionDeleted): V.DELETED,
    (V.PUBLISHED, e.VersionOrphaned): V.ORPHANED,
    (V.LOADED, e.VersionOrphaned): V.ORPHANED,
    (V.READY, e.VersionOrphaned): V.ORPHANED,
    (V.RELEASED, e.VersionOrphaned): V.ORPHANED,
    (V.DELETED, e.VersionOrphaned): V.DELETED,
}

REPLICA_TABLE: Mapping[tuple[ReplicaState, type[e.Event]], ReplicaState] = {
    (P.DOWN, e.ReplicaStarted): P.SERVING,
    (P.SERVING, e.ReplicaDraining): P.DRAINING,
    (P.SERVING, e.ReplicaLoading): P.LOADING,
    (P.DRAINING, e.ReplicaLoading): P.LOADING,
    (P.SERVING, e.VersionLoaded): P.SERVING,
    (P.LOADING, e.VersionLoaded): P.SERVING,
    (P.SERVING, e.ReplicaUnloaded): P.SERVING,
    (P.DRAINING, e.ReplicaUnloaded): P.DRAINING,
    (P.LOADING, e.ReplicaUnloaded): P.LOADING,
    (P.LOADING, e.ReplicaRefused): P.DOWN,
    (P.SERVING, e.ReplicaDown): P.DOWN,
    (P.DRAINING, e.ReplicaDown): P.DOWN,
    (P.LOADING, e.ReplicaDown): P.DOWN,
}

TERMINAL = frozenset({R.ACCEPTED, R.REJECTED, R.CANCELLED, R.CONSUMED})
"""States in which a rollout no longer holds its group open."""

HELD = frozenset({R.LEASED, R.RUNNING})
"""States in which a worker holds an attempt of the rollout."""

_S = TypeVar("_S", bound=enum.StrEnum)


def next_state(table: Mapping[tuple[_S, type[e.Event]], _S], state: _S, event: e.Event, name: str) -> _S:
    """The state after ``event``.

    Raises:
        IllegalTransition: the table has no entry; names both the state and what the event would lead to.
    """
    target = table.get((state, type(event)))
    if target is None:
        kind = type(event)
        leads_to = sorted({str(to) for (_, what), to in table.items() if what is kind}) or ["nothing"]
        from_states = sorted({str(start) for (start, what) in table if what is kind})
        raise IllegalTransition(
            f"{e.kind_of(event)} would lead {name} from {state} to {' or '.join(leads_to)}; "
            f"it is allowed only from {', '.join(from_states) or 'no state'}"
        )
    return target
