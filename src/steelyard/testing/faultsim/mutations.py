"""Eleven faults of the logic, each small and at one place. A simulation that does not find them all proves nothing.

Each replaces one part of a run by a subclass or a wrapper; the real modules are not touched.
"""

from collections.abc import Mapping, Sequence

import msgspec

from steelyard.coordinator.core import Core
from steelyard.coordinator.effects import Effect
from steelyard.coordinator.events import AnyEvent
from steelyard.coordinator.groups import Groups, TaskStream
from steelyard.coordinator.leases import Leases
from steelyard.coordinator.records import PendingStep
from steelyard.coordinator.retry_rules import REPORTED
from steelyard.coordinator.scores import Scoring
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.transitions import HELD
from steelyard.digests import digest_bytes
from steelyard.errors import Refused
from steelyard.ids import IdKind, IdSource
from steelyard.testing.faultsim.control import Parts
from steelyard.testing.faultsim.disk import DiskJournal, File
from steelyard.testing.faultsim.training import build_batch
from steelyard.testing.faultsim.workers import Artifacts
from steelyard.testing.faultsim.world import Mutation
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Score, StepBatch, TaskRef, TrainingSample


class _UnfencedLeases(Leases):
    """A result of an expired attempt is taken for the newest attempt of its rollout."""

    def __init__(self, core: Core, groups: Groups) -> None:
        super().__init__(core, groups)
        self._rollout_of: dict[str, str] = {}

    def grant(self, worker_id: str, max_leases: int, unstarted: frozenset[str] | None = None) -> tuple[Lease, ...]:
        leases = super().grant(worker_id, max_leases, unstarted)
        self._rollout_of.update({lease.attempt_id: lease.rollout_id for lease in leases})
        return leases

    def finish(self, report: ArtifactReport, worker_id: str | None = None) -> None:
        state = self._core.state
        rollout = state.rollouts.get(self._rollout_of.get(report.attempt_id, ""))
        if report.attempt_id in state.attempts or rollout is None or rollout.state not in HELD:
            super().finish(report, worker_id)
            return
        newest = rollout.attempt_id or ""
        trace = msgspec.structs.replace(report.trace, attempt_id=newest)
        super().finish(
            msgspec.structs.replace(report, attempt_id=newest, attempt_number=rollout.attempt_number, trace=trace)
        )


class _Unfenced(Coordinator):
    leases_type = _UnfencedLeases


class _HastyJournal(DiskJournal):
    """Says that a batch is durable once it is written."""

    async def append(self, events: Sequence[AnyEvent]) -> None:
        self.write(events)


class _RepeatingIds:
    """Every fifth attempt gets an id that was given out long before."""

    def __init__(self, ids: IdSource) -> None:
        self._ids = ids
        self._given: list[str] = []

    def new(self, kind: IdKind) -> str:
        if kind != "att":
            return self._ids.new(kind)
        if len(self._given) % 5 == 4:
            self._given.append("")
            return self._given[-5]
        self._given.append(self._ids.new(kind))
        return self._given[-1]


class _Forgetful(Coordinator):
    """A recovery hands nothing out again."""

    def _outbox(self) -> list[Effect]:
        return []


class _DoubleScoring(Scoring):
    """A second score of an attempt is taken like the first."""

    def finish(self, score: Score, worker_id: str | None = None) -> None:
        try:
            super().finish(score, worker_id)
        except Refused as refused:
            if refused.reason != "double":
                raise


class _DoublyScored(Coordinator):
    scoring_type = _DoubleScoring


class _BackwardStream:
    """The first prompt after a recovery is the last one before it."""

    def __init__(self, stream: TaskStream, first: int) -> None:
        self._stream = stream
        self._first = first

    def at(self, position: int) -> TaskRef | None:
        return self._stream.at(position - 1 if position == self._first else position)


class _RepeatingGroups(Groups):
    def __init__(self, core: Core, stream: TaskStream | None) -> None:
        is_recovery = stream is not None and core.state.next_position > 0
        super().__init__(core, _BackwardStream(stream, core.state.next_position) if is_recovery and stream else stream)


class _Repeating(Coordinator):
    groups_type = _RepeatingGroups


class _GenerousLeases(Leases):
    """Renews whatever lease it is asked to renew."""

    def heartbeat(self, worker_id: str, attempt_ids: tuple[str, ...]) -> tuple[str, ...]:
        dead: list[str] = []
        for attempt_id in attempt_ids:
            rollout = self._core.state.attempts.get(attempt_id)
            dead.extend(super().heartbeat(rollout.worker_id or "" if rollout else worker_id, (attempt_id,)))
        return tuple(dead)


class _Generous(Coordinator):
    leases_type = _GenerousLeases


class _DoubleCountingLeases(Leases):
    """Adds up what the worker and what the recorder say was lost."""

    def report_failure(self, failure: AttemptFailure, worker_id: str | None = None) -> None:
        rollout = self._held(failure.attempt_id, failure.attempt_number, None)
        lost_tokens = self._core.discard(failure.attempt_id) + failure.lost_tokens
        self.fail(rollout, REPORTED[failure.outcome], failure.reason, failure.detail, lost_tokens=lost_tokens)


class _DoubleCounting(Coordinator):
    leases_type = _DoubleCountingLeases


class _Amnesiac(Coordinator):
    """Says that no step has to be replayed."""

    async def pending_steps_after(self, checkpoint_step: int) -> tuple[PendingStep, ...]:
        return ()


class _CarelessArtifacts(Artifacts):
    """Hands out the digest of an artifact that is only in the page cache."""

    async def put(self, data: bytes) -> str:
        digest = digest_bytes(data)
        self._blobs.put_carelessly(digest, data)
        return digest


def _doubled(step: int, version: int, samples: Sequence[TrainingSample]) -> StepBatch:
    """The samples of the first attempt are computed twice, and named once."""
    honest = build_batch(step, version, samples)
    twice = build_batch(step, version, [s for s in samples if s.attempt_id == samples[0].attempt_id])
    return msgspec.structs.replace(honest, micro_batches=honest.micro_batches + twice.micro_batches)


def _hasty(file: File) -> DiskJournal:
    return _HastyJournal(file)


MUTATIONS: Mapping[str, Mutation] = {
    "drop the fence": Mutation(parts=Parts(coordinator=_Unfenced)),
    "acknowledge before the sync": Mutation(parts=Parts(journal=_hasty)),
    "reuse an attempt id": Mutation(parts=Parts(ids=_RepeatingIds)),
    "lose the outbox on recovery": Mutation(parts=Parts(coordinator=_Forgetful)),
    "accept a score twice": Mutation(parts=Parts(coordinator=_DoublyScored)),
    "issue a prompt twice after recovery": Mutation(parts=Parts(coordinator=_Repeating)),
    "forget the steps to replay": Mutation(parts=Parts(coordinator=_Amnesiac)),
    "train a trajectory twice": Mutation(build=_doubled),
    "store the event before the blob": Mutation(artifacts=_CarelessArtifacts),
    "extend a lease of another worker": Mutation(parts=Parts(coordinator=_Generous)),
    "count lost tokens twice": Mutation(parts=Parts(coordinator=_DoubleCounting)),
}
"""Every one by what it does wrong."""
