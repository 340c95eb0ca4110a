"""The agent loop."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from steelyard.errors import DeadlineExceeded, EngineError, SandboxLost
from steelyard.harness.base import LoopResult
from steelyard.harness.chat_loop import MAX_CALLS_PER_TURN, ChatLoop
from steelyard.testing.harness import FakeClock, MemorySandbox, ScriptedChat, calls, make_reply
from steelyard.types import (
    ChatReply,
    ChatRequest,
    Effects,
    EndReason,
    FinishReason,
    Message,
    Task,
    ToolCall,
    ToolSpec,
)

TASK = Task(
    task_id="toy/train/0",
    environment="toy",
    environment_version="1",
    split="train",
    index=0,
    messages=(Message(role="user", content="go"),),
    tools=(
        ToolSpec(name="look", description="", parameters={}, effects=Effects.NONE),
        ToolSpec(name="change", description="", parameters={}, effects=Effects.SANDBOX),
        ToolSpec(name="submit", description="", parameters={}),
    ),
)


class Answer(msgspec.Struct, frozen=True):
    text: str
    outcome: str = "ok"
    is_valid: bool = True
    done: bool = False


class ToySession:
    """Notes calls in order; ``look`` waits until ``num_together`` of them run at once."""

    files: Mapping[str, bytes] = {}

    def __init__(self, num_together: int = 1, on_call: Callable[[ToolCall], None] | None = None) -> None:
        self.log: list[str] = []
        self.num_turns = 0
        self._barrier = asyncio.Barrier(num_together)
        self._on_call = on_call

    async def call(self, sandbox: Any, call: ToolCall) -> Answer:
        self.log.append(call.id)
        if self._on_call is not None:
            self._on_call(call)
        if call.name == "look":
            await self._barrier.wait()
        return Answer(f"{call.name} done", done=call.name == "submit")

    def no_call(self, message: Message) -> Answer:
        return Answer("error: no tool call", "error", is_valid=False, done=message.content == "I give up")

    def turn_ended(self) -> None:
        self.num_turns += 1

    async def submit(self, sandbox: Any, answer: str) -> None:
        raise AssertionError("the loop calls tools")

    def artifact(self) -> bytes:
        return b""


def converse(
    *answers: Message | ChatReply, session: ToySession | None = None, max_turns: int = 6
) -> tuple[LoopResult, list[ChatRequest]]:
    """Run the loop against answers given in order."""
    remaining = list(answers)
    chat = ScriptedChat(lambda attempt_id, request: remaining.pop(0))

    async def run() -> LoopResult:
        loop = ChatLoop(
            attempt_id="att_0",
            task=TASK,
            session=session or ToySession(),
            sandbox=MemorySandbox("att_0"),
            chat=chat,
            clock=FakeClock(),
            turn_deadline_s=20.0,
            tool_deadline_s=20.0,
        )
        return await loop.run(max_turns)

    return asyncio.run(run()), [request for _, request in chat.requests]


CHANGE, SUBMIT = calls(("change", "{}")), calls(("submit", "{}"))


def test_the_agent_works_until_it_submits() -> None:
    result, requests = converse(CHANGE, SUBMIT)
    assert result.end_reason is EndReason.SUBMITTED
    assert [record.name for record in result.tools] == ["change", "submit"]
    assert [record.turn_index for record in result.tools] == [0, 1]
    assert [message.role for message in requests[1].messages] == ["user", "assistant", "tool"]


def test_each_request_extends_the_one_before() -> None:
    _, requests = converse(CHANGE, Message(role="assistant", content="hm"), CHANGE, SUBMIT)
    for shorter, longer in itertools.pairwise(requests):
        assert longer.messages[: len(shorter.messages)] == shorter.messages


def test_turns_run_out() -> None:
    session = ToySession()
    result, requests = converse(*[CHANGE] * 3, session=session, max_turns=3)
    assert result.end_reason is EndReason.MAX_TURNS
    assert len(requests) == len(session.log) == session.num_turns == 3


@pytest.mark.parametrize(
    ("reply", "end_reason"),
    [
        (make_reply(CHANGE, FinishReason.LENGTH), EndReason.LENGTH),
        (make_reply(Message(role="assistant", content=""), context_full=True), EndReason.CONTEXT_FULL),
    ],
)
def test_text_that_was_cut_ends_the_attempt_and_calls_nothing(reply: ChatReply, end_reason: EndReason) -> None:
    session = ToySession()
    result, _ = converse(reply, session=session)
    assert result.end_reason is end_reason
    assert session.log == []


@pytest.mark.parametrize("reason", [FinishReason.QUEUE_TIMEOUT, FinishReason.ENGINE_ERROR, FinishReason.CANCELLED])
def test_a_call_that_was_not_answered_is_never_taken_for_the_agents_doing(reason: FinishReason) -> None:
    with pytest.raises(EngineError, match=str(reason)):
        converse(make_reply(CHANGE, reason))


def test_results_come_back_in_the_order_of_the_calls() -> None:
    message = calls(("look", "{}"), ("change", "{}"), ("look", "{}"))
    _, requests = converse(message, SUBMIT)
    told = [(m.tool_call_id, m.content) for m in requests[1].messages if m.role == "tool"]
    assert told == [("call_0", "look done"), ("call_1", "change done"), ("call_2", "look done")]


def test_calls_without_effects_run_together() -> None:
    message = calls(("look", "{}"), ("look", "{}"), ("look", "{}"))
    result, _ = converse(message, SUBMIT, session=ToySession(num_together=3))
    assert [record.outcome for record in result.tools] == ["ok"] * 4


def test_a_call_with_effects_waits_for_those_before_it() -> None:
    session = ToySession(num_together=2)
    converse(calls(("change", "{}"), ("look", "{}"), ("look", "{}"), ("change", "{}")), SUBMIT, session=session)
    assert session.log[0] == "call_0"
    assert session.log[3] == "call_3"


def test_nothing_is_run_after_a_submission() -> None:
    session = ToySession()
    result, _ = converse(calls(("submit", "{}"), ("change", "{}")), session=session)
    assert session.log == ["call_0"]
    assert result.end_reason is EndReason.SUBMITTED


def test_no_call_is_told_to_the_agent_and_recorded_as_invalid() -> None:
    result, requests = converse(Message(role="assistant", content="hm"), SUBMIT)
    assert requests[1].messages[-1] == Message(role="user", content="error: no tool call")
    assert [record.is_valid for record in result.tools] == [False, True]


def test_no_call_can_end_the_attempt_where_the_session_says_so() -> None:
    result, _ = converse(Message(role="assistant", content="I give up"))
    assert result.end_reason is EndReason.SUBMITTED


def test_malformed_calls_beside_good_ones_are_recorded() -> None:
    result, _ = converse(make_reply(CHANGE, num_malformed_calls=2), SUBMIT)
    assert [record.is_valid for record in result.tools] == [False, False, True, True]


def test_more_calls_than_allowed_are_refused_and_told() -> None:
    many = calls(*[("change", "{}")] * (MAX_CALLS_PER_TURN + 2))
    session = ToySession()
    result, requests = converse(many, SUBMIT, session=session)
    assert len(session.log) == MAX_CALLS_PER_TURN + 1
    told = [message for message in requests[1].messages if message.role == "tool"]
    assert len(told) == MAX_CALLS_PER_TURN + 2
    assert sum(not record.is_valid for record in result.tools) == 2


def test_an_agent_that_brings_its_own_sandbox_down_has_crashed() -> None:
    def crash(call: ToolCall) -> None:
        raise SandboxLost("out of space", is_by_program=True)

    result, _ = converse(CHANGE, session=ToySession(on_call=crash))
    assert result.end_reason is EndReason.ANSWER_CRASHED


@pytest.mark.parametrize("name", ["change", "look"])
def test_a_sandbox_lost_by_no_fault_of_the_agent_is_not_its_end(name: str) -> None:
    def lose(call: ToolCall) -> None:
        raise SandboxLost("the host is out of memory")

    with pytest.raises(SandboxLost, match="host"):
        converse(calls((name, "{}")), session=ToySession(on_call=lose))


def test_a_gateway_that_never_answers_is_named() -> None:
    async def run() -> None:
        async def never(attempt_id: str) -> None:
            await asyncio.Event().wait()

        loop = ChatLoop(
            attempt_id="att_0",
            task=TASK,
            session=ToySession(),
            sandbox=MemorySandbox("att_0"),
            chat=ScriptedChat(lambda attempt_id, request: CHANGE, gate=never),
            clock=FakeClock(),
            turn_deadline_s=-2.0,
            tool_deadline_s=1.0,
        )
        await loop.run(1)

    with pytest.raises(DeadlineExceeded, match="a model call; still missing: gateway"):
        asyncio.run(run())


def test_a_tool_that_never_ends_is_named() -> None:
    async def run() -> None:
        loop = ChatLoop(
            attempt_id="att_0",
            task=TASK,
            session=ToySession(num_together=2),
            sandbox=MemorySandbox("att_0"),
            chat=ScriptedChat(lambda attempt_id, request: calls(("look", "{}"))),
            clock=FakeClock(),
            turn_deadline_s=20.0,
            tool_deadline_s=0.0,
        )
        await loop.run(1)

    with pytest.raises(DeadlineExceeded, match="the tool look; still missing: sandbox"):
        asyncio.run(run())
