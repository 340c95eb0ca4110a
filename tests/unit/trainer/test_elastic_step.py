"""One step among those who compute it: bounded sums, waits that end, times from the clock that is given."""

import asyncio

import torch

from steelyard.testing.manual_clock import ManualClock
from steelyard.testing.training_data import random_step_batch
from steelyard.trainer.elastic_step import CORE, ElasticStep
from steelyard.trainer.loss import LossSums
from steelyard.trainer.records import ElasticSettings, LossSettings
from steelyard.trainer.step import units_of

UNITS = units_of(random_step_batch(0, num_samples=40), LossSettings())
NUM_BYTES = 4 * 100


def deliver(step: ElasticStep, index: int, worker: str) -> None:
    step.deliver(index, worker, {"w": torch.ones(100)}, LossSums())


def test_units_far_ahead_of_the_next_to_be_added_are_not_given_out() -> None:
    """The core is busy with unit 0: a fast helper may be three ahead, and no more sums are kept."""
    clock = ManualClock()
    step = ElasticStep(UNITS, ElasticSettings(max_ahead_units=4, straggler_factor=100.0), clock)
    assert step.lease(CORE) == UNITS.units[0]
    for index in (1, 2, 3):
        unit = step.lease("fast")
        assert unit == UNITS.units[index]
        clock.advance(1.0)
        deliver(step, index, "fast")
    assert step.lease("fast") is None
    deliver(step, 0, CORE)
    assert step.lease("fast") is None
    step.advance()
    assert step.lease("fast") == UNITS.units[4]


def test_who_waits_is_woken_by_room_by_a_death_and_by_the_end() -> None:
    async def main() -> None:
        step = ElasticStep(UNITS, ElasticSettings(max_ahead_units=2), ManualClock())
        step.lease(CORE)
        step.lease("dying")
        waiting = asyncio.create_task(step.next_for("helper"))
        await asyncio.sleep(0)
        assert not waiting.done()
        step.gone("dying")
        assert await waiting == UNITS.units[1]
        waiting = asyncio.create_task(step.next_for("other"))
        await asyncio.sleep(0)
        deliver(step, 0, CORE)
        step.advance()
        step.advanced()
        assert await waiting == UNITS.units[2]
        for index in range(1, len(UNITS.units)):
            deliver(step, index, CORE)
        assert await step.next_for("helper") is None
        step.finish()

    async def within() -> None:
        async with asyncio.timeout(10):
            await main()

    asyncio.run(within())


def test_a_lease_ends_by_the_clock_and_the_unit_is_given_out_again() -> None:
    clock = ManualClock()
    step = ElasticStep(UNITS, ElasticSettings(unit_deadline_s=5.0), clock)
    assert step.lease("silent") == UNITS.units[0]
    clock.advance(5.0)
    assert step.lease(CORE) == UNITS.units[0]
    assert (step.table.num_expired, step.table.num_leased_again) == (1, 1)
    deliver(step, 0, "silent")
    deliver(step, 0, CORE)
    assert (step.table.num_late, step.table.num_double, step.num_elsewhere) == (2, 1, 1)
