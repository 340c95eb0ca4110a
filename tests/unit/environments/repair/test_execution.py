"""Running our own functions here."""

import pytest

from steelyard.environments.repair.execution import KnownFunction, run_known
from steelyard.types import CallResult, CallStatus


def test_a_function_returns_its_value() -> None:
    assert run_known(("def f(a):", " return a + 1"), [[1], [2]]) == (
        CallResult(status=CallStatus.RETURNED, value=2),
        CallResult(status=CallStatus.RETURNED, value=3),
    )


@pytest.mark.parametrize("loop", [" while True:", " for x in xs:"])
def test_a_loop_without_end_is_stopped(loop: str) -> None:
    lines = ("def f(xs):", loop, "  xs.append(1)", " return xs")
    assert run_known(lines, [[[1]]])[0].status is CallStatus.TIMED_OUT


def test_each_call_has_its_own_allowance_of_rounds() -> None:
    function = KnownFunction(("def f(n):", " for i in range(n):", "  n = n", " return n"))
    statuses = [function.call([n]).status for n in (401, 399, 399)]
    assert statuses == [CallStatus.TIMED_OUT, CallStatus.RETURNED, CallStatus.RETURNED]


def test_what_a_function_raises_is_named() -> None:
    assert run_known(("def f(xs):", " return xs[3]"), [[[]]]) == (
        CallResult(status=CallStatus.RAISED, error="IndexError"),
    )


def test_a_function_cannot_change_the_inputs() -> None:
    inputs = [[[1, 2]]]
    run_known(("def f(xs):", " xs.append(3)", " return xs"), inputs)
    assert inputs == [[[1, 2]]]
