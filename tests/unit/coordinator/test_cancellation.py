"""Cancellation of a group or a task from outside: idempotent, booked, and never in the way of the trainer."""

import asyncio

from steelyard.coordinator import events as e
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_score, make_settings, play, refusal_of
from steelyard.types import Sampling


async def drops(rig: RunRig) -> list[tuple[str, str, str]]:
    events = await rig.memory_journal.replay()
    return [(x.group_id, x.reason.value, x.detail) for x in events if isinstance(x, e.GroupDropped)]


def test_a_cancelled_group_is_booked_told_to_its_workers_and_replaced_by_the_next_prompt() -> None:
    async def scene(rig: RunRig) -> None:
        held, sealed, graded, done = await rig.coordinator.lease(WORKER, 4, 0.0)
        rig.stores.record(held.attempt_id, 5)
        for lease in (done, graded, sealed):
            await rig.coordinator.artifact_ready(rig.seal(lease, 3))
        (job,) = await rig.coordinator.lease_scores(SCORER, 1, 0.0)
        await rig.coordinator.score(make_score(job, 1.0))
        (job,) = await rig.coordinator.lease_scores(SCORER, 1, 0.0)
        assert await rig.coordinator.cancel_group(held.group_id, "a bad prompt")
        assert await rig.coordinator.heartbeat(WORKER, (held.attempt_id,)) == (held.attempt_id,)
        assert await refusal_of(rig.coordinator.start(held.attempt_id, 1, WORKER)) == "late"
        assert await refusal_of(rig.coordinator.score(make_score(job, 1.0))) == "late"
        assert await rig.coordinator.lease_scores(SCORER, 9, 0.0) == ()
        assert await drops(rig) == [(held.group_id, "cancelled", "a bad prompt")]
        state = rig.coordinator.state
        assert (state.prompts.dropped, state.prompts.issued) == ({"cancelled": 1}, 5)
        assert state.tokens.lost == {"cancelled": 5} and state.tokens.rejected == {"cancelled": 9}
        assert {x.group_id for x in await rig.coordinator.lease(WORKER, 100, 0.0)}.isdisjoint({held.group_id})

    rig = play(scene, group_size=4, max_drop_frac=0.01)
    assert rig.audit().is_passed


def test_cancelling_again_or_what_never_was_changes_nothing() -> None:
    async def scene(rig: RunRig) -> None:
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        assert await rig.coordinator.cancel_group(lease.group_id, "x")
        num_events = rig.coordinator.state.num_events
        assert not await rig.coordinator.cancel_group(lease.group_id, "x")
        assert not await rig.coordinator.cancel_group("grp_unknown", "x")
        assert await rig.coordinator.cancel_task("task-unknown", "x") == ()
        assert rig.coordinator.state.num_events == num_events

    play(scene)


def test_a_cancelled_task_loses_all_its_live_groups_evaluations_too_and_no_other() -> None:
    async def scene(rig: RunRig) -> None:
        state = rig.coordinator.state
        task_id = next(iter(state.live_groups.values())).task_id
        await rig.coordinator.admit_evaluation((task_id, "other"), version=0, sampling=Sampling(), label="x")
        mine = tuple(g.group_id for g in state.live_groups.values() if g.task_id == task_id)
        assert len(mine) == 2
        assert await rig.coordinator.cancel_task(task_id, "withdrawn") == mine
        assert await rig.coordinator.cancel_task(task_id, "withdrawn") == ()
        assert [(group_id, detail) for group_id, _, detail in await drops(rig)] == [(g, "withdrawn") for g in mine]
        await rig.rollouts()
        results = await rig.coordinator.evaluation_results("x", 1.0)
        assert [result.task_id for result in results] == ["other"]

    rig = play(scene)
    assert rig.audit().is_passed


def test_an_evaluation_that_waits_only_for_a_cancelled_group_is_answered() -> None:
    async def scene(rig: RunRig) -> None:
        (group_id,) = await rig.coordinator.admit_evaluation(("held",), version=0, sampling=Sampling(), label="x")
        waiter = asyncio.ensure_future(rig.coordinator.evaluation_results("x", 1e6))
        await settle()
        assert not waiter.done()
        await rig.coordinator.cancel_group(group_id, "not needed")
        assert await waiter == ()

    play(scene)


def test_complete_and_parked_groups_can_be_cancelled() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        state = rig.coordinator.state
        complete, parked = [g for g in state.live_groups.values() if g.state == "COMPLETE"][:2]
        assert await rig.coordinator.cancel_group(complete.group_id, "x")
        await rig.train(0)
        await rig.coordinator.orphan(1, "replay")
        parked = next(g for g in state.live_groups.values() if g.state == "PARKED")
        assert await rig.coordinator.cancel_group(parked.group_id, "x")
        assert state.prompts.dropped == {"cancelled": 2}

    rig = play(scene)
    assert rig.audit().is_passed


def test_a_group_in_the_batch_that_the_trainer_holds_is_left_to_it() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        plan = await rig.coordinator.next_batch(0, 1.0)
        assert not await rig.coordinator.cancel_group(plan.group_ids[0], "too late")
        others = [g for g in rig.coordinator.state.live_groups if g not in plan.group_ids]
        assert await rig.coordinator.cancel_group(others[0], "in time")
        await rig.begin(0)
        assert rig.coordinator.state.prompts.trained == 2
        assert not await rig.coordinator.cancel_group(plan.group_ids[0], "consumed")

    play(scene)


def test_a_cancellation_survives_a_crash() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings()).start()
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        report = rig.seal(lease)
        await rig.coordinator.cancel_group(lease.group_id, "x")
        await rig.coordinator.crash()
        await rig.open()
        assert await refusal_of(rig.coordinator.artifact_ready(report)) == "late"
        assert not await rig.coordinator.cancel_group(lease.group_id, "x")
        await rig.coordinator.close()

    asyncio.run(run())
