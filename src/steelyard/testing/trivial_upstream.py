"""A model server that answers every call at once with the same tokens, and the barest HTTP client for it.

So that what is measured is what stands between the two.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

from steelyard.processes import frames
from steelyard.types import FinishReason, GenerateResult, VersionSpan


class _Asked(msgspec.Struct):
    request_id: str


class UpstreamProtocol(asyncio.Protocol):
    """One connection to the trivial upstream: reads whole messages and answers each at once."""

    def __init__(self, answer: Callable[[bytearray], bytes | None]) -> None:
        self._answer = answer
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        answers = []
        while (answer := self._answer(self._buffer)) is not None:
            answers.append(answer)
        self._transport.write(b"".join(answers))


class TrivialUpstream:
    """Answers every call with the same tokens: frames of our channel on a Unix socket, JSON over HTTP."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._result = GenerateResult(
            request_id="req",
            token_ids=token_ids,
            logprobs=tuple(-0.001 * (1 + place % 977) for place in range(len(token_ids))),
            kept_logmass=(0.0,) * len(token_ids),
            version_spans=(VersionSpan(start=0, version=0),),
            finish_reason=FinishReason.STOP,
            replica_id="rep_trivial",
            load_id="load_trivial",
        )
        self.num_bytes = len(msgspec.msgpack.encode(self._result))
        body = msgspec.json.encode(self._result)[: self.num_bytes]
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._http_answer = head.encode() + body

    async def serve(self, path: Path) -> str:
        """Listens at ``path`` and on a free port; returns the latter's URL."""
        loop = asyncio.get_running_loop()
        engine = await loop.create_unix_server(lambda: UpstreamProtocol(self._frame), str(path))
        server = await loop.create_server(lambda: UpstreamProtocol(self._http), "127.0.0.1", 0)
        self._servers = (engine, server)
        host, port = server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    def _frame(self, buffer: bytearray) -> bytes | None:
        size = 4 + int.from_bytes(buffer[:4], "big")
        if len(buffer) < max(5, size):
            return None
        frame = msgspec.msgpack.decode(buffer[4:size], type=frames.Frame)
        asked = msgspec.msgpack.decode(frame.body, type=_Asked)
        del buffer[:size]
        result = msgspec.structs.replace(self._result, request_id=asked.request_id)
        return bytes(frames.encode_with(frame.id, "reply", "", result))

    def _http(self, buffer: bytearray) -> bytes | None:
        size = http_size(buffer)
        if size is None or len(buffer) < size:
            return None
        msgspec.json.decode(buffer[buffer.index(b"\r\n\r\n") + 4 : size])
        del buffer[:size]
        return self._http_answer


def http_size(buffer: bytearray) -> int | None:
    """Bytes of the HTTP message at the start of ``buffer``; None while its head is not whole."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(buffer[:end]).lower()
    at = head.index(b"content-length:") + 15
    return end + 4 + int(head[at:].partition(b"\r")[0])


class HttpConnection(asyncio.Protocol):
    """A bare HTTP/1.1 client, so that what is measured is not the client library. One call at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._size: int | None = None
        self._answered: Callable[[bytes], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def call(self, request: bytes, answered: Callable[[bytes], None]) -> None:
        self._answered = answered
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._size is None:
            self._size = http_size(self._buffer)
        if self._size is None or len(self._buffer) < self._size:
            return
        answer, answered = bytes(self._buffer), self._answered
        self._buffer.clear()
        self._size, self._answered = None, None
        if not answer.startswith(b"HTTP/1.1 200") or answered is None:
            raise RuntimeError(f"the server answered {answer!r}")
        answered(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None:
            raise RuntimeError(f"the connection ended: {exc}")
