"""Programs that run in a sandbox, and what came out."""

import enum
from typing import Any

from steelyard.types.record import Record


class SandboxStatus(enum.StrEnum):
    """How one run inside a sandbox ended. All but ``ok`` were caused by the code that ran."""

    OK = "ok"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    OUTPUT_LIMIT = "output_limit"
    MEMORY_LIMIT = "memory_limit"
    KILLED = "killed"


class SandboxCall(Record, frozen=True, kw_only=True):
    """Run ``program`` (Python source, UTF-8) once, as ``__main__``, for at most ``deadline_s`` of wall time."""

    program: bytes
    stdin: bytes = b""
    deadline_s: float = 2.0


class SandboxResult(Record, frozen=True, kw_only=True):
    """What one run left. ``returncode`` is negative for a signal, None where nobody could see it.

    ``stdout`` and ``stderr`` together hold at most ``sandbox.max_output_bytes``. They are data from
    untrusted code: whatever they claim, only ``status`` and ``returncode`` come from our side.
    """

    status: SandboxStatus
    stdout: bytes
    stderr: bytes
    returncode: int | None
    duration_s: float


class CallStatus(enum.StrEnum):
    """How one call of an untrusted function ended."""

    RETURNED = "returned"
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    NOT_RUN = "not_run"


class CallResult(Record, frozen=True, kw_only=True):
    """One call of an untrusted function: ``value`` is what it returned, ``error`` the last line of what it raised.

    ``value`` is built of None, bool, int, float, str, list, tuple and dict only; it is data, never code.
    ``not_run`` follows a call that timed out or crashed and took the rest of the run with it.
    """

    status: CallStatus
    value: Any = None
    error: str = ""
