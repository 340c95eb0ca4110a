"""Calls of an untrusted function: inputs go into a sandbox, what comes out is data, judged outside.

Used by the agent's own tests and by graders. The process that runs the function never holds an expected
value and has no channel but its output, so it can only do what an honest function can: give an answer to
each input. Forged lines are answers too, and lines out of order end the reading.
"""

import json
from collections.abc import Sequence
from typing import Any

from steelyard.sandbox.base import Sandbox
from steelyard.sandbox.function_driver import PROGRAM, RAISED, RETURNED, UNLOADABLE, from_json, to_json
from steelyard.types import CallResult, CallStatus, SandboxCall, SandboxResult, SandboxStatus

_ENDINGS = {
    SandboxStatus.OK: "the process ended before the function returned",
    SandboxStatus.CRASHED: "the process crashed",
    SandboxStatus.OUTPUT_LIMIT: "too much output",
    SandboxStatus.MEMORY_LIMIT: "out of memory",
    SandboxStatus.KILLED: "the process was killed",
}


async def run_function_calls(
    sandbox: Sandbox, source: str, function_name: str, inputs: Sequence[Sequence[Any]], deadline_s: float
) -> tuple[CallResult, ...]:
    """Call ``function_name`` of ``source`` once per input, all in one run.

    Args:
        inputs: positional arguments of each call; made of None, bool, int, float, str, list, tuple, dict.
        deadline_s: wall time for all calls together.

    Returns:
        One result per input. After a call that timed out or ended the process the rest are ``not_run``.

    Raises:
        TypeError: an input holds another type.
        SandboxLost: the sandbox failed by no fault of the function.
    """
    job = {"source": source, "function": function_name, "inputs": [to_json(list(arguments)) for arguments in inputs]}
    stdin = json.dumps(job).encode()
    result = await sandbox.run(SandboxCall(program=PROGRAM, stdin=stdin, deadline_s=deadline_s))
    return read_results(result, len(inputs))


def read_results(result: SandboxResult, num_inputs: int) -> tuple[CallResult, ...]:
    """What the driver's output says, as far as it is well formed and in order; safe on hostile output."""
    results: list[CallResult] = []
    for line in result.stdout.split(b"\n")[:-1]:
        answer = _read_line(line, len(results))
        if answer is None or len(results) == num_inputs:
            break
        status, body = answer
        if status == UNLOADABLE:
            return (CallResult(status=CallStatus.RAISED, error=str(body)),) * num_inputs
        if status == RETURNED:
            results.append(CallResult(status=CallStatus.RETURNED, value=body))
        else:
            results.append(CallResult(status=CallStatus.RAISED, error=str(body)))
    if len(results) < num_inputs:
        results.append(_broken_off(result))
    rest = CallResult(status=CallStatus.NOT_RUN, error="an earlier call ended the run")
    return (*results, *(rest,) * (num_inputs - len(results)))


def _read_line(line: bytes, index: int) -> tuple[str, Any] | None:
    try:
        match json.loads(line):
            case [int(number), str(status), body] if number == index and status in (RETURNED, RAISED, UNLOADABLE):
                return status, from_json(body)
    except (ValueError, RecursionError):
        return None
    return None


def _broken_off(result: SandboxResult) -> CallResult:
    if result.status is SandboxStatus.TIMED_OUT:
        return CallResult(status=CallStatus.TIMED_OUT, error=f"no answer within {result.duration_s:.2g} s")
    error = _ENDINGS[result.status]
    if result.status is SandboxStatus.CRASHED:
        last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        error = f"{error}: {last[:200]}" if last else f"{error} (exit code {result.returncode})"
    return CallResult(status=CallStatus.CRASHED, error=error)
