"""Order between flows and within one."""

from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.fair_queue import FairQueue, Waiting

T = TypeVar("T")


def first(queue: FairQueue[T]) -> Waiting[T]:
    """What is to be served next, of all that waits for nothing in particular."""
    entry = queue.first([None])
    assert entry is not None
    return entry


def serve(queue: FairQueue[str], number: int) -> list[str]:
    """Take so many entries, one at a time, in the order of service."""
    served = []
    for _ in range(number):
        entry = first(queue)
        queue.take(entry)
        served.append(entry.item)
    return served


def test_two_flows_that_always_wait_get_tokens_in_proportion_to_their_weights() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.set_weight("heavy", 3.0)
    for index in range(400):
        queue.push("heavy", f"h{index}", 100, has_begun=False)
        queue.push("light", f"l{index}", 100, has_begun=False)
    served = serve(queue, 200)
    assert sum(name.startswith("h") for name in served) == pytest.approx(150, abs=2)


def test_a_flow_of_large_requests_gets_no_more_tokens_than_one_of_small_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(400):
        queue.push("large", f"l{index}", 1000, has_begun=False)
        queue.push("small", f"s{index}", 100, has_begun=False)
    served = serve(queue, 110)
    assert sum(name.startswith("l") for name in served) == pytest.approx(10, abs=1)


def test_a_flow_that_was_away_gets_no_arrears() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(100):
        queue.push("busy", f"b{index}", 100, has_begun=False)
    serve(queue, 50)
    for index in range(100):
        queue.push("late", f"l{index}", 100, has_begun=False)
    served = serve(queue, 40)
    assert sum(name.startswith("l") for name in served) == pytest.approx(20, abs=1)


def test_conversations_that_were_begun_go_first_and_each_kind_in_order_of_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("", "new1", 10, has_begun=False)
    queue.push("", "old1", 10, has_begun=True)
    queue.push("", "new2", 10, has_begun=False)
    queue.push("", "old2", 10, has_begun=True)
    assert serve(queue, 4) == ["old1", "old2", "new1", "new2"]


def test_a_request_that_is_tried_again_takes_its_old_place() -> None:
    queue: FairQueue[str] = FairQueue()
    first = queue.push("", "first", 10, has_begun=False)
    queue.push("", "second", 10, has_begun=False)
    queue.take(first)
    queue.push("", "first again", 10, has_begun=False, number=first.number)
    assert serve(queue, 2) == ["first again", "second"]


def test_what_a_request_cost_in_truth_counts() -> None:
    queue: FairQueue[str] = FairQueue()
    for flow in ("frugal", "greedy"):
        for index in range(60):
            queue.push(flow, f"{flow}{index}", 100, has_begun=False)
    served = []
    for _ in range(55):
        entry = first(queue)
        queue.take(entry)
        queue.correct(entry, 10 if entry.flow == "frugal" else 100)
        served.append(entry.flow)
    assert served.count("frugal") == pytest.approx(50, abs=2)


def test_of_lanes_that_may_go_on_the_first_is_served_and_what_waits_elsewhere_keeps_its_place() -> None:
    queue: FairQueue[str] = FairQueue()
    held = queue.push("", "held", 10, has_begun=True, lane="full")
    queue.push("", "next", 10, has_begun=True, lane="free")
    found = queue.first(["free"])
    assert found is not None and found.item == "next" and queue.first(["nowhere"]) is None
    assert queue.first_place("full") == held.place and queue.first_place("nowhere") is None
    moved = queue.move(held, "free")
    assert queue.first(["free"]) is moved and not queue.has_waiting("full")
    assert [entry.item for entry in queue.waiting_in("free")] == ["held", "next"]
    assert queue.waiting_by_flow() == {"": 2} and queue.cost_tokens == 20


def test_a_weight_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="weight of flow a must be > 0, got 0"):
        FairQueue[str]().set_weight("a", 0.0)


def test_only_what_waits_can_be_taken() -> None:
    queue: FairQueue[str] = FairQueue()
    entry = queue.push("", "one", 10, has_begun=False)
    queue.drop(entry)
    with pytest.raises(ValueError, match="must be waiting"):
        queue.take(entry)


costs = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), min_size=1, max_size=80)


@given(costs)
def test_between_flows_that_wait_the_served_tokens_differ_by_no_more_than_two_requests(
    pushes: list[tuple[str, int]],
) -> None:
    """The bound of start-time fair queueing: the largest cost of each of the two flows."""
    queue: FairQueue[int] = FairQueue()
    largest, left = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for flow, cost in pushes:
        queue.push(flow, cost, cost, has_begun=False)
        largest[flow], left[flow] = max(largest[flow], cost), left[flow] + 1
    served = dict.fromkeys("abc", 0)
    waiting = {name for name in "abc" if left[name]}
    while len(queue):
        entry = first(queue)
        queue.take(entry)
        served[entry.flow] += entry.cost_tokens
        left[entry.flow] -= 1
        waiting = {name for name in waiting if left[name]}
        for one in waiting:
            for other in waiting:
                assert served[one] - served[other] <= largest[one] + largest[other]
    assert queue.cost_tokens == 0
