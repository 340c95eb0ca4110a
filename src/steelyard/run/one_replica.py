"""One replica and one trainer as a run has them, without the rest of it: for measuring what they take."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from steelyard.clock import SystemClock
from steelyard.config import Config
from steelyard.errors import ConfigError, RunError
from steelyard.inference.router import Router
from steelyard.run.directory import RunDirectory
from steelyard.run.engines import router_settings
from steelyard.run.processes import Children
from steelyard.run.recovery import StartingPoint
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import PublishRequest

REPLICA = "replica-0"


@dataclass
class OneReplica:
    """The replica behind its router, and the trainer whose version it serves.

    Attributes:
        version: the one that is loaded.
        start_s: from the start of the replica's process until it answered.
        write_s: each publication. load_s: each load, proof included; the first of a process is not among them.
    """

    config: Config
    directory: RunDirectory
    children: Children
    router: Router
    trainer: TrainerClient
    version: int
    start_s: float
    write_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    async def publish(self) -> float:
        """Have the trainer publish what it holds; returns the seconds."""
        state = await self.trainer.state()
        parent = None if state.version == 0 else state.version - 1
        started_s = time.perf_counter()
        await self.trainer.publish(PublishRequest(version=state.version, parent_version=parent))
        return time.perf_counter() - started_s

    def cpu_s(self) -> float:
        """CPU seconds of the replica's processes so far.

        Raises:
            RunError: it has ended.
        """
        running = self.children.process_of(REPLICA)
        if running is None:
            raise RunError(f"{REPLICA} must be running")
        try:
            root = psutil.Process(running.child.pid)
            times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        except psutil.NoSuchProcess as error:
            raise RunError(f"{REPLICA} must be running: {error}") from None
        return sum(one.user + one.system for one in times)


@asynccontextmanager
async def opened_replica(
    config: Config, model_dir: Path, directory: RunDirectory, sockets: Path
) -> AsyncIterator[OneReplica]:
    """Start both, publish version 0 and load it; end them with the block.

    Args:
        directory: a run directory with its folders.
        sockets: a short path.

    Raises:
        ConfigError: the engine is emulated: it takes what the cost model says.
        ProcessDied, DeadlineExceeded: they do not come up.
    """
    if config.inference.engine == "emulated":
        raise ConfigError("inference.engine must be local or vllm to be measured, got emulated")
    clock = SystemClock()
    children = Children(config, directory, sockets, clock)
    try:
        trainer = await children.start_trainer(model_dir, StartingPoint(0, None, None))
        started_s = time.perf_counter()
        engine = await children.start_replica(0, model_dir)
        start_s = time.perf_counter() - started_s
        router = Router({REPLICA: engine}, clock, router_settings(config))
        one = OneReplica(config, directory, children, router, trainer, 0, start_s)
        await one.publish()
        await router.replicas[REPLICA].load(str(directory.version(0)), 0)
        yield one
    finally:
        await children.stop()
