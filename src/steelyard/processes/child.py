"""Child processes of a run: how they are started, watched and ended.

A child dies with its parent (also when the parent is killed with SIGKILL), logs to a file whose end
becomes part of the error if it dies, and gets its threads and its core on purpose:

Threads. OpenMP's idle threads spin by default. On a machine with fewer cores than busy threads the
spinning takes the cores from whoever has work, and small matrix work falls behind manyfold. So every
process gets a stated number of threads and the passive wait policy.
"""

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from steelyard.errors import DeadlineExceeded, ProcessDied
from steelyard.processes.channel import Client

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 4096
_SPIN_COUNT = 10_000
"""Turns of the OpenMP library's waiting loop before a thread that waits goes to sleep."""
_KEEP_FREED_MEMORY = ":".join(
    (
        "glibc.malloc.mmap_threshold=33554432",
        "glibc.malloc.trim_threshold=4294967296",
        "glibc.malloc.top_pad=67108864",
        "glibc.malloc.hugetlb=1",
    )
)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exit at once if it already has.

    Args:
        parent_pid: who the parent was when it started us.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment that bounds the math libraries' threads and their spinning.

    A thread that spins without end while it waits takes the core from whoever it waits for, where there are more
    threads than cores: the default was seen to cost a factor of six. A thread that sleeps at once has to be woken
    hundreds of times in a training step, which costs a quarter of it. So a process with several threads spins for a
    moment and then sleeps.
    """
    count = str(num_threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(_SPIN_COUNT if num_threads > 1 else 0),
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "GLIBC_TUNABLES": _KEEP_FREED_MEMORY,
    }


def pin_to_core(core: int | None) -> None:
    """Keep this process on one of the cores that it may use; no core, no pinning.

    Args:
        core: position among the allowed cores, taken modulo their number.
    """
    if core is not None and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[core % len(allowed)]})


class ChildProcess:
    """One supervised child that serves a Unix socket. Made by :meth:`start` or :meth:`start_program`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.name = name
        self._process = process
        self._log_path = log_path

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @classmethod
    async def start(
        cls, name: str, module: str, arguments: list[str], *, log_path: Path, num_threads: int = 1
    ) -> "ChildProcess":
        """Start ``python -m module arguments`` with its output appended to ``log_path``."""
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, **thread_environment(num_threads)}
        return await cls.start_program(name, command, environment, log_path=log_path)

    @classmethod
    async def start_program(
        cls, name: str, command: list[str], environment: dict[str, str], *, log_path: Path
    ) -> "ChildProcess":
        """Start any program, as the leader of a session of its own, with its output appended to ``log_path``."""
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        return cls(name, process, log_path)

    async def connect(self, socket_path: Path, deadline_s: float) -> Client:
        """Connect to the child's socket. The child's death ends the wait at once.

        Raises:
            ProcessDied: it ended first; carries the end of its log.
            DeadlineExceeded: it neither listened nor ended within ``deadline_s`` seconds.
        """
        connecting = asyncio.create_task(Client.connect(socket_path, name=self.name, deadline_s=deadline_s))
        dying = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({connecting, dying}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            raise self._death()
        finally:
            for task in (connecting, dying):
                task.cancel()
            await asyncio.gather(connecting, dying, return_exceptions=True)

    async def watch(self, client: Client | None = None) -> NoReturn:
        """Wait until the child ends, then fail the client's calls and raise.

        Raises:
            ProcessDied: always, unless cancelled.
        """
        await self._process.wait()
        death = self._death()
        if client is not None:
            client.fail(death)
        raise death

    async def stop(self, deadline_s: float) -> None:
        """Ask the child to end; after ``deadline_s`` seconds kill its whole session."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(deadline_s):
                await self._process.wait()
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._reap(deadline_s)

    async def _reap(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._process.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"process {self.name} to end after SIGKILL", (self.name,), deadline_s) from None

    def _death(self) -> ProcessDied:
        return ProcessDied(self.name, self._process.returncode, self.log_tail())

    def log_tail(self) -> str:
        """The last lines that the child logged."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except FileNotFoundError:
            return ""
