"""R3: most rollouts failed in reset, each was trained as reward 0, and the policy unlearned what it knew.

A failure of the system is no reward: it stays out of its group's statistics, is tried again, and raises an alarm where
there are many.
"""

import asyncio

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.effects import AttemptEnded, Effect
from steelyard.coordinator.journal.base import decode
from steelyard.environments.base import Services as EnvironmentServices
from steelyard.environments.repair.environment import make_repair
from steelyard.errors import RunError, SandboxLost
from steelyard.harness.base import Services, Session, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.metrics import Counters
from steelyard.testing.coordinator_server import ServedRig, serve
from steelyard.testing.harness import MemoryArtifacts, MemorySandboxes, MemoryTraces, ScriptedChat, StepSleep, calls
from steelyard.testing.repair import run_in_process
from steelyard.testing.run_rig import WORKER, RunRig, grpo_advantages, make_settings
from steelyard.types import Task

GROUP_SIZE = 8


async def with_failing_members(num_failing: int, max_drop_frac: float = 1.0) -> tuple[RunRig, set[str]]:
    """One group of eight: ``num_failing`` members fail in every attempt. The rig and the rollouts that failed."""
    settings = make_settings(lag=0, groups_per_batch=1, group_size=GROUP_SIZE, max_drop_frac=max_drop_frac)
    rig = await RunRig(settings).start()
    leases = await rig.coordinator.lease(WORKER, GROUP_SIZE, 0.0)
    for lease in leases[num_failing:]:
        await rig.coordinator.artifact_ready(rig.seal(lease))
    values = {lease.attempt_id: float(lease.member_index % 2) for lease in leases}
    await rig.score_all(lambda job: values[job.attempt_id])
    failing = {lease.rollout_id for lease in leases[:num_failing]}
    for number in range(1, settings.max_attempts + 1):
        if number > 1:
            rig.clock.advance(settings.max_backoff_s)
            leases = await rig.coordinator.lease(WORKER, num_failing, 0.0)
        for lease in leases[:num_failing]:
            assert (lease.rollout_id in failing, lease.attempt_number) == (True, number)
            await rig.lose(lease)
    return rig, failing


def events_of(rig: RunRig) -> list[e.AnyEvent]:
    return [decode(record.payload) for record in rig.memory_journal.records()]


def test_r3_a_group_with_seven_of_eight_failed_is_not_trained() -> None:
    async def scenario() -> None:
        rig, failing = await with_failing_members(7)
        events = events_of(rig)
        leased = [event for event in events if isinstance(event, e.Leased) and event.rollout_id in failing]
        assert len(leased) == 7 * rig.settings.max_attempts, "each was tried again before it was given up"
        (dropped,) = [event for event in events if isinstance(event, e.GroupDropped)]
        assert dropped.reason is e.DropReason.INCOMPLETE
        assert len([event for event in events if isinstance(event, e.Scored)]) == 1
        plan = await rig.train(0)
        assert dropped.group_id not in plan.group_ids
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_r3_of_a_group_with_five_of_eight_failed_three_are_trained_by_their_own_statistics() -> None:
    async def scenario() -> None:
        rig, failing = await with_failing_members(5)
        plan = await rig.begin(0)
        assert len(plan.members) == 3
        assert not {member.rollout_id for member in plan.members} & failing
        advantages = {sample.attempt_id: sample.advantage for sample in rig.assemble(plan).samples}
        assert advantages == grpo_advantages([member.score for member in plan.members])
        books = await rig.coordinator.books(rig.stores.recorded)
        assert books.are_closed
        assert sum(books.tokens.lost.values()) > 0, "their tokens are booked as lost"
        await rig.coordinator.close()

    asyncio.run(scenario())


def test_r3_many_failures_raise_an_alarm_and_too_many_drops_end_the_run() -> None:
    async def scenario() -> None:
        rig, _ = await with_failing_members(7)
        (alarm,) = (await rig.coordinator.diagnose()).alarms
        assert "attempts were not carried through" in alarm
        await rig.coordinator.close()
        with pytest.raises(RunError, match=r"admission\.max_drop_frac"):
            rig, _ = await with_failing_members(7, max_drop_frac=0.5)
            await rig.coordinator.next_batch(0, 1.0)

    asyncio.run(scenario())


def test_r3_a_worker_elsewhere_whose_sandboxes_fail_for_seven_of_eight_hands_in_failures_and_no_rewards() -> None:
    errors = [SandboxLost("no sandbox to be had")] * 7

    async def scene(served: ServedRig) -> None:
        chat, traces = ScriptedChat(lambda _, __: calls(("submit", "{}"))), MemoryTraces(tokens_per_attempt=0)
        services = Services(
            leases=await served.worker(),
            chat=chat,
            sandboxes=MemorySandboxes(errors=errors),
            traces=traces,
            artifacts=MemoryArtifacts(),
            tasks=AnyTasks(),
        )
        worker = HarnessWorker(
            WORKER,
            WorkerSettings(max_concurrent=GROUP_SIZE, lease_wait_s=0.0),
            services,
            served.rig.clock,
            Counters(),
            sleep=StepSleep(),
        )
        stop, ended = asyncio.Event(), Ended(GROUP_SIZE)
        served.rig.coordinator.listen(ended.note)
        working = asyncio.create_task(worker.run(stop))
        async with asyncio.timeout(30):
            await ended.event.wait()
            stop.set()
            await working
        await served.rig.score_all()
        events = events_of(served.rig)
        failed = [event for event in events if isinstance(event, e.InfraFailed)]
        assert [event.reason for event in failed] == ["SandboxLost"] * 7
        assert len([event for event in events if isinstance(event, e.Scored)]) == 1
        assert not [event for event in events if isinstance(event, e.StepBegun | e.GroupCompleted)]

    serve(scene, lag=0, groups_per_batch=1, group_size=GROUP_SIZE)


class Ended:
    """Set once so many attempts have ended or been handed in."""

    def __init__(self, num_attempts: int) -> None:
        self.event = asyncio.Event()
        self._num_left = num_attempts

    def note(self, effect: Effect) -> None:
        if isinstance(effect, AttemptEnded):
            self._num_left -= 1
            if self._num_left == 0:
                self.event.set()


class AnyTasks:
    """Every task of the rig is the same task of ``repair``."""

    def __init__(self) -> None:
        self._repair = make_repair({}, EnvironmentServices(run_function=run_in_process))

    def task(self, task_id: str) -> Task:
        return self._repair.task("repair/train/0")

    def session(self, task: Task) -> Session:
        return self._repair.session(task)
