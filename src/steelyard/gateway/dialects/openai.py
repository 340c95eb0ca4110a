"""The OpenAI dialect: bodies of ``/v1/chat/completions`` and ``/v1/completions`` to our records.

Unknown parameters are refused as OpenAI refuses them. A known parameter that would change what is sampled, and
that we cannot honour, is refused with its name. ``temperature`` and ``top_p`` are accepted and not used: the
attempt's binding says how to sample (see ``gateway.service``). Parameters that change no token (``user``,
``metadata``, ``store``, ...) are accepted and ignored.
"""

import re
from typing import Any, Literal, TypeVar

import msgspec

from steelyard.types import ChatRequest, Message, ToolCall, ToolSpec

_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<name>[^`]*)`")
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_TEXT_PARTS = ("text", "refusal")
_MAX_STOPS = 4


class BadRequest(Exception):
    """A request that OpenAI would answer with status 400. ``param`` and ``code`` go into the error object."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class Part(msgspec.Struct):
    """A part of a message's content; only text can be served."""

    type: str
    text: str = ""
    refusal: str = ""


class FunctionIn(msgspec.Struct):
    """The function of a tool call, arguments as JSON text."""

    name: str
    arguments: str


class ToolCallIn(msgspec.Struct):
    """A tool call of an assistant message that comes back to us."""

    id: str
    function: FunctionIn


class MessageIn(msgspec.Struct):
    """A message; fields that clients send back from our replies are tolerated."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCallIn] | None = None
    tool_call_id: str | None = None


class FunctionSpec(msgspec.Struct):
    """A function that may be called; ``parameters`` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolIn(msgspec.Struct):
    """A tool."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class StreamOptions(msgspec.Struct):
    """``include_usage`` asks for a last chunk with token counts."""

    include_usage: bool | None = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: Any = None
    metadata: Any = None


class ChatBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """The body of a chat request."""

    messages: list[MessageIn]
    tools: list[ToolIn] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    service_tier: Any = None
    store: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None


class CompletionBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """The body of a plain completion request: one prompt, as text or as token ids."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


Body = TypeVar("Body", ChatBody, CompletionBody)
_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)


def read_chat(data: bytes) -> ChatBody:
    """Decode and check the body of a chat request.

    Raises:
        BadRequest: it is not one, or asks for what cannot be honoured.
    """
    body = _decode(_CHAT, data)
    _refuse_common(body)
    _refuse_given(
        audio=body.audio,
        prediction=body.prediction,
        functions=body.functions,
        function_call=body.function_call,
        web_search_options=body.web_search_options,
    )
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs requires logprobs to be true", "top_logprobs")
    if body.top_logprobs:
        raise BadRequest("top_logprobs must be 0: only the sampled token's log-probability is kept", "top_logprobs")
    if body.modalities not in (None, ["text"]):
        raise BadRequest(f"modalities must be ['text'], not {body.modalities}", "modalities")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise BadRequest("response_format must be of type text: sampling is not constrained", "response_format")
    if body.tool_choice not in (None, "auto", "none"):
        raise BadRequest("tool_choice must be auto or none: sampling is not constrained", "tool_choice")
    return body


def read_completion(data: bytes) -> CompletionBody:
    """Decode and check the body of a plain completion request.

    Raises:
        BadRequest: it is not one, or asks for what cannot be honoured.
    """
    body = _decode(_COMPLETION, data)
    _refuse_common(body)
    _refuse_given(suffix=body.suffix)
    if body.echo:
        raise BadRequest("echo must be false", "echo")
    if body.best_of not in (None, 1):
        raise BadRequest(f"best_of must be 1, not {body.best_of}", "best_of")
    if body.logprobs:
        raise BadRequest("logprobs must be 0: only the sampled token's log-probability is kept", "logprobs")
    return body


def chat_request(body: ChatBody) -> ChatRequest:
    """The chat request that a body means.

    Raises:
        BadRequest: a message holds what cannot be shown to the policy.
    """
    has_tools = body.tools and body.tool_choice != "none"
    return ChatRequest(
        messages=tuple(_message(index, message) for index, message in enumerate(body.messages)),
        tools=tuple(_tool(tool) for tool in body.tools or ()) if has_tools else (),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        stop=stops(body),
        seed=body.seed,
    )


def single_prompt(body: CompletionBody) -> str | tuple[int, ...]:
    """The one prompt of a plain completion request.

    Raises:
        BadRequest: there is not exactly one.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    if len(prompt) == 1 and isinstance(prompt[0], list):
        return tuple(prompt[0])
    token_ids = tuple(token for token in prompt if isinstance(token, int))
    if not token_ids or len(token_ids) != len(prompt):
        raise BadRequest("prompt must be one text or one list of token ids", "prompt")
    return token_ids


def stops(body: ChatBody | CompletionBody) -> tuple[str, ...]:
    """Stop strings.

    Raises:
        BadRequest: one is empty, or there are more than four.
    """
    found = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(found) > _MAX_STOPS or not all(found):
        raise BadRequest(f"stop must be at most {_MAX_STOPS} strings, none of them empty", "stop")
    return found


def _decode(decoder: msgspec.json.Decoder[Body], data: bytes) -> Body:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _validation(str(error)) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}") from error


def _validation(text: str) -> BadRequest:
    unknown = _UNKNOWN_FIELD.search(text)
    if unknown is not None:
        name = unknown["name"]
        return BadRequest(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    path = _PATH.search(text)
    return BadRequest(text, None if path is None else path["path"], "invalid_type")


def _refuse_common(body: ChatBody | CompletionBody) -> None:
    if body.n not in (None, 1):
        raise BadRequest(f"n must be 1, not {body.n}: every model call is one recorded turn", "n")
    if body.frequency_penalty:
        raise BadRequest("frequency_penalty must be 0: it would change what is sampled", "frequency_penalty")
    if body.presence_penalty:
        raise BadRequest("presence_penalty must be 0: it would change what is sampled", "presence_penalty")
    if body.logit_bias:
        raise BadRequest("logit_bias must be empty: it would change what is sampled", "logit_bias")
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options is only allowed when stream is true", "stream_options")
    if body.temperature is not None and not 0.0 <= body.temperature <= 2.0:
        raise BadRequest(f"temperature must be between 0 and 2, not {body.temperature}", "temperature")
    if body.top_p is not None and not 0.0 < body.top_p <= 1.0:
        raise BadRequest(f"top_p must be above 0 and at most 1, not {body.top_p}", "top_p")
    stops(body)


def _refuse_given(**values: Any) -> None:
    for name, value in values.items():
        if value is not None:
            raise BadRequest(f"{name} is not supported", name, "unsupported_parameter")


def _message(index: int, message: MessageIn) -> Message:
    calls = tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    )
    if message.role == "tool" and message.tool_call_id is None:
        raise BadRequest("a tool message must have tool_call_id", f"messages[{index}].tool_call_id")
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=_content(index, message.content),
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _content(index: int, content: str | list[Part] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT_PARTS:
            raise BadRequest(f"a content part must be text, not {part.type}", f"messages[{index}].content")
    return "".join(part.text or part.refusal for part in content)


def _tool(tool: ToolIn) -> ToolSpec:
    function = tool.function
    return ToolSpec(name=function.name, description=function.description or "", parameters=function.parameters or {})
