"""What follows each ending: one test a row of the table, through the coordinator."""

import asyncio
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.coordinator import events as e
from steelyard.coordinator.entities import Rollout
from steelyard.coordinator.retry_rules import REPORTED, RETRY_RULES, Ending, Follow, backoff_s
from steelyard.coordinator.transitions import RolloutState
from steelyard.testing.run_rig import SCORER, WORKER, RunRig, make_score, make_settings, play, refusal_of
from steelyard.types import AttemptFailure, Lease, Outcome

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"


def failure(lease: Lease, outcome: Outcome) -> AttemptFailure:
    return AttemptFailure(attempt_id=lease.attempt_id, attempt_number=lease.attempt_number, outcome=outcome, reason="r")


async def first(rig: RunRig) -> tuple[Lease, Rollout]:
    (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
    return lease, rig.coordinator.state.rollouts[lease.rollout_id]


async def journalled(rig: RunRig, kind: type[e.Event]) -> list[e.AnyEvent]:
    return [event for event in await rig.memory_journal.replay() if isinstance(event, kind)]


def test_every_ending_has_a_rule_and_every_outcome_an_ending() -> None:
    assert set(RETRY_RULES) == set(Ending)
    assert {rule.outcome for rule in RETRY_RULES.values()} == set(Outcome)


@pytest.mark.parametrize("ending", list(Ending))
def test_the_documented_table_is_this_one(ending: Ending) -> None:
    (row,) = [line for line in ARCHITECTURE.read_text().splitlines() if line.startswith(f"| `{ending}`")]
    _, _, outcome, follows, uses_up, waits = (cell.strip() for cell in row.split("|")[:-1])
    rule = RETRY_RULES[ending]
    assert outcome == (f"`{rule.outcome}`" if ending is not Ending.GRADER_FAILED else "as the grader says")
    expected = {
        Follow.NOTHING: "nothing: it is the result",
        Follow.NEW_ATTEMPT: "new attempt",
        Follow.SAME_ARTIFACT: "the same artifact is scored again",
    }
    assert follows == expected[rule.follow]
    budget = "`scoring.max_attempts`" if ending is Ending.GRADER_FAILED else "`rollout.max_attempts`"
    assert uses_up == (budget if rule.is_counted else "" if rule.follow is Follow.NOTHING else "nothing")
    assert waits == ("back-off" if rule.has_backoff else "" if rule.follow is Follow.NOTHING else "no")


def test_only_a_verdict_is_final() -> None:
    assert [ending for ending, rule in RETRY_RULES.items() if rule.follow is Follow.NOTHING] == [Ending.SCORED]


@pytest.mark.parametrize(
    ("outcome", "num_failures", "wait_s"),
    [
        (Outcome.INFRA_FAILED, 1, 0.25),
        (Outcome.TIMED_OUT, 1, 0.25),
        (Outcome.TRUNCATED, 1, 0.0),
        (Outcome.CANCELLED, 0, 0.0),
    ],
)
def test_a_reported_failure_is_tried_again_as_its_row_says(outcome: Outcome, num_failures: int, wait_s: float) -> None:
    async def scene(rig: RunRig) -> None:
        lease, rollout = await first(rig)
        await rig.coordinator.attempt_failed(failure(lease, outcome))
        assert (rollout.state, rollout.num_failures) == (RolloutState.PENDING, num_failures)
        assert rollout.last_outcome is outcome
        assert rollout.not_before_s - rig.clock.now_s() == pytest.approx(wait_s)
        (retried,) = await journalled(rig, e.RolloutRetried)
        assert isinstance(retried, e.RolloutRetried) and retried.not_before_s == rollout.not_before_s

    play(scene)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome not in REPORTED])
def test_an_outcome_that_is_not_a_workers_to_give_is_refused_as_malformed_and_changes_nothing(outcome: Outcome) -> None:
    async def scene(rig: RunRig) -> None:
        lease, rollout = await first(rig)
        assert await refusal_of(rig.coordinator.attempt_failed(failure(lease, outcome))) == "malformed"
        assert rollout.state is RolloutState.LEASED
        await rig.coordinator.artifact_ready(rig.seal(lease))

    play(scene)


def test_an_expired_lease_is_tried_again_after_a_back_off_and_counts() -> None:
    async def scene(rig: RunRig) -> None:
        _, rollout = await first(rig)
        rig.clock.advance(rig.settings.lease_s + 1)
        await rig.coordinator.heartbeat(WORKER, ())
        assert (rollout.state, rollout.num_failures) == (RolloutState.PENDING, 1)
        assert rollout.last_outcome is Outcome.TIMED_OUT
        assert rollout.not_before_s - rig.clock.now_s() == pytest.approx(0.25)

    play(scene)


def test_an_abandoned_attempt_is_tried_again_at_once_and_does_not_count_even_after_a_failure_that_did() -> None:
    async def scene(rig: RunRig) -> None:
        lease, rollout = await first(rig)
        await rig.coordinator.attempt_failed(failure(lease, Outcome.INFRA_FAILED))
        rig.clock.advance(1.0)
        await first(rig)
        await rig.coordinator.abandon("interrupted")
        assert (rollout.state, rollout.num_failures) == (RolloutState.PENDING, 1)
        assert rollout.not_before_s == rig.clock.now_s()

    play(scene)


def test_a_failed_grading_is_repeated_on_the_same_artifact_until_its_own_budget_ends() -> None:
    async def scene(rig: RunRig) -> None:
        lease, rollout = await first(rig)
        report = rig.seal(lease)
        await rig.coordinator.artifact_ready(report)
        for number in range(rig.settings.max_grader_attempts):
            assert (rollout.state, rollout.num_grader_failures) == (RolloutState.ARTIFACT_READY, number)
            (job,) = await rig.coordinator.lease_scores(SCORER, 1, 0.0)
            assert (job.attempt_id, job.artifact_digest) == (lease.attempt_id, report.artifact_digest)
            await rig.coordinator.score(make_score(job, None, Outcome.GRADER_FAILED))
        assert (rollout.state, rollout.num_failures) == (RolloutState.CANCELLED, 0)
        (cancelled,) = await journalled(rig, e.RolloutCancelled)
        assert isinstance(cancelled, e.RolloutCancelled) and cancelled.reason == "grader_failed"

    play(scene)


def test_a_score_of_zero_is_final() -> None:
    async def scene(rig: RunRig) -> None:
        lease, rollout = await first(rig)
        await rig.coordinator.artifact_ready(rig.seal(lease))
        await rig.score_all(lambda job: 0.0)
        assert (rollout.state, rollout.attempt_number) == (RolloutState.ACCEPTED, 1)
        assert await refusal_of(rig.coordinator.attempt_failed(failure(lease, Outcome.INFRA_FAILED))) == "double"
        assert not await journalled(rig, e.RolloutRetried)

    play(scene)


def test_truncated_attempts_end_with_the_budget_although_they_do_not_wait() -> None:
    async def scene(rig: RunRig) -> None:
        for number in range(1, rig.settings.max_attempts + 1):
            lease, rollout = await first(rig)
            assert lease.attempt_number == number
            await rig.coordinator.attempt_failed(failure(lease, Outcome.TRUNCATED))
        assert rollout.state is RolloutState.CANCELLED
        (cancelled,) = await journalled(rig, e.RolloutCancelled)
        assert isinstance(cancelled, e.RolloutCancelled) and cancelled.reason == e.BudgetReason.ATTEMPTS

    play(scene)


def test_jitter_comes_from_the_injected_source_and_is_journalled_so_that_a_replay_asks_nobody() -> None:
    async def waits_of(seed: int) -> list[float]:
        rig = await RunRig(make_settings(max_attempts=5), jitter=random.Random(seed)).start()
        for _ in range(4):
            for lease in await rig.coordinator.lease(WORKER, 1, 0.0):
                await rig.lose(lease)
            rig.clock.advance(20.0)
        live = rig.coordinator.state
        assert (await rig.coordinator.books(rig.stores.recorded)).are_closed
        await rig.coordinator.crash()
        await rig.open()
        for rollout_id, rollout in rig.coordinator.state.rollouts.items():
            assert rollout.not_before_s == live.rollouts[rollout_id].not_before_s
        retries = await journalled(rig, e.RolloutRetried)
        await rig.coordinator.close()
        return [event.not_before_s - event.at_s for event in retries if isinstance(event, e.RolloutRetried)]

    waits = asyncio.run(waits_of(1))
    assert waits == asyncio.run(waits_of(1)) and waits != asyncio.run(waits_of(2))
    draws = random.Random(1)
    assert waits == pytest.approx([0.25 * 2**n * (1 - 0.5 * draws.random()) for n in range(4)], abs=1e-6)


@given(
    num_failures=st.integers(1, 10_000),
    first_s=st.floats(1e-3, 10.0),
    max_s=st.floats(1e-3, 1e3),
    jitter_frac=st.floats(0.0, 1.0),
    draw=st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_back_off_doubles_up_to_its_limit_and_chance_only_shortens_it(
    num_failures: int, first_s: float, max_s: float, jitter_frac: float, draw: float
) -> None:
    wait_s = backoff_s(num_failures, first_s=first_s, max_s=max_s, jitter_frac=jitter_frac, draw=draw)
    full_s = backoff_s(num_failures, first_s=first_s, max_s=max_s, jitter_frac=0.0, draw=draw)
    assert full_s == min(max_s, first_s * 2.0 ** min(num_failures - 1, 60))
    assert (1 - jitter_frac) * full_s <= wait_s * (1 + 1e-9) and wait_s <= full_s
