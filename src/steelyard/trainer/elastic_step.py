"""One step's units among those who compute them: the core, and whoever helps.

Lives on the event loop; only :meth:`ElasticStep.advance` and :meth:`ElasticStep.finish` may be called from the thread
of the core's arithmetic.
"""

import asyncio

from steelyard.clock import Clock
from steelyard.trainer.loss import LossSums
from steelyard.trainer.records import ElasticSettings
from steelyard.trainer.unit_leases import (
    Delivered,
    Event,
    Expired,
    Gone,
    Leased,
    LeaseTable,
    apply,
    choose_unit,
    new_table,
    straggler_patience_s,
)
from steelyard.trainer.unit_sums import Gradients, UnitSums
from steelyard.trainer.units import LeaseUnit, StepUnits

CORE = "core"
"""The name under which the trainer itself leases."""


class ElasticStep:
    """Leases the units of a step and collects their sums. Completes when every unit is delivered."""

    def __init__(self, step: StepUnits, settings: ElasticSettings, clock: Clock) -> None:
        self._units = step.units
        self._settings = settings
        self._clock = clock
        self._table = new_table(len(step.units))
        self._sums = UnitSums(len(step.units))
        self._changed = asyncio.Event()

    @property
    def table(self) -> LeaseTable:
        """The leases as they stand."""
        return self._table

    @property
    def num_elsewhere(self) -> int:
        """Units whose sum was not computed by the core."""
        return sum(unit.delivered_by not in (None, CORE) for unit in self._table.units)

    async def next_for(self, worker: str) -> LeaseUnit | None:
        """Wait for a unit for ``worker``, which has it until its deadline; None when all are delivered."""
        while not self._table.is_complete:
            unit = self.lease(worker)
            if unit is not None:
                return unit
            await self.wait()
        return None

    def lease(self, worker: str) -> LeaseUnit | None:
        """A unit for ``worker``; None if there is nothing for it now."""
        now_s = self._clock.now_s()
        self._apply(Expired(at_s=now_s))
        stop = self._sums.num_added + self._settings.max_ahead_units
        index = choose_unit(self._table, worker, now_s, stop=stop, straggler_factor=self._settings.straggler_factor)
        if index is None:
            return None
        expires_at_s = now_s + self._settings.unit_deadline_s
        self._apply(Leased(unit=index, worker=worker, at_s=now_s, expires_at_s=expires_at_s))
        return self._units[index]

    async def wait(self) -> None:
        """Until something changes, or a lease has become old enough for another worker."""
        now_s = self._clock.now_s()
        moments_s = [lease.expires_at_s for unit in self._table.units for lease in unit.leases]
        patience_s = straggler_patience_s(self._table, self._settings.straggler_factor)
        if patience_s is not None:
            begun_s = (unit.leases[0].leased_at_s for unit in self._table.units if len(unit.leases) == 1)
            moments_s += [at_s + patience_s for at_s in begun_s]
        ahead_s = [at_s - now_s for at_s in moments_s if at_s > now_s]
        try:
            async with asyncio.timeout(min(ahead_s, default=self._settings.unit_deadline_s)):
                await self._changed.wait()
        except TimeoutError:
            return

    def deliver(self, index: int, worker: str, gradients: Gradients, loss: LossSums) -> None:
        """Take the whole sum of a unit; the first counts, later ones are counted and dropped."""
        if self._apply(Delivered(unit=index, worker=worker, at_s=self._clock.now_s())):
            self._sums.deliver(index, gradients, loss)

    def gone(self, worker: str) -> None:
        """A worker left or died: what it had is free."""
        self._apply(Gone(worker=worker))

    def advance(self) -> None:
        """Add sums that are next in order; :meth:`advanced` then tells those who wait."""
        self._sums.advance()

    def advanced(self) -> None:
        """There is room for more sums, maybe."""
        self._notify()

    def finish(self) -> tuple[Gradients, LossSums]:
        """The total; see :meth:`steelyard.trainer.unit_sums.UnitSums.finish`."""
        return self._sums.finish()

    def _apply(self, event: Event) -> tuple[int, ...]:
        before = self._table
        self._table, to_add = apply(before, event)
        if self._table != before:
            self._notify()
        return to_add

    def _notify(self) -> None:
        # Whoever waits now looks again; whoever waits later waits for the next change.
        self._changed.set()
        self._changed = asyncio.Event()
