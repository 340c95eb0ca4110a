"""What an environment is: tasks, sessions with tools, and a grader.

::

    harness --task(id)--> Environment --session(task)--> Session --call--> sandbox
    scorer  --grader()--> Grader.grade(task_id, artifact, sandbox) -> Verdict

The session is trusted and lives with the harness: it keeps the attempt's state, runs tools in the sandbox
and produces the artifact. The grader lives with the scorer; what is private (hidden tests) exists only there,
made again from the task id. Sandboxes and the way to run an agent's function in one are handed in.
"""

import difflib
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from steelyard.errors import ConfigError
from steelyard.types import CallResult, EndReason, Message, Task, ToolCall, Verdict
from steelyard.types.record import Record

# --- what is needed from the sandbox --------------------------------------------------------------


class Sandbox(Protocol):
    """A place of one attempt. Paths are relative to the attempt's directory."""

    async def write_file(self, path: str, data: bytes) -> None: ...

    async def read_file(self, path: str) -> bytes: ...


class FunctionRunner(Protocol):
    """Runs an agent's function in a sandbox, which gets inputs only; one result for each input.

    A source that does not load gives ``raised`` for every input. Failures of the system raise.
    """

    async def __call__(
        self,
        sandbox: Any,
        source: str,
        function_name: str,
        inputs: Sequence[Sequence[Any]],
        deadline_s: float,
    ) -> Sequence[CallResult]: ...


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What the composition root hands to an environment."""

    run_function: FunctionRunner
    call_deadline_s: float = 2.0


# --- what an environment offers -------------------------------------------------------------------


class ToolStatus(enum.StrEnum):
    """How a tool call ended, as the agent sees it."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


class ToolOutcome(Record, frozen=True):
    """What the agent is told, and what the harness records.

    ``is_valid`` is False where the call itself was wrong (unknown tool, bad arguments, no call at all).
    ``done`` ends the attempt as ``submitted``. ``num_dropped`` counts characters that were cut from ``text``.
    """

    text: str
    outcome: ToolStatus = ToolStatus.OK
    is_valid: bool = True
    done: bool = False
    num_dropped: int = 0


class Session(Protocol):
    """The trusted side of one attempt."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """What the sandbox holds at the start; nothing private."""
        ...

    async def call(self, sandbox: Any, call: ToolCall) -> ToolOutcome:
        """Run one tool. An agent's mistake is an outcome; failures of the system raise."""
        ...

    def no_call(self, message: Message) -> ToolOutcome:
        """The agent called no tool: what it is told, or the end where that is its answer."""
        ...

    def turn_ended(self) -> None:
        """All results of one message have been shown to the agent."""
        ...

    async def submit(self, sandbox: Any, answer: str) -> None:
        """A program of the agent's own (``harness.kind: command``) is done: take over what it leaves.

        Args:
            sandbox: where its files are.
            answer: what it printed, or wrote as its answer.
        """
        ...

    def artifact(self) -> bytes:
        """What is graded: msgpack bytes."""
        ...


class Grader(Protocol):
    """Judges a sealed artifact in a fresh sandbox."""

    @property
    def verifier_version(self) -> str: ...

    @property
    def deterministic(self) -> bool: ...

    async def grade(self, task_id: str, artifact: bytes, sandbox: Any) -> Verdict:
        """Judge; raises for any fault that is not the agent's."""
        ...


class Environment(Protocol):
    """A family of tasks."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def task_id(self, split: str, index: int) -> str:
        """The name of a task; raises ``InputError`` for an unknown split or an index out of range."""
        ...

    def task(self, task_id: str) -> Task:
        """The task of that name, the same in every process; raises ``InputError`` for an unknown one."""
        ...

    def num_tasks(self, split: str) -> int | None:
        """How many tasks a split has; None where it is endless."""
        ...

    def session(self, task: Task) -> Session: ...

    def grader(self) -> Grader: ...

    def failure_cause(self, task_id: str, artifact: bytes, end_reason: EndReason) -> str:
        """Why an unsuccessful attempt failed, in one word for a report."""
        ...


# --- shared rules ---------------------------------------------------------------------------------

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


def parse_options(options: Mapping[str, Any], into: type[OptionsT]) -> OptionsT:
    """Check ``environment.options`` against a frozen struct of options.

    Raises:
        ConfigError: an unknown option (names the nearest), or a value that breaks its type or bounds.
    """
    known = [field.encode_name for field in msgspec.structs.fields(into)]
    for key in options:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            hint = f"; did you mean {nearest[0]}?" if nearest else "; this environment has no options"
            raise ConfigError(f"environment.options.{key}: no such option{hint}")
    try:
        return msgspec.convert(dict(options), into)
    except msgspec.ValidationError as error:
        raise ConfigError(f"environment.options: {error}") from error


def shorten(text: str, max_chars: int) -> tuple[str, int]:
    """The one rule for long tool output: head, marker with the number of characters dropped, tail.

    Args:
        max_chars: how many characters of ``text`` to keep at most; the marker comes on top.

    Returns:
        The text to show, and how many characters it lacks.
    """
    num_dropped = len(text) - max_chars
    if num_dropped <= 0:
        return text, 0
    head = (max_chars + 1) // 2
    tail = max_chars - head
    end = text[len(text) - tail :]
    return f"{text[:head]}[... {num_dropped} characters dropped ...]{end}", num_dropped
