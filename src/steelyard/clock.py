"""The one place that asks for the time.

Logic takes a :class:`Clock` so that the simulator and the tests can hand in virtual time.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time in seconds since the Unix epoch."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch; never goes back within one process."""
        ...


class SystemClock:
    """Wall time that never runs backwards within a process.

    Anchored once to the wall clock and advanced by the monotonic clock, so that a clock
    adjustment during a run can neither expire leases early nor keep them alive.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() + self._offset_s
