"""The side of a run that produces trajectories: sandboxes, gateway, harness, graders."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from steelyard.clock import Clock
from steelyard.config import Config
from steelyard.coordinator.effects import AttemptEnded, Effect
from steelyard.coordinator.service import Coordinator
from steelyard.environments.base import Environment
from steelyard.gateway.app import GatewayServer
from steelyard.gateway.capability import KeyRing
from steelyard.gateway.recorder import Recorder
from steelyard.gateway.renderer import Renderer
from steelyard.gateway.service import Gateway, GatewayLimits
from steelyard.harness.base import SandboxHandle, Services, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.ids import IdSource
from steelyard.inference.router import Router
from steelyard.run.adapters import InProcessChat, Leases, LiveAttempts, Sealer
from steelyard.run.news import News, ToolTimes
from steelyard.run.processes import Children
from steelyard.run.stores import Stores
from steelyard.sandbox.opening import open_pool
from steelyard.sandbox.pool import WarmPool
from steelyard.scoring.base import GraderHandle
from steelyard.scoring.pool import GraderPool, PoolSettings
from steelyard.scoring.worker import ScoringWorker
from steelyard.scoring.worker import WorkerSettings as ScoringSettings
from steelyard.traces.store import TraceStore

_GRADINGS_PER_SCORER = 4
_SECRET_BYTES = 32


class Foundation(Protocol):
    """What the rollout side stands on."""

    @property
    def clock(self) -> Clock: ...
    @property
    def ids(self) -> IdSource: ...
    @property
    def stores(self) -> Stores: ...
    @property
    def coordinator(self) -> Coordinator: ...
    @property
    def recorder(self) -> Recorder: ...


class RolloutSide:
    """Sandboxes and graders, opened first because they take longest; then what serves attempts."""

    def __init__(self, config: Config, environment: Environment, children: Children, news: News) -> None:
        self._config = config
        self._environment = environment
        self._children = children
        self._news = news
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[tuple[WarmPool, GraderPool]] | None = None

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        self._opening = asyncio.create_task(self._open(), name="open sandboxes and graders")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._stack.aclose()

    @asynccontextmanager
    async def serving(self, base: Foundation, router: Router, policy_dir: Path) -> AsyncIterator["Serving"]:
        """Gateway on its port, worker and scorer ready to run.

        Raises:
            InputError: the port is in use, or this machine does not allow the sandbox.
        """
        assert self._opening is not None
        sandboxes, graders = await self._opening
        config, counters = self._config, self._news.counters
        worker = _worker_settings(config)
        attempts = LiveAttempts(base.coordinator, config.model.max_context_tokens, worker.attempt_deadline_s)
        gateway = Gateway(
            Renderer.load(policy_dir),
            router,
            base.recorder,
            attempts,
            ids=base.ids,
            clock=base.clock,
            counters=counters,
            limits=GatewayLimits(turn_deadline_s=config.rollout.turn_deadline_s),
        )
        keys = KeyRing(secrets.token_bytes(_SECRET_BYTES))
        server = GatewayServer(
            gateway,
            keys,
            ids=base.ids,
            clock=base.clock,
            counters=counters,
            host=config.gateway.host,
            port=config.gateway.port,
        )
        services = Services(
            leases=Leases(base.coordinator),
            chat=InProcessChat(gateway),
            sandboxes=_TimedSandboxes(sandboxes, self._news.tools),
            traces=Sealer(base.recorder, attempts, self._news.tools),
            artifacts=base.stores.artifacts,
            tasks=self._environment,
        )
        harness = HarnessWorker(base.ids.new("wrk"), worker, services, base.clock, counters)
        scoring = ScoringWorker(
            base.coordinator,
            base.stores.artifacts,
            graders,
            ScoringSettings(worker_id=base.ids.new("wrk"), alarm_failure_frac=config.scoring.alarm_failure_frac),
            counters,
        )
        releases = _Releases(router, base.stores.traces)
        base.coordinator.listen(releases.on_effect)
        await server.start()
        try:
            yield Serving(harness, scoring, releases)
        finally:
            await server.stop()

    async def _open(self) -> tuple[WarmPool, GraderPool]:
        config = self._config
        sandboxes = await open_pool(config.sandbox, self._children.directory.sandboxes / "rollout")
        self._stack.push_async_callback(sandboxes.close)
        grader = self._environment.grader()
        settings = PoolSettings(
            num_workers=config.scoring.num_workers,
            concurrency=_GRADINGS_PER_SCORER,
            deadline_s=config.scoring.deadline_s,
            verifier_version=grader.verifier_version,
            is_deterministic=grader.deterministic,
        )

        async def start(name: str) -> GraderHandle:
            return await self._children.start_scorer(name)

        graders = GraderPool(start, settings, self._news.counters)
        self._stack.push_async_callback(graders.close)
        await graders.open()
        return sandboxes, graders


@dataclass(frozen=True)
class Serving:
    """What produces trajectories while the run goes on."""

    harness: HarnessWorker
    scoring: ScoringWorker
    releases: "_Releases"

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """To be supervised; none of them ends by itself."""
        return self.harness.run(asyncio.Event()), self.scoring.run(), self.releases.run()


class _Releases:
    """Tells replicas which attempts have ended, so that their KV may go, and the trace store, which keeps copies.

    *consumes* ends of attempts; *waits for* replicas; *unblocked by* the next end; a replica that does not answer is
    the router's business.
    """

    def __init__(self, router: Router, traces: TraceStore) -> None:
        self._router = router
        self._traces = traces
        self._ended: asyncio.Queue[str] = asyncio.Queue()

    def on_effect(self, effect: Effect) -> None:
        if isinstance(effect, AttemptEnded):
            self._ended.put_nowait(effect.attempt_id)

    async def run(self) -> None:
        while True:
            attempt_id = await self._ended.get()
            await self._traces.forget(attempt_id)
            await self._router.release(attempt_id)


class _TimedSandboxes:
    """A pool whose waiting times are noted."""

    def __init__(self, pool: WarmPool, times: ToolTimes) -> None:
        self._pool = pool
        self._times = times

    async def acquire(self, label: str, deadline_s: float) -> SandboxHandle:
        started_s = time.perf_counter()
        sandbox = await self._pool.acquire(label, deadline_s)
        self._times.note_sandbox(time.perf_counter() - started_s)
        return sandbox


def _worker_settings(config: Config) -> WorkerSettings:
    """Deadlines of the harness, from those of its parts."""
    rollout = config.rollout
    turn_s = rollout.turn_deadline_s + config.sandbox.call_deadline_s
    return WorkerSettings(
        max_concurrent=rollout.max_concurrent,
        heartbeat_every_s=rollout.lease_s / 4,
        turn_deadline_s=rollout.turn_deadline_s,
        attempt_deadline_s=rollout.max_turns * turn_s + 60.0,
    )
