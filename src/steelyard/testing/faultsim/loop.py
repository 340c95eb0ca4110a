"""An event loop on a virtual clock, and the processes that live in it.

Time stands still while anything is ready and jumps to the next timer when nothing is. There is no I/O, so one seed
gives one order of everything. Each callback belongs to the process in whose context it was made: the callbacks of a
killed process are dropped without running another line of it, those of a stopped one are kept until it goes on. That
is SIGKILL and SIGSTOP, and not a cancellation, which would run handlers.
"""

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

OWNER: contextvars.ContextVar["Owner | None"] = contextvars.ContextVar("owner", default=None)
"""The process whose code runs; None for the world around all processes."""

_MAX_CALLBACKS_PER_INSTANT = 20_000
_MAX_UNWINDINGS = 100


class Stuck(Exception):
    """The main task cannot end, or not in time. The message names who waits, and for what."""


class Owner:
    """One life of a simulated process, as the loop sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.held: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time is virtual.

    Args:
        limit_s: virtual seconds after which the main task must have ended.

    ``ended_at_s`` is when it had ended, None before; ``num_callbacks`` counts what ran until then.

    Raises:
        Stuck: from ``run_until_complete``: nothing is ready and no timer is set, the limit has passed, or callbacks
            follow each other without end at one instant.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.limit_s = limit_s
        self.num_callbacks = 0
        self.ended_at_s: float | None = None
        self.owners: list[Owner] = []
        self._now_s = 0.0
        self._due: deque[tuple[asyncio.Handle, Owner | None]] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Owner | None]] = []
        self._numbers = itertools.count()
        self._num_at_instant = 0
        self._num_tasks = 0
        self.set_task_factory(lambda _, coroutine, **options: self._new_task(coroutine, **options))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def call_soon(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append((handle, context.get(OWNER)))
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle, context.get(OWNER)))
        return handle

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> "asyncio.Future[_T]":
        """Runs ``func`` soon, in this thread and in no time: threads would bring an order of their own."""
        done: asyncio.Future[_T] = self.create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - it is for whoever waits
                done.set_exception(error)

        self.call_soon(work)
        return done

    def go_on(self, owner: Owner) -> None:
        """Let a stopped process go on with everything that was held for it, in order."""
        owner.is_stopped = False
        self._due.extend((handle, owner) for handle in owner.held)
        owner.held = []

    def _new_task(self, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        """Every task of a process is kept: one that is collected would run its handlers."""
        self._num_tasks += 1
        task = _NumberedTask(coroutine, number=self._num_tasks, loop=self, **options)
        context = options.get("context")
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is not None:
            owner.tasks.append(task)
        return task

    def _run_once(self) -> None:
        """One round: what is ready now, or else the next timer. Called by ``run_forever``."""
        if not self._due:
            self._jump()
        for _ in range(len(self._due)):
            handle, owner = self._due.popleft()
            if handle.cancelled():
                continue
            if owner is not None and (owner.is_dead or owner.is_stopped):
                owner.held.append(handle)  # for a dead one until the end, when everything is unwound
                continue
            handle._run()
            self.num_callbacks += self.ended_at_s is None
            self._num_at_instant += 1
        if self._num_at_instant > _MAX_CALLBACKS_PER_INSTANT:
            raise Stuck(f"time stands still at {self._now_s:.3f} s; {self.who_waits()}")

    def _jump(self) -> None:
        timers = self._timers
        while timers and (timers[0][2].cancelled() or _is_dead(timers[0][3])):
            heapq.heappop(timers)
        if not timers:
            raise Stuck(f"nothing can happen any more at {self._now_s:.3f} s; {self.who_waits()}")
        if timers[0][0] > self.limit_s:
            raise Stuck(f"not ended after {self.limit_s:.0f} virtual seconds; {self.who_waits()}")
        if timers[0][0] > self._now_s:
            self._now_s, self._num_at_instant = timers[0][0], 0
        while timers and timers[0][0] <= self._now_s:
            _, _, handle, owner = heapq.heappop(timers)
            self._due.append((handle, owner))

    def unwind(self) -> None:
        """Cancel every task, of dead processes too, until none is left; what they say of it goes nowhere.

        Raises:
            Stuck: some do not end.
        """
        self.limit_s, self.ended_at_s = float("inf"), self._now_s
        self.set_exception_handler(lambda _loop, _context: None)
        for owner in self.owners:
            owner.is_dead = False
            self.go_on(owner)
        for _ in range(_MAX_UNWINDINGS):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self._num_at_instant = 0
            self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        raise Stuck(f"tasks do not end when they are cancelled; {self.who_waits()}")

    def who_waits(self) -> str:
        """The unfinished tasks of living processes that have a name, and where each of them stands."""
        gone = {id(task) for owner in self.owners if owner.is_dead for task in owner.tasks}
        named = [task for task in asyncio.all_tasks(self) if not task.get_name().startswith("Task-")]
        waiting = [task for task in named if id(task) not in gone]
        lines = [f"{task.get_name()}: {' > '.join(_where(task))}" for task in waiting]
        return "waiting: " + "; ".join(sorted(lines))


def _is_dead(owner: Owner | None) -> bool:
    return owner is not None and owner.is_dead


class _NumberedTask(asyncio.Task[Any]):
    """Sets of tasks are walked in an order that depends on hashes: those must not be addresses."""

    def __init__(self, coroutine: Any, *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


def _where(task: "asyncio.Task[Any]") -> Iterator[str]:
    waits: Any = task.get_coro()
    while (code := getattr(waits, "cr_code", None)) is not None:
        yield code.co_qualname
        waits = waits.cr_await


def run(main: Coroutine[Any, Any, _T], loop: VirtualLoop) -> _T:
    """Run ``main`` to its end, then let all processes, dead ones too, unwind their tasks, and close the loop.

    Raises:
        Stuck: see :class:`VirtualLoop`.
    """
    task = loop.create_task(main, name="world")
    try:
        return loop.run_until_complete(task)
    finally:
        try:
            loop.unwind()
        finally:
            loop.close()
