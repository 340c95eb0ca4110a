"""The wall-clock budget: a rollout that has not ended ``rollout.budget_s`` after its admission is cancelled.

It bounds the time of the system over all attempts of a rollout, waiting included. It is no limit on the policy: an
attempt that it ends was not judged and does not enter the statistics of its group.
"""

import heapq
import logging

from steelyard.coordinator import effects as fx
from steelyard.coordinator.core import Core
from steelyard.coordinator.entities import Group, Rollout
from steelyard.coordinator.events import BudgetReason
from steelyard.coordinator.groups import Groups

logger = logging.getLogger(__name__)


class TimeBudgets:
    """Deadlines of open groups. All members of a group were admitted together, so they share one.

    Nothing here is journalled but the cancellations; after a recovery the deadlines follow from the outbox.
    """

    def __init__(self, core: Core, groups: Groups) -> None:
        self._core = core
        self._groups = groups
        self._deadlines: list[tuple[float, int, str]] = []
        self._tracked: set[int] = set()
        if core.settings.budget_s is not None:
            core.subscribe(fx.WorkWaits, lambda effect: self._track(core.state.rollouts.get(effect.rollout_id)))
            core.subscribe(fx.AttemptBegan, lambda effect: self._track(core.state.attempts.get(effect.attempt_id)))
            core.subscribe(fx.ScoreWaits, lambda effect: self._track(core.state.attempts.get(effect.attempt_id)))

    def advance(self) -> None:
        """Cancel what has not ended in time."""
        now_s = self._core.now_s()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, order, group_id = heapq.heappop(self._deadlines)
            self._tracked.discard(order)
            group = self._open_group(order, group_id)
            if group is not None:
                logger.warning("group %s has used up its time with %d rollouts open", group_id, group.num_open)
                self._groups.cancel_open(group, BudgetReason.TIME.value)
                self._groups.settle(group)
            self._forget_ended()

    def next_due_s(self) -> float | None:
        """When ``advance`` has something to do at the earliest."""
        self._forget_ended()
        return self._deadlines[0][0] if self._deadlines else None

    def _track(self, rollout: Rollout | None) -> None:
        """Note the deadline of the rollout's group once for each time that the group is admitted."""
        budget_s = self._core.settings.budget_s
        if rollout is None or budget_s is None or rollout.group.order in self._tracked:
            return
        group = rollout.group
        self._tracked.add(group.order)
        heapq.heappush(self._deadlines, (group.admitted_at_s + budget_s, group.order, group.group_id))
        if self._deadlines[0][1] == group.order:
            self._core.timers.notify()

    def _forget_ended(self) -> None:
        """Groups mostly end in the order of their deadlines, so this keeps the queue as short as the live groups."""
        while self._deadlines and self._open_group(*self._deadlines[0][1:]) is None:
            _, order, _ = heapq.heappop(self._deadlines)
            self._tracked.discard(order)

    def _open_group(self, order: int, group_id: str) -> Group | None:
        """The group, if it still has open rollouts of the admission with this number."""
        group = self._core.state.live_groups.get(group_id)
        return group if group is not None and group.order == order and group.num_open else None
