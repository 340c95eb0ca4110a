"""The transition tables: complete for every state, and a refusal names both states."""

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.transitions import (
    GROUP_TABLE,
    ROLLOUT_TABLE,
    TERMINAL,
    VERSION_TABLE,
    GroupState,
    RolloutState,
    VersionState,
    next_state,
)
from steelyard.errors import IllegalTransition


def test_every_state_can_be_reached() -> None:
    for table, states, start in (
        (ROLLOUT_TABLE, RolloutState, RolloutState.PENDING),
        (GROUP_TABLE, GroupState, GroupState.OPEN),
        (VERSION_TABLE, VersionState, VersionState.PUBLISHED),
    ):
        reached = {start}
        for _ in states:
            reached |= {to for (state, _), to in table.items() if state in reached}
        assert reached == set(states)


def test_from_every_open_rollout_state_an_end_can_be_reached() -> None:
    for start in RolloutState:
        reached = {start}
        for _ in RolloutState:
            reached |= {to for (state, _), to in ROLLOUT_TABLE.items() if state in reached}
        assert reached & TERMINAL, start


def test_no_event_brings_a_rejected_or_cancelled_rollout_back() -> None:
    assert not [key for key in ROLLOUT_TABLE if key[0] in (RolloutState.REJECTED, RolloutState.CANCELLED)]


def test_what_is_not_in_the_table_is_refused_with_both_states() -> None:
    event = e.Running(at_s=1.0, attempt_id="att_a")
    with pytest.raises(IllegalTransition) as caught:
        next_state(ROLLOUT_TABLE, RolloutState.ACCEPTED, event, "rollout rol_a")
    message = str(caught.value)
    assert "RUNNING would lead rollout rol_a from ACCEPTED to RUNNING" in message
    assert "only from LEASED" in message
