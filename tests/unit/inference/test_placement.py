"""Decisions about one request."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.placement import Candidate, Need, choose, fits, keep_s

NEED = Need(kv_tokens=300, output_tokens=100)
IDLE = Candidate(
    replica_id="idle", weight=1.0, capacity_tokens=1000, projected_tokens=0, kept_tokens=0, num_open=0,
    prefill_s=2.0, token_s=0.02,
)  # fmt: skip
BUSY = dataclasses.replace(IDLE, replica_id="busy", projected_tokens=600, num_open=4, token_s=0.03)
HOME = dataclasses.replace(BUSY, replica_id="home", prefill_s=0.1)


def test_only_what_fits_by_projection_is_taken() -> None:
    full = dataclasses.replace(BUSY, projected_tokens=701)
    assert fits(NEED, BUSY) and not fits(NEED, full)
    assert choose(NEED, None, [full]) is None
    kept = dataclasses.replace(BUSY, kept_tokens=101)
    assert choose(NEED, None, [kept]) is None


def test_a_new_conversation_goes_where_the_fewest_tokens_are_open_for_the_speed() -> None:
    assert choose(NEED, None, [BUSY, IDLE]) is IDLE
    fast = dataclasses.replace(BUSY, replica_id="fast", token_s=0.001)
    assert choose(NEED, None, [BUSY, fast]) is fast


def test_a_conversation_stays_while_computing_its_prefix_again_costs_more_than_its_queue() -> None:
    assert choose(NEED, "home", [IDLE, BUSY, HOME]) is HOME


def test_it_moves_when_its_home_is_so_slow_or_full_that_computing_the_prefix_again_pays() -> None:
    slow = dataclasses.replace(HOME, token_s=0.06)
    assert choose(NEED, "home", [IDLE, slow]) is IDLE
    full = dataclasses.replace(HOME, projected_tokens=900, room_in_s=5.0)
    assert choose(NEED, "home", [IDLE, full]) is IDLE


def test_it_waits_for_its_full_home_where_room_comes_soon() -> None:
    full = dataclasses.replace(HOME, projected_tokens=900, room_in_s=0.2, token_s=0.02)
    assert choose(NEED, "home", [IDLE, full]) is None


def test_a_home_that_others_wait_for_is_no_reason_to_move() -> None:
    closed = dataclasses.replace(HOME, is_closed=True, room_in_s=0.2, token_s=0.02)
    assert choose(NEED, "home", [IDLE, closed]) is None


def test_a_replica_that_is_trusted_less_gets_less() -> None:
    doubted = dataclasses.replace(IDLE, replica_id="doubted", weight=0.125)
    assert choose(NEED, None, [doubted, dataclasses.replace(IDLE, projected_tokens=300, num_open=1)]) is not doubted


def test_kv_is_kept_as_long_as_waiting_for_it_has_not_cost_what_computing_it_costs() -> None:
    assert keep_s(0.5, 4) == 2.0
    assert keep_s(0.5, 0) == 0.5


candidates = st.builds(
    Candidate,
    replica_id=st.sampled_from("abcdef"),
    weight=st.sampled_from([0.125, 0.25, 0.5, 1.0]),
    capacity_tokens=st.one_of(st.none(), st.integers(100, 2000)),
    projected_tokens=st.integers(0, 2000),
    kept_tokens=st.integers(0, 500),
    num_open=st.integers(0, 8),
    prefill_s=st.floats(0, 10),
    token_s=st.floats(1e-6, 1),
    room_in_s=st.floats(0, 100),
    is_closed=st.booleans(),
)


@given(st.lists(candidates, max_size=6, unique_by=lambda one: one.replica_id), st.sampled_from([None, "a", "b"]))
def test_whatever_is_chosen_has_room_and_a_new_conversation_waits_only_where_nobody_has(
    able: list[Candidate], home_id: str | None
) -> None:
    chosen = choose(NEED, home_id, able)
    assert chosen is None or (chosen in able and fits(NEED, chosen))
    if home_id not in {one.replica_id for one in able}:
        assert (chosen is None) == (not any(fits(NEED, one) for one in able))
