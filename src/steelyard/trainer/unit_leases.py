"""Who computes which unit of a step: a table of leases, changed by events alone.

::

    WAITING --Leased--> LEASED --Delivered--> DELIVERED (by the first; later deliveries are counted)
       ^                  |
       +--Expired, Gone---+   nobody computes it any more

A unit may be leased to several workers, where one of them is slow. A delivery that comes after its lease has expired
is as good as any: the gradient does not depend on who computed it, or when. Pure: events bring the time.
"""

from collections.abc import Callable

import msgspec

from steelyard.errors import IllegalTransition
from steelyard.types import Record


class Lease(Record, frozen=True, kw_only=True):
    """A worker computes a unit, until ``expires_at_s`` at most."""

    worker: str
    leased_at_s: float
    expires_at_s: float


class UnitState(Record, frozen=True, kw_only=True):
    """One unit: its leases, and who delivered it."""

    leases: tuple[Lease, ...] = ()
    delivered_by: str | None = None
    took_s: float | None = None


class LeaseTable(Record, frozen=True, kw_only=True):
    """The units of one step by index, and counts of what happened to them.

    ``num_double``: deliveries of units that were delivered; ``num_late``: deliveries whose lease was gone, among them
    first ones; ``num_expired`` and ``num_lost``: leases that ended by their time, and with their worker;
    ``num_leased_again``: leases of a unit that had been leased before.
    """

    units: tuple[UnitState, ...]
    num_double: int = 0
    num_late: int = 0
    num_expired: int = 0
    num_lost: int = 0
    num_leased_again: int = 0
    leased_before: frozenset[int] = frozenset()

    @property
    def is_complete(self) -> bool:
        """Whether every unit is delivered."""
        return all(unit.delivered_by is not None for unit in self.units)

    @property
    def num_delivered(self) -> int:
        """Units that are delivered."""
        return sum(unit.delivered_by is not None for unit in self.units)


class Leased(Record, frozen=True, kw_only=True):
    """A worker gets a unit."""

    unit: int
    worker: str
    at_s: float
    expires_at_s: float


class Delivered(Record, frozen=True, kw_only=True):
    """A worker's whole gradient sum of a unit is here."""

    unit: int
    worker: str
    at_s: float


class Expired(Record, frozen=True, kw_only=True):
    """Time passes: leases that ended by ``at_s`` are gone."""

    at_s: float


class Gone(Record, frozen=True, kw_only=True):
    """A worker left or died: all its leases are gone."""

    worker: str


Event = Leased | Delivered | Expired | Gone


def new_table(num_units: int) -> LeaseTable:
    """A table of units that nobody has."""
    return LeaseTable(units=(UnitState(),) * num_units)


def apply(table: LeaseTable, event: Event) -> tuple[LeaseTable, tuple[int, ...]]:
    """The table after an event, and the units whose sums are to be added because of it: none or one.

    Raises:
        IllegalTransition: there is no such unit; a unit is leased that is delivered, or that the worker has already.
    """
    if isinstance(event, Leased):
        return _leased(table, event), ()
    if isinstance(event, Delivered):
        return _delivered(table, event)
    if isinstance(event, Expired):
        table, num = _without(table, lambda lease: lease.expires_at_s <= event.at_s)
        return msgspec.structs.replace(table, num_expired=table.num_expired + num), ()
    table, num = _without(table, lambda lease: lease.worker == event.worker)
    return msgspec.structs.replace(table, num_lost=table.num_lost + num), ()


def choose_unit(
    table: LeaseTable, worker: str, at_s: float, *, stop: int | None = None, straggler_factor: float = 2.0
) -> int | None:
    """The unit that a worker should get now; None if there is nothing for it yet.

    The first that nobody has; else, of those whose only lease is older than ``straggler_factor`` times the median of
    what delivered units took, the one that was leased first.

    Args:
        stop: units from this index on are not given out: their sums would have to be kept for too long.
    """
    units = table.units[:stop]
    for index, unit in enumerate(units):
        if unit.delivered_by is None and not unit.leases:
            return index
    patience_s = straggler_patience_s(table, straggler_factor)
    if patience_s is None:
        return None
    late = [
        (unit.leases[0].leased_at_s, index)
        for index, unit in enumerate(units)
        if unit.delivered_by is None and len(unit.leases) == 1 and unit.leases[0].worker != worker
        and at_s - unit.leases[0].leased_at_s >= patience_s
    ]  # fmt: skip
    return min(late)[1] if late else None


def straggler_patience_s(table: LeaseTable, straggler_factor: float) -> float | None:
    """For how long a unit may be out before another worker computes it too; None before any is delivered."""
    took_s = sorted(unit.took_s for unit in table.units if unit.took_s is not None)
    return straggler_factor * took_s[len(took_s) // 2] if took_s else None


def _leased(table: LeaseTable, event: Leased) -> LeaseTable:
    unit = _unit(table, event.unit)
    if unit.delivered_by is not None:
        raise IllegalTransition(f"unit {event.unit} must not be delivered to be leased, {unit.delivered_by} did it")
    if any(lease.worker == event.worker for lease in unit.leases):
        raise IllegalTransition(f"unit {event.unit} must be leased once to each worker, {event.worker} has it already")
    lease = Lease(worker=event.worker, leased_at_s=event.at_s, expires_at_s=event.expires_at_s)
    table = _with_unit(table, event.unit, msgspec.structs.replace(unit, leases=(*unit.leases, lease)))
    return msgspec.structs.replace(
        table,
        num_leased_again=table.num_leased_again + (event.unit in table.leased_before),
        leased_before=table.leased_before | {event.unit},
    )


def _delivered(table: LeaseTable, event: Delivered) -> tuple[LeaseTable, tuple[int, ...]]:
    unit = _unit(table, event.unit)
    lease = next((lease for lease in unit.leases if lease.worker == event.worker), None)
    is_double = unit.delivered_by is not None
    table = msgspec.structs.replace(
        table, num_late=table.num_late + (lease is None), num_double=table.num_double + is_double
    )
    if is_double:
        return table, ()
    took_s = None if lease is None else event.at_s - lease.leased_at_s
    done = UnitState(delivered_by=event.worker, took_s=took_s)
    return _with_unit(table, event.unit, done), (event.unit,)


def _without(table: LeaseTable, is_over: Callable[[Lease], bool]) -> tuple[LeaseTable, int]:
    num_before = sum(len(unit.leases) for unit in table.units)
    units = tuple(
        msgspec.structs.replace(unit, leases=tuple(lease for lease in unit.leases if not is_over(lease)))
        for unit in table.units
    )
    table = msgspec.structs.replace(table, units=units)
    return table, num_before - sum(len(unit.leases) for unit in units)


def _unit(table: LeaseTable, index: int) -> UnitState:
    if not 0 <= index < len(table.units):
        raise IllegalTransition(f"a unit must be one of {len(table.units)}, got {index}")
    return table.units[index]


def _with_unit(table: LeaseTable, index: int, unit: UnitState) -> LeaseTable:
    units = (*table.units[:index], unit, *table.units[index + 1 :])
    return msgspec.structs.replace(table, units=units)
