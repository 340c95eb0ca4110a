"""The coordinator from a trainer on another machine: the methods of the coordinator that a training loop needs.

Every call can be made again, by the same process or by one that took its place: what it says is in the journal once,
and it is answered the same. One process at a time uses a trainer's key.

*Consumes* calls. *Waits for* the coordinator, each call with a deadline. *Unblocked by* its answers. *Produces* plans,
results, and the coordinator's errors as their own types.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from steelyard.coordinator import protocol as p
from steelyard.coordinator import trainer_calls as t
from steelyard.coordinator.client import CoordinatorClient
from steelyard.coordinator.records import BatchPlan, EvaluationResult, PendingStep, VersionInfo
from steelyard.errors import DeadlineExceeded
from steelyard.types import LoadProof, Manifest, Sampling

_LONGEST_POLL_S = 20.0

_T = TypeVar("_T")
_Ask = Callable[[float], Awaitable[tuple[_T | None, tuple[str, ...]]]]


class TrainerLink:
    """What a trainer says and asks. Methods raise as those of ``Coordinator``, and ``RunError`` out of reach.

    Args:
        client: entered, with the key of a trainer.
    """

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client

    async def progress(self) -> t.RunProgress:
        """Where the run stands."""
        return (await self._client.perform(t.ProgressCall(), t.Progress)).progress

    async def version(self, number: int) -> VersionInfo | None:
        """What is known of a version."""
        return (await self._client.perform(t.VersionCall(version=number), t.KnownVersion)).version

    async def version_at_step(self, step: int) -> VersionInfo | None:
        """The surviving version after ``step`` optimizer steps."""
        return (await self._client.perform(t.VersionAtStepCall(step=step), t.KnownVersion)).version

    async def pending_steps_after(self, checkpoint_step: int) -> tuple[PendingStep, ...]:
        """Steps to replay from their stored batches after loading the checkpoint of ``checkpoint_step``."""
        call = t.PendingStepsCall(checkpoint_step=checkpoint_step)
        return (await self._client.perform(call, t.PendingSteps)).steps

    # --- steps ------------------------------------------------------------------------------------

    async def next_batch(self, step: int, deadline_s: float) -> BatchPlan:
        """The batch of optimizer step ``step``.

        Raises:
            DeadlineExceeded: names what is missing, who holds it and since when.
            IllegalTransition: ``step`` is not the next step.
        """

        async def ask(wait_s: float) -> tuple[BatchPlan | None, tuple[str, ...]]:
            found = await self._client.perform(t.NextBatchCall(step=step, wait_s=wait_s), t.Batch, wait_s)
            return found.plan, found.missing

        return await _poll(ask, f"the batch of step {step}", deadline_s)

    async def begin_step(
        self,
        *,
        step: int,
        parent_version: int,
        group_ids: tuple[str, ...],
        sample_ids: tuple[str, ...],
        batch_digest: str,
    ) -> None:
        """Write the step ahead, once its batch is durable and before the optimizer moves.

        Raises:
            IllegalTransition: the step has begun with another batch, or these cannot be its samples. After a restart of
                the coordinator a group may have been cancelled meanwhile: ask for the batch again.
        """
        call = t.BeginStepCall(
            step=step,
            parent_version=parent_version,
            group_ids=group_ids,
            sample_ids=sample_ids,
            batch_digest=batch_digest,
        )
        await self._client.perform(call, p.Done)

    async def checkpointed(self, step: int, digest: str) -> None:
        """A checkpoint of the weights after ``step`` optimizer steps is durable."""
        await self._client.perform(t.CheckpointedCall(step=step, digest=digest), p.Done)

    async def deletable_batches(self) -> tuple[int, ...]:
        """Steps whose stored batch every kept checkpoint covers."""
        return (await self._client.perform(t.DeletableBatchesCall(), t.Numbers)).numbers

    async def batch_deleted(self, step: int) -> None:
        """Allows the stored batch of ``step`` to be deleted; delete it after this returns."""
        await self._client.perform(t.BatchDeletedCall(step=step), p.Done)

    # --- versions ---------------------------------------------------------------------------------

    async def published(self, manifest: Manifest) -> None:
        """The files of a version are durable.

        Raises:
            IllegalTransition: the number is used for other weights, or does not follow its parent.
        """
        await self._client.perform(t.PublishedCall(manifest=manifest), p.Done)

    async def loaded(self, proof: LoadProof) -> None:
        """A replica proved what it holds.

        Raises:
            IllegalTransition: it does not hold the published weights.
        """
        await self._client.perform(t.LoadedCall(proof=proof), p.Done)

    async def ready(self, version: int) -> None:
        """New attempts are bound to ``version`` from now on, if it is the newest."""
        await self._client.perform(t.ReadyCall(version=version), p.Done)

    async def orphan(self, version: int, reason: str) -> tuple[int, ...]:
        """Give up a version whose replay gave other weights, and its descendants; returns them all.

        Raises:
            IllegalTransition: it is not on the surviving lineage, or a kept checkpoint holds it.
        """
        return (await self._client.perform(t.OrphanCall(version=version, reason=reason), t.Numbers)).numbers

    async def pin(self, version: int, label: str) -> None:
        """Keep the files of ``version`` for ``label``, as while they are read."""
        await self._client.perform(t.PinCall(version=version, label=label), p.Done)

    async def unpin(self, version: int, label: str) -> None:
        """``label`` no longer needs ``version``."""
        await self._client.perform(t.UnpinCall(version=version, label=label), p.Done)

    async def deletable_versions(self) -> tuple[int, ...]:
        """Versions whose files nobody needs."""
        return (await self._client.perform(t.DeletableVersionsCall(), t.Numbers)).numbers

    async def version_deleted(self, version: int) -> None:
        """Allows the files of ``version`` to be deleted; delete them after this returns.

        Raises:
            IllegalTransition: somebody needs them; names who.
        """
        await self._client.perform(t.VersionDeletedCall(version=version), p.Done)

    async def wait_for_room(self, deadline_s: float) -> None:
        """Wait until one more version may be kept; call before publishing.

        Raises:
            DeadlineExceeded: names each kept version and who needs it.
        """

        async def ask(wait_s: float) -> tuple[t.Room | None, tuple[str, ...]]:
            room = await self._client.perform(t.RoomCall(wait_s=wait_s), t.Room, wait_s)
            return (room if room.is_free else None), room.missing

        await _poll(ask, "room for one more version", deadline_s)

    # --- evaluation -------------------------------------------------------------------------------

    async def admit_evaluation(
        self,
        task_ids: tuple[str, ...],
        *,
        version: int,
        sampling: Sampling,
        label: str,
        samples_per_task: int = 1,
        max_turns: int | None = None,
        priority: int = 0,
    ) -> tuple[str, ...]:
        """Sample and score tasks at one READY version under a label; returns the group ids in task order.

        Raises:
            InputError: the label is in use for another version, a task comes twice, or the priority is out of range.
            IllegalTransition: the version is not READY.
        """
        call = t.AdmitEvaluationCall(
            task_ids=task_ids,
            version=version,
            sampling=sampling,
            label=label,
            samples_per_task=samples_per_task,
            max_turns=max_turns,
            priority=priority,
        )
        return (await self._client.perform(call, t.Groups)).group_ids

    async def evaluation_results(self, label: str, deadline_s: float) -> tuple[EvaluationResult, ...]:
        """All results of a label, once its last group is closed.

        Raises:
            InputError: unknown label.
            DeadlineExceeded: names the missing rollouts, who holds them and since when.
        """

        async def ask(wait_s: float) -> tuple[tuple[EvaluationResult, ...] | None, tuple[str, ...]]:
            call = t.EvaluationResultsCall(label=label, wait_s=wait_s)
            found = await self._client.perform(call, t.Evaluated, wait_s)
            return found.results, found.missing

        return await _poll(ask, f"evaluation {label}", deadline_s)

    async def evaluation_progress(self, label: str) -> tuple[int, int]:
        """Closed groups and all groups of a label."""
        found = await self._client.perform(t.EvaluationProgressCall(label=label), t.EvaluationProgress)
        return found.num_closed, found.num_groups

    # --- the run ----------------------------------------------------------------------------------

    async def abandon(self, reason: str) -> int:
        """End all held attempts without using up budget, because their workers are known to be gone. How many."""
        return (await self._client.perform(t.AbandonCall(reason=reason), t.Ended)).num_attempts

    async def finish(self, reason: str) -> None:
        """End the run: live groups are dropped as ``end_of_run`` and no work is given out."""
        await self._client.perform(t.FinishCall(reason=reason), p.Done)

    async def fail(self, reason: str) -> None:
        """The trainer cannot go on. The coordinator's process ends, and can be started again."""
        await self._client.perform(t.FailCall(reason=reason), p.Done)


class OperatorLink:
    """What an operator may do from elsewhere.

    Args:
        client: entered, with the key of an operator.
    """

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client

    async def cancel_group(self, group_id: str, reason: str) -> bool:
        """Drop a live group as cancelled; False where there is nothing to cancel (any more)."""
        return bool(
            (await self._client.perform(t.CancelGroupCall(group_id=group_id, reason=reason), t.Groups)).group_ids
        )

    async def cancel_task(self, task_id: str, reason: str) -> tuple[str, ...]:
        """Drop all live groups of a task as cancelled; their ids."""
        return (await self._client.perform(t.CancelTaskCall(task_id=task_id, reason=reason), t.Groups)).group_ids


async def _poll(ask: _Ask[_T], what: str, deadline_s: float) -> _T:
    """Ask until there is an answer.

    Raises:
        DeadlineExceeded: there was none in time; names whom the last answer named.
    """
    now_s = asyncio.get_running_loop().time
    started_s = now_s()
    while True:
        found, missing = await ask(max(0.0, min(_LONGEST_POLL_S, started_s + deadline_s - now_s())))
        if found is not None:
            return found
        waited_s = now_s() - started_s
        if waited_s >= deadline_s:
            raise DeadlineExceeded(what, missing, waited_s)
