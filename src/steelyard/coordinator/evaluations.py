"""Evaluations: the same leases as training, one fixed version, never trained."""

from steelyard.coordinator import effects as fx
from steelyard.coordinator import events as e
from steelyard.coordinator.core import Core
from steelyard.coordinator.doctor import describe_rollout
from steelyard.coordinator.entities import Evaluation, MemberResult
from steelyard.coordinator.records import EvaluationResult
from steelyard.coordinator.scores import Scoring
from steelyard.coordinator.transitions import TERMINAL
from steelyard.errors import DeadlineExceeded, InputError
from steelyard.types import Purpose, Sampling

_MAX_CULPRITS = 20


class Evaluations:
    """Groups under a label. Admitting a label again after a crash admits only what is missing."""

    def __init__(self, core: Core, scoring: Scoring) -> None:
        self._core = core
        self._scoring = scoring
        core.subscribe(fx.GroupChanged, lambda _: core.progress.notify())

    def admit(
        self,
        task_ids: tuple[str, ...],
        *,
        version: int,
        sampling: Sampling,
        label: str,
        samples_per_task: int,
        max_turns: int,
        priority: int = 0,
    ) -> tuple[str, ...]:
        """One group of ``samples_per_task`` rollouts for each task; the ids of all groups, in task order.

        Raises:
            InputError: the label is in use for another version, a task comes twice, or the priority is out of range.
            IllegalTransition: the version is not READY.
        """
        core = self._core
        if abs(priority) > e.MAX_PRIORITY:
            raise InputError(f"priority must be from -{e.MAX_PRIORITY} to {e.MAX_PRIORITY}, got {priority}")
        if len(set(task_ids)) != len(task_ids) or not task_ids:
            raise InputError(f"evaluation {label}: task_ids must be distinct, at least one")
        evaluation = core.state.evaluations.get(label)
        if evaluation is not None and evaluation.version != version:
            raise InputError(f"evaluation {label} is of version {evaluation.version}, not {version}")
        group_of = {task: group for group, task in evaluation.task_of.items()} if evaluation else {}
        for task_id in task_ids:
            if task_id in group_of:
                continue
            group_of[task_id] = core.ids.new("grp")
            core.record(
                e.GroupAdmitted(
                    at_s=core.now_s(),
                    group_id=group_of[task_id],
                    task_id=task_id,
                    task_index=None,
                    stream_position=None,
                    purpose=Purpose.EVALUATION,
                    label=label,
                    rollout_ids=tuple(core.ids.new("rol") for _ in range(samples_per_task)),
                    admitted_version=version,
                    bound_version=version,
                    sampling=sampling,
                    max_turns=max_turns,
                    priority=priority,
                )
            )
        return tuple(group_of[task_id] for task_id in task_ids)

    async def results(self, label: str, deadline_s: float) -> tuple[EvaluationResult, ...]:
        """All results of a label once its last group is closed, in the order of admission.

        Raises:
            InputError: nothing was admitted under the label.
            DeadlineExceeded: names the missing rollouts, and who holds them since when.
        """
        core = self._core
        started_s = core.now_s()
        while True:
            core.check()
            evaluation = self._find(label)
            if not evaluation.open_groups:
                await core.committed()
                return self._collect(label, evaluation)
            waited_s = core.now_s() - started_s
            if waited_s >= deadline_s:
                raise DeadlineExceeded(f"evaluation {label}", self._culprits(evaluation), waited_s)
            await core.wait(core.progress, started_s + deadline_s)

    def progress(self, label: str) -> tuple[int, int]:
        """Closed groups and all groups of a label."""
        evaluation = self._find(label)
        return len(evaluation.results), len(evaluation.task_of)

    def _find(self, label: str) -> Evaluation:
        evaluation = self._core.state.evaluations.get(label)
        if evaluation is None:
            known = ", ".join(self._core.state.evaluations) or "none"
            raise InputError(f"label must be that of an admitted evaluation ({known}), got {label}")
        return evaluation

    def _culprits(self, evaluation: Evaluation) -> tuple[str, ...]:
        groups = [g for g in self._core.state.live_groups.values() if g.group_id in evaluation.open_groups]
        rollouts = [r for group in groups for r in group.rollouts if r.state not in TERMINAL]
        jobs = self._scoring.held_jobs()
        lines = [describe_rollout(r, self._core.settings, self._core.now_s(), jobs) for r in rollouts[:_MAX_CULPRITS]]
        if len(rollouts) > _MAX_CULPRITS:
            lines.append(f"{len(rollouts) - _MAX_CULPRITS} more rollouts")
        return tuple(lines)

    def _collect(self, label: str, evaluation: Evaluation) -> tuple[EvaluationResult, ...]:
        return tuple(
            _result(label, evaluation, group_id, member)
            for group_id in evaluation.task_of
            for member in evaluation.results.get(group_id, ())
        )


def _result(label: str, evaluation: Evaluation, group_id: str, member: MemberResult) -> EvaluationResult:
    return EvaluationResult(
        label=label,
        version=evaluation.version,
        group_id=group_id,
        task_id=evaluation.task_of[group_id],
        member_index=member.member_index,
        attempt_id=member.attempt_id,
        outcome=member.outcome,
        score=member.score,
        trace=member.report.trace if member.report else None,
        artifact_digest=member.report.artifact_digest if member.report else None,
    )
