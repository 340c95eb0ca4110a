"""A grader in a process of its own, both sides.

Inside, :func:`serve_grader` answers requests, several at a time. Outside, :class:`ChildGrader` starts such a
process, asks it, and kills it. What runs the process (a module with a ``main``) is put together elsewhere,
since it joins an environment's grader with a sandbox pool.
"""

import asyncio
import contextlib
import functools
import os
import signal
from pathlib import Path

import psutil

from steelyard.errors import ProcessDied, RemoteFailed
from steelyard.processes.channel import Client, Endpoint, FaultHook, Server, no_fault
from steelyard.processes.child import ChildProcess
from steelyard.scoring.base import Grader, GradeRequest, SandboxSource
from steelyard.scoring.verifier import grade_once
from steelyard.types import Score

GRADE = Endpoint("grade", GradeRequest, Score)
_GONE_DEADLINE_S = 10.0
_DEATH_NOTICE_S = 1.0


async def serve_grader(path: Path, grader: Grader, sandboxes: SandboxSource, fault: FaultHook = no_fault) -> None:
    """Answer grade requests on the Unix socket ``path`` until cancelled. ``fault`` is for rehearsals.

    Raises:
        OSError: the path is taken or cannot be made.
    """
    server = Server(fault)
    server.handle(GRADE, functools.partial(grade_once, grader, sandboxes))
    await server.serve(path)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await server.close()


class ChildGrader:
    """A grader process of ours, connected. Made by :meth:`start`."""

    def __init__(self, child: ChildProcess, client: Client) -> None:
        self._child = child
        self._client = client
        self._death: ProcessDied | None = None
        # Its death fails the calls that wait for it; the pool learns of it from them.
        self._watching = asyncio.create_task(self._watch(), name=f"watch {child.name}")

    @classmethod
    async def start(cls, child: ChildProcess, path: Path, deadline_s: float) -> "ChildGrader":
        """Connect to ``child``, which was just started and will serve on ``path``.

        Raises:
            ProcessDied: it ended first.
            DeadlineExceeded: it did not listen within ``deadline_s`` seconds.
        """
        try:
            return cls(child, await child.connect(path, deadline_s))
        except BaseException:
            await _kill(child)
            raise

    async def grade(self, request: GradeRequest, deadline_s: float) -> Score:
        """See :class:`steelyard.scoring.base.GraderHandle`."""
        try:
            return await self._client.call(GRADE, request, deadline_s=deadline_s)
        except RemoteFailed:
            # The connection of a dying process ends just before its death is known, which says more.
            await asyncio.wait({self._watching}, timeout=_DEATH_NOTICE_S)
            if self._death is not None:
                raise self._death from None
            raise

    def cpu_s(self) -> float:
        """See :class:`steelyard.scoring.base.GraderHandle`."""
        try:
            times = psutil.Process(self._child.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    async def kill(self) -> None:
        """See :class:`steelyard.scoring.base.GraderHandle`."""
        await _kill(self._child)
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._client.close()

    async def _watch(self) -> None:
        try:
            await self._child.watch(self._client)
        except ProcessDied as death:
            # Expected whenever a grader is stuck; who waits for it gets the error.
            self._death = death


async def _kill(child: ChildProcess) -> None:
    # Not the polite way: a grader that is stuck in one long operation hears nothing.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.stop(_GONE_DEADLINE_S)
