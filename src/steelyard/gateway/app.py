"""The gateway over HTTP: the OpenAI endpoints on loopback, the attempt's capability as API key.

*Consumes* requests of agents; *waits for* the engine, with a deadline, and for slow readers, with another;
*unblocked by* the engine's result or the client's leaving, which cancels the engine's work.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, EngineError, InputError, Refused, RunError
from steelyard.gateway.attempt_protocol import ATTEMPTS_PATH
from steelyard.gateway.attempts import AttemptEndpoint
from steelyard.gateway.capability import KeyRing
from steelyard.gateway.dialects import openai, openai_replies
from steelyard.gateway.service import Completion, Gateway, Overloaded
from steelyard.ids import IdSource
from steelyard.metrics import Counters
from steelyard.processes.http_port import HttpPort, PortOptions, bearer_key, read_body

_LOG = logging.getLogger(__name__)
_JSON = "application/json"
_TOO_MANY = 429

Chunks = openai_replies.ChatChunks | openai_replies.TextChunks
Endpoint = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Serve = Callable[[Callable[[str], None] | None], Awaitable[Completion]]


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``read_deadline_s``: for a whole request body.

    ``write_deadline_s``: how long a client may leave a streamed chunk unread before it counts as gone.
    """

    max_body_bytes: int = 8 << 20
    read_deadline_s: float = 30.0
    write_deadline_s: float = 30.0
    shutdown_s: float = 5.0


class HttpError(Exception):
    """An answer in the error form of OpenAI."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.status = status
        self.body = openai_replies.error_body(message, kind, param, code)
        self.headers = {} if retry_after_s is None else {"Retry-After": f"{max(1, round(retry_after_s))}"}
        super().__init__(message)


class GatewayServer:
    """Serves a gateway on one port.

    Args:
        port: 0 takes a free one, which :meth:`start` returns.
        model_name: what ``/v1/models`` lists. Requests may name any model; there is one policy.
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
        model_name: str = "steelyard-policy",
        limits: HttpLimits | None = None,
        attempts: AttemptEndpoint | None = None,
    ) -> None:
        self._gateway = gateway
        self._keys = keys
        self._ids = ids
        self._clock = clock
        self._counters = counters
        self._model_name = model_name
        self._limits = limits or HttpLimits()
        options = PortOptions(
            field="gateway.port",
            host=host,
            port=port,
            max_body_bytes=self._limits.max_body_bytes,
            shutdown_s=self._limits.shutdown_s,
        )
        self._http = HttpPort(self._answer, options)
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
        }
        if attempts is not None:
            self._endpoints["GET", ATTEMPTS_PATH] = attempts.check
            self._endpoints["POST", ATTEMPTS_PATH] = attempts.call

    async def start(self) -> str:
        """Listen; returns the base URL, which ends in ``/v1``.

        Raises:
            InputError: the port is in use or may not be bound.
        """
        return f"{await self._http.start()}/v1"

    async def stop(self) -> None:
        """Stop listening and end open requests."""
        await self._http.stop()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The endpoint's answer, or its failure in the form of OpenAI."""
        try:
            return await self._endpoints.get((request.method, request.path), self._unknown)(request)
        except Exception as error:  # noqa: BLE001 (a server answers every failure; _as_http logs those of ours)
            failure = self._as_http(error)
            self._counters.add(f"gateway.http.{failure.status}")
            return web.Response(
                body=msgspec.json.encode(failure.body),
                status=failure.status,
                content_type=_JSON,
                headers=failure.headers,
            )

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        attempt_id = self._attempt(request)
        body = openai.read_chat(await self._body(request))
        asked = openai.chat_request(body)
        wanted = self._wanted(body, logprobs=bool(body.logprobs))
        if body.stream:
            chunks = openai_replies.ChatChunks(self._ids.new("req"), wanted)
            return await self._stream(
                request, chunks, lambda on_text: self._gateway.complete_chat(attempt_id, asked, on_text)
            )
        completion = await self._gateway.complete_chat(attempt_id, asked)
        _require_room(completion)
        return _json(openai_replies.chat_reply(completion, wanted, self._shown(completion), self._gateway.text_of))

    async def _completion(self, request: web.BaseRequest) -> web.StreamResponse:
        attempt_id = self._attempt(request)
        body = openai.read_completion(await self._body(request))
        prompt, stop = openai.single_prompt(body), openai.stops(body)
        wanted = self._wanted(body, logprobs=body.logprobs is not None)

        async def serve(on_text: Callable[[str], None] | None) -> Completion:
            return await self._gateway.complete_prompt(
                attempt_id, prompt, max_tokens=body.max_tokens, stop=stop, seed=body.seed, on_text=on_text
            )

        if body.stream:
            return await self._stream(request, openai_replies.TextChunks(self._ids.new("req"), wanted), serve)
        completion = await serve(None)
        _require_room(completion)
        return _json(openai_replies.text_reply(completion, wanted, self._shown(completion), self._gateway.text_of))

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        self._attempt(request)
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "steelyard"}
        return _json(msgspec.json.encode({"object": "list", "data": [model]}))

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json(b'{"status":"ok"}')

    async def _unknown(self, request: web.BaseRequest) -> web.StreamResponse:
        message = f"Unknown request URL: {request.method} {request.path}"
        raise HttpError(404, message, "invalid_request_error", code="unknown_url")

    async def _stream(self, request: web.BaseRequest, chunks: Chunks, serve: Serve) -> web.StreamResponse:
        """Send pieces while they are sampled; the end mark goes out only once the turn is recorded.

        The status goes out with the first piece, so that a request that fails at once is answered as one.
        """
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        work = asyncio.ensure_future(serve(pieces.put_nowait))
        work.add_done_callback(lambda _: pieces.put_nowait(None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            while (piece := await pieces.get()) is not None:
                if not response.prepared:
                    await response.prepare(request)
                    await self._write(response, chunks.start())
                await self._write(response, chunks.text(piece))
            await self._end_stream(request, response, chunks, work)
        except (ConnectionError, TimeoutError):
            self._counters.add("gateway.http.reader_gone")
        finally:
            work.cancel()
            await asyncio.wait([work], timeout=self._limits.shutdown_s)
        return response

    async def _end_stream(
        self, request: web.BaseRequest, response: web.StreamResponse, chunks: Chunks, work: asyncio.Future[Completion]
    ) -> None:
        try:
            completion = work.result()
            _require_room(completion)
        except Exception as error:
            if not response.prepared:
                raise
            await self._write(response, openai_replies.event(self._as_http(error).body))
        else:
            if not response.prepared:
                await response.prepare(request)
                await self._write(response, chunks.start())
            await self._write(response, chunks.end(completion, self._shown(completion), self._gateway.text_of))
        await response.write_eof()

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        if data:
            async with asyncio.timeout(self._limits.write_deadline_s):
                await response.write(data)

    async def _body(self, request: web.BaseRequest) -> bytes:
        try:
            return await read_body(request, self._limits.read_deadline_s)
        except TimeoutError:
            message = f"The request body must arrive within {self._limits.read_deadline_s:.0f} s."
            raise HttpError(408, message, "invalid_request_error") from None

    def _attempt(self, request: web.BaseRequest) -> str:
        """The attempt whose key the request carries."""
        key = bearer_key(request)
        if key is None:
            message = "You didn't provide an API key: send the attempt's key as 'Authorization: Bearer KEY'."
            raise HttpError(401, message, "invalid_request_error")
        return self._keys.verify(key, self._clock.now_s())

    def _wanted(self, body: openai.ChatBody | openai.CompletionBody, *, logprobs: bool) -> openai_replies.Wanted:
        options = body.stream_options
        return openai_replies.Wanted(
            model=body.model,
            created_s=int(self._clock.now_s()),
            logprobs=logprobs,
            usage=options is not None and bool(options.include_usage),
        )

    def _shown(self, completion: Completion) -> tuple[int, ...]:
        token_ids = () if completion.turn is None else completion.turn.token_ids
        return token_ids[:-1] if token_ids and self._gateway.is_stop(token_ids[-1]) else token_ids

    def _as_http(self, error: Exception) -> HttpError:
        """The status and error object for each kind of failure."""
        match error:
            case HttpError():
                return error
            case openai.BadRequest():
                return HttpError(400, str(error), "invalid_request_error", param=error.param, code=error.code)
            case web.HTTPRequestEntityTooLarge():
                message = f"The request body must be at most {self._limits.max_body_bytes} bytes."
                return HttpError(413, message, "invalid_request_error", code="request_too_large")
            case InputError():
                return HttpError(400, str(error), "invalid_request_error")
            case Refused():
                return HttpError(401, str(error), "invalid_request_error", code="invalid_api_key")
            case Overloaded(is_attempts_fault=True):
                return _try_later(429, error, "rate_limit_exceeded", error.retry_after_s)
            case Overloaded():
                return _try_later(503, error, "overloaded", error.retry_after_s)
            case DeadlineExceeded():
                _LOG.warning("request failed: %s", error)
                return _try_later(503, error, "deadline_exceeded", 1.0)
            case RunError():
                _LOG.warning("request failed: %s", error)
                return _try_later(503, error, "unavailable", 1.0)
            case EngineError():
                _LOG.warning("request failed: %s", error)
                return HttpError(502, str(error), "server_error", code="engine_error")
            case _:
                _LOG.error("request failed", exc_info=error)
                return HttpError(500, "The gateway failed.", "server_error")


def _require_room(completion: Completion) -> None:
    if completion.reply.context_full:
        num_tokens = completion.reply.num_prompt_tokens
        message = f"This model's maximum context length leaves no room: your messages resulted in {num_tokens} tokens."
        raise HttpError(400, message, "invalid_request_error", param="messages", code="context_length_exceeded")


def _try_later(status: int, error: Exception, code: str, retry_after_s: float) -> HttpError:
    kind = "rate_limit_error" if status == _TOO_MANY else "server_error"
    return HttpError(status, str(error), kind, code=code, retry_after_s=retry_after_s)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type=_JSON)
