"""Why an attempt at ``repair`` failed: a pure function of what was done, how it ended and what was true."""

import enum

from steelyard.environments.repair.generator import RepairTask
from steelyard.environments.repair.grading import is_edit
from steelyard.environments.repair.state import RepairArtifact
from steelyard.types import EndReason


class FailureCause(enum.StrEnum):
    """What went wrong, in the order in which it is asked.

    ``bad_call``: no line was ever changed, and some call was invalid. ``no_submit``: turns or context ran
    out. ``no_edit``: submitted as it was. ``wrong_line``: the faulty line is untouched, or mended while
    another was broken. ``wrong_text``: the faulty line was found but not mended.
    """

    BAD_CALL = "bad_call"
    NO_SUBMIT = "no_submit"
    NO_EDIT = "no_edit"
    WRONG_LINE = "wrong_line"
    WRONG_TEXT = "wrong_text"


def failure_cause(task: RepairTask, artifact: RepairArtifact, end_reason: EndReason) -> FailureCause:
    """The cause of a failure; the caller knows that the attempt did not succeed.

    Args:
        end_reason: that of the trace, as the harness saw it.
    """
    edited = {action.number for action in artifact.actions if is_edit(action.tool, action.number)}
    if not edited and not all_calls_valid(artifact):
        return FailureCause.BAD_CALL
    if end_reason is not EndReason.SUBMITTED:
        return FailureCause.NO_SUBMIT
    if not edited:
        return FailureCause.NO_EDIT
    lines = artifact.source.splitlines()
    present = lines[task.bug_number - 1] if len(lines) >= task.bug_number else ""
    untouched = present == task.lines[task.bug_number - 1]
    mended = present == task.right_lines[task.bug_number - 1]
    return FailureCause.WRONG_LINE if untouched or mended else FailureCause.WRONG_TEXT


def all_calls_valid(artifact: RepairArtifact) -> bool:
    """Whether every message made a well-formed call of a known tool."""
    return all(action.is_valid for action in artifact.actions)
