"""How conversations grow and end, and how many of them there is room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.conversations import Conversations, Growth, GrowthForecast, Member

NUM_TURNS, TURN_TOKENS = 6, 100
AMPLE = 10**9


def play(conversations: Conversations, num: int, num_turns: int = NUM_TURNS) -> None:
    """So many conversations from their first turn to their end, each longer by ``TURN_TOKENS`` with each turn."""
    for index in range(num):
        for turn in range(1, num_turns + 1):
            conversations.begin_turn(f"a{index}", "key")
            conversations.end_turn(f"a{index}", "key", turn * TURN_TOKENS)
        conversations.release(f"a{index}")


def let_in(growth: Growth, members: list[Member], capacity_tokens: int) -> list[Member]:
    """Members, and the new conversations that are let in beside them one after the other."""
    while True:
        asking = [*members, Member(1, TURN_TOKENS)]
        if sum(one.num_tokens for one in asking) + growth(asking) > capacity_tokens:
            return members
        members = asking


def test_ranks_follow_the_order_in_which_attempts_came_and_turns_are_counted_by_conversation() -> None:
    conversations = Conversations()
    assert conversations.begin_turn("old", "main") == (1, 1)
    assert conversations.begin_turn("young", "main") == (2, 1)
    assert conversations.begin_turn("old", "main") == (1, 2)
    assert conversations.begin_turn("old", "sub-agent") == (1, 1)
    conversations.release("old")
    assert conversations.begin_turn("old", "main") == (3, 1), "a released attempt is new when it comes again"


def test_of_too_many_attempts_that_are_never_released_the_oldest_is_forgotten() -> None:
    conversations = Conversations()
    for index in range(10_001):
        conversations.begin_turn(f"a{index}", "key")
    assert conversations.begin_turn("a1", "key") == (2, 2)
    assert conversations.begin_turn("a0", "key") == (10_002, 1)


def test_the_end_of_a_turn_of_a_released_attempt_is_ignored() -> None:
    conversations = Conversations()
    conversations.begin_turn("a", "key")
    conversations.release("a")
    conversations.end_turn("a", "key", 100)
    conversations.release("a")


def test_those_who_come_alone_grow_to_the_length_at_which_others_ended() -> None:
    conversations = Conversations()
    play(conversations, 400)
    growth = conversations.growth(0, AMPLE, AMPLE)
    assert growth([Member(1, TURN_TOKENS)]) == pytest.approx((NUM_TURNS - 1) * TURN_TOKENS, rel=0.1)
    assert growth([Member(NUM_TURNS, NUM_TURNS * TURN_TOKENS)]) == 0, "who is in the last turn makes room"


def test_while_nobody_waits_all_are_let_in_who_fit_at_their_longest() -> None:
    conversations = Conversations()
    play(conversations, 400)
    capacity = 20 * NUM_TURNS * TURN_TOKENS
    assert len(let_in(conversations.growth(0, capacity, AMPLE), [], capacity)) == pytest.approx(20, abs=1)


def test_while_many_wait_they_begin_at_the_rate_that_can_be_kept_up() -> None:
    conversations = Conversations()
    play(conversations, 400)
    capacity = 20 * NUM_TURNS * TURN_TOKENS
    # 100 + 200 + ... + 600 tokens times turns each.
    rate = capacity / (TURN_TOKENS * NUM_TURNS * (NUM_TURNS + 1) / 2)
    assert rate < len(let_in(conversations.growth(1000, capacity, AMPLE), [], capacity)) < rate + 2


def test_spread_over_all_turns_nearly_twice_as_many_fit_as_at_their_longest() -> None:
    conversations = Conversations()
    play(conversations, 400)
    capacity = 20 * NUM_TURNS * TURN_TOKENS
    growth = conversations.growth(1000, capacity, AMPLE)
    members: list[Member] = []
    for _ in range(4 * NUM_TURNS):
        members = [Member(one.turn + 1, one.num_tokens + TURN_TOKENS) for one in members if one.turn < NUM_TURNS]
        members = let_in(growth, members, capacity)
        assert sum(one.num_tokens for one in members) <= capacity
    assert len(members) > 1.5 * 20


def test_no_conversation_is_projected_to_get_longer_than_any_may() -> None:
    growth = Conversations().growth(0, AMPLE, 250)
    assert growth([Member(1, 200)]) <= 50
    assert growth([Member(1, 250)]) == 0


def test_a_rate_of_less_than_two_in_three_turns_is_kept_up_too() -> None:
    conversations = Conversations()
    play(conversations, 400, num_turns=20)
    capacity = 15 * 20 * TURN_TOKENS  # 1.43 may begin in each turn, of whom 29 fit.
    growth = conversations.growth(1000, capacity, AMPLE)
    members: list[Member] = []
    for _ in range(80):
        members = [Member(one.turn + 1, one.num_tokens + TURN_TOKENS) for one in members if one.turn < 20]
        members = let_in(growth, members, capacity)
    assert len(members) > 1.7 * 15


def test_conversations_that_get_shorter_when_they_are_edited_are_projected_to_stay_as_they_are() -> None:
    forecast = GrowthForecast()
    forecast.note_growth(-500)
    members = [Member(2, 300), Member(1, 100)]
    assert forecast.growth_tokens(members, num_waiting=5, capacity_tokens=1000, longest_tokens=1000) >= 0
    assert forecast.growth_tokens(members, num_waiting=0, capacity_tokens=1000, longest_tokens=1000) < 100


def test_conversations_that_get_longer_over_a_run_are_followed() -> None:
    conversations = Conversations()
    play(conversations, 100, num_turns=2)
    short = conversations.growth(0, AMPLE, AMPLE)([Member(1, TURN_TOKENS)])
    play(conversations, 2000, num_turns=10)
    assert short < 2 * TURN_TOKENS
    assert conversations.growth(0, AMPLE, AMPLE)([Member(1, TURN_TOKENS)]) > 7 * TURN_TOKENS


_MEMBERS = st.lists(st.builds(Member, st.integers(1, 200), st.integers(1, 5000)), min_size=1, max_size=30)


@given(
    members=_MEMBERS,
    turns=st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=50),
    num_waiting=st.integers(0, 50),
    longest=st.integers(1, 6000),
)
def test_growth_is_at_least_nothing_and_at_most_what_the_longest_would_need(
    members: list[Member], turns: list[tuple[int, bool]], num_waiting: int, longest: int
) -> None:
    forecast = GrowthForecast()
    for turn, is_end in turns:
        (forecast.note_ended if is_end else forecast.note_went_on)(turn)
    most = sum(max(0, longest - one.num_tokens) for one in members) + (num_waiting + len(members)) * longest
    growth = forecast.growth_tokens(members, num_waiting=num_waiting, capacity_tokens=50_000, longest_tokens=longest)
    assert 0 <= growth <= most
