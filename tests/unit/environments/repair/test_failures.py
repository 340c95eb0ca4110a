"""Why an attempt failed."""

import pytest

from steelyard.environments.base import ToolStatus
from steelyard.environments.repair.failures import FailureCause, all_calls_valid, failure_cause
from steelyard.environments.repair.generator import make_task
from steelyard.environments.repair.state import Action, RepairArtifact
from steelyard.types import EndReason

TASK = make_task("repair/train/5")
BUG = TASK.bug_number
OTHER = 2 if BUG != 2 else 3


def edited(*numbers: int, is_valid: bool = True) -> tuple[Action, ...]:
    edits = [Action(turn_index=0, tool="replace_line", outcome=ToolStatus.OK, is_valid=True, number=n) for n in numbers]
    bad = Action(turn_index=0, tool="replace", outcome=ToolStatus.ERROR, is_valid=False)
    return tuple(edits) if is_valid else (bad, *edits)


def source(changes: dict[int, str]) -> str:
    lines = [changes.get(number, line) for number, line in enumerate(TASK.lines, start=1)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("actions", "changes", "end_reason", "cause"),
    [
        (edited(is_valid=False), {}, EndReason.SUBMITTED, FailureCause.BAD_CALL),
        (edited(is_valid=False), {}, EndReason.MAX_TURNS, FailureCause.BAD_CALL),
        (edited(BUG), {BUG: " pass"}, EndReason.MAX_TURNS, FailureCause.NO_SUBMIT),
        (edited(BUG, is_valid=False), {BUG: " pass"}, EndReason.CONTEXT_FULL, FailureCause.NO_SUBMIT),
        (edited(), {}, EndReason.SUBMITTED, FailureCause.NO_EDIT),
        (edited(OTHER), {OTHER: " pass"}, EndReason.SUBMITTED, FailureCause.WRONG_LINE),
        (
            edited(BUG, OTHER),
            {BUG: TASK.right_lines[BUG - 1], OTHER: " pass"},
            EndReason.SUBMITTED,
            FailureCause.WRONG_LINE,
        ),
        (edited(BUG), {BUG: " pass"}, EndReason.SUBMITTED, FailureCause.WRONG_TEXT),
    ],
)
def test_a_failure_has_one_cause(
    actions: tuple[Action, ...], changes: dict[int, str], end_reason: EndReason, cause: FailureCause
) -> None:
    artifact = RepairArtifact(source=source(changes), submitted=end_reason is EndReason.SUBMITTED, actions=actions)
    assert failure_cause(TASK, artifact, end_reason) is cause


def test_a_line_written_down_as_it_was_counts_as_not_found() -> None:
    artifact = RepairArtifact(source=TASK.source, submitted=True, actions=edited(BUG))
    assert failure_cause(TASK, artifact, EndReason.SUBMITTED) is FailureCause.WRONG_LINE


def test_a_file_that_lost_its_lines_has_a_cause_too() -> None:
    artifact = RepairArtifact(source="", submitted=True, actions=edited(BUG))
    assert failure_cause(TASK, artifact, EndReason.SUBMITTED) is FailureCause.WRONG_TEXT


def test_calls_are_all_valid_only_if_each_one_is() -> None:
    assert all_calls_valid(RepairArtifact(source="", submitted=True, actions=edited(2)))
    assert not all_calls_valid(RepairArtifact(source="", submitted=True, actions=edited(2, is_valid=False)))
