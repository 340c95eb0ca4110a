"""H5: a cancelled session kept running in its thread while its slot was already given to somebody else.

A slot is free when the processes of its attempt are gone, and not before.
"""

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from steelyard.config import SandboxConfig
from steelyard.environments.base import Services as EnvironmentServices
from steelyard.environments.repair.environment import make_repair
from steelyard.environments.repair.generator import make_task
from steelyard.environments.repair.state import ToolName
from steelyard.harness.base import Services, WorkerSettings
from steelyard.harness.worker import HarnessWorker
from steelyard.metrics import Counters
from steelyard.sandbox.function_calls import run_function_calls
from steelyard.sandbox.opening import open_pool
from steelyard.testing.harness import (
    FakeClock,
    FakeLeases,
    MemoryArtifacts,
    MemoryTraces,
    ScriptedChat,
    StepSleep,
    calls,
    make_lease,
)
from steelyard.types import CallResult, ChatRequest, Lease, Message

SLEEPER, NEXT = "att_0", "att_1"
SLEEPS = "import time; time.sleep(600)"
TASK_IDS = [
    task_id
    for task_id in (f"repair/train/{index}" for index in range(100))
    if not make_task(task_id).lines[1].endswith(":")
]
"""Tasks whose line 2 is a statement of its own, so that another can stand in its place."""


def processes_of(attempt_id: str) -> list[int]:
    """Supervisor and programs of the attempt's sandbox: the supervisor bears its name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name() == f"sy:{attempt_id}":
                found += [process.pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.NoSuchProcess:
            continue
    return found


class WatchedLeases(FakeLeases):
    """Notes, when the slot is offered again, what is still alive of the attempt that was cancelled."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        super().__init__(leases)
        self.sleeping: list[int] = []
        self.alive_at_next_lease: list[list[int]] = []

    async def lease(self, worker_id: str, max_leases: int, wait_s: float) -> Sequence[Lease]:
        if self.started:
            self.alive_at_next_lease.append([pid for pid in self.sleeping if psutil.pid_exists(pid)])
        return await super().lease(worker_id, max_leases, wait_s)

    async def heartbeat(self, worker_id: str, attempts: Mapping[str, int]) -> Sequence[str]:
        self.sleeping = processes_of(SLEEPER)
        assert len(self.sleeping) >= 2, "the tool must be asleep in its sandbox when it is cancelled"
        return await super().heartbeat(worker_id, attempts)


def policy(attempt_id: str, request: ChatRequest) -> Message:
    """The first attempt's tool sleeps; the second submits at once."""
    if attempt_id == NEXT:
        return calls((ToolName.SUBMIT, "{}"))
    if len(request.messages) == 2:
        return calls((ToolName.REPLACE_LINE, json.dumps({"number": 2, "text": SLEEPS})))
    return calls((ToolName.RUN_TESTS, "{}"))


class Begun:
    """The runner of functions; tells when it was asked to run one."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def __call__(
        self, sandbox: Any, source: str, function_name: str, inputs: Sequence[Sequence[Any]], deadline_s: float
    ) -> Sequence[CallResult]:
        self.event.set()
        return await run_function_calls(sandbox, source, function_name, inputs, deadline_s)


async def cancel_while_a_tool_sleeps(directory: Path) -> tuple[WatchedLeases, HarnessWorker, int]:
    leases = WatchedLeases([make_lease(0, TASK_IDS[0]), make_lease(1, TASK_IDS[1])])
    leases.lost.add(SLEEPER)
    config = SandboxConfig(num_warm=1)
    pool = await open_pool(config, directory)
    begun, sleep, traces = Begun(), StepSleep(), MemoryTraces()
    environment = make_repair({}, EnvironmentServices(run_function=begun, call_deadline_s=600.0))
    services = Services(
        leases=leases, chat=ScriptedChat(policy), sandboxes=pool, traces=traces, artifacts=MemoryArtifacts(),
        tasks=environment,
    )  # fmt: skip
    settings = WorkerSettings(max_concurrent=1, tool_deadline_s=600.0)
    worker = HarnessWorker("wrk_0", settings, services, FakeClock(), Counters(), sleep=sleep)
    working = asyncio.create_task(worker.run(leases.stop))
    try:
        async with asyncio.timeout(60):
            await begun.event.wait()
            while len(processes_of(SLEEPER)) < 2:  # noqa: ASYNC110 (the start of a stranger has no event of ours)
                await asyncio.sleep(0)
            sleep.tick()
            while not leases.reports:  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0)
            leases.close_one()
            await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await pool.close()
    return leases, worker, len(traces.discarded)


def test_h5_the_slot_of_a_cancelled_attempt_is_given_away_only_when_its_processes_are_gone() -> None:
    with tempfile.TemporaryDirectory() as directory:
        leases, worker, num_discarded = asyncio.run(cancel_while_a_tool_sleeps(Path(directory)))
    assert leases.sleeping
    assert leases.alive_at_next_lease
    assert leases.alive_at_next_lease[0] == [], "the slot was offered while its processes lived"
    assert leases.most_asked == 1, "one slot is one slot"
    assert leases.started == [SLEEPER, NEXT]
    assert [report.attempt_id for report in leases.reports] == [NEXT], "the cancelled one hands in nothing"
    assert (num_discarded, worker.num_live) == (1, 0)
