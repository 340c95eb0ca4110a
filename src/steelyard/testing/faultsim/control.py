"""The process that holds the coordinator and the gateway, and serves both to the others.

The coordinator and the recorder are the real ones. The gateway in front of the recorder answers with drawn tokens
after a drawn time; it asks the coordinator whether an attempt is alive, as the real one does.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable

import msgspec

from steelyard.coordinator.core import OpenTraces
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.records import BatchPlan, CoordinatorSettings, PendingStep
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.transitions import RolloutState
from steelyard.errors import IllegalTransition, Refused, SteelyardError, StorageFailed
from steelyard.gateway.recorder import Recorder
from steelyard.gateway.renderer import Prompt
from steelyard.ids import IdSource
from steelyard.metrics import Counters
from steelyard.tasks.sampler import ShuffledStream
from steelyard.testing.faultsim.disk import DiskJournal, File
from steelyard.testing.faultsim.network import Method, Network, Packet, Server
from steelyard.testing.faultsim.processes import Life
from steelyard.testing.faultsim.stores import FileLedger, RunStores, TurnFiles
from steelyard.types import (
    ArtifactReport,
    AttemptFailure,
    ChatReply,
    ChatRequest,
    EndReason,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Lease,
    LoadProof,
    Manifest,
    Message,
    Outcome,
    Record,
    Sampling,
    Score,
    SealedTrace,
    ToolRecord,
    VersionSpan,
)

VOCABULARY = 50
CONTROL = "control"


class TrainerState(Record, frozen=True, kw_only=True):
    """Where the trainer goes on. ``ready_step``: the step of the newest READY version, -1 before the first."""

    next_step: int
    checkpoint_step: int
    checkpoints: tuple[int, ...]
    published: dict[int, int]
    ready_step: int
    pending: tuple[PendingStep, ...]
    is_finished: bool


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a life of the control process is made of; mutations put others in their places."""

    coordinator: type[Coordinator] = Coordinator
    journal: Callable[[File], Journal] = DiskJournal
    open_traces: Callable[[Recorder], OpenTraces] = lambda recorder: recorder
    ids: Callable[[IdSource], IdSource] = lambda ids: ids


class ControlProgram:
    """What runs in the control process.

    Args:
        settings, stream: of the run.
        ids: shared by all lives: ids are never used again.
        draw: tokens and times of the gateway.
        on_request: sees every request before it is carried out.
        on_finding: told of errors that no such process may meet.
        look: called before each life: journal and stores as the death of the one before left them.
    """

    def __init__(
        self,
        *,
        stores: RunStores,
        network: Network,
        settings: CoordinatorSettings,
        stream: ShuffledStream,
        ids: IdSource,
        draw: random.Random,
        parts: Parts,
        on_request: Callable[[Packet], None],
        on_finding: Callable[[BaseException], None],
        look: Callable[[], None],
    ) -> None:
        self.coordinator: Coordinator | None = None
        self._stores = stores
        self._network = network
        self._settings = settings
        self._stream = stream
        self._ids = parts.ids(ids)
        self._draw = draw
        self._parts = parts
        self._on_request = on_request
        self._on_finding = on_finding
        self._look = look

    async def __call__(self, life: Life) -> None:
        """One life. Ends when the journal refuses, as the real process does, which then recovers."""
        self._look()
        recorder = Recorder(TurnFiles(self._stores), FileLedger(self._stores.ledger), Counters(), life.clock)
        coordinator = await self._parts.coordinator.open(
            journal=self._parts.journal(self._stores.journal),
            settings=self._settings,
            clock=life.clock,
            ids=self._ids,
            run_id="run_faultsim",
            seed=0,
            config_digest="faultsim",
            open_traces=self._parts.open_traces(recorder),
            stream=self._stream,
        )
        self.coordinator = coordinator
        await self._give_up_orphans(coordinator)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_failure(error: BaseException) -> None:
            if isinstance(error, StorageFailed) and not ended.done():
                ended.set_exception(error)
            elif not isinstance(error, SteelyardError):
                self._on_finding(error)

        gateway = _Gateway(coordinator, recorder, self._ids, self._draw)
        methods = {
            **_worker_methods(coordinator, self._on_finding),
            **_trainer_methods(coordinator),
            **gateway.methods(),
        }
        Server(life, self._network, methods, on_failure, self._on_request)
        await ended

    async def _give_up_orphans(self, coordinator: Coordinator) -> None:
        """End attempts whose turns were with the gateway of the life before: a power cut may have taken some."""
        for rollout in list(coordinator.state.held()):
            if rollout.state is RolloutState.RUNNING and rollout.attempt_id not in self._stores.sealed.written:
                failure = AttemptFailure(
                    attempt_id=rollout.attempt_id or "",
                    attempt_number=rollout.attempt_number,
                    outcome=Outcome.CANCELLED,
                    reason="gateway_died",
                )
                with contextlib.suppress(Refused):  # its lease may run out meanwhile
                    await coordinator.attempt_failed(failure)


def _worker_methods(coordinator: Coordinator, on_finding: Callable[[BaseException], None]) -> dict[str, Method]:
    async def lease(worker_id: str, max_leases: int, wait_s: float) -> tuple[Lease, ...]:
        try:
            return await coordinator.lease(worker_id, max_leases, wait_s)
        except IllegalTransition as error:
            on_finding(error)  # the coordinator chose all that is in a lease itself
            raise

    return {
        "lease": Method(tuple[str, int, float], lease),
        "start": Method(tuple[str, int, str], coordinator.start),
        "heartbeat": Method(tuple[str, tuple[str, ...]], coordinator.heartbeat),
        "artifact_ready": Method(tuple[ArtifactReport], coordinator.artifact_ready),
        "attempt_failed": Method(tuple[AttemptFailure], coordinator.attempt_failed),
        "lease_scores": Method(tuple[str, int, float], coordinator.lease_scores),
        "score": Method(tuple[Score], coordinator.score),
        "artifact_lost": Method(tuple[str, str], coordinator.artifact_lost),
    }


def _trainer_methods(coordinator: Coordinator) -> dict[str, Method]:
    async def begin_step(plan: BatchPlan, sample_ids: tuple[str, ...], batch_digest: str) -> None:
        await coordinator.begin_step(
            step=plan.step,
            parent_version=plan.parent_version,
            group_ids=plan.group_ids,
            sample_ids=sample_ids,
            batch_digest=batch_digest,
        )

    async def evaluate(task_ids: tuple[str, ...], version: int, label: str, deadline_s: float) -> int:
        await coordinator.admit_evaluation(task_ids, version=version, sampling=Sampling(seed=1), label=label)
        return len(await coordinator.evaluation_results(label, deadline_s))

    async def next_version() -> int:
        return coordinator.next_version()

    return {
        "trainer_state": Method(tuple[()], lambda: _trainer_state(coordinator)),
        "next_batch": Method(tuple[int, float], coordinator.next_batch),
        "begin_step": Method(tuple[BatchPlan, tuple[str, ...], str], begin_step),
        "next_version": Method(tuple[()], next_version),
        "published": Method(tuple[Manifest], coordinator.published),
        "loaded": Method(tuple[LoadProof], coordinator.loaded),
        "ready": Method(tuple[int], coordinator.ready),
        "orphan": Method(tuple[int, str], coordinator.orphan),
        "checkpointed": Method(tuple[int, str], coordinator.checkpointed),
        "deletable_batches": Method(tuple[()], coordinator.deletable_batches),
        "batch_deleted": Method(tuple[int], coordinator.batch_deleted),
        "evaluate": Method(tuple[tuple[str, ...], int, str, float], evaluate),
        "finish": Method(tuple[str], coordinator.finish),
    }


async def _trainer_state(coordinator: Coordinator) -> TrainerState:
    state = coordinator.state
    checkpoint_step = state.checkpoints[-1] if state.checkpoints else 0
    newest = coordinator.newest_ready()
    pending = await coordinator.pending_steps_after(checkpoint_step)
    return TrainerState(
        next_step=state.next_step,
        checkpoint_step=checkpoint_step,
        checkpoints=tuple(state.checkpoints),
        published=dict(state.lineage),
        ready_step=-1 if newest is None else newest.step,
        pending=pending,
        is_finished=state.run is not None and state.run.is_finished,
    )


class _Gateway:
    """Model calls of live attempts: drawn tokens, really recorded."""

    def __init__(self, coordinator: Coordinator, recorder: Recorder, ids: IdSource, draw: random.Random) -> None:
        self._coordinator = coordinator
        self._recorder = recorder
        self._ids = ids
        self._draw = draw

    def methods(self) -> dict[str, Method]:
        return {
            "chat": Method(tuple[str, ChatRequest], self.chat),
            "seal": Method(tuple[str, EndReason, tuple[ToolRecord, ...]], self.seal),
            "discard": Method(tuple[str], self.discard),
        }

    async def chat(self, attempt_id: str, chat: ChatRequest) -> ChatReply:
        lease = self._coordinator.live_lease(attempt_id)
        if lease is None:
            raise Refused("late", f"attempt {attempt_id} is not alive")
        log = self._recorder.open(attempt_id, lease.policy_version)
        request = GenerateRequest(
            request_id=self._ids.new("req"),
            attempt_id=attempt_id,
            sequence_key=attempt_id,
            policy_version=lease.policy_version,
            prompt_token_ids=self._tokens(3),
            sampling=lease.sampling,
            stop_token_ids=(),
            deadline_at_s=lease.expires_at_s,
        )
        await asyncio.sleep(self._draw.expovariate(2.0))
        message = Message(role="assistant", content=f"turn {len(chat.messages)}")
        self._recorder.record(
            log,
            request,
            self._sample(request),
            kind="chat",
            prompt=Prompt(token_ids=request.prompt_token_ids, text="", messages=chat.messages),
            parent=None,
            reply=message,
            break_reason=None,
            started_at_s=0.0,
        )
        return ChatReply(
            request_id=request.request_id,
            message=message,
            finish_reason=FinishReason.STOP,
            num_prompt_tokens=3,
            num_completion_tokens=1,
        )

    async def seal(self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...]) -> SealedTrace:
        lease = self._coordinator.live_lease(attempt_id)
        return await self._recorder.seal(attempt_id, end_reason, tools, lease.policy_version if lease else None)

    async def discard(self, attempt_id: str) -> int:
        return self._recorder.discard(attempt_id)

    def _sample(self, request: GenerateRequest) -> GenerateResult:
        token_ids = self._tokens(self._draw.randint(1, 4))
        return GenerateResult(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=(-0.5,) * len(token_ids),
            kept_logmass=(0.0,) * len(token_ids),
            version_spans=(VersionSpan(start=0, version=request.policy_version),),
            finish_reason=FinishReason.STOP,
            replica_id="rep_0",
            load_id=f"load_{request.policy_version}",
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(VOCABULARY) for _ in range(count))
