"""Evaluations: one fixed version, results complete, never trained, admitted once even across a crash."""

import pytest

from steelyard.errors import DeadlineExceeded, IllegalTransition, InputError
from steelyard.testing.run_rig import WORKER, RunRig, play
from steelyard.types import Outcome, Sampling

TASKS = ("held-0", "held-1", "held-2")
GREEDY = Sampling(temperature=0.0, seed=1)


async def admit(rig: RunRig, version: int = 0, label: str = "before") -> tuple[str, ...]:
    return await rig.coordinator.admit_evaluation(
        TASKS, version=version, sampling=GREEDY, label=label, samples_per_task=2
    )


def test_results_come_in_task_order_with_traces_and_scores() -> None:
    async def scene(rig: RunRig) -> None:
        await admit(rig)
        await rig.rollouts()
        results = await rig.coordinator.evaluation_results("before", 1.0)
        assert [(r.task_id, r.member_index) for r in results] == [(t, m) for t in TASKS for m in range(2)]
        assert all(r.outcome is Outcome.SCORED and r.trace is not None and r.score is not None for r in results)
        assert [r.is_success for r in results] == [r.score is not None and r.score.value == 1.0 for r in results]
        assert rig.coordinator.evaluation_progress("before") == (3, 3)

    rig = play(scene)
    assert rig.coordinator.state.tokens.evaluated > 0
    assert rig.audit().is_passed


def test_evaluation_is_bound_to_its_version_while_training_goes_on() -> None:
    async def scene(rig: RunRig) -> None:
        await admit(rig)
        mine = [x for x in await rig.coordinator.lease(WORKER, 100, 0.0) if x.purpose == "evaluation"]
        await rig.coordinator.abandon("interrupted")
        assert {(lease.policy_version, lease.sampling.temperature) for lease in mine} == {(0, 0.0)}
        later = [x for x in await rig.coordinator.lease(WORKER, 100, 0.0) if x.purpose == "train"]
        for lease in later:
            await rig.coordinator.artifact_ready(rig.seal(lease))
        await rig.score_all()
        await rig.begin(0)
        await rig.publish(1)
        await rig.coordinator.abandon("interrupted")
        leases = await rig.coordinator.lease(WORKER, 100, 0.0)
        versions = {(lease.purpose.value, lease.policy_version) for lease in leases}
        assert versions == {("evaluation", 0), ("train", 1)}

    play(scene, lag=1)


def test_admitting_again_after_a_crash_admits_only_what_is_missing() -> None:
    async def scene(rig: RunRig) -> None:
        groups = await rig.coordinator.admit_evaluation(
            TASKS[:2], version=0, sampling=GREEDY, label="before", samples_per_task=2
        )
        await rig.run_attempts(4)
        await rig.coordinator.crash()
        await rig.open()
        all_groups = await admit(rig)
        assert all_groups[:2] == groups
        assert len(set(all_groups)) == 3
        assert await admit(rig) == all_groups
        await rig.rollouts()
        assert len(await rig.coordinator.evaluation_results("before", 1.0)) == 6

    play(scene)


def test_a_rollout_of_an_evaluation_that_never_ends_well_is_reported_and_is_no_zero() -> None:
    async def scene(rig: RunRig) -> None:
        await rig.coordinator.admit_evaluation(("held-0",), version=0, sampling=GREEDY, label="x")
        for _ in range(rig.settings.max_attempts):
            for lease in await rig.coordinator.lease(WORKER, 100, 0.0):
                if lease.purpose == "evaluation":
                    await rig.lose(lease)
            await rig.coordinator.abandon("interrupted")
            rig.clock.advance(20.0)
        (result,) = await rig.coordinator.evaluation_results("x", 1.0)
        assert (result.outcome, result.score, result.trace, result.is_success) == (
            Outcome.INFRA_FAILED,
            None,
            None,
            False,
        )

    play(scene)


def test_a_missed_deadline_names_the_missing_rollouts() -> None:
    async def scene(rig: RunRig) -> None:
        await admit(rig)
        await rig.run_attempts(12)
        with pytest.raises(DeadlineExceeded, match=r"evaluation before; still missing: rollout rol_\w+ of group grp"):
            await rig.coordinator.evaluation_results("before", 0.0)

    play(scene)


def test_unknown_labels_and_contradictions_are_bad_input() -> None:
    async def scene(rig: RunRig) -> None:
        with pytest.raises(InputError, match="label must be that of an admitted evaluation"):
            await rig.coordinator.evaluation_results("nothing", 1.0)
        await admit(rig)
        await rig.train(0)
        with pytest.raises(InputError, match="evaluation before is of version 0, not 1"):
            await admit(rig, version=1)
        with pytest.raises(InputError, match="task_ids must be distinct"):
            await rig.coordinator.admit_evaluation(("a", "a"), version=1, sampling=GREEDY, label="y")
        with pytest.raises(IllegalTransition, match="never published"):
            await admit(rig, version=9, label="z")

    play(scene)


def test_a_version_under_evaluation_is_not_released() -> None:
    async def scene(rig: RunRig) -> None:
        await admit(rig)
        await rig.run_attempts(8)
        await rig.score_all()
        await rig.begin(0)
        await rig.publish(1)
        found = rig.coordinator.version(0)
        assert found is not None and found.state == "READY"
        await rig.rollouts()
        found = rig.coordinator.version(0)
        assert found is not None and found.state == "RELEASED"

    play(scene)
