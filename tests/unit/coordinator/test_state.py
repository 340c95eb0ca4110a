"""apply: deterministic, refuses contradictions, and leaves the state alone where it refuses."""

import asyncio
import copy
import gc

import msgspec
import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.entities import MAX_ENDED_ATTEMPTS, Group, Rollout, State
from steelyard.coordinator.journal.base import decode
from steelyard.coordinator.state import apply, outbox
from steelyard.errors import IllegalTransition
from steelyard.testing.histories import History
from steelyard.testing.run_rig import RunRig, make_manifest, make_settings
from steelyard.types import Purpose, Sampling


def journal_of_a_run(steps: int = 3) -> list[e.AnyEvent]:
    """All events of a small finished run with a failure and a checkpoint in it."""

    async def run() -> list[e.AnyEvent]:
        rig = await RunRig(make_settings()).start()
        for step in range(steps):
            if step == 1:
                for lease in await rig.coordinator.lease("wrk_rig", 1, 0.0):
                    await rig.lose(lease)
                rig.clock.advance(1.0)
            await rig.train(step)
        await rig.checkpoint(steps)
        await rig.coordinator.finish("done")
        await rig.coordinator.close()
        return list(await rig.memory_journal.replay())

    return asyncio.run(run())


EVENTS = journal_of_a_run()


def replay(events: list[e.AnyEvent]) -> State:
    state = State()
    for event in events:
        apply(state, event)
    return state


def dump(state: State) -> str:
    """Everything in a state as text, without object identities."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, set | frozenset):
            return sorted(str(v) for v in value)
        if hasattr(value, "__dataclass_fields__"):
            names = [name for name in value.__dataclass_fields__ if name != "group"]
            return {name: plain(getattr(value, name)) for name in names}
        return str(value)

    return str(plain(vars(state)))


def test_two_replays_of_one_journal_are_equal() -> None:
    assert dump(replay(EVENTS)) == dump(replay(EVENTS))


def test_every_prefix_of_a_journal_replays() -> None:
    state = State()
    for event in EVENTS:
        apply(state, event)
        assert state.prompts.issued == state.prompts.trained + state.prompts.dropped.total() + sum(
            group.purpose is Purpose.TRAIN for group in state.live_groups.values()
        )


def test_every_event_survives_its_wire_form() -> None:
    for event in EVENTS:
        assert decode(msgspec.json.encode(event)) == event


def test_any_event_out_of_place_is_refused_or_harmless_and_a_refusal_changes_nothing() -> None:
    """Apply every event of the run at every 25th place; a refused one must leave no trace."""
    for cut in range(0, len(EVENTS), 25):
        state = replay(EVENTS[:cut])
        before = dump(state)
        for event in EVENTS:
            late = msgspec.structs.replace(event, at_s=state.at_s)
            trial = copy.deepcopy(state)
            try:
                apply(trial, late)
            except IllegalTransition:
                assert dump(trial) == before, event


def test_time_never_goes_back() -> None:
    state = replay(EVENTS[:5])
    with pytest.raises(IllegalTransition, match="at_s must not go back"):
        apply(state, e.RunResumed(at_s=state.at_s - 1, config_digest="c", rules=make_settings().rules))


def test_nothing_but_run_started_can_be_first_and_it_cannot_come_again() -> None:
    with pytest.raises(IllegalTransition, match="first event must be RUN_STARTED"):
        apply(State(), EVENTS[1])
    state = replay(EVENTS[:3])
    with pytest.raises(IllegalTransition, match="has started already"):
        apply(state, msgspec.structs.replace(EVENTS[0], at_s=state.at_s))


def test_after_the_end_only_a_resume_follows() -> None:
    state = replay(EVENTS)
    with pytest.raises(IllegalTransition, match="only RUN_RESUMED"):
        apply(state, e.VersionPinned(at_s=state.at_s, version=0, label="x"))
    apply(state, e.RunResumed(at_s=state.at_s, config_digest="c", rules=make_settings().rules))
    apply(state, e.VersionPinned(at_s=state.at_s, version=3, label="x"))


def test_the_frontier_cannot_be_skipped_or_repeated() -> None:
    admitted = next(event for event in EVENTS if isinstance(event, e.GroupAdmitted))
    state = replay(EVENTS[: EVENTS.index(admitted)])
    for position in (1, -1, None):
        wrong = msgspec.structs.replace(admitted, stream_position=position)
        with pytest.raises(IllegalTransition, match="stream_position must be 0"):
            apply(state, wrong)


def test_a_group_for_a_version_that_is_not_ready_is_refused() -> None:
    state = replay(EVENTS[:2])
    event = e.GroupAdmitted(
        at_s=state.at_s,
        group_id="grp_x",
        task_id="t",
        task_index=0,
        stream_position=0,
        purpose=Purpose.TRAIN,
        label=None,
        rollout_ids=("rol_x",),
        admitted_version=0,
        bound_version=None,
        sampling=Sampling(),
        max_turns=1,
    )
    with pytest.raises(IllegalTransition, match="version 0 must be READY, is PUBLISHED"):
        apply(state, event)


def test_a_version_number_is_never_used_again() -> None:
    state = replay(EVENTS)
    apply(state, e.RunResumed(at_s=state.at_s, config_digest="c", rules=make_settings().rules))
    manifest = make_manifest(2, 4, 3)
    event = e.VersionPublished(
        at_s=state.at_s,
        version=2,
        step=manifest.step,
        parent_version=3,
        weights_digest="w",
        model_config_digest="m",
        tokenizer_digest="t",
        template_digest="c",
        num_bytes=1,
    )
    with pytest.raises(IllegalTransition, match="version must be 4, the next unused, got 2"):
        apply(state, event)


def test_the_outbox_names_all_open_work_and_nothing_else() -> None:
    for cut in range(len(EVENTS)):
        state = replay(EVENTS[:cut])
        open_rollouts = sum(g.num_open for g in state.live_groups.values())
        transient = sum(r.state in ("SCORED", "INFRA_FAILED") for r in state.rollouts.values())
        assert len(list(outbox(state))) == open_rollouts - transient


def test_finished_groups_leave_nothing_behind_but_counts() -> None:
    state = replay(EVENTS)
    assert not state.live_groups
    assert state.horizon_step == 0
    assert len(state.groups) == state.prompts.trained, "kept until two checkpoints cover them"
    apply(state, e.RunResumed(at_s=state.at_s, config_digest="c", rules=make_settings().rules))
    apply(state, e.Checkpointed(at_s=state.at_s, step=3, digest="d"))
    assert len(state.groups) == state.prompts.trained, "the same checkpoint again covers no more"


def test_what_is_forgotten_is_freed_at_once_without_a_search_of_the_heap() -> None:
    history = History(lambda event: None, groups_per_batch=3, group_size=4, failure_frac=0.2)
    history.start()
    gc.collect()
    known = {id(found) for found in gc.get_objects() if type(found) in (Group, Rollout)}
    gc.disable()
    try:
        for _ in range(30):
            history.step()
        found = [thing for thing in gc.get_objects() if type(thing) in (Group, Rollout) and id(thing) not in known]
    finally:
        gc.enable()
    state = history.state
    assert len(state.groups) < 30 * 3
    assert {thing.group_id for thing in found if isinstance(thing, Group)} == set(state.groups)
    assert {thing.rollout_id for thing in found if isinstance(thing, Rollout)} == set(state.rollouts)


def test_memory_of_ended_attempts_is_bounded() -> None:
    state = State()
    state.ended_attempts = {f"att_{n}": "late" for n in range(MAX_ENDED_ATTEMPTS)}
    for event in EVENTS:
        apply(state, event)
    assert len(state.ended_attempts) == MAX_ENDED_ATTEMPTS
