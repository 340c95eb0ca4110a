import gc
import json
import weakref

from hypothesis import given
from hypothesis import strategies as st

from steelyard.gateway.history import History, RecordedTurn
from steelyard.gateway.renderer import Prompt
from steelyard.types import Message, ToolCall


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def chat_prompt(*messages: Message, token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(token_ids=token_ids, text="".join(m.content or "" for m in messages), messages=messages)


def add(
    history: History, prompt: Prompt, sampled: tuple[int, ...], reply: str, parent: RecordedTurn | None
) -> RecordedTurn:
    return history.add(history.place(prompt, parent), "chat", prompt, sampled, assistant(reply))


def two_turns() -> tuple[History, RecordedTurn, RecordedTurn]:
    history = History()
    first = add(history, chat_prompt(user("a"), token_ids=(1, 2)), (3,), "b", None)
    longer = chat_prompt(user("a"), assistant("b"), user("c"), token_ids=(1, 2, 3, 4))
    return history, first, add(history, longer, (5, 6), "d", first)


def test_turns_that_extend_each_other_share_a_segment() -> None:
    history, first, second = two_turns()
    assert [segment.index for segment in history.segments] == [0]
    assert history.segments[0].token_ids == (1, 2, 3, 4, 5, 6)
    assert (first.turn_index, second.turn_index) == (0, 1)


def test_an_older_turn_is_given_back_as_it_was() -> None:
    history, first, _ = two_turns()
    assert history.num_turns == 2
    previous = first.as_previous()
    assert previous.prompt == chat_prompt(user("a"), token_ids=(1, 2))
    assert (previous.token_ids, previous.reply) == ((3,), assistant("b"))


def test_what_an_attempt_has_said_is_freed_with_its_history_and_not_left_to_the_search_for_garbage() -> None:
    history, *_ = two_turns()
    segment, turn = weakref.ref(history.segments[0]), weakref.ref(history.segments[0].turns[0])
    del _
    gc.disable()
    try:
        del history
        assert (segment(), turn()) == (None, None)
    finally:
        gc.enable()


def test_the_longest_equal_message_prefix_is_found() -> None:
    history, first, second = two_turns()
    start = (user("a"), assistant("b"))
    assert history.find_chat((*start, user("other"))) is first
    assert history.find_chat((*start, user("c"), assistant("d"), user("e"))) is second
    assert history.find_chat((*start, user("c"), assistant("edited"), user("e"))) is first
    assert history.find_chat((user("x"), assistant("b"), user("c"))) is None
    assert history.find_chat((user("a"),)) is None


def test_going_on_from_an_older_turn_starts_a_segment_of_its_own() -> None:
    history, first, second = two_turns()
    fork = chat_prompt(user("a"), assistant("b"), user("x"), token_ids=(1, 2, 3, 9))
    assert history.place(fork, first) is None
    forked = add(history, fork, (10,), "y", first)
    assert forked.segment.index == 1
    after = (user("a"), assistant("b"), user("x"), assistant("y"), user("z"))
    assert history.find_chat(after) is forked
    assert history.find_chat((user("a"), assistant("b"), user("c"), assistant("d"), user("z"))) is second


def test_a_prompt_that_does_not_start_with_the_tokens_so_far_starts_a_segment() -> None:
    history, _, second = two_turns()
    assert history.place(chat_prompt(user("a"), token_ids=(1, 2, 3, 4, 5, 7, 8)), second) is None
    assert history.place(chat_prompt(user("a"), token_ids=(1, 2, 3, 4, 5)), second) is None
    assert history.place(chat_prompt(user("a"), token_ids=(1, 2, 3, 4, 5, 6)), second) is second.segment


def test_prompts_as_text_and_as_tokens_are_found_by_their_own_prefix() -> None:
    history = History()
    prompt = Prompt(token_ids=(1, 2), text="Q:", messages=())
    turn = history.add(None, "text", prompt, (3,), assistant(" 42"))
    assert history.find_text("Q: 42 and") is turn
    assert history.find_text("Q: 43") is None
    assert history.find_text("P: 42") is None
    assert history.find_tokens((1, 2, 3, 4)) is turn
    assert history.find_tokens((1, 2, 4)) is None
    assert history.find_chat((user("Q:"), assistant(" 42"))) is None


@given(parents=st.lists(st.integers(min_value=-1, max_value=8), min_size=1, max_size=9))
def test_every_sampled_token_stands_in_one_segment_once_whatever_is_forked(parents: list[int]) -> None:
    history = History()
    turns: list[RecordedTurn] = []
    for number, chosen in enumerate(parents):
        parent = turns[chosen % len(turns)] if turns and chosen >= 0 else None
        before = parent.as_previous() if parent is not None else None
        known = () if before is None else (*before.prompt.messages, before.reply)
        tokens = () if before is None else (*before.prompt.token_ids, *before.token_ids)
        messages = (*known, user(f"u{number}"))
        found = history.find_chat(messages)
        assert found is parent
        prompt = chat_prompt(*messages, token_ids=(*tokens, 100 + number))
        turns.append(add(history, prompt, (200 + number,), f"r{number}", parent))
    for segment in history.segments:
        line = segment.token_ids
        for turn in segment.turns:
            end = turn.num_prompt_tokens + len(turn.token_ids)
            assert line[turn.num_prompt_tokens : end] == turn.token_ids
    assert sorted(turn.turn_index for segment in history.segments for turn in segment.turns) == list(range(len(turns)))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=5,
)


def called(arguments: str, call_id: str = "call_1", name: str = "f") -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id=call_id, name=name, arguments=arguments),))


@given(st.dictionaries(st.text("ab", max_size=2), JSON_VALUES, max_size=3), st.booleans(), st.booleans())
def test_arguments_that_were_written_again_are_given_back_as_sampled(
    value: dict[str, object], sort_keys: bool, ensure_ascii: bool
) -> None:
    ours = called(json.dumps(value, indent=3, ensure_ascii=False))
    history = History()
    history.add(None, "chat", chat_prompt(user("a"), token_ids=(1,)), (2,), ours)
    rewritten = called(json.dumps(value, sort_keys=sort_keys, ensure_ascii=ensure_ascii, separators=(",", ":")))
    assert history.restored((user("a"), rewritten)) == (user("a"), ours)


def test_a_call_that_differs_in_more_than_its_writing_is_not_ours() -> None:
    history = History()
    history.add(None, "chat", chat_prompt(user("a"), token_ids=(1,)), (2,), called('{"a":  1}'))
    for other in (
        called('{"a": 2}'),
        called('{"a": 1}', name="g"),
        called('{"a": 1}', call_id="call_2"),
        called("not json"),
    ):
        assert history.restored((other,)) == (other,)
