"""The pool: sandboxes started ahead, a bound on how many exist, and a slot that is free only when its processes are.

*consumes* closed sandboxes; *waits for* a free slot; *unblocked by* ``acquire``, or a sandbox that is gone;
*produces* warm sandboxes. A start that fails fails those who wait, with its own reason, and is tried again.
"""

import asyncio
import logging
from collections import deque

from steelyard.config import SandboxConfig
from steelyard.errors import DeadlineExceeded, SandboxLost, SteelyardError
from steelyard.sandbox.base import OwnedSandbox, Sandbox, Starter

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0


class WarmPool:
    """Gives out sandboxes of one starter. Must be made inside a running event loop.

    Args:
        config: ``num_warm`` are kept ready, at most ``max_alive`` exist (warm, in use, or still ending).
    """

    def __init__(self, starter: Starter, config: SandboxConfig) -> None:
        self._starter = starter
        self._num_warm = config.num_warm
        self._max_alive = config.max_alive
        self._warm: deque[OwnedSandbox] = deque()
        self._alive: set[OwnedSandbox] = set()
        self._waiting: deque[asyncio.Future[OwnedSandbox]] = deque()
        self._has_work = asyncio.Event()
        self._has_work.set()
        self._is_closed = False
        self._refilling = asyncio.create_task(self._refill(), name="sandbox refill")

    @property
    def num_alive(self) -> int:
        """Sandboxes that exist: warm, in use, or not yet gone."""
        return len(self._alive)

    async def acquire(self, label: str, deadline_s: float) -> Sandbox:
        """See :class:`steelyard.sandbox.base.SandboxPool`."""
        if self._is_closed:
            raise SandboxLost("the sandbox pool is closed")
        try:
            async with asyncio.timeout(deadline_s):
                sandbox = await self._take()
        except TimeoutError:
            holders = tuple(sorted(sandbox.label for sandbox in self._alive if sandbox.label)[:5])
            what = f"a sandbox for {label} ({len(self._alive)} of at most {self._max_alive} exist)"
            raise DeadlineExceeded(what, holders, deadline_s) from None
        try:
            await sandbox.set_label(label)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def sweep(self) -> int:
        """See :class:`steelyard.sandbox.base.SandboxPool`."""
        return await self._starter.sweep()

    async def close(self) -> None:
        """See :class:`steelyard.sandbox.base.SandboxPool`."""
        self._is_closed = True
        self._refilling.cancel()
        await asyncio.gather(self._refilling, return_exceptions=True)
        self._fail_waiting(SandboxLost("the sandbox pool was closed"))
        alive = tuple(self._alive)
        await self._starter.close()
        # The processes are gone; this frees our ends of the sockets.
        await asyncio.gather(*(sandbox.close() for sandbox in alive))

    async def _take(self) -> OwnedSandbox:
        while self._warm:
            sandbox = self._warm.popleft()
            self._has_work.set()
            if not sandbox.gone.done():
                return sandbox
        place: asyncio.Future[OwnedSandbox] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._has_work.set()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._warm.append(place.result())
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    async def _refill(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._has_work.wait()
            if not self._is_start_due():
                self._has_work.clear()
                continue
            try:
                self._admit(await self._starter.start())
                pause_s = _FIRST_PAUSE_S
            except (SteelyardError, OSError) as error:
                logger.error("a sandbox could not be started: %s", error)
                self._fail_waiting(error if isinstance(error, SteelyardError) else SandboxLost(str(error)))
                # Nothing is ordered by this pause; it keeps a broken host from spinning.
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _is_start_due(self) -> bool:
        wanted = len(self._waiting) + self._num_warm - len(self._warm)
        return wanted > 0 and len(self._alive) < self._max_alive

    def _admit(self, sandbox: OwnedSandbox) -> None:
        self._alive.add(sandbox)
        sandbox.gone.add_done_callback(lambda _: self._release(sandbox))
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(sandbox)
                return
        self._warm.append(sandbox)

    def _release(self, sandbox: OwnedSandbox) -> None:
        self._alive.discard(sandbox)
        if sandbox in self._warm:
            self._warm.remove(sandbox)
        self._has_work.set()

    def _fail_waiting(self, error: SteelyardError) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)
