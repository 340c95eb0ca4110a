"""Neighbours of the harness worker for tests: leases from a list, scripted chat, sandboxes in memory."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from steelyard.digests import digest_bytes
from steelyard.errors import Refused
from steelyard.types import (
    ArtifactReport,
    AttemptFailure,
    ChatReply,
    ChatRequest,
    EndReason,
    FinishReason,
    Lease,
    Message,
    Purpose,
    Sampling,
    SealedTrace,
    ToolCall,
    ToolRecord,
)


class FakeClock:
    """Time that moves only when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        self._now_s += by_s


def make_lease(number: int, task_id: str, max_turns: int = 6, lease_s: float = 60.0) -> Lease:
    """The lease of attempt ``att_<number>``, issued at the start of a :class:`FakeClock`."""
    return Lease(
        attempt_id=f"att_{number}",
        rollout_id=f"rol_{number}",
        group_id="grp_0",
        task_id=task_id,
        purpose=Purpose.TRAIN,
        member_index=number,
        attempt_number=1,
        policy_version=0,
        sampling=Sampling(),
        max_turns=max_turns,
        issued_at_s=1000.0,
        expires_at_s=1000.0 + lease_s,
    )


class FakeLeases:
    """Gives out the leases it was made with, then none; sets ``stop`` once all have been reported or lost.

    ``lost`` are attempts that the next heartbeat calls lost; ``refused`` are refused whatever they report.
    """

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.waiting = list(leases)
        self.stop = asyncio.Event()
        self.started: list[str] = []
        self.reports: list[ArtifactReport] = []
        self.failures: list[AttemptFailure] = []
        self.heartbeats: list[dict[str, int]] = []
        self.lost: set[str] = set()
        self.refused: set[str] = set()
        self.most_asked = 0
        self._num_open = len(self.waiting)

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        self.most_asked = max(self.most_asked, max_leases)
        given, self.waiting = self.waiting[:max_leases], self.waiting[max_leases:]
        if not given:
            await asyncio.wait({asyncio.create_task(self.stop.wait())}, timeout=wait_s)
        return given

    async def start(self, attempt_id: str, attempt_number: int) -> None:
        self.started.append(attempt_id)
        self._check(attempt_id)

    async def heartbeat(self, worker_id: str, attempts: Mapping[str, int]) -> Sequence[str]:
        self.heartbeats.append(dict(attempts))
        return [attempt_id for attempt_id in attempts if attempt_id in self.lost]

    async def artifact_ready(self, report: ArtifactReport) -> None:
        self._check(report.attempt_id)
        self.reports.append(report)
        self.close_one()

    async def attempt_failed(self, failure: AttemptFailure) -> None:
        self._check(failure.attempt_id)
        self.failures.append(failure)
        self.close_one()

    def close_one(self) -> None:
        """Count one lease as ended."""
        self._num_open -= 1
        if self._num_open == 0:
            self.stop.set()

    def _check(self, attempt_id: str) -> None:
        if attempt_id in self.refused:
            self.close_one()
            raise Refused("late", attempt_id)


Policy = Callable[[str, ChatRequest], Message | ChatReply]


class ScriptedChat:
    """Answers with what a policy function says. ``gate``, where given, is awaited before each answer."""

    def __init__(self, policy: Policy, gate: Callable[[str], Awaitable[None]] | None = None) -> None:
        self._policy = policy
        self._gate = gate
        self.requests: list[tuple[str, ChatRequest]] = []

    async def chat(self, attempt_id: str, request: ChatRequest, deadline_at_s: float) -> ChatReply:
        self.requests.append((attempt_id, request))
        if self._gate is not None:
            await self._gate(attempt_id)
        answer = self._policy(attempt_id, request)
        return answer if isinstance(answer, ChatReply) else make_reply(answer)


def make_reply(
    message: Message,
    finish_reason: FinishReason = FinishReason.STOP,
    num_malformed_calls: int = 0,
    context_full: bool = False,
) -> ChatReply:
    """A reply with made-up token counts."""
    return ChatReply(
        request_id="req_0",
        message=message,
        finish_reason=finish_reason,
        num_prompt_tokens=10,
        num_completion_tokens=5,
        num_malformed_calls=num_malformed_calls,
        context_full=context_full,
    )


def calls(*named: tuple[str, str]) -> Message:
    """An assistant message that calls tools, each given as (name, arguments as JSON)."""
    return Message(
        role="assistant",
        tool_calls=tuple(ToolCall(id=f"call_{i}", name=name, arguments=text) for i, (name, text) in enumerate(named)),
    )


class MemorySandbox:
    """Files in memory. ``may_close``, where given, is awaited by ``close``."""

    def __init__(self, label: str, may_close: asyncio.Event | None = None) -> None:
        self.label = label
        self.files: dict[str, bytes] = {}
        self.is_closed = False
        self._may_close = may_close

    async def write_file(self, name: str, data: bytes) -> None:
        self.files[name] = data

    async def read_file(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    async def close(self) -> None:
        if self._may_close is not None:
            await self._may_close.wait()
        self.is_closed = True


class MemorySandboxes:
    """Makes sandboxes in memory; ``errors`` are raised, one an acquisition, before any is given out."""

    def __init__(self, may_close: asyncio.Event | None = None, errors: Sequence[Exception] = ()) -> None:
        self.given: list[MemorySandbox] = []
        self._may_close = may_close
        self._errors = list(errors)

    async def acquire(self, label: str, deadline_s: float) -> MemorySandbox:
        if self._errors:
            raise self._errors.pop(0)
        sandbox = MemorySandbox(label, self._may_close)
        self.given.append(sandbox)
        return sandbox

    @property
    def num_open(self) -> int:
        return sum(not sandbox.is_closed for sandbox in self.given)


class MemoryTraces:
    """Seals with made-up numbers; each discard loses ``tokens_per_attempt`` tokens."""

    def __init__(self, tokens_per_attempt: int = 7, error: Exception | None = None) -> None:
        self.sealed: dict[str, tuple[EndReason, tuple[ToolRecord, ...]]] = {}
        self.discarded: list[str] = []
        self._tokens_per_attempt = tokens_per_attempt
        self._error = error

    async def seal(self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...]) -> SealedTrace:
        if self._error is not None:
            raise self._error
        self.sealed[attempt_id] = (end_reason, tools)
        return SealedTrace(
            attempt_id=attempt_id,
            digest=digest_bytes(attempt_id.encode()),
            num_turns=1,
            num_tokens=self._tokens_per_attempt,
            oldest_version=0,
            newest_version=0,
            mean_version=0.0,
            num_segments=1,
            end_reason=end_reason,
        )

    async def discard(self, attempt_id: str) -> int:
        self.discarded.append(attempt_id)
        return self._tokens_per_attempt


class MemoryArtifacts:
    """Blobs in a dict."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    async def put(self, data: bytes) -> str:
        digest = digest_bytes(data)
        self.blobs[digest] = data
        return digest


class StepSleep:
    """A ``sleep`` that ends only when ``tick`` is called; durations are noted, never waited for."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []
        self._ticks: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self, duration_s: float) -> Any:
        self.asked_s.append(duration_s)
        await self._ticks.get()

    def tick(self) -> None:
        self._ticks.put_nowait(None)
