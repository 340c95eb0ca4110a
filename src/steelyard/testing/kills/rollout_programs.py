"""A worker and a scorer without a model: what they sample and how they judge is drawn, all the rest is real.

Calls go through the real client, turns into the real trace store and ledger, artifacts to the disk; each comes before
the report that names it. Both work until they are killed.
"""

import asyncio
import os
import random
from pathlib import Path

from steelyard.coordinator.client import CoordinatorClient
from steelyard.digests import digest_bytes
from steelyard.durable import write_durably
from steelyard.errors import Refused
from steelyard.processes.supervision import task_group
from steelyard.run.directory import RunDirectory
from steelyard.testing.kills import acknowledged as told
from steelyard.testing.training_data import make_turn
from steelyard.traces.shared_ledger import SharedLedger
from steelyard.traces.store import TraceStore
from steelyard.types import ArtifactReport, AttemptFailure, EndReason, Lease, Outcome, Score, ScoreJob, Turn

REPLICA = "rep_0"
_VOCABULARY = 50
_MAX_CONCURRENT = 4
_POLL_S = 2.0


def store(path: Path, data: bytes) -> None:
    """Make ``data`` durable under ``path``, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    write_durably(temporary, data)
    temporary.rename(path)


def artifact_path(directory: RunDirectory, digest: str) -> Path:
    """Where an artifact lies."""
    return directory.artifacts / digest[:2] / digest


class WorkerProgram:
    """Leases attempts and plays several at a time.

    Args:
        heartbeat_s: seconds between two renewals of leases.
        turn_s: how long a turn takes, in the mean.
        fail_frac: the fraction of attempts that fail for a reason of ours.
    """

    def __init__(
        self,
        directory: RunDirectory,
        client: CoordinatorClient,
        notes: told.AcknowledgementFile,
        draw: random.Random,
        *,
        heartbeat_s: float,
        turn_s: float = 0.02,
        fail_frac: float = 0.03,
    ) -> None:
        self._directory = directory
        self._client = client
        self._notes = notes
        self._draw = draw
        self._heartbeat_s = heartbeat_s
        self._turn_s = turn_s
        self._fail_frac = fail_frac
        self._ledger = SharedLedger(directory.recorded)
        self._traces = TraceStore(_own_corner(directory, client.worker_id))
        self._live: dict[str, asyncio.Task[None]] = {}
        self._numbers: dict[str, int] = {}

    async def run(self) -> None:
        """Work, without end."""
        async with task_group() as group:
            group.create_task(self._renew(), name="heartbeat")
            while True:
                while len(self._live) >= _MAX_CONCURRENT:
                    await asyncio.wait(self._live.values(), return_when=asyncio.FIRST_COMPLETED)
                free = _MAX_CONCURRENT - len(self._live)
                for lease in await self._client.lease(self._client.worker_id, free, _POLL_S):
                    self._notes.note(told.GotLease(worker_id=self._client.worker_id, lease=lease))
                    self._numbers[lease.attempt_id] = lease.attempt_number
                    self._live[lease.attempt_id] = group.create_task(self._play(lease), name=lease.attempt_id)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for attempt_id in await self._client.heartbeat(self._client.worker_id, dict(self._numbers)):
                if attempt_id in self._live:
                    self._live[attempt_id].cancel()

    async def _play(self, lease: Lease) -> None:
        try:
            await self._attempt(lease)
        except Refused:
            pass  # it ended without us, and whoever ended it has said so in the journal
        finally:
            del self._live[lease.attempt_id], self._numbers[lease.attempt_id]

    async def _attempt(self, lease: Lease) -> None:
        await self._client.start(lease.attempt_id, lease.attempt_number)
        self._notes.note(told.Started(attempt_id=lease.attempt_id))
        last: Turn | None = None
        for index in range(self._draw.randint(1, 3)):
            await asyncio.sleep(self._draw.expovariate(1.0 / self._turn_s))
            last = self._sample(lease, index, last)
            self._traces.append(last)
            self._ledger.add(lease.attempt_id, last.request_id, len(last.token_ids))
        if self._draw.random() < self._fail_frac:
            await self._fail(lease)
            return
        report = await self._hand_in(lease)
        await self._client.artifact_ready(report)
        self._notes.note(told.Reported(report=report))

    async def _hand_in(self, lease: Lease) -> ArtifactReport:
        self._ledger.sync(lease.attempt_id)
        trace = await self._traces.seal(lease.attempt_id, EndReason.SUBMITTED, (), lease.policy_version)
        artifact = f"artifact of {lease.attempt_id}".encode()
        digest = digest_bytes(artifact)
        store(artifact_path(self._directory, digest), artifact)
        return ArtifactReport(
            attempt_id=lease.attempt_id, attempt_number=lease.attempt_number, trace=trace, artifact_digest=digest
        )

    async def _fail(self, lease: Lease) -> None:
        failure = AttemptFailure(
            attempt_id=lease.attempt_id,
            attempt_number=lease.attempt_number,
            outcome=Outcome.INFRA_FAILED,
            reason="deadline",
        )
        await self._client.attempt_failed(failure)
        self._notes.note(told.Failed(failure=failure))

    def _sample(self, lease: Lease, index: int, last: Turn | None) -> Turn:
        """The next turn extends the one before, or starts a new segment, as drawn."""
        before: tuple[int, ...] = ()
        segment = 0
        if last is not None:
            is_extension = self._draw.random() < 0.7
            before = last.prompt_token_ids + last.token_ids if is_extension else ()
            segment = last.segment_index + (not is_extension)
        return make_turn(
            [*before, *self._tokens(3)],
            self._tokens(self._draw.randint(1, 6)),
            attempt_id=lease.attempt_id,
            turn_index=index,
            segment_index=segment,
            spans=((0, lease.policy_version),),
            replica_id=REPLICA,
            load_id=f"load_{lease.policy_version}",
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(_VOCABULARY) for _ in range(count)]


def _own_corner(directory: RunDirectory, name: str) -> Path:
    """A root for a trace store of one process: unfinished files are its own, sealed traces lie where all others do."""
    corner = directory.traces / f"of-{name}"
    corner.mkdir(parents=True, exist_ok=True)
    (directory.traces / "sealed").mkdir(exist_ok=True)
    if not (corner / "sealed").is_symlink():
        (corner / "sealed").symlink_to("../sealed")
    return corner


class ScorerProgram:
    """Takes jobs and judges artifacts by their bytes.

    Args:
        grade_s: how long a judgement takes, in the mean.
        fail_frac: the fraction of gradings that fail.
    """

    def __init__(
        self,
        directory: RunDirectory,
        client: CoordinatorClient,
        notes: told.AcknowledgementFile,
        draw: random.Random,
        *,
        grade_s: float = 0.01,
        fail_frac: float = 0.03,
    ) -> None:
        self._directory = directory
        self._client = client
        self._notes = notes
        self._draw = draw
        self._grade_s = grade_s
        self._fail_frac = fail_frac

    async def run(self) -> None:
        """Work, without end."""
        while True:
            jobs = await self._client.lease_scores(self._client.worker_id, _MAX_CONCURRENT, _POLL_S)
            async with task_group() as group:
                for job in jobs:
                    group.create_task(self._judge(job), name=job.job_id)

    async def _judge(self, job: ScoreJob) -> None:
        artifact = artifact_path(self._directory, job.artifact_digest).read_bytes()
        await asyncio.sleep(self._draw.expovariate(1.0 / self._grade_s))
        is_failed = self._draw.random() < self._fail_frac
        score = Score(
            job_id=job.job_id,
            attempt_id=job.attempt_id,
            outcome=Outcome.GRADER_FAILED if is_failed else Outcome.SCORED,
            value=None if is_failed else float(int(digest_bytes(artifact)[:4], 16) % 2),
            verifier_version="v1",
        )
        try:
            await self._client.score(score)
        except Refused:
            return  # the job ran out, or its coordinator died: the artifact is offered again
        self._notes.note(told.Delivered(score=score))
