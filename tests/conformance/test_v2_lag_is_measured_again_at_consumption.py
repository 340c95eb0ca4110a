"""V2: lag was measured only while a trajectory was in flight; finished ones aged unseen in a buffer.

Lag is measured again when a batch consumes them: what is too old by then is not trained, its group is sampled anew.
"""

import asyncio

import msgspec
import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.journal.base import decode
from steelyard.coordinator.records import BatchPlan
from steelyard.errors import IllegalTransition
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import RunRig, make_settings

NUM_STEPS = 10


async def aged_by_ten_versions() -> tuple[RunRig, str]:
    """Eleven groups are finished at version 0, at once; ten steps consume one each. The rig and the group left."""
    rig = await RunRig(make_settings(lag=NUM_STEPS, groups_per_batch=1, max_retained_versions=20)).start()
    await rig.rollouts()
    waiting = list(rig.coordinator.state.live_groups)
    assert len(waiting) == NUM_STEPS + 1
    for step in range(NUM_STEPS):
        plan = await rig.begin(step)
        assert plan.max_lag == step, "the age at consumption, though at its end each trajectory was fresh"
        await rig.publish(step + 1)
    return rig, waiting[-1]


async def resume_with_bound(rig: RunRig, lag: int) -> None:
    """Stop, and go on with another ``admission.max_policy_lag``."""
    await rig.coordinator.close()
    rules = msgspec.structs.replace(rig.settings.rules, max_policy_lag=lag)
    rig.settings = msgspec.structs.replace(rig.settings, rules=rules)
    await rig.open()


async def work_until(rig: RunRig, waiting: "asyncio.Task[BatchPlan]") -> BatchPlan:
    """Run and score what can be leased until the batch is there."""
    for _ in range(100):
        await settle()
        if waiting.done():
            break
        await rig.rollouts()
    assert waiting.done(), await rig.coordinator.diagnose()
    return await waiting


def test_v2_a_fast_rollout_that_waited_for_ten_versions_is_as_old_as_it_is() -> None:
    async def scenario() -> None:
        rig, oldest = await aged_by_ten_versions()
        plan = await rig.begin(NUM_STEPS)
        assert (plan.group_ids, plan.max_lag) == ((oldest,), NUM_STEPS)
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_v2_what_became_too_old_in_the_buffer_is_sampled_anew_and_its_tokens_are_booked_as_stale() -> None:
    async def scenario() -> None:
        rig, oldest = await aged_by_ten_versions()
        await resume_with_bound(rig, 1)
        waiting = asyncio.create_task(rig.coordinator.next_batch(NUM_STEPS, 1e6))
        plan = await work_until(rig, waiting)
        assert plan.max_lag <= 1
        assert all(member.trace.oldest_version >= NUM_STEPS - 1 for member in plan.members)
        restarted = [event for event in _events(rig) if isinstance(event, e.GroupRestarted)]
        assert [(event.group_id, event.reason) for event in restarted] == [(oldest, e.RestartReason.STALE)]
        books = await rig.coordinator.books(rig.stores.recorded)
        assert books.are_closed
        assert books.tokens.rejected["stale"] > 0
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_v2_a_batch_that_was_chosen_earlier_is_measured_once_more_when_its_step_begins() -> None:
    async def scenario() -> None:
        rig, oldest = await aged_by_ten_versions()
        plan = await rig.coordinator.next_batch(NUM_STEPS, 1.0)
        await resume_with_bound(rig, 1)
        samples = tuple(f"{sample.attempt_id}/{sample.segment_index}" for sample in rig.assemble(plan).samples)
        with pytest.raises(IllegalTransition, match="lag bound"):
            await rig.coordinator.begin_step(
                step=NUM_STEPS,
                parent_version=plan.parent_version,
                group_ids=plan.group_ids,
                sample_ids=samples,
                batch_digest="d",
            )
        assert not [event for event in _events(rig) if isinstance(event, e.StepBegun) and oldest in event.group_ids]
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_v2_a_fast_member_does_not_outlive_the_bound_by_waiting_for_a_slow_sibling() -> None:
    async def scenario() -> None:
        rig = await RunRig(make_settings(lag=1, groups_per_batch=1, group_size=2, max_tail_wait_s=30.0)).start()
        leases = await rig.coordinator.lease("wrk_fast", 3, 0.0)
        for lease in leases:
            await rig.coordinator.artifact_ready(rig.seal(lease))
        await rig.score_all()
        (slow,) = await rig.coordinator.lease("wrk_slow", 1, 0.0)
        await rig.begin(0)
        await rig.publish(1)
        waiting = asyncio.create_task(rig.coordinator.next_batch(1, 1e6))
        await settle()
        rig.clock.advance(31.0)
        await rig.coordinator.heartbeat("wrk_slow", (slow.attempt_id,))
        plan = await work_until(rig, waiting)
        assert {member.trace.oldest_version for member in plan.members} == {1}, "the fast member is sampled anew too"
        await rig.coordinator.close()

    asyncio.run(scenario())


def _events(rig: RunRig) -> list[e.AnyEvent]:
    return [decode(record.payload) for record in rig.memory_journal.records()]
