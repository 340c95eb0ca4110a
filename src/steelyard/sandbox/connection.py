"""The host's end of one sandbox: requests over its socket, one at a time.

*consumes* calls; *waits for* the supervisor's reply, at most until the call's deadline and a grace;
*unblocked by* the reply or by the end of the socket; *produces* a result, or the reason why there is none.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable

from steelyard.errors import SandboxLost
from steelyard.sandbox import inside
from steelyard.types import SandboxCall, SandboxResult, SandboxStatus

# For what is not the program's: scheduling, killing, moving the output. Running out of it is a fault of the system.
GRACE_S = 10.0
_STATUSES = {
    inside.OK: SandboxStatus.OK,
    inside.CRASHED: SandboxStatus.CRASHED,
    inside.TIMED_OUT: SandboxStatus.TIMED_OUT,
    inside.OUTPUT_LIMIT: SandboxStatus.OUTPUT_LIMIT,
    inside.MEMORY_LIMIT: SandboxStatus.MEMORY_LIMIT,
    inside.KILLED: SandboxStatus.KILLED,
}


class ConnectedSandbox:
    """A sandbox whose supervisor answers on a socket.

    Args:
        sock: our end; taken over, made non-blocking, closed by :meth:`close`.
        gone: done when no process of the sandbox is left.
        end: kills it and waits until ``gone``.
        is_host_alive: whether what carries the sandbox still stands once the sandbox is gone; if so, a sandbox
            that ends in mid-run was brought down by its program.
        grace_s: how much later than its deadline a reply may come.
    """

    def __init__(
        self,
        sock: socket.socket,
        gone: "asyncio.Future[None]",
        end: Callable[[], Awaitable[None]],
        is_host_alive: Callable[[], bool],
        grace_s: float = GRACE_S,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._gone = gone
        self._end = end
        self._is_host_alive = is_host_alive
        self._grace_s = grace_s
        self._label = ""
        self._lost: SandboxLost | None = None
        self._is_busy = False
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answered.set_result(None)

    @property
    def label(self) -> str:
        """The attempt or job that it serves; empty before it was given out."""
        return self._label

    @property
    def gone(self) -> "asyncio.Future[None]":
        """Done when no process of the sandbox is left."""
        return self._gone

    async def wait_ready(self, deadline_s: float) -> None:
        """Wait for the supervisor's first word.

        Raises:
            SandboxLost: it could not set itself up; carries its reason.
        """
        try:
            async with asyncio.timeout(deadline_s):
                status, _, _, _, reason = await self._receive_reply()
        except (TimeoutError, ConnectionError) as error:
            raise SandboxLost(f"a sandbox did not start within {deadline_s:g} s: {error!r}") from error
        if status != inside.OK:
            raise SandboxLost(f"a sandbox could not be set up: {reason.decode(errors='replace')}")

    async def set_label(self, label: str) -> None:
        """Name the supervisor after ``label``, so that it can be told from others in a process list."""
        # The kernel keeps 15 bytes; the end of an id tells more than its beginning.
        await self._ask(inside.NAME, f"sy:{label[-12:]}".encode() + b"\0")
        self._label = label

    async def write_file(self, name: str, data: bytes) -> None:
        """See :class:`steelyard.sandbox.base.Sandbox`."""
        status, reason = await self._ask(inside.PUT, _checked(name).encode(), data)
        if status != inside.OK:
            raise SandboxLost(f"{self._label}: cannot write {name!r}: {reason.decode(errors='replace')}", True)

    async def read_file(self, name: str) -> bytes:
        """See :class:`steelyard.sandbox.base.Sandbox`."""
        status, data = await self._ask(inside.GET, _checked(name).encode())
        if status != inside.OK:
            raise FileNotFoundError(f"{self._label}: cannot read {name!r}: {data.decode(errors='replace')}")
        return data

    async def run(self, call: SandboxCall) -> SandboxResult:
        """See :class:`steelyard.sandbox.base.Sandbox`."""
        started = time.monotonic()
        try:
            reply = await self._request(inside.RUN, call.program, call.stdin, call.deadline_s)
        except SandboxLost as lost:
            if not lost.is_by_program:
                raise
            duration_s = time.monotonic() - started
            return SandboxResult(
                status=SandboxStatus.KILLED, stdout=b"", stderr=b"", returncode=None, duration_s=duration_s
            )
        status, returncode, duration_s, stdout, stderr = reply
        if status == inside.REFUSED:
            raise SandboxLost(f"{self._label}: {stderr.decode(errors='replace')}")
        return SandboxResult(
            status=_STATUSES[status], stdout=stdout, stderr=stderr, returncode=returncode, duration_s=duration_s
        )

    async def close(self) -> None:
        """See :class:`steelyard.sandbox.base.Sandbox`."""
        if self._lost is None:
            self._lost = SandboxLost(f"{self._label}: the sandbox was closed")
        try:
            # Ends the supervisor, and the request that somebody may still wait for, who must see that first.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            await self._end()
            await asyncio.wait({self._answered}, timeout=self._grace_s)
        finally:
            self._socket.close()

    async def _ask(self, operation: bytes, first: bytes, second: bytes = b"") -> tuple[int, bytes]:
        status, _, _, data, reason = await self._request(operation, first, second, 0.0)
        return status, data if status == inside.OK else reason

    async def _request(
        self, operation: bytes, first: bytes, second: bytes, deadline_s: float
    ) -> tuple[int, int, float, bytes, bytes]:
        if self._lost is not None:
            raise self._lost
        if self._is_busy:
            raise RuntimeError(f"{self._label}: requests must be made one at a time, got a second one")
        self._is_busy = True
        self._answered = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_s + self._grace_s):
                head = inside.REQUEST.pack(operation, deadline_s, len(first), len(second))
                await asyncio.get_running_loop().sock_sendall(self._socket, head + first + second)
                reply = await self._receive_reply()
        except TimeoutError:
            self._lost = SandboxLost(
                f"{self._label}: no reply within {deadline_s:g} s and {self._grace_s:g} s of grace"
            )
            raise self._lost from None
        except ConnectionError as error:
            # Closing on purpose sets the reason first.
            self._lost = self._lost or await self._why_it_ended(operation)
            raise self._lost from error
        except BaseException:
            # The stream is out of step: a reply may still be under way.
            self._lost = self._lost or SandboxLost(f"{self._label}: a request was cancelled; only closing is left")
            raise
        finally:
            self._answered.set_result(None)
        self._is_busy = False
        return reply

    async def _why_it_ended(self, operation: bytes) -> SandboxLost:
        # The socket ends before the processes do; whether the host of the sandbox ended too shows only then.
        await asyncio.wait({self._gone}, timeout=self._grace_s)
        is_by_program = operation == inside.RUN and self._is_host_alive()
        who = "its program" if is_by_program else "the system"
        return SandboxLost(f"{self._label}: the sandbox was brought down by {who}", is_by_program)

    async def _receive_reply(self) -> tuple[int, int, float, bytes, bytes]:
        head = await self._receive(inside.REPLY.size)
        status, returncode, duration_s, num_first, num_second = inside.REPLY.unpack(head)
        body = await self._receive(num_first + num_second)
        return status, returncode, duration_s, body[:num_first], body[num_first:]

    async def _receive(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < num_bytes:
            part = await loop.sock_recv(self._socket, num_bytes - len(parts))
            if not part:
                raise ConnectionResetError("the sandbox closed its socket")
            parts += part
        return bytes(parts)


def _checked(name: str) -> str:
    """A plain file name; directories would let a program redirect it by a link."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"a file name must be plain, without directories, got {name!r}")
    return name
