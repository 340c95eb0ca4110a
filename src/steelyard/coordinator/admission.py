"""What to admit, accept, retry, train and give up: pure decisions over the state. No I/O, no clock.

Pacing. With lag bound L, batches of B groups, and r the step of the newest READY version, at most ``(r + L + 1) * B``
groups have ever been admitted and not dropped. A group admitted at step v is due at step v + L. Waiting for the due
groups alone does not keep the bound where L >= 2: younger groups that end sooner may fill the batches, and then more
than B groups fall due at one step. So the batch of step s must leave, for every d, at most ``(d - s) * B`` groups that
are due by step d: all of those fit into the steps s + 1 to d. Taking complete groups in order of their due step is
best for all d at once (earliest deadline first), and where it does not suffice the step waits. By induction over steps
every group can then be consumed by its due step, so no trajectory has to be thrown away for its age.
"""

from collections import Counter
from dataclasses import dataclass

from steelyard.coordinator import events as e
from steelyard.coordinator.entities import Group, Rollout, State
from steelyard.coordinator.records import CoordinatorSettings
from steelyard.coordinator.retry_rules import RetryRule, backoff_s
from steelyard.coordinator.transitions import GroupState, VersionState
from steelyard.types import Purpose

_GRADER_FAILED = "grader_failed"

_BUDGETS = frozenset([*(reason.value for reason in e.BudgetReason), _GRADER_FAILED])
"""Reasons for which a rollout is cancelled because a budget is used up, that of grading among them."""


def capacity(state: State, settings: CoordinatorSettings) -> int:
    """How many more training groups may be admitted now."""
    newest = state.newest_ready
    if newest is None:
        return 0
    steps_ahead = newest.step + settings.rules.max_policy_lag + 1
    if settings.max_steps is not None:
        steps_ahead = min(steps_ahead, settings.max_steps)
    holding = state.prompts.not_dropped - state.standing.num_parked
    return max(0, steps_ahead * settings.rules.groups_per_batch - holding)


def lag_of(state: State, step: int, oldest_version: int) -> int:
    """``step`` minus the step of the oldest version that sampled a token, in optimizer steps."""
    return step - state.versions[oldest_version].step


def group_lag(state: State, step: int, group: Group) -> int:
    """The largest lag of an accepted member of ``group`` if step ``step`` consumes it."""
    lags = [lag_of(state, step, r.report.trace.oldest_version) for r in group.accepted() if r.report is not None]
    return max(lags, default=0)


# --- ends of attempts -----------------------------------------------------------------------------


def after_score(state: State, settings: CoordinatorSettings, rollout: Rollout, at_s: float) -> e.AnyEvent:
    """ACCEPTED, or REJECTED where the next step to begin would already be beyond the lag bound."""
    assert rollout.report is not None and rollout.attempt_id is not None
    if rollout.group.purpose is Purpose.TRAIN:
        lag = lag_of(state, state.next_step, rollout.report.trace.oldest_version)
        if lag > settings.rules.max_policy_lag:
            return e.Rejected(at_s=at_s, attempt_id=rollout.attempt_id, reason=e.RejectReason.STALE)
    return e.Accepted(at_s=at_s, attempt_id=rollout.attempt_id)


def used_up(settings: CoordinatorSettings, rollout: Rollout, at_s: float) -> e.BudgetReason | None:
    """The first budget of a rollout that leaves nothing for another attempt; None where all do.

    The tokens of an attempt that goes on are not cut at the budget: that would drop long answers for their length.
    """
    if rollout.num_failures >= settings.max_attempts:
        return e.BudgetReason.ATTEMPTS
    if settings.budget_tokens is not None and rollout.num_tokens >= settings.budget_tokens:
        return e.BudgetReason.TOKENS
    if settings.budget_s is not None and at_s >= rollout.group.admitted_at_s + settings.budget_s:
        return e.BudgetReason.TIME
    return None


def after_failure(
    settings: CoordinatorSettings, rollout: Rollout, at_s: float, rule: RetryRule, *, may_retry: bool, draw: float
) -> e.RolloutRetried | e.RolloutCancelled:
    """RETRIED as ``rule`` says while there is budget left, else CANCELLED. Read after the failure was applied.

    Args:
        may_retry: whether the attempt left the world outside as it was, or the environment allows to go on.
        draw: uniform in [0, 1), for the jitter.
    """
    if not may_retry:
        return e.RolloutCancelled(at_s=at_s, rollout_id=rollout.rollout_id, reason="external_call")
    reason = used_up(settings, rollout, at_s)
    if reason is not None:
        return e.RolloutCancelled(at_s=at_s, rollout_id=rollout.rollout_id, reason=reason.value)
    wait_s = 0.0
    if rule.has_backoff:
        wait_s = backoff_s(
            max(1, rollout.num_failures),
            first_s=settings.retry_backoff_s,
            max_s=settings.max_backoff_s,
            jitter_frac=settings.backoff_jitter_frac,
            draw=draw,
        )
    return e.RolloutRetried(at_s=at_s, rollout_id=rollout.rollout_id, not_before_s=at_s + wait_s)


def after_grader_failure(settings: CoordinatorSettings, rollout: Rollout, at_s: float) -> e.AnyEvent | None:
    """CANCELLED once the grading budget is used up; None: score the same artifact again."""
    if rollout.num_grader_failures < settings.max_grader_attempts:
        return None
    return e.RolloutCancelled(at_s=at_s, rollout_id=rollout.rollout_id, reason=_GRADER_FAILED)


def close_group(settings: CoordinatorSettings, group: Group, at_s: float) -> e.AnyEvent | None:
    """How a group whose rollouts are all terminal closes; None while one is not."""
    if group.num_open or group.state is not GroupState.OPEN:
        return None
    if group.purpose is Purpose.EVALUATION:
        return e.GroupEvaluated(at_s=at_s, group_id=group.group_id)
    if group.num_accepted >= settings.rules.min_scored:
        return e.GroupCompleted(at_s=at_s, group_id=group.group_id)
    without_budget = all(rollout.cancelled_for in _BUDGETS for rollout in group.rollouts)
    reason = e.DropReason.BUDGET if without_budget else e.DropReason.INCOMPLETE
    return e.GroupDropped(at_s=at_s, group_id=group.group_id, reason=reason)


def exceeds_drop_frac(state: State, settings: CoordinatorSettings) -> bool:
    """Whether drops by failure are above ``max_drop_frac`` of the groups issued; needs a batch's worth of support."""
    chosen = (e.DropReason.END_OF_RUN, e.DropReason.CANCELLED, e.DropReason.FILTERED)
    failed = sum(count for reason, count in state.prompts.dropped.items() if reason not in chosen)
    enough = state.prompts.issued >= settings.rules.groups_per_batch
    return enough and failed > settings.max_drop_frac * state.prompts.issued


# --- batches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """What step ``step`` can do now.

    ``groups``: a whole batch, or empty. ``stale``: groups to replace first (beyond the lag bound, too old, or
    waited for too long). ``waits_for``: open groups of which ``num_awaited`` must complete, or more groups would fall
    due than can be consumed. ``num_missing``: complete groups short of a batch. ``look_again_s``: when, without any
    event, the answer may change.
    """

    groups: tuple[Group, ...]
    stale: tuple[Group, ...]
    waits_for: tuple[Group, ...]
    num_awaited: int
    num_missing: int
    look_again_s: float | None


def choose_batch(
    state: State, settings: CoordinatorSettings, step: int, now_s: float, waiting_since_s: float
) -> Choice:
    """Exactly a batch of COMPLETE groups, those due earliest first; or what keeps it from that.

    Args:
        step: the optimizer step that is about to begin.
        now_s: the present.
        waiting_since_s: when this step began to wait.
    """
    stale = _stale(state, settings, step, now_s)
    num_awaited, num_fitting, waits_for = _awaited(state, settings, step, stale)
    tail_s = settings.max_tail_wait_s
    # Who is waited for has been waited for since this step began to wait, or since it was admitted later.
    if now_s >= waiting_since_s + tail_s:
        late = [group for group in waits_for if now_s >= max(waiting_since_s, group.admitted_at_s) + tail_s]
        stale += late[:num_awaited]
    first_at_s = min((group.admitted_at_s for group in waits_for), default=None)
    num_missing = max(0, settings.rules.groups_per_batch - num_fitting)
    is_whole = not stale and not num_awaited and not num_missing
    return Choice(
        groups=_first_complete(state, settings) if is_whole else (),
        stale=tuple(stale),
        waits_for=tuple(waits_for),
        num_awaited=num_awaited,
        num_missing=num_missing,
        look_again_s=None if first_at_s is None else max(waiting_since_s, first_at_s) + tail_s,
    )


def _stale(state: State, settings: CoordinatorSettings, step: int, now_s: float) -> list[Group]:
    """The complete groups that step ``step`` may not consume."""
    found = list[Group]()
    for _, cohort in state.standing.cohorts():
        if settings.max_age_s is not None or step - cohort.oldest_step > settings.rules.max_policy_lag:
            complete = cohort.complete_in_order()
            found += [group for group in complete if is_stale(state, settings, step, now_s, group)]
    return found


def _first_complete(state: State, settings: CoordinatorSettings) -> tuple[Group, ...]:
    size, found = settings.rules.groups_per_batch, list[Group]()
    for _, cohort in state.standing.cohorts():
        if len(found) < size:
            found += cohort.complete_in_order()
    return tuple(found[:size])


def _awaited(
    state: State, settings: CoordinatorSettings, step: int, stale: list[Group]
) -> tuple[int, int, list[Group]]:
    """How many more groups of which open ones the batch needs, for the first due step that would be overbooked.

    Between the two, how many complete groups the batch may have.
    """
    size, bound = settings.rules.groups_per_batch, settings.rules.max_policy_lag
    num_stale = Counter(group.admitted_step for group in stale)
    cohorts = [(admitted + bound, cohort, num_stale[admitted]) for admitted, cohort in state.standing.cohorts()]
    num_fitting = sum(len(cohort.complete) - num_out for _, cohort, num_out in cohorts)
    for due_step in range(step, step + bound + 1):
        due = [one for one in cohorts if one[0] <= due_step]
        num_complete = sum(len(cohort.complete) - num_out for _, cohort, num_out in due)
        num_due = num_complete + sum(len(cohort.open) for _, cohort, _ in due)
        missing = min(size, num_due - (due_step - step) * size) - min(size, num_complete)
        if missing > 0:
            return missing, num_fitting, [group for _, cohort, _ in due for group in cohort.open.values()]
    return 0, num_fitting, []


def is_stale(state: State, settings: CoordinatorSettings, step: int, now_s: float, group: Group) -> bool:
    """Whether a COMPLETE group may not be consumed by ``step``: the second check of lag and age."""
    if settings.max_age_s is not None and now_s - group.admitted_at_s > settings.max_age_s:
        return True
    return group_lag(state, step, group) > settings.rules.max_policy_lag


def too_stale(settings: CoordinatorSettings, group: Group) -> bool:
    """Whether a stale group has been replaced as often as it may be."""
    return group.num_stale_restarts >= settings.max_stale_retries


# --- versions -------------------------------------------------------------------------------------


def bindable(state: State, group: Group) -> int | None:
    """The version that a new attempt of ``group`` is bound to now; None where no live replica serves one that fits.

    The newest READY one that is served. Not one from before the group's admission: its tokens would be older than
    what the group is due by allows.
    """
    if group.bound_version is not None:
        bound = state.versions[group.bound_version]
        fits = bound.state is VersionState.READY and state.is_served(bound.version)
        return bound.version if fits else None
    found = [
        version
        for version in map(state.versions.__getitem__, state.unreleased)
        if version.state is VersionState.READY
        and version.step >= group.admitted_step
        and state.is_served(version.version)
    ]
    newest = max(found, key=lambda version: version.step, default=None)
    return None if newest is None else newest.version


def was_proven(state: State, version: int) -> bool:
    """Whether some replica has proven to hold ``version``, and no replay has given it up."""
    known = state.versions.get(version)
    return known is not None and bool(known.proofs) and not known.is_orphaned


def releasable(state: State, reading: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Versions that no attempt samples from or will: older than the newest READY, not evaluated, not being loaded."""
    newest = state.newest_ready
    if newest is None:
        return ()
    evaluated = evaluating(state)
    return tuple(
        sorted(
            number
            for number in state.unreleased
            if state.versions[number].step < newest.step
            and state.versions[number].num_live == 0
            and number not in evaluated
            and number not in reading
        )
    )


def evaluating(state: State) -> frozenset[int]:
    """Versions that open evaluation groups are bound to."""
    return frozenset(evaluation.version for evaluation in state.evaluations.values() if evaluation.open_groups)


def references(state: State, reading: frozenset[int] = frozenset()) -> dict[int, tuple[str, ...]]:
    """Who still needs the files of each version that is not DELETED; an empty tuple is nobody.

    ``reading``: versions whose files somebody is loading right now.
    """
    newest = state.newest_ready
    evaluated = evaluating(state)
    return {
        number: tuple(_reasons(state, number, newest.version if newest else None, evaluated, reading))
        for number, version in state.versions.items()
        if version.state != "DELETED"
    }


def _reasons(
    state: State, number: int, newest: int | None, evaluated: frozenset[int], reading: frozenset[int]
) -> list[str]:
    version = state.versions[number]
    reasons = [f"pinned by {label}" for label in sorted(version.labels)]
    if version.num_live:
        reasons.append(f"{version.num_live} live attempts")
    if number in evaluated:
        reasons.append("an evaluation")
    if number in reading:
        reasons.append("a load in progress")
    if version.is_orphaned:
        return reasons
    if newest is None or number == newest or version.step > state.versions[newest].step:
        reasons.append("the newest READY version or newer")
    elif number == state.versions[newest].parent_version:
        reasons.append("the predecessor of the newest READY version")
    if version.step in state.checkpoints or (not state.checkpoints and version.step == 0):
        reasons.append(f"the checkpoint of step {version.step}")
    return reasons
