"""The coordinator: one object that all stages talk to.

::

    harness   lease -> start -> heartbeat ... -> artifact_ready | attempt_failed
    scorer    lease_scores -> score
    trainer   next_batch -> begin_step -> published -> checkpointed
    replicas  loaded -> ready, and ``replicas``

Every answer waits for the commit of what it read or wrote. A late, double or unknown message is refused and counted.
All waits have deadlines; ``fail`` ends each. A ``worker_id`` is who reports; None where nobody else can.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from steelyard.clock import Clock
from steelyard.coordinator import books as bookkeeping
from steelyard.coordinator import doctor
from steelyard.coordinator import events as e
from steelyard.coordinator.batches import Batches
from steelyard.coordinator.cancellation import Cancellation
from steelyard.coordinator.core import Core, FullWait, Jitter, OpenTraces
from steelyard.coordinator.effects import Effect
from steelyard.coordinator.entities import State
from steelyard.coordinator.evaluations import Evaluations
from steelyard.coordinator.groups import Groups, TaskStream
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.leases import Leases
from steelyard.coordinator.records import BatchPlan, CoordinatorSettings, EvaluationResult, PendingStep, VersionInfo
from steelyard.coordinator.recovery import recover
from steelyard.coordinator.replicas import Replicas
from steelyard.coordinator.scores import Scoring
from steelyard.coordinator.state import outbox
from steelyard.coordinator.ticking import Ticker
from steelyard.coordinator.time_budgets import TimeBudgets
from steelyard.coordinator.transitions import HELD, RolloutState
from steelyard.coordinator.versions import Versions
from steelyard.coordinator.waiting import Signal, Sleep
from steelyard.coordinator.worker_calls import WorkerCalls
from steelyard.errors import IllegalTransition, Refused
from steelyard.ids import IdSource
from steelyard.metrics import Counters
from steelyard.types import ArtifactReport, AttemptFailure, Lease, LoadProof, Manifest, Sampling, Score, ScoreJob

_T = TypeVar("_T")


class Coordinator:
    """Use :meth:`open`; the object lives in one event loop.

    The types of its parts are attributes, so that a subclass can be given a fault that tests must find.
    """

    groups_type: type[Groups] = Groups
    leases_type: type[Leases] = Leases
    scoring_type: type[Scoring] = Scoring

    def __init__(self, core: Core, journal: Journal, stream: TaskStream | None, num_covered: int) -> None:
        self._core = core
        self._journal = journal
        self._groups = self.groups_type(core, stream)
        self._leases = self.leases_type(core, self._groups)
        self._scoring = self.scoring_type(core, self._groups, self._leases)
        self._versions = Versions(core, self._groups, self._leases)
        self.replicas = Replicas(core, self._versions.load, self._answer)
        self._batches = Batches(core, self._groups, self._scoring)
        self._evaluations = Evaluations(core, self._scoring)
        self._snapshots = core.snapshots(journal, num_covered)
        self._cancellation = Cancellation(core, self._groups, self._batches)
        self._ticker = Ticker(core, (TimeBudgets(core, self._groups), self._leases, self._scoring), journal)
        self.worker_calls = WorkerCalls(core, self._leases, self._scoring, self._ticker.advance)

    @classmethod
    async def open(
        cls,
        *,
        journal: Journal,
        settings: CoordinatorSettings,
        clock: Clock,
        ids: IdSource,
        run_id: str,
        seed: int,
        config_digest: str,
        open_traces: OpenTraces,
        stream: TaskStream | None = None,
        counters: Counters | None = None,
        sleep: Sleep = asyncio.sleep,
        jitter: Jitter | None = None,
    ) -> "Coordinator":
        """Start a run, or take over the one that ``journal`` holds. All leases then get one full period.

        Args:
            journal: the only durable truth; replayed first.
            settings: what to decide by; on a resume they may differ from before.
            clock, ids, sleep: time and identifiers; ``sleep`` must follow ``clock``.
            run_id, seed, config_digest: written into the first event; ``run_id`` is ignored on a resume.
            open_traces: counts and ends recordings of attempts that fail.
            stream: the training tasks; None admits no training groups (evaluation only).
            counters: where refusals, failures and drops are counted.
            jitter: chance in the back-off of retries; None waits each out in full.

        Raises:
            IntegrityError: the journal's chain is broken elsewhere than at its end.
            IllegalTransition: the journal holds an event that cannot follow.
            StorageFailed: the journal cannot be written.
        """
        state, num_covered = await recover(journal)
        core = Core(
            state=state,
            journal=journal,
            settings=settings,
            clock=clock,
            sleep=sleep,
            ids=ids,
            counters=counters if counters is not None else Counters(),
            open_traces=open_traces,
            jitter=jitter if jitter is not None else FullWait(),
        )
        coordinator = cls(core, journal, stream, num_covered)
        core.begin(run_id, seed, config_digest)
        await coordinator._begin()
        return coordinator

    async def _begin(self) -> None:
        core = self._core
        for effect in self._outbox():
            core.emit(effect)
        self._groups.admit()
        self._versions.release()
        self._ticker.start()
        try:
            await core.committed()
        except BaseException:
            await self.close()
            raise

    def _outbox(self) -> list[Effect]:
        """What a recovery hands out again."""
        return list(outbox(self._core.state))

    async def close(self) -> None:
        """Commit what is in line, stop the ticker, write a snapshot, close the journal. Live work stays live in it."""
        await self._ticker.stop()
        await self._core.commits.close()
        await self._snapshots.close()
        await self._journal.close()

    async def crash(self) -> None:
        """Stop as a killed process would: what is not committed is lost. For rehearsals of recovery."""
        self._core.commits.stop()
        await self._snapshots.stop()
        await self._ticker.stop()

    # --- harness workers --------------------------------------------------------------------------

    async def lease(
        self, worker_id: str, max_leases: int, wait_s: float, unstarted: frozenset[str] | None = None
    ) -> tuple[Lease, ...]:
        """Up to ``max_leases`` attempts, at once or within ``wait_s``; ``unstarted``: see :meth:`Leases.grant`."""
        return await self._poll(self._core.work, wait_s, lambda: self._leases.grant(worker_id, max_leases, unstarted))

    async def start(self, attempt_id: str, attempt_number: int, worker_id: str | None = None) -> None:
        """The worker has begun the attempt; optional, ``artifact_ready`` implies it.

        Raises:
            Refused: the attempt is not live, or is another worker's.
        """
        await self._answer(lambda: self._leases.start(worker_id, attempt_id, attempt_number))

    async def heartbeat(self, worker_id: str, attempt_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Renew leases; returns the attempts that are no longer alive and must be stopped."""
        return await self._answer(lambda: self._leases.heartbeat(worker_id, attempt_ids))

    async def artifact_ready(self, report: ArtifactReport, worker_id: str | None = None) -> None:
        """The trace is sealed and the artifact durable; the attempt goes to scoring.

        Raises:
            Refused: late, double, unknown, expired or foreign. An identical repetition is accepted.
        """
        await self._answer(lambda: self._leases.finish(report, worker_id))

    async def attempt_failed(self, failure: AttemptFailure, worker_id: str | None = None) -> None:
        """The system could not carry the attempt through; it is tried again while there is budget.

        Raises:
            Refused: the attempt is not live, or has reported its end already.
        """
        await self._answer(lambda: self._leases.report_failure(failure, worker_id))

    async def abandon(self, reason: str) -> int:
        """End all held attempts without using up budget, because their workers are known to be gone. How many."""
        return await self._answer(lambda: self._leases.abandon(reason))

    def live_lease(self, attempt_id: str) -> Lease | None:
        """The lease of an attempt that may sample; None for one that ended, expired, or is not committed. Immediate."""
        core = self._core
        rollout = core.state.attempts.get(attempt_id)
        if rollout is None or rollout.state not in HELD:
            return None
        if rollout.state is RolloutState.LEASED and rollout.changed > core.commits.num_committed:
            return None
        expires_at_s = self._leases.expires_at_s(attempt_id)
        if expires_at_s is None or expires_at_s <= core.now_s():
            return None
        return self._leases.lease_of(rollout)

    def is_alive(self, attempt_id: str) -> bool:
        """Whether the attempt may still sample."""
        return self.live_lease(attempt_id) is not None

    # --- scorers ----------------------------------------------------------------------------------

    async def lease_scores(
        self, worker_id: str, max_jobs: int, wait_s: float, held: frozenset[str] | None = None
    ) -> tuple[ScoreJob, ...]:
        """Up to ``max_jobs`` artifacts, at once or within ``wait_s``; ``held``: see :meth:`Scoring.grant`."""
        return await self._poll(self._core.scores, wait_s, lambda: self._scoring.grant(worker_id, max_jobs, held))

    async def score(self, score: Score, worker_id: str | None = None) -> None:
        """A verdict, or an outcome that says why there is none (then the artifact is scored again, within budget).

        Raises:
            Refused: late, double, unknown, expired or foreign. An identical repetition is accepted.
        """
        await self._answer(lambda: self._scoring.finish(score, worker_id))

    async def artifact_lost(self, attempt_id: str, detail: str, worker_id: str | None = None) -> None:
        """The artifact or trace of a sealed attempt cannot be read back; the rollout is tried again.

        Raises:
            Refused: the attempt is not waiting to be scored, or not by this scorer.
        """
        await self._answer(lambda: self._scoring.artifact_lost(attempt_id, detail, worker_id))

    # --- the trainer ------------------------------------------------------------------------------

    async def admit(self) -> int:
        """Admit what the lag bound has room for; happens by itself whenever room appears. How many groups."""
        return await self._answer(self._groups.admit)

    async def next_batch(self, step: int, deadline_s: float) -> BatchPlan:
        """The batch of optimizer step ``step``; waits for the weights of that step and for the due groups.

        Raises:
            DeadlineExceeded: names what is missing, who holds it and since when.
            IllegalTransition: ``step`` is not the next step.
            RunError: the run failed meanwhile, too much was dropped, or the task stream has ended.
        """
        return await self._batches.next_batch(step, deadline_s)

    async def begin_step(
        self,
        *,
        step: int,
        parent_version: int,
        group_ids: tuple[str, ...],
        sample_ids: tuple[str, ...],
        batch_digest: str,
    ) -> None:
        """Write the step ahead, once its batch is durable and before the optimizer moves. Idempotent.

        Args:
            sample_ids: ``<attempt_id>/<segment_index>`` of each sample, in batch order.

        Raises:
            IllegalTransition: the step has begun with another batch, or these cannot be its samples.
        """
        await self._answer(lambda: self._batches.begin(step, parent_version, group_ids, sample_ids, batch_digest))

    async def checkpointed(self, step: int, digest: str) -> None:
        """A checkpoint of the weights after ``step`` optimizer steps is durable."""
        await self._answer(lambda: self._batches.checkpoint(step, digest))

    async def pending_steps_after(self, checkpoint_step: int) -> tuple[PendingStep, ...]:
        """Steps to replay from their stored batches after loading the checkpoint of ``checkpoint_step``."""
        return await self._answer(lambda: self._versions.pending_steps(checkpoint_step))

    async def deletable_batches(self) -> tuple[int, ...]:
        """Steps whose stored batch every kept checkpoint covers."""
        return await self._answer(self._batches.deletable)

    async def batch_deleted(self, step: int) -> None:
        """Allows the stored batch of ``step`` to be deleted; delete it after this returns."""
        await self._answer(lambda: self._batches.delete(step))

    # --- versions ---------------------------------------------------------------------------------

    async def published(self, manifest: Manifest) -> None:
        """The files of a version are durable. Idempotent for equal weights under the same number.

        Raises:
            IllegalTransition: the number is used otherwise, or does not follow its parent.
        """
        await self._answer(lambda: self._versions.publish(manifest))

    async def loaded(self, proof: LoadProof) -> None:
        """A replica proved what it holds.

        Raises:
            IllegalTransition: it does not hold the published weights.
        """
        await self._answer(lambda: self._versions.load(proof))

    async def ready(self, version: int) -> None:
        """New attempts are bound to ``version`` from now on, if it is the newest. Idempotent."""
        await self._answer(lambda: self._versions.make_ready(version))

    async def orphan(self, version: int, reason: str) -> tuple[int, ...]:
        """Give up a version whose replay gave other weights, and its descendants; returns them all.

        Raises:
            IllegalTransition: it is not on the surviving lineage, or a kept checkpoint holds it.
        """
        return await self._answer(lambda: self._versions.orphan(version, reason))

    def reading(self, version: int) -> contextlib.AbstractContextManager[None]:
        """While the context is open the files of ``version`` are kept and it is not released."""
        return self._versions.reading(version)

    async def deletable_versions(self) -> tuple[int, ...]:
        """Versions whose files nobody needs."""
        return await self._answer(self._versions.deletable)

    async def version_deleted(self, version: int) -> None:
        """Allows the files of ``version`` to be deleted; delete them after this returns.

        Raises:
            IllegalTransition: somebody needs them; names who.
        """
        await self._answer(lambda: self._versions.delete(version))

    async def pin(self, version: int, label: str) -> None:
        """Keep the files of ``version`` for ``label``."""
        await self._answer(lambda: self._versions.pin(version, label))

    async def unpin(self, version: int, label: str) -> None:
        """``label`` no longer needs ``version``."""
        await self._answer(lambda: self._versions.unpin(version, label))

    async def wait_for_room(self, deadline_s: float) -> None:
        """Wait until one more version may be kept (``weights.max_retained_versions``); call before publishing.

        Raises:
            DeadlineExceeded: names each kept version and who needs it.
        """
        await self._versions.wait_for_room(deadline_s)

    def next_version(self) -> int:
        """The number to publish under."""
        return self._core.state.next_version()

    def version(self, number: int) -> VersionInfo | None:
        """What is known of a version."""
        return self._versions.find(number)

    def version_at_step(self, step: int) -> VersionInfo | None:
        """The surviving version after ``step`` optimizer steps."""
        return self._versions.at_step(step)

    def newest_ready(self) -> VersionInfo | None:
        """The version that new attempts are bound to."""
        return self._versions.newest_ready()

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

        Admitting a label again admits only what is missing, so that a resume can just repeat the call.
        ``priority``: above 0 goes before training, below 0 after it.

        Raises:
            InputError: the label is in use for another version, a task comes twice, or the priority is out of range.
            IllegalTransition: the version is not READY.
        """
        turns = self._core.settings.max_turns if max_turns is None else max_turns
        return await self._answer(
            lambda: self._evaluations.admit(
                task_ids,
                version=version,
                sampling=sampling,
                label=label,
                samples_per_task=samples_per_task,
                max_turns=turns,
                priority=priority,
            )
        )

    async def evaluation_results(self, label: str, deadline_s: float) -> tuple[EvaluationResult, ...]:
        """All results of a label, once its last group is closed.

        Raises:
            InputError: unknown label.
            DeadlineExceeded: names the missing rollouts, who holds them and since when.
        """
        return await self._evaluations.results(label, deadline_s)

    def evaluation_progress(self, label: str) -> tuple[int, int]:
        """Closed groups and all groups of a label."""
        return self._evaluations.progress(label)

    # --- cancellation -----------------------------------------------------------------------------

    async def cancel_group(self, group_id: str, reason: str) -> bool:
        """Drop a live group as cancelled: workers are told at their next heartbeat, and results come too late.

        Idempotent. False where nothing is left to cancel: the group is closed, consumed, unknown, or in the batch that
        the trainer holds. ``reason`` is journalled. An evaluation's group is missing from its results.
        """
        return await self._answer(lambda: self._cancellation.cancel_group(group_id, reason))

    async def cancel_task(self, task_id: str, reason: str) -> tuple[str, ...]:
        """Cancel all live groups of a task; the ids of those that were. The stream may issue the task again."""
        return await self._answer(lambda: self._cancellation.cancel_task(task_id, reason))

    # --- the run ----------------------------------------------------------------------------------

    async def finish(self, reason: str) -> None:
        """End the run: live groups are dropped as ``end_of_run`` and no work is given out. Idempotent."""
        await self._answer(lambda: self._finish(reason))

    def fail(self, error: BaseException) -> None:
        """Somebody the run cannot do without is gone: every wait and every later call ends with ``error``."""
        self._core.fail(error)

    async def failed(self) -> BaseException:
        """Wait, without end, for the run to fail; the error. A process that cannot commit any more must end."""
        return await self._core.failed()

    def listen(self, listener: Callable[[Effect], None]) -> None:
        """Hear of every effect after its commit; ``listener`` must neither block nor raise."""
        self._core.listen(listener)

    @property
    def state(self) -> State:
        """The live state, for reading between two awaits; it may be ahead of the journal by one commit."""
        return self._core.state

    @property
    def counters(self) -> Counters:
        """Refusals, failures, expiries, drops."""
        return self._core.counters

    async def books(self, recorded: Mapping[str, int]) -> bookkeeping.Books:
        """Both books now, given the recorder's sampled tokens by attempt."""
        return await self._answer(lambda: bookkeeping.books(self._core.state, recorded))

    async def diagnose(self) -> doctor.Diagnosis:
        """Who waits for whom."""
        core, jobs, expiries = self._core, self._scoring.held_jobs, self._leases.expiries
        return await self._answer(lambda: doctor.diagnose(core.state, core.settings, core.now_s(), jobs(), expiries()))

    def _finish(self, reason: str) -> None:
        run = self._core.state.run
        if run is None or run.is_finished:
            return
        self._groups.drop_all(e.DropReason.END_OF_RUN)
        self._versions.release()
        self._core.record(e.RunFinished(at_s=self._core.now_s(), reason=reason))
        self._core.work.notify()

    async def read(self, look: Callable[[], _T]) -> _T:
        """What ``look`` finds in the state, once that is durable; it must not change anything."""
        return await self._answer(look)

    # --- machinery --------------------------------------------------------------------------------

    async def _answer(self, act: Callable[[], _T]) -> _T:
        """Act on an up-to-date state, and answer, refusals too, when all that was read or written is durable."""
        self._ticker.advance()
        try:
            result = act()
        except (Refused, IllegalTransition):
            await self._core.committed()
            raise
        await self._core.committed()
        return result

    async def _poll(self, signal: Signal, wait_s: float, act: Callable[[], tuple[_T, ...]]) -> tuple[_T, ...]:
        until_s = self._core.now_s() + wait_s
        while True:
            self._ticker.advance()
            found = act()
            if found or self._core.now_s() >= until_s:
                await self._core.committed()
                return found
            await self._core.wait(signal, until_s)
