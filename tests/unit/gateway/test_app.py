import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from steelyard.errors import InputError
from steelyard.gateway.app import HttpLimits
from steelyard.gateway.dialects.base import ModelNames
from steelyard.gateway.service import GatewayLimits
from steelyard.testing.gateway import ATTEMPT, GatewayWorld, Say, binding
from steelyard.types import AttemptStanding, EndReason, FinishReason

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


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_n_choices_is_a_recorded_turn_and_any_of_them_can_be_gone_on_with(tmp_path: Path, stream: bool) -> None:
    world = GatewayWorld(tmp_path, ["one", "two", "three", "Done."])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        texts = {0: "", 1: "", 2: ""}
        if stream:
            chunks: Any = await client.chat.completions.create(
                model="m", messages=[USER], n=3, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                usage = chunk.usage
        else:
            reply: Any = await client.chat.completions.create(model="m", messages=[USER], n=3)
            texts = {choice.index: choice.message.content for choice in reply.choices}
            usage = reply.usage
        assert texts == {0: "one", 1: "two", 2: "three"}
        turns = world.store.open_turns(ATTEMPT)
        assert usage.prompt_tokens == len(turns[0].prompt_token_ids)
        assert usage.completion_tokens == sum(len(turn.token_ids) for turn in turns)
        chosen = next(turn for turn in turns if world.gateway.text_of(turn.token_ids[:-1]) == "two")
        messages: list[Any] = [USER, {"role": "assistant", "content": "two"}, USER]
        await client.chat.completions.create(model="m", messages=messages)
        newest = world.store.open_turns(ATTEMPT)[-1]
        assert sorted(turn.segment_index for turn in turns) == [0, 1, 2]
        assert newest.segment_index == chosen.segment_index
        known = (*chosen.prompt_token_ids, *chosen.token_ids)
        assert newest.prompt_token_ids[: len(known)] == known

    serve(world, scenario)


def test_choices_differ_in_their_seed(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a", "a", "a"])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        await client.chat.completions.create(model="m", messages=[USER], n=3, seed=5)
        assert len({request.sampling.seed for request in world.generator.requests}) == 3

    serve(world, scenario)


def test_several_prompts_are_completed_at_once(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["A", "B", "C", "D"])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        reply = await client.completions.create(model="m", prompt=["x", "longer"], n=2)
        assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "A"), (1, "B"), (2, "C"), (3, "D")]
        turns = world.store.open_turns(ATTEMPT)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(turns[0].prompt_token_ids) + len(turns[2].prompt_token_ids)

    serve(world, scenario)


def test_a_choice_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = [Say(text="a", holds=True), Say(text="", finish_reason=FinishReason.ENGINE_ERROR)]
    world = GatewayWorld(tmp_path, script)

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        with pytest.raises(openai.InternalServerError, match="engine_error"):
            await client.chat.completions.create(model="m", messages=[USER], n=2)
        assert len(world.generator.cancelled) == 1
        assert world.store.open_turns(ATTEMPT) == ()

    serve(world, scenario)


def test_a_call_that_is_required_is_begun_for_the_policy(tmp_path: Path) -> None:
    rest = '{"name": "submit", "arguments": {}}</tool_call>'
    world = GatewayWorld(tmp_path, [rest, "no call at all"])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        stream: Any = await client.chat.completions.create(
            model="m", messages=[USER], tools=TOOLS, tool_choice="required", stream=True
        )
        deltas = [choice.delta async for chunk in stream for choice in chunk.choices]
        names = [call.function.name for delta in deltas for call in delta.tool_calls or []]
        assert (names, "".join(delta.content or "" for delta in deltas)) == (["submit"], "")
        turn = world.store.open_turns(ATTEMPT)[0]
        assert world.gateway.text_of(turn.prompt_token_ids).endswith("<tool_call>\n")
        assert world.gateway.text_of(turn.token_ids[:-1]) == rest
        second = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS, tool_choice="required")
        assert second.choices[0].message.content == "<tool_call>\nno call at all"
        assert world.counters.read()["gateway.malformed_calls"] == 1

    serve(world, scenario)


def test_without_parallel_calls_a_reply_ends_with_its_first(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [f"I look.\n{CALL}{CALL}", "Done."])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        first = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS, parallel_tool_calls=False)
        message = first.choices[0].message
        assert (message.content, len(message.tool_calls or ())) == ("I look.", 1)
        assert world.gateway.text_of(world.store.open_turns(ATTEMPT)[0].token_ids) == f"I look.\n{CALL}"
        messages: Any = [USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}]  # type: ignore[index]
        await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert [turn.segment_index for turn in world.store.open_turns(ATTEMPT)] == [0, 0]

    serve(world, scenario)


def test_one_call_is_returned_also_where_the_form_of_calls_has_no_end_to_stop_at(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.tool_calls %}[TOOL_CALLS]{{ message.tool_calls | tojson }}{% endif %}"
        "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = '{"name": "submit", "arguments": {"a": 1}}'
    world = GatewayWorld(tmp_path, [f"[TOOL_CALLS][{call}, {call}]"], template=template)

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        reply = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS, parallel_tool_calls=False)
        assert len(reply.choices[0].message.tool_calls or ()) == 1
        assert world.counters.read()["gateway.calls_left_out"] == 1

    serve(world, scenario)


def test_arguments_that_a_client_writes_again_are_still_ours(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [CALL, "Done."])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        first = await client.chat.completions.create(model="m", messages=[USER], tools=TOOLS)
        message: Any = first.choices[0].message.model_dump(exclude_none=True)
        message["tool_calls"][0]["function"]["arguments"] = '{"a":1}'
        results = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
        again: Any = [USER, message, results]
        await client.chat.completions.create(model="m", messages=again, tools=TOOLS)
        assert [turn.segment_index for turn in world.store.open_turns(ATTEMPT)] == [0, 0]

    serve(world, scenario)


def test_sub_agents_of_both_dialects_share_one_attempt_each_in_its_own_segment(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["main 1", "sub 1", "main 2", "sub 2", "other sub", "main 3"])

    async def scenario(client: AsyncOpenAI, url: str) -> None:
        main: list[Any] = [{"role": "system", "content": "You plan."}, USER]
        sub: list[Any] = [USER]

        async def plan() -> None:
            reply = await client.chat.completions.create(model="m", messages=main)
            main.extend([reply.choices[0].message, USER])

        async def act(messages: list[Any]) -> None:
            reply = await claude.messages.create(model="m", max_tokens=9, system="You act.", messages=messages)
            messages.extend([{"role": "assistant", "content": reply.content}, USER])

        base = url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=base, api_key=world.key(), max_retries=0) as claude:
            await plan()
            await act(sub)
            await plan()
            await act(sub)
            await act([USER])  # begins as the first sub-agent did, and is told something else
            await plan()
        assert [turn.segment_index for turn in world.store.open_turns(ATTEMPT)] == [0, 1, 0, 1, 2, 0]
        assert (await world.seal()).num_turns == 6

    serve(world, scenario)


def test_an_attempt_makes_no_more_calls_than_it_may(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a", "b"], bindings={ATTEMPT: binding(max_turns=2)})

    async def scenario(client: AsyncOpenAI, url: str) -> None:
        await client.chat.completions.create(model="m", messages=[USER], n=2)
        with pytest.raises(openai.PermissionDeniedError, match="at most 2 model calls") as caught:
            await client.chat.completions.create(model="m", messages=[USER])
        assert caught.value.code == "max_turns"
        async with AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=world.key(), max_retries=0) as claude:
            with pytest.raises(anthropic.PermissionDeniedError):
                await claude.messages.create(model="m", max_tokens=9, messages=[USER])
        standing = world.gateway.standing(ATTEMPT)
        assert standing == AttemptStanding(num_turns=2, limit=EndReason.MAX_TURNS)

    serve(world, scenario)


def test_a_model_that_is_not_served_is_refused_where_names_are_given(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a"], models=ModelNames(own="policy", served=("gpt-5",)))

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        await client.chat.completions.create(model="gpt-5", messages=[USER])
        with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist here") as caught:
            await client.chat.completions.create(model="gpt-4", messages=[USER])
        assert caught.value.code == "model_not_found"
        assert (await client.models.retrieve("policy")).owned_by == "steelyard"

    serve(world, scenario)


@pytest.mark.parametrize("changes", [{"token_ids": ()}, {"logprobs": (float("nan"), 0.0)}, {"kept_logmass": ()}])
def test_an_engine_that_breaks_its_contract_is_an_error_and_records_nothing(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    world = GatewayWorld(tmp_path, [Say(text="x", changes=changes)])

    async def scenario(client: AsyncOpenAI, _: str) -> None:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=[USER])
        assert caught.value.response.json()["error"]["code"] == "engine_error"
        assert world.store.open_turns(ATTEMPT) == ()
        assert "broke its contract" in (world.gateway.standing(ATTEMPT).failure or "")
        assert world.counters.read()["gateway.refused.engine_failed"] == 1

    serve(world, scenario)


def test_a_template_that_raises_is_bad_input_with_its_message(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}{% if message.content == 'forbidden' %}{{ raise_exception('No such word.') }}"
        "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    world = GatewayWorld(tmp_path, [], template=template)

    async def scenario(client: AsyncOpenAI, url: str) -> None:
        with pytest.raises(openai.BadRequestError, match="No such word"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "forbidden"}])
        async with AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=world.key(), max_retries=0) as claude:
            with pytest.raises(anthropic.BadRequestError, match="No such word"):
                await claude.messages.create(
                    model="m", max_tokens=9, messages=[{"role": "user", "content": "forbidden"}]
                )

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
        with pytest.raises(openai.BadRequestError, match="at most 16 replies can be asked for at a time, not 17"):
            await client.chat.completions.create(model="m", messages=[USER], n=17)
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
