"""Virtual time: order, ties, cancellation, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InputError
from steelyard.sim.kernel import Kernel


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 1)), max_size=30))
def test_actions_happen_by_time_then_priority_then_order_of_planning(plans: list[tuple[int, int]]) -> None:
    kernel, done = Kernel(), list[int]()
    for number, (at_s, priority) in enumerate(plans):
        kernel.at(at_s, lambda number=number: done.append(number), priority)  # type: ignore[misc]
    kernel.run()
    assert done == sorted(range(len(plans)), key=lambda n: (plans[n][0], plans[n][1], n))
    assert kernel.num_events == len(plans)


def test_an_action_may_plan_another_at_the_same_instant() -> None:
    kernel, done = Kernel(), list[str]()

    def first() -> None:
        done.append("first")
        kernel.after(0.0, lambda: done.append("second"))

    kernel.at(1.0, first)
    kernel.at(1.0, lambda: done.append("beside"))
    kernel.run()
    assert done == ["first", "beside", "second"]
    assert kernel.now_s() == 1.0


def test_a_cancelled_action_never_happens() -> None:
    kernel, done = Kernel(), list[str]()
    timer = kernel.at(2.0, lambda: done.append("no"))
    kernel.at(1.0, timer.cancel)
    kernel.run()
    assert done == []
    assert not timer.is_pending
    assert kernel.num_events == 1


def test_a_run_up_to_a_time_leaves_what_comes_later_and_moves_the_clock() -> None:
    kernel, done = Kernel(), list[float]()
    for at_s in (1.0, 2.0, 3.0):
        kernel.at(at_s, lambda: done.append(kernel.now_s()))
    kernel.run(until_s=2.5)
    assert (done, kernel.now_s(), kernel.num_planned) == ([1.0, 2.0], 2.5, 1)


@pytest.mark.parametrize("at_s", [0.5, math.nan, -math.inf])
def test_the_past_cannot_be_planned(at_s: float) -> None:
    kernel = Kernel(start_s=1.0)
    with pytest.raises(InputError, match=r"must be planned for 1\.0 s or later"):
        kernel.at(at_s, lambda: None)


def test_what_fails_in_an_action_ends_the_run_with_its_error() -> None:
    kernel, nothing = Kernel(), list[int]()

    def fail() -> None:
        nothing.pop()

    kernel.at(0.0, fail)
    with pytest.raises(IndexError):
        kernel.run()
