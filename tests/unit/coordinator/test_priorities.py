"""Who is leased first: retries, then by priority and age; and nobody waits for ever."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.coordinator import events as e
from steelyard.coordinator.state import apply
from steelyard.errors import IllegalTransition, InputError
from steelyard.testing.run_rig import WORKER, RunRig, make_settings, play
from steelyard.types import Purpose, Sampling, TaskRef

AGEING_S = 60.0


class Ranked:
    """A task stream with a priority for each position."""

    def __init__(self, *priorities: int) -> None:
        self._priorities = priorities

    def at(self, position: int) -> TaskRef | None:
        if position >= len(self._priorities):
            return None
        priority = self._priorities[position]
        return TaskRef(position=position, epoch=0, task_index=position, task_id=f"task-{position}", priority=priority)


async def evaluate(rig: RunRig, label: str, priority: int) -> str:
    (group_id,) = await rig.coordinator.admit_evaluation(
        (f"held-{label}",), version=0, sampling=Sampling(), label=label, priority=priority
    )
    return group_id


async def order_of_leases(rig: RunRig) -> list[str]:
    """Task ids in the order in which single leases give them."""
    tasks = []
    while leases := await rig.coordinator.lease(WORKER, 1, 0.0):
        tasks.append(leases[0].task_id)
    return tasks


def test_higher_priorities_are_leased_first_and_equal_ones_by_age() -> None:
    async def scene(rig: RunRig) -> None:
        for label, priority in (("low", -1), ("b", 2), ("c", 2), ("top", 3), ("zero", 0)):
            await evaluate(rig, label, priority)
        order = await order_of_leases(rig)
        assert order[:3] == ["held-top", "held-b", "held-c"]
        assert order[-2:] == ["held-zero", "held-low"]
        assert len(order) == 5 + 8

    play(scene)


def test_a_task_stream_can_give_priorities_and_the_order_of_admission_stays() -> None:
    async def run() -> None:
        rig = RunRig(make_settings())
        rig.stream = Ranked(0, 5, 0, 5)
        await rig.start()
        assert [g.stream_position for g in rig.coordinator.state.live_groups.values()] == [0, 1, 2, 3]
        assert await order_of_leases(rig) == [f"task-{n}" for n in (1, 1, 3, 3, 0, 0, 2, 2)]
        await rig.coordinator.close()
        assert rig.audit().is_passed

    asyncio.run(run())


def test_a_retry_goes_before_any_priority() -> None:
    async def scene(rig: RunRig) -> None:
        (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        await rig.coordinator.abandon("interrupted")
        await evaluate(rig, "top", e.MAX_PRIORITY)
        (retry,) = await rig.coordinator.lease(WORKER, 1, 0.0)
        assert retry.rollout_id == lease.rollout_id

    play(scene)


def test_priorities_survive_a_crash() -> None:
    async def run() -> None:
        rig = await RunRig(make_settings()).start()
        await evaluate(rig, "top", 1)
        await rig.coordinator.crash()
        await rig.open()
        assert (await order_of_leases(rig))[0] == "held-top"
        await rig.coordinator.close()

    asyncio.run(run())


@pytest.mark.parametrize(("waited_s", "is_overtaken"), [(2 * AGEING_S - 1, True), (2 * AGEING_S + 1, False)])
def test_a_level_of_priority_is_worth_so_many_seconds_of_waiting(waited_s: float, is_overtaken: bool) -> None:
    async def scene(rig: RunRig) -> None:
        await evaluate(rig, "old", -1)
        rig.clock.advance(waited_s)
        await evaluate(rig, "young", 1)
        order = [task for task in await order_of_leases(rig) if task.startswith("held")]
        assert order == (["held-young", "held-old"] if is_overtaken else ["held-old", "held-young"])

    play(scene, priority_ageing_s=AGEING_S)


@settings(max_examples=20, deadline=None)
@given(gap_s=st.floats(1.0, 50.0), priority=st.integers(1, 5))
def test_an_endless_stream_of_higher_priority_starves_nobody(gap_s: float, priority: int) -> None:
    """One worker, and a new group of higher priority before each of its leases: the old group's turn still comes."""

    async def scene(rig: RunRig) -> None:
        await evaluate(rig, "old", 0)
        most = int(priority * AGEING_S / gap_s) + 2
        for number in range(most + 1):
            await evaluate(rig, f"new-{number}", priority)
            (lease,) = await rig.coordinator.lease(WORKER, 1, 0.0)
            if lease.task_id == "held-old":
                return
            rig.clock.advance(gap_s)
            await rig.coordinator.heartbeat(WORKER, (lease.attempt_id,))
        raise AssertionError(f"not leased within {most} leases")

    async def run() -> None:
        rig = RunRig(make_settings(priority_ageing_s=AGEING_S, lease_s=1e6))
        rig.stream = Ranked()
        await rig.start()
        await scene(rig)
        await rig.coordinator.close()

    asyncio.run(run())


@pytest.mark.parametrize("priority", [e.MAX_PRIORITY + 1, -e.MAX_PRIORITY - 1, 10**400])
def test_a_priority_out_of_range_is_refused_where_it_is_given_and_in_the_journal(priority: int) -> None:
    async def scene(rig: RunRig) -> None:
        with pytest.raises(InputError, match="priority must be from -1000 to 1000, got "):
            await evaluate(rig, "x", priority)
        assert not rig.coordinator.state.evaluations
        admitted = e.GroupAdmitted(
            at_s=rig.clock.now_s(),
            group_id="grp_x",
            task_id="t",
            task_index=None,
            stream_position=None,
            purpose=Purpose.EVALUATION,
            label="x",
            rollout_ids=("rol_x",),
            admitted_version=0,
            bound_version=0,
            sampling=Sampling(),
            max_turns=1,
            priority=priority,
        )
        with pytest.raises(IllegalTransition, match="GROUP_ADMITTED: priority must be"):
            apply(rig.coordinator.state, admitted)

    play(scene)
