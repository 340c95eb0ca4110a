"""Cancellation from outside: a group, or all live groups of a task. What is cancelled is never trained."""

from steelyard.coordinator.batches import Batches
from steelyard.coordinator.core import Core, short
from steelyard.coordinator.entities import Group
from steelyard.coordinator.events import DropReason
from steelyard.coordinator.groups import Groups


class Cancellation:
    """Drops groups as ``cancelled``: their attempts end, their tokens are booked, admission refills.

    A group whose batch is in the trainer's hands is as good as consumed and is left alone, so that a step never begins
    with samples of a group that was cancelled meanwhile.
    """

    def __init__(self, core: Core, groups: Groups, batches: Batches) -> None:
        self._core = core
        self._groups = groups
        self._batches = batches

    def cancel_group(self, group_id: str, reason: str) -> bool:
        """Cancel a live group; False where there is nothing to cancel: closed, consumed, in a batch, or unknown."""
        group = self._core.state.live_groups.get(group_id)
        if group is None or not self._can_be_cancelled(group):
            return False
        self._groups.drop(group, DropReason.CANCELLED, short(reason))
        return True

    def cancel_task(self, task_id: str, reason: str) -> tuple[str, ...]:
        """Cancel every live group of a task, of training and of evaluations; their ids, oldest first."""
        doomed = [g.group_id for g in self._core.state.live_groups.values() if g.task_id == task_id]
        return tuple(group_id for group_id in doomed if self.cancel_group(group_id, reason))

    def _can_be_cancelled(self, group: Group) -> bool:
        return group.group_id not in self._batches.planned
