from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from steelyard.gateway.dialects import openai
from steelyard.gateway.dialects.base import ModelNames
from steelyard.gateway.failures import Failure, FailureKind
from steelyard.gateway.planning import TextRequest
from steelyard.testing.gateway import make_desk
from steelyard.types import ChatRequest, Message, MustCall, ToolCall, ToolSpec

CHAT: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "any", "prompt": "hi"}
TOOL = {"type": "function", "function": {"name": "submit", "strict": True}}


def chat(**fields: Any) -> ChatRequest:
    (job,) = openai.read_chat(msgspec.json.encode({**CHAT, **fields}), make_desk()).jobs
    assert isinstance(job, ChatRequest)
    return job


def completions(**fields: Any) -> list[TextRequest]:
    asked = openai.read_completion(msgspec.json.encode({**COMPLETION, **fields}), make_desk())
    return [job for job in asked.jobs if isinstance(job, TextRequest)]


def test_messages_keep_all_that_the_policy_is_shown() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}, "extra": 1}
    request = chat(
        messages=[
            {"role": "developer", "content": "Be brief.", "name": "dev"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "content": "ok", "tool_call_id": "c1"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "function_call": None},
        ]
    )
    assert request.messages == (
        Message(role="system", content="Be brief.", name="dev"),
        Message(role="user", content="ab"),
        Message(role="assistant", content=None, tool_calls=(ToolCall(id="c1", name="f", arguments='{"a":  1}'),)),
        Message(role="tool", content="ok", tool_call_id="c1"),
        Message(role="assistant", content="no"),
    )


def test_parameters_that_shape_the_answer_are_taken_over() -> None:
    request = chat(tools=[TOOL], stop="x", seed=3, max_tokens=5)
    assert request.tools == (ToolSpec(name="submit", description="", parameters={}),)
    assert (request.stop, request.seed, request.max_tokens) == (("x",), 3, 5)
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(stop=["x", "y"]).stop == ("x", "y")


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    assert chat(tools=[TOOL], tool_choice="none").tools == ()
    assert len(chat(tools=[TOOL], tool_choice="auto").tools) == 1


def test_what_changes_no_token_is_tolerated() -> None:
    ignored = {
        "temperature": 0.3, "top_p": 0.9, "n": 1, "user": "u", "metadata": {"a": "b"}, "store": True, "logit_bias": {},
        "frequency_penalty": 0, "presence_penalty": 0, "parallel_tool_calls": True, "service_tier": "auto",
        "reasoning_effort": "low", "response_format": {"type": "text"}, "modalities": ["text"], "top_logprobs": 0,
        "logprobs": True, "stream": True, "stream_options": {"include_usage": True}, "prompt_cache_key": "k",
        "safety_identifier": "s", "verbosity": "low",
    }  # fmt: skip
    assert chat(**ignored) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TOOL]}, "tool_choice"),
        ({"moderation": {}}, "moderation"),
        ({"model": ""}, "model"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Failure) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param.split(".")[-1] in str(caught.value) or caught.value.code == "invalid_type"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[" * 100_000, b'{"model": "x"}', b'{"messages": []}', b"\xff"])
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(Failure):
        openai.read_chat(data, make_desk())


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        ("hi", ["hi"]),
        (["hi"], ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_prompts_are_texts_or_tokens_one_or_many(prompt: object, meant: object) -> None:
    assert [job.prompt for job in completions(prompt=prompt)] == meant


@pytest.mark.parametrize("prompt", [[1, "a"], [[1], "a"], []])
def test_a_list_that_holds_no_prompts_is_refused(prompt: object) -> None:
    with pytest.raises(Failure, match="prompt must be"):
        completions(prompt=prompt)


def test_each_choice_is_a_job_of_its_own() -> None:
    assert len(openai.read_chat(msgspec.json.encode({**CHAT, "n": 3}), make_desk()).jobs) == 3
    assert [job.prompt for job in completions(prompt=["a", "b"], n=2, best_of=2)] == ["a", "a", "b", "b"]


def test_a_call_can_be_asked_for() -> None:
    named = {"type": "function", "function": {"name": "submit"}}
    assert chat(tools=[TOOL], tool_choice="required").must_call == MustCall()
    assert chat(tools=[TOOL], tool_choice=named).must_call == MustCall(tool="submit")
    assert chat(tools=[TOOL]).must_call is None
    assert chat(tools=[TOOL], parallel_tool_calls=False).single_call


def test_any_model_may_be_named_unless_the_names_are_given() -> None:
    openai.read_chat(msgspec.json.encode(CHAT), make_desk())
    desk = make_desk(models=ModelNames(own="policy", served=("gpt-5",)))
    for name in ("policy", "gpt-5"):
        openai.read_chat(msgspec.json.encode({**CHAT, "model": name}), desk)
    with pytest.raises(Failure, match=r"'any' does not exist here\. Served: policy, gpt-5") as caught:
        openai.read_chat(msgspec.json.encode(CHAT), desk)
    assert (caught.value.kind, caught.value.code) == (FailureKind.NOT_FOUND, "model_not_found")


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_params.CompletionCreateParamsBase, openai.ChatBody),
        (text_params.CompletionCreateParamsBase, openai.CompletionBody),
    ],
)
def test_every_parameter_of_the_official_client_is_known(params: Any, body: type[msgspec.Struct]) -> None:
    assert set(params.__annotations__) <= set(body.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 1}, "logprobs"),
        ({"n": 0}, "n"),
        ({"bset_of": 1}, "bset_of"),
    ],
)
def test_what_a_completion_cannot_honour_is_refused_with_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Failure) as caught:
        completions(**fields)
    assert caught.value.param == param
