"""One engine as the router sees it: what it does and what it says of itself change its :class:`ReplicaState`."""

import logging
from collections.abc import Awaitable
from typing import TypeVar

from steelyard.errors import RunError
from steelyard.inference.engine import Engine, EngineHealth, KvRule, OnTokens
from steelyard.inference.projection import kv_capacity
from steelyard.inference.replica_state import ReplicaState
from steelyard.types import EngineStats, FinishReason, GenerateRequest, GenerateResult, LoadProof

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Replica:
    """An :class:`~steelyard.inference.engine.Engine` itself.

    Whoever loads and unloads versions does so through it, so that it is known which versions are held. Calls that the
    replica does not answer lower its weight, and raise as they do in the engine.
    """

    def __init__(self, state: ReplicaState, engine: Engine) -> None:
        self.state = state
        self._engine = engine

    @property
    def replica_id(self) -> str:
        """Its name in the router."""
        return self.state.replica_id

    @property
    def versions(self) -> frozenset[int]:
        """Versions that it serves."""
        return frozenset(self.state.versions)

    @property
    def weight(self) -> float:
        """How far it is trusted, 0 to 1."""
        return self.state.weight

    @property
    def is_draining(self) -> bool:
        """Whether new attempts go elsewhere."""
        return self.state.is_draining

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """See :meth:`steelyard.inference.engine.Engine.generate`."""
        result = await self._watched(self._engine.generate(request, on_tokens))
        if result.finish_reason is FinishReason.ENGINE_ERROR:
            self.state.failed(result.detail)
        else:
            self.state.worked()
        return result

    async def load(self, version_dir: str, version: int) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.load`."""
        proof = await self._watched(self._engine.load(version_dir, version))
        await self._learn_capacity()
        self.state.now_holds(self.state.versions | {version})
        return proof

    async def update(self, version_dir: str, version: int, kv: KvRule) -> LoadProof:
        """See :meth:`steelyard.inference.engine.Engine.update`."""
        proof = await self._watched(self._engine.update(version_dir, version, kv))
        self.state.now_holds(self.state.versions - {max(self.state.versions, default=version)} | {version})
        return proof

    async def unload(self, version: int) -> None:
        """See :meth:`steelyard.inference.engine.Engine.unload`."""
        await self._watched(self._engine.unload(version))
        self.state.now_holds(self.state.versions - {version})

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
            await self._learn_capacity()
            self.state.now_holds(set(health.versions))
            self.state.worked()
        else:
            self.state.failed(health.detail)
        return health

    async def stats(self) -> EngineStats:
        """See :meth:`steelyard.inference.engine.Engine.stats`."""
        return await self._watched(self._engine.stats())

    async def _learn_capacity(self) -> None:
        if self.state.capacity_tokens is None:
            self.state.now_fits(kv_capacity(await self.stats()))

    async def _watched(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RunError as error:
            self.state.failed(str(error))
            raise
