"""Batches: chosen, waited for, begun, covered by checkpoints."""

from steelyard.coordinator import admission
from steelyard.coordinator import events as e
from steelyard.coordinator.core import Core
from steelyard.coordinator.doctor import describe_rollout
from steelyard.coordinator.entities import Group
from steelyard.coordinator.groups import Groups
from steelyard.coordinator.records import BatchMember, BatchPlan
from steelyard.coordinator.scores import Scoring
from steelyard.coordinator.transitions import TERMINAL, GroupState
from steelyard.errors import DeadlineExceeded, IllegalTransition, RunError
from steelyard.types import Purpose

_MAX_CULPRITS = 20


class Batches:
    """The consumer's side of the coordinator.

    *Consumes* COMPLETE groups. *Waits for* the due ones and for the weights of its step. *Unblocked by* groups
    that complete, are dropped or replaced, and by versions. *Produces* BatchPlans. ``planned``: the groups of the batch
    that was handed out last and has not begun.
    """

    def __init__(self, core: Core, groups: Groups, scoring: Scoring) -> None:
        self._core = core
        self._groups = groups
        self._scoring = scoring
        self.planned: frozenset[str] = frozenset()
        self._waiting_step = -1
        self._waiting_since_s = 0.0

    async def next_batch(self, step: int, deadline_s: float) -> BatchPlan:
        """The batch of ``step``, whole groups within the lag bound. Nothing is consumed before ``begin_step``.

        Raises:
            DeadlineExceeded: names the missing rollouts, and who holds them since when.
            IllegalTransition: ``step`` is not the next step.
            RunError: the run failed meanwhile, or the task stream has too few tasks left.
        """
        core = self._core
        started_s = core.now_s()
        while True:
            core.check()
            if step != core.state.next_step:
                raise IllegalTransition(f"step must be {core.state.next_step}, the next to begin, got {step}")
            self.planned = frozenset()
            signal = core.progress.next_event()
            plan, look_again_s = self.look(step)
            if plan is not None:
                await core.committed()
                return plan
            now_s = core.now_s()
            if now_s >= started_s + deadline_s:
                await core.committed()
                raise DeadlineExceeded(f"the batch of step {step}", self.culprits(step), now_s - started_s)
            if not signal.is_set():
                until_s = started_s + deadline_s
                await core.wait(core.progress, until_s if look_again_s is None else min(until_s, look_again_s))

    def look(self, step: int) -> tuple[BatchPlan | None, float | None]:
        """The batch of ``step`` if it is there; else when time alone may change that (None: only an event will).

        Raises:
            RunError: the task stream has too few tasks left.
        """
        parent = self._core.state.lineage.get(step)
        if parent is None:
            return None, None
        if self._waiting_step != step:
            self._waiting_step, self._waiting_since_s = step, self._core.now_s()
        choice = self._choose(step)
        while choice.stale:
            for group in choice.stale:
                self._core.counters.add("replaced.stale")
                self._groups.replace(group, e.RestartReason.STALE)
            self._core.check()
            choice = self._choose(step)
        if choice.groups:
            self.planned = frozenset(group.group_id for group in choice.groups)
            return self._plan(step, parent, choice.groups), None
        open_groups = self._core.state.standing.num_not_complete
        if self._groups.is_exhausted and open_groups < choice.num_missing:
            raise RunError(
                f"the task stream ended after {self._core.state.next_position} tasks: step {step} needs "
                f"{choice.num_missing} more groups and {open_groups} are left"
            )
        return None, choice.look_again_s

    def begin(
        self,
        step: int,
        parent_version: int,
        group_ids: tuple[str, ...],
        sample_ids: tuple[str, ...],
        batch_digest: str,
    ) -> None:
        """Write the step ahead: its batch is durable and the optimizer step may begin. Idempotent.

        Raises:
            IllegalTransition: the step has begun with another batch, is not next, is computed at other weights,
                or its samples are not those of accepted members of complete groups.
        """
        begun = self._core.state.steps.get(step)
        if begun is not None:
            before = (begun.parent_version, begun.group_ids, begun.sample_ids, begun.batch_digest)
            if before != (parent_version, group_ids, sample_ids, batch_digest):
                raise IllegalTransition(f"STEP_BEGUN: step {step} has begun with batch {begun.batch_digest} already")
            return
        stale = [g for g in group_ids if g in self._core.state.groups and self._is_stale(step, g)]
        if stale:
            raise IllegalTransition(f"STEP_BEGUN: groups must be within the lag bound at step {step}, {stale} are not")
        self._core.record(
            e.StepBegun(
                at_s=self._core.now_s(),
                step=step,
                parent_version=parent_version,
                group_ids=group_ids,
                sample_ids=sample_ids,
                batch_digest=batch_digest,
            )
        )
        self.planned = frozenset()

    def checkpoint(self, step: int, digest: str) -> None:
        """A checkpoint of the weights after ``step`` steps is durable. Idempotent for the newest one.

        Raises:
            IllegalTransition: no surviving version has that step, or it goes back.
        """
        state = self._core.state
        if state.checkpoints[-1:] == [step] and state.checkpoint_digests.get(step) == digest:
            return
        self._core.record(e.Checkpointed(at_s=self._core.now_s(), step=step, digest=digest))
        self._core.progress.notify()

    def deletable(self) -> tuple[int, ...]:
        """Steps whose stored batch every kept checkpoint covers."""
        state = self._core.state
        return tuple(sorted(step for step in state.kept_batches if step < state.horizon_step))

    def delete(self, step: int) -> None:
        """The stored batch of ``step`` is about to be deleted. Delete it after this has returned, not before.

        Idempotent: a step below the horizon was begun, so one without a batch was deleted before.

        Raises:
            IllegalTransition: it is not covered.
        """
        state = self._core.state
        if step < state.horizon_step and step not in state.kept_batches:
            return
        self._core.record(e.BatchDeleted(at_s=self._core.now_s(), step=step))

    def culprits(self, step: int) -> tuple[str, ...]:
        """Who keeps ``step`` waiting, the due groups first, one line a rollout."""
        core = self._core
        if core.state.lineage.get(step) is None:
            return (f"the trainer: no version of step {step} is published",)
        choice = self._choose(step)
        open_groups = [g for g in self._live_train() if g.state is GroupState.OPEN]
        waited = list(choice.waits_for) + [g for g in open_groups if g not in choice.waits_for]
        rollouts = [r for group in waited for r in group.rollouts if r.state not in TERMINAL]
        jobs = self._scoring.held_jobs()
        lines = [describe_rollout(r, core.settings, core.now_s(), jobs) for r in rollouts[:_MAX_CULPRITS]]
        if len(rollouts) > _MAX_CULPRITS:
            lines.append(f"{len(rollouts) - _MAX_CULPRITS} more rollouts")
        if not lines:
            lines.append(f"admission: {choice.num_missing} groups short, {self._why_none_admitted()}")
        return tuple(lines)

    def _choose(self, step: int) -> admission.Choice:
        core = self._core
        since_s = self._waiting_since_s if self._waiting_step == step else core.now_s()
        return admission.choose_batch(core.state, core.settings, step, core.now_s(), since_s)

    def _plan(self, step: int, parent_version: int, groups: tuple[Group, ...]) -> BatchPlan:
        state = self._core.state
        return BatchPlan(
            step=step,
            parent_version=parent_version,
            group_ids=tuple(group.group_id for group in groups),
            members=tuple(member for group in groups for member in _members(group)),
            max_lag=max((admission.group_lag(state, step, group) for group in groups), default=0),
        )

    def _is_stale(self, step: int, group_id: str) -> bool:
        state = self._core.state
        bound = self._core.settings.rules.max_policy_lag
        return admission.group_lag(state, step, state.groups[group_id]) > bound

    def _live_train(self) -> list[Group]:
        return [group for group in self._core.state.live_groups.values() if group.purpose is Purpose.TRAIN]

    def _why_none_admitted(self) -> str:
        newest = self._core.state.newest_ready
        return "no version is READY" if newest is None else f"the newest READY version is {newest.version}"


def _members(group: Group) -> tuple[BatchMember, ...]:
    members = []
    for rollout in group.accepted():
        assert rollout.attempt_id is not None and rollout.score is not None and rollout.report is not None
        member = BatchMember(
            group_id=group.group_id,
            task_id=group.task_id,
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt_id,
            member_index=rollout.member_index,
            score=rollout.score,
            trace=rollout.report.trace,
        )
        members.append(member)
    return tuple(members)
