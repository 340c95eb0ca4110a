import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from steelyard.errors import InputError
from steelyard.gateway.app import HttpLimits
from steelyard.gateway.service import GatewayLimits
from steelyard.testing.gateway import ATTEMPT, GatewayWorld, Say, binding
from steelyard.types import FinishReason

USER: Any = {"role": "user", "content": "Repair it."}
CALL = '<tool_call>{"name": "submit", "arguments": {"a":  1}}</tool_call>'
TOOLS: Any = [
    {"type": "function", "function": {"name": "submit", "description": "d", "parameters": {"type": "object"}}}
]

Scenario = Callable[[AsyncOpenAI, str], Awaitable[None]]


def serve(world: GatewayWorld, scenario: Scenario) -> None:
    async def whole() -> None:
        try:
            url = await world.server.start()
            async with AsyncOpenAI(base_url=url, api_key=world.key(), max_retries=0, timeout=30) as client:
                await scenario(client, url)
        finally:
            await world.close()

    asyncio.run(whole())


def test_a_chat_with_tools_works_with_the_official_client(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [f"I look.\n{CALL}", "Done."])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        messages = [USER]
        first = await client.chat.completions.create(
            model="my-model", messages=messages, tools=TOOLS, n=1, seed=1, max_tokens=99, temperature=0.2
        )
        message = first.choices[0].message
        assert (first.model, first.object) == ("my-model", "chat.completion")
        assert (message.content, first.choices[0].finish_reason) == ("I look.", "tool_calls")
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("submit", '{"a":  1}')
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
        second = await client.chat.completions.create(model="my-model", messages=messages, tools=TOOLS)
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("Done.", "stop")
        assert second.usage is not None
        assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
        assert [turn.segment_index for turn in world.store.open_turns(ATTEMPT)] == [0, 0]

    serve(world, scenario)


def test_log_probabilities_are_those_that_were_recorded(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["añb", Say(text="c", ends=False)])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        reply = await client.chat.completions.create(model="m", messages=[USER], logprobs=True)
        turn = world.store.open_turns(ATTEMPT)[0]
        assert reply.choices[0].logprobs is not None
        content = reply.choices[0].logprobs.content or []
        assert [entry.logprob for entry in content] == list(turn.logprobs[:-1])
        assert [entry.bytes for entry in content if entry.token == "�"] == [None, None]
        completion = await client.completions.create(model="m", prompt="x", logprobs=0)
        turn = world.store.open_turns(ATTEMPT)[1]
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert (logprobs.token_logprobs, logprobs.tokens) == (list(turn.logprobs), ["c"])
        assert completion.choices[0].finish_reason == "length"

    serve(world, scenario)


def test_a_streamed_chat_gives_content_calls_finish_reason_and_usage(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [f"I  look.\n{CALL}{CALL}"])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        stream = await client.chat.completions.create(
            model="m", messages=[USER], tools=TOOLS, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == "I  look."
        calls = [call for choice in choices for call in choice.delta.tool_calls or []]
        assert [(call.index, call.function and call.function.arguments) for call in calls] == [
            (0, '{"a":  1}'),
            (1, '{"a":  1}'),
        ]
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(world.store.open_turns(ATTEMPT)[0].token_ids)
        assert choices[-1].logprobs is not None

    serve(world, scenario)


def test_the_streaming_helper_of_the_client_puts_the_message_together(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [f"I look.\n{CALL}"])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        async with client.chat.completions.stream(model="m", messages=[USER], tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert (message.content, len(message.tool_calls or [])) == ("I look.", 1)

    serve(world, scenario)


def test_plain_completions_work_streamed_and_whole(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["forty\nObs: x", " two"])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        whole = await client.completions.create(model="m", prompt="Q\n", stop=["\nObs"], max_tokens=50)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("forty", "stop")
        stream = await client.completions.create(
            model="m", prompt="Q\nforty\nObs: 3", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == " two"
        assert chunks[-1].usage is not None
        assert [turn.segment_index for turn in world.store.open_turns(ATTEMPT)] == [0, 0]

    serve(world, scenario)


def test_models_are_listed_and_health_needs_no_key(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)

    async def scenario(client: AsyncOpenAI, url: str) -> None:
        assert [model.id async for model in client.models.list()] == ["steelyard-policy"]
        async with aiohttp.ClientSession() as session, session.get(url.replace("/v1", "/health")) as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})

    serve(world, scenario)


def test_a_bad_or_dead_key_is_refused_on_every_endpoint(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)

    async def scenario(client: AsyncOpenAI, url: str) -> None:
        expired = world.keys.issue(ATTEMPT, world.clock.now_s() - 5)
        for key in ("sk-wrong", expired, world.key("att_dead")):
            other = client.with_options(api_key=key)
            with pytest.raises(openai.AuthenticationError):
                await other.chat.completions.create(model="m", messages=[USER])
            with pytest.raises(openai.AuthenticationError):
                await other.completions.create(model="m", prompt="x")
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-wrong").models.list()
        async with aiohttp.ClientSession() as session, session.post(url + "/chat/completions", data=b"{}") as response:
            assert response.status == 401
            assert "didn't provide an API key" in (await response.json())["error"]["message"]

    serve(world, scenario)


def test_a_key_stops_working_when_its_attempt_ends(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a"])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        await client.chat.completions.create(model="m", messages=[USER])
        world.directory.bindings.clear()
        with pytest.raises(openai.AuthenticationError, match="not alive"):
            await client.chat.completions.create(model="m", messages=[USER])

    serve(world, scenario)


def test_bad_requests_are_answered_in_the_form_of_openai(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[USER], extra_body={"temprature": 1})
        assert (caught.value.param, caught.value.code) == ("temprature", "unknown_parameter")
        with pytest.raises(openai.BadRequestError, match="n must be 1"):
            await client.chat.completions.create(model="m", messages=[USER], n=2)
        with pytest.raises(openai.NotFoundError, match="Unknown request URL: POST /v1/embeddings"):
            await client.embeddings.create(model="m", input="x")
        assert world.counters.read()["gateway.http.400"] == 2

    serve(world, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_is_an_answer_of_its_own(tmp_path: Path, stream: bool) -> None:
    world = GatewayWorld(tmp_path, bindings={ATTEMPT: binding(max_context_tokens=4)})

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[USER], stream=stream)
        assert caught.value.code == "context_length_exceeded"

    serve(world, scenario)


def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, http_limits=HttpLimits(max_body_bytes=1000))

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 2000}])
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")

    serve(world, scenario)


@pytest.mark.parametrize(("per_attempt", "status"), [(1, 429), (9, 503)])
def test_too_many_calls_are_told_when_to_try_again(tmp_path: Path, per_attempt: int, status: int) -> None:
    limits = GatewayLimits(max_open_calls=1, max_open_calls_per_attempt=per_attempt)
    world = GatewayWorld(tmp_path, [Say(text="x", holds=True)], limits=limits)

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
        await world.generator.started.wait()
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="m", messages=[USER])
        assert caught.value.status_code == status
        assert caught.value.response.headers["retry-after"] == "1"
        world.generator.release()
        await call

    serve(world, scenario)


@pytest.mark.parametrize(
    ("reason", "status"),
    [(FinishReason.ENGINE_ERROR, 502), (FinishReason.QUEUE_TIMEOUT, 503), (FinishReason.GENERATION_TIMEOUT, 503)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_the_engine_have_their_status_before_anything_was_streamed(
    tmp_path: Path, reason: FinishReason, status: int, stream: bool
) -> None:
    world = GatewayWorld(tmp_path, [Say(text="", finish_reason=reason)])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="m", messages=[USER], stream=stream)
        assert caught.value.status_code == status

    serve(world, scenario)


def test_a_failure_in_the_middle_of_a_stream_is_an_error_to_the_client(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [Say(text="partial text", finish_reason=FinishReason.ENGINE_ERROR)])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="engine_error"):
            async for _chunk in stream:
                pass
        assert world.store.open_turns(ATTEMPT) == ()

    serve(world, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_engines_work(tmp_path: Path, stream: bool) -> None:
    world = GatewayWorld(tmp_path, [Say(text="never read", holds=True)])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        async def call() -> None:
            answer: Any = await client.chat.completions.create(model="m", messages=[USER], stream=stream)
            async for _chunk in answer:
                pass

        task = asyncio.create_task(call())
        await world.generator.started.wait()
        task.cancel()
        await asyncio.wait([task])
        await asyncio.wait_for(world.generator.left.wait(), 20)
        assert (world.store.open_turns(ATTEMPT), world.ledger.total) == ((), 0)

    serve(world, scenario)


def test_a_bug_is_answered_with_500_and_no_detail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = GatewayWorld(tmp_path, [])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=[USER])
        assert caught.value.response.json()["error"]["message"] == "The gateway failed."

    serve(world, scenario)
    assert "IndexError" in caplog.text


def test_a_port_in_use_is_bad_input_that_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        world = GatewayWorld(tmp_path, port=port)

        async def scenario() -> None:
            with pytest.raises(InputError, match=rf"gateway\.port: 127\.0\.0\.1:{port} must be free"):
                await world.server.start()
            await world.close()

        asyncio.run(scenario())
