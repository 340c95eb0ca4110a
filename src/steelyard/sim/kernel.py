"""A discrete-event kernel: a heap of (time, priority, order) and the actions that are due.

Actions are plain callables. What fails in one ends the simulation with its error. Two runs with the same actions are
the same run: ties go by priority, then by the order in which they were planned.
"""

import heapq
from collections.abc import Callable

from steelyard.errors import InputError

Action = Callable[[], None]


class Timer:
    """A planned action; :meth:`cancel` takes it back."""

    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self.action: Action | None = action

    @property
    def is_pending(self) -> bool:
        """Whether it is still to come."""
        return self.action is not None

    def cancel(self) -> None:
        """Take it back; harmless once it is done."""
        self.action = None


class Kernel:
    """Virtual time. It is a :class:`steelyard.clock.Clock`, so that what runs on it sees no other time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._heap: list[tuple[float, int, int, Timer]] = []
        self._planned = 0
        self.num_events = 0

    def now_s(self) -> float:
        """The virtual time, in seconds."""
        return self._now_s

    def at(self, at_s: float, action: Action, priority: int = 0) -> Timer:
        """Do ``action`` at ``at_s``; of those at one instant, lower priorities first.

        Raises:
            InputError: that time has passed, or is no time.
        """
        if not at_s >= self._now_s:
            raise InputError(f"an event must be planned for {self._now_s} s or later, got {at_s}")
        timer = Timer(at_s, action)
        self._planned += 1
        heapq.heappush(self._heap, (at_s, priority, self._planned, timer))
        return timer

    def after(self, delay_s: float, action: Action, priority: int = 0) -> Timer:
        """Do ``action`` in ``delay_s``."""
        return self.at(self._now_s + delay_s, action, priority)

    def step(self) -> bool:
        """Do what is due next; False where nothing is planned."""
        heap = self._heap
        while heap:
            at_s, _, _, timer = heapq.heappop(heap)
            action = timer.action
            if action is None:
                continue
            timer.action = None
            self._now_s = at_s
            self.num_events += 1
            action()
            return True
        return False

    def run(self, until_s: float = float("inf")) -> None:
        """Do all that is due up to ``until_s``, which the clock then shows if it is finite."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.step()
        if until_s != float("inf"):
            self._now_s = max(self._now_s, until_s)

    @property
    def num_planned(self) -> int:
        """Timers in the heap, taken-back ones included."""
        return len(self._heap)
