"""Spreads requests over replicas. Imports no torch.

An attempt stays with the replica that first served it, because that one holds its KV, for as long as that replica
can serve. A new attempt goes where the projected load, in tokens, is least for the replica's weight. Failures lower
the weight, down to zero: a replica that fails fast looks idle and would otherwise draw nearly all requests. Probes
bring a replica back. A dead replica fails its own requests at once; nothing is sampled twice behind the caller's back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from steelyard.errors import EngineError, RunError
from steelyard.inference.engine import Engine, EngineHealth, KvRule, OnTokens
from steelyard.types import EngineStats, FinishReason, GenerateRequest, GenerateResult, LoadProof

logger = logging.getLogger(__name__)

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]

_MIN_WEIGHT = 0.125


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """``probe_every_s``: pause between probes of replicas that are not at full weight.

    ``probe_deadline_s``: how long one probe may take.
    """

    probe_every_s: float = 1.0
    probe_deadline_s: float = 5.0


class Replica:
    """One engine as the router sees it; an :class:`~steelyard.inference.engine.Engine` itself.

    Whoever loads and unloads versions does so through it, so that it knows which versions are held. Calls that the
    replica does not answer lower its weight, and raise as they do in the engine.
    """

    def __init__(self, replica_id: str, engine: Engine) -> None:
        self.replica_id = replica_id
        self.weight = 1.0
        self.versions: set[int] = set()
        self.projected_tokens = 0
        self.last_error = ""
        self.is_draining = False
        self._engine = engine
        self._open_requests: set[str] = set()

    def serves(self, request_id: str) -> bool:
        """Whether a request is open here."""
        return request_id in self._open_requests

    def replace(self, engine: Engine) -> None:
        """The engine was started anew and holds nothing yet."""
        self._engine = engine
        self.versions.clear()
        self.weight, self.last_error, self.is_draining = 1.0, "", False

    def can_sample(self, request: GenerateRequest) -> bool:
        """Whether a version is held that may sample for ``request``."""
        if request.follows_updates:
            return any(version >= request.policy_version for version in self.versions)
        return request.policy_version in self.versions

    def failed(self, error: str) -> None:
        """Half the weight; zero once it is small."""
        self.last_error = error
        halved = self.weight / 2
        self.weight = halved if halved >= _MIN_WEIGHT else 0.0

    def worked(self) -> None:
        """Twice the weight, up to 1; a replica at zero starts again at the least weight."""
        self.weight = min(1.0, max(_MIN_WEIGHT, self.weight * 2))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """See :meth:`steelyard.inference.engine.Engine.generate`."""
        projected = len(request.prompt_token_ids) + request.sampling.max_tokens
        self.projected_tokens += projected
        self._open_requests.add(request.request_id)
        try:
            result = await self._watched(self._engine.generate(request, on_tokens))
        finally:
            self.projected_tokens -= projected
            self._open_requests.discard(request.request_id)
        if result.finish_reason is FinishReason.ENGINE_ERROR:
            self.failed(result.detail)
        elif self.weight < 1.0:
            self.worked()
        return result

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.load`."""
        proof = await self._watched(self._engine.load(version_dir, version))
        self.versions.add(version)
        return proof

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.update`."""
        proof = await self._watched(self._engine.update(version_dir, version, kv))
        self.versions.discard(max(self.versions))
        self.versions.add(version)
        return proof

    async def unload(self, version: int) -> None:
        """See :meth:`steelyard.inference.engine.Engine.unload`."""
        await self._watched(self._engine.unload(version))
        self.versions.discard(version)

    async def pause(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.pause`."""
        await self._watched(self._engine.pause())

    async def resume(self) -> None:
        """See :meth:`steelyard.inference.engine.Engine.resume`."""
        await self._watched(self._engine.resume())

    async def abort(self, request_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.abort`."""
        await self._watched(self._engine.abort(request_id))

    async def release(self, attempt_id: str) -> None:
        """See :meth:`steelyard.inference.engine.Engine.release`."""
        await self._watched(self._engine.release(attempt_id))

    async def health(self) -> EngineHealth:
        """See :meth:`steelyard.inference.engine.Engine.health`; what it says decides weight and versions."""
        health = await self._watched(self._engine.health())
        if health.is_healthy:
            # It may have been started anew: what it says that it holds counts.
            self.versions = set(health.versions)
            self.worked()
        else:
            self.failed(health.detail)
        return health

    async def stats(self) -> EngineStats:
        """See :meth:`steelyard.inference.engine.Engine.stats`."""
        return await self._watched(self._engine.stats())

    async def _watched(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RunError as error:
            self.failed(str(error))
            raise


class Router:
    """Generation over several engines.

    Args:
        engines: replicas by id.
        settings: how replicas that failed are probed.
    """

    def __init__(self, engines: Mapping[str, Engine], settings: RouterSettings | None = None) -> None:
        if not engines:
            raise EngineError("a router must have at least one engine, got none")
        self._settings = settings or RouterSettings()
        self._replicas = {name: Replica(name, engine) for name, engine in engines.items()}
        self._home: dict[str, str] = {}

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """The engines by id; versions are loaded and unloaded through these."""
        return self._replicas

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """Like :meth:`steelyard.inference.engine.Engine.generate`, on the best replica.

        A replica that dies or does not answer gives a result with ``engine_error`` and no tokens.

        Raises:
            EngineError: no live replica holds the version, or the replica refused the request.
        """
        replica = self._pick(request)
        self._home[request.attempt_id] = replica.replica_id
        try:
            return await replica.generate(request, on_tokens)
        except RunError as error:
            logger.warning("replica %s failed request %s: %s", replica.replica_id, request.request_id, error)
            return _engine_error(request, replica.replica_id, str(error))

    async def abort(self, request_id: str) -> None:
        """End a request as cancelled, wherever it runs."""
        for replica in self._replicas.values():
            if replica.serves(request_id):
                await replica.abort(request_id)

    async def release(self, attempt_id: str) -> None:
        """The attempt has ended: forget its replica, whose KV of it may go. A dead replica holds none."""
        home = self._home.pop(attempt_id, None)
        if home is None:
            return
        try:
            await self._replicas[home].release(attempt_id)
        except RunError as error:
            logger.warning("replica %s could not release attempt %s: %s", home, attempt_id, error)

    def drain(self, replica_id: str) -> None:
        """Send no new attempts to a replica while another one can serve them. Returns at once."""
        self._replicas[replica_id].is_draining = True

    def undrain(self, replica_id: str) -> None:
        """Send new attempts to a replica again."""
        self._replicas[replica_id].is_draining = False

    def home_of(self, attempt_id: str) -> str | None:
        """The replica that served an attempt last; None before its first request and after its release."""
        return self._home.get(attempt_id)

    def replace(self, replica_id: str, engine: Engine) -> None:
        """The process of a replica was started anew and holds nothing yet."""
        self._replicas[replica_id].replace(engine)

    def weights(self) -> dict[str, float]:
        """Weight of each replica, 0 to 1."""
        return {name: replica.weight for name, replica in self._replicas.items()}

    async def run(self, sleep: Sleep) -> None:
        """Probe, for ever, the replicas that are not at full weight. To be supervised.

        *Consumes* health answers; *waits for* each at most ``probe_deadline_s``; *unblocked by* time.
        """
        while True:
            await sleep(self._settings.probe_every_s)
            await self.probe()

    async def probe(self) -> None:
        """Ask once each replica that is not at full weight; a sound answer raises its weight."""
        weak = [replica for replica in self._replicas.values() if replica.weight < 1.0]
        await asyncio.gather(*(self._probe_one(replica) for replica in weak))

    async def _probe_one(self, replica: Replica) -> None:
        deadline_s = self._settings.probe_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await replica.health()
        except TimeoutError:
            replica.failed(f"no answer to a probe within {deadline_s} s")
        except RunError as error:
            logger.info("replica %s does not answer a probe: %s", replica.replica_id, error)

    def _pick(self, request: GenerateRequest) -> Replica:
        able = [replica for replica in self._replicas.values() if replica.weight > 0.0 and replica.can_sample(request)]
        if not able:
            known = "; ".join(
                f"{replica.replica_id} has weight {replica.weight} and versions {sorted(replica.versions)}"
                f"{', last error: ' + replica.last_error if replica.last_error else ''}"
                for replica in self._replicas.values()
            )
            raise EngineError(
                f"request {request.request_id}: a live replica must hold version {request.policy_version}, but {known}"
            )
        home = self._home.get(request.attempt_id)
        for replica in able:
            if replica.replica_id == home:
                return replica
        able = [replica for replica in able if not replica.is_draining] or able
        return min(able, key=lambda replica: ((replica.projected_tokens + 1) / replica.weight, replica.replica_id))


def _engine_error(request: GenerateRequest, replica_id: str, detail: str) -> GenerateResult:
    return GenerateResult(
        request_id=request.request_id,
        token_ids=(),
        logprobs=(),
        kept_logmass=(),
        version_spans=(),
        finish_reason=FinishReason.ENGINE_ERROR,
        replica_id=replica_id,
        load_id="",
        detail=detail,
    )
