"""Leases, and what a harness reports of an attempt."""

from steelyard.types.outcomes import Outcome, Purpose
from steelyard.types.record import Record
from steelyard.types.tasks import Sampling
from steelyard.types.traces import SealedTrace


class Lease(Record, frozen=True, kw_only=True):
    """Permission to run one attempt until ``expires_at_s``. ``attempt_number`` is the fencing token."""

    attempt_id: str
    rollout_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    member_index: int
    attempt_number: int
    policy_version: int
    sampling: Sampling
    max_turns: int
    issued_at_s: float
    expires_at_s: float


class AttemptBinding(Record, frozen=True, kw_only=True):
    """What a live attempt may ask of the policy. ``deadline_at_s`` ends its last model call.

    ``follows_updates``: ``policy_version`` is the oldest version that may sample for it; weights may change under it.
    """

    policy_version: int
    sampling: Sampling
    max_context_tokens: int
    deadline_at_s: float
    follows_updates: bool = False


class AttemptFailure(Record, frozen=True, kw_only=True):
    """The system could not carry an attempt through. Never a reward.

    ``made_external_call``: a tool with external effects ran, so the rollout is not retried by itself.
    """

    attempt_id: str
    attempt_number: int
    outcome: Outcome
    reason: str
    detail: str = ""
    lost_tokens: int = 0
    made_external_call: bool = False


class ArtifactReport(Record, frozen=True, kw_only=True):
    """The agent is done: the trace is sealed and the artifact is durable."""

    attempt_id: str
    attempt_number: int
    trace: SealedTrace
    artifact_digest: str
