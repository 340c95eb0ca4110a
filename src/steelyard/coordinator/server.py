"""The coordinator over HTTP, for workers, scorers and trainers on any machine. docs/protocol.md is the protocol.

*Consumes* requests of up to 32 calls. *Waits for* the coordinator's answers, each of which waits for a commit, and for
slow readers, with deadlines. *Unblocked by* the last answer, or the client's leaving: polls that nobody waits for any
more are withdrawn, everything else is carried through. *Produces* one result for each call, and for a call that comes
again the same one.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from steelyard.clock import Clock
from steelyard.coordinator import protocol as p
from steelyard.coordinator.capability import Capability, CapabilityRing, Role
from steelyard.coordinator.description import RUN_PATH, RunDescription
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.sessions import OpenCall, Outcome, Perform, Session, Sessions, Uncommitted
from steelyard.coordinator.trainer_service import perform
from steelyard.errors import (
    DeadlineExceeded,
    IllegalTransition,
    InputError,
    ProtocolMismatch,
    Refused,
    RunError,
    SteelyardError,
    StorageFailed,
)
from steelyard.metrics import Counters
from steelyard.processes import frames
from steelyard.processes.http_failures import Failed, HttpError, body_of
from steelyard.processes.http_port import HttpPort, PortOptions, bearer_key
from steelyard.types import Record

_LOG = logging.getLogger(__name__)
_DECODER = msgspec.msgpack.Decoder(p.CallRequest)
_ENCODER = msgspec.msgpack.Encoder()

# Below the mark (64 KiB) at which asyncio's transports make a writer wait; one answer at a time is on a connection.
_ALWAYS_BUFFERED_BYTES = 32 << 10

Endpoint = Callable[[web.BaseRequest], Awaitable[web.Response]]


class ServerLimits(Record, frozen=True, kw_only=True):
    """``read_deadline_s``: for a whole request body. ``max_wait_s``: the longest poll.

    ``write_deadline_s``: how long a client may leave an answer unread before it counts as gone.

    ``answer_deadline_s``: how long a request waits for its commits before it is told to come again.
    """

    max_body_bytes: int = 1 << 20
    read_deadline_s: float = 30.0
    max_wait_s: float = 30.0
    answer_deadline_s: float = 30.0
    write_deadline_s: float = 30.0
    shutdown_s: float = 5.0


class CoordinatorServer:
    """Serves a coordinator on one port. The coordinator is its owner's to close, after the server was stopped.

    Args:
        keys: verifies who calls.
        roles: whom to serve; the others' calls are refused.
        counters: ``coordinator.http.<status>`` counts requests that failed as a whole, ``coordinator.key.<reason>``
            keys that were refused, ``coordinator.repeated`` calls that had come before.
        port: 0 takes a free one, which :meth:`start` returns.
        description: what whoever has a key may know of the run; None says nothing of it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        keys: CapabilityRing,
        *,
        clock: Clock,
        counters: Counters,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: ServerLimits | None = None,
        roles: frozenset[Role] = frozenset(Role),
        description: RunDescription | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._worker_calls = coordinator.worker_calls
        self._keys = keys
        self._roles = roles
        self._clock = clock
        self._counters = counters
        self._limits = limits or ServerLimits()
        options = PortOptions(
            field="coordinator.port",
            host=host,
            port=port,
            max_body_bytes=self._limits.max_body_bytes,
            shutdown_s=self._limits.shutdown_s,
        )
        self._http = HttpPort(self._answer, options)
        self._sessions = Sessions()
        self._performing: set[asyncio.Task[p.Result]] = set()
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_stopping = False
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            ("POST", p.CALLS_PATH): self._calls,
            ("GET", p.HEALTH_PATH): self._health,
        }
        self._description = description
        if description is not None:
            self._endpoints["GET", RUN_PATH] = self._run

    async def start(self) -> str:
        """Listen; returns the base URL, without a path.

        Raises:
            InputError: the port is in use or may not be bound.
        """
        return await self._http.start()

    async def stop(self) -> None:
        """Stop listening and end open requests; calls under way are cancelled, and what they did stays done."""
        performing = list(self._performing)
        for task in performing:
            task.cancel()
        self._is_stopping = True
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0.0)
        await asyncio.gather(*performing, return_exceptions=True)
        await self._http.stop()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        response = await self._respond(request)
        if response.content_length is not None and response.content_length <= _ALWAYS_BUFFERED_BYTES:
            return response  # its write never waits for the reader, so it needs no deadline of its own
        try:
            async with asyncio.timeout(self._limits.write_deadline_s):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            self._counters.add("coordinator.http.reader_gone")
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        try:
            return await self._endpoints.get((request.method, request.path), self._unknown)(request)
        except Exception as error:  # noqa: BLE001 (a server answers every failure; _as_http logs those of ours)
            failure = self._as_http(error)
            self._counters.add(f"coordinator.http.{failure.status}")
            return _packed(_failed(failure.error), failure.status)

    async def _health(self, _: web.BaseRequest) -> web.Response:
        body = msgspec.json.encode({"status": "ok", "protocol": p.PROTOCOL_VERSION})
        return web.Response(body=body, content_type="application/json")

    async def _run(self, request: web.BaseRequest) -> web.Response:
        _require_version(request.headers.get(p.VERSION_HEADER))
        self._holder(request)
        assert self._description is not None, "the endpoint is there only with a description"
        return _packed(self._description)

    async def _unknown(self, request: web.BaseRequest) -> web.Response:
        known = " or ".join(f"{method} {path}" for method, path in self._endpoints)
        raise HttpError(404, InputError(f"the request must be {known}, got {request.method} {request.path}"))

    async def _calls(self, request: web.BaseRequest) -> web.Response:
        _require_version(request.headers.get(p.VERSION_HEADER))
        holder = self._holder(request)
        asked = _DECODER.decode(await body_of(request, self._limits.read_deadline_s))
        self._require_role(holder, asked)
        for numbered in asked.calls:
            p.check(numbered.call)
        session = self._sessions.session(f"{holder.role}.{holder.worker_id}", asked.session_id)
        session.forget_below(asked.answered_below)
        perform = functools.partial(self._begin, holder.worker_id)
        entered = [(numbered.sequence, self._enter(session, numbered, perform)) for numbered in asked.calls]
        failure = await self._wait(session, [(n, call) for n, call in entered if isinstance(call, OpenCall)])
        answers = tuple([p.Answer(sequence=n, result=self._result(call, failure)) for n, call in entered])
        return _packed(p.CallReply(answers=answers))

    def _enter(self, session: Session, numbered: p.NumberedCall, perform: Perform) -> OpenCall | Failed:
        """The call, begun or found; else what is wrong with its number. Calls begin in their order."""
        try:
            open_call, is_repeated = session.enter(numbered, perform)
        except (Refused, InputError) as error:
            reason = error.reason if isinstance(error, Refused) else "sequence"
            self._counters.add(f"refused.{reason}")
            return _failed(error)
        if is_repeated:
            self._counters.add("coordinator.repeated")
        return open_call

    def _begin(self, worker_id: str, call: p.Call) -> Outcome:
        """Do the call where that takes no waiting, else begin to wait.

        Raises:
            StorageFailed: the journal has failed under this process, which ends. No answer is final then: another takes
                its place, and knows what was done. So too :meth:`_perform` and :meth:`_result`.
        """
        try:
            result = self._worker_calls.perform(call, worker_id)
        except StorageFailed:
            raise
        except (Refused, IllegalTransition) as refusal:
            return Uncommitted(_failed(refusal), self._worker_calls.num_events)
        except Exception as error:  # noqa: BLE001 (_told logs what is not ours)
            return Uncommitted(_told(error, worker_id), 0)
        if result is not None:
            return Uncommitted(result, self._worker_calls.num_events)
        task = asyncio.create_task(self._perform(call, worker_id))
        self._performing.add(task)
        task.add_done_callback(self._performed)
        return task

    def _performed(self, task: "asyncio.Task[p.Result]") -> None:
        self._performing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.info("a call was not carried through: %s", error)  # whoever waits for it is told to come again

    async def _perform(self, call: p.Call, worker_id: str) -> p.Result:
        try:
            return await self._dispatch(call, worker_id)
        except StorageFailed:
            raise
        except Exception as error:  # noqa: BLE001 (_told logs what is not ours)
            return _told(error, worker_id)

    async def _dispatch(self, call: p.Call, worker_id: str) -> p.Result:
        """The calls that may wait."""
        coordinator, max_wait_s = self._coordinator, self._limits.max_wait_s
        match call:
            case p.LeaseCall():
                wait_s, unstarted = min(call.wait_s, max_wait_s), frozenset(call.unstarted)
                return p.Leased(leases=await coordinator.lease(worker_id, call.max_leases, wait_s, unstarted))
            case p.LeaseScoresCall():
                wait_s, held = min(call.wait_s, max_wait_s), frozenset(call.held)
                return p.Jobs(jobs=await coordinator.lease_scores(worker_id, call.max_jobs, wait_s, held))
            case (
                p.StartCall()
                | p.HeartbeatCall()
                | p.ArtifactReadyCall()
                | p.AttemptFailedCall()
                | p.ScoreCall()
                | p.ArtifactLostCall()
            ):
                raise RunError(f"{type(call).__name__} is a call that never waits")
            case _:
                return await perform(coordinator, call, worker_id, max_wait_s) or p.Done()

    async def _wait(self, session: Session, calls: Sequence[tuple[int, OpenCall]]) -> BaseException | None:
        """Until all calls can be answered; the error where what was done cannot be made durable.

        Leaving early cancels nothing but polls that nobody else waits for.

        Raises:
            DeadlineExceeded: it took too long. What is done stays done, and may be asked for again.
            RunError: the server stops; likewise.
        """
        num_events, tasks = 0, {}
        for sequence, call in calls:
            outcome = call.outcome
            if isinstance(outcome, Uncommitted):
                num_events = max(num_events, outcome.num_events)
            else:
                tasks[sequence] = (call, outcome)
        if not tasks:
            return await self._commit(num_events)
        limit_s = self._limits.answer_deadline_s
        if any(call.is_poll for call, _ in tasks.values()):
            limit_s += self._limits.max_wait_s
        for call, _ in tasks.values():
            call.num_waiting += 1
        try:
            failure = await self._commit(num_events)
            _, late = await asyncio.wait([task for _, task in tasks.values()], timeout=limit_s)
        finally:
            for sequence, (call, task) in tasks.items():
                call.num_waiting -= 1
                is_unwanted = call.is_poll and not call.num_waiting and not task.done()
                if is_unwanted and session.holds(sequence, call):
                    session.withdraw(sequence)
        if late:
            raise DeadlineExceeded("the commit of a call", ("journal",), limit_s)
        return failure

    async def _commit(self, num_events: int) -> BaseException | None:
        if num_events <= self._worker_calls.num_durable:
            return None
        limit_s = self._limits.answer_deadline_s
        try:
            async with asyncio.timeout(limit_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    await self._worker_calls.durable(num_events)
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if self._is_stopping:
                raise RunError("the coordinator stops before the commit of a call: come again") from None
            raise DeadlineExceeded("the commit of a call", ("journal",), limit_s) from None
        except Exception as error:  # noqa: BLE001 (each answer that needed the commit tells of it)
            return error
        return None

    def _result(self, call: OpenCall | Failed, failure: BaseException | None) -> p.Result:
        if isinstance(call, Failed):
            return call
        outcome = call.outcome
        if isinstance(outcome, Uncommitted):
            if failure is not None and outcome.num_events > self._worker_calls.num_durable:
                if isinstance(failure, StorageFailed):
                    raise failure
                return _told(failure, "any worker")
            return outcome.result
        if outcome.cancelled():
            raise RunError(
                "the call was withdrawn: the coordinator stops, or a later call of the session took its place"
            )
        return outcome.result()

    def _holder(self, request: web.BaseRequest) -> Capability:
        key = bearer_key(request.headers)
        try:
            if key is None:
                raise Refused("unknown", "a key must be sent as 'Authorization: Bearer KEY'")
            return self._keys.verify(key, self._clock.now_s())
        except Refused as error:
            self._counters.add(f"coordinator.key.{error.reason}")
            raise HttpError(401, error) from None

    def _require_role(self, holder: Capability, asked: p.CallRequest) -> None:
        allowed = p.CALLS_OF[holder.role] if holder.role in self._roles else ()
        for numbered in asked.calls:
            if not isinstance(numbered.call, allowed):
                self._counters.add("coordinator.key.role")
                detail = f"{type(numbered.call).__name__} is not a call that a {holder.role} may make here"
                raise HttpError(403, Refused("foreign", detail))

    def _as_http(self, error: Exception) -> HttpError:
        match error:
            case HttpError():
                return error
            case msgspec.MsgspecError():
                return HttpError(400, InputError(f"the body must be a CallRequest: {error}"))
            case web.HTTPRequestEntityTooLarge():
                limit = self._limits.max_body_bytes
                return HttpError(413, InputError(f"the body must be at most {limit} bytes"))
            case ProtocolMismatch():
                return HttpError(426, error)
            case InputError():
                return HttpError(400, error)
            case RunError():
                return HttpError(503, error)
            case _:
                _LOG.error("a request failed", exc_info=error)
                return HttpError(500, RunError("the coordinator failed"))


def _require_version(version: str | None) -> None:
    if version != str(p.PROTOCOL_VERSION):
        raise ProtocolMismatch(
            f"{p.VERSION_HEADER}: this coordinator speaks version {p.PROTOCOL_VERSION}, the request "
            f"{'names none' if version is None else f'speaks version {version[:20]}'}"
        )


def _failed(error: BaseException) -> Failed:
    kind, body = frames.describe(error)
    return Failed(kind=kind, reason=body.reason, message=body.message)


def _told(error: BaseException, worker_id: str) -> Failed:
    """What a call that failed tells its client, who must learn of any failure; what is a fault of ours is logged."""
    if isinstance(error, SteelyardError):
        return _failed(error)
    _LOG.error("a call of %s failed", worker_id, exc_info=error)
    return Failed(kind="InternalError", reason="", message="the coordinator failed")


def _packed(record: Record, status: int = 200) -> web.Response:
    return web.Response(body=_ENCODER.encode(record), status=status, content_type=p.CONTENT_TYPE)
