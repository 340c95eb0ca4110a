"""Budgets of a rollout beside its attempts: sampled tokens, and the wall-clock time of the system."""

import asyncio

from steelyard.coordinator import events as e
from steelyard.coordinator.entities import Rollout, State
from steelyard.coordinator.state import apply
from steelyard.coordinator.transitions import GroupState, RolloutState
from steelyard.testing.manual_clock import settle
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_score, make_settings, play, refusal_of
from steelyard.types import Lease, Outcome, Sampling


async def first(rig: RunRig) -> tuple[Lease, Rollout]:
    (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
    return lease, rig.coordinator.state.rollouts[lease.rollout_id]


async def passes(rig: RunRig, seconds: float) -> None:
    """Time passes while nobody calls."""
    await settle()
    rig.clock.advance(seconds)
    await settle()


async def cancellations(rig: RunRig) -> dict[str, str]:
    events = await rig.memory_journal.replay()
    return {event.rollout_id: event.reason for event in events if isinstance(event, e.RolloutCancelled)}


def test_the_token_budget_counts_every_attempt_lost_ones_included() -> None:
    async def scene(rig: RunRig) -> None:
        lease, rollout = await first(rig)
        await rig.lose(lease, 60)
        assert (rollout.state, rollout.num_tokens) == (RolloutState.PENDING, 60)
        await passes(rig, 1.0)
        lease, again = await first(rig)
        assert again is rollout
        await rig.lose(lease, 40)
        assert (rollout.state, rollout.num_tokens) == (RolloutState.CANCELLED, 100)
        assert await cancellations(rig) == {rollout.rollout_id: "budget_tokens"}
        assert rig.coordinator.counters.read()["cancelled.budget_tokens"] == 1

    play(scene, group_size=3, budget_tokens=100)


def test_tokens_of_interrupted_and_expired_attempts_and_of_lost_artifacts_count_once_each() -> None:
    async def scene(rig: RunRig) -> None:
        lease, rollout = await first(rig)
        rig.stores.record(lease.attempt_id, 7)
        await rig.coordinator.abandon("interrupted")
        lease, again = await first(rig)
        assert again is rollout and rollout.num_tokens == 7
        rig.stores.record(lease.attempt_id, 11)
        await passes(rig, rig.settings.lease_s + 1)
        await rig.coordinator.heartbeat(WORKER, ())
        await passes(rig, 1.0)
        lease, again = await first(rig)
        assert again is rollout and rollout.num_tokens == 18
        await rig.coordinator.artifact_ready(rig.seal(lease, 5))
        assert rollout.num_tokens == 23
        await rig.coordinator.artifact_lost(lease.attempt_id, "unreadable")
        assert (rollout.state, rollout.num_tokens) == (RolloutState.PENDING, 23)

    play(scene)


def test_an_attempt_that_goes_on_is_not_cut_by_the_token_budget_and_its_result_counts() -> None:
    async def scene(rig: RunRig) -> None:
        lease, rollout = await first(rig)
        await rig.coordinator.artifact_ready(rig.seal(lease, 500))
        await rig.score_all()
        assert rollout.state is RolloutState.ACCEPTED

    play(scene, budget_tokens=100)


def test_a_budget_that_is_smaller_after_a_resume_ends_the_rollout_before_its_next_lease() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings(group_size=3)).start()
        lease, _ = await first(rig)
        await rig.lose(lease, 50)
        await rig.coordinator.crash()
        rig.settings = make_settings(group_size=3, budget_tokens=50)
        await rig.open()
        await passes(rig, 1.0)
        leases = await rig.coordinator.lease(WORKER, 100, 0.0)
        assert lease.rollout_id not in {other.rollout_id for other in leases} and len(leases) == 11
        assert await cancellations(rig) == {lease.rollout_id: "budget_tokens"}
        await rig.coordinator.close()
        assert rig.audit().is_passed

    asyncio.run(run())


def test_when_its_time_is_used_up_a_rollout_ends_in_whatever_state_it_is_and_is_never_scored() -> None:
    async def scene(rig: RunRig) -> None:
        held, sealed, grading = await rig.coordinator.lease(WORKER, 3, 0.0)
        rig.stores.record(held.attempt_id, 9)
        for lease in (grading, sealed):
            await rig.coordinator.artifact_ready(rig.seal(lease, 4))
        (job,) = await rig.coordinator.lease_scores(SCORER, 1, 0.0)
        await passes(rig, 29.9)
        assert await rig.coordinator.heartbeat(WORKER, (held.attempt_id,)) == ()
        assert not await cancellations(rig)
        await passes(rig, 0.1)
        assert len(await cancellations(rig)) == 16 and set((await cancellations(rig)).values()) == {"budget_time"}
        assert await rig.coordinator.heartbeat(WORKER, (held.attempt_id,)) == (held.attempt_id,)
        assert await refusal_of(rig.coordinator.artifact_ready(rig.seal(held))) == "late"
        assert await refusal_of(rig.coordinator.score(make_score(job, 1.0))) == "late"
        state = rig.coordinator.state
        assert state.prompts.dropped == {"budget": 4} and state.prompts.issued == 8
        assert state.tokens.lost == {"budget_time": 9} and state.tokens.rejected["budget_time"] == 8

    async def run() -> None:
        rig = await RunRig(make_settings(group_size=4, budget_s=30.0, max_drop_frac=1.0)).start()
        await scene(rig)
        rig.stores.recorded[next(iter(rig.stores.recorded))] = 9  # what the refused attempt sampled was never recorded
        assert (await rig.coordinator.books(rig.stores.recorded)).are_closed
        await rig.coordinator.close()

    asyncio.run(run())


def test_members_that_ended_in_time_are_kept_and_complete_their_group() -> None:
    async def scene(rig: RunRig) -> None:
        leases = await rig.coordinator.lease(WORKER, 3, 0.0)
        assert len({lease.group_id for lease in leases}) == 1
        for lease in leases[:2]:
            await rig.coordinator.artifact_ready(rig.seal(lease))
        await rig.score_all()
        await passes(rig, 30.0)
        group = rig.coordinator.state.groups[leases[0].group_id]
        assert group.state is GroupState.COMPLETE
        states = sorted(rollout.state for rollout in group.rollouts)
        assert states == [RolloutState.ACCEPTED, RolloutState.ACCEPTED, RolloutState.CANCELLED]

    play(scene, group_size=3, budget_s=30.0, max_drop_frac=1.0)


def test_the_time_is_counted_from_admission_across_a_crash() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings(budget_s=30.0, max_drop_frac=1.0)).start()
        lease, rollout = await first(rig)
        await passes(rig, 20.0)
        await rig.coordinator.crash()
        await rig.open()
        await passes(rig, 9.0)
        assert rig.coordinator.is_alive(lease.attempt_id)
        await passes(rig, 1.0)
        assert not rig.coordinator.is_alive(lease.attempt_id)
        assert (await cancellations(rig))[rollout.rollout_id] == "budget_time"
        await rig.coordinator.close()
        assert rig.audit().is_passed

    asyncio.run(run())


def test_a_group_that_starts_again_has_all_its_time_again() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.coordinator.lease(WORKER, 100, 0.0)
        waiter = asyncio.ensure_future(rig.coordinator.next_batch(0, 1e6))
        await settle()
        await passes(rig, 20.0)
        assert rig.coordinator.state.prompts.restarted == 2
        waiter.cancel()
        await passes(rig, 29.0)
        assert set((await cancellations(rig)).values()) == {"stale"}
        await passes(rig, 1.0)
        assert set((await cancellations(rig)).values()) == {"stale", "budget_time"}

    play(scene, lag=0, budget_s=30.0, max_tail_wait_s=20.0, max_drop_frac=1.0)


def test_a_replay_never_asks_the_clock() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.coordinator.lease(WORKER, 2, 0.0)
        await passes(rig, 31.0)
        live, state = rig.coordinator.state, State()
        for event in await rig.memory_journal.replay():
            apply(state, event)
        assert state.prompts.dropped == live.prompts.dropped == {"budget": 4}
        assert {r: x.state for r, x in state.rollouts.items()} == {r: x.state for r, x in live.rollouts.items()}

    play(scene, budget_s=30.0, max_drop_frac=1.0)


def test_the_rollouts_of_an_evaluation_have_the_same_budgets_and_are_reported_as_cancelled() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.coordinator.admit_evaluation(("held-0",), version=0, sampling=Sampling(), label="x")
        await passes(rig, 30.0)
        (result,) = await rig.coordinator.evaluation_results("x", 1.0)
        assert (result.outcome, result.score) == (Outcome.CANCELLED, None)

    play(scene, budget_s=30.0, max_drop_frac=1.0)


def test_without_a_time_budget_nothing_ends_by_itself() -> None:
    async def scene(rig: RunRig) -> None:
        await passes(rig, 1e6)
        assert len(await rig.coordinator.lease(WORKER, 100, 0.0)) == 8

    play(scene)
