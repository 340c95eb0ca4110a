"""Retries in the audit: each way to break a budget or a rule of retries is named, from the events alone."""

from collections.abc import Callable

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.audit import INVARIANTS
from steelyard.coordinator.audit_evidence import Findings
from steelyard.coordinator.audit_retries import check_retries
from steelyard.testing.run_rig import make_settings
from steelyard.testing.traces import sealed_trace
from steelyard.types import ArtifactReport, Outcome, Purpose, Sampling

RULES = make_settings().rules
NAMES = ("budgets_kept", "retries_ruled")


def started(**limits: float | None) -> e.RunStarted:
    budgets = e.Budgets(**{"num_attempts": 3, **limits})  # type: ignore[arg-type]
    return e.RunStarted(at_s=0.0, run_id="run_x", seed=0, config_digest="c", rules=RULES, budgets=budgets)


def admitted() -> e.GroupAdmitted:
    return e.GroupAdmitted(
        at_s=10.0,
        group_id="grp",
        task_id="t",
        task_index=0,
        stream_position=0,
        purpose=Purpose.TRAIN,
        label=None,
        rollout_ids=("rol",),
        admitted_version=0,
        bound_version=None,
        sampling=Sampling(),
        max_turns=1,
    )


def leased(number: int, at_s: float) -> e.Leased:
    return e.Leased(
        at_s=at_s,
        rollout_id="rol",
        attempt_id=f"att_{number}",
        attempt_number=number,
        worker_id="w",
        policy_version=0,
        expires_at_s=at_s + 60,
    )


def failed(
    number: int, at_s: float, *, lost: int = 0, outcome: Outcome = Outcome.INFRA_FAILED, is_counted: bool = True
) -> e.InfraFailed:
    return e.InfraFailed(
        at_s=at_s, attempt_id=f"att_{number}", outcome=outcome, reason="r", lost_tokens=lost, is_counted=is_counted
    )


def retried(at_s: float, not_before_s: float = 0.0) -> e.RolloutRetried:
    return e.RolloutRetried(at_s=at_s, rollout_id="rol", not_before_s=not_before_s)


def cancelled(at_s: float, reason: str) -> e.RolloutCancelled:
    return e.RolloutCancelled(at_s=at_s, rollout_id="rol", reason=reason)


def sealed(number: int, at_s: float, num_tokens: int) -> e.ArtifactReady:
    trace = sealed_trace(f"att_{number}", num_tokens)
    report = ArtifactReport(attempt_id=f"att_{number}", attempt_number=number, trace=trace, artifact_digest="a")
    return e.ArtifactReady(at_s=at_s, report=report)


def counter_examples(*events: e.AnyEvent) -> dict[str, str]:
    findings = Findings(INVARIANTS)
    check_retries(events, findings)
    assert set(findings.examples) <= set(NAMES)
    return findings.examples


def two_attempts(*, lost: int = 5, not_before_s: float = 13.0) -> list[e.AnyEvent]:
    return [
        admitted(),
        leased(1, 11.0),
        failed(1, 12.0, lost=lost),
        retried(12.0, not_before_s),
        leased(2, 13.0),
        sealed(2, 14.0, 20),
    ]


def test_a_failure_a_back_off_and_a_second_attempt_are_in_order() -> None:
    assert counter_examples(started(num_tokens=6, time_s=5.0), *two_attempts()) == {}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"num_attempts": 1}, "att_2 was leased for rol, but 1 of 1 attempts have failed"),
        ({"num_tokens": 5}, "att_2 was leased for rol, but 5 of 5 tokens are sampled"),
        ({"time_s": 3.0}, "att_2 was leased for rol, but 3.000 of 3.0 s have passed"),
    ],
)
def test_an_attempt_beyond_a_budget_is_named(limits: dict[str, float], message: str) -> None:
    assert counter_examples(started(**limits), *two_attempts()) == {"budgets_kept": message}


def test_budgets_are_those_of_the_last_start_and_older_journals_are_held_to_none() -> None:
    tight = started(num_attempts=1)
    wide = e.RunResumed(at_s=12.0, config_digest="c", rules=RULES, budgets=e.Budgets(num_attempts=2))
    none = e.RunResumed(at_s=12.0, config_digest="c", rules=RULES)
    for resumed in (wide, none):
        assert counter_examples(tight, *two_attempts()[:4], resumed, *two_attempts()[4:]) == {}


@pytest.mark.parametrize("reason", list(e.BudgetReason))
def test_a_rollout_cancelled_for_a_budget_that_was_left_is_named(reason: e.BudgetReason) -> None:
    limits = started(num_tokens=100, time_s=100.0)
    message = f"rollout rol was cancelled for {reason}, which was not used up"
    assert counter_examples(limits, admitted(), cancelled(11.0, reason)) == {"budgets_kept": message}


@pytest.mark.parametrize(
    ("limits", "reason"), [({"num_attempts": 1}, "attempts"), ({"num_tokens": 7}, "tokens"), ({"time_s": 2.0}, "time")]
)
def test_a_rollout_cancelled_for_a_budget_that_was_used_up_passes(limits: dict[str, float], reason: str) -> None:
    events: list[e.AnyEvent] = [
        admitted(),
        leased(1, 11.0),
        failed(1, 12.0, lost=7),
        cancelled(12.0, f"budget_{reason}"),
    ]
    assert counter_examples(started(**limits), *events) == {}


def test_tokens_of_a_lost_artifact_count_once() -> None:
    events: list[e.AnyEvent] = [admitted(), leased(1, 11.0), sealed(1, 11.5, 7), failed(1, 12.0, lost=7), retried(12.0)]
    assert counter_examples(started(num_tokens=8), *events, leased(2, 13.0)) == {}
    assert "budgets_kept" in counter_examples(started(num_tokens=7), *events, leased(2, 13.0))


def again_while_it_runs() -> list[e.AnyEvent]:
    return [admitted(), leased(1, 11.0), leased(2, 12.0)]


def retried_while_it_runs() -> list[e.AnyEvent]:
    return [admitted(), leased(1, 11.0), retried(12.0)]


def again_after_its_end() -> list[e.AnyEvent]:
    return [admitted(), cancelled(11.0, "cancelled"), leased(1, 12.0)]


def before_its_back_off() -> list[e.AnyEvent]:
    return two_attempts(not_before_s=13.5)


def interruption_that_costs() -> list[e.AnyEvent]:
    return [admitted(), leased(1, 11.0), failed(1, 12.0, outcome=Outcome.CANCELLED, is_counted=True)]


def time_out_that_costs_nothing() -> list[e.AnyEvent]:
    return [admitted(), leased(1, 11.0), failed(1, 12.0, outcome=Outcome.TIMED_OUT, is_counted=False)]


@pytest.mark.parametrize(
    "story",
    [
        again_while_it_runs,
        retried_while_it_runs,
        again_after_its_end,
        before_its_back_off,
        interruption_that_costs,
        time_out_that_costs_nothing,
    ],
)
def test_a_broken_rule_of_retries_is_named(story: Callable[[], list[e.AnyEvent]]) -> None:
    assert list(counter_examples(started(), *story())) == ["retries_ruled"]


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_fault_of_the_infrastructure_may_cost_budget_or_not(is_counted: bool) -> None:
    events: list[e.AnyEvent] = [
        admitted(),
        leased(1, 11.0),
        failed(1, 12.0, is_counted=is_counted),
        retried(12.0),
        leased(2, 13.0),
    ]
    assert counter_examples(started(), *events) == {}
