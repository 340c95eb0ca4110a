"""Rehearsals of crashes: whole runs in real processes that die where a plan says, and what they leave behind.

``python -m steelyard.testing.rehearsal [--resume] CONFIG_OR_RUN CACHE_DIR [FAULT]`` starts or resumes a run as the
command line does, with a :class:`~steelyard.processes.faults.FaultPlan` as JSON.
"""

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil

from steelyard import config_file
from steelyard.cli.main import exit_code
from steelyard.processes.faults import FaultPlan
from steelyard.run import launch
from steelyard.testing.small_runs import environment

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
_bystanders: set[psutil.Process] = set()
"""Children that had been started before, such as a database server for all tests; nobody waits for their end."""


def main() -> int:
    """Start or resume one run; returns the exit code of the command line."""
    parser = argparse.ArgumentParser(prog="rehearsal")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("path")
    parser.add_argument("cache_dir", type=Path)
    parser.add_argument("fault", nargs="?")
    options = parser.parse_args()
    fault = msgspec.json.decode(options.fault, type=FaultPlan) if options.fault else None

    def run() -> int:
        if options.resume:
            return launch.resume(options.path, cache_dir=options.cache_dir, fault=fault)
        return launch.start(config_file.load(Path(options.path)), cache_dir=options.cache_dir, fault=fault)

    return exit_code(run)


def rehearse(
    path: Path, cache_dir: Path, fault: FaultPlan | None, *, is_resume: bool, deadline_s: float
) -> "subprocess.CompletedProcess[str]":
    """Start the run configured in ``path``, or resume the one in the directory ``path``, and wait for its end.

    Raises:
        subprocess.TimeoutExpired: it had not ended after ``deadline_s`` seconds.
    """
    command = [sys.executable, "-m", "steelyard.testing.rehearsal"]
    command += ["--resume"] * is_resume + [str(path), str(cache_dir)]
    command += [msgspec.json.encode(fault).decode()] if fault is not None else []
    return subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)


class Foreground:
    """A command in a process group of its own, as a shell starts it; its standard error goes to a file.

    A context manager: at the end of the block it is killed if it still runs.

    Args:
        max_file_bytes: no process of it can write a longer file; None sets no limit.
        variables: environment variables beside or in place of ours.
    """

    def __init__(
        self,
        command: list[str],
        stderr: Path,
        *,
        max_file_bytes: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._stderr = stderr
        with stderr.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True, env={**environment(), **(variables or {})},
            )  # fmt: skip
        if max_file_bytes is not None:
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def stderr(self) -> str:
        """What it wrote to standard error so far."""
        return self._stderr.read_text(encoding="utf-8")

    def wait_for(self, text: str) -> None:
        """Read its output up to a line with ``text``. Bounded by the deadline of the test.

        Raises:
            AssertionError: it ended before.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if text in line:
                return
        raise AssertionError(f"{text!r} was never said; {self.stderr}")

    def interrupt(self, *, is_whole_group: bool) -> None:
        """SIGINT, as of Ctrl-C: to the process alone, or to all that share the terminal."""
        if is_whole_group:
            os.killpg(self.pid, signal.SIGINT)
        else:
            self.send(signal.SIGINT)

    def send(self, signal_number: signal.Signals) -> None:
        """A signal to the process alone."""
        os.kill(self.pid, signal_number)

    def wait(self, deadline_s: float) -> int:
        """Its exit code; what it still says is dropped.

        Raises:
            subprocess.TimeoutExpired: it does not end.
        """
        self._process.communicate(timeout=deadline_s)
        return self._process.returncode


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Descendants that lose their parent become children of this process, so that none goes unseen. Linux.

    Children that it has already are not looked at, nor what they start.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    known = set(psutil.Process().children())
    _bystanders.update(known)
    try:
        yield
    finally:
        _bystanders.difference_update(known)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def left_running(deadline_s: float) -> list[str]:
    """Command lines of all descendants of this process that have not ended ``deadline_s`` seconds from now."""
    ends_at_s = time.monotonic() + deadline_s
    while alive := _descendants():
        if time.monotonic() > ends_at_s:
            return [" ".join(_command_line(process)) for process in alive]
        # The end of a stranger cannot be awaited; the pause bounds the polling, nothing is ordered by it.
        time.sleep(_POLL_S)
    return []


def _descendants() -> list[psutil.Process]:
    alive = []
    ours = [child for child in psutil.Process().children() if child not in _bystanders]
    for process in [*ours, *(below for child in ours for below in _below(child))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
            elif process.ppid() == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
    return alive


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return [str(process.pid)]


if __name__ == "__main__":
    sys.exit(main())
