"""The rollout worker: takes leases and carries each attempt through, or says honestly that it could not.

::

    lease -> start -> sandbox ->   agent   -> seal trace -> store artifact -> artifact_ready
               |         |           |            |               |
               +---------+-----------+------------+---------------+--> attempt_failed (outcome, lost tokens)

    consumes      leases, as many as slots are free
    waits for     the coordinator, a sandbox, the gateway, tools, the stores: each with a deadline
    unblocked by  an attempt's end, and then only when its sandbox is gone: that frees the slot
    produces      one report for each attempt; none where the lease was lost
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, Refused, RunError
from steelyard.harness.base import Agent, LoopResult, SandboxHandle, Services, WorkerSettings, deadline
from steelyard.harness.chat_loop import ChatAgent
from steelyard.metrics import Counters
from steelyard.types import ArtifactReport, AttemptFailure, Lease, Outcome

_LOG = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


class LiveAttempt:
    """One attempt that holds a slot. ``expires_at_s`` is by the worker's own clock, not by the coordinator's."""

    def __init__(self, lease: Lease, now_s: float) -> None:
        self.lease = lease
        self.renew(now_s)
        self.is_lost = False
        self.task: asyncio.Task[None] | None = None

    def renew(self, now_s: float) -> None:
        self.expires_at_s = now_s + self.lease.expires_at_s - self.lease.issued_at_s

    def lose(self) -> None:
        """Its lease is gone: stop, and report nothing."""
        if not self.is_lost and self.task is not None:
            self.is_lost = True
            self.task.cancel()


class HarnessWorker:
    """Runs up to ``max_concurrent`` attempts at a time.

    A failure of the system is reported as such and never as a reward. A sandbox that does not go away
    keeps its slot; when all slots are held so, the worker fails.

    Args:
        worker_id: the name under which it leases.
        services: its neighbours.
        counters: refusals, faults and lost leases are counted here, under ``harness.*``.
        sleep: how heartbeats are spaced; tests hand in their own.
    """

    def __init__(
        self,
        worker_id: str,
        settings: WorkerSettings,
        services: Services,
        clock: Clock,
        counters: Counters,
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._worker_id = worker_id
        self._settings = settings
        self._services = services
        self._agent: Agent = services.agent or ChatAgent(
            services.chat, clock, turn_deadline_s=settings.turn_deadline_s, tool_deadline_s=settings.tool_deadline_s
        )
        self._clock = clock
        self._counters = counters
        self._sleep = sleep
        self._live: dict[str, LiveAttempt] = {}
        self._stuck: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    @property
    def num_live(self) -> int:
        """Slots in use: live attempts, and sandboxes that do not go away."""
        return len(self._live) + len(self._stuck)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until ``stop`` is set, then let live attempts end, at most ``drain_deadline_s`` long.

        Raises:
            RunError: the coordinator cannot be reached, or no sandbox goes away any more.
        """
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._beat(), name="heartbeat")
                waking = group.create_task(self._wake_at(stop), name="stop")
                await self._take_leases(group, stop)
                await self._drain()
                beating.cancel()
                waking.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for task in self._stuck:
                task.cancel()

    async def _take_leases(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        settings = self._settings
        while not stop.is_set():
            self._changed.clear()
            num_free = settings.max_concurrent - self.num_live
            if num_free <= 0:
                self._check_slots()
                await self._changed.wait()  # set by the end of an attempt (attempt_deadline_s) and by stop
                continue
            async with deadline("leases", ("coordinator",), settings.lease_wait_s + settings.call_deadline_s):
                leases = await self._services.leases.lease(self._worker_id, num_free, settings.lease_wait_s)
            for lease in leases:
                live = self._live[lease.attempt_id] = LiveAttempt(lease, self._clock.now_s())
                live.task = group.create_task(self._carry_through(live), name=lease.attempt_id)
                live.task.add_done_callback(functools.partial(self._free_slot, lease.attempt_id))
            if not leases:
                await asyncio.sleep(0)  # a source that does not wait must not starve everyone else

    def _check_slots(self) -> None:
        if len(self._stuck) >= self._settings.max_concurrent:
            names = tuple(sorted(task.get_name() for task in self._stuck))
            raise DeadlineExceeded("sandboxes to go away", names, self._settings.sandbox_deadline_s)

    async def _wake_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._changed.set()

    async def _drain(self) -> None:
        tasks = [live.task for live in self._live.values() if live.task is not None]
        if not tasks:
            return
        _, unfinished = await asyncio.wait(tasks, timeout=self._settings.drain_deadline_s)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=self._settings.sandbox_deadline_s + self._settings.call_deadline_s)

    # --- heartbeats -------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await self._sleep(self._settings.heartbeat_every_s)
            await self.beat_once()

    async def beat_once(self) -> None:
        """Renew all leases; attempts whose lease is lost, or ran out unrenewed, are cancelled."""
        attempts = {live.lease.attempt_id: live.lease.attempt_number for live in self._live.values()}
        if not attempts:
            return
        asked_at_s = self._clock.now_s()
        try:
            async with deadline("a heartbeat", ("coordinator",), self._settings.call_deadline_s):
                lost = set(await self._services.leases.heartbeat(self._worker_id, attempts))
        except RunError as error:
            self._counters.add("harness.heartbeat_failed")
            _LOG.warning("heartbeat of %s failed: %s", self._worker_id, error)
            now_s = self._clock.now_s()
            lost = {live.lease.attempt_id for live in self._live.values() if live.expires_at_s <= now_s}
            attempts = {}
        for live in list(self._live.values()):
            if live.lease.attempt_id in lost:
                self._counters.add("harness.lease_lost")
                live.lose()
            elif live.lease.attempt_id in attempts:
                live.renew(asked_at_s)

    # --- one attempt ------------------------------------------------------------------------------

    def _free_slot(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        """Called at the end of an attempt's task, even of one that was cancelled before it began."""
        del self._live[attempt_id]
        self._changed.set()

    async def _carry_through(self, live: LiveAttempt) -> None:
        """Run one attempt and report it; only a stop of the worker escapes from here."""
        lease = live.lease
        try:
            async with deadline("the end of an attempt", (lease.attempt_id,), self._settings.attempt_deadline_s):
                report = await self._attempt(lease)
                await self._services.leases.artifact_ready(report)
        except Refused as error:
            self._counters.add(f"harness.refused.{error.reason}")
            await self._discard(lease)
        except asyncio.CancelledError:
            if live.is_lost:
                await self._discard(lease)
                return
            await self._fail(lease, Outcome.CANCELLED, "worker_stopped", "the worker was told to stop")
            raise
        except (DeadlineExceeded, TimeoutError) as error:
            await self._fail(lease, Outcome.TIMED_OUT, "deadline", str(error))
        except Exception as error:  # noqa: BLE001 (whatever broke, it is our fault and is reported as such)
            _LOG.exception("attempt %s failed", lease.attempt_id)
            await self._fail(lease, Outcome.INFRA_FAILED, type(error).__name__, str(error))

    async def _attempt(self, lease: Lease) -> ArtifactReport:
        services = self._services
        await services.leases.start(lease.attempt_id, lease.attempt_number)
        task = services.tasks.task(lease.task_id)
        session = services.tasks.session(task)
        sandbox = await services.sandboxes.acquire(lease.attempt_id, self._settings.sandbox_deadline_s)
        try:
            for name, data in session.files.items():
                await sandbox.write_file(name, data)
            result = await self._agent.run(lease, task, session, sandbox)
        finally:
            await self._destroy(lease.attempt_id, sandbox)
        return await self._store(lease, result, session.artifact())

    async def _store(self, lease: Lease, result: LoopResult, artifact: bytes) -> ArtifactReport:
        """Trace and artifact are durable before anyone hears of them."""
        trace = await self._services.traces.seal(lease.attempt_id, result.end_reason, result.tools)
        artifact_digest = await self._services.artifacts.put(artifact)
        return ArtifactReport(
            attempt_id=lease.attempt_id,
            attempt_number=lease.attempt_number,
            trace=trace,
            artifact_digest=artifact_digest,
        )

    async def _destroy(self, attempt_id: str, sandbox: SandboxHandle) -> None:
        """Return when the sandbox is gone, cancelled or not; after a deadline it is counted as stuck."""
        closing = asyncio.create_task(self._close(attempt_id, sandbox), name=f"sandbox of {attempt_id}")
        is_cancelled = await _outlast(closing, self._settings.sandbox_deadline_s)
        if not closing.done():
            self._counters.add("harness.sandbox_stuck")
            _LOG.error("sandbox of %s is not gone after %.1f s", attempt_id, self._settings.sandbox_deadline_s)
            self._stuck.add(closing)
            closing.add_done_callback(self._unstuck)
        if is_cancelled:
            raise asyncio.CancelledError

    async def _close(self, attempt_id: str, sandbox: SandboxHandle) -> None:
        try:
            await sandbox.close()
        except RunError as error:
            self._counters.add("harness.sandbox_close_failed")
            _LOG.error("sandbox of %s could not be closed: %s", attempt_id, error)

    def _unstuck(self, closing: asyncio.Task[None]) -> None:
        self._stuck.discard(closing)
        self._changed.set()

    async def _discard(self, lease: Lease) -> int:
        """Throw the attempt's turns away; 0 where that fails, for the sweep then finds them."""
        discarding = asyncio.create_task(self._services.traces.discard(lease.attempt_id))
        is_cancelled = await _outlast(discarding, self._settings.call_deadline_s)
        num_tokens = 0
        if not discarding.done() or discarding.cancelled() or discarding.exception() is not None:
            discarding.cancel()
            self._counters.add("harness.discard_failed")
            _LOG.error("turns of %s could not be discarded", lease.attempt_id)
        else:
            num_tokens = discarding.result()
            self._counters.add("harness.lost_tokens", num_tokens)
        if is_cancelled:
            raise asyncio.CancelledError
        return num_tokens

    async def _fail(self, lease: Lease, outcome: Outcome, reason: str, detail: str) -> None:
        """Say that the system could not carry the attempt through."""
        self._counters.add(f"harness.failed.{outcome}")
        failure = AttemptFailure(
            attempt_id=lease.attempt_id,
            attempt_number=lease.attempt_number,
            outcome=outcome,
            reason=reason,
            detail=detail[:500],
            lost_tokens=await self._discard(lease),
        )
        try:
            async with deadline("a report of failure", ("coordinator",), self._settings.call_deadline_s):
                await self._services.leases.attempt_failed(failure)
        except Refused as error:
            self._counters.add(f"harness.refused.{error.reason}")
        except RunError as error:
            self._counters.add("harness.report_failed")
            _LOG.warning("failure of %s could not be reported, its lease will expire: %s", lease.attempt_id, error)


async def _outlast(task: asyncio.Task[object], limit_s: float) -> bool:
    """Wait up to ``limit_s`` for a task even if cancelled meanwhile; returns whether that happened."""
    is_cancelled = False
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + limit_s
    while not task.done() and (left_s := ends_at - loop.time()) > 0:
        try:
            await asyncio.wait([task], timeout=left_s)
        except asyncio.CancelledError:
            is_cancelled = True
    return is_cancelled
