"""The gateway's client against the real server: what a harness sees is what it sees in the same process."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from steelyard.errors import DeadlineExceeded, EngineError, InputError, Refused, RemoteFailed
from steelyard.gateway.client import GatewayClient
from steelyard.gateway.service import GatewayLimits
from steelyard.metrics import Counters
from steelyard.processes.http_requests import RetrySettings
from steelyard.testing.fault_proxy import Fault, FaultProxy
from steelyard.testing.gateway import ATTEMPT, GatewayWorld, Say, binding
from steelyard.types import (
    AttemptStanding,
    ChatReply,
    ChatRequest,
    EndReason,
    FinishReason,
    Message,
    MustCall,
    ToolCall,
    ToolRecord,
    ToolSpec,
)

CALL = '<tool_call>{"name": "submit", "arguments": {"a":  1}}</tool_call>'
BROKEN = "<tool_call>{nonsense}</tool_call>"
TOOLS = (ToolSpec(name="submit", description="d", parameters={"type": "object"}),)
USER = Message(role="user", content="Repair it.")
RECORDS = (ToolRecord(tool_call_id="call_1", turn_index=0, name="submit", outcome="ok", latency_s=0.5),)
LATER_S = 60.0


class Bench:
    """A gateway, a proxy in front of it, a client of a worker. Back-off takes no time."""

    def __init__(self, world: GatewayWorld, key: str | None = None, **settings: Any) -> None:
        self.world = world
        self.counters = Counters()
        self.proxy = FaultProxy("")
        self.client: GatewayClient
        self._key = key
        self._settings = RetrySettings(**settings)

    async def run(self, scene: Callable[["Bench"], Awaitable[None]]) -> None:
        try:
            self.proxy.upstream = (await self.world.server.start()).removesuffix("/v1")
            await self._run(await self.proxy.start(), scene)
        finally:
            await self.proxy.stop()
            await self.world.close()

    async def _run(self, url: str, scene: Callable[["Bench"], Awaitable[None]]) -> None:
        self.client = GatewayClient(
            f"{url}/v1",
            self._key or self.world.worker_key(),
            clock=self.world.clock,
            counters=self.counters,
            draw=random.Random(0),
            settings=self._settings,
            sleep=_no_time,
        )
        async with self.client, asyncio.timeout(30):
            await scene(self)

    async def chat(self, *messages: Message, **wishes: Any) -> ChatReply:
        request = ChatRequest(messages=messages or (USER,), **wishes)
        return await self.client.chat(ATTEMPT, request, self.world.clock.now_s() + LATER_S)

    def lose(self, *numbers: int, fault: Fault = Fault.LOSE_ANSWER) -> None:
        """The requests with these numbers, counted from the next one, meet ``fault``."""
        chosen = {self.proxy.num_requests + number for number in numbers}
        self.proxy.plan = lambda number: fault if number in chosen else Fault.NONE


async def _no_time(_: float) -> None:
    await asyncio.sleep(0)


def play(bench: Bench, scene: Callable[[Bench], Awaitable[None]]) -> None:
    asyncio.run(bench.run(scene))


def test_a_conversation_over_http_is_the_one_in_the_same_process_and_stays_in_one_segment(tmp_path: Path) -> None:
    script = [f"I look.\n{CALL}{BROKEN}", "Done."]
    here, there = GatewayWorld(tmp_path / "here", script), Bench(GatewayWorld(tmp_path / "there", script))

    async def talk(ask: Callable[[ChatRequest], Awaitable[ChatReply]]) -> list[ChatReply]:
        first = await ask(ChatRequest(messages=(USER,), tools=TOOLS))
        answer = Message(role="tool", content="ok", tool_call_id=first.message.tool_calls[0].id)
        return [first, await ask(ChatRequest(messages=(USER, first.message, answer), tools=TOOLS))]

    async def scene(bench: Bench) -> None:
        local = await talk(lambda request: here.gateway.chat(ATTEMPT, request))
        deadline_at_s = bench.world.clock.now_s() + LATER_S
        remote = await talk(lambda request: bench.client.chat(ATTEMPT, request, deadline_at_s))
        assert remote == local
        assert remote[0].num_malformed_calls == 1
        assert [turn.segment_index for turn in bench.world.store.open_turns(ATTEMPT)] == [0, 0]
        await here.close()

    play(there, scene)


def test_wishes_reach_the_engine_and_a_cut_text_ends_by_length(tmp_path: Path) -> None:
    bench = Bench(GatewayWorld(tmp_path, [Say(text="abc", ends=False)]))

    async def scene(bench: Bench) -> None:
        name = Message(role="user", content="x", name="somebody")
        called = Message(role="assistant", tool_calls=(ToolCall(id="c", name="submit", arguments="{}"),))
        tool = Message(role="tool", content="ok", tool_call_id="c")
        reply = await bench.chat(name, called, tool, max_tokens=3, seed=7, stop=("zzz",))
        assert (reply.finish_reason, reply.message.content) == (FinishReason.LENGTH, "abc")
        assert bench.world.generator.requests[0].sampling.max_tokens == 3
        assert bench.world.generator.requests[0].sampling.seed is not None

    play(bench, scene)


def test_a_call_that_is_asked_for_is_asked_for_over_http_too(tmp_path: Path) -> None:
    bench = Bench(GatewayWorld(tmp_path, [' {"a":  1}}</tool_call>', CALL.removeprefix("<tool_call>"), CALL * 2]))

    async def scene(bench: Bench) -> None:
        for wish in (MustCall(tool="submit"), MustCall()):
            reply = await bench.chat(tools=TOOLS, must_call=wish)
            assert [call.arguments for call in reply.message.tool_calls] == ['{"a":  1}']
        assert len((await bench.chat(tools=TOOLS, single_call=True)).message.tool_calls) == 1

    play(bench, scene)


def test_an_agent_program_elsewhere_gets_address_key_and_standing(tmp_path: Path) -> None:
    bench = Bench(GatewayWorld(tmp_path, ["one"], bindings={ATTEMPT: binding(max_turns=1)}))

    async def scene(bench: Bench) -> None:
        assert await bench.client.standing(ATTEMPT) == AttemptStanding()
        url, key = await bench.client.access(ATTEMPT)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as program:
            user: Any = {"role": "user", "content": "x"}
            await program.chat.completions.create(model="m", messages=[user])
            with pytest.raises(openai.PermissionDeniedError):
                await program.chat.completions.create(model="m", messages=[user])
        bench.lose(0)
        assert await bench.client.standing(ATTEMPT) == AttemptStanding(num_turns=1, limit=EndReason.MAX_TURNS)
        bench.world.directory.bindings.clear()
        with pytest.raises(Refused):
            await bench.client.standing(ATTEMPT)

    play(bench, scene)


def test_sealing_and_discarding_are_repeated_until_they_are_answered(tmp_path: Path) -> None:
    bench = Bench(GatewayWorld(tmp_path, ["one"], bindings={ATTEMPT: binding(), "att_two": binding()}))

    async def scene(bench: Bench) -> None:
        await bench.chat()
        bench.lose(0, 1)
        sealed = await bench.client.seal(ATTEMPT, EndReason.SUBMITTED, RECORDS)
        trace, digest = await bench.world.store.read(ATTEMPT)
        assert (sealed.digest, trace.tools) == (digest, RECORDS)
        bench.lose(0, fault=Fault.TWICE)
        assert await bench.client.discard("att_two") == 0
        assert bench.counters.read()["gateway_client.retried"] == 2

    play(bench, scene)


def test_a_model_call_whose_answer_is_lost_fails_and_is_not_sampled_again(tmp_path: Path) -> None:
    bench = Bench(GatewayWorld(tmp_path, ["one", "two"]))

    async def scene(bench: Bench) -> None:
        bench.lose(1)  # the first request opens the attempt
        with pytest.raises(RemoteFailed, match="the answer to a model call was lost"):
            await bench.chat()
        assert len(bench.world.generator.requests) == 1
        assert await bench.client.discard(ATTEMPT) == bench.world.ledger.recorded(ATTEMPT) > 0

    play(bench, scene)


def test_a_gateway_that_is_too_busy_is_asked_again(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [Say(text="one", holds=True), "two"], limits=GatewayLimits(max_open_calls=1))

    async def scene(bench: Bench) -> None:
        first = asyncio.create_task(bench.chat())
        await world.generator.started.wait()
        second = asyncio.create_task(bench.chat())
        while not bench.counters.read().get("gateway_client.retried"):  # noqa: ASYNC110 (a refusal has no event)
            await asyncio.sleep(0)
        world.generator.release()
        assert {(await first).message.content, (await second).message.content} == {"one", "two"}

    play(Bench(world), scene)


@pytest.mark.parametrize(
    ("say", "error"),
    [
        (Say(text="x", changes={"finish_reason": FinishReason.ENGINE_ERROR}), EngineError),
        (Say(text="x", changes={"finish_reason": FinishReason.GENERATION_TIMEOUT}), DeadlineExceeded),
    ],
)
def test_a_failed_model_call_keeps_its_kind(tmp_path: Path, say: Say, error: type[Exception]) -> None:
    async def scene(bench: Bench) -> None:
        with pytest.raises(error):
            await bench.chat()

    play(Bench(GatewayWorld(tmp_path, [say])), scene)


def test_a_full_context_a_bad_request_and_a_dead_attempt_are_told_apart(tmp_path: Path) -> None:
    bench = Bench(GatewayWorld(tmp_path, bindings={ATTEMPT: binding(max_context_tokens=2)}))

    async def scene(bench: Bench) -> None:
        assert (await bench.chat()).context_full
        with pytest.raises(InputError, match=r"stop must be at most 4"):
            await bench.chat(stop=("a", "b", "c", "d", "e"))
        bench.world.directory.bindings.clear()
        with pytest.raises(Refused, match="not alive"):
            await bench.chat()
        with pytest.raises(Refused, match="not alive"):
            await bench.client.seal(ATTEMPT, EndReason.SUBMITTED, ())
        assert await bench.client.discard(ATTEMPT) == 0
        assert bench.counters.read()["gateway_client.discard_refused.late"] == 1

    play(bench, scene)


def test_a_model_call_ends_at_its_deadline_and_the_engine_stops_working(tmp_path: Path) -> None:
    bench = Bench(GatewayWorld(tmp_path, [Say(text="one", holds=True)]))

    async def scene(bench: Bench) -> None:
        request = ChatRequest(messages=(USER,))
        with pytest.raises(DeadlineExceeded, match="a model call"):
            await bench.client.chat(ATTEMPT, request, bench.world.clock.now_s() + 0.5)
        await bench.world.generator.left.wait()

    play(bench, scene)


def test_a_gateway_that_does_not_answer_is_given_up_and_named(tmp_path: Path) -> None:
    bench = Bench(GatewayWorld(tmp_path), deadline_s=0.2)

    async def scene(bench: Bench) -> None:
        bench.proxy.plan = lambda _: Fault.LOSE_REQUEST
        with pytest.raises(DeadlineExceeded, match=r"an answer of the gateway \(ServerDisconnected.*http://127"):
            await bench.client.check()

    play(bench, scene)


def test_a_key_is_checked_before_anything_is_done_with_it(tmp_path: Path) -> None:
    async def good(bench: Bench) -> None:
        assert await bench.client.check() == "wrk_one"

    async def bad(bench: Bench) -> None:
        with pytest.raises(Refused, match="foreign"):
            await bench.client.check()

    play(Bench(GatewayWorld(tmp_path / "good")), good)
    play(Bench(GatewayWorld(tmp_path / "bad"), key="stc-worker.wrk_one.9999999999.x"), bad)
