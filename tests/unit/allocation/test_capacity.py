"""Slots by Little's law and Erlang's formula, against tables, a simulation and common sense."""

import math
import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.allocation.capacity import CapacityQuestion, answer, wait_quantile_s, waiting_probability
from steelyard.errors import InputError
from steelyard.sim.kernel import Kernel


def ask(**changes: Any) -> CapacityQuestion:
    return CapacityQuestion(**{"rate_per_s": 20.0, "service_s": 5.0, **changes})


def test_twenty_requests_a_second_of_five_seconds_keep_a_hundred_slots_busy() -> None:
    found = answer(ask())
    assert found.busy_slots == 100.0
    assert found.slots_for_wait > 100
    assert found.wait_quantile_s <= 1.0 < wait_quantile_s(ask(), found.slots_for_wait - 1)


@pytest.mark.parametrize(
    ("num_slots", "busy", "expected"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (5, 4.0, 0.5541), (12, 10.0, 0.4494)]
)
def test_the_share_that_waits_is_that_of_erlangs_tables(num_slots: int, busy: float, expected: float) -> None:
    assert waiting_probability(num_slots, busy) == pytest.approx(expected, abs=1e-4)


def test_waits_are_those_of_a_simulated_queue() -> None:
    question = ask(rate_per_s=4.0, service_s=2.0, quantile=0.9)
    waits = simulate_waits(question, num_slots=10, num_requests=60_000, rng=random.Random(5))
    waits.sort()
    measured = waits[int(0.9 * len(waits))]
    assert measured == pytest.approx(wait_quantile_s(question, 10), rel=0.1)
    assert sum(wait > 0 for wait in waits) / len(waits) == pytest.approx(waiting_probability(10, 8.0), abs=0.03)


@given(
    st.floats(0.1, 200), st.floats(0.1, 50), st.floats(0, 4), st.floats(0, 10), st.floats(1, 5), st.floats(0, 100),
    st.integers(1, 16), st.integers(0, 3),
)  # fmt: skip
def test_every_demand_adds_slots_and_none_is_wasted(
    rate: float, time: float, cv: float, wait: float, burst: float, burst_s: float, per_host: int, failed: int
) -> None:
    question = ask(
        rate_per_s=rate, service_s=time, service_cv=cv, wait_s=wait, burst_factor=burst, burst_s=burst_s,
        slots_per_host=per_host, failed_hosts=failed,
    )  # fmt: skip
    found = answer(question)
    assert found.busy_slots < found.slots_for_wait <= found.slots_for_burst
    assert found.num_slots - failed * per_host >= found.slots_for_burst > found.num_slots - (failed + 1) * per_host
    assert wait_quantile_s(question, found.slots_for_wait) <= wait < wait_quantile_s(question, found.slots_for_wait - 1)


def test_a_long_burst_needs_the_slots_of_its_rate_and_a_short_one_hardly_any() -> None:
    assert answer(ask(burst_factor=2.0, burst_s=1e6)).slots_for_burst == 200
    short = answer(ask(burst_factor=2.0, burst_s=0.5))
    assert short.slots_for_burst == short.slots_for_wait


def test_heavier_tails_need_more_slots() -> None:
    assert answer(ask(service_cv=4.0)).slots_for_wait > answer(ask(service_cv=0.0)).slots_for_wait


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s must be finite and > 0, got 0"),
        ({"service_s": math.nan}, "service_s must be finite and > 0, got nan"),
        ({"wait_s": -1.0}, "wait_s must be finite and >= 0, got -1"),
        ({"quantile": 1.0}, "quantile must be between 0 and 1, got 1"),
        ({"slots_per_host": 0}, "slots_per_host must be >= 1, got 0"),
        ({"rate_per_s": 1e9}, "must be at most 1,000,000, the slots that are busy, got 5,000,000,000"),
    ],
)
def test_absurd_questions_are_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ask(**changes)


def simulate_waits(question: CapacityQuestion, num_slots: int, num_requests: int, rng: random.Random) -> list[float]:
    kernel, queue, waits = Kernel(), deque[float](), list[float]()
    free = num_slots

    def arrive() -> None:
        queue.append(kernel.now_s())
        if len(queue) + len(waits) < num_requests:
            kernel.after(rng.expovariate(question.rate_per_s), arrive)
        serve()

    def serve() -> None:
        nonlocal free
        while queue and free:
            free -= 1
            waits.append(kernel.now_s() - queue.popleft())
            kernel.after(rng.expovariate(1.0 / question.service_s), leave)

    def leave() -> None:
        nonlocal free
        free += 1
        serve()

    arrive()
    kernel.run()
    return waits
