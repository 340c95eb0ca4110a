"""``sandbox.kind: process``: an ordinary child process. It isolates NOTHING.

For machines whose kernel forbids user namespaces, and only by explicit choice. The program runs as you, sees
your files and your network, and can leave processes behind that hide from us. Time, memory, output and file
size are still bounded. The protocol, the supervisor and what a result means are those of the real sandbox.
"""

import asyncio
import functools
import logging
import socket
import sys
from pathlib import Path

from steelyard.config import SandboxConfig
from steelyard.errors import SandboxLost
from steelyard.sandbox import inside
from steelyard.sandbox.base import OwnedSandbox
from steelyard.sandbox.bubblewrap import limits_json
from steelyard.sandbox.connection import ConnectedSandbox
from steelyard.sandbox.host_process import HostProcess
from steelyard.sandbox.registry import Registry

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_GONE_DEADLINE_S = 10.0


class ProcessStarter:
    """One supervisor process and one temporary directory per sandbox; warns once.

    Args:
        registry: where processes and directories are written down for the next owner.
    """

    def __init__(self, config: SandboxConfig, registry: Registry) -> None:
        logger.warning(
            "sandbox.kind: process isolates nothing: code of the policy runs as this user, "
            "with its files and its network; use it only for models and tasks that you trust"
        )
        self._config = config
        self._registry = registry
        self._alive: set[ConnectedSandbox] = set()

    async def start(self) -> OwnedSandbox:
        """See :class:`steelyard.sandbox.base.Starter`."""
        directory = self._registry.make_directory()
        try:
            process, ours = await HostProcess.start(self._command, socket.SOCK_STREAM, self._registry, directory)
        except BaseException:
            self._registry.drop_directory(directory)
            raise

        async def end() -> None:
            await process.end(_PATIENCE_S, _GONE_DEADLINE_S)

        sandbox = ConnectedSandbox(ours, process.gone, end, is_host_alive=lambda: True)
        self._alive.add(sandbox)
        process.gone.add_done_callback(functools.partial(self._tidy, sandbox, directory))
        try:
            await sandbox.wait_ready(self._config.start_deadline_s)
        except SandboxLost as lost:
            await sandbox.close()
            raise SandboxLost(f"{lost}; {process.last_words()}") from lost
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

    def _command(self, fd: int) -> list[str]:
        # The module's text may lie where only our own import path finds it, so it is run by path.
        return [sys.executable, "-I", "-S", "-B", inside.__file__, "sandbox", str(fd), limits_json(self._config)]

    def _tidy(self, sandbox: ConnectedSandbox, directory: Path, _gone: "asyncio.Future[None]") -> None:
        self._alive.discard(sandbox)
        self._registry.drop_directory(directory)
