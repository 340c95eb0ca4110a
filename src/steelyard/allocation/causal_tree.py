"""What is left of a trajectory by the results of its tools alone: the predictor of Libra's causal queues. Pure.

A prefix tree (arXiv 2606.03077): the node of a trajectory is the sequence of results so far. Each node keeps what was
left, in the last trajectories that came through it; a trajectory whose own node has seen too few is told what the
nearest node above it says that has not.
"""

import bisect
from collections import OrderedDict, deque
from collections.abc import Sequence

from steelyard.allocation.remaining_work import LEVELS, Quantiles
from steelyard.allocation.workload import ToolResult

_WINDOW = 256
_MAX_DEPTH = 32


class CausalTree:
    """The tree.

    Args:
        min_support: trajectories that a node must have seen to be asked.
        max_nodes: the one that was not learnt from for longest goes first.
    """

    def __init__(self, min_support: int = 12, max_nodes: int = 4096) -> None:
        self._min_support = min_support
        self._max_nodes = max_nodes
        self._arrived: OrderedDict[tuple[ToolResult, ...], deque[float]] = OrderedDict()
        self._ordered: dict[tuple[ToolResult, ...], list[float]] = {}

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree."""
        return len(self._arrived)

    def learn(self, results: Sequence[ToolResult], left: Sequence[float]) -> None:
        """A trajectory has ended. ``left[i]`` was left when ``results[:i]`` were known."""
        for turn, amount in enumerate(left[: _MAX_DEPTH + 1]):
            node = tuple(results[:turn])
            arrived = self._arrived.get(node)
            if arrived is None:
                arrived = self._arrived[node] = deque[float]()
                self._ordered[node] = []
                if len(self._arrived) > self._max_nodes:
                    forgotten, _ = self._arrived.popitem(last=False)
                    del self._ordered[forgotten]
            else:
                self._arrived.move_to_end(node)
            ordered = self._ordered[node]
            arrived.append(amount)
            bisect.insort(ordered, amount)
            if len(arrived) > _WINDOW:
                del ordered[bisect.bisect_left(ordered, arrived.popleft())]

    def quantiles(self, results: Sequence[ToolResult]) -> Quantiles | None:
        """What is left, at the levels of remaining_work; None before the first trajectory has ended."""
        node = tuple(results[:_MAX_DEPTH])
        while node and len(self._ordered.get(node, ())) < self._min_support:
            node = node[:-1]
        values = self._ordered.get(node)
        if not values:
            return None
        last = len(values) - 1
        return tuple(values[max(0, min(last, round((last + 2) * level - 1.0)))] for level in LEVELS)

    def mean(self, results: Sequence[ToolResult]) -> float | None:
        """What is left on the mean, of the same node."""
        node = tuple(results[:_MAX_DEPTH])
        while node and len(self._ordered.get(node, ())) < self._min_support:
            node = node[:-1]
        values = self._ordered.get(node)
        return sum(values) / len(values) if values else None
