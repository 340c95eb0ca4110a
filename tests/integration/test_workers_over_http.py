"""The real harness worker and the real scoring worker, with the coordinator behind HTTP on a lossy network."""

import asyncio
import random

import pytest

from steelyard.coordinator import events as e
from steelyard.coordinator.effects import Effect
from steelyard.coordinator.transitions import GroupState
from steelyard.environments.base import Services as EnvironmentServices
from steelyard.environments.repair.environment import make_repair
from steelyard.harness.base import Services, Session, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.metrics import Counters
from steelyard.scoring.verifier import score_from
from steelyard.scoring.worker import ScoringWorker
from steelyard.scoring.worker import WorkerSettings as ScoringSettings
from steelyard.testing.coordinator_server import ServedRig, serve
from steelyard.testing.fault_proxy import Fault
from steelyard.testing.harness import MemoryArtifacts, MemorySandboxes, MemoryTraces, ScriptedChat, StepSleep, calls
from steelyard.testing.repair import run_in_process
from steelyard.testing.run_rig import SCORER, WORKER
from steelyard.testing.scoring import FakeArtifacts
from steelyard.types import EndReason, Score, ScoreJob, SealedTrace, Task, ToolRecord, Verdict

FAULTS = (Fault.NONE, Fault.LOSE_ANSWER, Fault.LOSE_REQUEST, Fault.TWICE)
TOKENS = 7


class RepairTasks:
    """The rig's tasks, each played by the same task of ``repair``."""

    def __init__(self) -> None:
        self._repair = make_repair({}, EnvironmentServices(run_function=run_in_process))

    def task(self, task_id: str) -> Task:
        return self._repair.task("repair/train/0")

    def session(self, task: Task) -> Session:
        return self._repair.session(task)


class RecordedTraces(MemoryTraces):
    """Tokens that are sealed were recorded in the stores of the rig."""

    def __init__(self, served: ServedRig) -> None:
        super().__init__(TOKENS)
        self._stores = served.rig.stores

    async def seal(self, attempt_id: str, end_reason: EndReason, tools: tuple[ToolRecord, ...]) -> SealedTrace:
        self._stores.record(attempt_id, TOKENS)
        return await super().seal(attempt_id, end_reason, tools)


class Approving:
    """Grades everything as right."""

    capacity = 2

    async def grade(self, job: ScoreJob, artifact: bytes) -> Score:
        return score_from(job, Verdict(value=1.0, success=True), "v1")


def all_complete(served: ServedRig) -> asyncio.Event:
    """Set once every group is complete and committed."""
    done, state = asyncio.Event(), served.rig.coordinator.state

    def look(_: Effect) -> None:
        if all(group.state is GroupState.COMPLETE for group in state.live_groups.values()):
            done.set()

    served.rig.coordinator.listen(look)
    return done


@pytest.mark.parametrize("seed", range(3))
def test_workers_finish_every_group_though_half_of_the_requests_meet_a_fault(seed: int) -> None:
    async def scene(served: ServedRig) -> None:
        draw, counters, artifacts = random.Random(seed), Counters(), MemoryArtifacts()
        served.proxy.plan = lambda _: draw.choices(FAULTS, (3, 1, 1, 1))[0]
        services = Services(
            leases=await served.worker(),
            chat=ScriptedChat(lambda _, __: calls(("submit", "{}"))),
            sandboxes=MemorySandboxes(),
            traces=RecordedTraces(served),
            artifacts=artifacts,
            tasks=RepairTasks(),
        )
        settings = WorkerSettings(max_concurrent=3, lease_wait_s=0.0)
        harness = HarnessWorker(WORKER, settings, services, served.rig.clock, counters, sleep=StepSleep())
        scoring_settings = ScoringSettings(worker_id=SCORER, alarm_failure_frac=0.5, poll_s=0.0)
        source = await served.scorer()
        scoring = ScoringWorker(source, FakeArtifacts(artifacts.blobs), Approving(), scoring_settings, counters)
        done, stop = all_complete(served), asyncio.Event()
        working = [asyncio.create_task(harness.run(stop)), asyncio.create_task(scoring.run())]
        async with asyncio.timeout(30):
            await done.wait()
            stop.set()
            await working[0]
        working[1].cancel()
        assert isinstance((await asyncio.gather(working[1], return_exceptions=True))[0], asyncio.CancelledError)
        events = await served.rig.journal.replay()
        num_rollouts = len(served.rig.coordinator.state.rollouts)
        for kind in (e.Leased, e.ArtifactReady, e.Scored, e.Accepted):
            assert sum(type(event) is kind for event in events) == num_rollouts, kind
        assert not [name for name in counters.read() if "refused" in name or "failed" in name]

    serve(scene, groups_per_batch=2, group_size=2)
