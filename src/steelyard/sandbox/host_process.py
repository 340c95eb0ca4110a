"""A process of the host that carries sandboxes: started with a socket, watched, its last words kept."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from steelyard.errors import DeadlineExceeded
from steelyard.sandbox.registry import Registry

_TAIL_BYTES = 4096


class HostProcess:
    """Made by :meth:`start`. ``gone`` is done when it has been reaped and all that it logged was read."""

    def __init__(self, process: asyncio.subprocess.Process, registry: Registry) -> None:
        self._process = process
        self._registry = registry
        self._tail = bytearray()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._watch(), name=f"sandbox host process {process.pid}")

    @classmethod
    async def start(
        cls,
        command: Callable[[int], list[str]],
        kind: socket.SocketKind,
        registry: Registry,
        directory: Path | None = None,
    ) -> tuple["HostProcess", socket.socket]:
        """Start ``command(fd)``, where ``fd`` is its end of a new socket pair; it, and our end.

        It starts with an empty environment in ``directory`` (default ``/``).
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        try:
            process = await asyncio.create_subprocess_exec(
                *command(theirs.fileno()), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE, pass_fds=[theirs.fileno()], env={}, cwd=directory or "/",
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        started = cls(process, registry)
        try:
            registry.add(process.pid, directory)
        except BaseException:
            ours.close()
            started.kill()
            raise
        return started, ours

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self.gone.done()

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return self._tail.decode(errors="replace").strip()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self, deadline_s: float) -> bool:
        """Whether it was gone within ``deadline_s`` seconds."""
        await asyncio.wait({self.gone}, timeout=deadline_s)
        return self.gone.done()

    async def end(self, patience_s: float, deadline_s: float) -> None:
        """Wait ``patience_s`` seconds for it to end by itself, then kill it.

        Raises:
            DeadlineExceeded: it was not gone ``deadline_s`` seconds after SIGKILL.
        """
        if await self.wait(patience_s):
            return
        self.kill()
        if not await self.wait(deadline_s):
            who = f"process {self._process.pid}"
            raise DeadlineExceeded("a sandbox to end after SIGKILL", (who,), deadline_s)

    async def _watch(self) -> None:
        assert self._process.stderr is not None
        try:
            # All that was started there holds the other end, so its end is the end of them all.
            while part := await self._process.stderr.read(_TAIL_BYTES):
                self._tail += part
                del self._tail[:-_TAIL_BYTES]
            await self._process.wait()
            self._registry.remove(self._process.pid)
        finally:
            if not self.gone.done():
                self.gone.set_result(None)
