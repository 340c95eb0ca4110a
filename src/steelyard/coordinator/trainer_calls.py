"""Calls of a trainer and of an operator, and their results: part of the protocol of docs/protocol.md.

A trainer's calls may be repeated under a new number, as after a restart of either side: each is safe by its content.
"""

from typing import TypeAlias

from steelyard.coordinator.protocol_fields import Count, Id, Number, Seconds, Text
from steelyard.coordinator.records import BatchPlan, EvaluationResult, PendingStep, VersionInfo
from steelyard.types import LoadProof, Manifest, Record, Sampling


class ProgressCall(Record, frozen=True, kw_only=True, tag_field="call", tag="progress"):
    """Where the run stands."""


class VersionCall(Record, frozen=True, kw_only=True, tag_field="call", tag="version"):
    """What is known of a version."""

    version: Number


class VersionAtStepCall(Record, frozen=True, kw_only=True, tag_field="call", tag="version_at_step"):
    """The surviving version after ``step`` optimizer steps."""

    step: Number


class PendingStepsCall(Record, frozen=True, kw_only=True, tag_field="call", tag="pending_steps"):
    """Steps to replay after loading the checkpoint of ``checkpoint_step``; 0 is the starting policy."""

    checkpoint_step: Number


class NextBatchCall(Record, frozen=True, kw_only=True, tag_field="call", tag="next_batch"):
    """The batch of ``step``, at once where it is complete, else within ``wait_s``."""

    step: Number
    wait_s: Seconds


class BeginStepCall(Record, frozen=True, kw_only=True, tag_field="call", tag="begin_step"):
    """The batch is durable and the optimizer step begins. ``sample_ids`` are ``<attempt_id>/<segment_index>``."""

    step: Number
    parent_version: Number
    group_ids: tuple[Id, ...]
    sample_ids: tuple[Id, ...]
    batch_digest: Id


class PublishedCall(Record, frozen=True, kw_only=True, tag_field="call", tag="published"):
    """The files of a version are durable."""

    manifest: Manifest


class LoadedCall(Record, frozen=True, kw_only=True, tag_field="call", tag="loaded"):
    """A replica proved what it holds."""

    proof: LoadProof


class ReadyCall(Record, frozen=True, kw_only=True, tag_field="call", tag="ready"):
    """All replicas hold the version: new attempts may be bound to it."""

    version: Number


class CheckpointedCall(Record, frozen=True, kw_only=True, tag_field="call", tag="checkpointed"):
    """A checkpoint of the weights after ``step`` steps is durable."""

    step: Number
    digest: Id


class OrphanCall(Record, frozen=True, kw_only=True, tag_field="call", tag="orphan"):
    """The replay gave other weights than this version: give it up with its descendants."""

    version: Number
    reason: Text


class PinCall(Record, frozen=True, kw_only=True, tag_field="call", tag="pin"):
    """Keep the files of a version for ``label``."""

    version: Number
    label: Id


class UnpinCall(Record, frozen=True, kw_only=True, tag_field="call", tag="unpin"):
    """``label`` needs the version no longer."""

    version: Number
    label: Id


class DeletableBatchesCall(Record, frozen=True, kw_only=True, tag_field="call", tag="deletable_batches"):
    """Steps whose stored batch every kept checkpoint covers."""


class BatchDeletedCall(Record, frozen=True, kw_only=True, tag_field="call", tag="batch_deleted"):
    """The stored batch of ``step`` is deleted once this is answered."""

    step: Number


class DeletableVersionsCall(Record, frozen=True, kw_only=True, tag_field="call", tag="deletable_versions"):
    """Versions whose files nobody needs."""


class VersionDeletedCall(Record, frozen=True, kw_only=True, tag_field="call", tag="version_deleted"):
    """The files of the version are deleted once this is answered."""

    version: Number


class RoomCall(Record, frozen=True, kw_only=True, tag_field="call", tag="room"):
    """Whether one more version may be kept, at once where it may, else within ``wait_s``."""

    wait_s: Seconds


class AdmitEvaluationCall(Record, frozen=True, kw_only=True, tag_field="call", tag="admit_evaluation"):
    """Sample and score tasks at a READY version under a label. ``max_turns`` None: as in training."""

    task_ids: tuple[Id, ...]
    version: Number
    sampling: Sampling
    label: Id
    samples_per_task: Count = 1
    max_turns: Count | None = None
    priority: int = 0


class EvaluationResultsCall(Record, frozen=True, kw_only=True, tag_field="call", tag="evaluation_results"):
    """All results of a label, at once where its last group is closed, else within ``wait_s``."""

    label: Id
    wait_s: Seconds


class EvaluationProgressCall(Record, frozen=True, kw_only=True, tag_field="call", tag="evaluation_progress"):
    """How far the evaluation of a label is."""

    label: Id


class AbandonCall(Record, frozen=True, kw_only=True, tag_field="call", tag="abandon"):
    """All workers are known to be gone: end what they hold without using up budget."""

    reason: Text


class FinishCall(Record, frozen=True, kw_only=True, tag_field="call", tag="finish"):
    """The work is done: end the run."""

    reason: Text


class FailCall(Record, frozen=True, kw_only=True, tag_field="call", tag="fail"):
    """The trainer cannot go on: the coordinator ends, and the run can be taken up again."""

    reason: Text


class CancelGroupCall(Record, frozen=True, kw_only=True, tag_field="call", tag="cancel_group"):
    """Drop a live group as cancelled."""

    group_id: Id
    reason: Text


class CancelTaskCall(Record, frozen=True, kw_only=True, tag_field="call", tag="cancel_task"):
    """Drop all live groups of a task as cancelled."""

    task_id: Id
    reason: Text


TrainerCall: TypeAlias = (
    ProgressCall
    | VersionCall
    | VersionAtStepCall
    | PendingStepsCall
    | NextBatchCall
    | BeginStepCall
    | PublishedCall
    | LoadedCall
    | ReadyCall
    | CheckpointedCall
    | OrphanCall
    | PinCall
    | UnpinCall
    | DeletableBatchesCall
    | BatchDeletedCall
    | DeletableVersionsCall
    | VersionDeletedCall
    | RoomCall
    | AdmitEvaluationCall
    | EvaluationResultsCall
    | EvaluationProgressCall
    | AbandonCall
    | FinishCall
    | FailCall
)
OperatorCall: TypeAlias = CancelGroupCall | CancelTaskCall
TRAINER_POLLS = (NextBatchCall, RoomCall, EvaluationResultsCall)
"""Calls of a trainer that may wait."""


class CheckpointInfo(Record, frozen=True, kw_only=True):
    """A checkpoint that the journal knows."""

    step: int
    digest: str


class RunProgress(Record, frozen=True, kw_only=True):
    """Where a run stands, as its trainer needs it.

    ``next_step``: the step to begin next. ``next_version``: the number to publish under. ``checkpoints``: those that
    are kept, oldest first. ``kept_batches``: steps whose batch is stored. ``newest_ready``: what new attempts are bound
    to. ``newest``: the surviving version with the most steps. ``evaluating``: versions that open evaluations use.
    """

    run_id: str
    next_step: int
    next_version: int
    checkpoints: tuple[CheckpointInfo, ...]
    kept_batches: tuple[int, ...]
    newest_ready: VersionInfo | None
    newest: VersionInfo | None
    evaluating: tuple[int, ...]
    is_finished: bool


class Progress(Record, frozen=True, kw_only=True, tag_field="result", tag="progress"):
    """Where the run stands."""

    progress: RunProgress


class KnownVersion(Record, frozen=True, kw_only=True, tag_field="result", tag="version"):
    """What is known of a version; nil where there is none."""

    version: VersionInfo | None


class PendingSteps(Record, frozen=True, kw_only=True, tag_field="result", tag="pending_steps"):
    """Steps to take again, in this order."""

    steps: tuple[PendingStep, ...]


class Batch(Record, frozen=True, kw_only=True, tag_field="result", tag="batch"):
    """The batch; nil where it is not complete yet, and then who keeps it waiting."""

    plan: BatchPlan | None
    missing: tuple[str, ...] = ()


class Numbers(Record, frozen=True, kw_only=True, tag_field="result", tag="numbers"):
    """Steps or versions."""

    numbers: tuple[int, ...]


class Room(Record, frozen=True, kw_only=True, tag_field="result", tag="room"):
    """Whether one more version may be kept; where not, each that is and who needs it."""

    is_free: bool
    missing: tuple[str, ...] = ()


class Groups(Record, frozen=True, kw_only=True, tag_field="result", tag="groups"):
    """Groups that were admitted, or cancelled."""

    group_ids: tuple[str, ...]


class Evaluated(Record, frozen=True, kw_only=True, tag_field="result", tag="evaluated"):
    """The results; nil where some are missing yet, and then which."""

    results: tuple[EvaluationResult, ...] | None
    missing: tuple[str, ...] = ()


class EvaluationProgress(Record, frozen=True, kw_only=True, tag_field="result", tag="evaluation_progress"):
    """Groups of a label that are closed, and all of them."""

    num_closed: int
    num_groups: int


class Ended(Record, frozen=True, kw_only=True, tag_field="result", tag="ended"):
    """So many attempts were ended."""

    num_attempts: int


TrainerResult: TypeAlias = (
    Progress | KnownVersion | PendingSteps | Batch | Numbers | Room | Groups | Evaluated | EvaluationProgress | Ended
)
