"""Who waits for whom, since when, until which deadline; and what deserves an alarm. From the state and a time alone."""

from collections.abc import Mapping
from typing import Protocol

from steelyard.coordinator import admission
from steelyard.coordinator.entities import Rollout, State
from steelyard.coordinator.records import CoordinatorSettings, Wait
from steelyard.coordinator.transitions import HELD, TERMINAL, RolloutState, VersionState
from steelyard.types import Record, ScoreJob

_MIN_SUPPORT = 20
"""Fewer ends than this are no basis for a rate."""


class HeldJobLike(Protocol):
    """A scoring job with its holder."""

    @property
    def job(self) -> ScoreJob: ...

    @property
    def worker_id(self) -> str: ...

    @property
    def since_s(self) -> float: ...


class Diagnosis(Record, frozen=True, kw_only=True):
    """All waits, the longest first, and the alarms."""

    at_s: float
    waits: tuple[Wait, ...]
    alarms: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        """For people: alarms, then waits."""
        return (
            *(f"ALARM {alarm}" for alarm in self.alarms),
            *(wait.describe(self.at_s) for wait in self.waits),
        )


def diagnose(
    state: State,
    settings: CoordinatorSettings,
    now_s: float,
    jobs: Mapping[str, HeldJobLike] | None = None,
    expires_at_s: Mapping[str, float] | None = None,
) -> Diagnosis:
    """Look at a run, live or replayed from its journal.

    Args:
        state: replayed or live.
        settings: of the run.
        now_s: the present.
        jobs: scoring jobs that are held, by attempt; not known from the journal alone.
        expires_at_s: when held attempts expire, renewals included; the journal alone knows only of their first period.
    """
    waits = [
        rollout_wait(rollout, settings, jobs or {}, expires_at_s or {})
        for group in state.live_groups.values()
        for rollout in group.rollouts
        if _is_waited_for(rollout)
    ]
    waits += _parked_waits(state)
    waits += _version_waits(state)
    waits += _step_waits(state, settings, now_s)
    waits.sort(key=lambda wait: wait.since_s)
    return Diagnosis(at_s=now_s, waits=tuple(waits), alarms=alarms(state, settings))


def alarms(state: State, settings: CoordinatorSettings) -> tuple[str, ...]:
    """Rates of failure that mean that something is broken, each as a sentence."""
    found = []
    limit = settings.alarm_failure_frac
    tallies = state.tallies
    graded = tallies.num_scored + tallies.num_grader_failed
    if graded >= _MIN_SUPPORT and tallies.num_grader_failed > limit * graded:
        found.append(f"{tallies.num_grader_failed} of {graded} gradings failed (scoring.alarm_failure_frac {limit})")
    failed = tallies.num_failed + tallies.num_expired
    if tallies.num_leased >= _MIN_SUPPORT and failed > limit * tallies.num_leased:
        found.append(
            f"{failed} of {tallies.num_leased} attempts were not carried through, {tallies.num_expired} of them "
            f"expired (scoring.alarm_failure_frac {limit})"
        )
    return tuple(found)


def describe_rollout(
    rollout: Rollout, settings: CoordinatorSettings, now_s: float, jobs: Mapping[str, HeldJobLike]
) -> str:
    """One line on what an unfinished rollout waits for."""
    wait = rollout_wait(rollout, settings, jobs, {})
    group = rollout.group
    return (
        f"rollout {rollout.rollout_id} of group {group.group_id} (task {group.task_id}) is {rollout.state}: "
        f"{wait.describe(now_s)}"
    )


def rollout_wait(
    rollout: Rollout,
    settings: CoordinatorSettings,
    jobs: Mapping[str, HeldJobLike],
    expires_at_s: Mapping[str, float],
) -> Wait:
    """What an unfinished rollout waits for, with its budgets; the deadline is the first of those that it has."""
    attempt_id = rollout.attempt_id or ""
    job = jobs.get(attempt_id)
    since_s, until_s = rollout.since_s, None
    if rollout.state in HELD:
        whom = f"worker {rollout.worker_id}"
        why = f"attempt {attempt_id}, number {rollout.attempt_number}, {rollout.state.lower()}"
        since_s, until_s = rollout.issued_at_s, expires_at_s.get(attempt_id, rollout.expires_at_s)
    elif rollout.state is RolloutState.ARTIFACT_READY:
        whom = "a free scorer" if job is None else f"scorer {job.worker_id}"
        limit = settings.max_grader_attempts
        why = f"score of attempt {attempt_id}, {rollout.num_grader_failures} of at most {limit} gradings failed"
        if job is not None:
            since_s, until_s = job.since_s, job.job.expires_at_s
    else:
        whom = "a free harness worker"
        why = f"{rollout.attempt_number} attempts so far"
        until_s = rollout.not_before_s if rollout.not_before_s > rollout.since_s else None
    if settings.budget_s is not None:
        ends_at_s = rollout.group.admitted_at_s + settings.budget_s
        until_s = ends_at_s if until_s is None else min(until_s, ends_at_s)
    why = ", ".join((why, *_standing(rollout, settings)))
    return Wait(who=f"rollout {rollout.rollout_id}", whom=whom, why=why, since_s=since_s, until_s=until_s)


def _standing(rollout: Rollout, settings: CoordinatorSettings) -> list[str]:
    """How much of its budgets a rollout has used up, and its priority where it has one."""
    notes = [f"{rollout.num_failures} of at most {settings.max_attempts} failed"]
    if settings.budget_tokens is not None:
        notes.append(f"{rollout.num_tokens} of {settings.budget_tokens} tokens used")
    if settings.budget_s is not None:
        notes.append(f"admitted with {settings.budget_s:g} s to its end")
    if rollout.group.priority:
        notes.append(f"priority {rollout.group.priority}")
    return notes


def _is_waited_for(rollout: Rollout) -> bool:
    return rollout.state not in TERMINAL


def _parked_waits(state: State) -> list[Wait]:
    newest = state.newest_ready
    why = "no version is READY" if newest is None else f"room in the lag bound, newest READY is {newest.version}"
    return [
        Wait(who=f"group {group.group_id}", whom="admission", why=why, since_s=group.admitted_at_s)
        for group in state.standing.parked()
    ]


def _version_waits(state: State) -> list[Wait]:
    waits = []
    for number in sorted(state.unreleased):
        version = state.versions[number]
        if version.state in (VersionState.PUBLISHED, VersionState.LOADED):
            why = "load with proof" if version.state is VersionState.PUBLISHED else "READY"
            waits.append(Wait(who=f"version {number}", whom="the replicas", why=why, since_s=version.since_s))
    return waits


def _step_waits(state: State, settings: CoordinatorSettings, now_s: float) -> list[Wait]:
    """What stands between the last step and the next one."""
    if state.run is None or state.run.is_finished:
        return []
    step = state.next_step
    last = state.steps.get(step - 1)
    if last is not None and step not in state.lineage:
        return [Wait(who=f"step {step}", whom="the trainer", why=f"version of step {step}", since_s=last.begun_at_s)]
    if step not in state.lineage:
        return []
    since_s = state.versions[state.lineage[step]].published_at_s
    choice = admission.choose_batch(state, settings, step, now_s, since_s)
    if choice.num_awaited:
        ids = ", ".join(group.group_id for group in choice.waits_for[:3]) + (
            ", ..." if len(choice.waits_for) > 3 else ""
        )
        why = f"{choice.num_awaited} of the groups that fall due: {ids}"
        return [Wait(who=f"step {step}", whom="its groups", why=why, since_s=since_s, until_s=choice.look_again_s)]
    if not choice.num_missing:
        return [Wait(who=f"step {step}", whom="the trainer", why="to begin", since_s=since_s)]
    room = admission.capacity(state, settings)
    why = f"{choice.num_missing} more complete groups, {room} may still be admitted"
    return [Wait(who=f"step {step}", whom="the harness workers", why=why, since_s=since_s)]
