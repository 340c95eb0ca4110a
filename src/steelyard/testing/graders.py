"""Real grader processes behind a real pool, and a scoring worker that brings their verdicts to a run in memory."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from steelyard.config import SandboxConfig
from steelyard.coordinator.transitions import RolloutState
from steelyard.digests import digest_bytes
from steelyard.metrics import Counters
from steelyard.processes.child import ChildProcess
from steelyard.run.children import start_child
from steelyard.run.scorer_process import ScorerOptions
from steelyard.scoring.pool import GraderPool, PoolSettings
from steelyard.scoring.process import ChildGrader
from steelyard.scoring.worker import ScoringWorker, WorkerSettings
from steelyard.testing.grader_process import VERIFIER_VERSION
from steelyard.testing.run_rig import SCORER, WORKER, RunRig

_START_DEADLINE_S = 60.0
_MOODY_MODULE = "steelyard.testing.grader_process"

Start = Callable[[str], Awaitable[ChildGrader]]


@asynccontextmanager
async def moody_pool(directory: Path, counters: Counters, deadline_s: float = 30.0) -> AsyncIterator[GraderPool]:
    """A pool of one process of :mod:`steelyard.testing.grader_process`, whose artifacts say what it does.

    Args:
        directory: for its sockets and logs; the path must be short.
    """
    num_started = 0

    async def start(name: str) -> ChildGrader:
        nonlocal num_started
        num_started += 1
        socket = directory / f"{name}-{num_started}.sock"
        arguments = [str(socket), str(os.getpid())]
        child = await ChildProcess.start(name, _MOODY_MODULE, arguments, log_path=directory / f"{name}.log")
        return await ChildGrader.start(child, socket, _START_DEADLINE_S)

    async with _opened(start, VERIFIER_VERSION, counters, deadline_s) as pool:
        yield pool


@asynccontextmanager
async def repair_pool(
    directory: Path, counters: Counters, verifier_version: str, sandbox: SandboxConfig, deadline_s: float = 30.0
) -> AsyncIterator[GraderPool]:
    """A pool of one scorer process as a run starts it: the grader of ``repair`` with sandboxes of its own."""

    async def start(name: str) -> ChildGrader:
        options = ScorerOptions(
            name=name,
            socket_path=str(directory / f"{name}.sock"),
            parent_pid=os.getpid(),
            environment="repair",
            environment_options={},
            sandbox=sandbox,
            registry_dir=str(directory / f"sandboxes-{name}"),
        )
        child = await start_child("steelyard.run.scorer_process", options, log_folder=directory)
        return await ChildGrader.start(child, Path(options.socket_path), _START_DEADLINE_S)

    async with _opened(start, verifier_version, counters, deadline_s) as pool:
        yield pool


@asynccontextmanager
async def _opened(
    start: Start, verifier_version: str, counters: Counters, deadline_s: float
) -> AsyncIterator[GraderPool]:
    settings = PoolSettings(
        num_workers=1, concurrency=4, deadline_s=deadline_s, verifier_version=verifier_version, is_deterministic=True
    )
    pool = GraderPool(start, settings, counters)
    try:
        await pool.open()
        yield pool
    finally:
        await pool.close()


class RigArtifacts:
    """The artifacts of a rig, as scoring fetches them."""

    def __init__(self, rig: RunRig) -> None:
        self._rig = rig

    async def get(self, digest: str) -> bytes:
        """See :class:`steelyard.scoring.base.ArtifactSource`."""
        return self._rig.stores.artifacts.read(digest)


async def hand_in(rig: RunRig, artifacts: list[bytes]) -> list[str]:
    """Lease as many attempts as there are artifacts and hand one in for each; the attempts, in order."""
    leases = await rig.coordinator.lease(WORKER, len(artifacts), 0.0)
    assert len(leases) == len(artifacts), f"{len(artifacts)} leases are needed, got {len(leases)}"
    for lease, artifact in zip(leases, artifacts, strict=True):
        digest = digest_bytes(artifact)
        rig.stores.artifacts[digest] = artifact
        report = rig.seal(lease)
        await rig.coordinator.artifact_ready(msgspec.structs.replace(report, artifact_digest=digest))
    return [lease.attempt_id for lease in leases]


async def grade_all(rig: RunRig, pool: GraderPool, counters: Counters) -> ScoringWorker:
    """Let a scoring worker work until no attempt waits for a score; the worker, which has ended."""
    settings = WorkerSettings(worker_id=SCORER, alarm_failure_frac=rig.settings.alarm_failure_frac)
    worker = ScoringWorker(rig.coordinator, RigArtifacts(rig), pool, settings, counters)
    changed = asyncio.Event()
    rig.coordinator.listen(lambda _: changed.set())
    working = asyncio.create_task(worker.run())
    try:
        while any(rollout.state is RolloutState.ARTIFACT_READY for rollout in rig.coordinator.state.rollouts.values()):
            changed.clear()
            waiting = asyncio.create_task(changed.wait())
            await asyncio.wait({waiting, working}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if working.done():
                working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    return worker
