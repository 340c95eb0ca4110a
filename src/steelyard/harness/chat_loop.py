"""The built-in agent loop: ask the model, run the tools that it calls, until it is done or out of turns.

consumes   ChatReply
waits for  the gateway (turn_deadline_s) and tools (tool_deadline_s)
produces   LoopResult: how the agent ended, and a record of each tool call
"""

import asyncio
import itertools
from collections.abc import Sequence

from steelyard.clock import Clock
from steelyard.errors import EngineError, SandboxLost
from steelyard.harness.base import ChatClient, LoopResult, SandboxHandle, Session, ToolAnswer, deadline
from steelyard.types import (
    ChatReply,
    ChatRequest,
    Effects,
    EndReason,
    FinishReason,
    Lease,
    Message,
    Task,
    ToolCall,
    ToolRecord,
)

MAX_CALLS_PER_TURN = 16
CHAT_GRACE_S = 2.0
"""Added to the deadline that the gateway was given, so that its own, better answer comes first."""


class ChatAgent:
    """Carries attempts through with :class:`ChatLoop`; deadlines are for one model call and one tool."""

    def __init__(self, chat: ChatClient, clock: Clock, *, turn_deadline_s: float, tool_deadline_s: float) -> None:
        self._chat = chat
        self._clock = clock
        self._turn_deadline_s = turn_deadline_s
        self._tool_deadline_s = tool_deadline_s

    async def run(self, lease: Lease, task: Task, session: Session, sandbox: SandboxHandle) -> LoopResult:
        """See :class:`steelyard.harness.base.Agent`."""
        loop = ChatLoop(
            attempt_id=lease.attempt_id,
            task=task,
            session=session,
            sandbox=sandbox,
            chat=self._chat,
            clock=self._clock,
            turn_deadline_s=self._turn_deadline_s,
            tool_deadline_s=self._tool_deadline_s,
        )
        return await loop.run(lease.max_turns)


class ChatLoop:
    """One attempt's conversation.

    A message may hold several calls. Calls of tools without effects run together; any other waits for
    those before it. Results go back in the order of the calls. No call at all is told to the session,
    which answers with an observation or ends the attempt.

    Args:
        attempt_id: on whose behalf the model is asked.
        task: first messages and tools.
        session: the trusted side of the attempt.
        sandbox: where its tools run.
    """

    def __init__(
        self,
        *,
        attempt_id: str,
        task: Task,
        session: Session,
        sandbox: SandboxHandle,
        chat: ChatClient,
        clock: Clock,
        turn_deadline_s: float,
        tool_deadline_s: float,
    ) -> None:
        self._attempt_id = attempt_id
        self._session = session
        self._sandbox = sandbox
        self._chat = chat
        self._clock = clock
        self._turn_deadline_s = turn_deadline_s
        self._tool_deadline_s = tool_deadline_s
        self._specs = task.tools
        self._without_effects = {spec.name for spec in task.tools if spec.effects is Effects.NONE}
        self._messages = list(task.messages)
        self._records: list[ToolRecord] = []

    async def run(self, max_turns: int) -> LoopResult:
        """Run to the end of the attempt.

        Raises:
            DeadlineExceeded: a model call or a tool did not answer in time.
            SteelyardError: the gateway or the sandbox failed by no fault of the agent.
        """
        for turn_index in range(max_turns):
            reply = await self._ask()
            end_reason = _end_of(reply)
            if end_reason is not None:
                return self._ended(end_reason)
            self._messages.append(reply.message)
            try:
                is_done = await self._act(turn_index, reply)
            except SandboxLost as error:
                if not error.is_by_program:
                    raise
                return self._ended(EndReason.ANSWER_CRASHED)
            self._session.turn_ended()
            if is_done:
                return self._ended(EndReason.SUBMITTED)
        return self._ended(EndReason.MAX_TURNS)

    def _ended(self, end_reason: EndReason) -> LoopResult:
        return LoopResult(end_reason=end_reason, tools=tuple(self._records))

    async def _ask(self) -> ChatReply:
        request = ChatRequest(messages=tuple(self._messages), tools=self._specs)
        deadline_at_s = self._clock.now_s() + self._turn_deadline_s
        limit_s = self._turn_deadline_s + CHAT_GRACE_S
        async with deadline("a model call", ("gateway",), limit_s):
            return await self._chat.chat(self._attempt_id, request, deadline_at_s)

    async def _act(self, turn_index: int, reply: ChatReply) -> bool:
        """Carry out what one message asks for; whether that ends the attempt."""
        calls = reply.message.tool_calls
        if not calls:
            answer = self._session.no_call(reply.message)
            self._record(turn_index, None, answer.outcome, is_valid=answer.is_valid)
            self._messages.append(Message(role="user", content=answer.text))
            return answer.done
        for _ in range(reply.num_malformed_calls):
            self._record(turn_index, None, "error", is_valid=False)
        for batch in _batches(calls[:MAX_CALLS_PER_TURN], self._without_effects):
            if await self._run_batch(turn_index, batch):
                return True
        for call in calls[MAX_CALLS_PER_TURN:]:
            self._record(turn_index, call, "error", is_valid=False)
            self._tell(call, f"error: at most {MAX_CALLS_PER_TURN} calls in one message")
        return False

    async def _run_batch(self, turn_index: int, batch: Sequence[ToolCall]) -> bool:
        """Run calls together; True at the first, in their order, that ends the attempt."""
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run_tool(call)) for call in batch]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for call, task in zip(batch, running, strict=True):
            answer, latency_s = task.result()
            self._record(turn_index, call, answer.outcome, is_valid=answer.is_valid, latency_s=latency_s)
            self._tell(call, answer.text)
            if answer.done:
                return True
        return False

    async def _run_tool(self, call: ToolCall) -> tuple[ToolAnswer, float]:
        started_at_s = self._clock.now_s()
        async with deadline(f"the tool {call.name}", ("sandbox",), self._tool_deadline_s):
            answer = await self._session.call(self._sandbox, call)
        return answer, self._clock.now_s() - started_at_s

    def _tell(self, call: ToolCall, text: str) -> None:
        self._messages.append(Message(role="tool", content=text, tool_call_id=call.id))

    def _record(
        self, turn_index: int, call: ToolCall | None, outcome: str, *, is_valid: bool, latency_s: float = 0.0
    ) -> None:
        """Note a call, or the lack of one (``call`` is None)."""
        self._records.append(
            ToolRecord(
                tool_call_id=call.id if call else "",
                turn_index=turn_index,
                name=call.name if call else "",
                outcome=str(outcome),
                latency_s=latency_s,
                is_valid=is_valid,
            )
        )


def _end_of(reply: ChatReply) -> EndReason | None:
    """Whether the model call itself ended the attempt.

    Raises:
        EngineError: a finish reason that no answered call can have.
    """
    if reply.context_full:
        return EndReason.CONTEXT_FULL
    if reply.finish_reason is FinishReason.LENGTH:
        return EndReason.LENGTH
    if reply.finish_reason is not FinishReason.STOP:
        raise EngineError(
            f"request {reply.request_id}: an answered call must finish by stop or length, got {reply.finish_reason}"
        )
    return None


def _batches(calls: Sequence[ToolCall], without_effects: set[str]) -> list[list[ToolCall]]:
    """Calls in order, neighbours without effects together."""
    batches: list[list[ToolCall]] = []
    for is_free, group in itertools.groupby(calls, key=lambda call: call.name in without_effects):
        members = list(group)
        batches.extend([members] if is_free else [[call] for call in members])
    return batches
