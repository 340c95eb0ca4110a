"""A proxy in front of an S3 server that cuts connections in the middle, answers with errors, or does not answer."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

_HOP_BY_HOP = frozenset({"connection", "expect", "transfer-encoding", "content-length", "content-encoding", "host"})


class Pass(NamedTuple):
    """The request goes through."""


class Answer(NamedTuple):
    """The server is not asked; the client gets an S3 error."""

    status: int
    code: str


class CutUpload(NamedTuple):
    """The server gets the head and so many bytes of the body; then both connections end."""

    num_bytes: int


class CutDownload(NamedTuple):
    """The client gets the head and so many bytes of the body; then its connection ends."""

    num_bytes: int


class LoseAnswer(NamedTuple):
    """The server carries the request out; the client's connection ends without an answer."""


class Hang(NamedTuple):
    """Nothing happens until the client gives up."""


Fate = Pass | Answer | CutUpload | CutDownload | LoseAnswer | Hang


class S3Proxy:
    """Stands in front of the server at ``upstream``. Settle what happens with ``plan``.

    Args:
        upstream: base URL of the server.
        plan: what happens to a request, given as ``METHOD /bucket/key`` and its number, from 0 on.
    """

    def __init__(self, upstream: str, plan: Callable[[str, int], Fate] = lambda _, __: Pass()) -> None:
        self.plan = plan
        self.requests: list[str] = []
        self._upstream = upstream
        self._http: aiohttp.ClientSession
        self._runner: web.AppRunner

    async def start(self) -> str:
        """Listen on a free port of the loopback; returns the base URL."""
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=60), auto_decompress=False, skip_auto_headers=("Content-Type",)
        )
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close all connections."""
        await self._http.close()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        number, name = len(self.requests), f"{request.method} {request.path}"
        self.requests.append(name)
        body = await request.read()
        fate = self.plan(name, number)
        match fate:
            case Answer(status, code):
                text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as planned</Message></Error>"
                return web.Response(status=status, text=text, content_type="application/xml")
            case Hang():
                await asyncio.Event().wait()
            case CutUpload(num_bytes):
                await self._upload_half(request, body, num_bytes)
                return _hang_up(request)
        status, headers, data = await self._pass_on(request, body)
        match fate:
            case LoseAnswer():
                return _hang_up(request)
            case CutDownload(num_bytes):
                return await _download_half(request, status, data, num_bytes)
        if request.method == "HEAD":
            return _head(status, headers)
        kept = {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}
        return web.Response(status=status, headers=kept, body=data)

    async def _pass_on(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = self._upstream + request.path_qs
        async with self._http.request(request.method, url, data=body, headers=headers) as response:
            return response.status, dict(response.headers), await response.read()

    async def _upload_half(self, request: web.Request, body: bytes, num_bytes: int) -> None:
        """With the length of the whole in the head, as of a client that dies while it sends."""
        parts = urlsplit(self._upstream)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        headers = [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
        head = [f"{request.method} {request.path_qs} HTTP/1.1", f"Host: {parts.netloc}", *headers]
        writer.write("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body[:num_bytes])
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def _download_half(request: web.Request, status: int, data: bytes, num_bytes: int) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers={"Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[:num_bytes])
    return _hang_up(request)


def _head(status: int, headers: dict[str, str]) -> web.StreamResponse:
    kept = {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP - {"content-length"}}
    return web.Response(status=status, headers=kept)


def _hang_up(request: web.BaseRequest) -> web.StreamResponse:
    """The other side sees a connection that ends."""
    if request.transport is not None:
        request.transport.close()
    raise asyncio.CancelledError
