"""What a sandbox is, whoever makes it.

::

    pool.acquire(label) --> Sandbox --run(call)--> SandboxResult      any number of times, one at a time
                               `--close()                              gone with every process that it had

One sandbox serves one attempt, or one grading, and is destroyed. Files that a run leaves are there for
the next run in the same sandbox; processes are not.
"""

import asyncio
from typing import Protocol

from steelyard.types import SandboxCall, SandboxResult


class Sandbox(Protocol):
    """A place for the untrusted code of one attempt."""

    @property
    def label(self) -> str:
        """The attempt or job that it serves."""
        ...

    async def write_file(self, name: str, data: bytes) -> None:
        """Put a file into the sandbox's directory, replacing whatever has that name.

        Raises:
            SandboxLost: the sandbox is gone, or has no room; see its ``is_by_program``.
        """
        ...

    async def read_file(self, name: str) -> bytes:
        """A regular file of the sandbox's directory, at most ``sandbox.max_file_bytes`` long.

        Raises:
            FileNotFoundError: there is no such regular file of that size at most; links are not followed.
            SandboxLost: the sandbox is gone; see its ``is_by_program``.
        """
        ...

    async def run(self, call: SandboxCall) -> SandboxResult:
        """Run a program; it and all that it started have ended when this returns.

        Whatever the program did is a result, also that it brought its own sandbox down (``killed``).
        After a cancellation the sandbox can only be closed.

        Raises:
            SandboxLost: the sandbox failed by no fault of the program.
        """
        ...

    async def close(self) -> None:
        """Destroy it; returns when all its processes are gone. Closing twice is fine.

        Raises:
            DeadlineExceeded: the processes did not end after SIGKILL.
        """
        ...


class OwnedSandbox(Sandbox, Protocol):
    """A sandbox as its pool sees it."""

    @property
    def gone(self) -> "asyncio.Future[None]":
        """Done when no process of the sandbox is left, for whatever reason."""
        ...

    async def set_label(self, label: str) -> None:
        """Say whom it serves from now on.

        Raises:
            SandboxLost: it is gone.
        """
        ...


class Starter(Protocol):
    """Makes sandboxes of one kind."""

    async def start(self) -> OwnedSandbox:
        """A running sandbox without a label.

        Raises:
            InputError: this machine does not allow it; says what to change.
            SandboxLost: it could not be started this time.
        """
        ...

    async def sweep(self) -> int:
        """End what an earlier owner left behind; how many processes or directories that were."""
        ...

    async def close(self) -> None:
        """End everything that was started here."""
        ...


class SandboxPool(Protocol):
    """Gives out sandboxes that were started before they were asked for."""

    async def acquire(self, label: str, deadline_s: float) -> Sandbox:
        """A fresh sandbox for ``label``.

        Raises:
            DeadlineExceeded: none came free within ``deadline_s`` seconds; names who holds them.
            SandboxLost: sandboxes cannot be started; carries the first cause.
        """
        ...

    async def sweep(self) -> int:
        """End what an earlier owner left behind; call it before the first ``acquire``."""
        ...

    async def close(self) -> None:
        """Destroy all sandboxes, also those given out."""
        ...
