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
from steelyard.coordinator.capability import CapabilityRing
from steelyard.coordinator.effects import AttemptEnded, Effect
from steelyard.coordinator.service import Coordinator
from steelyard.environments.base import Environment, Grader
from steelyard.gateway.app import GatewayServer
from steelyard.gateway.attempts import AttemptEndpoint
from steelyard.gateway.capability import KeyRing
from steelyard.gateway.recorder import Recorder
from steelyard.gateway.renderer import Renderer
from steelyard.gateway.service import Gateway, GatewayLimits
from steelyard.harness.base import SandboxHandle, Services, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.ids import IdSource
from steelyard.inference.router import Router
from steelyard.run.adapters import InProcessChat, Leases, LiveAttempts, Sealer, WorkerKeys
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
    """Sandboxes and graders, opened first because they take longest; then what serves attempts.

    Args:
        keys: those of workers elsewhere, whose attempts the gateway serves too; None serves none.
    """

    def __init__(
        self,
        config: Config,
        environment: Environment,
        children: Children,
        news: News,
        keys: CapabilityRing | None = None,
    ) -> None:
        self._config = config
        self._keys = keys
        self._environment = environment
        self._children = children
        self._news = news
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[tuple[WarmPool | None, GraderPool | None]] | None = None

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
        worker = worker_settings(config)
        attempts = LiveAttempts(
            base.coordinator,
            config.model.max_context_tokens,
            worker.attempt_deadline_s,
            follows_updates=config.weights.mode == "segmented",
        )
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
        sealer = Sealer(base.recorder, attempts, self._news.tools)
        server = self._server(base, gateway, attempts, sealer)
        harness = None if sandboxes is None else self._harness(base, gateway, sealer, sandboxes, worker)
        scoring = None if graders is None else self._scoring(base, graders)
        releases = _Releases(router, base.stores.traces)
        base.coordinator.listen(releases.on_effect)
        url = await server.start()
        try:
            if self._keys is not None:
                self._children.directory.note_gateway(url)
            yield Serving(harness, scoring, releases, url)
        finally:
            await server.stop()

    def _server(self, base: Foundation, gateway: Gateway, attempts: LiveAttempts, sealer: Sealer) -> GatewayServer:
        config, counters = self._config, self._news.counters
        keys = KeyRing(secrets.token_bytes(_SECRET_BYTES))
        elsewhere = None
        if self._keys is not None:
            elsewhere = AttemptEndpoint(
                WorkerKeys(self._keys), attempts, sealer, keys, clock=base.clock, counters=counters
            )
        return GatewayServer(
            gateway,
            keys,
            ids=base.ids,
            clock=base.clock,
            counters=counters,
            host=config.gateway.host,
            port=config.gateway.port,
            attempts=elsewhere,
        )

    def _harness(
        self, base: Foundation, gateway: Gateway, sealer: Sealer, sandboxes: WarmPool, settings: WorkerSettings
    ) -> HarnessWorker:
        services = Services(
            leases=Leases(base.coordinator),
            chat=InProcessChat(gateway),
            sandboxes=_TimedSandboxes(sandboxes, self._news.tools),
            traces=sealer,
            artifacts=base.stores.artifacts,
            tasks=self._environment,
        )
        return HarnessWorker(base.ids.new("wrk"), settings, services, base.clock, self._news.counters)

    def _scoring(self, base: Foundation, graders: GraderPool) -> ScoringWorker:
        settings = ScoringSettings(
            worker_id=base.ids.new("wrk"), alarm_failure_frac=self._config.scoring.alarm_failure_frac
        )
        return ScoringWorker(base.coordinator, base.stores.artifacts, graders, settings, self._news.counters)

    async def _open(self) -> tuple[WarmPool | None, GraderPool | None]:
        """None for what only workers elsewhere do."""
        config = self._config
        sandboxes = graders = None
        if config.rollout.num_workers:
            sandboxes = await open_pool(config.sandbox, self._children.directory.sandboxes / "rollout")
            self._stack.push_async_callback(sandboxes.close)
        if config.scoring.num_workers:
            graders = await self._open_graders()
        return sandboxes, graders

    async def _open_graders(self) -> GraderPool:
        config = self._config
        settings = grader_settings(config, self._environment.grader(), config.scoring.num_workers)

        async def start(name: str) -> GraderHandle:
            return await self._children.start_scorer(name)

        graders = GraderPool(start, settings, self._news.counters)
        self._stack.push_async_callback(graders.close)
        await graders.open()
        return graders


@dataclass(frozen=True)
class Serving:
    """What produces trajectories while the run goes on; None for what only workers elsewhere do."""

    harness: HarnessWorker | None
    scoring: ScoringWorker | None
    releases: "_Releases"
    gateway_url: str

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """To be supervised; none of them ends by itself."""
        loops = [self.releases.run()]
        if self.harness is not None:
            loops.append(self.harness.run(asyncio.Event()))
        if self.scoring is not None:
            loops.append(self.scoring.run())
        return tuple(loops)


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


def worker_settings(config: Config) -> WorkerSettings:
    """Deadlines of the harness, from those of its parts."""
    rollout = config.rollout
    turn_s = rollout.turn_deadline_s + config.sandbox.call_deadline_s
    return WorkerSettings(
        max_concurrent=rollout.max_concurrent,
        heartbeat_every_s=rollout.lease_s / 4,
        turn_deadline_s=rollout.turn_deadline_s,
        attempt_deadline_s=rollout.max_turns * turn_s + 60.0,
    )


def grader_settings(config: Config, grader: Grader, num_workers: int) -> PoolSettings:
    """The pool of ``num_workers`` processes that grade as ``grader`` does."""
    return PoolSettings(
        num_workers=num_workers,
        concurrency=config.scoring.concurrency,
        deadline_s=config.scoring.deadline_s,
        verifier_version=grader.verifier_version,
        is_deterministic=grader.deterministic,
    )
