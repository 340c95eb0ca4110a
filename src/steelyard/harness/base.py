"""What the harness needs from the rest of the system, and what it keeps.

::

    LeaseSource --Lease--> worker --ChatRequest--> ChatClient --ChatReply--> chat loop --ToolCall--> Session
                             |                                                                     (SandboxHandle)
                             +--> TraceSealer.seal, ArtifactStore.put, LeaseSource.artifact_ready

The harness sees messages and finish reasons. Token ids and log-probabilities pass it by.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from steelyard.errors import DeadlineExceeded
from steelyard.types import (
    ArtifactReport,
    AttemptFailure,
    ChatReply,
    ChatRequest,
    EndReason,
    Lease,
    Message,
    SealedTrace,
    Task,
    ToolCall,
    ToolRecord,
)


class LeaseSource(Protocol):
    """The coordinator, as a worker sees it. All methods raise ``RunError`` where it cannot be reached."""

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        """Up to ``max_leases`` leases; waits up to ``wait_s`` seconds for the first, then may return none."""
        ...

    async def start(self, attempt_id: str, attempt_number: int) -> None:
        """The attempt runs now. Raises ``Refused`` where it is no longer ours."""
        ...

    async def heartbeat(self, worker_id: str, attempts: Mapping[str, int]) -> Sequence[str]:
        """Renew the leases of live attempts (id to number); returns the ids of those that are lost."""
        ...

    async def artifact_ready(self, report: ArtifactReport) -> None:
        """The attempt is done. Raises ``Refused`` where it comes late or twice."""
        ...

    async def attempt_failed(self, failure: AttemptFailure) -> None:
        """The system could not carry it through. Raises ``Refused`` where it comes late or twice."""
        ...


class ChatClient(Protocol):
    """The gateway."""

    async def chat(self, attempt_id: str, request: ChatRequest, deadline_at_s: float) -> ChatReply:
        """One model call.

        Raises:
            DeadlineExceeded: it was not answered in time.
            EngineError, RunError: it failed; nothing of it may be used.
        """
        ...


class SandboxHandle(Protocol):
    """A sandbox of one attempt; sessions use more of it."""

    async def write_file(self, name: str, data: bytes) -> None: ...

    async def close(self) -> None:
        """Destroy it; returns when its processes are gone."""
        ...


class SandboxSource(Protocol):
    """Gives out warm sandboxes."""

    async def acquire(self, label: str, deadline_s: float) -> SandboxHandle: ...


class TraceSealer(Protocol):
    """The trace store, by the side of which the tokens went."""

    async def seal(self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...]) -> SealedTrace:
        """Close the trace; it is durable when this returns."""
        ...

    async def discard(self, attempt_id: str) -> int:
        """Throw an attempt's turns away; returns how many sampled tokens were lost with them."""
        ...


class ArtifactStore(Protocol):
    """Blobs by digest."""

    async def put(self, data: bytes) -> str:
        """Store durably; returns the digest."""
        ...


class ToolAnswer(Protocol):
    """What a session says of one call."""

    @property
    def text(self) -> str: ...

    @property
    def outcome(self) -> str: ...

    @property
    def is_valid(self) -> bool: ...

    @property
    def done(self) -> bool: ...


class LoopResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the agent ended, and what it called."""

    end_reason: EndReason
    tools: tuple[ToolRecord, ...]


class Session(Protocol):
    """The trusted side of one attempt at a task."""

    @property
    def files(self) -> Mapping[str, bytes]: ...

    async def call(self, sandbox: Any, call: ToolCall) -> ToolAnswer: ...

    def no_call(self, message: Message) -> ToolAnswer: ...

    def turn_ended(self) -> None: ...

    async def submit(self, sandbox: Any, answer: str) -> None: ...

    def artifact(self) -> bytes: ...


SessionT_co = TypeVar("SessionT_co", bound=Session, covariant=True)


class TaskSource(Protocol[SessionT_co]):
    """The environment, as a worker sees it."""

    def task(self, task_id: str) -> Task: ...

    def session(self, task: Task) -> SessionT_co: ...


class Agent(Protocol):
    """Carries attempts through: talks to the policy and acts in the sandbox, until the agent is done."""

    async def run(self, lease: Lease, task: Task, session: Session, sandbox: Any) -> LoopResult:
        """One attempt. Raises where it could not be carried through by no fault of the agent."""
        ...


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a worker. All waits are bounded; none of them limits the policy.

    Attributes:
        max_concurrent: live attempts, those whose sandbox is still going away included.
        lease_wait_s: how long one request for leases may wait for work.
        heartbeat_every_s: well below the period of a lease.
        turn_deadline_s: queueing and sampling of one model call.
        tool_deadline_s: one tool call, as a guard above the sandbox's own limit.
        attempt_deadline_s: a whole attempt, storing included.
        sandbox_deadline_s: getting a sandbox, and again destroying it.
        call_deadline_s: one short call to the coordinator or the trace store.
        drain_deadline_s: how long live attempts may go on once the worker is told to stop.
    """

    max_concurrent: int = 64
    lease_wait_s: float = 1.0
    heartbeat_every_s: float = 10.0
    turn_deadline_s: float = 60.0
    tool_deadline_s: float = 30.0
    attempt_deadline_s: float = 600.0
    sandbox_deadline_s: float = 30.0
    call_deadline_s: float = 30.0
    drain_deadline_s: float = 5.0


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """The neighbours of a worker. ``agent`` None: the built-in loop, which asks ``chat``."""

    leases: LeaseSource
    chat: ChatClient
    sandboxes: SandboxSource
    traces: TraceSealer
    artifacts: ArtifactStore
    tasks: TaskSource[Session]
    agent: Agent | None = None


@contextlib.asynccontextmanager
async def deadline(what: str, culprits: tuple[str, ...], limit_s: float) -> AsyncIterator[None]:
    """Bound a wait.

    Raises:
        DeadlineExceeded: the block took longer than ``limit_s`` seconds; says what was waited for, and for whom.
    """
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(what, culprits, limit_s) from None
