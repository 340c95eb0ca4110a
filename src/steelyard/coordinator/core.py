"""What the parts of the coordinator share: the state, the way to record an event, and the ways to wait and to fail."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from steelyard.clock import Clock
from steelyard.coordinator.commits import CommitQueue, Commits, NothingKept
from steelyard.coordinator.effects import Effect
from steelyard.coordinator.entities import Rollout, State
from steelyard.coordinator.events import AnyEvent, RunResumed, RunStarted
from steelyard.coordinator.journal.base import Journal
from steelyard.coordinator.records import CoordinatorSettings
from steelyard.coordinator.snapshots import SnapshotWriter
from steelyard.coordinator.state import apply
from steelyard.coordinator.waiting import Signal, Sleep, wait_first
from steelyard.errors import Refused, StorageFailed
from steelyard.ids import IdSource
from steelyard.metrics import Counters

logger = logging.getLogger(__name__)

_MAX_DETAIL_CHARS = 2000

_E = TypeVar("_E", bound=Effect)


class OpenTraces(Protocol):
    """The recorder's unsealed traces, as the coordinator needs them."""

    def discard(self, attempt_id: str) -> int:
        """End the recording of an attempt that will never be sealed, and return the sampled tokens it had recorded.

        Idempotent, and the same answer after a crash or a power cut; 0 for an attempt that recorded nothing.

        Raises:
            StorageFailed: the count cannot be made durable.
        """
        ...


class Jitter(Protocol):
    """A source of chance, such as ``random.Random``."""

    def random(self) -> float:
        """The next number, uniform in [0, 1)."""
        ...


class FullWait:
    """No chance at all: every back-off is waited out in full."""

    def random(self) -> float:
        return 0.0


class Core:
    """State, journal and clock in one place. Everything here but ``wait`` and ``committed`` is synchronous.

    Events recorded without an ``await`` between them reach the journal as one atomic unit. Without a journal nothing is
    kept and nobody outside is told; that is for the simulator, which has no event loop either.
    """

    def __init__(
        self,
        *,
        state: State,
        journal: Journal | None,
        settings: CoordinatorSettings,
        clock: Clock,
        sleep: Sleep,
        ids: IdSource,
        counters: Counters,
        open_traces: OpenTraces,
        jitter: Jitter,
    ) -> None:
        self.state = state
        self.settings = settings
        self.ids = ids
        self.counters = counters
        self.open_traces = open_traces
        self.jitter = jitter
        self.work = Signal()
        self.scores = Signal()
        self.progress = Signal()
        self.timers = Signal()
        self.commits: Commits = NothingKept()
        if journal is not None:
            self.commits = CommitQueue(
                journal,
                num_committed=state.num_events,
                delay_s=settings.group_commit_s,
                sleep=sleep,
                on_failure=self.fail,
                on_commit=self._deliver,
            )
        self._clock = clock
        # A clock that was set back while nobody ran would otherwise stand still here until it has caught up.
        self._lead_s = max(0.0, state.at_s - clock.now_s())
        self._sleep = sleep
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._handlers: dict[type[Any], list[Callable[[Any], None]]] = {}
        self._listeners: list[Callable[[Effect], None]] = []
        self._outbox: deque[tuple[int, Effect]] = deque()
        self._on_commit: list[Callable[[int], None]] = []
        self._before_apply: Callable[[AnyEvent], None] | None = None

    def snapshots(self, journal: Journal, num_covered: int) -> SnapshotWriter:
        """The writer of snapshots; ``num_covered`` events need none any more."""
        writer = SnapshotWriter(
            self.state,
            journal,
            self.commits,
            every_events=self.settings.snapshot_every_events,
            num_covered=num_covered,
            on_failure=self.fail,
        )
        self._on_commit.append(writer.committed)
        self._before_apply = writer.before
        return writer

    def now_s(self) -> float:
        """The present, never before the last event; goes on at once where the clock was set back since."""
        return max(self._clock.now_s() + self._lead_s, self.state.at_s)

    def record(self, event: AnyEvent) -> None:
        """Apply an event and put it in line for the journal.

        Raises:
            IllegalTransition: it cannot follow; nothing was changed.
        """
        if self._before_apply is not None:
            self._before_apply(event)
        _, effects = apply(self.state, event)
        self.commits.add(event)
        for effect in effects:
            self.emit(effect)

    def begin(self, run_id: str, seed: int, config_digest: str) -> None:
        """Record that the run starts, or that it is taken over, and what it is held to from now on.

        A finished run stays finished: whoever was not told yet is told so.
        """
        at_s, rules, budgets = self.now_s(), self.settings.rules, self.settings.budgets
        if self.state.run is None:
            self.record(
                RunStarted(
                    at_s=at_s, run_id=run_id, seed=seed, config_digest=config_digest, rules=rules, budgets=budgets
                )
            )
        elif not self.state.run.is_finished:
            self.record(RunResumed(at_s=at_s, config_digest=config_digest, rules=rules, budgets=budgets))

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended; nothing is recorded then."""
        return self.state.run is not None and self.state.run.is_finished

    def emit(self, effect: Effect) -> None:
        """Hand an effect to the parts at once and to listeners once it is committed."""
        for handler in self._handlers.get(type(effect), ()):
            handler(effect)
        if self._listeners:
            self._outbox.append((self.state.num_events, effect))

    def subscribe(self, kind: type[_E], handler: Callable[[_E], None]) -> None:
        """Let a part of the coordinator see every effect of one kind."""
        self._handlers.setdefault(kind, []).append(handler)

    def listen(self, listener: Callable[[Effect], None]) -> None:
        """Let somebody outside see every effect after its commit. The listener must not block or raise."""
        self._listeners.append(listener)

    async def committed(self) -> None:
        """Wait until all that has been applied is durable; raises what made it impossible."""
        await self.commits.reached(self.state.num_events)

    async def wait(self, signal: Signal, until_s: float) -> None:
        """Wait for the next notification of ``signal``, at most until ``until_s``.

        The caller must not have awaited anything since it read what it waits to see changed.
        """
        await wait_first(signal.next_event(), until_s - self.now_s(), self._sleep)

    def fail(self, error: BaseException) -> None:
        """End every wait and refuse every later call with ``error``. The first error stays."""
        if self._failure is None:
            self._failure = error
            self._failed.set()
            logger.error("the run has failed: %s", error)
            for signal in (self.work, self.scores, self.progress, self.timers):
                signal.notify()

    def discard(self, attempt_id: str) -> int:
        """End the recording of an attempt; the sampled tokens that are lost with it.

        Raises:
            StorageFailed: their count cannot be kept; like a commit that fails, this ends the run.
        """
        try:
            return self.open_traces.discard(attempt_id)
        except StorageFailed as error:
            self.fail(error)
            raise

    async def failed(self) -> BaseException:
        """The error of the run, once it has one."""
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    def check(self) -> None:
        """Raise the error that the run failed with, if it did."""
        if self._failure is not None:
            raise self._failure

    def refuse(self, reason: str, detail: str) -> Refused:
        """Count a refusal and return it, to be raised."""
        self.counters.add(f"refused.{reason}")
        logger.info("refused (%s): %s", reason, detail)
        return Refused(reason, detail)

    def attempt(self, attempt_id: str, attempt_number: int | None = None) -> Rollout:
        """The rollout whose newest attempt this is.

        Raises:
            Refused: ``unknown``, ``expired`` or ``late``; ``foreign`` for a number that was never given out.
        """
        rollout = self.state.attempts.get(attempt_id)
        if rollout is None:
            reason = self.state.ended_attempts.get(attempt_id, "unknown")
            raise self.refuse(reason, f"attempt {attempt_id} is not live")
        if attempt_number is not None and attempt_number != rollout.attempt_number:
            reason = "late" if attempt_number < rollout.attempt_number else "foreign"
            detail = f"attempt {attempt_id} has number {rollout.attempt_number}, the message carries {attempt_number}"
            raise self.refuse(reason, detail)
        return rollout

    def _deliver(self, num_committed: int) -> None:
        while self._outbox and self._outbox[0][0] <= num_committed:
            _, effect = self._outbox.popleft()
            for listener in self._listeners:
                listener(effect)
        for hear in self._on_commit:
            hear(num_committed)


def short(detail: str) -> str:
    """Free text fit for the journal: valid UTF-8, of bounded length."""
    return detail[:_MAX_DETAIL_CHARS].encode("utf-8", "replace").decode()
