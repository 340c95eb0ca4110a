"""Starters of bubblewrap sandboxes: the nursery, and one bubblewrap each.

*consumes* requests for a sandbox; *waits for* its supervisor's first word; *unblocked by* that word, the end of
the process, or the start deadline; *produces* connected sandboxes.
"""

import asyncio
import contextlib
import logging
import socket

from steelyard.config import SandboxConfig
from steelyard.errors import DeadlineExceeded, InputError, SandboxLost
from steelyard.sandbox import inside
from steelyard.sandbox.base import OwnedSandbox
from steelyard.sandbox.bubblewrap import Command
from steelyard.sandbox.connection import ConnectedSandbox
from steelyard.sandbox.host_process import HostProcess
from steelyard.sandbox.registry import Registry

logger = logging.getLogger(__name__)

# A supervisor ends by itself when its socket closes; after this it is killed from outside.
_PATIENCE_S = 5.0
_GONE_DEADLINE_S = 10.0
_ADVICE = (
    "the kernel must allow unprivileged user namespaces: check `sysctl user.max_user_namespaces` (> 0), "
    "`kernel.unprivileged_userns_clone` (1, Debian), `kernel.apparmor_restrict_unprivileged_userns` (0, Ubuntu; or an "
    "AppArmor profile for bwrap); in a container allow the calls unshare, clone and mount (docker: "
    "`--security-opt seccomp=unconfined --security-opt systempaths=unconfined`). Without isolation at all: "
    "`sandbox.kind: process`"
)


class SingleStarter:
    """One bubblewrap per sandbox.

    Args:
        registry: where the processes are written down for the next owner.
    """

    def __init__(self, config: SandboxConfig, command: Command, registry: Registry) -> None:
        self._deadline_s = config.start_deadline_s
        self._command = command
        self._registry = registry
        self._alive: set[ConnectedSandbox] = set()

    async def start(self) -> OwnedSandbox:
        """See :class:`steelyard.sandbox.base.Starter`."""
        process, ours = await HostProcess.start(self._command.single, socket.SOCK_STREAM, self._registry)

        async def end() -> None:
            await process.end(_PATIENCE_S, _GONE_DEADLINE_S)

        # There is nothing else that could have ended it: what ends in mid-run was ended by its program.
        sandbox = ConnectedSandbox(ours, process.gone, end, is_host_alive=lambda: True)
        self._alive.add(sandbox)
        process.gone.add_done_callback(lambda _: self._alive.discard(sandbox))
        try:
            await sandbox.wait_ready(self._deadline_s)
        except SandboxLost as lost:
            await sandbox.close()
            if words := process.last_words():
                raise InputError(f"bubblewrap did not start: {words}; {_ADVICE}") from lost
            raise
        except BaseException:
            process.kill()
            raise
        return sandbox

    async def sweep(self) -> int:
        """See :class:`steelyard.sandbox.base.Starter`."""
        return await asyncio.to_thread(self._registry.sweep)

    async def close(self) -> None:
        """See :class:`steelyard.sandbox.base.Starter`."""
        await asyncio.gather(*(sandbox.close() for sandbox in self._alive))


class Nursery:
    """One bubblewrap whose pid 1 makes all sandboxes. A nursery that dies is started again at the next start."""

    def __init__(self, config: SandboxConfig, command: Command, registry: Registry) -> None:
        self._deadline_s = config.start_deadline_s
        self._command = command
        self._registry = registry
        self._opening = asyncio.Lock()
        self._room: _Room | None = None

    async def start(self) -> OwnedSandbox:
        """See :class:`steelyard.sandbox.base.Starter`."""
        async with self._opening:
            if self._room is None or not self._room.is_alive:
                if self._room is not None:
                    logger.error("the sandbox nursery died and is started again: %s", self._room.last_words())
                    await self._room.close()
                self._room = await _Room.open(self._command, self._registry, self._deadline_s)
        return await self._room.start(self._deadline_s)

    async def sweep(self) -> int:
        """See :class:`steelyard.sandbox.base.Starter`."""
        return await asyncio.to_thread(self._registry.sweep)

    async def close(self) -> None:
        """See :class:`steelyard.sandbox.base.Starter`."""
        async with self._opening:
            if self._room is not None:
                await self._room.close()


class _Room:
    """One life of a nursery."""

    def __init__(self, process: HostProcess, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._next_number = 1
        self._gone: dict[int, asyncio.Future[None]] = {}
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read_notices(), name="sandbox nursery notices")

    @classmethod
    async def open(cls, command: Command, registry: Registry, deadline_s: float) -> "_Room":
        """Start the process and wait for its first word.

        Raises:
            InputError: bubblewrap cannot do its work here.
        """
        process, control = await HostProcess.start(command.nursery, socket.SOCK_SEQPACKET, registry)
        room = cls(process, control)
        await asyncio.wait({room._ready}, timeout=deadline_s)
        if room._ready.done() and room._ready.result():
            return room
        await room.close()
        raise InputError(f"bubblewrap did not start within {deadline_s:g} s: {room.last_words()}; {_ADVICE}")

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive and not self._reading.done()

    def last_words(self) -> str:
        return self._process.last_words()

    async def start(self, deadline_s: float) -> OwnedSandbox:
        number = self._next_number
        self._next_number += 1
        ours, theirs = socket.socketpair()
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gone[number] = gone

        async def end() -> None:
            await self._end(number, gone)

        sandbox = ConnectedSandbox(ours, gone, end, is_host_alive=lambda: self.is_alive)
        try:
            with theirs:
                socket.send_fds(self._control, [inside.NOTICE.pack(inside.START, number)], [theirs.fileno()])
            await sandbox.wait_ready(deadline_s)
        except OSError as error:
            raise SandboxLost(f"the sandbox nursery does not answer: {error}") from error
        except BaseException:
            self._kill(number)
            ours.close()
            raise
        return sandbox

    def _kill(self, number: int) -> None:
        # A nursery that cannot be told is dead or dying, and its sandboxes with it.
        with contextlib.suppress(OSError):
            self._control.send(inside.NOTICE.pack(inside.KILL, number))

    async def _end(self, number: int, gone: "asyncio.Future[None]") -> None:
        if not gone.done():
            self._kill(number)
        await asyncio.wait({gone}, timeout=_GONE_DEADLINE_S)
        if not gone.done():
            raise DeadlineExceeded("a sandbox to end after SIGKILL", (f"sandbox {number}",), _GONE_DEADLINE_S)

    async def _read_notices(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while notice := await loop.sock_recv(self._control, inside.NOTICE.size):
                operation, number = inside.NOTICE.unpack(notice)
                if operation == inside.READY:
                    self._ready.set_result(True)
                else:
                    self._gone.pop(number).set_result(None)
        except ConnectionError:
            # Another way to end; who starts the next one says what this one's last words were.
            pass
        finally:
            await asyncio.shield(self._all_gone())

    async def _all_gone(self) -> None:
        await self._process.end(_PATIENCE_S, _GONE_DEADLINE_S)
        if not self._ready.done():
            self._ready.set_result(False)
        for gone in self._gone.values():
            gone.set_result(None)
        self._gone.clear()

    async def close(self) -> None:
        """End the nursery, and with it every sandbox."""
        # Its pid 1 ends when it sees the end of the socket, and is reaped by bubblewrap, which a kill would prevent.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            async with asyncio.timeout(_PATIENCE_S + _GONE_DEADLINE_S):
                await self._reading
        finally:
            self._control.close()
