"""The short way for plain requests: the same answers however bytes arrive; what is not plain goes to aiohttp."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.processes.http_port import HttpPort, PortOptions, QuickRoutes
from steelyard.processes.quick_http import PlainAnswer, PlainRequest

MAX_BODY_BYTES = 1000
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Desk:
    """Answers with the body in capitals; knows what was asked of it, and of aiohttp."""

    def __init__(self, read_deadline_s: float = 20.0) -> None:
        self.plain: list[PlainRequest] = []
        self.others: list[str] = []
        self.begun = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.cancelled = asyncio.Event()
        options = PortOptions(
            field="test.port", host="127.0.0.1", port=0, max_body_bytes=MAX_BODY_BYTES, shutdown_s=20.0
        )
        quick = QuickRoutes(answer=self.quick, paths=frozenset(("/a", "/b")), read_deadline_s=read_deadline_s)
        self.port = HttpPort(self.other, options, quick)

    async def quick(self, request: PlainRequest) -> PlainAnswer | None:
        self.plain.append(request)
        self.begun.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if request.body is None:
            return PlainAnswer(b"slow", status=408)
        if request.body == b"raise":
            raise ValueError("a bug")
        return (
            None if request.body == b"stream" else PlainAnswer(request.body.upper(), headers={"X-Path": request.path})
        )

    async def other(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return web.Response(status=413)
        self.others.append(f"{request.method} {request.path} {body.decode()}")
        return web.Response(body=b"other")


def talk(conversation: Talk, desk: Desk) -> None:
    async def main() -> None:
        url = await desk.port.start()
        host, port = url.removeprefix("http://").split(":")
        try:
            async with asyncio.timeout(20):
                reader, writer = await asyncio.open_connection(host, int(port))
                await conversation(reader, writer)
                writer.close()
        finally:
            await desk.port.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in a run
        runner.run(main())


def request(body: bytes, path: str = "/a", more: str = "", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n{more}\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), bodies=st.lists(st.text("abc{}\r\n", max_size=60).map(str.encode), min_size=1, max_size=4))
def test_requests_are_answered_in_order_however_their_bytes_are_cut(data: st.DataObject, bodies: list[bytes]) -> None:
    sent = b"".join(
        request(body, path, "X-Api-Key:  k \r\n") for body, path in zip(bodies, ["/a", "/b", "/a", "/b"], strict=False)
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=6)))

    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
            writer.write(sent[start:end])
            await writer.drain()
            await asyncio.sleep(0)
        for body in bodies:
            status, headers, found = await answer(reader)
            assert (status, found, headers["content-type"]) == (200, body.upper(), "application/json")
            assert "date" in headers

    desk = Desk()
    talk(conversation, desk)
    assert [plain.body for plain in desk.plain] == bodies
    assert {plain.headers["x-api-key"] for plain in desk.plain} == {"k"}
    assert desk.others == []


CHUNKED = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
NOT_PLAIN = {
    "another path": request(b"hi", "/c"),
    "a query": request(b"hi", "/a?x=1"),
    "another method": b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n",
    "chunks": CHUNKED,
    "two lengths": request(b"hi", more="Content-Length: 3\r\n"),
    "a length that is no number": b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: +2\r\n\r\nhi",
    "a folded header": request(b"hi", more="X: 1\r\n 2\r\n"),
    "a bare line end in a header": request(b"hi", more="X: 1\nY: 2\r\n"),
    "a space before the colon": request(b"hi", more="X : 1\r\n"),
    "an end of the connection": request(b"hi", more="Connection: close\r\n"),
    "no host": b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi",
    "an old version": b"POST /a HTTP/1.0\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi",
    "a long head": request(b"hi", more=f"X: {'x' * 8200}\r\n"),
    "a long body": request(b"h" * (MAX_BODY_BYTES + 1)),
    "no HTTP at all": b"hello\r\n\r\n",
    "a streamed answer": request(b"stream"),
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_aiohttps(name: str) -> None:
    """Also where plain requests came before it."""
    statuses: list[int] = []

    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request(b"first"))
        assert (await answer(reader))[2] == b"FIRST"
        writer.write(NOT_PLAIN[name])
        status, headers, _ = await answer(reader)
        statuses.append(status)
        assert "aiohttp" in headers["server"]

    desk = Desk()
    talk(conversation, desk)
    assert [plain.body for plain in desk.plain][:1] == [b"first"]
    assert len(desk.plain) == (2 if name == "a streamed answer" else 1)
    assert len(desk.others) == (statuses == [200])


def test_after_a_streamed_answer_the_connection_goes_on() -> None:
    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request(b"stream") + request(b"next"))
        assert [(await answer(reader))[2] for _ in range(2)] == [b"other", b"other"]

    desk = Desk()
    talk(conversation, desk)
    assert desk.others == ["POST /a stream", "POST /a next"]


def test_a_body_that_does_not_arrive_is_answered_and_the_connection_ends() -> None:
    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request(b"hi", length=9))
        status, headers, body = await answer(reader)
        assert (status, headers["connection"], body) == (408, "close", b"slow")
        assert await reader.read() == b""

    talk(conversation, Desk(read_deadline_s=0.05))


def test_a_head_that_does_not_arrive_ends_the_connection() -> None:
    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /a HT")
        assert await reader.read() == b""

    desk = Desk(read_deadline_s=0.05)
    talk(conversation, desk)
    assert desk.plain == []


def test_a_client_that_leaves_cancels_its_answer() -> None:
    desk = Desk()
    desk.may_answer.clear()

    async def conversation(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request(b"hi"))
        await desk.begun.wait()
        writer.close()
        await desk.cancelled.wait()

    talk(conversation, desk)


def test_a_stopping_port_answers_what_it_has_begun() -> None:
    desk = Desk()
    desk.may_answer.clear()

    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request(b"hi"))
        await desk.begun.wait()
        stopping = asyncio.create_task(desk.port.stop())
        await asyncio.sleep(0)
        desk.may_answer.set()
        assert (await answer(reader))[2] == b"HI"
        await stopping
        assert await reader.read() == b""

    talk(conversation, desk)


def test_a_failing_answer_ends_the_connection_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request(b"raise"))
        assert await reader.read() == b""

    talk(conversation, Desk())
    assert "a request was not answered" in caplog.text


def test_what_a_client_sends_ahead_waits_without_being_read_on() -> None:
    desk = Desk()
    desk.may_answer.clear()
    bodies = [b"x" * MAX_BODY_BYTES] * 200

    async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(map(request, bodies)))
        await desk.begun.wait()
        desk.may_answer.set()
        for body in bodies:
            assert (await answer(reader))[2] == body.upper()

    talk(conversation, desk)
    assert len(desk.plain) == len(bodies)
