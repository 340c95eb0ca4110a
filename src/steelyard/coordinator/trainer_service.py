"""Calls of trainers and operators, carried out on a coordinator. What waits, waits a bounded time and says for whom."""

from steelyard.coordinator import trainer_calls as t
from steelyard.coordinator.admission import evaluating
from steelyard.coordinator.service import Coordinator
from steelyard.errors import DeadlineExceeded, RunError


async def perform(
    coordinator: Coordinator, call: t.TrainerCall | t.OperatorCall, caller: str, max_wait_s: float
) -> t.TrainerResult | None:
    """Carry out one call; None where there is nothing to say but that it is done.

    Args:
        caller: whom the key names.
        max_wait_s: the longest wait, in seconds.

    Raises:
        SteelyardError: as the coordinator's method.
    """
    match call:
        case t.NextBatchCall() | t.RoomCall() | t.EvaluationResultsCall():
            return await _wait(coordinator, call, min(call.wait_s, max_wait_s))
        case (
            t.BeginStepCall()
            | t.PublishedCall()
            | t.LoadedCall()
            | t.ReadyCall()
            | t.CheckpointedCall()
            | t.PinCall()
            | t.UnpinCall()
            | t.BatchDeletedCall()
            | t.VersionDeletedCall()
        ):
            await _note(coordinator, call)
            return None
        case t.FinishCall():
            await coordinator.finish(call.reason)
            return None
        case t.FailCall():
            coordinator.fail(RunError(f"trainer {caller} cannot go on: {call.reason}"))
            return None
        case t.CancelGroupCall():
            is_cancelled = await coordinator.cancel_group(call.group_id, call.reason)
            return t.Groups(group_ids=(call.group_id,) * is_cancelled)
        case t.CancelTaskCall():
            return t.Groups(group_ids=await coordinator.cancel_task(call.task_id, call.reason))
        case t.AdmitEvaluationCall():
            return await _admit_evaluation(coordinator, call)
        case _:
            return await _look(coordinator, call)


_Poll = t.NextBatchCall | t.RoomCall | t.EvaluationResultsCall
_Note = (
    t.BeginStepCall
    | t.PublishedCall
    | t.LoadedCall
    | t.ReadyCall
    | t.CheckpointedCall
    | t.PinCall
    | t.UnpinCall
    | t.BatchDeletedCall
    | t.VersionDeletedCall
)
_Look = (
    t.ProgressCall
    | t.VersionCall
    | t.VersionAtStepCall
    | t.PendingStepsCall
    | t.DeletableBatchesCall
    | t.DeletableVersionsCall
    | t.OrphanCall
    | t.AbandonCall
    | t.EvaluationProgressCall
)


async def _wait(coordinator: Coordinator, call: _Poll, wait_s: float) -> t.TrainerResult:
    """A wait that runs out is no error here: the trainer asks again, until a deadline of its own."""
    match call:
        case t.NextBatchCall():
            try:
                return t.Batch(plan=await coordinator.next_batch(call.step, wait_s))
            except DeadlineExceeded as late:
                return t.Batch(plan=None, missing=late.culprits)
        case t.RoomCall():
            try:
                await coordinator.wait_for_room(wait_s)
                return t.Room(is_free=True)
            except DeadlineExceeded as late:
                return t.Room(is_free=False, missing=late.culprits)
        case t.EvaluationResultsCall():
            try:
                return t.Evaluated(results=await coordinator.evaluation_results(call.label, wait_s))
            except DeadlineExceeded as late:
                return t.Evaluated(results=None, missing=late.culprits)


async def _note(coordinator: Coordinator, call: _Note) -> None:
    """What the trainer reports."""
    match call:
        case t.BeginStepCall():
            await coordinator.begin_step(
                step=call.step,
                parent_version=call.parent_version,
                group_ids=call.group_ids,
                sample_ids=call.sample_ids,
                batch_digest=call.batch_digest,
            )
        case t.PublishedCall():
            await coordinator.published(call.manifest)
        case t.LoadedCall():
            await coordinator.loaded(call.proof)
        case t.ReadyCall():
            await coordinator.ready(call.version)
        case t.CheckpointedCall():
            await coordinator.checkpointed(call.step, call.digest)
        case t.PinCall():
            await coordinator.pin(call.version, call.label)
        case t.UnpinCall():
            await coordinator.unpin(call.version, call.label)
        case t.BatchDeletedCall():
            await coordinator.batch_deleted(call.step)
        case t.VersionDeletedCall():
            await coordinator.version_deleted(call.version)


async def _look(coordinator: Coordinator, call: _Look) -> t.TrainerResult:
    """What the trainer asks. Reads of the live state wait for the commit of what they read."""
    match call:
        case t.PendingStepsCall():
            return t.PendingSteps(steps=await coordinator.pending_steps_after(call.checkpoint_step))
        case t.DeletableBatchesCall():
            return t.Numbers(numbers=await coordinator.deletable_batches())
        case t.DeletableVersionsCall():
            return t.Numbers(numbers=await coordinator.deletable_versions())
        case t.OrphanCall():
            return t.Numbers(numbers=await coordinator.orphan(call.version, call.reason))
        case t.AbandonCall():
            return t.Ended(num_attempts=await coordinator.abandon(call.reason))
        case t.ProgressCall():
            return t.Progress(progress=await coordinator.read(lambda: progress_of(coordinator)))
        case t.VersionCall():
            return t.KnownVersion(version=await coordinator.read(lambda: coordinator.version(call.version)))
        case t.VersionAtStepCall():
            return t.KnownVersion(version=await coordinator.read(lambda: coordinator.version_at_step(call.step)))
        case t.EvaluationProgressCall():
            closed, groups = await coordinator.read(lambda: coordinator.evaluation_progress(call.label))
            return t.EvaluationProgress(num_closed=closed, num_groups=groups)


async def _admit_evaluation(coordinator: Coordinator, call: t.AdmitEvaluationCall) -> t.Groups:
    group_ids = await coordinator.admit_evaluation(
        call.task_ids,
        version=call.version,
        sampling=call.sampling,
        label=call.label,
        samples_per_task=call.samples_per_task,
        max_turns=call.max_turns,
        priority=call.priority,
    )
    return t.Groups(group_ids=group_ids)


def progress_of(coordinator: Coordinator) -> t.RunProgress:
    """Where the run stands now."""
    state = coordinator.state
    digests = state.checkpoint_digests
    return t.RunProgress(
        run_id=state.run.run_id if state.run is not None else "",
        next_step=state.next_step,
        next_version=state.next_version(),
        checkpoints=tuple(t.CheckpointInfo(step=step, digest=digests[step]) for step in state.checkpoints),
        kept_batches=tuple(sorted(state.kept_batches)),
        newest_ready=coordinator.newest_ready(),
        newest=coordinator.version_at_step(max(state.lineage, default=0)),
        evaluating=tuple(sorted(evaluating(state))),
        is_finished=state.run is not None and state.run.is_finished,
    )
