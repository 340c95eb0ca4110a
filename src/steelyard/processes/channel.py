"""Typed calls between the processes of a run.

::

    CHAT = Endpoint("chat", Question, Answer)          # shared by both sides
    server = Server(); server.handle(CHAT, answer)     # async def answer(question) -> Answer
    await server.serve(path)
    client = await Client.connect(path, name="oracle", deadline_s=5)
    answer = await client.call(CHAT, question, deadline_s=1)

A call that is cancelled or runs out of time is cancelled on the other side too. When a connection
ends, every pending call on it fails at once: nobody waits for a dead process.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec

from steelyard.errors import DeadlineExceeded, RemoteFailed, SteelyardError
from steelyard.processes import frames
from steelyard.processes.frames import Frame

logger = logging.getLogger(__name__)

Req = TypeVar("Req")
Rep = TypeVar("Rep")
Ev = TypeVar("Ev")

FaultHook = Callable[[str], None]
"""Called with the name of each point at which a rehearsal may want the process to die."""


@dataclass(frozen=True)
class Endpoint(Generic[Req, Rep]):
    """One method: its name, and the records that go in and out."""

    name: str
    request_type: type[Req]
    reply_type: type[Rep]


@dataclass(frozen=True)
class StreamingEndpoint(Generic[Req, Rep, Ev]):
    """A method that emits ``event_type`` records before its reply."""

    name: str
    request_type: type[Req]
    reply_type: type[Rep]
    event_type: type[Ev]


_Handler = Callable[[Any, Callable[[Any], None]], Awaitable[Any]]


def no_fault(point: str) -> None:
    """The hook of real runs."""


class Server:
    """Serves endpoints on a Unix socket. Handlers run concurrently; each is cancelled with its caller.

    Args:
        fault: called with ``call:<endpoint>`` before and ``reply:<endpoint>`` after each handler; rehearsals of
            recovery kill the process there.
    """

    def __init__(self, fault: FaultHook = no_fault) -> None:
        self._fault = fault
        self._handlers: dict[str, tuple[type[Any], _Handler]] = {}
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = {}

    def handle(self, endpoint: Endpoint[Req, Rep], handler: Callable[[Req], Awaitable[Rep]]) -> None:
        """Answer calls of ``endpoint`` with ``handler(request)``."""

        async def call(request: Any, _emit: Callable[[Any], None]) -> Any:
            return await handler(request)

        self._handlers[endpoint.name] = (endpoint.request_type, call)

    def handle_streaming(
        self,
        endpoint: StreamingEndpoint[Req, Rep, Ev],
        handler: Callable[[Req, Callable[[Ev], None]], Awaitable[Rep]],
    ) -> None:
        """Answer calls of ``endpoint`` with ``handler(request, emit)``."""
        self._handlers[endpoint.name] = (endpoint.request_type, handler)

    async def serve(self, path: Path) -> None:
        """Start listening; returns once connections are accepted. The socket is the owner's alone.

        Raises:
            OSError: the path is taken or cannot be made.
        """
        self._server = await asyncio.start_unix_server(self._serve_connection, str(path), limit=1 << 20)
        path.chmod(0o600)

    async def serve_until(self, path: Path, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then close. Raises like ``serve``."""
        await self.serve(path)
        try:
            await stop.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop listening and end all connections with their calls."""
        self._is_closed = True
        if self._server is None:
            return
        self._server.close()
        serving = [task for task in self._connections.values() if task is not None]
        for writer in self._connections:
            writer.close()
        # Closing feeds an end of file to each connection, whose task then ends by itself.
        await asyncio.gather(*serving, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:
            # Accepted by the event loop just before the listener was closed.
            writer.close()
            return
        calls: dict[int, asyncio.Task[None]] = {}
        self._connections[writer] = asyncio.current_task()
        try:
            while (frame := await frames.read(reader)) is not None:
                if frame.kind == "cancel":
                    if (running := calls.get(frame.id)) is not None:
                        running.cancel()
                    continue
                task = asyncio.create_task(self._run_call(frame, writer))
                calls[frame.id] = task
                task.add_done_callback(functools.partial(_forget, calls, frame.id))
        except RemoteFailed as error:
            logger.error("a connection was closed: %s", error)
        finally:
            self._connections.pop(writer, None)
            pending = list(calls.values())
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            writer.close()

    async def _run_call(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        def emit(event: Any) -> None:
            writer.write(frames.encode_with(frame.id, "event", "", event))

        known = self._handlers.get(frame.name)
        if known is None:
            failure = RemoteFailed(f"no endpoint is named {frame.name!r}")
            await self._send(frames.encode(frames.error_frame(frame.id, failure)), writer)
            return
        request_type, handler = known
        try:
            self._fault(f"call:{frame.name}")
            reply = await handler(msgspec.msgpack.decode(frame.body, type=request_type), emit)
            self._fault(f"reply:{frame.name}")
            answer = frames.encode_with(frame.id, "reply", "", reply)
        except SteelyardError as error:
            answer = frames.encode(frames.error_frame(frame.id, error))
        except Exception as error:
            # The caller must learn of any failure; it decides whether the run can go on.
            logger.exception("call %s failed", frame.name)
            answer = frames.encode(frames.error_frame(frame.id, error))
        await self._send(answer, writer)

    async def _send(self, answer: bytearray, writer: asyncio.StreamWriter) -> None:
        if not writer.is_closing():
            writer.write(answer)
            await writer.drain()


class Client:
    """Calls endpoints of one server. Made by :meth:`connect`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._transport: asyncio.Transport
        self._next_id = 0
        self._pending: dict[int, _PendingCall] = {}
        self._closed_by: SteelyardError | None = None

    @classmethod
    async def connect(cls, path: Path, *, name: str, deadline_s: float) -> "Client":
        """Connect to a server that may not be listening yet.

        Raises:
            DeadlineExceeded: nobody listened within ``deadline_s`` seconds.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        client = cls(name)
        while True:
            try:
                client._transport, _ = await loop.create_unix_connection(
                    lambda: _Answers(client._deliver, client._ended),
                    str(path),
                )
                return client
            except (FileNotFoundError, ConnectionRefusedError):
                waited_s = loop.time() - started
                if waited_s > deadline_s:
                    raise DeadlineExceeded(f"process {name} to listen", (name,), waited_s) from None
                # A socket file cannot be awaited; the pause bounds the polling, nothing is ordered by it.
                await asyncio.sleep(0.01)

    async def call(self, endpoint: Endpoint[Req, Rep], request: Req, *, deadline_s: float) -> Rep:
        """Call and wait for the reply.

        Raises:
            DeadlineExceeded: no reply within ``deadline_s`` seconds; the call is cancelled there too.
            SteelyardError: what the handler raised, by its own type where it is one of ours.
            RemoteFailed: the handler failed otherwise, or the connection ended.
        """
        body = await self._call(endpoint.name, request, deadline_s, None)
        return msgspec.msgpack.decode(body, type=endpoint.reply_type)

    async def call_streaming(
        self,
        endpoint: StreamingEndpoint[Req, Rep, Ev],
        request: Req,
        on_event: Callable[[Ev], None],
        *,
        deadline_s: float,
    ) -> Rep:
        """Like :meth:`call`; ``on_event`` gets each event, in order, before the reply is returned."""

        def decode(body: msgspec.Raw) -> None:
            on_event(msgspec.msgpack.decode(body, type=endpoint.event_type))

        body = await self._call(endpoint.name, request, deadline_s, decode)
        return msgspec.msgpack.decode(body, type=endpoint.reply_type)

    def fail(self, error: SteelyardError) -> None:
        """End all pending calls with ``error``, and refuse new ones with it."""
        if self._closed_by is None:
            self._closed_by = error
        for pending in self._pending.values():
            if not pending.done.done():
                pending.done.set_exception(error)

    async def close(self) -> None:
        """End the connection; pending calls fail."""
        self.fail(RemoteFailed(f"the connection to {self._name} was closed by us"))
        self._transport.close()

    async def _call(
        self, method: str, request: Any, deadline_s: float, on_event: Callable[[msgspec.Raw], None] | None
    ) -> msgspec.Raw:
        if self._closed_by is not None:
            raise self._closed_by
        call_id = self._next_id
        self._next_id += 1
        loop = asyncio.get_running_loop()
        pending = _PendingCall(method, loop.create_future(), on_event)
        self._pending[call_id] = pending
        # The time-out is an answer like any other. A context manager would cost a call several times as much, and
        # wait_for loses, in Python 3.11, a cancellation that comes together with the reply.
        timer = loop.call_later(deadline_s, self._run_out, call_id, deadline_s)
        try:
            self._transport.write(frames.encode_with(call_id, "call", method, request))
            return await pending.done
        except asyncio.CancelledError:
            self._send_cancel(call_id)
            raise
        finally:
            timer.cancel()
            del self._pending[call_id]

    def _run_out(self, call_id: int, deadline_s: float) -> None:
        pending = self._pending[call_id]
        if not pending.done.done():
            pending.done.set_exception(DeadlineExceeded(f"{pending.method} at {self._name}", (self._name,), deadline_s))
            self._send_cancel(call_id)

    def _send_cancel(self, call_id: int) -> None:
        if not self._transport.is_closing():
            self._transport.write(frames.encode(Frame(call_id, "cancel", "", frames.NOTHING)))

    def _ended(self, error: SteelyardError | None) -> None:
        self.fail(error or RemoteFailed(f"the connection to {self._name} ended"))

    def _deliver(self, frame: Frame) -> None:
        pending = self._pending.get(frame.id)
        if pending is None or pending.done.done():
            return
        if frame.kind == "event":
            if pending.on_event is not None:
                pending.on_event(frame.body)
        elif frame.kind == "reply":
            pending.done.set_result(frame.body)
        else:
            pending.done.set_exception(frames.error_from(frame, self._name, pending.method))


class _Answers(asyncio.Protocol):
    """Hands each answer on in the moment when it arrives, without a task that would have to be woken for it."""

    def __init__(self, deliver: Callable[[Frame], None], ended: Callable[[SteelyardError | None], None]) -> None:
        self._buffer = frames.FrameBuffer()
        self._deliver = deliver
        self._ended = ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._buffer.feed(data):
                self._deliver(frame)
        except RemoteFailed as error:
            self._ended(error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(None)


def _forget(calls: dict[int, "asyncio.Task[None]"], call_id: int, _done: "asyncio.Task[None]") -> None:
    calls.pop(call_id, None)


@dataclass(frozen=True)
class _PendingCall:
    method: str
    done: "asyncio.Future[msgspec.Raw]"
    on_event: Callable[[msgspec.Raw], None] | None
