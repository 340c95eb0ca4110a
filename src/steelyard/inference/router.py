"""Spreads requests over replicas, and keeps those waiting that no replica has room for. Imports no torch.

::

    gateway --GenerateRequest--> queue --(Dispatcher)--> replica --> answer
                                   |                       `-- failed, nothing streamed yet: once more, elsewhere
                                   `-- deadline: queue_timeout

What goes where is decided in :mod:`steelyard.inference.dispatcher`; here are the waits, the calls and their ends. A
replica that dies fails its requests at once; each is tried once more on another replica where one holds the version
and no token has been shown yet. Probes bring a dead replica back.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Mapping

import msgspec

from steelyard.clock import Clock
from steelyard.errors import EngineError, RunError
from steelyard.inference.dispatcher import Decision, Placed, Ticket, Unservable
from steelyard.inference.engine import Engine, OnTokens
from steelyard.inference.hedging import HedgeDelay, TokenStream
from steelyard.inference.replica_set import ReplicaSet, RouterSettings
from steelyard.metrics import Counters
from steelyard.processes.supervision import end_all
from steelyard.types import FinishReason, GenerateRequest, GenerateResult, Record

logger = logging.getLogger(__name__)

_KEPT_WAITS = 4096
_OWN_FLOW = ""


class RouterFigures(Record, frozen=True, kw_only=True):
    """The router at one instant; ``waits_s`` are those of the requests that left the queue since it was last asked."""

    num_waiting: int
    num_open: int
    waiting_by_flow: dict[str, int]
    waits_s: tuple[float, ...]
    weights: dict[str, float]
    projected_kv_frac: dict[str, float]
    draining: tuple[str, ...]


class Flow:
    """The router as one run sees it, beside other runs: its requests get the flow's share of all replicas."""

    def __init__(self, router: "Router", name: str) -> None:
        self._router = router
        self.name = name

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """See :meth:`Router.generate`."""
        return await self._router.generate(request, on_tokens, flow=self.name)

    async def abort(self, request_id: str) -> None:
        """See :meth:`Router.abort`."""
        await self._router.abort(request_id)


class Router(ReplicaSet):
    """Generation over several engines, which it keeps as :class:`~steelyard.inference.replica_set.ReplicaSet` says.

    Args:
        engines: replicas by id.
        counters: get ``router.*``.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        clock: Clock,
        settings: RouterSettings | None = None,
        counters: Counters | None = None,
    ) -> None:
        settings = settings or RouterSettings()
        super().__init__(engines, clock, settings, self._decide)
        self._counters = counters or Counters()
        self._decisions: dict[Ticket, asyncio.Future[Decision | FinishReason]] = {}
        self._hedge_delay = HedgeDelay(settings.hedge_quantile)
        self._waits_s: deque[float] = deque(maxlen=_KEPT_WAITS)

    # --- requests ---------------------------------------------------------------------------------

    def flow(self, name: str, weight: float = 1.0) -> Flow:
        """The router for one run of several, whose share is to those of others as ``weight`` is to theirs.

        Raises:
            ValueError: the weight is not above 0.
        """
        self.dispatcher.set_flow_weight(name, weight)
        return Flow(self, name)

    async def generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None = None, *, flow: str = _OWN_FLOW
    ) -> GenerateResult:
        """Like :meth:`steelyard.inference.engine.Engine.generate`, on the best replica that has room.

        Where none has room in time the result is ``queue_timeout``. Where replicas die or do not answer it is
        ``engine_error`` and has no tokens.

        Raises:
            EngineError: no live replica holds the version, or the replica refused the request.
        """
        ticket, stream = Ticket(request, flow, self._clock.now_s()), TokenStream(on_tokens)
        failed: GenerateResult | None = None
        while True:
            decision = await self._wait_for_room(ticket)
            if isinstance(decision, FinishReason):
                return self._unserved(request, decision, "", "", queued_s=self._clock.now_s() - ticket.arrived_at_s)
            if isinstance(decision, Unservable):
                if failed is not None:
                    return failed
                raise EngineError(decision.reason)
            queued_s = self._clock.now_s() - ticket.arrived_at_s
            result = await self._serve(ticket, decision, stream)
            if result.finish_reason is not FinishReason.ENGINE_ERROR or not self._may_retry(ticket, stream):
                return msgspec.structs.replace(result, queued_s=result.queued_s + queued_s)
            failed = result
            self._counters.add("router.retries")

    async def abort(self, request_id: str) -> None:
        """End a request as cancelled, wherever it runs or waits."""
        for ticket, decided in tuple(self._decisions.items()):
            if ticket.request.request_id == request_id and not decided.done():
                self.dispatcher.withdraw(ticket)
                decided.set_result(FinishReason.CANCELLED)
        for replica in tuple(self._replicas.values()):
            if replica.state.serves(request_id):
                await replica.abort(request_id)

    async def release(self, attempt_id: str) -> None:
        """The attempt has ended: forget its replicas, whose KV of it may go. A dead replica holds none."""
        for replica_id in self.dispatcher.homes.release(attempt_id):
            try:
                if replica_id in self._replicas:
                    await self._replicas[replica_id].release(attempt_id)
            except RunError as error:
                logger.warning("replica %s could not release attempt %s: %s", replica_id, attempt_id, error)
        self.look()

    # --- what is seen of it -----------------------------------------------------------------------

    def wait_estimate_s(self) -> float:
        """How long a request that comes now is likely to wait for room, in seconds."""
        return self.dispatcher.wait_estimate_s(self._clock.now_s())

    def take_figures(self) -> RouterFigures:
        """The router now, and the waits since this was last called."""
        waits_s = tuple(self._waits_s)
        self._waits_s.clear()
        return RouterFigures(
            num_waiting=self.dispatcher.num_waiting,
            num_open=sum(state.num_open for state in self.states.values()),
            waiting_by_flow=self.dispatcher.waiting_by_flow(),
            waits_s=waits_s,
            weights=self.weights(),
            projected_kv_frac={
                name: state.projected_tokens / state.capacity_tokens
                for name, state in self.states.items()
                if state.capacity_tokens
            },
            draining=tuple(name for name, state in self.states.items() if state.is_draining),
        )

    # --- one request ------------------------------------------------------------------------------

    def _decide(self, decision: Decision) -> None:
        decided = self._decisions[decision.ticket]
        decided.set_result(decision)
        if isinstance(decision, Placed) and decision.moved_from is not None:
            self._counters.add("router.moves")

    async def _wait_for_room(self, ticket: Ticket) -> Decision | FinishReason:
        """Queue the request until it is decided upon; the finish reason where it ends before."""
        decided: asyncio.Future[Decision | FinishReason] = asyncio.get_running_loop().create_future()
        self._decisions[ticket] = decided
        began_at_s = self._clock.now_s()
        self.dispatcher.submit(ticket)
        self.look()
        try:
            if not decided.done():
                async with asyncio.timeout(self._patience_s(ticket)):
                    await asyncio.wait([decided])
        except TimeoutError:
            if not decided.done():
                self._counters.add("router.queue_timeouts")
                self.dispatcher.withdraw(ticket)
                return FinishReason.QUEUE_TIMEOUT
        except BaseException:
            self._give_back(ticket, decided)
            raise
        finally:
            del self._decisions[ticket]
            self._waits_s.append(self._clock.now_s() - began_at_s)
        return decided.result()

    def _give_back(self, ticket: Ticket, decided: "asyncio.Future[Decision | FinishReason]") -> None:
        """The caller has gone: the request leaves the queue, or gives back the room that it was just given."""
        self.dispatcher.withdraw(ticket)
        if decided.done() and isinstance(placed := decided.result(), Placed):
            self.dispatcher.finish(ticket, placed.replica_id, None, self._clock.now_s())
            self.look()

    def _patience_s(self, ticket: Ticket) -> float:
        queue_s = math.inf if self._settings.queue_deadline_s is None else self._settings.queue_deadline_s
        ends_at_s = min(ticket.request.deadline_at_s, ticket.arrived_at_s + queue_s)
        return max(0.0, ends_at_s - self._clock.now_s())

    def _may_retry(self, ticket: Ticket, stream: TokenStream) -> bool:
        if stream.speaker is not None or len(ticket.tried) >= self._settings.max_tries:
            return False
        return self.dispatcher.can_retry(ticket)

    async def _serve(self, ticket: Ticket, placed: Placed, stream: TokenStream) -> GenerateResult:
        """The answer of the replica, or of a second one where the first lets the request wait."""
        delay_s = self._hedge_delay.delay_s()
        began_at_s = self._clock.now_s()
        if delay_s is None:
            result = await self._call(ticket, placed.replica_id, stream)
        else:
            result = await self._hedged(ticket, placed.replica_id, stream, delay_s)
        if not ticket.request.stream:
            self._hedge_delay.note(self._clock.now_s() - began_at_s)
        elif result.token_ids:
            self._hedge_delay.note(result.queued_s + result.prefill_s)
        return result

    async def _call(self, ticket: Ticket, replica_id: str, stream: TokenStream) -> GenerateResult:
        """One request on one replica; what was reserved for it is free again when this ends."""
        request, replica = ticket.request, self._replicas.get(replica_id)
        wait_s = max(0.0, request.deadline_at_s - self._clock.now_s()) + self._settings.answer_grace_s
        result: GenerateResult | None = None
        failure = "it was removed"
        try:
            if replica is not None:
                async with asyncio.timeout(wait_s):
                    result = await replica.generate(request, stream.of(replica_id))
        except TimeoutError:
            assert replica is not None
            failure = f"no answer within {wait_s:.1f} s"
            replica.state.failed(failure)
        except RunError as error:
            failure = str(error)
        finally:
            self.dispatcher.finish(ticket, replica_id, result, self._clock.now_s())
            self.look()
        if result is not None and result.finish_reason is not FinishReason.ENGINE_ERROR:
            return result
        ticket.tried.add(replica_id)
        if result is None:
            logger.warning("replica %s failed request %s: %s", replica_id, request.request_id, failure)
            result = self._unserved(request, FinishReason.ENGINE_ERROR, replica_id, failure, queued_s=0.0)
        return result

    async def _hedged(self, ticket: Ticket, first_id: str, stream: TokenStream, delay_s: float) -> GenerateResult:
        """Call one replica, and a second one if nothing has come after ``delay_s``."""
        calls = {asyncio.create_task(self._call(ticket, first_id, stream), name=first_id)}
        begun = asyncio.create_task(stream.has_begun.wait(), name="first token")
        try:
            await asyncio.wait([*calls, begun], timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
            is_waiting = not begun.done() and not any(call.done() for call in calls)
            now_s = self._clock.now_s()
            second_id = self.dispatcher.reserve_second(ticket, first_id, now_s) if is_waiting else None
            if second_id is not None:
                self._counters.add("router.hedges")
                calls.add(asyncio.create_task(self._call(ticket, second_id, stream), name=second_id))
            winner = await self._first_answer(calls, begun, stream)
            await self._end_losers(ticket.request.request_id, calls - {winner})
            return await winner
        finally:
            await end_all([*calls, begun])

    @staticmethod
    async def _first_answer(
        calls: set["asyncio.Task[GenerateResult]"], begun: "asyncio.Task[bool]", stream: TokenStream
    ) -> "asyncio.Task[GenerateResult]":
        """The call that streams first or ends first; a failure wins only when there is no other."""
        open_calls = set(calls)
        while True:
            waits = [*open_calls] if begun.done() else [*open_calls, begun]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if stream.speaker is not None:
                return next(call for call in calls if call.get_name() == stream.speaker)
            for call in [call for call in open_calls if call.done()]:
                open_calls.discard(call)
                if not open_calls or not _has_failed(call):
                    return call

    async def _end_losers(self, request_id: str, losers: set["asyncio.Task[GenerateResult]"]) -> None:
        """Abort what the winner made useless. Its tokens are in no turn: they are counted once, as lost."""
        for call in losers:
            try:
                async with asyncio.timeout(self._settings.abort_deadline_s):
                    await self._replicas[call.get_name()].abort(request_id)
                    await asyncio.wait([call])
            except (TimeoutError, KeyError, RunError, EngineError) as error:
                logger.warning("replica %s did not end the second of %s: %r", call.get_name(), request_id, error)
            if call.done() and not call.cancelled() and call.exception() is None:
                self._counters.add("router.hedge_lost_tokens", len(call.result().token_ids))

    @staticmethod
    def _unserved(
        request: GenerateRequest, reason: FinishReason, replica_id: str, detail: str, *, queued_s: float
    ) -> GenerateResult:
        return GenerateResult(
            request_id=request.request_id,
            token_ids=(),
            logprobs=(),
            kept_logmass=(),
            version_spans=(),
            finish_reason=reason,
            replica_id=replica_id,
            load_id="",
            queued_s=queued_s,
            detail=detail,
        )


def _has_failed(call: "asyncio.Task[GenerateResult]") -> bool:
    if call.cancelled() or call.exception() is not None:
        return True
    return call.result().finish_reason is FinishReason.ENGINE_ERROR
