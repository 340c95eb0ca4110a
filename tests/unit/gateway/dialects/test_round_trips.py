"""A conversation that goes out in a dialect and comes back in it is the same conversation."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from steelyard.gateway.dialects import anthropic, openai
from steelyard.gateway.dialects.base import Asked
from steelyard.gateway.planning import normal_messages
from steelyard.gateway.service import Completion
from steelyard.testing.gateway import make_desk
from steelyard.types import ChatReply, ChatRequest, FinishReason, Message, ToolCall, ToolSpec

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SAID = st.one_of(
    TEXT, TEXT.map(lambda text: f"<think>\nwhy\n</think>\n\n{text}"), TEXT.map(lambda text: f"<think>{text}")
)
NAME = st.text("abc_", min_size=1, max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT, lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
ARGUMENTS = st.dictionaries(NAME, JSON, max_size=2).map(lambda value: msgspec.json.encode(value).decode())
CALL = st.builds(ToolCall, id=NAME, name=NAME, arguments=ARGUMENTS)
REPLY = st.builds(
    lambda content, calls, reasoning: normal_messages(
        (Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning),)
    )[0],
    SAID,
    st.lists(CALL, max_size=2).map(tuple),
    st.none() | st.text("why \n", min_size=1, max_size=5),
)
TOOL = st.builds(ToolSpec, name=NAME, description=TEXT, parameters=st.just({"type": "object"}))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """A system text, then turns of the user or of tools, each with our reply; the user has the last word."""
    messages = [Message(role="system", content=draw(TEXT))]
    for _ in range(draw(st.integers(0, 3))):
        messages.append(Message(role="user", content=draw(TEXT)))
        reply = draw(REPLY)
        messages.append(reply)
        results = [Message(role="tool", content=draw(TEXT), tool_call_id=call.id) for call in reply.tool_calls]
        messages += results
    return [*messages, Message(role="user", content=draw(TEXT))]


def completion(message: Message) -> Completion:
    """``message`` as a reply of the policy."""
    reply = ChatReply(
        request_id="req_1",
        message=message,
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=1,
        num_completion_tokens=1,
    )
    return Completion(reply=reply, turn=None)


def said(asked: Asked, message: Message) -> dict[str, Any]:
    """The JSON of ``message`` as the dialect returns it."""
    body: dict[str, Any] = msgspec.json.decode(asked.replies.whole([completion(message)]))
    return body


def streamed(asked: Asked, message: Message, cuts: Sequence[int]) -> list[dict[str, Any]]:
    """The data of all events of ``message``, its content in pieces."""
    content = message.content or ""
    bounds = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    data = asked.replies.start(0, 1)
    if message.reasoning:
        data += asked.replies.reasoning(0, message.reasoning)
    for begin, end in itertools.pairwise(bounds):
        data += asked.replies.text(0, content[begin:end])
    data += asked.replies.end(0, completion(message)) + asked.replies.close()
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n") if line.startswith("data: {")]
    return [msgspec.json.decode(line) for line in lines]


# --- OpenAI -----------------------------------------------------------------------------------------------------------


def read_openai(messages: list[dict[str, Any]], tools: Sequence[ToolSpec] = ()) -> Asked:
    shown = [{"type": "function", "function": tool_fields(tool, "parameters")} for tool in tools]
    return openai.read_chat(msgspec.json.encode({"model": "m", "messages": messages, "tools": shown}), make_desk())


def tool_fields(tool: ToolSpec, parameters: str) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, parameters: tool.parameters}


def openai_message(message: Message) -> dict[str, Any]:
    if message.role == "assistant":
        reply: dict[str, Any] = said(read_openai([]), message)["choices"][0]["message"]
        return reply
    shown = {"role": message.role, "content": message.content}
    return shown if message.tool_call_id is None else {**shown, "tool_call_id": message.tool_call_id}


@given(conversations(), st.lists(TOOL, max_size=2))
def test_a_conversation_survives_the_dialect_of_openai(messages: list[Message], tools: list[ToolSpec]) -> None:
    (request,) = read_openai([openai_message(message) for message in messages], tools).jobs
    assert isinstance(request, ChatRequest)
    assert normal_messages(request.messages) == normal_messages(tuple(messages))
    assert request.tools == tuple(tools)


@given(REPLY, st.lists(st.integers(0, 30), max_size=3))
def test_a_stream_of_openai_says_what_the_whole_reply_says(message: Message, cuts: list[int]) -> None:
    deltas = [event["choices"][0]["delta"] for event in streamed(read_openai([]), message, cuts)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta.get("content", "") for delta in deltas) == (message.content or "")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (message.reasoning or "")
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [
        (call.id, call.arguments) for call in message.tool_calls
    ]


# --- Anthropic --------------------------------------------------------------------------------------------------------


def read_anthropic(messages: list[dict[str, Any]], system: str = "", tools: Sequence[ToolSpec] = ()) -> Asked:
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": system,
        "messages": messages,
        "tools": [tool_fields(tool, "input_schema") for tool in tools],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    return anthropic.read_messages(msgspec.json.encode(body), make_desk())


def anthropic_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As a client keeps them: results of tools in one message of the user, with the user's own text after them."""
    shown: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "assistant":
            shown += [{"role": "user", "content": blocks}]
            blocks = []
            shown.append({"role": "assistant", "content": said(read_anthropic([]), message)["content"]})
        elif message.role == "tool":
            blocks.append({"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content})
        else:
            blocks.append({"type": "text", "text": message.content})
    return [*shown, {"role": "user", "content": blocks}]


@given(conversations(), st.lists(TOOL, max_size=2))
def test_a_conversation_survives_the_dialect_of_anthropic(messages: list[Message], tools: list[ToolSpec]) -> None:
    system, *rest = messages
    (request,) = read_anthropic(anthropic_messages(rest), system.content or "", tools).jobs
    assert isinstance(request, ChatRequest)
    assert normal_messages(request.messages) == normal_messages(tuple(messages))
    assert request.tools == tuple(tools)


@given(REPLY, st.lists(st.integers(0, 30), max_size=3))
def test_a_stream_of_anthropic_says_what_the_whole_reply_says(message: Message, cuts: list[int]) -> None:
    whole = said(read_anthropic([]), message)
    blocks: list[dict[str, Any]] = []
    for event in streamed(read_anthropic([]), message, cuts):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for field, key in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                blocks[-1][key] = blocks[-1].get(key, "") + event["delta"].get(field, "")
            blocks[-1]["signature"] = event["delta"].get("signature", "") or blocks[-1].get("signature", "")
    for block, expected in zip(blocks, whole["content"], strict=True):
        assert block["type"] == expected["type"]
        if block["type"] == "tool_use":
            assert (block["id"], msgspec.json.decode(block["json"])) == (expected["id"], expected["input"])
        else:
            assert {key: block[key] for key in expected} == expected
