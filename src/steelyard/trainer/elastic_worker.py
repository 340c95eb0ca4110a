"""A worker that computes gradient sums for a trainer elsewhere: holds one version, computes one unit at a time.

::

    consumes      WeightSlices, ComputeRequest, PullRequest
    waits for     nothing but its own arithmetic, in one thread
    unblocked by  the next request
    produces      WeightProof, UnitDone, Pulled

It decides nothing. Weights that are being replaced serve no unit: from the first slice of a version until all of them
stand in memory it holds no version at all.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from steelyard.errors import Refused
from steelyard.processes.channel import FaultHook, Server, no_fault
from steelyard.trainer.checkpoint import module_tensors
from steelyard.trainer.elastic_records import (
    COMPUTE,
    PROVE,
    PULL,
    PUT_WEIGHTS,
    ComputeRequest,
    Nothing,
    ProveRequest,
    Pulled,
    PullRequest,
    UnitDone,
    UnitFigures,
    WeightProof,
    WeightSlices,
)
from steelyard.trainer.loss import LossSums
from steelyard.trainer.model import load_model
from steelyard.trainer.slices import read_slices, tensors_digest, write_slices
from steelyard.trainer.step import unit_gradient
from steelyard.trainer.unit_sums import Gradients

Result = TypeVar("Result")

_NUM_KEPT = 2
"""Sums that are kept: one is pulled while the next is computed."""


class ElasticWorker:
    """Made by :meth:`open`. Its methods may be called at any time."""

    def __init__(self, module: torch.nn.Module, fault: FaultHook = no_fault) -> None:
        self._module = module
        self._tensors = module_tensors(module)
        self._fault = fault
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastic")
        self._loading: int | None = None
        self._version: int | None = None
        self._sums: dict[tuple[int, int], Gradients] = {}

    @classmethod
    async def open(cls, model_dir: Path, num_threads: int, fault: FaultHook = no_fault) -> "ElasticWorker":
        """A worker for policies of the architecture in ``model_dir``; its weights come from the trainer.

        Raises:
            InputError: ``model_dir`` holds no decoder that can be trained.
        """
        torch.set_num_threads(num_threads)
        return cls(load_model(model_dir), fault)

    async def put_weights(self, request: WeightSlices) -> Nothing:
        """Put part of a version into memory.

        Raises:
            IntegrityError: the slices do not fit the model.
        """
        await self._in_thread(lambda _stop: self._put(request))
        return Nothing()

    async def prove(self, request: ProveRequest) -> WeightProof:
        """Digest what stands in memory; the worker holds ``request.version`` from now on.

        Raises:
            Refused: other weights were sent last (``unknown``).
        """
        return await self._in_thread(lambda _stop: self._prove(request))

    async def compute(self, request: ComputeRequest) -> UnitDone:
        """Compute the gradient sum of a unit; it can be pulled until two later ones are computed.

        Raises:
            Refused: the version held is another (``unknown``).
            IntegrityError: a micro-batch is malformed.
        """
        return await self._in_thread(lambda stop: self._compute(request, stop))

    async def pull(self, request: PullRequest) -> Pulled:
        """Slices of a sum.

        Raises:
            Refused: there is no such sum (``unknown``).
            IntegrityError: the sum has no such slice.
        """
        gradients = self._sums.get((request.step, request.unit))
        if gradients is None:
            raise Refused("unknown", f"pull: there is no sum of unit {request.unit} of step {request.step}")
        return Pulled(data=read_slices(gradients, request.slices))

    async def close(self) -> None:
        """Wait for the work under way and end the thread."""
        await asyncio.to_thread(self._executor.shutdown)

    async def _in_thread(self, work: Callable[[threading.Event], Result]) -> Result:
        """A caller that goes away stops the work at the next micro-batch; what comes next waits for that."""
        stop = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, stop)
        finally:
            stop.set()

    def _put(self, request: WeightSlices) -> None:
        self._version, self._loading = None, request.version
        self._sums.clear()
        write_slices(self._tensors, request.slices, request.data)

    def _prove(self, request: ProveRequest) -> WeightProof:
        if request.version != self._loading:
            raise Refused("unknown", f"prove: the weights sent last are of version {self._loading}")
        self._version = request.version
        return WeightProof(version=request.version, digest=tensors_digest(self._tensors))

    def _compute(self, request: ComputeRequest, stop: threading.Event) -> UnitDone:
        unit = request.unit
        if unit.parent_version != self._version:
            raise Refused("unknown", f"compute: the version held is {self._version}, not {unit.parent_version}")

        def on_micro_batch() -> None:
            if stop.is_set():
                raise Refused("expired", f"unit {unit.index} of step {unit.step} is not wanted any more")
            self._fault("micro_batch")

        gradients, loss = unit_gradient(self._module, unit, request.loss, on_micro_batch)
        while len(self._sums) >= _NUM_KEPT:
            self._sums.pop(next(iter(self._sums)))
        self._sums[unit.step, unit.index] = {name: gradient.contiguous() for name, gradient in gradients.items()}
        return UnitDone(step=unit.step, unit=unit.index, names=tuple(gradients), figures=figures_of(loss))


def figures_of(loss: LossSums) -> UnitFigures:
    """The sums as a record."""
    return UnitFigures(
        num_tokens=loss.num_tokens,
        loss=loss.loss,
        kl=loss.kl,
        ratio=loss.ratio,
        ratio_max=loss.ratio_max,
        num_clipped=loss.num_clipped,
        entropy=loss.entropy,
        current_log_ratios=_floats(loss.current_log_ratios),
        older_log_ratios=_floats(loss.older_log_ratios),
    )


def loss_of(figures: UnitFigures) -> LossSums:
    """The sums that :func:`figures_of` made a record of."""
    return LossSums(
        num_tokens=figures.num_tokens,
        loss=figures.loss,
        kl=figures.kl,
        ratio=figures.ratio,
        ratio_max=figures.ratio_max,
        num_clipped=figures.num_clipped,
        entropy=figures.entropy,
        current_log_ratios=[torch.from_numpy(np.frombuffer(figures.current_log_ratios, dtype="<f4").copy())],
        older_log_ratios=[torch.from_numpy(np.frombuffer(figures.older_log_ratios, dtype="<f4").copy())],
    )


async def serve_elastic_worker(worker: ElasticWorker, socket_path: Path, fault: FaultHook = no_fault) -> Server:
    """Start answering a trainer; returns the running server, which the caller closes.

    Raises:
        OSError: the socket path is taken or cannot be made.
    """
    server = Server(fault)
    server.handle(PUT_WEIGHTS, worker.put_weights)
    server.handle(PROVE, worker.prove)
    server.handle(COMPUTE, worker.compute)
    server.handle(PULL, worker.pull)
    await server.serve(socket_path)
    return server


def _floats(tensors: list[torch.Tensor]) -> bytes:
    together = torch.cat(tensors) if tensors else torch.zeros(0)
    data: bytes = together.numpy().astype("<f4").tobytes()
    return data
