"""The grader of ``repair``: hidden tests, in a fresh sandbox, compared out here."""

from typing import Annotated, Any

import msgspec

from steelyard.environments.base import Services
from steelyard.environments.repair.catalogue import FAMILY_VERSION, passes
from steelyard.environments.repair.generator import RepairTask, make_task
from steelyard.environments.repair.state import RepairArtifact, ToolName
from steelyard.environments.repair.template import FUNCTION_NAME
from steelyard.types import CallResult, CallStatus, EndReason, Verdict

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]

_decoder = msgspec.msgpack.Decoder(RepairArtifact)


class RepairOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``environment.options`` of ``repair``: what a success is worth.

    Attributes:
        edit_discount: taken off for each accepted edit after the first.
        invalid_discount: taken off for each invalid call.
        least_value: what a success is worth at least; a failure is always worth 0.
    """

    edit_discount: Share = 0.25
    invalid_discount: Share = 0.1
    least_value: Share = 0.3


def decode_artifact(artifact: bytes) -> RepairArtifact:
    """Raises ``msgspec.DecodeError`` where the bytes are no artifact of ``repair``."""
    return _decoder.decode(artifact)


def is_edit(tool: str, number: int | None) -> bool:
    """Whether an action changed a line."""
    return tool == ToolName.REPLACE_LINE and number is not None


def value_of_success(artifact: RepairArtifact, options: RepairOptions) -> float:
    """Success dominates; a first edit that is right is worth clearly more than one that had to be mended."""
    num_edits = sum(is_edit(action.tool, action.number) for action in artifact.actions)
    num_invalid = sum(not action.is_valid for action in artifact.actions)
    value = 1.0 - options.edit_discount * max(0, num_edits - 1) - options.invalid_discount * num_invalid
    return max(options.least_value, value)


class RepairGrader:
    """Runs the submitted source on the hidden inputs.

    Args:
        services: how to run the agent's function.
        options: what a success is worth.
    """

    deterministic = True

    def __init__(self, services: Services, options: RepairOptions) -> None:
        self._services = services
        self._options = options

    @property
    def verifier_version(self) -> str:
        options = self._options
        return f"repair-{FAMILY_VERSION}/{options.edit_discount}/{options.invalid_discount}/{options.least_value}"

    async def grade(self, task_id: str, artifact: bytes, sandbox: Any) -> Verdict:
        """Judge one artifact.

        Raises:
            msgspec.DecodeError: the bytes are no artifact.
            InputError: no such task.
        """
        decoded = decode_artifact(artifact)
        if not decoded.submitted:
            return Verdict(value=0.0, success=False, detail="not submitted")
        task = make_task(task_id)
        results = await self._services.run_function(
            sandbox,
            decoded.source,
            FUNCTION_NAME,
            [case.arguments for case in task.hidden],
            self._services.call_deadline_s,
        )
        return self._judge(task, decoded, tuple(results))

    def _judge(self, task: RepairTask, artifact: RepairArtifact, results: tuple[CallResult, ...]) -> Verdict:
        num_passed = sum(passes(result, case) for result, case in zip(results, task.hidden, strict=True))
        detail = f"{num_passed} of {len(task.hidden)} hidden tests pass"
        if num_passed == len(task.hidden):
            return Verdict(value=value_of_success(artifact, self._options), success=True, detail=detail)
        statuses = {result.status for result in results}
        end_reason = None
        if CallStatus.TIMED_OUT in statuses:
            end_reason = EndReason.ANSWER_TIMED_OUT
        elif CallStatus.CRASHED in statuses:
            end_reason = EndReason.ANSWER_CRASHED
        return Verdict(value=0.0, success=False, end_reason=end_reason, detail=detail)
