"""Sandboxes in memory: nothing is run, results are scripted. For tests of whoever uses sandboxes."""

import asyncio
from collections.abc import Awaitable, Callable

from steelyard.errors import SandboxLost
from steelyard.types import SandboxCall, SandboxResult, SandboxStatus

Answer = Callable[[SandboxCall], Awaitable[SandboxResult]]


def result(
    stdout: bytes = b"", status: SandboxStatus = SandboxStatus.OK, stderr: bytes = b"", returncode: int | None = 0
) -> SandboxResult:
    """A result as a run of no duration would leave it."""
    return SandboxResult(status=status, stdout=stdout, stderr=stderr, returncode=returncode, duration_s=0.0)


class FakeSandbox:
    """Keeps files in a dict and calls; answers each call by ``answer`` (default: ok, no output).

    ``may_end`` must be set before :meth:`close` makes it gone; it is from the start.
    """

    def __init__(self, answer: Answer | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.calls: list[SandboxCall] = []
        self.label = ""
        self.is_closed = False
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer = answer

    async def set_label(self, label: str) -> None:
        """See :class:`steelyard.sandbox.base.OwnedSandbox`."""
        self._must_be_open()
        self.label = label

    async def write_file(self, name: str, data: bytes) -> None:
        """See :class:`steelyard.sandbox.base.Sandbox`."""
        self._must_be_open()
        self.files[name] = data

    async def read_file(self, name: str) -> bytes:
        """See :class:`steelyard.sandbox.base.Sandbox`."""
        self._must_be_open()
        if name not in self.files:
            raise FileNotFoundError(f"{self.label}: cannot read {name!r}: no such file")
        return self.files[name]

    async def run(self, call: SandboxCall) -> SandboxResult:
        """See :class:`steelyard.sandbox.base.Sandbox`."""
        self._must_be_open()
        self.calls.append(call)
        return await self._answer(call) if self._answer is not None else result()

    async def close(self) -> None:
        """See :class:`steelyard.sandbox.base.Sandbox`."""
        self.is_closed = True
        await self.may_end.wait()
        if not self.gone.done():
            self.gone.set_result(None)

    def _must_be_open(self) -> None:
        if self.is_closed:
            raise SandboxLost(f"{self.label}: the sandbox was closed")


class FakeStarter:
    """Starts :class:`FakeSandbox`; ``failures`` are raised first, one a start. ``started`` lists them all."""

    def __init__(self, answer: Answer | None = None, failures: tuple[Exception, ...] = ()) -> None:
        self.started: list[FakeSandbox] = []
        self.num_sweeps = 0
        self.is_closed = False
        self._failures = list(failures)
        self._answer = answer

    async def start(self) -> FakeSandbox:
        """See :class:`steelyard.sandbox.base.Starter`."""
        await asyncio.sleep(0)
        if self._failures:
            raise self._failures.pop(0)
        sandbox = FakeSandbox(self._answer)
        self.started.append(sandbox)
        return sandbox

    async def sweep(self) -> int:
        """See :class:`steelyard.sandbox.base.Starter`."""
        self.num_sweeps += 1
        return 0

    async def close(self) -> None:
        """See :class:`steelyard.sandbox.base.Starter`."""
        self.is_closed = True
        for sandbox in self.started:
            await sandbox.close()


class FakePool:
    """A pool without a bound; ``given`` lists what was given out."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.given: list[FakeSandbox] = []
        self._answer = answer

    async def acquire(self, label: str, deadline_s: float) -> FakeSandbox:
        """See :class:`steelyard.sandbox.base.SandboxPool`."""
        sandbox = FakeSandbox(self._answer)
        sandbox.label = label
        self.given.append(sandbox)
        return sandbox

    async def sweep(self) -> int:
        """See :class:`steelyard.sandbox.base.SandboxPool`."""
        return 0

    async def close(self) -> None:
        """See :class:`steelyard.sandbox.base.SandboxPool`."""
        for sandbox in self.given:
            await sandbox.close()
