"""What follows from an event outside the state: an outbox, derived again from the state after a recovery.

All are idempotent hints to look again; nothing is lost when one is delivered twice.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class WorkWaits:
    """A rollout can be leased, not before ``not_before_s``. Retries go first; then see ``leases``."""

    rollout_id: str
    order: int
    is_retry: bool
    not_before_s: float


@dataclass(frozen=True, slots=True)
class AttemptBegan:
    """An attempt is held by a worker until its lease runs out."""

    attempt_id: str
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """No more tokens for this attempt: its key is dead, its KV and its sandbox can go."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class ScoreWaits:
    """A sealed artifact can be scored."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class GroupChanged:
    """A group was completed, consumed, restarted, evaluated or dropped."""

    group_id: str


@dataclass(frozen=True, slots=True)
class VersionChanged:
    """A version entered another state."""

    version: int


@dataclass(frozen=True, slots=True)
class ReplicaChanged:
    """A replica came, went, or holds something else."""

    replica_id: str


Effect: TypeAlias = (
    WorkWaits | AttemptBegan | AttemptEnded | ScoreWaits | GroupChanged | VersionChanged | ReplicaChanged
)
