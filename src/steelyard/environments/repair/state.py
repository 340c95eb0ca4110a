"""The rules of one attempt at ``repair``, without I/O.

The session (sandbox, asynchronous) and the demonstrator (in this process) both drive this one state, so
that demonstrations show exactly what the agent will see.
"""

import enum
from collections.abc import Sequence

import msgspec

from steelyard.digests import digest_bytes
from steelyard.environments.base import ToolOutcome, ToolStatus, shorten
from steelyard.environments.repair.catalogue import Case, passes
from steelyard.environments.repair.generator import show_call
from steelyard.types import CallResult, CallStatus, ToolCall, ToolSpec
from steelyard.types.record import Record

MAX_LINE_CHARS = 200
MAX_VALUE_CHARS = 60
MAX_OUTPUT_CHARS = 400


class ToolName(enum.StrEnum):
    """The agent's tools."""

    RUN_TESTS = "run_tests"
    REPLACE_LINE = "replace_line"
    SUBMIT = "submit"


TOOLS: tuple[ToolSpec, ...] = (
    ToolSpec(
        name=ToolName.RUN_TESTS,
        description="run the tests",
        parameters={"type": "object", "properties": {}},
    ),
    ToolSpec(
        name=ToolName.REPLACE_LINE,
        description="replace a line",
        parameters={
            "type": "object",
            "properties": {"number": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["number", "text"],
        },
    ),
    ToolSpec(
        name=ToolName.SUBMIT,
        description="finish",
        parameters={"type": "object", "properties": {}},
    ),
)


class PublicTask(Record, frozen=True):
    """What a session needs, and all that it gets: the source and the visible tests."""

    source: str
    visible: tuple[Case, ...]


class Action(Record, frozen=True):
    """One thing the agent did, as the trusted side saw it.

    ``tool`` is empty where a message called none. ``number`` is the line of an accepted edit.
    ``num_failing`` is the number of visible tests that failed.
    """

    turn_index: int
    tool: str
    outcome: ToolStatus
    is_valid: bool
    number: int | None = None
    num_failing: int | None = None


class RepairArtifact(Record, frozen=True):
    """What is graded: the last source and what was done, in order."""

    source: str
    submitted: bool
    actions: tuple[Action, ...]


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of tools that take none."""


class ReplaceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of ``replace_line``."""

    number: int
    text: str


_ARGUMENTS: dict[str, msgspec.json.Decoder[NoArguments] | msgspec.json.Decoder[ReplaceLine]] = {
    ToolName.RUN_TESTS: msgspec.json.Decoder(NoArguments),
    ToolName.REPLACE_LINE: msgspec.json.Decoder(ReplaceLine),
    ToolName.SUBMIT: msgspec.json.Decoder(NoArguments),
}


class RepairState:
    """What the agent has been shown and has done.

    Line digests: ``replace_line`` succeeds only if the line in the file still is what the agent last saw.
    What a tool returns counts as seen from the next turn on, so the second of two edits of one line in one
    message fails, and so does an edit of a line that running code changed behind the agent's back.
    """

    def __init__(self, public: PublicTask) -> None:
        self.public = public
        self._source = public.source
        self._shown = dict(enumerate(map(_digest, public.source.splitlines()), start=1))
        self._to_be_shown: dict[int, str] = {}
        self._actions: list[Action] = []
        self._turn_index = 0
        self._submitted = False

    def decode(self, call: ToolCall) -> NoArguments | ReplaceLine | ToolOutcome:
        """The arguments of a call, or what the agent is told about a wrong one (which is then recorded)."""
        if call.name not in _ARGUMENTS:
            return self._invalid(call.name, "error: unknown tool")
        try:
            arguments = _ARGUMENTS[call.name].decode(call.arguments)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return self._invalid(call.name, "error: bad arguments")
        if isinstance(arguments, ReplaceLine):
            return self._check_edit(arguments) or arguments
        return arguments

    def replace(self, source: str, edit: ReplaceLine) -> tuple[str | None, ToolOutcome]:
        """Apply an edit to ``source``, the file as it stands: the new file (None if refused) and the outcome."""
        self._source = source
        lines = source.splitlines()
        number = edit.number
        present = lines[number - 1] if number <= len(lines) else None
        if present is None or _digest(present) != self._shown.get(number):
            if present is not None:
                self._to_be_shown[number] = _digest(present)
            text, num_dropped = shorten(f"error: the line has changed\n{number} {present or ''}", MAX_OUTPUT_CHARS)
            return None, self._record(ToolName.REPLACE_LINE, text, ToolStatus.ERROR, num_dropped=num_dropped)
        indentation = present[: len(present) - len(present.lstrip())]
        lines[number - 1] = (indentation + edit.text.strip()).rstrip()
        self._source = "\n".join(lines) + "\n"
        self._to_be_shown[number] = _digest(lines[number - 1])
        outcome = self._record(ToolName.REPLACE_LINE, numbered(number, lines[number - 1]), number=number)
        return self._source, outcome

    def tested(self, source: str, results: Sequence[CallResult]) -> ToolOutcome:
        """Compare results with what was expected, here, outside the sandbox.

        Raises:
            ValueError: not one result for each visible test.
        """
        self._source = source
        cases = self.public.visible
        failing = [i for i, (result, case) in enumerate(zip(results, cases, strict=True)) if not passes(result, case)]
        if not failing:
            return self._record(ToolName.RUN_TESTS, f"{len(cases)} of {len(cases)} pass", num_failing=0)
        first = failing[0]
        shown = f"{len(failing)} of {len(cases)} fail: {_explain(results[first], cases[first])}"
        text, num_dropped = shorten(shown, MAX_OUTPUT_CHARS)
        timed_out = any(result.status is CallStatus.TIMED_OUT for result in results)
        status = ToolStatus.TIMEOUT if timed_out else ToolStatus.OK
        return self._record(ToolName.RUN_TESTS, text, status, num_failing=len(failing), num_dropped=num_dropped)

    def submit(self, source: str) -> ToolOutcome:
        """The agent is done."""
        self._source = source
        self._submitted = True
        return self._record(ToolName.SUBMIT, "ok", done=True)

    def unreadable(self, tool: str) -> ToolOutcome:
        """The file is gone, is no text or is too long: running code did that, so it is the agent's own doing."""
        return self._record(tool, "error: the file cannot be read", ToolStatus.ERROR)

    def no_call(self) -> ToolOutcome:
        """A message without a tool call."""
        return self._invalid("", "error: no tool call")

    def turn_ended(self) -> None:
        """The agent now sees what the tools returned."""
        self._shown.update(self._to_be_shown)
        self._to_be_shown.clear()
        self._turn_index += 1

    def artifact(self) -> RepairArtifact:
        return RepairArtifact(source=self._source, submitted=self._submitted, actions=tuple(self._actions))

    def _check_edit(self, edit: ReplaceLine) -> ToolOutcome | None:
        if edit.number not in self._shown:
            return self._invalid(ToolName.REPLACE_LINE, "error: no such line")
        if len(edit.text.strip().splitlines()) > 1 or len(edit.text) > MAX_LINE_CHARS:
            return self._invalid(ToolName.REPLACE_LINE, "error: the text must be one short line")
        return None

    def _invalid(self, tool: str, text: str) -> ToolOutcome:
        self._actions.append(
            Action(turn_index=self._turn_index, tool=tool[:32], outcome=ToolStatus.ERROR, is_valid=False)
        )
        return ToolOutcome(text=text, outcome=ToolStatus.ERROR, is_valid=False)

    def _record(
        self,
        tool: str,
        text: str,
        outcome: ToolStatus = ToolStatus.OK,
        *,
        done: bool = False,
        number: int | None = None,
        num_failing: int | None = None,
        num_dropped: int = 0,
    ) -> ToolOutcome:
        self._actions.append(
            Action(
                turn_index=self._turn_index,
                tool=tool,
                outcome=outcome,
                is_valid=True,
                number=number,
                num_failing=num_failing,
            )
        )
        return ToolOutcome(text=text, outcome=outcome, done=done, num_dropped=num_dropped)


def numbered(number: int, line: str) -> str:
    """A line as it is shown to the agent."""
    return f"{number} {line}"


def _digest(line: str) -> str:
    return digest_bytes(line.encode("utf-8", "surrogatepass"))


def _explain(result: CallResult, case: Case) -> str:
    call = show_call(case.arguments)
    if result.status is CallStatus.RETURNED:
        happened = f"{call} = {_show_value(result.value)}"
    elif result.status is CallStatus.RAISED:
        happened = f"{call} raised {shorten(result.error.partition(':')[0], MAX_VALUE_CHARS)[0]}"
    else:
        happened = f"{call} {result.status.replace('_', ' ')}"
    return f"{happened}, want {case.expected!r}"


def _show_value(value: object) -> str:
    try:
        return shorten(repr(value), MAX_VALUE_CHARS)[0]
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a huge number"
