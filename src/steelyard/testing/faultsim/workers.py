"""The harness worker and the scorer as processes of their own: the real ones, with the network in between."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.harness.base import Services, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.metrics import Counters
from steelyard.scoring.worker import ScoringWorker
from steelyard.scoring.worker import WorkerSettings as ScorerSettings
from steelyard.testing.faultsim.control import CONTROL
from steelyard.testing.faultsim.disk import Blobs
from steelyard.testing.faultsim.network import Caller, Network
from steelyard.testing.faultsim.processes import Life
from steelyard.testing.faultsim.witness import Witness
from steelyard.testing.harness import MemorySandboxes
from steelyard.types import (
    ArtifactReport,
    AttemptFailure,
    ChatReply,
    ChatRequest,
    EndReason,
    Lease,
    Message,
    Outcome,
    Record,
    Score,
    ScoreJob,
    SealedTrace,
    Task,
    ToolCall,
    ToolRecord,
)

RETRY_S = 1.5
GIVE_UP_S = 12.0


class RemoteControl:
    """Coordinator and gateway as worker and scorer see them, over the network. Notes what was acknowledged."""

    def __init__(self, caller: Caller, witness: Witness, worker_id: str) -> None:
        self._call = caller.call
        self._witness = witness
        self._worker_id = worker_id

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        leases: tuple[Lease, ...] = await self._call(
            "lease", (worker_id, max_leases, wait_s), tuple[Lease, ...], wait_s=wait_s
        )
        for lease in leases:
            self._witness.leased(worker_id, lease)
        return leases

    async def start(self, attempt_id: str, attempt_number: int) -> None:
        await self._call("start", (attempt_id, attempt_number, self._worker_id))
        self._witness.started(attempt_id)

    async def heartbeat(self, worker_id: str, attempts: Mapping[str, int]) -> Sequence[str]:
        lost: tuple[str, ...] = await self._call("heartbeat", (worker_id, tuple(attempts)), tuple[str, ...])
        return lost

    async def artifact_ready(self, report: ArtifactReport) -> None:
        await self._call("artifact_ready", (report,))
        self._witness.reported(report)

    async def attempt_failed(self, failure: AttemptFailure) -> None:
        await self._call("attempt_failed", (failure,))
        self._witness.failed(failure)

    async def chat(self, attempt_id: str, request: ChatRequest, deadline_at_s: float) -> ChatReply:
        reply: ChatReply = await self._call("chat", (attempt_id, request), ChatReply, wait_s=8.0)
        self._witness.sampled(attempt_id, reply.request_id)
        return reply

    async def seal(self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...]) -> SealedTrace:
        sealed: SealedTrace = await self._call("seal", (attempt_id, end_reason, tools), SealedTrace)
        return sealed

    async def discard(self, attempt_id: str) -> int:
        num_tokens: int = await self._call("discard", (attempt_id,), int)
        return num_tokens

    async def lease_scores(self, worker_id: str, max_jobs: int, wait_s: float) -> Sequence[ScoreJob]:
        jobs: tuple[ScoreJob, ...] = await self._call(
            "lease_scores", (worker_id, max_jobs, wait_s), tuple[ScoreJob, ...], wait_s=wait_s
        )
        return jobs

    async def score(self, score: Score) -> None:
        await self._call("score", (score,))
        self._witness.scored(score)

    async def artifact_lost(self, attempt_id: str, detail: str) -> None:
        await self._call("artifact_lost", (attempt_id, detail))


class Artifacts:
    """The object store: artifacts by digest."""

    def __init__(self, blobs: Blobs[str]) -> None:
        self._blobs = blobs

    async def put(self, data: bytes) -> str:
        """Durable when this returns."""
        digest = digest_bytes(data)
        await self._blobs.put(digest, data)
        return digest

    async def get(self, digest: str) -> bytes:
        """The bytes; IntegrityError where they are not there or not the same."""
        data = self._blobs.read(digest)
        if digest_bytes(data) != digest:
            raise IntegrityError(f"artifact {digest} does not match its digest")
        return data


class _Answer(Record, frozen=True, kw_only=True):
    """What the session says to a message without a tool call."""

    text: str
    done: bool
    outcome: str = "ok"
    is_valid: bool = True


class _Session:
    """An attempt that ends after some turns; its artifact says how many."""

    def __init__(self, name: str, num_turns: int) -> None:
        self.files: Mapping[str, bytes] = {"task": name.encode()}
        self._name = name
        self._num_left = num_turns

    async def call(self, sandbox: Any, call: ToolCall) -> _Answer:
        raise IntegrityError(f"no tool was offered, {call.name} was called")

    def no_call(self, message: Message) -> _Answer:
        self._num_left -= 1
        return _Answer(text="go on", done=self._num_left <= 0)

    def turn_ended(self) -> None:
        """Nothing is kept by turn."""

    async def submit(self, sandbox: Any, answer: str) -> None:
        """No program runs here."""

    def artifact(self) -> bytes:
        return self._name.encode()


class _Tasks:
    """Tasks of one message, and sessions of one to three turns."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def task(self, task_id: str) -> Task:
        return Task(
            task_id=task_id,
            environment="faultsim",
            environment_version="1",
            split="train",
            index=0,
            messages=(Message(role="user", content=task_id),),
            tools=(),
        )

    def session(self, task: Task) -> _Session:
        return _Session(f"{task.task_id} {self._draw.getrandbits(32)}", self._draw.randint(1, 3))


class WorkerProgram:
    """What runs in a worker process."""

    def __init__(
        self, network: Network, artifacts: Artifacts, witness: Witness, draw: random.Random, *, heartbeat_s: float
    ) -> None:
        self._network = network
        self._artifacts = artifacts
        self._witness = witness
        self._draw = draw
        self._heartbeat_s = heartbeat_s

    async def __call__(self, life: Life) -> None:
        """One life, which leases under the same name as the ones before."""
        caller = Caller(life, self._network, CONTROL, retry_s=RETRY_S, give_up_s=GIVE_UP_S)
        control = RemoteControl(caller, self._witness, life.name)
        settings = WorkerSettings(
            max_concurrent=2,
            lease_wait_s=2.0,
            heartbeat_every_s=self._heartbeat_s,
            turn_deadline_s=15.0,
            attempt_deadline_s=60.0,
            sandbox_deadline_s=5.0,
            call_deadline_s=15.0,
        )
        services = Services(
            leases=control,
            chat=control,
            sandboxes=MemorySandboxes(),
            traces=control,
            artifacts=self._artifacts,
            tasks=_Tasks(self._draw),
        )
        await HarnessWorker(life.name, settings, services, life.clock, Counters()).run(asyncio.Event())


class _Grader:
    """Grades by the artifact alone; sometimes it fails, or takes longer than the job's lease."""

    capacity = 3

    def __init__(self, draw: random.Random, fail_frac: float) -> None:
        self._draw = draw
        self._fail_frac = fail_frac

    async def grade(self, job: ScoreJob, artifact: bytes) -> Score:
        await asyncio.sleep(self._draw.expovariate(2.0))
        is_failed = self._draw.random() < self._fail_frac
        return Score(
            job_id=job.job_id,
            attempt_id=job.attempt_id,
            outcome=Outcome.GRADER_FAILED if is_failed else Outcome.SCORED,
            value=None if is_failed else float(int(digest_bytes(artifact)[:4], 16) % 2),
            verifier_version="v1",
        )


class ScorerProgram:
    """What runs in a scorer process."""

    def __init__(
        self, network: Network, artifacts: Artifacts, witness: Witness, draw: random.Random, *, fail_frac: float
    ) -> None:
        self._network = network
        self._artifacts = artifacts
        self._witness = witness
        self._draw = draw
        self._fail_frac = fail_frac

    async def __call__(self, life: Life) -> None:
        """One life."""
        caller = Caller(life, self._network, CONTROL, retry_s=RETRY_S, give_up_s=GIVE_UP_S)
        control = RemoteControl(caller, self._witness, life.name)
        settings = ScorerSettings(worker_id=life.name, alarm_failure_frac=1.0, poll_s=2.0)
        grader = _Grader(self._draw, self._fail_frac)
        await ScoringWorker(control, self._artifacts, grader, settings, Counters()).run()
