"""One listening HTTP port, for the servers of several stages.

It stands on the plain HTTP server of aiohttp: an application with a router costs each call about as much as the work of
the gateway or the coordinator itself. Where that is still too much, a server says how it answers plain requests without
aiohttp; see :mod:`steelyard.processes.quick_http`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage

from steelyard.errors import InputError
from steelyard.processes.quick_http import QuickAnswer, QuickConnections, QuickLimits

_BACKLOG = 128
Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class PortOptions:
    """``port`` 0 takes a free one. ``field`` is the configuration's name of the port, for error messages.

    ``shutdown_s``: how long :meth:`HttpPort.stop` waits for open requests.
    """

    field: str
    host: str
    port: int
    max_body_bytes: int
    shutdown_s: float


@dataclass(frozen=True, kw_only=True)
class QuickRoutes:
    """Plain POST requests to ``paths`` go to ``answer``; ``read_deadline_s`` is for the whole of one."""

    answer: QuickAnswer
    paths: frozenset[str]
    read_deadline_s: float


class HttpPort:
    """Hands every request to ``answer``, which must not raise, but for those of ``quick``."""

    def __init__(self, answer: Answer, options: PortOptions, quick: QuickRoutes | None = None) -> None:
        self._answer = answer
        self._options = options
        self._quick = quick
        self._runner: web.ServerRunner | None = None
        self._listener: asyncio.Server | None = None
        self._connections: QuickConnections | None = None

    async def start(self) -> str:
        """Listen; returns the base URL, without a path.

        Raises:
            InputError: the port is in use or may not be bound.
        """
        options = self._options
        server = web.Server(self._answer, request_factory=self._make_request, handler_cancellation=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=options.shutdown_s)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._factory(server), options.host, options.port, backlog=_BACKLOG
            )
        except OSError as error:
            await self.stop()
            raise InputError(
                f"{options.field}: {options.host}:{options.port} must be free, but: {error.strerror or error}"
            ) from error
        host, port = self._listener.sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self) -> None:
        """Stop listening and end open requests."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._connections is not None:
            await self._connections.close(self._options.shutdown_s)
            self._connections = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _factory(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """Makes the protocol of each connection."""
        if self._quick is None:
            return server
        limits = QuickLimits(max_body_bytes=self._options.max_body_bytes, read_deadline_s=self._quick.read_deadline_s)
        self._connections = QuickConnections(self._quick.answer, self._quick.paths, limits, take_over=server)
        return self._connections.new

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        limit = self._options.max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)


def bearer_key(headers: Mapping[str, str]) -> str | None:
    """The key of ``authorization: Bearer KEY``; None where the header is missing or of another form."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


async def read_body(request: web.BaseRequest, deadline_s: float) -> bytes:
    """The whole body of a request. Raises ``TimeoutError`` where it does not arrive within ``deadline_s`` seconds."""
    if request.content.is_eof():
        return await request.read()  # all of it is here already, so nothing is waited for
    async with asyncio.timeout(deadline_s):
        return await request.read()
