"""Errors of Steelyard.

::

    SteelyardError
    |- InputError            the user gave something that cannot work       (exit code 2)
    |   |- ConfigError       a configuration field breaks its rule
    |   |- RunDirectoryError a run directory is missing, taken or not a run
    |   `- ProtocolMismatch  two sides of a call speak unlike versions
    |- RunError              a run failed; it can be resumed                (exit code 3)
    |   |- ProcessDied       a process of the run ended; carries the end of its log
    |   |- DeadlineExceeded  a wait ran out; names who was waited for
    |   |- SandboxLost       a sandbox is gone or cannot be started; says whether the program did it
    |   |- StorageFailed     a disk or store refused a write (full, read-only, gone)
    |   |   `- JournalFenced another writer has taken the journal over; this process must end
    |   `- RemoteFailed      the other side of a call answered with an error
    |- Refused               a fenced, late, double or unknown message; counted, never applied
    |- IllegalTransition     an event that the transition table does not have
    |- IntegrityError        stored data do not match their digest or their version
    `- EngineError           an inference engine broke its contract for one request

A failure of one rollout is data (:class:`steelyard.types.Outcome`), not an exception here.
"""


class SteelyardError(Exception):
    """Base of all errors that Steelyard raises on purpose."""


class InputError(SteelyardError):
    """The user gave something that cannot work; nothing was started."""


class ConfigError(InputError):
    """A configuration field breaks its rule. The message starts with the field's dotted name."""


class RunDirectoryError(InputError):
    """A run directory is missing, already in use, or not a run."""


class ProtocolMismatch(InputError):
    """Two sides of a call speak unlike versions of its protocol. The message names both."""


class RunError(SteelyardError):
    """The run cannot go on from here, but its directory can be resumed."""


class ProcessDied(RunError):
    """A process of the run ended.

    Args:
        name: which process.
        returncode: its exit status; negative for a signal.
        log_tail: the last lines that it logged.
    """

    def __init__(self, name: str, returncode: int | None, log_tail: str = "") -> None:
        self.name = name
        self.returncode = returncode
        self.log_tail = log_tail
        how = f"signal {-returncode}" if returncode is not None and returncode < 0 else f"exit code {returncode}"
        tail = f"; the end of its log:\n{log_tail}" if log_tail else ""
        super().__init__(f"process {name} ended with {how}{tail}")


class DeadlineExceeded(RunError):
    """A wait ran out.

    Args:
        what: what was waited for.
        culprits: who did not deliver.
        waited_s: for how long, in seconds.
    """

    def __init__(self, what: str, culprits: tuple[str, ...], waited_s: float) -> None:
        self.what = what
        self.culprits = culprits
        self.waited_s = waited_s
        who = ", ".join(culprits) or "nobody in particular"
        super().__init__(f"waited {waited_s:.1f} s for {what}; still missing: {who}")


class SandboxLost(RunError):
    """A sandbox is gone, refuses, or cannot be started.

    Args:
        message: what happened.
        is_by_program: the code inside brought it down or filled it; then it is the agent's doing, not the system's.
    """

    def __init__(self, message: str, is_by_program: bool = False) -> None:
        self.is_by_program = is_by_program
        super().__init__(message)


class StorageFailed(RunError):
    """A disk or store refused a write."""


class JournalFenced(StorageFailed):
    """Another writer has taken the journal over. This process must end, and can append nothing more."""


class RemoteFailed(RunError):
    """The other side of a call answered with an error."""


class Refused(SteelyardError):
    """A message that carries a dead attempt, comes twice, or names something unknown.

    Args:
        reason: ``late | double | unknown | expired | foreign | malformed``; the key under which it is counted.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"refused ({reason}): {detail}")


class IllegalTransition(SteelyardError):
    """An event that the transition table does not have for the present state."""


class IntegrityError(SteelyardError):
    """Stored data do not match their digest, or weights do not match their version."""


class EngineError(SteelyardError):
    """An inference engine broke its contract; names the engine and the request."""
