"""The official client of Anthropic against the gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic

from steelyard.gateway.app import HttpLimits
from steelyard.gateway.dialects.base import ModelNames
from steelyard.gateway.service import GatewayLimits
from steelyard.testing.gateway import ATTEMPT, GatewayWorld, Say, binding
from steelyard.types import FinishReason

USER: Any = {"role": "user", "content": "Repair it."}
CALL = '<tool_call>{"name": "submit", "arguments": {"a":  1, "b": [2]}}</tool_call>'
TOOLS: Any = [{"name": "submit", "description": "d", "input_schema": {"type": "object"}}]

Scenario = Callable[[AsyncAnthropic, str], Awaitable[None]]


def serve(world: GatewayWorld, scenario: Scenario) -> None:
    async def whole() -> None:
        try:
            url = (await world.server.start()).removesuffix("/v1")
            async with AsyncAnthropic(base_url=url, api_key=world.key(), max_retries=0, timeout=30) as client:
                await scenario(client, url)
        finally:
            await world.close()

    asyncio.run(whole())


def segments(world: GatewayWorld) -> list[int]:
    return [turn.segment_index for turn in world.store.open_turns(ATTEMPT)]


async def ask(client: AsyncAnthropic, messages: list[Any], **fields: Any) -> anthropic.types.Message:
    message: anthropic.types.Message = await client.messages.create(
        model="m", max_tokens=99, messages=messages, **fields
    )
    return message


def test_a_conversation_with_tools_goes_on_in_one_segment(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [f"I look.\n{CALL}{CALL}", "Done."])

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        first = await ask(client, [USER], tools=TOOLS, system="Be brief.")
        assert (first.model, first.role, first.stop_reason) == ("m", "assistant", "tool_use")
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        calls: list[Any] = [block for block in first.content if block.type == "tool_use"]
        assert calls[0].input == {"a": 1, "b": [2]}
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]
        # The client parses the arguments and writes them again in its own way.
        messages = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await ask(client, messages, tools=TOOLS, system="Be brief.")
        assert (second.content[0].text, second.stop_reason) == ("Done.", "end_turn")  # type: ignore[union-attr]
        assert segments(world) == [0, 0]
        turns = world.store.open_turns(ATTEMPT)
        assert second.usage.input_tokens == len(turns[1].prompt_token_ids)
        assert second.usage.output_tokens == len(turns[1].token_ids)

    serve(world, scenario)


def test_a_streamed_message_has_the_events_in_order(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [f"I  look.\n{CALL}{CALL}"])

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        stream: Any = await client.messages.create(model="m", max_tokens=99, messages=[USER], tools=TOOLS, stream=True)
        events = [event async for event in stream]
        kinds = [event.type for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        call = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert kinds[-8:-2] == [*call, *call]
        starts = [event for event in events if event.type == "content_block_start"]
        assert [(start.index, start.content_block.type) for start in starts] == [
            (0, "text"), (1, "tool_use"), (2, "tool_use"),
        ]  # fmt: skip
        turn = world.store.open_turns(ATTEMPT)[0]
        assert events[0].message.usage.input_tokens == len(turn.prompt_token_ids)
        assert events[-2].usage.output_tokens == len(turn.token_ids)

    serve(world, scenario)


@pytest.mark.parametrize("text", [f"I  look.\n{CALL}", "Only text.", CALL, "<think>\nwhy\n</think>\n\nyes"])
def test_the_streaming_helper_puts_together_what_a_whole_reply_says(tmp_path: Path, text: str) -> None:
    world = GatewayWorld(tmp_path, [text, text])
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        asked: Any = {"model": "m", "max_tokens": 2000, "messages": [USER], "tools": TOOLS, "thinking": thinking}
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**asked)
        assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)

        def without_ids(message: Any) -> list[Any]:
            return [{**block.model_dump(), "id": ""} for block in message.content]

        assert without_ids(streamed) == without_ids(whole)

    serve(world, scenario)


def test_reasoning_comes_in_its_own_block_and_goes_on_in_one_segment(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["<think>\nwhy\n</think>\n\nyes", "no"])
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        first = await ask(client, [USER], thinking=thinking)
        assert [block.type for block in first.content] == ["thinking", "text"]
        assert (first.content[0].thinking, first.content[1].text) == ("why", "yes")  # type: ignore[union-attr]
        await ask(client, [USER, {"role": "assistant", "content": first.content}, USER], thinking=thinking)
        assert segments(world) == [0, 0]

    serve(world, scenario)


def test_a_stop_sequence_is_named_and_a_cut_reply_says_so(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["forty\nObs: x", Say(text="c", ends=False)])

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        first = await ask(client, [USER], stop_sequences=["never", "\nObs"])
        assert (first.stop_reason, first.stop_sequence) == ("stop_sequence", "\nObs")
        assert first.content[0].text == "forty"  # type: ignore[union-attr]
        second = await ask(client, [USER, {"role": "assistant", "content": first.content}, USER])
        assert (second.stop_reason, second.stop_sequence) == ("max_tokens", None)
        assert segments(world) == [0, 0]

    serve(world, scenario)


def test_tokens_are_counted_without_sampling(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a"])

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        counted = await client.messages.count_tokens(model="m", messages=[USER], tools=TOOLS)
        assert world.generator.requests == []
        await ask(client, [USER], tools=TOOLS)
        assert counted.input_tokens == len(world.store.open_turns(ATTEMPT)[0].prompt_token_ids)

    serve(world, scenario)


def test_models_are_listed_and_found_by_name(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, models=ModelNames(own="policy", served=("claude",)))

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        assert [model.id async for model in client.models.list()] == ["policy", "claude"]
        assert (await client.models.retrieve("claude")).display_name == "claude"
        with pytest.raises(anthropic.NotFoundError, match="'gpt' does not exist here"):
            await client.models.retrieve("gpt")
        with pytest.raises(anthropic.NotFoundError) as caught:
            await ask(client, [USER])
        assert caught.value.response.json()["error"]["type"] == "not_found_error"

    serve(world, scenario)


def test_a_key_counts_in_either_header_and_a_bad_one_in_none(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a"])

    async def scenario(client: AsyncAnthropic, url: str) -> None:
        async with AsyncAnthropic(base_url=url, auth_token=world.key(), max_retries=0) as bearer:
            await ask(bearer, [USER])
        expired = world.keys.issue(ATTEMPT, world.clock.now_s() - 5)
        for key in ("sk-wrong", expired, world.key("att_dead")):
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await ask(client.with_options(api_key=key), [USER])
            assert caught.value.response.json()["error"]["type"] == "authentication_error"
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/messages", data=b"{}") as response:
            assert (response.status, (await response.json())["type"]) == (401, "error")
        assert world.counters.read()["gateway.refused.bad_key"] == 4

    serve(world, scenario)


def test_bad_requests_are_answered_in_the_form_of_anthropic(tmp_path: Path) -> None:
    world = GatewayWorld(
        tmp_path, http_limits=HttpLimits(max_body_bytes=1000), bindings={ATTEMPT: binding(max_context_tokens=4)}
    )

    async def scenario(client: AsyncAnthropic, url: str) -> None:
        with pytest.raises(anthropic.BadRequestError, match="temprature: Extra inputs are not permitted"):
            await ask(client, [USER], extra_body={"temprature": 1})
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            await ask(client, [USER])
        with pytest.raises(anthropic.RequestTooLargeError):
            await ask(client, [{"role": "user", "content": "x" * 2000}])
        headers = {"x-api-key": world.key()}
        for data in (b"{", b"[" * 900):
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{url}/v1/messages", data=data) as response,
            ):
                said = await response.json()
            assert (response.status, said["error"]["type"]) == (400, "invalid_request_error")
        wrong = client.with_options(base_url=f"{url}/v1")
        with pytest.raises(anthropic.NotFoundError, match="Does the base URL end in /v1"):
            await ask(wrong, [USER])

    serve(world, scenario)


@pytest.mark.parametrize(
    ("per_attempt", "status", "kind"), [(1, 429, "rate_limit_error"), (9, 529, "overloaded_error")]
)
def test_too_many_calls_are_told_when_to_try_again(tmp_path: Path, per_attempt: int, status: int, kind: str) -> None:
    limits = GatewayLimits(max_open_calls=1, max_open_calls_per_attempt=per_attempt)
    world = GatewayWorld(tmp_path, [Say(text="x", holds=True)], limits=limits)

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        call = asyncio.create_task(ask(client, [USER]))
        await world.generator.started.wait()
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(client, [USER])
        assert (caught.value.status_code, caught.value.response.json()["error"]["type"]) == (status, kind)
        assert caught.value.response.headers["retry-after"] == "1"
        world.generator.release()
        await call

    serve(world, scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("say", "status", "kind"),
    [
        (Say(text="", finish_reason=FinishReason.ENGINE_ERROR), 500, "api_error"),
        (Say(text="", finish_reason=FinishReason.QUEUE_TIMEOUT), 504, "timeout_error"),
        (Say(text="", changes={"token_ids": ()}), 500, "api_error"),
        (Say(text="", changes={"logprobs": (float("nan"),)}), 500, "api_error"),
    ],
)
def test_failures_of_the_engine_have_their_form_before_anything_was_streamed(
    tmp_path: Path, say: Say, status: int, kind: str, stream: bool
) -> None:
    world = GatewayWorld(tmp_path, [say])

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(client, [USER], stream=stream)
        assert (caught.value.status_code, caught.value.response.json()["error"]["type"]) == (status, kind)
        assert world.store.open_turns(ATTEMPT) == ()

    serve(world, scenario)


def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_event(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [Say(text="partial text", finish_reason=FinishReason.ENGINE_ERROR)])

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        texts: list[str] = []
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            async with client.messages.stream(model="m", max_tokens=9, messages=[USER]) as stream:
                async for text in stream.text_stream:
                    texts.append(text)
        assert "".join(texts) == "partial text"
        assert world.store.open_turns(ATTEMPT) == ()
        assert world.counters.read()["gateway.refused.engine_failed"] == 1

    serve(world, scenario)


def test_a_call_that_must_be_made_is_begun_for_the_policy(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [' {"a":  1}}</tool_call>', "Done."])
    choice: Any = {"type": "tool", "name": "submit"}

    async def scenario(client: AsyncAnthropic, _: str) -> None:
        first = await ask(client, [USER], tools=TOOLS, tool_choice=choice)
        assert [(block.type, block.input) for block in first.content] == [("tool_use", {"a": 1})]  # type: ignore[union-attr]
        turn = world.store.open_turns(ATTEMPT)[0]
        assert world.gateway.text_of(turn.prompt_token_ids).endswith('<tool_call>\n{"name": "submit", "arguments":')
        assert world.gateway.text_of(turn.token_ids).startswith(' {"a":  1}}')
        call: Any = first.content[0]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"}]
        messages = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        await ask(client, messages, tools=TOOLS)
        assert segments(world) == [0, 0]

    serve(world, scenario)
