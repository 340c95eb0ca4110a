"""Groups as a whole: admitted, closed, replaced, dropped."""

import logging
from typing import Protocol

from steelyard.coordinator import admission
from steelyard.coordinator import events as e
from steelyard.coordinator.core import Core
from steelyard.coordinator.entities import Group, Rollout
from steelyard.coordinator.transitions import HELD, TERMINAL
from steelyard.errors import RunError
from steelyard.types import Purpose, TaskRef

logger = logging.getLogger(__name__)


class TaskStream(Protocol):
    """Prompts in a fixed order that depends on nothing but the position."""

    def at(self, position: int) -> TaskRef | None:
        """The task at ``position``, from 0 on; None where the stream has ended."""
        ...


class Groups:
    """Actions on whole groups. The frontier of the task stream is the number of groups ever admitted from it."""

    def __init__(self, core: Core, stream: TaskStream | None) -> None:
        self._core = core
        self._stream = stream
        self.is_exhausted = stream is None
        self.is_draining = False

    def admit(self) -> int:
        """Admit as many training groups as the lag bound has room for, parked ones first; how many."""
        state = self._core.state
        newest = state.newest_ready
        if self.is_draining or newest is None or self._core.is_finished:
            return 0
        room = admission.capacity(state, self._core.settings)
        waiting = state.standing.parked()[:room]
        for group in waiting:
            self._restart(group, group.parked_for or e.RestartReason.STALE, group.num_rollouts_parked, newest.version)
        num_admitted = len(waiting)
        while num_admitted < room and self._admit_next(newest.version):
            num_admitted += 1
        return num_admitted

    def settle(self, group: Group) -> None:
        """Close the group if all its rollouts are terminal."""
        event = admission.close_group(self._core.settings, group, self._core.now_s())
        if event is None:
            return
        self._core.record(event)
        if isinstance(event, e.GroupDropped):
            self._after_drop(event)

    def replace(self, group: Group, reason: e.RestartReason) -> None:
        """Start the prompt again with new rollouts, or drop it as too stale where that was done too often."""
        newest = self._core.state.newest_ready
        if reason is e.RestartReason.STALE and admission.too_stale(self._core.settings, group):
            self.drop(group, e.DropReason.TOO_STALE)
        elif newest is None:
            self.park(group, reason)
        else:
            self.cancel_open(group, reason.value)
            self._restart(group, reason, len(group.rollouts), newest.version)

    def park(self, group: Group, reason: e.RestartReason) -> None:
        """Give the group's rollouts up; ``admit`` starts it again when there is room."""
        self.cancel_open(group, reason.value)
        self._core.record(e.GroupParked(at_s=self._core.now_s(), group_id=group.group_id, reason=reason))

    def drop(self, group: Group, reason: e.DropReason, detail: str = "") -> None:
        """Give a group up; what its members sampled is booked under ``reason``, and ``detail`` is journalled."""
        self.cancel_open(group, reason.value)
        event = e.GroupDropped(at_s=self._core.now_s(), group_id=group.group_id, reason=reason, detail=detail)
        self._core.record(event)
        self._after_drop(event)

    def drop_all(self, reason: e.DropReason) -> None:
        """Give up every live group and admit no more."""
        self.is_draining = True
        for group in list(self._core.state.live_groups.values()):
            self.drop(group, reason)

    def _after_drop(self, event: e.GroupDropped) -> None:
        core = self._core
        core.counters.add(f"dropped.{event.reason.value}")
        logger.info("group %s is dropped: %s %s", event.group_id, event.reason, event.detail)
        if admission.exceeds_drop_frac(core.state, core.settings):
            dropped = {str(reason): count for reason, count in core.state.prompts.dropped.items()}
            limit = core.settings.max_drop_frac
            core.fail(
                RunError(
                    f"admission.max_drop_frac: at most {limit} of all groups may be dropped, "
                    f"got {dropped} of {core.state.prompts.issued}"
                )
            )
        self.admit()

    def cancel_open(self, group: Group, reason: str) -> None:
        """Cancel every member that has not ended. The group is not closed: settle, drop, park or restart it."""
        for rollout in group.rollouts:
            if rollout.state not in TERMINAL:
                self.cancel(rollout, reason)

    def cancel(self, rollout: Rollout, reason: str) -> None:
        """End a rollout without a score; an attempt that is held is told at its next heartbeat."""
        core = self._core
        is_held = rollout.state in HELD and rollout.attempt_id is not None
        lost_tokens = core.discard(rollout.attempt_id or "") if is_held else 0
        core.record(
            e.RolloutCancelled(at_s=core.now_s(), rollout_id=rollout.rollout_id, reason=reason, lost_tokens=lost_tokens)
        )
        core.counters.add(f"cancelled.{reason}")

    def _admit_next(self, version: int) -> bool:
        """Admit the task at the frontier, if there is one."""
        core = self._core
        position = core.state.next_position
        task = self._stream.at(position) if self._stream is not None else None
        if task is None:
            self.is_exhausted = True
            return False
        event = e.GroupAdmitted(
            at_s=core.now_s(),
            group_id=core.ids.new("grp"),
            task_id=task.task_id,
            task_index=task.task_index,
            stream_position=position,
            purpose=Purpose.TRAIN,
            label=None,
            rollout_ids=self._new_rollouts(core.settings.rules.group_size),
            admitted_version=version,
            bound_version=None,
            sampling=core.settings.sampling,
            max_turns=core.settings.max_turns,
            priority=task.priority,
        )
        core.record(event)
        return True

    def _restart(self, group: Group, reason: e.RestartReason, num_rollouts: int, version: int) -> None:
        event = e.GroupRestarted(
            at_s=self._core.now_s(),
            group_id=group.group_id,
            reason=reason,
            rollout_ids=self._new_rollouts(num_rollouts),
            admitted_version=version,
        )
        self._core.record(event)

    def _new_rollouts(self, count: int) -> tuple[str, ...]:
        return tuple(self._core.ids.new("rol") for _ in range(count))
