import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from steelyard.errors import DeadlineExceeded, EngineError, InputError, Refused
from steelyard.gateway.planning import TextRequest, normal_messages
from steelyard.gateway.service import GatewayLimits, Overloaded
from steelyard.testing.gateway import ATTEMPT, GatewayWorld, Say, binding
from steelyard.testing.manual_clock import ManualClock
from steelyard.types import (
    ChatRequest,
    EndReason,
    FinishReason,
    Message,
    Sampling,
    ToolCall,
    ToolSpec,
    Turn,
)

USER = Message(role="user", content="Repair it.")
TOOL = ToolSpec(name="submit", description="", parameters={})
CALL = '<tool_call>{"name": "submit", "arguments": {"a":  1}}</tool_call>'


def run(world: GatewayWorld, scenario: Coroutine[Any, Any, None]) -> None:
    async def whole() -> None:
        try:
            await scenario
        finally:
            await world.close()

    asyncio.run(whole())


def ask(*messages: Message, **changes: Any) -> ChatRequest:
    return ChatRequest(messages=messages or (USER,), **changes)


def turns(world: GatewayWorld) -> tuple[Turn, ...]:
    return world.store.open_turns(ATTEMPT)


def test_a_reply_is_recorded_with_all_that_the_engine_said_before_it_is_returned(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["Hello"])

    async def scenario() -> None:
        reply = await world.gateway.chat(ATTEMPT, ask())
        (turn,) = turns(world)
        (request,) = world.generator.requests
        assert (reply.message, reply.finish_reason) == (Message(role="assistant", content="Hello"), FinishReason.STOP)
        assert (turn.request_id, turn.prompt_token_ids) == (reply.request_id, request.prompt_token_ids)
        assert world.gateway.text_of(turn.token_ids) == "Hello<|im_end|>"
        assert len(turn.logprobs) == len(turn.token_ids) == reply.num_completion_tokens
        assert (turn.version_spans[0].version, turn.replica_id) == (3, "rep_script")
        assert world.ledger.recorded(ATTEMPT) == len(turn.token_ids)

    run(world, scenario())


def test_a_conversation_is_one_segment_with_the_sampled_tokens_kept(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [CALL, "Done."])

    async def scenario() -> None:
        first = await world.gateway.chat(ATTEMPT, ask(tools=(TOOL,)))
        (call,) = first.message.tool_calls
        assert (first.message.content, call.name, call.arguments) == (None, "submit", '{"a":  1}')
        result = Message(role="tool", content="ok", tool_call_id=call.id)
        await world.gateway.chat(ATTEMPT, ask(USER, first.message, result, tools=(TOOL,)))
        one, two = turns(world)
        known = (*one.prompt_token_ids, *one.token_ids)
        assert two.prompt_token_ids[: len(known)] == known
        assert (one.segment_index, two.segment_index, two.turn_index) == (0, 0, 1)
        assert world.generator.requests[1].sequence_key == f"{ATTEMPT}/0"
        sealed = await world.recorder.seal(ATTEMPT, EndReason.SUBMITTED, (), None)
        assert (sealed.num_turns, sealed.num_segments) == (2, 1)

    run(world, scenario())


def test_an_edited_history_and_a_repeated_request_start_segments_that_are_counted(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["one", "two", "again", "edited"])

    async def scenario() -> None:
        first = await world.gateway.chat(ATTEMPT, ask())
        follow = ask(USER, first.message, USER)
        await world.gateway.chat(ATTEMPT, follow)
        await world.gateway.chat(ATTEMPT, follow)
        await world.gateway.chat(ATTEMPT, ask(Message(role="user", content="other"), first.message, USER))
        assert [turn.segment_index for turn in turns(world)] == [0, 0, 1, 2]
        assert turns(world)[1].prompt_token_ids == turns(world)[2].prompt_token_ids
        counts = world.counters.read()
        names = ("first", "forked", "history_edited")
        assert [counts[f"gateway.segments.{name}"] for name in names] == [1, 1, 1]

    run(world, scenario())


def test_the_bindings_sampling_wins_and_what_was_used_is_recorded(tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.7, top_p=1.0, max_tokens=20, seed=None)
    world = GatewayWorld(tmp_path, ["a", "b", "c"], bindings={ATTEMPT: binding(sampling=sampling)})

    async def scenario() -> None:
        for max_tokens in (None, 7, 500):
            await world.gateway.chat(ATTEMPT, ask(max_tokens=max_tokens))
        used = [turn.sampling for turn in turns(world)]
        assert [entry.max_tokens for entry in used] == [20, 7, 20]
        assert {(entry.temperature, entry.top_p, entry.seed) for entry in used} == {(0.7, 1.0, None)}
        assert used == [request.sampling for request in world.generator.requests]

    run(world, scenario())


def test_a_seed_is_repeatable_for_an_attempt_and_differs_between_calls_and_siblings(tmp_path: Path) -> None:
    def seeds(directory: str, attempt: str, bound: int | None) -> list[int | None]:
        bindings = {attempt: binding(sampling=Sampling(max_tokens=50, seed=bound))}
        world = GatewayWorld(tmp_path / directory, ["a", "b"], bindings=bindings)

        async def scenario() -> None:
            for _ in range(2):
                await world.gateway.chat(attempt, ask(seed=42))

        run(world, scenario())
        return [request.sampling.seed for request in world.generator.requests]

    first = seeds("1", "att_a", None)
    assert first == seeds("2", "att_a", None)
    assert len({*first, *seeds("3", "att_b", None)}) == 4
    assert seeds("4", "att_a", 5) == seeds("5", "att_b", 5) != first


def test_a_prompt_that_leaves_no_room_is_answered_as_context_full_and_samples_nothing(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path)
    num_tokens = len(world.renderer.first_prompt((USER,), ()).token_ids)
    world.directory.bindings[ATTEMPT] = binding(max_context_tokens=num_tokens)

    async def scenario() -> None:
        reply = await world.gateway.chat(ATTEMPT, ask())
        assert (reply.context_full, reply.num_prompt_tokens, reply.num_completion_tokens) == (True, num_tokens, 0)
        assert (world.generator.requests, turns(world)) == ([], ())

    run(world, scenario())


def test_the_room_that_is_left_bounds_the_answer(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [Say(text="a", ends=False)])
    num_tokens = len(world.renderer.first_prompt((USER,), ()).token_ids)
    world.directory.bindings[ATTEMPT] = binding(max_context_tokens=num_tokens + 1)

    async def scenario() -> None:
        reply = await world.gateway.chat(ATTEMPT, ask())
        assert (reply.finish_reason, reply.context_full) == (FinishReason.LENGTH, False)
        assert world.generator.requests[0].sampling.max_tokens == 1

    run(world, scenario())


def test_a_stop_string_ends_the_engines_work_and_the_recorded_turn(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["Thought: x\nObservation: made up by the policy itself"])

    async def scenario() -> None:
        reply = await world.gateway.chat(ATTEMPT, ask(stop=("\nObservation:",)))
        assert (reply.message.content, reply.finish_reason) == ("Thought: x", FinishReason.STOP)
        (turn,) = turns(world)
        assert world.gateway.text_of(turn.token_ids) == "Thought: x\nObservation:"
        assert len(turn.token_ids) == len(turn.logprobs) == len(turn.kept_logmass)
        assert world.generator.aborted == [reply.request_id]

    run(world, scenario())


def test_malformed_calls_stay_in_the_content_and_are_counted(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["<tool_call>{oops}</tool_call>"])

    async def scenario() -> None:
        reply = await world.gateway.chat(ATTEMPT, ask(tools=(TOOL,)))
        assert (reply.message.content, reply.message.tool_calls) == ("<tool_call>{oops}</tool_call>", ())
        assert reply.num_malformed_calls == world.counters.read()["gateway.malformed_calls"] == 1

    run(world, scenario())


def test_without_tools_a_call_is_ordinary_text(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [CALL])

    async def scenario() -> None:
        reply = await world.gateway.chat(ATTEMPT, ask())
        assert (reply.message.content, reply.message.tool_calls) == (CALL, ())

    run(world, scenario())


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.QUEUE_TIMEOUT, DeadlineExceeded),
        (FinishReason.GENERATION_TIMEOUT, DeadlineExceeded),
        (FinishReason.CANCELLED, EngineError),
        (FinishReason.ENGINE_ERROR, EngineError),
    ],
)
def test_an_engine_that_gave_up_leaves_no_turn_behind(
    tmp_path: Path, reason: FinishReason, error: type[Exception]
) -> None:
    world = GatewayWorld(tmp_path, [Say(text="par", ends=False, finish_reason=reason)])

    async def scenario() -> None:
        with pytest.raises(error, match=f"{reason}|rep_script"):
            await world.gateway.chat(ATTEMPT, ask())
        assert (turns(world), world.ledger.total) == ((), 0)
        assert world.counters.read()["gateway.unrecorded_tokens"] > 0

    run(world, scenario())


def test_an_engine_that_never_answers_is_given_up_with_its_name(tmp_path: Path) -> None:
    limits = GatewayLimits(turn_deadline_s=0.0, grace_s=0.0)
    world = GatewayWorld(tmp_path, [Say(text="x", holds=True)], limits=limits, clock=ManualClock())

    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded, match="engine local"):
            await world.gateway.chat(ATTEMPT, ask())
        assert turns(world) == ()

    run(world, scenario())


def test_the_earliest_deadline_counts(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    limits = GatewayLimits(turn_deadline_s=60.0)
    world = GatewayWorld(
        tmp_path, ["a", "b", "c"], limits=limits, clock=clock, bindings={ATTEMPT: binding(deadline_at_s=1100.0)}
    )

    async def scenario() -> None:
        await world.gateway.chat(ATTEMPT, ask())
        await world.gateway.chat(ATTEMPT, ask(), deadline_at_s=1010.0)
        clock.advance(90.0)
        await world.gateway.chat(ATTEMPT, ask())
        assert [request.deadline_at_s for request in world.generator.requests] == [1060.0, 1010.0, 1100.0]
        clock.advance(10.0)
        with pytest.raises(Refused, match="expired"):
            await world.gateway.chat(ATTEMPT, ask())

    run(world, scenario())


def test_an_attempt_that_ends_while_the_engine_works_records_nothing(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [Say(text="late", holds=True)])

    async def scenario() -> None:
        call = asyncio.create_task(world.gateway.chat(ATTEMPT, ask()))
        await world.generator.started.wait()
        assert world.recorder.discard(ATTEMPT) == 0
        world.generator.release()
        with pytest.raises(Refused, match="late"):
            await call
        assert (turns(world), world.ledger.total) == ((), 0)

    run(world, scenario())


def test_a_cancelled_caller_ends_the_engines_work_and_frees_its_place(tmp_path: Path) -> None:
    limits = GatewayLimits(max_open_calls_per_attempt=1)
    world = GatewayWorld(tmp_path, [Say(text="never read", holds=True), "next"], limits=limits)

    async def scenario() -> None:
        call = asyncio.create_task(world.gateway.chat(ATTEMPT, ask()))
        await world.generator.started.wait()
        with pytest.raises(Overloaded):
            await world.gateway.chat(ATTEMPT, ask())
        call.cancel()
        await asyncio.wait([call])
        assert world.generator.cancelled == [world.generator.requests[0].request_id]
        assert (await world.gateway.chat(ATTEMPT, ask())).message.content == "next"

    run(world, scenario())


def test_too_many_open_calls_say_whose_fault_it_is(tmp_path: Path) -> None:
    limits = GatewayLimits(max_open_calls=1, max_open_calls_per_attempt=1)
    bindings = {ATTEMPT: binding(), "att_two": binding()}
    world = GatewayWorld(tmp_path, [Say(text="x", holds=True)], limits=limits, bindings=bindings)

    async def scenario() -> None:
        call = asyncio.create_task(world.gateway.chat(ATTEMPT, ask()))
        await world.generator.started.wait()
        for attempt, is_own in ((ATTEMPT, True), ("att_two", False)):
            with pytest.raises(Overloaded) as caught:
                await world.gateway.chat(attempt, ask())
            assert caught.value.is_attempts_fault is is_own
        world.generator.release()
        await call

    run(world, scenario())


def test_a_dead_or_unknown_attempt_is_refused(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a"])

    async def scenario() -> None:
        await world.gateway.chat(ATTEMPT, ask())
        del world.directory.bindings[ATTEMPT]
        for attempt in (ATTEMPT, "att_unknown"):
            with pytest.raises(Refused, match="not alive"):
                await world.gateway.chat(attempt, ask())

    run(world, scenario())


def test_streamed_pieces_add_up_to_the_reply_and_come_before_it_is_recorded(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, [f"I  look.\n{CALL}"])

    async def scenario() -> None:
        pieces: list[tuple[str, int]] = []
        completion = await world.gateway.complete_chat(
            ATTEMPT, ask(tools=(TOOL,)), lambda text: pieces.append((text, len(turns(world))))
        )
        assert "".join(text for text, _ in pieces) == completion.reply.message.content == "I  look."
        assert len(pieces) > 1
        assert {recorded for _, recorded in pieces} == {0}
        assert len(turns(world)) == 1

    run(world, scenario())


def test_a_prompt_as_text_extends_the_tokens_of_the_one_before(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["forty\nObservation: x", "two", "new"])

    async def scenario() -> None:
        first = await world.gateway.complete_prompt(ATTEMPT, TextRequest(prompt="Question\n", stop=("\nObs",)))
        assert first.reply.message.content == "forty"
        second = await world.gateway.complete_prompt(ATTEMPT, TextRequest(prompt="Question\nforty\nObservation: 3\n"))
        await world.gateway.complete_prompt(ATTEMPT, TextRequest(prompt="Other\n"))
        assert first.turn is not None
        assert second.turn is not None
        known = (*first.turn.prompt_token_ids, *first.turn.token_ids)
        assert second.turn.prompt_token_ids[: len(known)] == known
        assert world.gateway.text_of(second.turn.prompt_token_ids) == "Question\nforty\nObservation: 3\n"
        assert [turn.segment_index for turn in turns(world)] == [0, 0, 1]

    run(world, scenario())


def test_a_prompt_as_tokens_is_taken_as_it_is(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a", "b"])

    async def scenario() -> None:
        first = await world.gateway.complete_prompt(ATTEMPT, TextRequest(prompt=(1, 300, 301)))
        assert first.turn is not None
        longer = (1, 300, 301, *first.turn.token_ids, 302)
        await world.gateway.complete_prompt(ATTEMPT, TextRequest(prompt=longer))
        assert [turn.prompt_token_ids for turn in turns(world)] == [(1, 300, 301), longer]
        assert [turn.segment_index for turn in turns(world)] == [0, 0]

    run(world, scenario())


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (ChatRequest(messages=()), "at least one message"),
        (ask(Message(role="root", content="x")), r"messages\[0\]\.role must be one of .* not 'root'"),
        (ask(msgspec.structs.replace(USER, tool_calls=(ToolCall(id="c", name="n", arguments="{}"),))), "tool_calls"),
        (ask(max_tokens=0), "max_tokens must be at least 1"),
    ],
)
def test_a_request_that_is_no_conversation_is_bad_input(tmp_path: Path, request_: ChatRequest, complaint: str) -> None:
    world = GatewayWorld(tmp_path, ["a"])

    async def scenario() -> None:
        with pytest.raises(InputError, match=complaint):
            await world.gateway.chat(ATTEMPT, request_)

    run(world, scenario())


def test_a_prompt_that_is_empty_or_holds_no_token_ids_is_bad_input(tmp_path: Path) -> None:
    world = GatewayWorld(tmp_path, ["a"])

    async def scenario() -> None:
        for prompt in ("", (), (-1, 3), (3, 1 << 20)):
            with pytest.raises(InputError, match="prompt must"):
                await world.gateway.complete_prompt(ATTEMPT, TextRequest(prompt=prompt))

    run(world, scenario())


def test_messages_are_compared_in_one_form() -> None:
    call = ToolCall(id="c", name="n", arguments="{}")
    messages = (
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="assistant", content=None),
        USER,
    )
    assert [message.content for message in normal_messages(messages)] == [None, "", "Repair it."]
