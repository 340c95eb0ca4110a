"""The OpenAI dialect: bodies of ``/v1/chat/completions`` and ``/v1/completions`` to our records.

Unknown parameters are refused as OpenAI refuses them. A known parameter that would change what is sampled, and
that we cannot honour, is refused with its name. ``temperature`` and ``top_p`` are accepted and not used: the
attempt's binding says how to sample (see ``gateway.service``). Parameters that change no token (``user``,
``metadata``, ``store``, ...) are accepted and ignored.
"""

from typing import Any, Literal

import msgspec

from steelyard.gateway.dialects.base import Asked, Desk, decode_body, refuse_given
from steelyard.gateway.dialects.openai_replies import ChatReplies, TextReplies, Wanted
from steelyard.gateway.failures import Failure, bad_request
from steelyard.gateway.planning import TextRequest
from steelyard.types import ChatRequest, Message, MustCall, ToolCall, ToolSpec

_TEXT_PARTS = ("text", "refusal")
_MAX_STOPS = 4
_MAX_CHOICES = 128


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
    reasoning_content: str | None = None


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
    moderation: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    service_tier: Any = None
    store: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None


class CompletionBody(_Common, forbid_unknown_fields=True, kw_only=True):
    """The body of a plain completion request: one prompt, as text or as token ids."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)


def read_chat(data: bytes, desk: Desk) -> Asked:
    """What the body of a chat request asks for: one job for each of ``n`` choices.

    Raises:
        Failure: it is no such body, or asks for what cannot be honoured.
    """
    body = decode_body(_CHAT, data, _unknown)
    _refuse_common(body)
    refuse_given(
        audio=body.audio,
        prediction=body.prediction,
        functions=body.functions,
        function_call=body.function_call,
        web_search_options=body.web_search_options,
        moderation=body.moderation,
    )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs requires logprobs to be true", "top_logprobs")
    if body.top_logprobs:
        raise bad_request("top_logprobs must be 0: only the sampled token's log-probability is kept", "top_logprobs")
    if body.modalities not in (None, ["text"]):
        raise bad_request(f"modalities must be ['text'], not {body.modalities}", "modalities")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise bad_request("response_format must be of type text: sampling is not constrained", "response_format")
    desk.models.check(body.model)
    jobs = (chat_request(body),) * (body.n or 1)
    replies = ChatReplies(_wanted(body, desk, logprobs=bool(body.logprobs)), desk)
    return Asked(jobs=jobs, stream=bool(body.stream), replies=replies)


def read_completion(data: bytes, desk: Desk) -> Asked:
    """What the body of a plain completion request asks for: ``n`` jobs for each prompt.

    Raises:
        Failure: it is no such body, or asks for what cannot be honoured.
    """
    body = decode_body(_COMPLETION, data, _unknown)
    _refuse_common(body)
    refuse_given(suffix=body.suffix)
    if body.echo:
        raise bad_request("echo must be false", "echo")
    if body.best_of not in (None, body.n or 1):
        raise bad_request(f"best_of must be n, not {body.best_of}: all that is sampled is returned", "best_of")
    if body.logprobs:
        raise bad_request("logprobs must be 0: only the sampled token's log-probability is kept", "logprobs")
    desk.models.check(body.model)
    jobs = tuple(
        TextRequest(prompt=prompt, max_tokens=body.max_tokens, stop=stops(body), seed=body.seed)
        for prompt in prompts(body)
        for _ in range(body.n or 1)
    )
    replies = TextReplies(_wanted(body, desk, logprobs=body.logprobs is not None), desk)
    return Asked(jobs=jobs, stream=bool(body.stream), replies=replies)


def chat_request(body: ChatBody) -> ChatRequest:
    """The chat request that a body means.

    Raises:
        Failure: a message holds what cannot be shown to the policy.
    """
    tools = tuple(_tool(tool) for tool in body.tools or ())
    choice = _tool_choice(body.tool_choice, tools)
    return ChatRequest(
        messages=tuple(_message(index, message) for index, message in enumerate(body.messages)),
        tools=() if choice == "none" else tools,
        must_call=choice if isinstance(choice, MustCall) else None,
        single_call=body.parallel_tool_calls is False,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        stop=stops(body),
        seed=body.seed,
    )


def _tool_choice(value: Any, tools: tuple[ToolSpec, ...]) -> MustCall | Literal["auto", "none"]:
    """What ``tool_choice`` asks for: a word, or a function by its name."""
    if value in (None, "auto"):
        return "auto"
    if value == "none":
        return "none"
    if value == "required":
        if not tools:
            raise bad_request("tool_choice required needs tools", "tool_choice")
        return MustCall()
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise bad_request("tool_choice must be auto, none, required or a function", "tool_choice")
    if name not in {tool.name for tool in tools}:
        raise bad_request(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
    return MustCall(tool=name)


def prompts(body: CompletionBody) -> tuple[str | tuple[int, ...], ...]:
    """The prompts of a plain completion request: a text, token ids, or a list of either.

    Raises:
        Failure: there is none, or the list mixes them.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        return (prompt,)
    texts = tuple(entry for entry in prompt if isinstance(entry, str))
    if texts and len(texts) == len(prompt):
        return texts
    token_ids = tuple(entry for entry in prompt if isinstance(entry, int))
    if token_ids and len(token_ids) == len(prompt):
        return (token_ids,)
    lists = tuple(tuple(entry) for entry in prompt if isinstance(entry, list))
    if lists and len(lists) == len(prompt):
        return lists
    raise bad_request("prompt must be a text, a list of token ids, or a list of texts or of such lists", "prompt")


def stops(body: ChatBody | CompletionBody) -> tuple[str, ...]:
    """Stop strings.

    Raises:
        Failure: one is empty, or there are more than four.
    """
    found = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(found) > _MAX_STOPS or not all(found):
        raise bad_request(f"stop must be at most {_MAX_STOPS} strings, none of them empty", "stop")
    return found


def _unknown(name: str) -> Failure:
    return bad_request(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")


def _wanted(body: ChatBody | CompletionBody, desk: Desk, *, logprobs: bool) -> Wanted:
    options = body.stream_options
    return Wanted(
        model=body.model,
        created_s=int(desk.now_s),
        num_choices=body.n or 1,
        logprobs=logprobs,
        usage=options is not None and bool(options.include_usage),
    )


def _refuse_common(body: ChatBody | CompletionBody) -> None:
    if body.n is not None and not 1 <= body.n <= _MAX_CHOICES:
        raise bad_request(f"n must be from 1 to {_MAX_CHOICES}, not {body.n}", "n")
    if body.frequency_penalty:
        raise bad_request("frequency_penalty must be 0: it would change what is sampled", "frequency_penalty")
    if body.presence_penalty:
        raise bad_request("presence_penalty must be 0: it would change what is sampled", "presence_penalty")
    if body.logit_bias:
        raise bad_request("logit_bias must be empty: it would change what is sampled", "logit_bias")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed when stream is true", "stream_options")
    if body.temperature is not None and not 0.0 <= body.temperature <= 2.0:
        raise bad_request(f"temperature must be between 0 and 2, not {body.temperature}", "temperature")
    if body.top_p is not None and not 0.0 < body.top_p <= 1.0:
        raise bad_request(f"top_p must be above 0 and at most 1, not {body.top_p}", "top_p")
    stops(body)


def _message(index: int, message: MessageIn) -> Message:
    calls = tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    )
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_request("a tool message must have tool_call_id", f"messages[{index}].tool_call_id")
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=_content(index, message.content),
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning_content if message.role == "assistant" else None,
    )


def _content(index: int, content: str | list[Part] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT_PARTS:
            raise bad_request(f"a content part must be text, not {part.type}", f"messages[{index}].content")
    return "".join(part.text or part.refusal for part in content)


def _tool(tool: ToolIn) -> ToolSpec:
    function = tool.function
    return ToolSpec(name=function.name, description=function.description or "", parameters=function.parameters or {})
