"""doctor: every wait has a name, a culprit, a beginning and, where there is one, a deadline."""

import pytest

from steelyard.coordinator.doctor import diagnose
from steelyard.coordinator.records import Wait
from steelyard.coordinator.state import apply
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_score, play
from steelyard.types import Outcome, Sampling


async def lines(rig: RunRig) -> str:
    return "\n".join((await rig.coordinator.diagnose()).lines())


def test_each_stage_of_a_rollout_names_whom_it_waits_for() -> None:
    async def scene(rig: RunRig) -> None:
        assert "waits for a free harness worker (0 attempts so far, 0 of at most 3 failed)" in await lines(rig)
        (lease,) = await rig.coordinator.lease("wrk_slow", 1, 0.0)
        rig.clock.advance(7.0)
        found = await lines(rig)
        assert f"rollout {lease.rollout_id} waits for worker wrk_slow" in found
        assert f"attempt {lease.attempt_id}, number 1, leased, 0 of at most 3 failed) since 7.0 s, 53.0 s left" in found
        await rig.coordinator.artifact_ready(rig.seal(lease))
        assert f"rollout {lease.rollout_id} waits for a free scorer" in await lines(rig)
        (job,) = await rig.coordinator.lease_scores("wrk_grader", 1, 0.0)
        found = await lines(rig)
        assert f"rollout {lease.rollout_id} waits for scorer wrk_grader" in found and "30.0 s left" in found
        await rig.coordinator.score(make_score(job, 1.0))
        assert f"rollout {lease.rollout_id} waits" not in await lines(rig)

    play(scene)


def test_a_step_names_weights_groups_or_trainer_in_turn() -> None:
    async def scene(rig: RunRig) -> None:
        assert "step 0 waits for its groups (2 of the groups that fall due" in await lines(rig)
        await rig.rollouts()
        assert "step 0 waits for the trainer (to begin)" in await lines(rig)
        await rig.begin(0)
        assert "step 1 waits for the trainer (version of step 1)" in await lines(rig)
        number = await rig.publish(1, is_ready=False)
        found = await lines(rig)
        assert "version 1 waits for the replicas (load with proof)" in found
        assert "step 1 waits for the harness workers (2 more complete groups, 0 may still be admitted)" in found
        await rig.load(number)

    play(scene, lag=0)


def test_budgets_and_priority_are_shown_and_the_first_deadline_counts() -> None:
    async def scene(rig: RunRig) -> None:
        (group_id,) = await rig.coordinator.admit_evaluation(
            ("held",), version=0, sampling=Sampling(), label="x", priority=2
        )
        budgets = "0 of at most 3 failed, 0 of 90 tokens used, admitted with 80 s to its end, priority 2"
        assert f"(0 attempts so far, {budgets}) since 0.0 s, 80.0 s left" in await lines(rig)
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        assert lease.group_id == group_id
        assert "leased, 0 of at most 3 failed" in await lines(rig) and "since 0.0 s, 60.0 s left" in await lines(rig)
        await rig.lose(lease, 40)
        rig.clock.advance(30.0)
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        budgets = "1 of at most 3 failed, 40 of 90 tokens used, admitted with 80 s to its end, priority 2"
        found = await lines(rig)
        assert f"attempt {lease.attempt_id}, number 2, leased, {budgets}) since 0.0 s, 50.0 s left" in found

    play(scene, budget_tokens=90, budget_s=80.0)


def test_a_renewed_lease_shows_its_new_deadline() -> None:
    async def scene(rig: RunRig) -> None:
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        rig.clock.advance(50.0)
        await rig.coordinator.heartbeat(WORKER, (lease.attempt_id,))
        rig.clock.advance(20.0)
        assert "leased, 0 of at most 3 failed) since 70.0 s, 40.0 s left" in await lines(rig)

    play(scene)


def test_a_retry_shows_its_back_off() -> None:
    async def scene(rig: RunRig) -> None:
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.lose(lease)
        found = await lines(rig)
        assert "waits for a free harness worker (1 attempts so far, 1 of at most 3 failed) since 0.0 s, 0.2 s" in found

    play(scene)


def test_a_replayed_journal_gives_the_same_diagnosis_but_for_unjournalled_jobs() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.run_attempts(3)
        await rig.coordinator.lease(WORKER, 2, 0.0)
        live = await rig.coordinator.diagnose()
        state = type(rig.coordinator.state)()
        for event in await rig.memory_journal.replay():
            apply(state, event)
        assert diagnose(state, rig.settings, live.at_s) == live

    play(scene)


@pytest.mark.parametrize("kind", ["graders", "attempts"])
def test_a_high_rate_of_failures_is_an_alarm(kind: str) -> None:
    async def scene(rig: RunRig) -> None:
        assert (await rig.coordinator.diagnose()).alarms == ()
        for _ in range(12):
            for lease in await rig.coordinator.lease(WORKER, 4, 0.0):
                if kind == "attempts":
                    await rig.lose(lease)
                else:
                    await rig.coordinator.artifact_ready(rig.seal(lease))
            for job in await rig.coordinator.lease_scores(SCORER, 4, 0.0):
                await rig.coordinator.score(make_score(job, None, Outcome.GRADER_FAILED))
            rig.clock.advance(30.0)
        (alarm,) = (await rig.coordinator.diagnose()).alarms
        assert ("gradings failed" if kind == "graders" else "attempts were not carried through") in alarm

    play(scene, max_drop_frac=1.0)


def test_a_wait_reads_as_a_sentence() -> None:
    wait = Wait(who="rollout r", whom="worker w", why="attempt a", since_s=10.0, until_s=70.0)
    assert wait.describe(30.0) == "rollout r waits for worker w (attempt a) since 20.0 s, 40.0 s left"
