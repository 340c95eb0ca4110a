"""The order in which waiting requests are served. Pure.

Between flows (runs, or whoever shares a router): start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). A
request's start tag is the later of the queue's virtual time and the finish tag of the flow's request before it; its
finish tag lies its cost in tokens, over the flow's weight, behind. Requests are served by start tag, so that flows that
always have something waiting get tokens in proportion to their weights, and one that was away gets no arrears. A cost
is a projection; once the true one is known the flow's tag is put right by the difference, as the counters of
arXiv 2401.00588 are.

Within a flow: conversations that were begun before those that were not, each in order of arrival. New ones first would
push out the KV that the others come back for, and all would compute theirs again and again. A conversation has an end,
and none is begun meanwhile, so new ones get their turn.
"""

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Waiting(Generic[T]):
    """A request in the queue. ``cost_tokens`` is what serving it is projected to cost."""

    has_begun_rank: int
    number: int
    flow: str = field(compare=False)
    cost_tokens: int = field(compare=False)
    item: T = field(compare=False)


@dataclass
class _Flow(Generic[T]):
    """``tag``: the start tag of its next request, in tokens over weight."""

    weight: float
    tag: float = 0.0
    waiting: list[Waiting[T]] = field(default_factory=list)


class FairQueue(Generic[T]):
    """Requests that wait, in the order in which they are to be served."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._virtual = 0.0
        self._number = 0
        self._cost_tokens = 0
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def cost_tokens(self) -> int:
        """Projected cost of all that waits."""
        return self._cost_tokens

    def set_weight(self, flow: str, weight: float) -> None:
        """Give a flow its share relative to others, 1 where none was set.

        Raises:
            ValueError: it is not above 0.
        """
        if not weight > 0:
            raise ValueError(f"weight of flow {flow} must be > 0, got {weight}")
        self._flow(flow).weight = weight

    def push(self, flow: str, item: T, cost_tokens: int, *, has_begun: bool, number: int | None = None) -> Waiting[T]:
        """Add a request.

        Args:
            has_begun: its conversation was served before.
            number: that of an earlier entry whose place it takes again.
        """
        if number is None:
            self._number += 1
            number = self._number
        entry = Waiting(int(not has_begun), number, flow, cost_tokens, item)
        state = self._flow(flow)
        if not state.waiting:
            state.tag = max(state.tag, self._virtual)
        bisect.insort(state.waiting, entry)
        self._cost_tokens += cost_tokens
        self._len += 1
        return entry

    def in_order(self) -> Iterator[Waiting[T]]:
        """All that waits, in the order of service if each were served as it is met. Take nothing while it runs."""
        heads = [(state.tag, name, 0) for name, state in self._flows.items() if state.waiting]
        heapq.heapify(heads)
        while heads:
            tag, name, index = heads[0]
            state = self._flows[name]
            entry = state.waiting[index]
            if index + 1 < len(state.waiting):
                heapq.heapreplace(heads, (tag + entry.cost_tokens / state.weight, name, index + 1))
            else:
                heapq.heappop(heads)
            yield entry

    def take(self, entry: Waiting[T]) -> None:
        """Serve a request: it leaves the queue, and its flow is charged."""
        state = self._remove(entry)
        self._virtual = max(self._virtual, state.tag)
        state.tag += entry.cost_tokens / state.weight

    def drop(self, entry: Waiting[T]) -> None:
        """A request leaves the queue unserved; nothing is charged."""
        self._remove(entry)

    def correct(self, entry: Waiting[T], true_cost_tokens: int) -> None:
        """A request that was served cost this much in truth."""
        state = self._flow(entry.flow)
        state.tag = max(0.0, state.tag + (true_cost_tokens - entry.cost_tokens) / state.weight)

    def waiting_by_flow(self) -> dict[str, int]:
        """How many requests wait, by flow; every flow that was ever seen."""
        return {name: len(state.waiting) for name, state in self._flows.items()}

    def _flow(self, name: str) -> _Flow[T]:
        state = self._flows.get(name)
        if state is None:
            state = self._flows[name] = _Flow(weight=1.0, tag=self._virtual)
        return state

    def _remove(self, entry: Waiting[T]) -> _Flow[T]:
        state = self._flows[entry.flow]
        index = bisect.bisect_left(state.waiting, entry)
        if index == len(state.waiting) or state.waiting[index].number != entry.number:
            raise ValueError(f"entry {entry.number} of flow {entry.flow} must be waiting, it is not")
        del state.waiting[index]
        self._cost_tokens -= entry.cost_tokens
        self._len -= 1
        return state
