"""Starts vLLM's server and sees to it that nothing of it outlives its owner.

``python steelyard_vllm_server.py OWNER_PID ARGUMENTS...``, in vLLM's environment, as the leader of its own session.
vLLM's engine and workers live on when its server is killed. So this process is told by the kernel when its owner dies,
waits for the server, and ends the whole session when either is gone.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from typing import NoReturn

import psutil

_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0


class _Told(Exception):
    """A SIGTERM has come."""


def main() -> None:
    """Serve until the server ends, a SIGTERM comes, or the owner is gone."""
    owner_pid, arguments = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, _tell)
    _tell_when_parent_dies()
    try:
        if os.getppid() != owner_pid:
            raise _Told
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        server = subprocess.Popen(command)
        status = _wait(server)
    except _Told:
        status = 0
    _end_session()
    sys.exit(status if status >= 0 else 128 - status)


def _wait(server: "subprocess.Popen[bytes]") -> int:
    try:
        return server.wait()
    except _Told:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_S)
        return 0


def _tell(_number: int, _frame: object) -> NoReturn:
    raise _Told


def _tell_when_parent_dies() -> None:
    """SIGTERM to this process when its parent ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_session() -> None:
    """Whatever the server left of its session ends."""
    ours = os.getsid(0)
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid != os.getpid() and os.getsid(pid) == ours:
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
