"""Invariants of retries: budgets, back-off, and what may be tried again at all.

Plain bookkeeping over the events, apart from the state machine and from its table of rules.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from steelyard.coordinator import events as e
from steelyard.coordinator.audit_evidence import Findings
from steelyard.types import Outcome

_SYSTEM_FAULTS = frozenset({Outcome.TIMED_OUT, Outcome.TRUNCATED})
"""Failures that a worker reports of an attempt that it held; each uses up budget."""


@dataclass(slots=True)
class _Rollout:
    """What one rollout has used up. ``has_failed``: since its last lease; ``may_be_leased``: new, or retried."""

    rollout_id: str
    admitted_at_s: float
    num_failures: int = 0
    num_tokens: int = 0
    not_before_s: float = 0.0
    may_be_leased: bool = True
    has_failed: bool = False

    def used_up(self, budgets: e.Budgets, at_s: float) -> dict[e.BudgetReason, str]:
        """The budgets that are used up, each with a sentence."""
        found = {}
        if self.num_failures >= budgets.num_attempts:
            found[e.BudgetReason.ATTEMPTS] = f"{self.num_failures} of {budgets.num_attempts} attempts have failed"
        if budgets.num_tokens is not None and self.num_tokens >= budgets.num_tokens:
            found[e.BudgetReason.TOKENS] = f"{self.num_tokens} of {budgets.num_tokens} tokens are sampled"
        if budgets.time_s is not None and at_s >= self.admitted_at_s + budgets.time_s:
            found[e.BudgetReason.TIME] = f"{at_s - self.admitted_at_s:.3f} of {budgets.time_s} s have passed"
        return found


class _Retries:
    """One pass. What names an unknown rollout or attempt is passed over; ``legal_transitions`` is broken then."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._budgets: e.Budgets | None = None
        self._rollouts: dict[str, _Rollout] = {}
        self._holder: dict[str, _Rollout] = {}
        self._sealed: set[str] = set()

    def note(self, event: e.AnyEvent) -> None:
        if isinstance(event, e.RunStarted | e.RunResumed):
            self._budgets = event.budgets
        elif isinstance(event, e.GroupAdmitted | e.GroupRestarted):
            self._rollouts.update({name: _Rollout(name, event.at_s) for name in event.rollout_ids})
        elif isinstance(event, e.ArtifactReady):
            self._on_sealed(event)
        elif isinstance(event, e.InfraFailed | e.LeaseExpired):
            self._on_failure(event)
        elif isinstance(event, e.Leased | e.RolloutRetried | e.RolloutCancelled):
            rollout = self._rollouts.get(event.rollout_id)
            if rollout is None:
                return
            if isinstance(event, e.Leased):
                self._on_lease(event, rollout)
            elif isinstance(event, e.RolloutRetried):
                self._on_retry(event, rollout)
            else:
                self._on_cancelled(event, rollout)

    def _on_sealed(self, event: e.ArtifactReady) -> None:
        rollout = self._holder.get(event.report.attempt_id)
        if rollout is not None:
            rollout.num_tokens += event.report.trace.num_tokens
            self._sealed.add(event.report.attempt_id)

    def _on_failure(self, event: e.InfraFailed | e.LeaseExpired) -> None:
        rollout = self._holder.get(event.attempt_id)
        if rollout is None:
            return
        is_counted = True
        if isinstance(event, e.InfraFailed):
            is_counted = event.is_counted
            is_ruled = is_counted is (event.outcome in _SYSTEM_FAULTS) or event.outcome is Outcome.INFRA_FAILED
            message = f"{event.attempt_id} ended as {event.outcome}, is_counted {is_counted}"
            self._findings.check("retries_ruled", is_ruled, message)
        rollout.has_failed = True
        rollout.num_failures += is_counted
        rollout.num_tokens += 0 if event.attempt_id in self._sealed else event.lost_tokens

    def _on_lease(self, event: e.Leased, rollout: _Rollout) -> None:
        self._holder[event.attempt_id] = rollout
        message = f"{event.attempt_id} follows an attempt of {event.rollout_id} that had not failed and been retried"
        self._findings.check("retries_ruled", rollout.may_be_leased, message)
        message = (
            f"{event.attempt_id} was leased {rollout.not_before_s - event.at_s:.3f} s before its back-off was over"
        )
        self._findings.check("retries_ruled", event.at_s >= rollout.not_before_s, message)
        rollout.may_be_leased = rollout.has_failed = False
        if self._budgets is not None:
            used_up = rollout.used_up(self._budgets, event.at_s)
            message = f"{event.attempt_id} was leased for {event.rollout_id}, but {', '.join(used_up.values())}"
            self._findings.check("budgets_kept", not used_up, message)

    def _on_retry(self, event: e.RolloutRetried, rollout: _Rollout) -> None:
        message = f"rollout {event.rollout_id} was retried without a failure"
        self._findings.check("retries_ruled", rollout.has_failed, message)
        rollout.may_be_leased, rollout.not_before_s = True, event.not_before_s

    def _on_cancelled(self, event: e.RolloutCancelled, rollout: _Rollout) -> None:
        rollout.may_be_leased = False
        if self._budgets is not None and event.reason in set(e.BudgetReason):
            is_used_up = event.reason in rollout.used_up(self._budgets, event.at_s)
            message = f"rollout {event.rollout_id} was cancelled for {event.reason}, which was not used up"
            self._findings.check("budgets_kept", is_used_up, message)


def check_retries(events: Iterable[e.AnyEvent], findings: Findings) -> None:
    """Budgets, back-off and the grounds of every retry. Journals without budgets are not held to any."""
    retries = _Retries(findings)
    for event in events:
        retries.note(event)
