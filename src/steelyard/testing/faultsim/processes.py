"""Simulated processes: lives that are started, killed, stopped for a while, and started again."""

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from steelyard.errors import IllegalTransition, RunError
from steelyard.testing.faultsim.loop import OWNER, Owner, VirtualLoop

Note = Callable[[str], None]
"""Takes one line of the trace."""

EPOCH_S = 1_000_000.0
"""What a clock that is right shows at virtual second 0."""


class ProcessClock:
    """Wall time as one process sees it: off by ``offset_s``, and never going back within one life."""

    def __init__(self, loop: VirtualLoop, offset_s: float) -> None:
        self._loop = loop
        self.offset_s = offset_s

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        return EPOCH_S + self._loop.time() + self.offset_s


class Life(Owner):
    """One life of a process. Everything that it starts dies with it.

    Args:
        clock: its own.
        number: counts the lives of one process, from 1 on.
    """

    def __init__(self, name: str, number: int, loop: VirtualLoop, clock: ProcessClock) -> None:
        super().__init__(name)
        self.number = number
        self.clock = clock
        self.loop = loop
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, self)
        loop.owners.append(self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Start a task of this life."""
        return self.loop.create_task(coroutine, name=f"{self.name}/{name}", context=self.context)

    def deliver(self, callback: Callable[[bytes], None], data: bytes) -> None:
        """Have the process run ``callback``: not before it goes on where it is stopped, never where it is dead."""
        if not self.is_dead:
            self.loop.call_soon(callback, data, context=self.context)


class Process:
    """A program that is started again ``restart_s`` after it ended, until the run is over.

    Args:
        main: the program; it gets its new life. Its end by an error that a real program dies of (RunError,
            IllegalTransition) is a restart; any other error is a finding, told to ``on_finding``.
        draw: decides how wrong the clock of each life is.
        max_skew_s: the most that a clock is wrong, either way.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[Life], Awaitable[None]],
        loop: VirtualLoop,
        draw: random.Random,
        *,
        restart_s: float,
        max_skew_s: float,
        on_finding: Callable[[BaseException], None],
        note: Note,
    ) -> None:
        self.name = name
        self.max_skew_s = max_skew_s
        self.life: Life | None = None
        self.num_lives = 0
        self._main = main
        self._loop = loop
        self._draw = draw
        self._restart_s = restart_s
        self._on_finding = on_finding
        self._note = note

    def start(self) -> None:
        """Begin a new life, unless one goes on."""
        if self.life is not None:
            return
        self.num_lives += 1
        offset_s = self._draw.uniform(-self.max_skew_s, self.max_skew_s)
        life = self.life = Life(self.name, self.num_lives, self._loop, ProcessClock(self._loop, offset_s))
        self._note(f"{self.name} starts, life {self.num_lives}, clock {offset_s:+.3f} s")
        life.spawn(self._live(life), "main")

    def kill(self, why: str) -> None:
        """SIGKILL: not another line of it runs. It starts again after a while."""
        life = self.life
        if life is None:
            return
        self._note(f"{self.name} dies: {why}")
        life.is_dead = True
        self.life = None
        self._loop.call_later(self._restart_s * self._draw.uniform(0.5, 2.0), self.start, context=outside())

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``; its clock goes on meanwhile."""
        life = self.life
        if life is None or life.is_stopped:
            return
        self._note(f"{self.name} is stopped for {seconds:.1f} s")
        life.is_stopped = True
        self._loop.call_later(seconds, self._go_on, life, context=outside())

    def jump_clock(self, seconds: float) -> None:
        """Its clock goes ``seconds`` forward at once."""
        if self.life is not None:
            self._note(f"the clock of {self.name} jumps {seconds:.1f} s")
            self.life.clock.offset_s += seconds

    def _go_on(self, life: Life) -> None:
        if life.is_stopped and not life.is_dead:
            self._note(f"{self.name} goes on")
            self._loop.go_on(life)

    async def _live(self, life: Life) -> None:
        try:
            await self._main(life)
            why = "its program ended"
        except (RunError, IllegalTransition) as error:
            why = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 (whatever else a program ends with is what we are looking for)
            self._on_finding(error)
            return
        if self.life is life:
            self.kill(why)


def outside() -> contextvars.Context:
    """A context that belongs to no process."""
    context = contextvars.copy_context()
    context.run(OWNER.set, None)
    return context
