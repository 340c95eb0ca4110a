"""The grader."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from steelyard.environments.base import Services, ToolStatus
from steelyard.environments.repair.generator import make_task
from steelyard.environments.repair.grading import RepairGrader, RepairOptions, value_of_success
from steelyard.environments.repair.state import Action, RepairArtifact
from steelyard.testing.repair import run_in_process
from steelyard.types import CallResult, CallStatus, EndReason, Verdict

TASK = make_task("repair/train/5")
RIGHT = "\n".join(TASK.right_lines) + "\n"


def action(tool: str, number: int | None = None, is_valid: bool = True) -> Action:
    outcome = ToolStatus.OK if is_valid else ToolStatus.ERROR
    return Action(turn_index=0, tool=tool, outcome=outcome, is_valid=is_valid, number=number)


def grade(
    source: str, submitted: bool = True, actions: tuple[Action, ...] = (), runner: Any = run_in_process
) -> Verdict:
    artifact = msgspec.msgpack.encode(RepairArtifact(source=source, submitted=submitted, actions=actions))
    grader = RepairGrader(Services(run_function=runner), RepairOptions())
    return asyncio.run(grader.grade(TASK.task_id, artifact, None))


class Ending:
    """A runner whose every call ends in one way."""

    def __init__(self, status: CallStatus) -> None:
        self.status = status

    async def __call__(
        self, sandbox: Any, source: str, function_name: str, inputs: Sequence[Sequence[Any]], deadline_s: float
    ) -> list[CallResult]:
        return [CallResult(status=self.status) for _ in inputs]


def test_the_right_function_succeeds() -> None:
    verdict = grade(RIGHT, actions=(action("replace_line", TASK.bug_number),))
    assert verdict.success
    assert verdict.value == 1.0


def test_the_bug_fails() -> None:
    verdict = grade(TASK.source)
    assert (verdict.success, verdict.value, verdict.end_reason) == (False, 0.0, None)


def test_what_was_not_submitted_fails_and_is_not_even_run() -> None:
    verdict = grade(RIGHT, submitted=False, runner=None)
    assert (verdict.success, verdict.value, verdict.detail) == (False, 0.0, "not submitted")


@pytest.mark.parametrize(
    ("status", "end_reason"),
    [(CallStatus.TIMED_OUT, EndReason.ANSWER_TIMED_OUT), (CallStatus.CRASHED, EndReason.ANSWER_CRASHED)],
)
def test_an_answer_that_hangs_or_crashes_is_scored_as_wrong(status: CallStatus, end_reason: EndReason) -> None:
    verdict = grade(RIGHT, runner=Ending(status))
    assert (verdict.success, verdict.value, verdict.end_reason) == (False, 0.0, end_reason)


def test_an_answer_that_is_no_python_is_wrong_and_nothing_else() -> None:
    assert grade("def f(:\n").end_reason is None


def test_a_first_edit_that_is_right_is_worth_clearly_more_than_a_later_one() -> None:
    edits = [
        RepairArtifact(source="", submitted=True, actions=(action("replace_line", 2),) * count)
        for count in (1, 2, 3, 9)
    ]
    assert [value_of_success(artifact, RepairOptions()) for artifact in edits] == [1.0, 0.75, 0.5, 0.3]


def test_an_invalid_call_costs_a_little() -> None:
    actions = (action("", is_valid=False), action("replace_line", 2), action("submit"))
    assert value_of_success(RepairArtifact(source="", submitted=True, actions=actions), RepairOptions()) == 0.9


def test_what_is_no_artifact_is_a_fault_of_ours() -> None:
    grader = RepairGrader(Services(run_function=run_in_process), RepairOptions())
    with pytest.raises(msgspec.DecodeError):
        asyncio.run(grader.grade(TASK.task_id, b"\x00", None))


def test_the_verifier_version_tells_options_apart() -> None:
    services = Services(run_function=run_in_process)
    versions = {RepairGrader(services, RepairOptions(edit_discount=d)).verifier_version for d in (0.1, 0.2)}
    assert len(versions) == 2
