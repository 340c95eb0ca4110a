"""Batches: the wait and its culprits, the tail, the step written ahead, the end of the stream."""

import asyncio

import pytest

from steelyard.coordinator.transitions import GroupState
from steelyard.errors import DeadlineExceeded, IllegalTransition, RunError
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, RunRig, make_settings, play


def test_a_missed_deadline_names_the_missing_rollouts_and_who_holds_them() -> None:
    async def scene(rig: RunRig) -> None:
        held = await rig.coordinator.lease("wrk_stuck", 3, 0.0)
        await rig.rollouts()
        waiter = asyncio.ensure_future(rig.coordinator.next_batch(0, 30.0))
        await settle()
        rig.clock.advance(31.0)
        with pytest.raises(DeadlineExceeded) as caught:
            await waiter
        assert caught.value.what == "the batch of step 0"
        assert len(caught.value.culprits) == len(held) == 3
        for lease, line in zip(held, caught.value.culprits, strict=True):
            assert lease.rollout_id in line and "worker wrk_stuck" in line and "since 31.0 s" in line

    play(scene, lag=0, group_size=4, groups_per_batch=2)


def test_one_hundred_and_twenty_five_of_128_workers_return_and_the_three_are_named() -> None:
    async def scene(rig: RunRig) -> None:
        leases = [(await rig.coordinator.lease(f"wrk_{n}", 1, 0.0))[0] for n in range(128)]
        stuck = leases[40:43]
        for lease in leases:
            if lease not in stuck:
                await rig.coordinator.artifact_ready(rig.seal(lease))
        await rig.score_all()
        with pytest.raises(DeadlineExceeded) as caught:
            await rig.coordinator.next_batch(0, 0.0)
        assert [lease.rollout_id in str(caught.value) for lease in stuck] == [True] * 3
        assert all(f"worker wrk_{n}" in str(caught.value) for n in (40, 41, 42))

    play(scene, lag=0, group_size=8, groups_per_batch=16)


def test_a_wait_for_weights_that_never_come_names_the_trainer() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        await rig.begin(0)
        with pytest.raises(DeadlineExceeded, match="the trainer: no version of step 1 is published"):
            await rig.coordinator.next_batch(1, 0.0)

    play(scene)


def test_a_due_group_is_waited_for_although_younger_ones_are_complete() -> None:
    async def scene(rig: RunRig) -> None:
        (slow,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.rollouts()
        plan = await rig.begin(0)
        assert slow.group_id not in plan.group_ids, "not due yet: the step goes on without it"
        await rig.publish(1)
        await rig.rollouts()
        waiter = asyncio.ensure_future(rig.coordinator.next_batch(1, 1e6))
        await settle()
        assert not waiter.done()
        await rig.coordinator.artifact_ready(rig.seal(slow))
        await rig.score_all()
        plan = await waiter
        assert slow.group_id in plan.group_ids
        assert plan.max_lag == 1

    play(scene, lag=1, max_tail_wait_s=1e9, lease_s=1e9)


def test_a_tail_that_is_too_long_is_replaced_as_stale_and_then_dropped() -> None:
    async def scene(rig: RunRig) -> None:
        (slow,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        target = slow.group_id
        for restart in range(rig.settings.max_stale_retries + 1):
            others = [lease for lease in await rig.coordinator.lease(WORKER, 100, 0.0) if lease.group_id != target]
            for lease in others:
                await rig.coordinator.artifact_ready(rig.seal(lease))
            await rig.score_all()
            waiter = asyncio.ensure_future(rig.coordinator.next_batch(0, 1e6))
            await settle()
            assert not waiter.done()
            rig.clock.advance(10.0)
            await settle()
            if restart < rig.settings.max_stale_retries:
                assert rig.coordinator.state.groups[target].num_stale_restarts == restart + 1
            waiter.cancel()
        assert target not in rig.coordinator.state.groups
        assert rig.coordinator.state.prompts.dropped == {"too_stale": 1}
        assert rig.coordinator.state.prompts.issued == 3
        await rig.rollouts()
        await rig.begin(0)

    play(scene, lag=0, max_tail_wait_s=10.0, lease_s=1e9)


def test_attempts_of_a_replaced_group_are_refused() -> None:
    async def scene(rig: RunRig) -> None:
        (slow,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        rig.stores.record(slow.attempt_id, 9)
        waiter = asyncio.ensure_future(rig.coordinator.next_batch(0, 1e6))
        await settle()
        rig.clock.advance(10.0)
        await settle()
        assert not rig.coordinator.is_alive(slow.attempt_id)
        assert rig.coordinator.state.tokens.lost == {"stale": 9}
        waiter.cancel()

    play(scene, lag=0, max_tail_wait_s=10.0, lease_s=1e9)


def test_a_group_that_is_too_old_by_the_clock_is_replaced() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        rig.clock.advance(100.0)
        waiter = asyncio.ensure_future(rig.coordinator.next_batch(0, 1e6))
        await settle()
        assert rig.coordinator.state.prompts.restarted == 4
        await rig.rollouts()
        assert (await waiter).step == 0

    play(scene, max_age_s=50.0)


def test_a_step_begins_once_and_an_equal_repetition_is_accepted() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        plan = await rig.begin(0)
        (pending,) = await rig.coordinator.pending_steps_after(0)
        again = {
            "step": 0,
            "parent_version": 0,
            "group_ids": plan.group_ids,
            "sample_ids": pending.sample_ids,
            "batch_digest": pending.batch_digest,
        }
        num_events = rig.coordinator.state.num_events
        await rig.coordinator.begin_step(**again)  # type: ignore[arg-type]
        assert rig.coordinator.state.num_events == num_events
        with pytest.raises(IllegalTransition, match="has begun with batch"):
            await rig.coordinator.begin_step(**{**again, "batch_digest": "other"})  # type: ignore[arg-type]

    play(scene)


def test_a_batch_must_hold_all_accepted_members_and_nobody_else() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        plan = await rig.coordinator.next_batch(0, 1.0)
        names = tuple(f"{member.attempt_id}/0" for member in plan.members)

        async def begin(group_ids: tuple[str, ...], sample_ids: tuple[str, ...]) -> None:
            await rig.coordinator.begin_step(
                step=0, parent_version=0, group_ids=group_ids, sample_ids=sample_ids, batch_digest="d"
            )

        for sample_ids, message in (
            (names[1:], "accepted members must be in the batch"),
            ((*names, names[0]), "sample_ids must be distinct"),
            ((*names, "att_x/0"), "must be of an accepted member"),
            ((f"{plan.members[0].attempt_id}/9", *names[1:]), "segment must be below"),
        ):
            with pytest.raises(IllegalTransition, match=message):
                await begin(plan.group_ids, sample_ids)
        with pytest.raises(IllegalTransition, match="group_ids must be distinct"):
            await begin((*plan.group_ids, plan.group_ids[0]), names)
        assert rig.coordinator.state.next_step == 0
        await rig.begin(0)

    play(scene)


def test_only_the_next_step_can_be_asked_for() -> None:
    async def scene(rig: RunRig) -> None:
        with pytest.raises(IllegalTransition, match="step must be 0, the next to begin, got 3"):
            await rig.coordinator.next_batch(3, 1.0)

    play(scene)


def test_a_stream_that_ends_too_early_ends_the_wait_at_once() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings(lag=1), num_tasks=3, num_epochs=1).start()
        await rig.train(0)
        await rig.rollouts()
        with pytest.raises(RunError, match="the task stream ended after 3 tasks: step 1 needs 1 more groups and 0"):
            await rig.coordinator.next_batch(1, 1e6)
        await rig.coordinator.close()

    asyncio.run(run())


def test_ids_0_to_7_with_a_crash_after_two_are_all_trained_and_none_twice() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings(lag=1), num_tasks=8, num_epochs=1).start()
        await rig.rollouts()
        trained = [member.task_id for member in (await rig.begin(0)).members]
        await rig.coordinator.lease(WORKER, 100, 0.0)
        await rig.coordinator.crash()
        await rig.open()
        await rig.coordinator.abandon("interrupted")
        await rig.publish(1)
        for step in range(1, 4):
            trained += [member.task_id for member in (await rig.train(step)).members]
        assert sorted(trained) == sorted(f"task-{n:04d}" for n in range(8) for _ in range(2))
        assert (await rig.coordinator.books(rig.stores.recorded)).are_closed
        await rig.coordinator.close()

    asyncio.run(run())


def test_a_checkpoint_covers_steps_and_frees_their_batches_two_checkpoints_later() -> None:
    async def scene(rig: RunRig) -> None:
        for step in range(4):
            await rig.train(step)
        await rig.checkpoint(2)
        assert await rig.coordinator.deletable_batches() == ()
        await rig.checkpoint(4)
        assert await rig.coordinator.deletable_batches() == (0, 1)
        assert [pending.step for pending in await rig.coordinator.pending_steps_after(2)] == [2, 3]
        with pytest.raises(IllegalTransition, match="must be remembered"):
            await rig.coordinator.pending_steps_after(1)
        await rig.coordinator.batch_deleted(0)
        with pytest.raises(IllegalTransition, match="step 2 must be covered"):
            await rig.coordinator.batch_deleted(2)
        assert len(rig.coordinator.state.groups) == 4 + len(rig.coordinator.state.live_groups)

    play(scene)


def test_a_checkpoint_of_weights_that_do_not_exist_is_refused() -> None:
    async def scene(rig: RunRig) -> None:
        with pytest.raises(IllegalTransition, match="no surviving version has step 5"):
            await rig.coordinator.checkpointed(5, "d")
        await rig.train(0)
        await rig.checkpoint(1)
        with pytest.raises(IllegalTransition, match="must not go back"):
            await rig.checkpoint(0)

    play(scene)


def test_the_end_drops_live_groups_and_gives_out_no_more_work() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.train(0)
        (held,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        rig.stores.record(held.attempt_id, 4)
        waiter = asyncio.ensure_future(rig.coordinator.lease(WORKER, 1, 0.0))
        await rig.coordinator.finish("max_steps")
        await rig.coordinator.finish("max_steps")
        await waiter
        assert await rig.coordinator.lease(WORKER, 1, 0.0) == ()
        state = rig.coordinator.state
        assert state.prompts.dropped == {"end_of_run": 4}
        assert state.tokens.lost == {"end_of_run": 4}
        assert not any(group.state is GroupState.OPEN for group in state.groups.values())

    play(scene)
