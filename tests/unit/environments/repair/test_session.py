"""The session: the file in the sandbox is what is edited, tested and handed in."""

import asyncio
from collections.abc import Sequence
from typing import Any

from steelyard.environments.base import Services, ToolOutcome, ToolStatus
from steelyard.environments.repair.catalogue import Case
from steelyard.environments.repair.grading import decode_artifact
from steelyard.environments.repair.session import MAX_SOURCE_BYTES, SOURCE_FILE, RepairSession
from steelyard.environments.repair.state import PublicTask
from steelyard.testing.harness import MemorySandbox
from steelyard.testing.repair import run_in_process
from steelyard.types import CallResult, Message, ToolCall

SOURCE = "def f(a):\n b = a - 1\n return b\n"
PUBLIC = PublicTask(source=SOURCE, visible=(Case((1,), 2), Case((2,), 3)))


class Seen:
    """A runner that notes what it was given."""

    def __init__(self) -> None:
        self.inputs: list[Sequence[Any]] = []
        self.sources: list[str] = []

    async def __call__(
        self, sandbox: Any, source: str, function_name: str, inputs: Sequence[Sequence[Any]], deadline_s: float
    ) -> tuple[CallResult, ...]:
        self.inputs.extend(inputs)
        self.sources.append(source)
        return await run_in_process(sandbox, source, function_name, inputs, deadline_s)


def play(sandbox: MemorySandbox, session: RepairSession, *calls: tuple[str, str]) -> list[ToolOutcome]:
    async def run() -> list[ToolOutcome]:
        outcomes = []
        for name, arguments in calls:
            outcomes.append(await session.call(sandbox, ToolCall(id="call", name=name, arguments=arguments)))
            session.turn_ended()
        return outcomes

    return asyncio.run(run())


def start(run_function: Seen) -> tuple[MemorySandbox, RepairSession]:
    sandbox, session = MemorySandbox("att_0"), RepairSession(PUBLIC, Services(run_function=run_function))
    sandbox.files.update(session.files)
    return sandbox, session


def test_an_attempt_tests_mends_tests_and_submits() -> None:
    sandbox, session = start(Seen())
    outcomes = play(
        sandbox,
        session,
        ("run_tests", "{}"),
        ("replace_line", '{"number": 2, "text": "b = a + 1"}'),
        ("run_tests", "{}"),
        ("submit", "{}"),
    )
    assert [outcome.text for outcome in outcomes] == [
        "2 of 2 fail: f(1) = 0, want 2",
        "2  b = a + 1",
        "2 of 2 pass",
        "ok",
    ]
    assert [outcome.done for outcome in outcomes] == [False, False, False, True]
    artifact = decode_artifact(session.artifact())
    assert artifact.submitted
    assert artifact.source.encode() == sandbox.files[SOURCE_FILE]
    assert [action.tool for action in artifact.actions] == ["run_tests", "replace_line", "run_tests", "submit"]
    assert [action.num_failing for action in artifact.actions] == [2, None, 0, None]


def test_only_inputs_go_to_the_runner() -> None:
    seen = Seen()
    sandbox, session = start(seen)
    play(sandbox, session, ("run_tests", "{}"))
    assert seen.inputs == [(1,), (2,)]
    assert seen.sources == [SOURCE]


def test_the_sandbox_holds_the_source_and_nothing_else() -> None:
    sandbox, _ = start(Seen())
    assert sandbox.files == {SOURCE_FILE: SOURCE.encode()}


def test_a_wrong_call_does_not_touch_the_sandbox() -> None:
    sandbox, session = start(Seen())
    sandbox.files.clear()
    (outcome,) = play(sandbox, session, ("replace_line", '{"number": 9, "text": "x"}'))
    assert outcome.text == "error: no such line"
    assert not sandbox.files


def test_a_file_that_is_gone_broken_or_too_long_is_the_agents_own_doing() -> None:
    for data in (None, b"\xff\xfe", b"x" * (MAX_SOURCE_BYTES + 1)):
        sandbox, session = start(Seen())
        sandbox.files.clear()
        if data is not None:
            sandbox.files[SOURCE_FILE] = data
        (outcome,) = play(sandbox, session, ("run_tests", "{}"))
        assert outcome.outcome is ToolStatus.ERROR
        assert outcome.text == "error: the file cannot be read"


def test_a_file_that_running_code_changed_is_refused_by_its_digest() -> None:
    sandbox, session = start(Seen())
    sandbox.files[SOURCE_FILE] = SOURCE.replace("- 1", "- 7").encode()
    (outcome,) = play(sandbox, session, ("replace_line", '{"number": 2, "text": "b = a + 1"}'))
    assert outcome.outcome is ToolStatus.ERROR
    assert b"- 7" in sandbox.files[SOURCE_FILE]


def test_a_message_without_a_call_is_answered_and_the_attempt_goes_on() -> None:
    _, session = start(Seen())
    outcome = session.no_call(Message(role="assistant", content="I think it is line 2."))
    assert outcome.text == "error: no tool call"
    assert not outcome.done
    assert not outcome.is_valid
