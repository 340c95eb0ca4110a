"""The coordinator over HTTP, for workers, scorers and trainers on any machine. docs/protocol.md is the protocol.

*Consumes* requests of up to 32 calls. *Waits for* the coordinator's answers, each of which waits for a commit, and for
slow readers, with deadlines. *Unblocked by* the last answer, or the client's leaving: polls that nobody waits for any
more are withdrawn, everything else is carried through. *Produces* one result for each call, and for a call that comes
again the same one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from steelyard.clock import Clock
from steelyard.coordinator import protocol as p
from steelyard.coordinator.capability import Capability, CapabilityRing, Role
from steelyard.coordinator.service import Coordinator
from steelyard.coordinator.sessions import OpenCall, Session, Sessions
from steelyard.coordinator.trainer_service import perform
from steelyard.errors import (
    DeadlineExceeded,
    InputError,
    ProtocolMismatch,
    Refused,
    RunError,
    SteelyardError,
    StorageFailed,
)
from steelyard.metrics import Counters
from steelyard.processes import frames
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


class HttpError(Exception):
    """An answer to a whole request: none of its calls was looked at, or their answers are not there yet."""

    def __init__(self, status: int, error: SteelyardError) -> None:
        self.status = status
        self.error = error
        super().__init__(str(error))


class CoordinatorServer:
    """Serves a coordinator on one port. The coordinator is its owner's to close, after the server was stopped.

    Args:
        keys: verifies who calls.
        roles: whom to serve; the others' calls are refused.
        counters: ``coordinator.http.<status>`` counts requests that failed as a whole, ``coordinator.key.<reason>``
            keys that were refused, ``coordinator.repeated`` calls that had come before.
        port: 0 takes a free one, which :meth:`start` returns.
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
    ) -> None:
        self._coordinator = coordinator
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
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            ("POST", p.CALLS_PATH): self._calls,
            ("GET", p.HEALTH_PATH): self._health,
        }

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

    async def _unknown(self, request: web.BaseRequest) -> web.Response:
        known = " or ".join(f"{method} {path}" for method, path in self._endpoints)
        raise HttpError(404, InputError(f"the request must be {known}, got {request.method} {request.path}"))

    async def _calls(self, request: web.BaseRequest) -> web.Response:
        _require_version(request.headers.get(p.VERSION_HEADER))
        holder = self._holder(request)
        asked = _DECODER.decode(await self._body(request))
        self._require_role(holder, asked)
        for numbered in asked.calls:
            p.check(numbered.call)
        session = self._sessions.session(f"{holder.role}.{holder.worker_id}", asked.session_id)
        session.forget_below(asked.answered_below)
        entered = [(numbered.sequence, self._enter(session, numbered, holder)) for numbered in asked.calls]
        await self._wait(session, [(n, call) for n, call in entered if isinstance(call, OpenCall)])
        answers = tuple(p.Answer(sequence=sequence, result=_result(call)) for sequence, call in entered)
        return _packed(p.CallReply(answers=answers))

    def _enter(self, session: Session, numbered: p.NumberedCall, holder: Capability) -> OpenCall | p.Failed:
        """The call, begun or found; else what is wrong with its number. Calls begin in their order."""
        try:
            open_call, is_repeated = session.enter(numbered, lambda call: self._begin(call, holder.worker_id))
        except (Refused, InputError) as error:
            reason = error.reason if isinstance(error, Refused) else "sequence"
            self._counters.add(f"refused.{reason}")
            return _failed(error)
        if is_repeated:
            self._counters.add("coordinator.repeated")
        return open_call

    def _begin(self, call: p.Call, worker_id: str) -> "asyncio.Task[p.Result]":
        task = asyncio.create_task(self._perform(call, worker_id))
        self._performing.add(task)
        task.add_done_callback(self._performed)
        return task

    def _performed(self, task: "asyncio.Task[p.Result]") -> None:
        self._performing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.info("a call was not carried through: %s", error)  # whoever waits for it is told to come again

    async def _perform(self, call: p.Call, worker_id: str) -> p.Result:
        """The result of a call.

        Raises:
            StorageFailed: the journal has failed under this process, which ends. No answer is final: another takes its
                place, and knows what was done.
        """
        try:
            return await self._dispatch(call, worker_id)
        except StorageFailed:
            raise
        except SteelyardError as error:
            return _failed(error)
        except Exception:  # noqa: BLE001 (the client must learn of any failure of a call; ours are logged)
            _LOG.exception("a call of %s failed", worker_id)
            return p.Failed(kind="InternalError", reason="", message="the coordinator failed")

    async def _dispatch(self, call: p.Call, worker_id: str) -> p.Result:
        coordinator, max_wait_s = self._coordinator, self._limits.max_wait_s
        match call:
            case p.LeaseCall():
                wait_s, unstarted = min(call.wait_s, max_wait_s), frozenset(call.unstarted)
                return p.Leased(leases=await coordinator.lease(worker_id, call.max_leases, wait_s, unstarted))
            case p.LeaseScoresCall():
                wait_s, held = min(call.wait_s, max_wait_s), frozenset(call.held)
                return p.Jobs(jobs=await coordinator.lease_scores(worker_id, call.max_jobs, wait_s, held))
            case p.HeartbeatCall():
                return p.Lost(attempt_ids=await coordinator.heartbeat(worker_id, call.attempt_ids))
            case p.StartCall():
                await coordinator.start(call.attempt_id, call.attempt_number, worker_id)
            case p.ArtifactReadyCall():
                await coordinator.artifact_ready(call.report, worker_id)
            case p.AttemptFailedCall():
                await coordinator.attempt_failed(call.failure, worker_id)
            case p.ScoreCall():
                await coordinator.score(call.score, worker_id)
            case p.ArtifactLostCall():
                await coordinator.artifact_lost(call.attempt_id, call.detail, worker_id)
            case _:
                return await perform(coordinator, call, worker_id, max_wait_s) or p.Done()
        return p.Done()

    async def _wait(self, session: Session, calls: Sequence[tuple[int, OpenCall]]) -> None:
        """Until all calls are answered. Leaving early cancels nothing but polls that nobody else waits for."""
        pending = [(sequence, call) for sequence, call in calls if not call.task.done()]
        if not pending:
            return
        limit_s = self._limits.answer_deadline_s
        if any(call.is_poll for _, call in pending):
            limit_s += self._limits.max_wait_s
        for _, call in pending:
            call.num_waiting += 1
        try:
            _, late = await asyncio.wait([call.task for _, call in pending], timeout=limit_s)
        finally:
            for sequence, call in pending:
                call.num_waiting -= 1
                is_unwanted = call.is_poll and not call.num_waiting and not call.task.done()
                if is_unwanted and session.holds(sequence, call):
                    session.withdraw(sequence)
        if late:
            raise DeadlineExceeded("the commit of a call", ("journal",), limit_s)

    async def _body(self, request: web.BaseRequest) -> bytes:
        if request.content.is_eof():
            return await request.read()  # all of it is here already, so nothing is waited for
        try:
            async with asyncio.timeout(self._limits.read_deadline_s):
                return await request.read()
        except TimeoutError:
            limit_s = self._limits.read_deadline_s
            raise HttpError(408, InputError(f"the body must arrive within {limit_s:.0f} s")) from None

    def _holder(self, request: web.BaseRequest) -> Capability:
        key = bearer_key(request)
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


def _result(call: OpenCall | p.Failed) -> p.Result:
    if isinstance(call, p.Failed):
        return call
    if call.task.cancelled():
        raise RunError("the call was withdrawn: the coordinator stops, or a later call of the session took its place")
    return call.task.result()


def _failed(error: BaseException) -> p.Failed:
    kind, body = frames.describe(error)
    return p.Failed(kind=kind, reason=body.reason, message=body.message)


def _packed(record: Record, status: int = 200) -> web.Response:
    return web.Response(body=_ENCODER.encode(record), status=status, content_type=p.CONTENT_TYPE)
