"""The gateway's side of attempts that run elsewhere: a worker opens, seals and discards its own over HTTP.

*Consumes* calls of workers, one a request; *waits for* a slow body, and for the disk when a trace is sealed, each with
a deadline; *unblocked by* the disk; *produces* the key, the sealed trace, or the number of lost tokens.

What a call does rests on the state of the attempt and on nothing that is remembered of the call, so it may come any
number of times, also after its worker was started again.
"""

import asyncio
import logging
from typing import Protocol

import msgspec
from aiohttp import web

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, InputError, ProtocolMismatch, Refused, RunError
from steelyard.gateway import attempt_protocol as p
from steelyard.gateway.capability import AttemptDirectory, KeyRing
from steelyard.metrics import Counters
from steelyard.processes.http_failures import HttpError, as_http, body_of, failure_response
from steelyard.processes.http_port import bearer_key
from steelyard.types import AttemptStanding, EndReason, Record, SealedTrace, ToolRecord

_LOG = logging.getLogger(__name__)
_DECODER: msgspec.msgpack.Decoder[p.AttemptCall] = msgspec.msgpack.Decoder(p.AttemptCall)


class WorkerKeys(Protocol):
    """Verifies the keys of workers."""

    def worker_of(self, key: str, now_s: float) -> str:
        """The worker's name.

        Raises:
            Refused: not our key, expired, or not a worker's.
        """
        ...


class HeldAttempts(AttemptDirectory, Protocol):
    """Knows which worker holds an attempt."""

    def holder(self, attempt_id: str) -> str:
        """The name of the worker that holds a live attempt.

        Raises:
            Refused: the attempt is not alive: ``unknown``, ``late`` or ``expired``.
        """
        ...


class TraceKeeper(Protocol):
    """Knows recordings, and ends them."""

    def standing(self, attempt_id: str) -> AttemptStanding:
        """How far the calls of an open attempt have come."""
        ...

    async def seal(self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...]) -> SealedTrace:
        """Make the trace whole and durable; the same again for the same ending."""
        ...

    async def discard(self, attempt_id: str) -> int:
        """Throw the attempt's turns away; its recorded tokens, again the same number."""
        ...


class AttemptLimits(Record, frozen=True, kw_only=True):
    """``read_deadline_s``: for a whole body. ``call_deadline_s``: for what a call does."""

    read_deadline_s: float = 30.0
    call_deadline_s: float = 30.0


class AttemptEndpoint:
    """Answers the requests to ``/v1/attempts``.

    Args:
        workers: who may call.
        attempts: only the holder of a live attempt may do anything with it.
        keys: issue what agents call the policy with.
        counters: ``gateway.attempts.refused.<reason>`` counts refusals, of keys and of calls.
    """

    def __init__(
        self,
        workers: WorkerKeys,
        attempts: HeldAttempts,
        traces: TraceKeeper,
        keys: KeyRing,
        *,
        clock: Clock,
        counters: Counters,
        limits: AttemptLimits | None = None,
    ) -> None:
        self._workers = workers
        self._attempts = attempts
        self._traces = traces
        self._keys = keys
        self._clock = clock
        self._counters = counters
        self._limits = limits or AttemptLimits()

    async def check(self, request: web.BaseRequest) -> web.Response:
        """``GET``: whether version and key are good."""
        return await self._answered(request, self._check)

    async def call(self, request: web.BaseRequest) -> web.Response:
        """``POST``: one call."""
        return await self._answered(request, self._call)

    async def _answered(self, request: web.BaseRequest, serve: "_Serve") -> web.Response:
        try:
            _require_version(request.headers.get(p.VERSION_HEADER))
            result = await serve(request, self._worker(request))
        except Exception as error:  # noqa: BLE001 (a server answers every failure; those of ours are logged)
            failure = self._failure(error)
            self._counters.add(f"gateway.attempts.http.{failure.status}")
            if isinstance(failure.error, Refused):
                self._counters.add(f"gateway.attempts.refused.{failure.error.reason}")
            return failure_response(failure)
        return web.Response(body=msgspec.msgpack.encode(result), content_type=p.CONTENT_TYPE)

    async def _check(self, _: web.BaseRequest, worker_id: str) -> p.AttemptResult:
        return p.Known(worker_id=worker_id)

    async def _call(self, request: web.BaseRequest, worker_id: str) -> p.AttemptResult:
        call = _DECODER.decode(await body_of(request, self._limits.read_deadline_s))
        self._require_holder(call.attempt_id, worker_id)
        limit_s = self._limits.call_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._perform(call)
        except TimeoutError:
            raise DeadlineExceeded(f"a call for attempt {call.attempt_id}", ("trace store",), limit_s) from None

    async def _perform(self, call: p.AttemptCall) -> p.AttemptResult:
        match call:
            case p.OpenAttempt(attempt_id=attempt_id):
                return self._open(attempt_id)
            case p.SealAttempt():
                return p.Sealed(trace=await self._traces.seal(call.attempt_id, call.end_reason, call.tools))
            case p.AskStanding(attempt_id=attempt_id):
                return p.Stands(standing=self._traces.standing(attempt_id))
            case p.DiscardAttempt():
                return p.Discarded(num_tokens=await self._traces.discard(call.attempt_id))

    def _open(self, attempt_id: str) -> p.Opened:
        """The expiry is the binding's, so the key is the same each time."""
        binding = self._attempts.binding(attempt_id)
        if binding is None:
            raise Refused("late", f"attempt {attempt_id} is not alive")
        expires_at_s = binding.deadline_at_s
        return p.Opened(api_key=self._keys.issue(attempt_id, expires_at_s), expires_at_s=expires_at_s)

    def _require_holder(self, attempt_id: str, worker_id: str) -> None:
        holder = self._attempts.holder(attempt_id)
        if holder != worker_id:
            raise Refused("foreign", f"attempt {attempt_id} is held by {holder}, not {worker_id}")

    def _worker(self, request: web.BaseRequest) -> str:
        key = bearer_key(request.headers)
        try:
            if key is None:
                raise Refused("unknown", "a worker's key must be sent as 'Authorization: Bearer KEY'")
            return self._workers.worker_of(key, self._clock.now_s())
        except Refused as error:
            raise HttpError(401, error) from None

    def _failure(self, error: Exception) -> HttpError:
        if isinstance(error, msgspec.MsgspecError):
            return HttpError(400, InputError(f"the body must be an AttemptCall: {error}"))
        if isinstance(error, web.HTTPRequestEntityTooLarge):
            return HttpError(413, InputError(f"the body is too large: {error.text}"))
        failure = as_http(error)
        if failure is None:
            _LOG.error("a call for an attempt failed", exc_info=error)
            return HttpError(500, RunError("the gateway failed"))
        return failure


class _Serve(Protocol):
    async def __call__(self, request: web.BaseRequest, worker_id: str, /) -> p.AttemptResult: ...


def _require_version(version: str | None) -> None:
    if version != str(p.PROTOCOL_VERSION):
        raise ProtocolMismatch(
            f"{p.VERSION_HEADER}: this gateway speaks version {p.PROTOCOL_VERSION}, the request "
            f"{'names none' if version is None else f'speaks version {version[:20]}'}"
        )
