"""How the live training groups stand: an index that the event handlers keep, so that nobody looks through all groups.

It holds nothing that the groups do not say, and is built anew from them where a state is restored.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from steelyard.coordinator.transitions import GroupState
from steelyard.types import Purpose

if TYPE_CHECKING:
    from steelyard.coordinator.entities import Group


@dataclass(slots=True, eq=False)
class Cohort:
    """Groups that were admitted at one step, and so fall due at one.

    ``open``: in the order of their admission. ``complete``: with the step of the oldest version that sampled a token of
    an accepted member. ``oldest_step``: at most the least of those.
    """

    open: dict[str, "Group"] = field(default_factory=dict)
    complete: dict[str, tuple["Group", float]] = field(default_factory=dict)
    oldest_step: float = math.inf

    def complete_in_order(self) -> list["Group"]:
        """The complete ones in the order of their admission."""
        return sorted((group for group, _ in self.complete.values()), key=lambda group: group.order)


@dataclass(slots=True, eq=False)
class Standing:
    """Live groups of training by state and step of admission."""

    _parked: dict[str, "Group"] = field(default_factory=dict)
    _cohorts: dict[int, Cohort] = field(default_factory=dict)

    @property
    def num_parked(self) -> int:
        """Groups that wait for room to be restarted."""
        return len(self._parked)

    @property
    def num_not_complete(self) -> int:
        """Groups that are open or parked."""
        return len(self._parked) + sum(len(cohort.open) for cohort in self._cohorts.values())

    def parked(self) -> list["Group"]:
        """Groups that wait for room to be restarted, oldest first."""
        return sorted(self._parked.values(), key=lambda group: group.order)

    def cohorts(self) -> Iterator[tuple[int, Cohort]]:
        """Open and complete groups by the step of their admission, the earliest first."""
        return iter(sorted(self._cohorts.items()))

    def put_in(self, group: "Group", oldest_step: float) -> None:
        """A group is live, or stands otherwise than it did.

        Args:
            oldest_step: that of the oldest version that sampled a token of an accepted member, where it is complete.
        """
        if group.purpose is not Purpose.TRAIN:
            return
        if group.state is GroupState.PARKED:
            self._parked[group.group_id] = group
            return
        cohort = self._cohorts.get(group.admitted_step)
        if cohort is None:
            cohort = self._cohorts[group.admitted_step] = Cohort()
        if group.state is GroupState.OPEN:
            cohort.open[group.group_id] = group
        else:
            cohort.complete[group.group_id] = group, oldest_step
            cohort.oldest_step = min(cohort.oldest_step, oldest_step)

    def take_out(self, group: "Group") -> None:
        """A group is about to stand otherwise, or to be live no more; harmless where it is not here."""
        self._parked.pop(group.group_id, None)
        cohort = self._cohorts.get(group.admitted_step)
        if cohort is None:
            return
        cohort.open.pop(group.group_id, None)
        cohort.complete.pop(group.group_id, None)
        if not cohort.open and not cohort.complete:
            del self._cohorts[group.admitted_step]
