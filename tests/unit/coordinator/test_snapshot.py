"""Snapshots: a state that was taken and restored goes on exactly as the one that was never left."""

import asyncio
import functools
from dataclasses import fields, is_dataclass
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.coordinator import entities, touched_groups
from steelyard.coordinator import events as e
from steelyard.coordinator import snapshot as snapshots
from steelyard.coordinator.entities import Group, Rollout, State
from steelyard.coordinator.entity_rows import EntityRows
from steelyard.coordinator.journal.base import EMPTY_HEAD, Head
from steelyard.coordinator.snapshot import (
    DERIVED_FIELDS,
    LINKED_FIELDS,
    PLAIN_FIELDS,
    Capture,
    Snapshot,
    pack,
    restore,
    take,
)
from steelyard.coordinator.state import apply
from steelyard.coordinator.transitions import RolloutState
from steelyard.errors import IntegrityError
from steelyard.testing.histories import History
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, RunRig, make_score, make_settings
from steelyard.types import Outcome, Sampling


@functools.cache
def history(seed: int) -> tuple[e.AnyEvent, ...]:
    """A run through the real coordinator with most of what can happen: drawn from the seed."""

    async def run() -> tuple[e.AnyEvent, ...]:
        rig = await RunRig(make_settings(lag=seed % 3, lease_s=5.0, max_drop_frac=1.0), seed=seed).start()
        for step in range(5):
            for lease in await rig.coordinator.lease(WORKER, rig.random.randrange(3), 0.0):
                await rig.lose(lease)
            await rig.coordinator.lease(WORKER, rig.random.randrange(3), 0.0)
            rig.clock.advance(rig.random.choice([0.5, 6.0]))
            await rig.run_attempts(2)
            for job in await rig.coordinator.lease_scores("wrk_scorer", 1, 0.0):
                await rig.coordinator.score(make_score(job, None, Outcome.GRADER_FAILED))
            for _ in range(4):
                rig.clock.advance(6.0)
                await settle()
                await rig.rollouts()
            await rig.train(step)
            newest = rig.coordinator.newest_ready()
            if newest is not None and step % 2 == 0:
                names = (f"held-{step}", "held")
                await rig.coordinator.admit_evaluation(
                    names, version=newest.version, sampling=Sampling(), label=f"eval-{step}"
                )
                await rig.coordinator.pin(newest.version, "later")
            if step == 2:
                await rig.checkpoint(2)
            if step == 3 and seed % 2:
                rig.weights_salt = "other"
                await rig.coordinator.orphan(rig.coordinator.state.lineage[4], "replay")
                await rig.load(rig.coordinator.state.lineage[3])
                break
        await rig.checkpoint(3)
        await rig.coordinator.close()
        await rig.open()
        await rig.rollouts()
        await rig.coordinator.finish("done")
        await rig.coordinator.close()
        return await rig.memory_journal.replay()

    return asyncio.run(asyncio.wait_for(run(), 20))


def head(number: int) -> Head:
    return Head(number=number, digest=f"d{number}")


def state_after(events: tuple[e.AnyEvent, ...]) -> State:
    state = State()
    for event in events:
        apply(state, event)
    return state


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 5), data=st.data())
def test_from_any_point_on_a_restored_state_goes_on_as_a_replay_of_everything(seed: int, data: st.DataObject) -> None:
    events = history(seed)
    cut = data.draw(st.integers(0, len(events)))
    original = state_after(events[:cut])
    taken = take(original, head(cut))
    restored, found = restore(taken)
    assert found == head(cut)
    assert take(restored, found) == taken
    for number, event in enumerate(events[cut:], start=cut + 1):
        _, effects = apply(restored, event)
        assert effects == apply(original, event)[1]
        if number % 20 == 0:
            assert take(restored, head(number)) == take(original, head(number))
    assert take(restored, head(len(events))) == take(original, head(len(events)))


def test_the_histories_hold_most_kinds_of_events() -> None:
    kinds = {type(event) for seed in range(6) for event in history(seed)}
    assert len(kinds) >= 25, sorted(kind.__name__ for kind in kinds)


def test_long_lives_of_groups_survive_too() -> None:
    events: list[e.AnyEvent] = []
    run = History(events.append, groups_per_batch=3, group_size=4, failure_frac=0.2)
    run.start()
    for _ in range(12):
        run.step()
    for cut in range(0, len(events), 97):
        state, _ = restore(take(state_after(tuple(events[:cut])), head(cut)))
        for event in events[cut:]:
            apply(state, event)
        assert take(state, head(len(events))) == take(run.state, head(len(events)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 5), every=st.integers(1, 9), size=st.integers(1, 6), data=st.data())
def test_a_state_that_is_read_in_slices_is_that_of_the_beginning_whatever_happens_meanwhile(
    seed: int, every: int, size: int, data: st.DataObject
) -> None:
    events = history(seed)
    cut = data.draw(st.integers(0, len(events)))
    state = state_after(events[:cut])
    expected = take(state, head(cut))
    captured = Capture(state, size)
    for number, event in enumerate(events[cut:]):
        captured.before(event)
        apply(state, event)
        if number % every == 0 and not captured.is_whole:
            captured.read_slice()
    while not captured.is_whole:
        captured.read_slice()
    restored, found = restore(pack(captured, head(cut)))
    assert found == head(cut)
    assert take(restored, head(cut)) == expected


def test_it_is_known_of_every_event_which_groups_it_changes() -> None:
    assert set(touched_groups._TOUCHED) == set(get_args(e.AnyEvent))


def test_a_capture_that_is_not_whole_is_no_snapshot() -> None:
    run = History(lambda event: None, group_size=3)
    run.start()
    run.admit()
    with pytest.raises(ValueError, match="all groups must have been read, 1 have not"):
        Capture(run.state).parts()


def test_dictionaries_keep_their_order_and_references_lead_to_the_same_objects() -> None:
    events: list[e.AnyEvent] = []
    run = History(events.append, group_size=3)
    run.start()
    groups = [run.admit() for _ in range(5)]
    for group in reversed(groups):
        run.carry(group.rollouts[1], RolloutState.RUNNING)
    run.state.live_groups = dict(reversed(run.state.live_groups.items()))
    state, _ = restore(take(run.state, head(len(events))))
    for name in ("groups", "live_groups", "rollouts", "attempts", "versions", "lineage"):
        assert list(getattr(state, name)) == list(getattr(run.state, name)), name
    for group_id, group in state.groups.items():
        assert state.live_groups[group_id] is group
        assert all(
            rollout.group is group and state.rollouts[rollout.rollout_id] is rollout for rollout in group.rollouts
        )
    for attempt_id, rollout in state.attempts.items():
        assert state.rollouts[rollout.rollout_id] is rollout
        assert rollout.attempt_id == attempt_id


def test_a_restored_state_shares_nothing_with_the_one_it_was_taken_from() -> None:
    original = state_after(history(1))
    restored, _ = restore(take(original, head(len(history(1)))))
    before = take(restored, head(len(history(1))))
    original.unreleased.clear()
    original.tokens.lost["nonsense"] += 1
    original.versions[0].labels.add("nonsense")
    assert take(restored, head(len(history(1)))) == before


def test_no_field_of_the_state_or_of_an_entity_is_forgotten() -> None:
    assert set(vars(State())) == set(PLAIN_FIELDS) | LINKED_FIELDS | DERIVED_FIELDS
    own = {name: kind for name, kind in vars(entities).items() if getattr(kind, "__module__", "") == entities.__name__}
    kinds = {name: kind for name, kind in own.items() if is_dataclass(kind)}
    assert len(kinds) >= 10
    left_out = {"Group": {"rollouts"}, "Rollout": {"group"}}
    for name, kind in kinds.items():
        omit = frozenset(left_out.get(name, set()))
        assert set(EntityRows(kind, omit).names) | omit == {field.name for field in fields(kind)}
    # These two are stored by hand: their rows must leave out exactly what is rebuilt.
    assert set(snapshots._GROUPS.names) == {field.name for field in fields(Group)} - {"rollouts"}
    assert set(snapshots._ROLLOUTS.names) == {field.name for field in fields(Rollout)} - {"group"}


def test_a_field_that_rows_have_no_form_for_is_refused_when_it_is_added() -> None:
    from steelyard.coordinator.entity_rows import shape_of

    for hint in (tuple[list[int], ...], Rollout | Group | None, dict[tuple[list[int], int], int]):
        with pytest.raises(TypeError, match=r"must be|may only be"):
            shape_of(hint)


def test_a_head_of_another_event_is_refused() -> None:
    with pytest.raises(ValueError, match="head must be that of event 0, is of 3"):
        take(State(), head(3))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_found(data: st.DataObject) -> None:
    taken = take(state_after(history(0)[:120]), head(120))
    index = data.draw(st.integers(0, len(taken) - 1))
    change = data.draw(st.integers(1, 255))
    damaged = taken[:index] + bytes([taken[index] ^ change]) + taken[index + 1 :]
    with pytest.raises(IntegrityError):
        restore(damaged)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cut_off_snapshot_is_found(data: st.DataObject) -> None:
    taken = take(state_after(history(0)[:120]), head(120))
    with pytest.raises(IntegrityError):
        restore(taken[: data.draw(st.integers(0, len(taken) - 1))])


def test_a_snapshot_of_another_format_names_both_versions() -> None:
    taken = msgspec.msgpack.decode(take(State(), EMPTY_HEAD), type=Snapshot)
    other = msgspec.structs.replace(taken, format_version=9)
    with pytest.raises(IntegrityError, match=f"must have format version {snapshots.FORMAT_VERSION}, has 9"):
        restore(msgspec.msgpack.encode(other))


def test_a_snapshot_over_other_fields_is_refused() -> None:
    taken = msgspec.msgpack.decode(take(State(), EMPTY_HEAD), type=Snapshot)
    digest = snapshots._digest(snapshots.FORMAT_VERSION, "other", EMPTY_HEAD, taken.parts)
    other = msgspec.structs.replace(taken, fields_digest="other", digest=digest)
    with pytest.raises(IntegrityError, match="fields that the state has now"):
        restore(msgspec.msgpack.encode(other))
