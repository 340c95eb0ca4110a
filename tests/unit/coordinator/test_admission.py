"""Pacing, measured on whole runs: who is admitted when, and how old a token is when it is consumed."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.coordinator import admission
from steelyard.coordinator.events import DropReason
from steelyard.errors import RunError
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import WORKER, RunRig, make_settings, play
from steelyard.types import AttemptFailure, Lease, Outcome


def test_nothing_is_admitted_before_version_0_is_ready() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings()).open()
        assert await rig.coordinator.admit() == 0
        await rig.publish(0, is_ready=False)
        assert rig.coordinator.state.prompts.issued == 0
        await rig.load(0)
        assert rig.coordinator.state.prompts.issued == 4
        await rig.coordinator.close()

    asyncio.run(run())


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_each_ready_version_makes_room_for_one_batch(lag: int) -> None:
    async def scene(rig: RunRig) -> None:
        state = rig.coordinator.state
        for step in range(4):
            assert state.prompts.issued == (step + lag + 1) * 2
            await rig.train(step)

    play(scene, lag=lag)


def test_bound_0_is_exactly_synchronous() -> None:
    async def scene(rig: RunRig) -> None:
        for step in range(4):
            plan = await rig.train(step)
            assert plan.max_lag == 0
            assert {member.trace.oldest_version for member in plan.members} == {step}

    play(scene, lag=0)


def test_between_begin_and_ready_bound_0_leases_nothing() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.rollouts()
        await rig.begin(0)
        number = await rig.publish(1, is_ready=False)
        assert await rig.coordinator.lease(WORKER, 10, 0.0) == ()
        await rig.load(number)
        leases = await rig.coordinator.lease(WORKER, 10, 0.0)
        assert {lease.policy_version for lease in leases} == {1}

    play(scene, lag=0)


def test_admission_stops_at_the_last_step() -> None:
    async def scene(rig: RunRig) -> None:
        for step in range(3):
            await rig.train(step)
        assert rig.coordinator.state.prompts.issued == 6
        assert not rig.coordinator.state.live_groups

    play(scene, lag=2, max_steps=3)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lag=st.integers(0, 3),
    groups_per_batch=st.integers(1, 3),
    steps=st.integers(1, 8),
)
def test_whatever_the_order_of_ends_no_token_is_beyond_the_bound_and_nothing_is_thrown_away(
    seed: int, lag: int, groups_per_batch: int, steps: int
) -> None:
    """Trajectories end in random order while steps go on; pacing alone must keep the bound."""

    async def scene(rig: RunRig) -> None:
        held: list[Lease] = []
        for step in range(steps):
            while True:
                held += await rig.coordinator.lease(WORKER, rig.random.randrange(1, 8), 0.0)
                rig.random.shuffle(held)
                for _ in range(min(len(held), rig.random.randrange(1, 5))):
                    await rig.coordinator.artifact_ready(rig.seal(held.pop()))
                await rig.score_all()
                choice = admission.choose_batch(rig.coordinator.state, rig.settings, step, rig.clock.now_s(), 0.0)
                if choice.groups:
                    break
            plan = await rig.begin(step)
            assert plan.max_lag <= lag
            await rig.publish(step + 1)
        assert rig.coordinator.state.prompts.restarted == 0
        assert not rig.coordinator.state.tokens.rejected
        await rig.coordinator.heartbeat(WORKER, ())

    play(scene, lag=lag, groups_per_batch=groups_per_batch, max_tail_wait_s=1e9, lease_s=1e9)


def test_a_finished_trajectory_ages_in_the_buffer_and_is_measured_again_at_consumption() -> None:
    """The bound shrinks on a resume, so that what was fresh enough when it was accepted no longer is."""

    async def run() -> None:
        rig = await RunRig(make_settings(lag=3)).start()
        await rig.rollouts()
        for step in range(2):
            await rig.begin(step)
            await rig.publish(step + 1)
        await rig.coordinator.crash()
        rig.settings = make_settings(lag=1)
        await rig.open()
        waiter = asyncio.ensure_future(rig.coordinator.next_batch(2, 1e6))
        await settle()
        state = rig.coordinator.state
        assert not waiter.done()
        assert state.prompts.restarted == 4
        assert state.tokens.rejected["stale"] > 0
        await rig.rollouts()
        plan = await waiter
        assert {member.trace.oldest_version for member in plan.members} == {2}
        assert (await rig.coordinator.books(rig.stores.recorded)).are_closed
        await rig.coordinator.close()

    asyncio.run(run())


def test_a_score_that_comes_beyond_the_bound_is_rejected_as_stale_without_closing_its_group() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings(lag=2, group_size=3)).start()
        slow = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        await rig.rollouts()
        for step in range(2):
            choice = [g for g in rig.coordinator.state.live_groups.values() if g.num_open == 0]
            assert len(choice) >= 2
            await rig.begin(step)
            await rig.publish(step + 1)
        await rig.coordinator.crash()
        rig.settings = make_settings(lag=1, group_size=3)
        await rig.open()
        await rig.coordinator.artifact_ready(rig.seal(slow))
        await rig.score_all()
        assert rig.coordinator.state.attempts[slow.attempt_id].state == "REJECTED"
        assert rig.coordinator.state.groups[slow.group_id].state == "COMPLETE"
        await rig.coordinator.close()

    asyncio.run(run())


def test_a_group_with_too_few_scores_is_dropped_and_its_slot_is_filled_again() -> None:
    async def scene(rig: RunRig) -> None:
        lost, kept = await rig.coordinator.lease(WORKER, 2, 0.0)
        assert lost.group_id == kept.group_id
        await rig.lose(lost)
        await rig.coordinator.artifact_ready(rig.seal(kept))
        await rig.score_all()
        state = rig.coordinator.state
        assert state.prompts.dropped == {"incomplete": 1}
        assert state.tokens.rejected["incomplete"] > 0
        assert (state.prompts.issued, state.prompts.not_dropped) == (5, 4)

    play(scene, max_attempts=1)


def test_seven_of_eight_members_that_fail_drop_the_group_and_never_count_as_zero() -> None:
    async def scene(rig: RunRig) -> None:
        leases = await rig.coordinator.lease(WORKER, 8, 0.0)
        group_id = leases[0].group_id
        assert {lease.group_id for lease in leases} == {group_id}
        await rig.coordinator.artifact_ready(rig.seal(leases[0]))
        await rig.score_all(lambda job: 1.0)
        failing = list(leases[1:])
        while failing:
            for lease in failing:
                await rig.lose(lease)
            rig.clock.advance(20.0)
            failing = [lease for lease in await rig.coordinator.lease(WORKER, 7, 0.0) if lease.group_id == group_id]
        assert rig.coordinator.state.prompts.dropped == {"incomplete": 1}
        diagnosis = await rig.coordinator.diagnose()
        assert any("were not carried through" in alarm for alarm in diagnosis.alarms)

    play(scene, group_size=8, groups_per_batch=4)


def test_a_group_without_any_result_is_dropped_for_its_budget() -> None:
    async def scene(rig: RunRig) -> None:
        for _ in range(6):
            for lease in await rig.coordinator.lease(WORKER, 2, 0.0):
                await rig.lose(lease, 1)
            rig.clock.advance(20.0)
        assert rig.coordinator.state.prompts.dropped[DropReason.BUDGET] >= 1

    play(scene, max_drop_frac=1.0)


@pytest.mark.parametrize("num_external", [1, 2])
def test_a_group_that_may_not_go_on_although_it_has_budget_is_dropped_as_incomplete(num_external: int) -> None:
    async def scene(rig: RunRig) -> None:
        leases = await rig.coordinator.lease(WORKER, 2, 0.0)
        assert len({lease.group_id for lease in leases}) == 1
        for index, lease in enumerate(leases):
            await rig.coordinator.attempt_failed(
                AttemptFailure(
                    attempt_id=lease.attempt_id,
                    attempt_number=lease.attempt_number,
                    outcome=Outcome.INFRA_FAILED,
                    reason="sandbox_died",
                    made_external_call=index < num_external,
                )
            )
        await rig.coordinator.crash()
        await rig.open()
        rig.clock.advance(20.0)
        for lease in await rig.coordinator.lease(WORKER, 2 - num_external, 0.0) if num_external < 2 else ():
            await rig.lose(lease, 1)
        assert rig.coordinator.state.prompts.dropped == {"incomplete": 1}

    play(scene, max_drop_frac=1.0, max_attempts=2)


def test_drops_above_the_allowed_share_fail_the_run() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings(max_drop_frac=0.2, max_attempts=1)).start()
        with pytest.raises(RunError, match=r"admission.max_drop_frac: at most 0.2"):
            for _ in range(50):
                for lease in await rig.coordinator.lease(WORKER, 2, 0.0):
                    await rig.lose(lease)
        await rig.coordinator.close()

    asyncio.run(run())
