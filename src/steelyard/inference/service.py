"""Serves an engine to other processes over a Unix socket. Imports no torch: whoever composes the process hands in
the engine.
"""

import asyncio
from pathlib import Path

from steelyard.inference import engine as api
from steelyard.inference.engine import Engine, Nothing
from steelyard.processes.channel import FaultHook, Server, no_fault
from steelyard.types import EngineStats, LoadProof

_NOTHING = Nothing()


class EngineService:
    """The endpoints of one engine. A caller that goes away aborts its requests; pauses and loads stay."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def register(self, server: Server) -> None:
        """Answer all endpoints of :mod:`steelyard.inference.engine` on ``server``."""
        server.handle_streaming(api.GENERATE, self._engine.generate)
        server.handle(api.LOAD, self._load)
        server.handle(api.UPDATE, self._update)
        server.handle(api.UNLOAD, self._unload)
        server.handle(api.PAUSE, self._pause)
        server.handle(api.RESUME, self._resume)
        server.handle(api.ABORT, self._abort)
        server.handle(api.RELEASE, self._release)
        server.handle(api.HEALTH, self._health)
        server.handle(api.STATS, self._stats)

    async def _load(self, request: api.LoadRequest) -> LoadProof:
        return await self._engine.load(request.version_dir, request.version)

    async def _update(self, request: api.UpdateRequest) -> LoadProof:
        return await self._engine.update(request.version_dir, request.version, request.kv)

    async def _unload(self, request: api.VersionRef) -> Nothing:
        await self._engine.unload(request.version)
        return _NOTHING

    async def _pause(self, _request: Nothing) -> Nothing:
        await self._engine.pause()
        return _NOTHING

    async def _resume(self, _request: Nothing) -> Nothing:
        await self._engine.resume()
        return _NOTHING

    async def _abort(self, request: api.RequestRef) -> Nothing:
        await self._engine.abort(request.request_id)
        return _NOTHING

    async def _release(self, request: api.AttemptRef) -> Nothing:
        await self._engine.release(request.attempt_id)
        return _NOTHING

    async def _health(self, _request: Nothing) -> api.EngineHealth:
        return await self._engine.health()

    async def _stats(self, _request: Nothing) -> EngineStats:
        return await self._engine.stats()


async def serve_engine(engine: Engine, socket_path: Path, stop: asyncio.Event, fault: FaultHook = no_fault) -> None:
    """Serve until ``stop`` is set; then end all connections with their calls. ``fault`` is for rehearsals.

    Raises:
        OSError: the socket's path is taken or cannot be made.
    """
    server = Server(fault)
    EngineService(engine).register(server)
    await server.serve_until(socket_path, stop)
