"""A trainer and the processes that help it, in a directory of their own, with the calls that control would make."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from steelyard.assembly.batch import encode_step_batch
from steelyard.processes.child import ChildProcess
from steelyard.processes.faults import FaultPlan
from steelyard.run.children import start_child
from steelyard.run.elastic_options import ElasticOptions
from steelyard.trainer.checkpoint import WEIGHTS_NAME
from steelyard.trainer.elastic_records import (
    ComputeRequest,
    ProveRequest,
    Pulled,
    PullRequest,
    UnitDone,
    WeightProof,
    WeightSlices,
)
from steelyard.trainer.elastic_socket import SocketHelper
from steelyard.trainer.elastic_worker import ElasticWorker
from steelyard.trainer.model import load_model
from steelyard.trainer.records import (
    CheckpointRequest,
    ElasticSettings,
    OptimizerSettings,
    TrainerSettings,
    TrainRequest,
)
from steelyard.trainer.trainer import Trainer
from steelyard.trainer.units import LeaseUnit
from steelyard.types import StepBatch, StepReport
from steelyard.weights.publisher import VersionPublisher

START_DEADLINE_S = 60.0
PATIENT = ElasticSettings(straggler_factor=1e9)
"""Nobody is overtaken, however busy the machine is: a helper that was given a unit delivers it, or is gone."""


class InlineHelper:
    """A worker in the trainer's own process, with a thread of its own.

    ``on_compute`` is called with each unit before it is computed, and may raise as a worker that fails would.
    """

    def __init__(self, name: str, worker: ElasticWorker) -> None:
        self.name = name
        self.on_compute: Callable[[LeaseUnit], None] = lambda _unit: None
        self._worker = worker

    async def put_weights(self, request: WeightSlices, deadline_s: float) -> None:
        """See :class:`steelyard.trainer.elastic.Helper`."""
        async with asyncio.timeout(deadline_s):
            await self._worker.put_weights(request)

    async def prove(self, request: ProveRequest, deadline_s: float) -> WeightProof:
        """See :class:`steelyard.trainer.elastic.Helper`."""
        async with asyncio.timeout(deadline_s):
            return await self._worker.prove(request)

    async def compute(self, request: ComputeRequest, deadline_s: float) -> UnitDone:
        """See :class:`steelyard.trainer.elastic.Helper`."""
        self.on_compute(request.unit)
        async with asyncio.timeout(deadline_s):
            return await self._worker.compute(request)

    async def pull(self, request: PullRequest, deadline_s: float) -> Pulled:
        """See :class:`steelyard.trainer.elastic.Helper`."""
        async with asyncio.timeout(deadline_s):
            return await self._worker.pull(request)

    async def close(self) -> None:
        """End the worker."""
        await self._worker.close()


@dataclass
class ElasticRig:
    """Made by :func:`elastic_rig`. ``helpers`` are the processes by name."""

    root: Path
    model_dir: Path
    trainer: Trainer
    helpers: dict[str, ChildProcess] = field(default_factory=dict)

    async def start_helper(self, name: str, fault: FaultPlan | None = None, core: int | None = None) -> Path:
        """Start a process that can help; it does when it is attached. Returns its socket, which it listens on."""
        socket_path = self.root / f"{name}.sock"
        options = ElasticOptions(
            name=name, socket_path=str(socket_path), parent_pid=os.getpid(), model_dir=str(self.model_dir), fault=fault,
            core=core,
        )  # fmt: skip
        child = await start_child("steelyard.run.elastic_process", options, log_folder=self.root)
        self.helpers[name] = child
        client = await child.connect(socket_path, START_DEADLINE_S)
        await client.close()
        return socket_path

    async def attach_inline(self, name: str) -> "InlineHelper":
        """Let a worker in this process help."""
        helper = InlineHelper(name, ElasticWorker(load_model(self.model_dir)))
        await self.trainer.attach(helper)
        return helper

    async def attach(self, name: str, socket_path: Path) -> None:
        """Let a started process help; it loads while steps go on."""
        await self.trainer.attach(await SocketHelper.connect(name, socket_path, START_DEADLINE_S))

    async def ready(self, *names: str) -> None:
        """Wait until helpers have proven the weights that the trainer holds now."""
        async with asyncio.timeout(START_DEADLINE_S):
            while True:
                state = await self.trainer.state()
                present = {helper.name: helper.version for helper in state.helpers}
                if all(present.get(name) == state.version for name in names):
                    return
                # A state cannot be awaited from here; the pause bounds the polling, nothing is ordered by it.
                await asyncio.sleep(0.005)

    async def step(self, batch: StepBatch) -> StepReport:
        """Take one optimizer step."""
        data, digest = encode_step_batch(batch)
        path = self.root / f"{digest}.batch"
        path.write_bytes(data)
        request = TrainRequest(path=str(path), digest=digest, step=batch.step, version=batch.step + 1)
        return await self.trainer.train_step(request)

    async def weights(self) -> torch.Tensor:
        """All parameters, flattened, float64."""
        state = await self.trainer.state()
        report = await self.trainer.checkpoint(CheckpointRequest(step=state.step))
        tensors = safetensors.torch.load_file(Path(report.path) / WEIGHTS_NAME)
        return torch.cat([tensors[name].flatten().double() for name in sorted(tensors)])


@asynccontextmanager
async def elastic_rig(root: Path, model_dir: Path, elastic: ElasticSettings | None = None) -> AsyncIterator[ElasticRig]:
    """A trainer in this process, and no helper yet. ``root`` must be a short path: sockets are made in it."""
    for name in ("weights", "checkpoints"):
        (root / name).mkdir(parents=True, exist_ok=True)
    settings = TrainerSettings(
        checkpoints_dir=str(root / "checkpoints"),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        keep_checkpoints=100,
        elastic=elastic or ElasticSettings(),
    )
    trainer = await Trainer.open(settings, VersionPublisher(root / "weights", model_dir, 1e-4), model_dir=model_dir)
    rig = ElasticRig(root, model_dir, trainer)
    try:
        yield rig
    finally:
        await trainer.close()
        await asyncio.gather(*(child.stop(10.0) for child in rig.helpers.values()))


def moved_apart(start: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> float:
    """norm(D - D') / norm(D) of two changes from the same start."""
    return float((one - other).norm() / (one - start).norm())
