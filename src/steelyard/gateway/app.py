"""The gateway over HTTP: the endpoints of OpenAI and Anthropic on loopback, the attempt's capability as API key.

*Consumes* requests of agents; *waits for* slow bodies, with a deadline, and for :mod:`steelyard.gateway.streams`;
*unblocked by* the engine's result or the client's leaving, which cancels the engine's work.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from steelyard.clock import Clock
from steelyard.gateway.attempt_protocol import ATTEMPTS_PATH
from steelyard.gateway.attempts import AttemptEndpoint
from steelyard.gateway.capability import KeyRing
from steelyard.gateway.dialects import anthropic, anthropic_replies, openai, openai_replies
from steelyard.gateway.dialects.base import Asked, Desk, ErrorForm, ModelNames
from steelyard.gateway.failures import Failure, FailureKind, as_failure
from steelyard.gateway.service import Gateway
from steelyard.gateway.streams import EventStream, complete_all
from steelyard.ids import IdSource
from steelyard.metrics import Counters
from steelyard.processes.http_port import HttpPort, PortOptions, QuickRoutes, bearer_key, read_body
from steelyard.processes.quick_http import PlainAnswer, PlainRequest

_JSON = "application/json"
_MODELS = "/v1/models"
_MESSAGES = "/v1/messages"

Endpoint = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Read = Callable[[bytes, Desk], Asked]

_READERS: dict[str, Read] = {
    "/v1/chat/completions": openai.read_chat,
    "/v1/completions": openai.read_completion,
    _MESSAGES: anthropic.read_messages,
}
"""Where the policy is asked."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``read_deadline_s``: for a whole request body.

    ``write_deadline_s``: how long a client may leave a streamed chunk unread before it counts as gone.
    """

    max_body_bytes: int = 8 << 20
    read_deadline_s: float = 30.0
    write_deadline_s: float = 30.0
    shutdown_s: float = 5.0


class GatewayServer:
    """Serves a gateway on one port.

    Args:
        port: 0 takes a free one, which :meth:`start` returns.
        models: what lists of models name, and which models a request may name.
        attempts: serves workers on other machines; None serves none.
    """

    def __init__(
        self,
        gateway: Gateway,
        keys: KeyRing,
        *,
        ids: IdSource,
        clock: Clock,
        counters: Counters,
        host: str = "127.0.0.1",
        port: int = 0,
        models: ModelNames | None = None,
        limits: HttpLimits | None = None,
        attempts: AttemptEndpoint | None = None,
    ) -> None:
        self._gateway = gateway
        self._keys = keys
        self._ids = ids
        self._clock = clock
        self._counters = counters
        self._models = models or ModelNames()
        self._limits = limits or HttpLimits()
        options = PortOptions(
            field="gateway.port",
            host=host,
            port=port,
            max_body_bytes=self._limits.max_body_bytes,
            shutdown_s=self._limits.shutdown_s,
        )
        quick = QuickRoutes(answer=self._quick, paths=frozenset(_READERS), read_deadline_s=self._limits.read_deadline_s)
        self._http = HttpPort(self._answer, options, quick)
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            **{("POST", path): self._serve for path in _READERS},
            ("POST", f"{_MESSAGES}/count_tokens"): self._count_tokens,
            ("GET", _MODELS): self._list_models,
            ("GET", "/health"): self._health,
        }
        if attempts is not None:
            self._endpoints["GET", ATTEMPTS_PATH] = attempts.check
            self._endpoints["POST", ATTEMPTS_PATH] = attempts.call

    async def start(self) -> str:
        """Listen; returns the base URL for clients of OpenAI, which ends in ``/v1``.

        Raises:
            InputError: the port is in use or may not be bound.
        """
        return f"{await self._http.start()}/v1"

    async def stop(self) -> None:
        """Stop listening and end open requests."""
        await self._http.stop()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The endpoint's answer, or its failure in the caller's dialect."""
        try:
            return await self._endpoints.get((request.method, request.path), self._other)(request)
        except Exception as error:  # noqa: BLE001 (a server answers every failure; as_failure logs those of ours)
            status, body, headers = self._refusal(error, error_form(request.path, request.headers))
            return _json(body, status, headers)

    async def _quick(self, request: PlainRequest) -> PlainAnswer | None:
        """As :meth:`_answer`, of a plain request to the policy; None where the answer is to be streamed."""
        try:
            attempt_id = self._attempt(request.headers)
            if request.body is None:
                raise self._slow_body()
            asked = self._asked(request.path, request.body)
            if asked.stream:
                return None
            return PlainAnswer(await self._whole(attempt_id, asked))
        except Exception as error:  # noqa: BLE001 (as above)
            status, body, headers = self._refusal(error, error_form(request.path, request.headers))
            return PlainAnswer(msgspec.json.encode(body), status=status, headers=headers)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Asks the policy."""
        attempt_id = self._attempt(request.headers)
        asked = self._asked(request.path, await self._body(request))
        if asked.stream:
            return await self._stream(request, attempt_id, asked)
        return web.Response(body=await self._whole(attempt_id, asked), content_type=_JSON)

    def _asked(self, path: str, body: bytes) -> Asked:
        asked = _READERS[path](body, self._desk())
        most = self._gateway.limits.max_open_calls_per_attempt
        if len(asked.jobs) > most:
            message = f"at most {most} replies can be asked for at a time, not {len(asked.jobs)}"
            raise Failure(FailureKind.BAD_REQUEST, message, param="n")
        return asked

    async def _whole(self, attempt_id: str, asked: Asked) -> bytes:
        return asked.replies.whole(await complete_all(self._gateway, attempt_id, asked.jobs))

    async def _stream(self, request: web.BaseRequest, attempt_id: str, asked: Asked) -> web.StreamResponse:
        stream = EventStream(
            request,
            fail=self._failure,
            on_reader_gone=lambda: self._counters.add("gateway.http.reader_gone"),
            error_event=error_form(request.path, request.headers).event,
            write_deadline_s=self._limits.write_deadline_s,
            shutdown_s=self._limits.shutdown_s,
        )
        return await stream.send(self._gateway, attempt_id, asked)

    async def _count_tokens(self, request: web.BaseRequest) -> web.StreamResponse:
        attempt_id = self._attempt(request.headers)
        asked = anthropic.read_count(await self._body(request), self._desk())
        return _json({"input_tokens": self._gateway.count_prompt(attempt_id, asked)})

    async def _list_models(self, request: web.BaseRequest) -> web.StreamResponse:
        self._attempt(request.headers)
        return _json(_model_form(request).model_list(self._models.listed()))

    async def _other(self, request: web.BaseRequest) -> web.StreamResponse:
        """One model by its name; whatever else is asked for is not here."""
        name = request.path.removeprefix(f"{_MODELS}/")
        if request.method == "GET" and name != request.path:
            self._attempt(request.headers)
            self._models.check(name)
            return _json(_model_form(request).model(name))
        known = {path for _, path in self._endpoints}
        hint = ""
        if f"/v1{request.path}" in known:
            hint = ". Did you leave /v1 out of the base URL?"
        elif request.path.removeprefix("/v1") in known:
            hint = ". Does the base URL end in /v1 where the client adds it?"
        message = f"Unknown request URL: {request.method} {request.path}{hint}"
        raise Failure(FailureKind.NOT_FOUND, message, code="unknown_url")

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def _body(self, request: web.BaseRequest) -> bytes:
        try:
            return await read_body(request, self._limits.read_deadline_s)
        except TimeoutError:
            raise self._slow_body() from None

    def _slow_body(self) -> Failure:
        message = f"The request body must arrive within {self._limits.read_deadline_s:.0f} s."
        return Failure(FailureKind.SLOW_BODY, message)

    def _attempt(self, headers: Mapping[str, str]) -> str:
        """The attempt whose key the request carries."""
        key = headers.get("x-api-key") or bearer_key(headers)
        if key is None:
            how = "send the attempt's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            message = f"You didn't provide an API key: {how}."
            raise Failure(FailureKind.BAD_KEY, message)
        return self._keys.verify(key, self._clock.now_s())

    def _desk(self) -> Desk:
        return Desk(
            tokens=self._gateway,
            models=self._models,
            ids=self._ids,
            now_s=self._clock.now_s(),
        )

    def _refusal(self, error: Exception, form: ErrorForm) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, body and headers that tell of a failure."""
        failure = self._failure(error)
        status = form.status(failure)
        self._counters.add(f"gateway.http.{status}")
        return status, form.body(failure), failure.headers

    def _failure(self, error: Exception) -> Failure:
        failure = as_failure(error, self._limits.max_body_bytes)
        self._counters.add(f"gateway.refused.{failure.kind}")
        return failure


def error_form(path: str, headers: Mapping[str, str]) -> ErrorForm:
    """How the caller expects to be told of a failure."""
    is_anthropic = path.startswith(_MESSAGES) or "anthropic-version" in headers
    return anthropic_replies.ERRORS if is_anthropic else openai_replies.ERRORS


def _model_form(request: web.BaseRequest) -> "type[anthropic_replies.Models] | type[openai_replies.Models]":
    return anthropic_replies.Models if "anthropic-version" in request.headers else openai_replies.Models


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type=_JSON, headers=headers)
