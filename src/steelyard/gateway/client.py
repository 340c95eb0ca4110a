"""The gateway from another machine: what a harness worker needs of it, over HTTP.

Opening, sealing and discarding an attempt may be repeated, and are, until an answer arrives. A model call is sent again
only where it cannot have been sampled: the connection was refused, or the gateway said that it is too busy. Where the
answer got lost on its way the call has failed, for asking again would record a second turn.

*Consumes* calls; *waits for* the gateway, each with a deadline; *unblocked by* its answer; *produces* replies and
sealed traces.
"""

import asyncio
import random
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from steelyard.clock import Clock
from steelyard.errors import DeadlineExceeded, EngineError, InputError, Refused, RemoteFailed, SteelyardError
from steelyard.gateway import attempt_protocol as p
from steelyard.gateway.dialects.base import POLICY_NAME
from steelyard.metrics import Counters
from steelyard.processes.http_requests import HttpRequests, RetrySettings, Sleep
from steelyard.types import (
    AttemptStanding,
    ChatReply,
    ChatRequest,
    EndReason,
    FinishReason,
    Message,
    Record,
    SealedTrace,
    ToolCall,
    ToolRecord,
    ToolSpec,
)

_CHAT_PATH = "/v1/chat/completions"
_ENCODER = msgspec.msgpack.Encoder()
_RESULT: msgspec.msgpack.Decoder[p.AttemptResult] = msgspec.msgpack.Decoder(p.AttemptResult)
# The gateway says these before it has asked the engine for anything.
_NOT_BEGUN = frozenset({"rate_limit_exceeded", "overloaded"})
_FINISH = {"stop": FinishReason.STOP, "tool_calls": FinishReason.STOP, "length": FinishReason.LENGTH}

ResultT = TypeVar("ResultT", bound=Record)


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Said(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] = []


class _Choice(msgspec.Struct):
    message: _Said
    finish_reason: str


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Extra(msgspec.Struct):
    num_malformed_calls: int = 0


class _Completion(msgspec.Struct):
    """The part of an OpenAI reply that a harness needs; ``steelyard`` is an addition of ours."""

    id: str
    choices: list[_Choice]
    usage: _Usage
    steelyard: _Extra = msgspec.field(default_factory=_Extra)


class _ErrorObject(msgspec.Struct):
    message: str
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorObject


_COMPLETION = msgspec.json.Decoder(_Completion)
_ERROR = msgspec.json.Decoder(_ErrorBody)


class GatewayClient:
    """A ``ChatClient`` and a ``TraceSealer``. Use as an async context manager.

    Args:
        url: base URL of the gateway, with or without ``/v1``.
        key: of a worker, as for the coordinator.
        clock: the one by which deadlines of model calls are given.
        counters: ``gateway_client.retried`` counts tries after the first.
        draw: of the random share of the back-off.
        sleep: how the back-off is waited out.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        clock: Clock,
        counters: Counters,
        draw: random.Random,
        settings: RetrySettings | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._clock = clock
        self._counters = counters
        self._draw = draw
        self._settings = settings or RetrySettings()
        self._sleep = sleep
        headers = {
            "Authorization": f"Bearer {key}",
            p.VERSION_HEADER: str(p.PROTOCOL_VERSION),
            "Content-Type": p.CONTENT_TYPE,
        }
        self._requests = HttpRequests(
            self._url, "gateway", headers, counters=counters, draw=draw, settings=self._settings, sleep=sleep
        )
        self._open_http: aiohttp.ClientSession | None = None
        self._keys: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        # Deadlines are set for each request; connections are bounded by the attempts of the worker.
        self._open_http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open_http is not None:
            await self._open_http.close()

    async def check(self) -> str:
        """Whether this is a gateway that speaks our version and takes our key; the name in the key.

        Raises:
            ProtocolMismatch: it speaks another version.
            Refused: it does not take the key.
            DeadlineExceeded: it does not answer.
        """
        data = await self._requests.send(self._http, "GET", p.ATTEMPTS_PATH)
        return _expect(p.Known, data).worker_id

    async def chat(self, attempt_id: str, request: ChatRequest, deadline_at_s: float) -> ChatReply:
        """One model call. Where the context was full, the numbers of tokens are 0.

        Raises:
            Refused: the attempt is not alive.
            InputError: the request is not one that the gateway serves.
            DeadlineExceeded: it was not answered in time.
            EngineError, RemoteFailed: it failed; nothing of it may be used.
        """
        data = msgspec.json.encode(_chat_body(request))
        limit_s = max(0.0, deadline_at_s - self._clock.now_s())
        try:
            async with asyncio.timeout(limit_s):
                return await self._chat(attempt_id, data, limit_s)
        except TimeoutError:
            raise DeadlineExceeded("a model call", (self._url,), limit_s) from None

    async def access(self, attempt_id: str) -> tuple[str, str]:
        """Where an agent program calls the policy for a live attempt: this gateway's address without ``/v1``, a key.

        Raises:
            Refused: the attempt is not alive.
            DeadlineExceeded, RemoteFailed: nobody can say.
        """
        return self._url, await self._api_key(attempt_id)

    async def standing(self, attempt_id: str) -> AttemptStanding:
        """How far the model calls of a live attempt have come. Raises as :meth:`access`."""
        return (await self._call(p.Stands, p.AskStanding(attempt_id=attempt_id))).standing

    async def seal(self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...]) -> SealedTrace:
        """Close the trace; it is durable when this returns.

        Raises:
            Refused: the attempt is not alive, or was sealed with another ending.
            DeadlineExceeded, RemoteFailed, IntegrityError: there is no sealed trace, or nobody can say.
        """
        call = p.SealAttempt(attempt_id=attempt_id, end_reason=end_reason, tools=tools)
        trace = (await self._call(p.Sealed, call)).trace
        self._keys.pop(attempt_id, None)
        return trace

    async def discard(self, attempt_id: str) -> int:
        """Throw an attempt's turns away; how many sampled tokens were lost with them.

        0 where the attempt is over: the coordinator ended its recording with it, and has counted them.

        Raises:
            DeadlineExceeded, RemoteFailed: nobody can say.
        """
        self._keys.pop(attempt_id, None)
        try:
            return (await self._call(p.Discarded, p.DiscardAttempt(attempt_id=attempt_id))).num_tokens
        except Refused as error:
            self._counters.add(f"gateway_client.discard_refused.{error.reason}")
            return 0

    # --- machinery --------------------------------------------------------------------------------

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._open_http is not None, "the client must be entered before it is used"
        return self._open_http

    async def _call(self, kind: type[ResultT], call: p.AttemptCall) -> ResultT:
        return _expect(kind, await self._requests.send(self._http, "POST", p.ATTEMPTS_PATH, _ENCODER.encode(call)))

    async def _api_key(self, attempt_id: str) -> str:
        key = self._keys.get(attempt_id)
        if key is None:
            key = (await self._call(p.Opened, p.OpenAttempt(attempt_id=attempt_id))).api_key
            self._keys[attempt_id] = key
        return key

    async def _chat(self, attempt_id: str, data: bytes, limit_s: float) -> ChatReply:
        headers = {"Authorization": f"Bearer {await self._api_key(attempt_id)}", "Content-Type": "application/json"}
        num_tries = 0
        while True:
            try:
                async with self._http.post(
                    self._url + _CHAT_PATH, data=data, headers=headers, allow_redirects=False
                ) as response:
                    body, status = await response.read(), response.status
            except aiohttp.ClientConnectorError:
                pass  # nobody has heard of it
            except (aiohttp.ClientError, OSError) as error:
                raise RemoteFailed(f"the answer to a model call was lost: {type(error).__name__}: {error}") from error
            else:
                outcome = _reply(status, body, limit_s)
                if outcome is not None:
                    return outcome
            num_tries += 1
            self._counters.add("gateway_client.retried")
            await self._sleep(self._settings.wait_s(num_tries, self._draw))


def _chat_body(request: ChatRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"model": POLICY_NAME, "messages": [_message(one) for one in request.messages]}
    if request.tools:
        body["tools"] = [_tool(spec) for spec in request.tools]
    if request.must_call is not None:
        tool = request.must_call.tool
        body["tool_choice"] = "required" if tool is None else {"type": "function", "function": {"name": tool}}
    if request.single_call:
        body["parallel_tool_calls"] = False
    if request.max_tokens is not None:
        body["max_completion_tokens"] = request.max_tokens
    if request.stop:
        body["stop"] = list(request.stop)
    if request.seed is not None:
        body["seed"] = request.seed
    return body


def _message(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body


def _tool(spec: ToolSpec) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return {"type": "function", "function": function}


def _reply(status: int, body: bytes, limit_s: float) -> ChatReply | None:
    """The reply in a gateway's answer; None where the call was not begun and may be sent again.

    Raises:
        SteelyardError: what went wrong.
    """
    try:
        if status == 200:
            return _completion(_COMPLETION.decode(body))
        said = _ERROR.decode(body).error
    except msgspec.MsgspecError as error:
        raise RemoteFailed(f"a model call was answered with status {status} and no answer of a gateway") from error
    if said.code in _NOT_BEGUN:
        return None
    if said.code == "context_length_exceeded":
        return ChatReply(
            request_id="",
            message=Message(role="assistant", content=""),
            finish_reason=FinishReason.LENGTH,
            num_prompt_tokens=0,
            num_completion_tokens=0,
            context_full=True,
        )
    raise _error(status, said, limit_s)


def _error(status: int, said: _ErrorObject, limit_s: float) -> SteelyardError:
    if status == 401:
        return Refused("late", said.message)
    if said.code == "deadline_exceeded":
        return DeadlineExceeded(f"a model call ({said.message})", ("gateway",), limit_s)
    if said.code == "engine_error":
        return EngineError(said.message)
    if 400 <= status < 500:
        return InputError(said.message)
    return RemoteFailed(f"a model call failed with status {status}: {said.message}")


def _completion(said: _Completion) -> ChatReply:
    if len(said.choices) != 1 or said.choices[0].finish_reason not in _FINISH:
        reasons = [choice.finish_reason for choice in said.choices]
        raise RemoteFailed(f"a reply must have one choice that ended by {' or '.join(_FINISH)}, got {reasons}")
    (choice,) = said.choices
    calls = tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in choice.message.tool_calls
    )
    return ChatReply(
        request_id=said.id.removeprefix("chatcmpl-"),
        message=Message(role="assistant", content=choice.message.content, tool_calls=calls),
        finish_reason=_FINISH[choice.finish_reason],
        num_prompt_tokens=said.usage.prompt_tokens,
        num_completion_tokens=said.usage.completion_tokens,
        num_malformed_calls=said.steelyard.num_malformed_calls,
    )


def _expect(kind: type[ResultT], data: bytes) -> ResultT:
    try:
        result = _RESULT.decode(data)
    except msgspec.MsgspecError as error:
        raise RemoteFailed(f"the gateway must answer with a result of its protocol: {error}") from error
    if not isinstance(result, kind):
        raise RemoteFailed(f"the gateway must answer with {kind.__name__}, got {type(result).__name__}")
    return result
