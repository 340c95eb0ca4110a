"""A clock that stands still until it is told to move, with sleeps that follow it."""

import asyncio
import heapq
import itertools


class ManualClock:
    """Pass the object as ``clock`` and its ``sleep`` as the way to sleep.

    ``advance`` wakes the sleepers that are due; they run when the caller next awaits.
    """

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self._now_s = now_s
        self.num_reads = 0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now_s(self) -> float:
        """Seconds since the Unix epoch, as last set; each look is counted in ``num_reads``."""
        self.num_reads += 1
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move ``seconds`` forward."""
        if seconds < 0:
            raise ValueError(f"time must not go back, got {seconds}")
        self._now_s += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now_s:
            _, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.done():
                sleeper.set_result(None)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has moved ``seconds`` from now."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + seconds, next(self._numbers), sleeper))
        await sleeper

    @property
    def num_sleepers(self) -> int:
        """How many are asleep."""
        return sum(not sleeper.done() for _, _, sleeper in self._sleepers)


async def settle(rounds: int = 20) -> None:
    """Let every task that can run do so, without waiting for anything."""
    for _ in range(rounds):
        await asyncio.sleep(0)
