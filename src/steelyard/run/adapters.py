"""Small bridges between a stage's Protocol and the neighbour that serves it."""

from collections.abc import Mapping, Sequence

from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.coordinator.service import Coordinator
from steelyard.errors import Refused
from steelyard.gateway.capability import AttemptDirectory
from steelyard.gateway.recorder import Recorder
from steelyard.gateway.service import Gateway
from steelyard.run.news import ToolTimes
from steelyard.types import (
    ArtifactReport,
    AttemptBinding,
    AttemptFailure,
    ChatReply,
    ChatRequest,
    EndReason,
    Lease,
    Purpose,
    SealedTrace,
    ToolRecord,
)


class LiveAttempts:
    """The coordinator's leases as the gateway's directory of attempts.

    ``attempt_deadline_s``: an attempt's last model call ends so long after its lease was issued. ``follows_updates``:
    weights may change under the attempts of training; an evaluation is of one version always.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        max_context_tokens: int,
        attempt_deadline_s: float,
        *,
        follows_updates: bool = False,
    ) -> None:
        self._coordinator = coordinator
        self._max_context_tokens = max_context_tokens
        self._attempt_deadline_s = attempt_deadline_s
        self._follows_updates = follows_updates

    def binding(self, attempt_id: str) -> AttemptBinding | None:
        """What a live attempt is bound to; None for any other."""
        lease = self._coordinator.live_lease(attempt_id)
        if lease is None:
            return None
        return AttemptBinding(
            policy_version=lease.policy_version,
            sampling=lease.sampling,
            max_context_tokens=self._max_context_tokens,
            deadline_at_s=lease.issued_at_s + self._attempt_deadline_s,
            follows_updates=self._follows_updates and lease.purpose is Purpose.TRAIN,
        )

    def holder(self, attempt_id: str) -> str:
        """The worker that holds a live attempt.

        Raises:
            Refused: the attempt is not alive: ``unknown``, ``late`` or ``expired``.
        """
        state = self._coordinator.state
        rollout = state.attempts.get(attempt_id)
        if rollout is None or not self._coordinator.is_alive(attempt_id):
            reason = "late" if rollout is not None else state.ended_attempts.get(attempt_id, "unknown")
            raise Refused(reason, f"attempt {attempt_id} is not alive")
        assert rollout.worker_id is not None, "a held attempt has a worker"
        return rollout.worker_id


class WorkerKeys:
    """The coordinator's keys as the gateway sees them: those of workers."""

    def __init__(self, keys: CapabilityRing) -> None:
        self._keys = keys

    def worker_of(self, key: str, now_s: float) -> str:
        """The worker's name.

        Raises:
            Refused: ``foreign`` or ``expired``.
        """
        holder = self._keys.verify(key, now_s)
        if holder.role is not Role.WORKER:
            raise Refused("foreign", f"the key must be of a worker, got one of a {holder.role}")
        return holder.worker_id


class Leases:
    """The coordinator as a harness worker sees it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        return await self._coordinator.lease(worker_id, max_leases, wait_s)

    async def start(self, attempt_id: str, attempt_number: int) -> None:
        await self._coordinator.start(attempt_id, attempt_number)

    async def heartbeat(self, worker_id: str, attempts: Mapping[str, int]) -> Sequence[str]:
        return await self._coordinator.heartbeat(worker_id, tuple(attempts))

    async def artifact_ready(self, report: ArtifactReport) -> None:
        await self._coordinator.artifact_ready(report)

    async def attempt_failed(self, failure: AttemptFailure) -> None:
        await self._coordinator.attempt_failed(failure)


class InProcessChat:
    """The gateway as the built-in harness calls it: no HTTP in between."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def chat(self, attempt_id: str, request: ChatRequest, deadline_at_s: float) -> ChatReply:
        return await self._gateway.chat(attempt_id, request, deadline_at_s)


class Sealer:
    """The recorder as the harness sees it; latencies of tools are noted on the way."""

    def __init__(self, recorder: Recorder, attempts: AttemptDirectory, times: ToolTimes) -> None:
        self._recorder = recorder
        self._attempts = attempts
        self._times = times

    async def seal(self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...]) -> SealedTrace:
        for tool in tools:
            self._times.note_tool(tool.latency_s, tool.outcome)
        binding = self._attempts.binding(attempt_id)
        bound_version = None if binding is None else binding.policy_version
        return await self._recorder.seal(attempt_id, end_reason, tools, bound_version)

    async def discard(self, attempt_id: str) -> int:
        return self._recorder.discard(attempt_id)
