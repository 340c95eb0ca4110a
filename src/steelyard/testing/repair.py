"""Helpers around ``repair`` for tests: a policy that knows the answer, and a runner without a sandbox."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from steelyard.environments.repair.execution import KnownFunction
from steelyard.environments.repair.generator import RepairTask, make_task
from steelyard.environments.repair.state import ToolName
from steelyard.testing.harness import calls
from steelyard.types import CallResult, CallStatus, ChatRequest, Message


async def run_in_process(
    sandbox: object, source: str, function_name: str, inputs: Sequence[Sequence[Any]], deadline_s: float
) -> tuple[CallResult, ...]:
    """Runs ``f`` here, with no protection but a bound on loops. Only for text that a test wrote itself."""
    try:
        function = KnownFunction(source.splitlines())
    except (SyntaxError, KeyError) as error:
        return tuple(CallResult(status=CallStatus.RAISED, error=type(error).__name__) for _ in inputs)
    return tuple(function.call(arguments) for arguments in inputs)


class Oracle:
    """A policy that runs the tests, mends the faulty line and submits.

    Args:
        task_of: the task id of an attempt.
        num_wrong_edits: how many useless edits it makes first.
    """

    def __init__(self, task_of: Callable[[str], str], num_wrong_edits: int = 0) -> None:
        self._task_of = task_of
        self._num_wrong_edits = num_wrong_edits

    def __call__(self, attempt_id: str, request: ChatRequest) -> Message:
        task = make_task(self._task_of(attempt_id))
        turn_index = sum(message.role == "assistant" for message in request.messages)
        if turn_index == 0:
            return calls((ToolName.RUN_TESTS, "{}"))
        if turn_index <= self._num_wrong_edits:
            return edit(task, task.lines[task.bug_number - 1])
        if turn_index == self._num_wrong_edits + 1:
            return edit(task, task.right_lines[task.bug_number - 1])
        return calls((ToolName.SUBMIT, "{}"))


def edit(task: RepairTask, text: str) -> Message:
    """A message that replaces the faulty line of ``task``."""
    return calls((ToolName.REPLACE_LINE, json.dumps({"number": task.bug_number, "text": text})))
