"""A replica process that drives a vLLM server: ``python -m steelyard.run.vllm_replica_process OPTIONS.json``.

Imports no torch. It alone talks to the server; others reach the engine through this process's socket. When the server
ends this process ends too, with the end of the server's log in its error.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from steelyard.clock import SystemClock
from steelyard.ids import RandomIds
from steelyard.inference.service import serve_engine
from steelyard.inference.vllm_api import VllmApi
from steelyard.inference.vllm_engine import VllmEngine, VllmSettings
from steelyard.inference.vllm_server import ServerSettings, VllmServer
from steelyard.processes.faults import fault_hook
from steelyard.processes.supervision import end_all, supervise
from steelyard.run.children import run_child
from steelyard.run.vllm_options import VllmReplicaOptions
from steelyard.weights.reader import VersionReader

_CALL_DEADLINE_S = 30.0
_LAST_ANSWERS_S = 1.0
_LINE_BYTES = 16 << 20
"""The longest line of a stream: a server that was not read for a while sends many tokens in one."""
_ANY_HOST = "http://vllm"


async def serve(options: VllmReplicaOptions, stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set or the server ends. A server that is still starting is not waited for.

    Raises:
        ProcessDied: the server ended.
        DeadlineExceeded: it does not come up.
    """
    serving = asyncio.create_task(_serve(options, stop), name="serve vllm")
    stopping = asyncio.create_task(stop.wait(), name="wait for the end")
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({serving}, timeout=_LAST_ANSWERS_S)
        if serving.done():
            serving.result()
    finally:
        await end_all((serving, stopping), options.stop_deadline_s)


async def _serve(options: VllmReplicaOptions, stop: asyncio.Event) -> None:
    async with _server(options) as (server, api):
        engine = VllmEngine(
            api,
            VersionReader(),
            VllmSettings(probe_tolerance=options.probe_tolerance, change_deadline_s=options.load_deadline_s),
            replica_id=options.name,
            clock=SystemClock(),
            ids=RandomIds(),
        )
        serving = serve_engine(engine, Path(options.socket_path), stop, fault_hook(options.fault, options.name))
        if server is None:
            await serving
        else:
            await supervise(serving, server.watch())


@contextlib.asynccontextmanager
async def _server(options: VllmReplicaOptions) -> AsyncIterator[tuple[VllmServer | None, VllmApi]]:
    """The server, ready: ours, or the one that was given."""
    socket_path = Path(options.socket_path).with_suffix(".vllm")
    connector = (
        aiohttp.UnixConnector(str(socket_path), limit=0) if options.url is None else aiohttp.TCPConnector(limit=0)
    )
    async with aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_BYTES) as session:
        api = VllmApi(session, options.url or _ANY_HOST, f"vllm of {options.name}", _CALL_DEADLINE_S)
        if options.url is not None:
            await api.check_alive()
            yield None, api
            return
        settings = ServerSettings(
            python=options.python,
            model_dir=options.model_dir,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_running=options.max_running,
            kv_cache_bytes=options.kv_cache_bytes,
            extra_args=options.extra_args,
        )
        server = await VllmServer.start(f"vllm of {options.name}", settings, socket_path, Path(options.log_path))
        try:
            await server.wait_until_ready(api, options.start_deadline_s)
            yield server, api
        finally:
            await server.stop(options.stop_deadline_s)


if __name__ == "__main__":
    run_child(VllmReplicaOptions, serve)
