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

Requests that wait for the same wait in one *lane*; who serves asks for the first of the lanes that may go on. So what
waits in vain costs nothing, however much of it there is.
"""

import bisect
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Place = tuple[int, int]
"""Begun conversations first, then the order of arrival."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiting(Generic[T]):
    """A request in the queue. ``cost_tokens`` is what serving it is projected to cost."""

    place: Place
    flow: str
    lane: Hashable
    cost_tokens: int
    item: T

    @property
    def number(self) -> int:
        """Its place in the order of arrival."""
        return self.place[1]


@dataclass(slots=True)
class _Flow:
    """``tag``: the start tag of its next request, in tokens over weight."""

    weight: float
    tag: float = 0.0
    num_waiting: int = 0


class _Line(Generic[T]):
    """The requests of one flow in one lane, in order."""

    __slots__ = ("entries", "places")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.entries: list[Waiting[T]] = []

    def add(self, entry: Waiting[T]) -> None:
        index = bisect.bisect_left(self.places, entry.place)
        self.places.insert(index, entry.place)
        self.entries.insert(index, entry)

    def remove(self, entry: Waiting[T]) -> bool:
        index = bisect.bisect_left(self.places, entry.place)
        if index == len(self.places) or self.places[index] != entry.place:
            return False
        del self.places[index], self.entries[index]
        return True


class FairQueue(Generic[T]):
    """Requests that wait, in the order in which they are to be served."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._lanes: dict[Hashable, dict[str, _Line[T]]] = {}
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

    def push(
        self,
        flow: str,
        item: T,
        cost_tokens: int,
        *,
        has_begun: bool,
        number: int | None = None,
        lane: Hashable = None,
    ) -> Waiting[T]:
        """Add a request.

        Args:
            has_begun: its conversation was served before.
            number: that of an earlier entry whose place it takes again.
            lane: what it waits for.
        """
        if number is None:
            self._number += 1
            number = self._number
        entry = Waiting((int(not has_begun), number), flow, lane, cost_tokens, item)
        state = self._flow(flow)
        if not state.num_waiting:
            state.tag = max(state.tag, self._virtual)
        self._add(entry, state)
        return entry

    def first(self, lanes: Iterable[Hashable]) -> Waiting[T] | None:
        """The request of these lanes that is to be served before all others of theirs."""
        best: tuple[float, str, Place] | None = None
        found: Waiting[T] | None = None
        for lane in lanes:
            for flow, line in self._lanes.get(lane, {}).items():
                key = (self._flows[flow].tag, flow, line.places[0])
                if best is None or key < best:
                    best, found = key, line.entries[0]
        return found

    def first_place(self, lane: Hashable) -> Place | None:
        """The first place in the order of a lane that is taken, whatever the flow; None where nothing waits."""
        lines = self._lanes.get(lane)
        if lines is None:
            return None
        if len(lines) == 1:
            (line,) = lines.values()
            return line.places[0]
        return min(line.places[0] for line in lines.values())

    def waiting_in(self, lane: Hashable) -> Iterator[Waiting[T]]:
        """All that waits in a lane. Take nothing while it runs."""
        for line in self._lanes.get(lane, {}).values():
            yield from line.entries

    def has_waiting(self, lane: Hashable) -> bool:
        """Whether anything waits in a lane."""
        return lane in self._lanes

    def move(self, entry: Waiting[T], lane: Hashable) -> Waiting[T]:
        """It waits for something else now; its place stays."""
        state = self._remove(entry)
        moved = Waiting(entry.place, entry.flow, lane, entry.cost_tokens, entry.item)
        self._add(moved, state)
        return moved

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
        return {name: state.num_waiting for name, state in self._flows.items()}

    def _flow(self, name: str) -> _Flow:
        state = self._flows.get(name)
        if state is None:
            state = self._flows[name] = _Flow(weight=1.0, tag=self._virtual)
        return state

    def _add(self, entry: Waiting[T], state: _Flow) -> None:
        lines = self._lanes.setdefault(entry.lane, {})
        line = lines.get(entry.flow)
        if line is None:
            line = lines[entry.flow] = _Line()
        line.add(entry)
        state.num_waiting += 1
        self._cost_tokens += entry.cost_tokens
        self._len += 1

    def _remove(self, entry: Waiting[T]) -> _Flow:
        lines = self._lanes.get(entry.lane, {})
        line = lines.get(entry.flow)
        if line is None or not line.remove(entry):
            raise ValueError(f"entry {entry.number} of flow {entry.flow} must be waiting, it is not")
        if not line.places:
            del lines[entry.flow]
            if not lines:
                del self._lanes[entry.lane]
        state = self._flows[entry.flow]
        state.num_waiting -= 1
        self._cost_tokens -= entry.cost_tokens
        self._len -= 1
        return state
