"""One listening HTTP port, for the servers of several stages.

It stands on the plain HTTP server of aiohttp: an application with a router costs each call about as much as the work of
the gateway or the coordinator itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage

from steelyard.errors import InputError

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


class HttpPort:
    """Hands every request to ``answer``, which must not raise."""

    def __init__(self, answer: Answer, options: PortOptions) -> None:
        self._answer = answer
        self._options = options
        self._runner: web.ServerRunner | None = None

    async def start(self) -> str:
        """Listen; returns the base URL, without a path.

        Raises:
            InputError: the port is in use or may not be bound.
        """
        options = self._options
        server = web.Server(self._answer, request_factory=self._make_request, handler_cancellation=True)
        self._runner = web.ServerRunner(server, shutdown_timeout=options.shutdown_s)
        await self._runner.setup()
        site = web.TCPSite(self._runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise InputError(
                f"{options.field}: {options.host}:{options.port} must be free, but: {error.strerror or error}"
            ) from error
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def stop(self) -> None:
        """Stop listening and end open requests."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

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


def bearer_key(request: web.BaseRequest) -> str | None:
    """The key of ``Authorization: Bearer KEY``; None where the header is missing or of another form."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


async def read_body(request: web.BaseRequest, deadline_s: float) -> bytes:
    """The whole body of a request. Raises ``TimeoutError`` where it does not arrive within ``deadline_s`` seconds."""
    if request.content.is_eof():
        return await request.read()  # all of it is here already, so nothing is waited for
    async with asyncio.timeout(deadline_s):
        return await request.read()
