"""The lease table: whatever happens, each unit is summed exactly once, or the step is not complete."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from steelyard.errors import IllegalTransition
from steelyard.trainer.unit_leases import (
    Delivered,
    Expired,
    Gone,
    Leased,
    LeaseTable,
    apply,
    choose_unit,
    new_table,
)

WORKERS = ("core", "a", "b", "c")


def leased(table: LeaseTable, unit: int, worker: str, at_s: float = 0.0, expires_at_s: float = 10.0) -> LeaseTable:
    return apply(table, Leased(unit=unit, worker=worker, at_s=at_s, expires_at_s=expires_at_s))[0]


def delivered(table: LeaseTable, unit: int, worker: str, at_s: float = 1.0) -> tuple[LeaseTable, tuple[int, ...]]:
    return apply(table, Delivered(unit=unit, worker=worker, at_s=at_s))


class Leases(RuleBasedStateMachine):
    """Workers take units, deliver them (late, twice, for one another), are slow, leave and die."""

    @initialize(num_units=st.integers(1, 12), window=st.integers(1, 12))
    def begin(self, num_units: int, window: int) -> None:
        self.table = new_table(num_units)
        self.window = window
        self.now_s = 0.0
        self.added: list[int] = []
        self.computed: set[tuple[int, str]] = set()

    @rule(worker=st.sampled_from(WORKERS), for_s=st.floats(0.1, 20.0))
    def lease(self, worker: str, for_s: float) -> None:
        prefix = next((i for i, u in enumerate(self.table.units) if u.delivered_by is None), len(self.table.units))
        unit = choose_unit(self.table, worker, self.now_s, stop=prefix + self.window)
        if unit is None:
            return
        assert unit < prefix + self.window and self.table.units[unit].delivered_by is None
        self.table = leased(self.table, unit, worker, self.now_s, self.now_s + for_s)
        self.computed.add((unit, worker))

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Of what was ever leased to somebody: in time, late or twice."""
        unit, worker = data.draw(st.sampled_from(sorted(self.computed)))
        was_delivered = self.table.units[unit].delivered_by is not None
        num_double = self.table.num_double
        self.table, to_add = delivered(self.table, unit, worker, self.now_s)
        assert to_add == (() if was_delivered else (unit,))
        assert self.table.num_double == num_double + was_delivered
        self.added += to_add

    @rule(by_s=st.floats(0.0, 15.0))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s
        self.table, to_add = apply(self.table, Expired(at_s=self.now_s))
        assert not to_add
        assert all(lease.expires_at_s > self.now_s for unit in self.table.units for lease in unit.leases)

    @rule(worker=st.sampled_from(WORKERS))
    def worker_goes(self, worker: str) -> None:
        self.table, to_add = apply(self.table, Gone(worker=worker))
        assert not to_add
        assert all(lease.worker != worker for unit in self.table.units for lease in unit.leases)

    @invariant()
    def each_unit_is_added_once_or_the_step_is_not_complete(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(set(self.added)) == len(self.added) == self.table.num_delivered
        assert self.table.is_complete == (sorted(self.added) == list(range(len(self.table.units))))

    def teardown(self) -> None:
        """Whatever happened before, the core alone completes the step."""
        if not hasattr(self, "table"):
            return
        self.table, _ = apply(self.table, Expired(at_s=self.now_s + 100.0))
        while (unit := choose_unit(self.table, "core", self.now_s)) is not None:
            self.table, to_add = delivered(leased(self.table, unit, "core"), unit, "core")
            self.added += to_add
        assert self.table.is_complete and sorted(self.added) == list(range(len(self.table.units)))


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLeases = Leases.TestCase


def test_a_unit_that_is_out_too_long_is_given_to_another_worker_once() -> None:
    table = leased(leased(new_table(2), 0, "slow"), 1, "core")
    assert choose_unit(table, "core", 100.0) is None
    table, _ = delivered(table, 1, "core", at_s=2.0)
    assert choose_unit(table, "core", 3.9) is None
    assert choose_unit(table, "core", 4.0) == 0
    assert choose_unit(table, "slow", 4.0) is None
    table = leased(table, 0, "core", 4.0)
    assert choose_unit(table, "other", 50.0) is None
    table, to_add = delivered(table, 0, "core", 6.0)
    assert to_add == (0,) and table.is_complete
    table, to_add = delivered(table, 0, "slow", 7.0)
    assert to_add == () and (table.num_double, table.num_leased_again) == (1, 1)


def test_a_delivery_after_the_lease_expired_counts_as_the_first_if_it_is() -> None:
    table, _ = apply(leased(new_table(1), 0, "a", expires_at_s=5.0), Expired(at_s=5.0))
    table, to_add = delivered(table, 0, "a", 6.0)
    assert to_add == (0,) and (table.num_late, table.num_expired) == (1, 1)


def test_what_no_table_allows_is_refused() -> None:
    table = leased(new_table(2), 0, "a")
    with pytest.raises(IllegalTransition, match="a has it already"):
        leased(table, 0, "a")
    table, _ = delivered(table, 0, "a")
    with pytest.raises(IllegalTransition, match="must not be delivered to be leased, a did it"):
        leased(table, 0, "b")
    with pytest.raises(IllegalTransition, match="one of 2, got 2"):
        delivered(table, 2, "a")
