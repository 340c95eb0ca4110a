"""Waiting for a change or a moment, whichever comes first, on whatever clock is in use."""

import asyncio
from collections.abc import Awaitable, Callable

Sleep = Callable[[float], Awaitable[None]]
"""Waits for so many seconds of the clock in use; ``asyncio.sleep`` on the system's."""


class Signal:
    """Wakes everybody who waits at the moment of ``notify``."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def next_event(self) -> asyncio.Event:
        """Set by the next ``notify``. Take it before reading the state that the signal is about."""
        return self._event

    def notify(self) -> None:
        """Wake all who wait."""
        self._event.set()
        self._event = asyncio.Event()


async def wait_first(event: asyncio.Event, timeout_s: float, sleep: Sleep) -> bool:
    """Wait for ``event``, at most ``timeout_s``; whether it came."""
    if event.is_set():
        return True
    if timeout_s <= 0:
        # Whoever waits in a loop for a moment that is past must not keep everybody else from running.
        await asyncio.sleep(0)
        return event.is_set()
    waiter = asyncio.ensure_future(event.wait())
    timer = asyncio.ensure_future(sleep(timeout_s))
    try:
        await asyncio.wait((waiter, timer), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        timer.cancel()
    return event.is_set()
