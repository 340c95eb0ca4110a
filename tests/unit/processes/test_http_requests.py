"""Requests that are repeated until they are answered, and failures that cross the network by their own type."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from steelyard.errors import (
    DeadlineExceeded,
    InputError,
    IntegrityError,
    ProtocolMismatch,
    Refused,
    RemoteFailed,
    RunError,
    StorageFailed,
)
from steelyard.metrics import Counters
from steelyard.processes.http_failures import HttpError, as_http, failure_response
from steelyard.processes.http_port import HttpPort, PortOptions
from steelyard.processes.http_requests import HttpRequests, RetrySettings

Answer = Callable[[web.BaseRequest], web.StreamResponse]
Send = Callable[..., Awaitable[bytes]]


class Server:
    """Gives its answers in order, the last one for ever; keeps what was asked."""

    def __init__(self, *answers: web.Response) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str, bytes, str]] = []

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.method, request.path, body, request.headers.get("X-Key", "")))
        given = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return web.Response(body=given.body, status=given.status)


def play(server: Server, scene: Callable[[Send, Counters], Awaitable[None]], deadline_s: float = 20.0) -> None:
    async def run() -> None:
        options = PortOptions(field="p", host="127.0.0.1", port=0, max_body_bytes=1 << 20, shutdown_s=1.0)
        port, counters = HttpPort(server.answer, options), Counters()
        requests = HttpRequests(
            await port.start(),
            "server",
            {"X-Key": "k"},
            counters=counters,
            draw=random.Random(0),
            settings=RetrySettings(deadline_s=deadline_s, backoff_s=0.0),
        )
        try:
            async with aiohttp.ClientSession() as http:
                await scene(lambda *arguments: requests.send(http, *arguments), counters)
        finally:
            await port.stop()

    asyncio.run(run())


def failed(error: Exception) -> web.Response:
    failure = as_http(error)
    assert failure is not None
    return failure_response(failure)


def test_a_request_is_the_same_each_time_until_it_is_answered() -> None:
    server = Server(failed(StorageFailed("full")), web.Response(status=429, body=b"?"), web.Response(body=b"done"))

    async def scene(send: Send, counters: Counters) -> None:
        assert await send("POST", "/there", b"data") == b"done"
        assert server.asked == [("POST", "/there", b"data", "k")] * 3
        assert counters.read() == {"server_client.retried": 2}

    play(server, scene)


@pytest.mark.parametrize(
    "error",
    [ProtocolMismatch("1, not 2"), InputError("a field"), Refused("late", "over"), IntegrityError("unlike")],
)
def test_what_repeating_cannot_mend_is_raised_at_once_as_itself(error: Exception) -> None:
    server = Server(failed(error))

    async def scene(send: Send, _: Counters) -> None:
        with pytest.raises(type(error)) as caught:
            await send("GET", "/")
        assert str(caught.value) == str(error)
        assert len(server.asked) == 1

    play(server, scene)


def test_the_deadline_names_the_last_failure_and_the_server() -> None:
    async def scene(send: Send, _: Counters) -> None:
        with pytest.raises(DeadlineExceeded, match=r"answer of the server \(status 503: full\).*http://127"):
            await send("GET", "/")

    play(Server(failed(StorageFailed("full"))), scene, deadline_s=0.2)


def test_an_answer_of_somebody_else_is_named_as_such() -> None:
    async def scene(send: Send, _: Counters) -> None:
        with pytest.raises(RemoteFailed, match="status 418, which is no answer of a server"):
            await send("GET", "/")

    play(Server(web.Response(status=418, body=b"teapot")), scene)


def test_a_url_that_is_none_is_an_error_at_once() -> None:
    requests = HttpRequests("nowhere", "server", {}, counters=Counters(), draw=random.Random(0))

    async def run() -> None:
        async with aiohttp.ClientSession() as http:
            with pytest.raises(InputError, match="the URL of the server must be"):
                await requests.send(http, "GET", "/")

    asyncio.run(run())


def test_closing_the_session_ends_a_request_that_is_under_way() -> None:
    is_asked = asyncio.Event()

    async def silent(_: web.BaseRequest) -> web.StreamResponse:
        is_asked.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def run() -> None:
        port = HttpPort(silent, PortOptions(field="p", host="127.0.0.1", port=0, max_body_bytes=9, shutdown_s=0.1))
        url = await port.start()
        http = aiohttp.ClientSession()
        requests = HttpRequests(url, "server", {}, counters=Counters(), draw=random.Random(0))
        sending = asyncio.create_task(requests.send(http, "GET", "/"))
        await is_asked.wait()
        await http.close()
        with pytest.raises(RunError, match="the client of the server was closed"):
            await sending
        await port.stop()

    asyncio.run(run())


def test_the_back_off_doubles_up_to_its_limit_less_a_random_share_of_one_half() -> None:
    settings, draw = RetrySettings(backoff_s=1.0, max_backoff_s=4.0), random.Random(0)
    waits = [[settings.wait_s(tries, draw) for _ in range(200)] for tries in (1, 2, 3, 4, 90)]
    for longest_s, seen in zip((1.0, 2.0, 4.0, 4.0, 4.0), waits, strict=True):
        assert longest_s / 2 <= min(seen) < max(seen) <= longest_s


def test_only_errors_of_ours_have_a_status() -> None:
    assert as_http(KeyError("a bug")) is None
    own = HttpError(408, InputError("slow"))
    assert as_http(own) is own
