"""The journal's events. What happened and what was decided, so that a replay needs neither settings nor a clock.

::

    RUN_STARTED
    VERSION_PUBLISHED -> VERSION_LOADED -> VERSION_READY -> VERSION_RELEASED -> VERSION_DELETED | VERSION_ORPHANED
    REPLICA_STARTED -> [REPLICA_DRAINING ->] REPLICA_LOADING -> VERSION_LOADED | REPLICA_REFUSED, REPLICA_DOWN
    GROUP_ADMITTED -> [LEASED -> RUNNING -> ARTIFACT_READY -> SCORED -> ACCEPTED | REJECTED] per rollout
                   -> GROUP_COMPLETED -> STEP_BEGUN -> CHECKPOINTED
    RUN_FINISHED | RUN_RESUMED

Every event carries ``at_s``, stamped once by the writer and never going back along the journal. On disk an event
is one JSON object whose ``kind`` is the name of its class in upper case.
"""

import enum
from typing import TypeAlias

import msgspec

from steelyard.types import ArtifactReport, LoadProof, Outcome, Purpose, Record, Sampling, Score


def _kind(class_name: str) -> str:
    """``GroupAdmitted`` -> ``GROUP_ADMITTED``."""
    return "".join(("_" if i and c.isupper() else "") + c.upper() for i, c in enumerate(class_name))


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=_kind):
    """Base of all events. ``at_s``: seconds since the Unix epoch."""

    at_s: float


class DropReason(enum.StrEnum):
    """Why a group will never be trained.

    ``budget``: every member was cancelled, a budget used up (attempts, tokens, time or gradings); ``cancelled``: from
    outside; ``incomplete``: fewer than ``algorithm.min_scored`` members are accepted; ``too_stale``: replaced
    ``admission.max_stale_retries`` times already; ``filtered``: by choice.
    """

    BUDGET = "budget"
    CANCELLED = "cancelled"
    TOO_STALE = "too_stale"
    INCOMPLETE = "incomplete"
    FILTERED = "filtered"
    END_OF_RUN = "end_of_run"


class BudgetReason(enum.StrEnum):
    """Which budget of a rollout is used up: the reason of its RolloutCancelled, and the line in the token book."""

    ATTEMPTS = "budget_attempts"
    TOKENS = "budget_tokens"
    TIME = "budget_time"


class RejectReason(enum.StrEnum):
    """Why sealed tokens were not trained although their attempt came to its end."""

    STALE = "stale"
    RATIO = "ratio"
    ORPHANED = "orphaned"


class RestartReason(enum.StrEnum):
    """Why a group's rollouts were all replaced by new ones. Only ``stale`` counts against the group."""

    STALE = "stale"
    ORPHANED = "orphaned"


class Rules(Record, frozen=True, kw_only=True):
    """What the journal was written under; ``audit`` holds the run to it.

    ``max_policy_lag`` in optimizer steps; the others count groups, rollouts and accepted rollouts.
    ``follows_updates``: weights may change between two tokens of a training attempt (``weights.mode: segmented``).
    """

    max_policy_lag: int
    groups_per_batch: int
    group_size: int
    min_scored: int
    follows_updates: bool = False


class Budgets(Record, frozen=True, kw_only=True):
    """What one rollout may use up; ``audit`` holds the run to it. None: no limit.

    ``num_attempts`` counts failed attempts, ``num_tokens`` sampled tokens over all attempts, lost ones included,
    ``time_s`` the seconds from the admission of its group to its end.
    """

    num_attempts: int
    num_tokens: int | None = None
    time_s: float | None = None


MAX_PRIORITY = 1000
"""Priorities are whole numbers from minus to plus this."""


# --- the run --------------------------------------------------------------------------------------


class RunStarted(Event, frozen=True, kw_only=True):
    """Always the first event, and only there. ``budgets`` None: an older version wrote it."""

    run_id: str
    seed: int
    config_digest: str
    rules: Rules
    budgets: Budgets | None = None


class RunResumed(Event, frozen=True, kw_only=True):
    """A new coordinator took the journal over. ``budgets`` as in RUN_STARTED."""

    config_digest: str
    rules: Rules
    budgets: Budgets | None = None


class RunFinished(Event, frozen=True, kw_only=True):
    """No more work is given out. Only RUN_RESUMED can follow."""

    reason: str


# --- groups ---------------------------------------------------------------------------------------


class GroupAdmitted(Event, frozen=True, kw_only=True):
    """One issue of a prompt. ``stream_position`` is the frontier of the task stream, None for evaluation.

    ``admitted_version`` is the newest READY version at this moment; ``bound_version`` fixes the version of an
    evaluation, None means the newest READY one at each lease. ``rollout_ids`` in member order. A higher ``priority``
    is leased earlier.
    """

    group_id: str
    task_id: str
    task_index: int | None
    stream_position: int | None
    purpose: Purpose
    label: str | None
    rollout_ids: tuple[str, ...]
    admitted_version: int
    bound_version: int | None
    sampling: Sampling
    max_turns: int
    priority: int = 0


class GroupCompleted(Event, frozen=True, kw_only=True):
    """All rollouts are terminal and enough of them accepted; the group can be trained."""

    group_id: str


class GroupEvaluated(Event, frozen=True, kw_only=True):
    """All rollouts of an evaluation group are terminal."""

    group_id: str


class GroupDropped(Event, frozen=True, kw_only=True):
    """The group will never be trained; the tokens of its accepted members are rejected for this reason.

    ``detail``: in the words of whoever cancelled it.
    """

    group_id: str
    reason: DropReason
    detail: str = ""


class GroupParked(Event, frozen=True, kw_only=True):
    """The group's rollouts are given up and it waits for room in the lag bound to be restarted."""

    group_id: str
    reason: RestartReason


class GroupRestarted(Event, frozen=True, kw_only=True):
    """The same prompt again, with new rollouts, admitted anew; tokens of accepted members are rejected."""

    group_id: str
    reason: RestartReason
    rollout_ids: tuple[str, ...]
    admitted_version: int


# --- rollouts and attempts ------------------------------------------------------------------------


class Leased(Event, frozen=True, kw_only=True):
    """A worker may run this attempt, with weights ``policy_version``, until ``expires_at_s``."""

    rollout_id: str
    attempt_id: str
    attempt_number: int
    worker_id: str
    policy_version: int
    expires_at_s: float


class Running(Event, frozen=True, kw_only=True):
    """The worker has begun."""

    attempt_id: str


class ArtifactReady(Event, frozen=True, kw_only=True):
    """The trace is sealed and the artifact durable."""

    report: ArtifactReport


class Scored(Event, frozen=True, kw_only=True):
    """A finite verdict on the artifact with this digest."""

    score: Score
    artifact_digest: str


class GraderFailed(Event, frozen=True, kw_only=True):
    """A grading came to nothing; the same artifact may be scored again."""

    attempt_id: str
    job_id: str
    outcome: Outcome
    reason: str
    detail: str = ""


class InfraFailed(Event, frozen=True, kw_only=True):
    """The system could not carry the attempt through. ``is_counted`` says whether it used up budget.

    ``lost_tokens``: sampled tokens recorded for the attempt, in no sealed trace. 0 where the trace was sealed.
    """

    attempt_id: str
    outcome: Outcome
    reason: str
    detail: str = ""
    lost_tokens: int = 0
    is_counted: bool = True


class LeaseExpired(Event, frozen=True, kw_only=True):
    """Nobody renewed the lease. ``lost_tokens`` as in INFRA_FAILED."""

    attempt_id: str
    lost_tokens: int = 0


class RolloutRetried(Event, frozen=True, kw_only=True):
    """The rollout may be leased again, not before ``not_before_s``."""

    rollout_id: str
    not_before_s: float


class RolloutCancelled(Event, frozen=True, kw_only=True):
    """The rollout ends without a score. ``lost_tokens`` as in INFRA_FAILED, for an attempt that still ran."""

    rollout_id: str
    reason: str
    lost_tokens: int = 0


class Accepted(Event, frozen=True, kw_only=True):
    """The scored attempt is within the lag bound and enters its group's statistics."""

    attempt_id: str


class Rejected(Event, frozen=True, kw_only=True):
    """The scored attempt is not to be trained; this closes the rollout, not its group."""

    attempt_id: str
    reason: RejectReason


# --- steps ----------------------------------------------------------------------------------------


class StepBegun(Event, frozen=True, kw_only=True):
    """Written ahead of optimizer step ``step``, which is computed at ``parent_version``.

    ``sample_ids`` are ``<attempt_id>/<segment_index>`` in the order of the batch; ``group_ids`` are the groups
    that the step consumes.
    """

    step: int
    parent_version: int
    group_ids: tuple[str, ...]
    sample_ids: tuple[str, ...]
    batch_digest: str


class StepVoided(Event, frozen=True, kw_only=True):
    """The step was computed on weights that did not survive; its groups can be trained again."""

    step: int


class Checkpointed(Event, frozen=True, kw_only=True):
    """A checkpoint of the weights after ``step`` optimizer steps is durable; it covers the steps below ``step``."""

    step: int
    digest: str


class BatchDeleted(Event, frozen=True, kw_only=True):
    """The stored batch of a step that a checkpoint covers is about to be deleted."""

    step: int


# --- versions -------------------------------------------------------------------------------------


class VersionPublished(Event, frozen=True, kw_only=True):
    """Summary of a durable manifest. ``step``: optimizer steps along the parent chain; version 0 has step 0.

    ``separates_parent``: whether the probe can tell the version from its parent.
    """

    version: int
    step: int
    parent_version: int | None
    weights_digest: str
    model_config_digest: str
    tokenizer_digest: str
    template_digest: str
    num_bytes: int
    separates_parent: bool = False


class VersionLoaded(Event, frozen=True, kw_only=True):
    """A replica proved what it holds in memory."""

    proof: LoadProof


class ReplicaStarted(Event, frozen=True, kw_only=True):
    """The process of a replica is up. It holds no version."""

    replica_id: str


class ReplicaDraining(Event, frozen=True, kw_only=True):
    """No new attempts are sent to the replica, so that it can go over to ``version`` or stand by."""

    replica_id: str
    version: int


class ReplicaLoading(Event, frozen=True, kw_only=True):
    """The replica began to load ``version``. ``in_place``: under running requests, in the place of its newest."""

    replica_id: str
    version: int
    in_place: bool = False


class ReplicaUnloaded(Event, frozen=True, kw_only=True):
    """The replica no longer holds ``version``."""

    replica_id: str
    version: int


class ReplicaRefused(Event, frozen=True, kw_only=True):
    """What the replica loaded is not what was published as ``version``; it is ended, and serves nothing."""

    replica_id: str
    version: int
    detail: str


class ReplicaDown(Event, frozen=True, kw_only=True):
    """The replica died, was ended, or answers no more: it holds nothing."""

    replica_id: str
    detail: str


class VersionReady(Event, frozen=True, kw_only=True):
    """Attempts may be bound to the version."""

    version: int


class VersionReleased(Event, frozen=True, kw_only=True):
    """No live attempt needs it any more and a newer one is READY; replicas may unload it."""

    version: int


class VersionDeleted(Event, frozen=True, kw_only=True):
    """Nothing references it; its files are about to be deleted."""

    version: int


class VersionOrphaned(Event, frozen=True, kw_only=True):
    """A replay gave other weights for its step, or for the step of an ancestor. The number is never used again."""

    version: int
    reason: str


class VersionPinned(Event, frozen=True, kw_only=True):
    """The files are kept for ``label`` (an evaluation to come) whatever else happens."""

    version: int
    label: str


class VersionUnpinned(Event, frozen=True, kw_only=True):
    """``label`` no longer needs the version."""

    version: int
    label: str


AnyEvent: TypeAlias = (
    RunStarted
    | RunResumed
    | RunFinished
    | GroupAdmitted
    | GroupCompleted
    | GroupEvaluated
    | GroupDropped
    | GroupParked
    | GroupRestarted
    | Leased
    | Running
    | ArtifactReady
    | Scored
    | GraderFailed
    | InfraFailed
    | LeaseExpired
    | RolloutRetried
    | RolloutCancelled
    | Accepted
    | Rejected
    | StepBegun
    | StepVoided
    | Checkpointed
    | BatchDeleted
    | VersionPublished
    | VersionLoaded
    | VersionReady
    | VersionReleased
    | VersionDeleted
    | VersionOrphaned
    | VersionPinned
    | VersionUnpinned
    | ReplicaStarted
    | ReplicaDraining
    | ReplicaLoading
    | ReplicaUnloaded
    | ReplicaRefused
    | ReplicaDown
)


def kind_of(event: Event) -> str:
    """The event's name in the journal, such as ``GROUP_ADMITTED``."""
    return _kind(type(event).__name__)
