"""Leases through the coordinator: fencing, expiry, renewal, back-off, budgets."""

import asyncio

import msgspec
import pytest

from steelyard.coordinator.transitions import RolloutState
from steelyard.errors import RunError, StorageFailed
from steelyard.ids import IdKind, SeededIds
from steelyard.testing.manual_clock import ManualClock, settle
from steelyard.testing.run_rig import (
    SCORER,
    WORKER,
    MemoryStores,
    RunRig,
    make_score,
    make_settings,
    play,
    refusal_of,
)
from steelyard.types import AttemptFailure, Lease, Outcome


def failure(lease: Lease, **changes: object) -> AttemptFailure:
    record = AttemptFailure(
        attempt_id=lease.attempt_id,
        attempt_number=lease.attempt_number,
        outcome=Outcome.INFRA_FAILED,
        reason="sandbox_died",
    )
    return msgspec.structs.replace(record, **changes)


def test_a_late_a_double_and_an_unknown_result_are_each_refused_and_counted() -> None:
    async def scene(rig: RunRig) -> None:
        (first,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        late = rig.seal(first)
        rig.clock.advance(rig.settings.lease_s + 1)
        assert await refusal_of(rig.coordinator.artifact_ready(late)) == "expired"
        rig.clock.advance(10)
        (second,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        assert (second.rollout_id, second.attempt_number) == (first.rollout_id, 2)
        good = rig.seal(second)
        await rig.coordinator.artifact_ready(good)
        assert await refusal_of(rig.coordinator.artifact_ready(late)) == "expired"
        changed = msgspec.structs.replace(good, artifact_digest="0" * 32)
        assert await refusal_of(rig.coordinator.artifact_ready(changed)) == "double"
        stranger = msgspec.structs.replace(good, attempt_id="att_stranger")
        assert await refusal_of(rig.coordinator.artifact_ready(stranger)) == "unknown"
        counts = rig.coordinator.counters.read()
        assert (counts["refused.expired"], counts["refused.double"], counts["refused.unknown"]) == (2, 1, 1)

    play(scene)


def test_an_identical_report_is_accepted_twice_and_changes_nothing() -> None:
    async def scene(rig: RunRig) -> None:
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        report = rig.seal(lease)
        await rig.coordinator.artifact_ready(report)
        num_events = rig.coordinator.state.num_events
        await rig.coordinator.artifact_ready(report)
        job = (await rig.coordinator.lease_scores("s", 1, 0.0))[0]
        await rig.coordinator.score(make_score(job, 1.0))
        after_score = rig.coordinator.state.num_events
        await rig.coordinator.score(make_score(job, 1.0))
        await rig.coordinator.artifact_ready(report)
        assert rig.coordinator.state.num_events == after_score == num_events + 2
        assert rig.coordinator.counters.read() == {"duplicate.artifact_ready": 2, "duplicate.score": 1}

    play(scene)


def test_an_older_attempt_number_is_late_and_a_future_one_foreign() -> None:
    async def scene(rig: RunRig) -> None:
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        report = rig.seal(lease)
        assert (
            await refusal_of(rig.coordinator.artifact_ready(msgspec.structs.replace(report, attempt_number=0)))
            == "late"
        )
        assert (
            await refusal_of(rig.coordinator.artifact_ready(msgspec.structs.replace(report, attempt_number=2)))
            == "foreign"
        )
        assert await refusal_of(rig.coordinator.start(lease.attempt_id, 1, "wrk_other")) == "foreign"
        await rig.coordinator.artifact_ready(report)

    play(scene)


def test_a_trace_of_another_attempt_is_refused() -> None:
    async def scene(rig: RunRig) -> None:
        one, two = await rig.coordinator.lease(WORKER, 2, 0.0)
        mine, other = rig.seal(one), rig.seal(two)
        assert (
            await refusal_of(rig.coordinator.artifact_ready(msgspec.structs.replace(mine, trace=other.trace)))
            == "foreign"
        )

    play(scene)


def test_a_trace_of_another_version_than_the_bound_one_ends_the_attempt() -> None:
    async def scene(rig: RunRig) -> None:
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        report = rig.seal(lease)
        trace = msgspec.structs.replace(report.trace, newest_version=1)
        assert (
            await refusal_of(rig.coordinator.artifact_ready(msgspec.structs.replace(report, trace=trace))) == "foreign"
        )
        assert rig.coordinator.state.tokens.lost["wrong_version"] == report.trace.num_tokens
        assert not rig.coordinator.is_alive(lease.attempt_id)

    play(scene)


def test_a_heartbeat_keeps_a_lease_alive_and_its_absence_lets_it_expire() -> None:
    async def scene(rig: RunRig) -> None:
        kept, lost = await rig.coordinator.lease(WORKER, 2, 0.0)
        rig.stores.record(lost.attempt_id, 6)
        for _ in range(5):
            rig.clock.advance(rig.settings.lease_s * 0.6)
            await settle()
            dead = await rig.coordinator.heartbeat(WORKER, (kept.attempt_id, lost.attempt_id)[:1])
            assert dead == ()
        dead = await rig.coordinator.heartbeat(WORKER, (kept.attempt_id, lost.attempt_id, "att_unknown"))
        assert dead == (lost.attempt_id, "att_unknown")
        assert rig.coordinator.is_alive(kept.attempt_id)
        assert rig.coordinator.state.tokens.lost == {"lease_expired": 6}

    play(scene)


def test_a_heartbeat_of_another_worker_renews_nothing() -> None:
    async def scene(rig: RunRig) -> None:
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        assert await rig.coordinator.heartbeat("wrk_other", (lease.attempt_id,)) == (lease.attempt_id,)
        assert rig.coordinator.is_alive(lease.attempt_id)

    play(scene)


def test_leases_expire_on_time_although_nobody_calls() -> None:
    async def scene(rig: RunRig) -> None:
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        rig.clock.advance(rig.settings.lease_s + 0.001)
        await settle()
        assert rig.coordinator.state.tallies.num_expired == 1
        assert lease.attempt_id not in rig.coordinator.state.attempts

    play(scene)


def test_a_retry_waits_out_its_back_off_and_goes_before_new_work() -> None:
    async def scene(rig: RunRig) -> None:
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        await rig.coordinator.attempt_failed(failure(lease))
        now = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        assert now.rollout_id != lease.rollout_id, "the retry is still backing off"
        waiter = asyncio.ensure_future(rig.coordinator.lease(WORKER, 100, 5.0))
        rest = await waiter
        assert len(rest) == 6
        blocked = asyncio.ensure_future(rig.coordinator.lease(WORKER, 100, 5.0))
        await settle()
        assert not blocked.done()
        rig.clock.advance(rig.settings.retry_backoff_s)
        await settle()
        (retry,) = await blocked
        assert (retry.rollout_id, retry.attempt_number) == (lease.rollout_id, 2)

    play(scene)


def test_a_due_retry_is_leased_before_an_older_new_rollout() -> None:
    async def scene(rig: RunRig) -> None:
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        await rig.coordinator.attempt_failed(failure(lease))
        rig.clock.advance(1.0)
        await settle()
        (next_lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        assert next_lease.rollout_id == lease.rollout_id

    play(scene)


def test_back_off_doubles_and_the_budget_ends_in_a_cancelled_rollout_outside_the_statistics() -> None:
    async def scene(rig: RunRig) -> None:
        waits = []
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        target = lease.rollout_id
        for _ in range(rig.settings.max_attempts):
            await rig.coordinator.attempt_failed(failure(lease))
            rollout = rig.coordinator.state.rollouts[target]
            waits.append(rollout.not_before_s - rig.clock.now_s())
            rig.clock.advance(10.0)
            await settle()
            if rollout.state is RolloutState.PENDING:
                (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
                assert lease.rollout_id == target
        assert waits[:2] == pytest.approx([0.25, 0.5])
        assert rollout.state is RolloutState.CANCELLED
        assert await refusal_of(rig.coordinator.attempt_failed(failure(lease, reason="other"))) == "late"
        await rig.rollouts()
        plan = await rig.coordinator.next_batch(0, 1.0)
        assert len(plan.members) == 5
        assert target not in {member.rollout_id for member in plan.members}

    play(scene, group_size=3, lag=0)


class FailingIds(SeededIds):
    """Has no name for the next thing of one kind."""

    failing: IdKind | None = None

    def new(self, kind: IdKind) -> str:
        if kind == self.failing:
            self.failing = None
            raise OSError("no more names")
        return super().new(kind)


def test_an_error_in_the_middle_of_a_grant_loses_no_rollout_and_no_job() -> None:
    async def run() -> None:
        rig = RunRig(make_settings())
        rig.ids = ids = FailingIds(0)
        await rig.start()
        waiting = {rollout.rollout_id for rollout in rig.coordinator.state.rollouts.values()}
        ids.failing = "att"
        with pytest.raises(OSError, match="no more names"):
            await rig.coordinator.lease(WORKER, 1, 0.0)
        leases = await rig.coordinator.lease(WORKER, 100, 0.0)
        assert {lease.rollout_id for lease in leases} == waiting
        await rig.coordinator.artifact_ready(rig.seal(leases[0]))
        ids.failing = "score"
        with pytest.raises(OSError, match="no more names"):
            await rig.coordinator.lease_scores(SCORER, 1, 0.0)
        (job,) = await rig.coordinator.lease_scores(SCORER, 1, 0.0)
        assert job.attempt_id == leases[0].attempt_id
        await rig.coordinator.close()

    asyncio.run(run())


def test_the_same_failure_again_is_done_also_after_a_restart_and_another_one_is_refused() -> None:
    async def scene(rig: RunRig) -> None:
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        news, report = failure(lease, detail="signal 9"), rig.seal(lease)
        await rig.coordinator.attempt_failed(news, WORKER)
        await rig.coordinator.crash()
        await rig.open()
        num_events = rig.coordinator.state.num_events
        await rig.coordinator.attempt_failed(news, WORKER)
        await rig.coordinator.attempt_failed(msgspec.structs.replace(news, lost_tokens=3), WORKER)
        assert rig.coordinator.state.num_events == num_events
        assert rig.coordinator.counters.read() == {"duplicate.attempt_failed": 2}
        for other in (
            failure(lease, detail="signal 11"),
            failure(lease, detail="signal 9", reason="other"),
            failure(lease, detail="signal 9", outcome=Outcome.TIMED_OUT),
            failure(lease, detail="signal 9", attempt_number=2),
        ):
            assert await refusal_of(rig.coordinator.attempt_failed(other, WORKER)) == "late"
        assert await refusal_of(rig.coordinator.attempt_failed(news, "wrk_other")) == "late"
        assert await refusal_of(rig.coordinator.artifact_ready(report, WORKER)) == "late"

    play(scene)


def test_the_same_news_of_a_lost_artifact_is_done_also_after_a_restart() -> None:
    async def scene(rig: RunRig) -> None:
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.coordinator.artifact_ready(rig.seal(lease))
        await rig.coordinator.lease_scores(SCORER, 1, 0.0)
        await rig.coordinator.artifact_lost(lease.attempt_id, "unreadable", SCORER)
        await rig.coordinator.crash()
        await rig.open()
        num_events = rig.coordinator.state.num_events
        await rig.coordinator.artifact_lost(lease.attempt_id, "unreadable", SCORER)
        assert rig.coordinator.state.num_events == num_events
        assert rig.coordinator.counters.read() == {"duplicate.artifact_lost": 1}
        assert await refusal_of(rig.coordinator.artifact_lost(lease.attempt_id, "gone", SCORER)) == "late"

    play(scene)


def test_an_attempt_that_made_an_external_call_is_not_retried() -> None:
    async def scene(rig: RunRig) -> None:
        lease = (await rig.coordinator.lease(WORKER, 1, 0.0))[0]
        await rig.coordinator.attempt_failed(failure(lease, made_external_call=True))
        assert rig.coordinator.state.rollouts[lease.rollout_id].state is RolloutState.CANCELLED

    play(scene, group_size=3)


def test_an_empty_queue_answers_after_the_wait_and_new_work_answers_at_once() -> None:
    async def scene(rig: RunRig) -> None:
        assert len(await rig.coordinator.lease(WORKER, 100, 0.0)) == 8
        waiter = asyncio.ensure_future(rig.coordinator.lease(WORKER, 1, 3.0))
        await settle()
        rig.clock.advance(2.9)
        await settle()
        assert not waiter.done()
        rig.clock.advance(0.2)
        await settle()
        assert await waiter == ()

    play(scene)


def test_siblings_sample_with_seeds_of_their_own_which_a_retry_keeps() -> None:
    async def scene(rig: RunRig) -> None:
        leases = await rig.coordinator.lease(WORKER, 100, 0.0)
        assert len({lease.sampling.seed for lease in leases}) == len(leases)
        await rig.coordinator.attempt_failed(failure(leases[0]))
        rig.clock.advance(1.0)
        (retry,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        assert retry.sampling == leases[0].sampling
        assert rig.coordinator.live_lease(retry.attempt_id) == retry

    play(scene)


def test_abandoned_attempts_do_not_use_up_budget() -> None:
    async def scene(rig: RunRig) -> None:
        for round_index in range(rig.settings.max_attempts + 2):
            leases = await rig.coordinator.lease(WORKER, 100, 0.0)
            assert len(leases) == 8 and leases[0].attempt_number == round_index + 1
            rig.stores.record(leases[0].attempt_id, 2)
            assert await rig.coordinator.abandon("interrupted") == 8
        assert rig.coordinator.state.tokens.lost == {"interrupted": 10}

    play(scene)


def test_a_worker_that_is_told_to_stop_uses_up_no_budget() -> None:
    async def scene(rig: RunRig) -> None:
        for _ in range(5):
            for lease in await rig.coordinator.lease(WORKER, 100, 0.0):
                stopped = AttemptFailure(
                    attempt_id=lease.attempt_id,
                    attempt_number=lease.attempt_number,
                    outcome=Outcome.CANCELLED,
                    reason="worker_stopped",
                )
                await rig.coordinator.attempt_failed(stopped)
        assert not any(rollout.state is RolloutState.CANCELLED for rollout in rig.coordinator.state.rollouts.values())
        assert await rig.coordinator.lease(WORKER, 100, 0.0)

    play(scene, max_attempts=1)


def test_after_a_crash_every_lease_gets_one_full_period_and_results_are_still_accepted() -> None:
    async def scene(rig: RunRig) -> None:
        one, two = await rig.coordinator.lease(WORKER, 2, 0.0)
        rig.clock.advance(rig.settings.lease_s - 1)
        await rig.coordinator.crash()
        rig.clock.advance(rig.settings.lease_s - 1)
        await rig.open()
        assert rig.coordinator.is_alive(one.attempt_id)
        await rig.coordinator.artifact_ready(rig.seal(one))
        rig.clock.advance(rig.settings.lease_s + 1)
        assert await refusal_of(rig.coordinator.artifact_ready(rig.seal(two))) == "expired"

    play(scene)


def test_time_goes_on_after_a_recovery_on_a_clock_that_was_set_back() -> None:
    async def scene(rig: RunRig) -> None:
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.coordinator.crash()
        rig.clock = ManualClock(rig.clock.now_s() - 3600.0)
        await rig.open()
        rig.clock.advance(rig.settings.lease_s - 1)
        assert rig.coordinator.is_alive(lease.attempt_id)
        rig.clock.advance(2)
        assert await refusal_of(rig.coordinator.artifact_ready(rig.seal(lease))) == "expired"

    play(scene)


def test_a_run_whose_lost_tokens_cannot_be_counted_has_failed() -> None:
    class FullStores(MemoryStores):
        def discard(self, attempt_id: str) -> int:
            raise StorageFailed("the disk refused to sync")

    async def scene() -> None:
        rig = RunRig()
        rig.stores = FullStores()
        await rig.start()
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        for _ in range(2):
            with pytest.raises(StorageFailed, match="refused to sync"):
                await rig.coordinator.attempt_failed(failure(lease))
        with pytest.raises(StorageFailed, match="refused to sync"):
            await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.coordinator.close()

    asyncio.run(scene())


def test_a_failed_run_ends_every_wait_with_its_error() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.coordinator.lease(WORKER, 100, 0.0)
        waits = [
            asyncio.ensure_future(rig.coordinator.lease(WORKER, 1, 1e6)),
            asyncio.ensure_future(rig.coordinator.lease_scores("s", 1, 1e6)),
            asyncio.ensure_future(rig.coordinator.next_batch(0, 1e6)),
            asyncio.ensure_future(rig.coordinator.wait_for_room(1e6)),
        ]
        await settle()
        assert not any(wait.done() for wait in waits[:3])
        rig.coordinator.fail(RunError("the harness process died"))
        for wait in waits[:3]:
            with pytest.raises(RunError, match="the harness process died"):
                await wait
        await waits[3]
        with pytest.raises(RunError, match="the harness process died"):
            await rig.coordinator.heartbeat(WORKER, ())

    async def run() -> None:
        rig = await RunRig(make_settings()).start()
        await scene(rig)
        await rig.coordinator.close()

    asyncio.run(run())


def test_a_finished_run_is_never_busy_with_leases_that_ran_out() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.coordinator.finish("done")
        rig.clock.advance(rig.settings.lease_s + 1)
        num_reads = rig.clock.num_reads
        await settle(200)
        assert rig.clock.num_reads - num_reads < 50

    play(scene)
