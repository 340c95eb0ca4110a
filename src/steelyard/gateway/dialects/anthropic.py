"""The Anthropic dialect: bodies of ``/v1/messages`` and ``/v1/messages/count_tokens`` to our records.

A user message may hold tool results and text: each result becomes a tool message, text between them a user message,
in the order in which they stand. Unknown parameters are refused as Anthropic refuses them; known ones that ask for what
cannot be kept are refused with their name. ``temperature``, ``top_p`` and ``top_k`` are accepted and not used: the
attempt's binding says how to sample (see ``gateway.service``). Parameters that change no token (``metadata``,
``cache_control``, ``service_tier``, ...) are accepted and ignored.
"""

from typing import Any, Literal

import msgspec

from steelyard.gateway.dialects.anthropic_replies import MessageReplies
from steelyard.gateway.dialects.base import Asked, Desk, decode_body, refuse_given
from steelyard.gateway.failures import Failure, bad_request
from steelyard.types import ChatRequest, Message, MustCall, ToolCall, ToolSpec


class Block(msgspec.Struct, kw_only=True):
    """A content block; which fields it has depends on ``type``. ``input`` is the JSON text as it was sent."""

    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: "str | list[Block] | None" = None


class MessageIn(msgspec.Struct):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolIn(msgspec.Struct):
    """A tool; those that Anthropic runs itself have a ``type`` of their own and cannot be served."""

    name: str
    input_schema: dict[str, Any] = msgspec.field(default_factory=dict)
    description: str = ""
    type: str | None = None


class ToolChoiceIn(msgspec.Struct):
    """Whether to call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingIn(msgspec.Struct):
    """Whether reasoning is to come in blocks of its own."""

    type: Literal["enabled", "disabled", "adaptive"]


class CountBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request to count tokens."""

    model: str
    messages: list[MessageIn]
    system: str | list[Block] | None = None
    tools: list[ToolIn] | None = None
    tool_choice: ToolChoiceIn | None = None
    thinking: ThinkingIn | None = None
    output_config: dict[str, Any] | None = None
    cache_control: Any = None
    speed: Any = None
    mcp_servers: Any = None
    context_management: Any = None


class MessagesBody(CountBody, forbid_unknown_fields=True, kw_only=True):
    """The body of a request for a message."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    container: Any = None
    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    diagnostics: Any = None


_MESSAGES = msgspec.json.Decoder(MessagesBody)
_COUNT = msgspec.json.Decoder(CountBody)


def read_messages(data: bytes, desk: Desk) -> Asked:
    """What the body of a request for a message asks for.

    Raises:
        Failure: it is no such body, or asks for what cannot be honoured.
    """
    body = decode_body(_MESSAGES, data, _unknown)
    if body.max_tokens < 1:
        raise bad_request(f"max_tokens: must be at least 1, not {body.max_tokens}", "max_tokens")
    if not all(text.strip() for text in body.stop_sequences or ()):
        raise bad_request("stop_sequences: each must hold something else than white space", "stop_sequences")
    if body.temperature is not None and not 0.0 <= body.temperature <= 1.0:
        raise bad_request(f"temperature: must be from 0 to 1, not {body.temperature}", "temperature")
    refuse_given(container=body.container)
    request = msgspec.structs.replace(
        _chat_request(body, desk), max_tokens=body.max_tokens, stop=tuple(body.stop_sequences or ())
    )
    shows_thinking = body.thinking is not None and body.thinking.type != "disabled"
    replies = MessageReplies(body.model, desk, shows_thinking=shows_thinking)
    return Asked(jobs=(request,), stream=body.stream, replies=replies)


def read_count(data: bytes, desk: Desk) -> ChatRequest:
    """The request whose prompt is to be counted.

    Raises:
        Failure: it is no such body, or asks for what cannot be honoured.
    """
    return _chat_request(decode_body(_COUNT, data, _unknown), desk)


def _unknown(name: str) -> Failure:
    return bad_request(f"{name}: Extra inputs are not permitted", name)


def _chat_request(body: CountBody, desk: Desk) -> ChatRequest:
    refuse_given(mcp_servers=body.mcp_servers, context_management=body.context_management)
    if (body.output_config or {}).get("format") is not None:
        raise bad_request("output_config.format is not supported: sampling is not constrained", "output_config")
    desk.models.check(body.model)
    messages = [] if body.system is None else [Message(role="system", content=_text("system", body.system))]
    for index, message in enumerate(body.messages):
        messages += _messages(f"messages.{index}.content", message)
    if messages and messages[-1].role == "assistant":
        raise bad_request("messages: the last must not be of the assistant: its beginning cannot be given", "messages")
    tools = tuple(_tool(index, tool) for index, tool in enumerate(body.tools or ()))
    choice = body.tool_choice or ToolChoiceIn(type="auto")
    return ChatRequest(
        messages=tuple(messages),
        tools=() if choice.type == "none" else tools,
        must_call=_must_call(choice, tools),
        single_call=choice.disable_parallel_tool_use,
    )


def _must_call(choice: ToolChoiceIn, tools: tuple[ToolSpec, ...]) -> MustCall | None:
    if choice.type not in ("any", "tool"):
        return None
    if not tools:
        raise bad_request(f"tool_choice: {choice.type} needs tools", "tool_choice")
    if choice.type == "any":
        return MustCall()
    if choice.name not in {tool.name for tool in tools}:
        raise bad_request(f"tool_choice.name: {choice.name!r} is not among the tools", "tool_choice")
    return MustCall(tool=choice.name)


def _tool(index: int, tool: ToolIn) -> ToolSpec:
    if tool.type not in (None, "custom"):
        raise bad_request(f"tools.{index}.type: {tool.type!r} is not served, only tools of your own", "tools")
    return ToolSpec(name=tool.name, description=tool.description, parameters=tool.input_schema)


def _messages(path: str, message: MessageIn) -> list[Message]:
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_assistant(path, message.content)]
    messages: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(message.content):
        if block.type == "tool_result" and message.role == "user":
            messages += _user(message.role, texts)
            texts = []
            content = _text(f"{path}.{index}.content", block.content or "")
            messages.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
        else:
            texts.append(_text_of(f"{path}.{index}", block))
    return [*messages, *_user(message.role, texts)]


def _user(role: str, texts: list[str]) -> list[Message]:
    return [Message(role=role, content="\n".join(texts))] if texts else []


def _assistant(path: str, blocks: list[Block]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            arguments = bytes(block.input).decode("utf-8")
            calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
        else:
            texts.append(_text_of(f"{path}.{index}", block))
    reasoning = "\n".join(thoughts) if thoughts else None
    return Message(role="assistant", content="".join(texts) or None, tool_calls=tuple(calls), reasoning=reasoning)


def _text(path: str, content: str | list[Block]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(f"{path}.{index}", block) for index, block in enumerate(content))


def _text_of(path: str, block: Block) -> str:
    if block.type != "text":
        raise bad_request(f"{path}.type: {block.type!r} cannot be shown to the policy, only text can", path)
    return block.text
