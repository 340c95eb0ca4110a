"""The short way through an HTTP port: plain requests are read, answered and written here, others go to aiohttp.

::

    bytes --> whole and plain, its request line known? --> answer(PlainRequest) --> one write, and the next request
                 |no                                         |None
                 +-----> aiohttp's handler takes the connection over, with the bytes so far

A request is plain where its body comes with ``Content-Length`` and its head is of the strictest form. So everything
about HTTP that is old, rare, dubious or streamed is aiohttp's business, and what most calls are costs a tenth of it.

*Consumes* bytes of one client; *waits for* the rest of a request, and for the answer, one at a time; *unblocked by*
either, by the deadlines of :class:`QuickLimits`, or by the client's leaving, which cancels the answer.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from aiohttp.helpers import rfc822_formatted_time

_LOG = logging.getLogger(__name__)
_MAX_HEAD_BYTES = 8190
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)\r\n")
_LENGTH = re.compile(r"[0-9]{1,12}")
_NOT_PLAIN = frozenset(("transfer-encoding", "content-encoding", "expect", "upgrade", "connection"))
"""Headers that change how a body is read, or what becomes of the connection; ``keep-alive`` changes nothing."""
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found"}


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """``headers`` by their names in small letters. ``body`` None: it did not arrive in time."""

    path: str
    headers: Mapping[str, str]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """``content_type`` of ``body``, and further ``headers``."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] | None = None


class QuickAnswer(Protocol):
    """Answers plain requests; must not raise."""

    async def __call__(self, request: PlainRequest) -> PlainAnswer | None:
        """The answer; None leaves the request, and all that follow on its connection, to aiohttp."""
        ...


@dataclass(frozen=True, kw_only=True)
class QuickLimits:
    """``read_deadline_s``: for a whole request once it has begun. ``idle_s``: between two requests.

    A body of more than ``max_body_bytes`` is not read here.
    """

    max_body_bytes: int
    read_deadline_s: float
    idle_s: float = 3630.0


class QuickConnections:
    """All connections of one port that have not been handed over.

    Args:
        paths: what is asked for by POST here.
        take_over: makes aiohttp's handler of a connection.
    """

    def __init__(
        self,
        answer: QuickAnswer,
        paths: frozenset[str],
        limits: QuickLimits,
        take_over: Callable[[], asyncio.Protocol],
    ) -> None:
        self.answer = answer
        self.limits = limits
        self.take_over = take_over
        self.path_of_line = {f"POST {path} HTTP/1.1".encode(): path for path in paths}
        self.open: set[QuickConnection] = set()

    def new(self) -> "QuickConnection":
        """The protocol of a connection."""
        return QuickConnection(self)

    async def close(self, wait_s: float) -> None:
        """Close idle connections at once, and busy ones when they are answered, or after ``wait_s``."""
        busy = [task for connection in tuple(self.open) if (task := connection.close_soon()) is not None]
        if busy:
            await asyncio.wait(busy, timeout=wait_s)
        for connection in tuple(self.open):
            connection.abort()
        if busy:
            await asyncio.wait(busy, timeout=wait_s)


@dataclass(frozen=True, slots=True)
class _Head:
    """``num_bytes`` of the head itself. ``length``: of the body."""

    path: str
    headers: dict[str, str]
    num_bytes: int
    length: int


class QuickConnection(asyncio.Protocol):
    """One connection: at most one request of it is being answered, and what it sends ahead waits."""

    def __init__(self, port: QuickConnections) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._task: asyncio.Task[None] | None = None
        self._since_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._closes = False
        self._may_write = True
        self._is_reading = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._port.open.add(self)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._task is None and not self._buffer:
            self._since_s = self._loop.time()
        self._buffer += data
        if self._task is None and self._may_write:
            self._next()
        elif len(self._buffer) > _MAX_HEAD_BYTES and self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        if self._task is None:
            self._next()

    def close_soon(self) -> "asyncio.Task[None] | None":
        """Close now, or once the request is answered whose task is returned."""
        self._closes = True
        if self._task is None:
            self._transport.close()
        return self._task

    def abort(self) -> None:
        """End the connection with whatever is going on in it."""
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()

    def _next(self) -> None:
        """Begin with the request in the buffer, if it is whole."""
        if not self._buffer or self._transport.is_closing():
            return
        head = self._head
        if head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0 and len(self._buffer) <= _MAX_HEAD_BYTES:
                self._watch()
                return
            head = self._head = None if end < 0 else self._read_head(bytes(self._buffer[: end + 2]))
            if head is None:
                self._hand_over()
                return
        size = head.num_bytes + head.length
        if len(self._buffer) < size:
            self._watch()
            return
        body = bytes(memoryview(self._buffer)[head.num_bytes : size])
        self._begin(PlainRequest(head.path, head.headers, body))

    def _read_head(self, data: bytes) -> _Head | None:
        """None where it is not plain."""
        line, _, rest = data.partition(b"\r\n")
        path = self._port.path_of_line.get(line)
        pairs = _HEADER.findall(rest)
        if path is None or len(data) > _MAX_HEAD_BYTES or len(pairs) != rest.count(b"\n"):
            return None
        headers = {name.decode("ascii").lower(): value.decode("latin-1").rstrip(" \t") for name, value in pairs}
        length = headers.get("content-length", "")
        is_closing = headers.get("connection", "keep-alive").lower() != "keep-alive"
        if len(headers) != len(pairs) or not _LENGTH.fullmatch(length) or is_closing:
            return None
        if not _NOT_PLAIN.isdisjoint(headers.keys() - {"connection"}):
            return None
        if "host" not in headers or int(length) > self._port.limits.max_body_bytes:
            return None
        return _Head(path, headers, len(data) + 2, int(length))

    def _begin(self, request: PlainRequest) -> None:
        task = self._task = self._loop.create_task(self._serve(request))
        task.add_done_callback(self._served)

    async def _serve(self, request: PlainRequest) -> None:
        answer = await self._port.answer(request)
        if self._transport.is_closing():
            return
        if answer is None:
            self._task = None
            self._hand_over()
            return
        self._transport.write(_bytes_of(answer, is_last=self._closes))
        assert self._head is not None
        del self._buffer[: self._head.num_bytes + self._head.length]
        self._head = None

    def _served(self, task: "asyncio.Task[None]") -> None:
        if self._task is not task:
            return
        self._task = None
        if task.cancelled() or self._closes:
            self._transport.close()
            return
        if (error := task.exception()) is not None:
            _LOG.error("a request was not answered", exc_info=error)
            self._transport.close()
            return
        self._since_s = self._loop.time()
        if not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()
        if self._buffer and self._may_write:
            self._next()

    def _watch(self) -> None:
        """One timer for the connection, which looks at what has become due and is set anew."""
        limits = self._port.limits
        due_s = self._since_s + (limits.read_deadline_s if self._buffer and self._task is None else limits.idle_s)
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        self._timer = None
        limits = self._port.limits
        waited_s = self._loop.time() - self._since_s
        if self._task is None and self._buffer and waited_s >= limits.read_deadline_s:
            self._closes = True
            if self._head is None:
                self._transport.close()
                return
            self._begin(PlainRequest(self._head.path, self._head.headers, None))
        elif self._task is None and not self._buffer and waited_s >= limits.idle_s:
            self._transport.close()
            return
        elif self._task is not None:
            self._since_s = self._loop.time()
        self._watch()

    def _hand_over(self) -> None:
        self._leave()
        handler = self._port.take_over()
        if not self._is_reading:
            self._transport.resume_reading()
        self._transport.set_protocol(handler)
        handler.connection_made(self._transport)
        data, self._buffer = bytes(self._buffer), bytearray()
        handler.data_received(data)

    def _leave(self) -> None:
        self._port.open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _bytes_of(answer: PlainAnswer, *, is_last: bool) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in (answer.headers or {}).items())
    if is_last:
        more += "Connection: close\r\n"
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, '')}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nDate: {rfc822_formatted_time()}\r\n{more}\r\n"
    )
    return head.encode("latin-1") + answer.body
