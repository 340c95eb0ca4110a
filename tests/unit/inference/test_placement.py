"""Decisions about one request."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from steelyard.inference.placement import Candidate, Need, choose, has_room, keep_s

NEED = Need(kv_tokens=300, output_tokens=100)
IDLE = Candidate(replica_id="idle", weight=1.0, has_room=True, projected_tokens=0, prefill_s=2.0, token_s=0.02)
BUSY = msgspec.structs.replace(IDLE, replica_id="busy", projected_tokens=600, token_s=0.03)
HOME = msgspec.structs.replace(BUSY, replica_id="home", prefill_s=0.1)


def test_only_what_fits_by_projection_is_taken() -> None:
    def fits(*, capacity: int | None = 1000, projected: int = 600, kept: int = 100, num_open: int = 4) -> bool:
        return has_room(NEED, capacity_tokens=capacity, projected_tokens=projected, kept_tokens=kept, num_open=num_open)

    assert fits()
    assert not fits(projected=601) and not fits(kept=101)
    assert fits(capacity=None, projected=10**9), "who does not say how much it has takes all"
    assert fits(capacity=100, projected=0, num_open=0), "an idle one will never have more"
    assert choose(NEED, None, [msgspec.structs.replace(BUSY, has_room=False)]) is None


def test_a_new_conversation_goes_where_the_fewest_tokens_are_open_for_the_speed() -> None:
    assert choose(NEED, None, [BUSY, IDLE]) is IDLE
    fast = msgspec.structs.replace(BUSY, replica_id="fast", token_s=0.001)
    assert choose(NEED, None, [BUSY, fast]) is fast


def test_a_conversation_stays_while_computing_its_prefix_again_costs_more_than_its_queue() -> None:
    assert choose(NEED, "home", [IDLE, BUSY, HOME]) is HOME


def test_it_moves_when_its_home_is_so_slow_or_full_that_computing_the_prefix_again_pays() -> None:
    slow = msgspec.structs.replace(HOME, token_s=0.06)
    assert choose(NEED, "home", [IDLE, slow]) is IDLE
    full = msgspec.structs.replace(HOME, has_room=False, room_in_s=5.0)
    assert choose(NEED, "home", [IDLE, full]) is IDLE


def test_it_waits_for_its_full_home_where_room_comes_soon() -> None:
    full = msgspec.structs.replace(HOME, has_room=False, room_in_s=0.2, token_s=0.02)
    assert choose(NEED, "home", [IDLE, full]) is None


def test_a_replica_that_is_trusted_less_gets_less() -> None:
    doubted = msgspec.structs.replace(IDLE, replica_id="doubted", weight=0.125)
    assert choose(NEED, None, [doubted, msgspec.structs.replace(IDLE, projected_tokens=300)]) is not doubted


def test_kv_is_kept_as_long_as_waiting_for_it_has_not_cost_what_computing_it_costs() -> None:
    assert keep_s(0.5, 4) == 2.0
    assert keep_s(0.5, 0) == 0.5


candidates = st.builds(
    Candidate,
    replica_id=st.sampled_from("abcdef"),
    weight=st.sampled_from([0.125, 0.25, 0.5, 1.0]),
    has_room=st.booleans(),
    projected_tokens=st.integers(0, 2000),
    prefill_s=st.floats(0, 10),
    token_s=st.floats(1e-6, 1),
    room_in_s=st.floats(0, 100),
)


@given(st.lists(candidates, max_size=6, unique_by=lambda one: one.replica_id), st.sampled_from([None, "a", "b"]))
def test_whatever_is_chosen_has_room_and_a_new_conversation_waits_only_where_nobody_has(
    able: list[Candidate], home_id: str | None
) -> None:
    chosen = choose(NEED, home_id, able)
    assert chosen is None or (chosen in able and chosen.has_room)
    if home_id not in {one.replica_id for one in able}:
        assert (chosen is None) == (not any(one.has_room for one in able))
