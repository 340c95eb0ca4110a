"""A network that misbehaves: an HTTP proxy that loses requests or answers, or delivers requests twice, by a plan."""

import asyncio
import enum
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

_PASSED_ON = ("Authorization", "Content-Type", "Steelyard-Protocol")


class Fault(enum.Enum):
    """What happens to one request."""

    NONE = "none"
    LOSE_REQUEST = "lose_request"
    LOSE_ANSWER = "lose_answer"
    TWICE = "twice"


class FaultProxy:
    """Stands between a client and the server at ``upstream``, which may change while it runs.

    Args:
        upstream: base URL of the real server.
        plan: the fault of the request with this number; numbers start at 0.

    ``before_pass_on`` may be set to do something before the request with a number goes on to the server;
    ``arrived`` is set once a request has come.
    """

    def __init__(self, upstream: str, plan: Callable[[int], Fault] = lambda _: Fault.NONE) -> None:
        self.upstream = upstream
        self.plan = plan
        self.num_requests = 0
        self.before_pass_on: Callable[[int], Awaitable[None]] = _nothing
        self.arrived = asyncio.Event()
        self.lost_answers: list[bytes] = []
        self.requests: list[bytes] = []
        self._http: aiohttp.ClientSession | None = None
        self._runner: web.ServerRunner | None = None

    async def start(self) -> str:
        """Listen on a free port of the loopback; returns the base URL."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        self._runner = web.ServerRunner(web.Server(self._answer, handler_cancellation=True), shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        number = self.num_requests
        fault = self.plan(number)
        self.num_requests += 1
        data = await request.read()
        self.requests.append(data)
        self.arrived.set()
        if fault is Fault.LOSE_REQUEST:
            return _hang_up(request)
        await self.before_pass_on(number)
        try:
            status, body = await self._pass_on(request, data)
            if fault is Fault.TWICE:
                status, body = await self._pass_on(request, data)
        except aiohttp.ClientError:
            return _hang_up(request)
        if fault is Fault.LOSE_ANSWER:
            self.lost_answers.append(body)
            return _hang_up(request)
        return web.Response(status=status, body=body, content_type="application/msgpack")

    async def _pass_on(self, request: web.BaseRequest, data: bytes) -> tuple[int, bytes]:
        assert self._http is not None
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        url = self.upstream + request.path
        async with self._http.request(request.method, url, data=data, headers=headers) as response:
            return response.status, await response.read()


async def _nothing(_: int) -> None:
    pass


def _hang_up(request: web.BaseRequest) -> web.StreamResponse:
    """The other side sees a connection that ends without an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError
