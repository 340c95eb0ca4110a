from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from steelyard.gateway.dialects import anthropic
from steelyard.gateway.dialects.base import ModelNames
from steelyard.gateway.failures import Failure, FailureKind
from steelyard.testing.gateway import make_desk
from steelyard.types import ChatRequest, Message, MustCall, ToolCall, ToolSpec

BODY: dict[str, Any] = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "submit", "description": "d", "input_schema": {"type": "object"}}
# In the official client's types, but sent as headers or meant for other endpoints.
NOT_IN_THE_BODY = {"user_profile_id", "workspace_id"}


def read(**fields: Any) -> ChatRequest:
    (job,) = anthropic.read_messages(msgspec.json.encode({**BODY, **fields}), make_desk()).jobs
    assert isinstance(job, ChatRequest)
    return job


def test_blocks_become_messages_in_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "one"}]}
    call = msgspec.Raw(b'{"type": "tool_use", "id": "c1", "name": "f", "input": {"a":  1}}')
    request = read(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", "cache_control": {}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {
                "role": "user",
                "content": [
                    result,
                    {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
    )
    assert request.messages == (
        Message(role="system", content="Be\nbrief."),
        Message(role="user", content="a\nb"),
        Message(role="assistant", content="I look.", tool_calls=(ToolCall(id="c1", name="f", arguments='{"a":  1}'),)),
        Message(role="tool", content="one", tool_call_id="c1"),
        Message(role="tool", content="", tool_call_id="c2"),
        Message(role="user", content="go on"),
    )


def test_parameters_that_shape_the_answer_are_taken_over() -> None:
    request = read(tools=[TOOL], stop_sequences=["x", "y"], tool_choice={"type": "any"})
    assert request.tools == (ToolSpec(name="submit", description="d", parameters={"type": "object"}),)
    assert (request.stop, request.max_tokens, request.must_call) == (("x", "y"), 9, MustCall())
    choice = {"type": "tool", "name": "submit", "disable_parallel_tool_use": True}
    assert read(tools=[TOOL], tool_choice=choice).must_call == MustCall(tool="submit")
    assert read(tools=[TOOL], tool_choice=choice).single_call
    assert read(tools=[TOOL], tool_choice={"type": "none"}).tools == ()


def test_what_changes_no_token_is_tolerated() -> None:
    ignored = {
        "temperature": 0.3, "top_p": 0.9, "top_k": 5, "metadata": {"user_id": "u"}, "service_tier": "auto",
        "cache_control": {"type": "ephemeral"}, "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"}, "inference_geo": "x", "speed": "fast", "diagnostics": {},
    }  # fmt: skip
    assert read(**ignored) == read()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stop_sequences": [" "]}, "stop_sequences"),
        ({"temperature": 1.5}, "temperature"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"context_management": {}}, "context_management"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"maxtokens": 1}, "maxtokens"),
        ({"model": ""}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Failure) as caught:
        read(**fields)
    assert (caught.value.kind, caught.value.param) == (FailureKind.BAD_REQUEST, param)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"model": "x"}', b"\xff", b"[" * 100_000])
def test_what_is_no_request_is_refused(data: bytes) -> None:
    for reader in (anthropic.read_messages, anthropic.read_count):
        with pytest.raises(Failure):
            reader(data, make_desk())


def test_a_model_that_is_not_served_is_named() -> None:
    desk = make_desk(models=ModelNames(own="policy", served=()))
    with pytest.raises(Failure, match=r"'any' does not exist here\. Served: policy"):
        anthropic.read_messages(msgspec.json.encode(BODY), desk)


def test_every_parameter_of_the_official_client_is_known() -> None:
    create = set(message_create_params.MessageCreateParamsBase.__annotations__)
    count = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    assert create - NOT_IN_THE_BODY <= set(anthropic.MessagesBody.__struct_fields__)
    assert count - NOT_IN_THE_BODY <= set(anthropic.CountBody.__struct_fields__)
