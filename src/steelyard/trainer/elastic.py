"""The trainer's helpers: hybrid workers that compute units of its steps, come at any time and go at any time.

::

    consumes      steps that are open, the weights between two optimizer steps
    waits for     each helper's answer, with a deadline
    unblocked by  a new version (weights go out), an open step (units go out)
    produces      gradient sums, delivered whole or not at all

Each helper has a task of its own: it sends the weights, compares the digest of what then stands in the helper's memory,
and then asks for units until the step is complete. A helper that fails, answers too late or proves other weights is
dropped, and what it had is leased again. Nobody ever waits for a helper: the core can compute every unit itself.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from steelyard.clock import Clock
from steelyard.errors import IntegrityError, Refused, SteelyardError
from steelyard.processes.supervision import end_all
from steelyard.trainer.elastic_records import (
    ComputeRequest,
    ProveRequest,
    Pulled,
    PullRequest,
    UnitDone,
    WeightProof,
    WeightSlices,
)
from steelyard.trainer.elastic_step import ElasticStep
from steelyard.trainer.elastic_worker import loss_of
from steelyard.trainer.records import ElasticSettings, LossSettings
from steelyard.trainer.slice_plan import plan_chunks
from steelyard.trainer.slices import read_slices, tensors_digest, write_slices
from steelyard.trainer.units import StepUnits

logger = logging.getLogger(__name__)


class Helper(Protocol):
    """A worker as the trainer sees it, however its bytes travel.

    Each call fails with a ``SteelyardError`` after ``deadline_s`` seconds, and when the worker dies.
    """

    @property
    def name(self) -> str:
        """Unlike that of any other helper."""
        ...

    async def put_weights(self, request: WeightSlices, deadline_s: float) -> None:
        """See :meth:`steelyard.trainer.elastic_worker.ElasticWorker.put_weights`."""
        ...

    async def prove(self, request: ProveRequest, deadline_s: float) -> WeightProof:
        """See :meth:`steelyard.trainer.elastic_worker.ElasticWorker.prove`."""
        ...

    async def compute(self, request: ComputeRequest, deadline_s: float) -> UnitDone:
        """See :meth:`steelyard.trainer.elastic_worker.ElasticWorker.compute`."""
        ...

    async def pull(self, request: PullRequest, deadline_s: float) -> Pulled:
        """See :meth:`steelyard.trainer.elastic_worker.ElasticWorker.pull`."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


class Weights:
    """The weights of one version while nobody changes them, by name."""

    def __init__(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version = version
        self.tensors = tensors
        self._digesting: asyncio.Task[str] | None = None

    async def digest(self) -> str:
        """Their digest, computed once, when it is first asked for."""
        if self._digesting is None:
            self._digesting = asyncio.create_task(asyncio.to_thread(tensors_digest, self.tensors), name="digest")
        return await asyncio.shield(self._digesting)


class Helpers:
    """All helpers of one trainer. Lives on the event loop.

    Args:
        on_ready: called with a helper's name and version when it has proven its weights.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        loss: LossSettings,
        clock: Clock,
        on_ready: Callable[[str, int], None] = lambda _name, _version: None,
    ) -> None:
        self._settings = settings
        self._loss = loss
        self._clock = clock
        self._on_ready = on_ready
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._versions: dict[str, int | None] = {}
        self._weights: Weights | None = None
        self._step: ElasticStep | None = None
        self._weights_changed = asyncio.Event()
        self._step_changed = asyncio.Event()
        self.num_dropped = 0

    @property
    def versions(self) -> dict[str, int | None]:
        """Who helps, and with the weights of which version; None while it loads."""
        return dict(self._versions)

    def attach(self, helper: Helper) -> None:
        """Let a worker help from now on. Returns at once; the worker helps when it has loaded.

        Raises:
            Refused: a helper of this name is here (``double``).
        """
        if helper.name in self._tasks:
            raise Refused("double", f"helper {helper.name} is here already")
        self._versions[helper.name] = None
        self._tasks[helper.name] = asyncio.create_task(self._serve(helper), name=f"helper {helper.name}")

    async def detach(self, name: str) -> None:
        """Let a helper go; what it computes is leased again.

        Raises:
            Refused: there is none of this name (``unknown``).
        """
        task = self._tasks.get(name)
        if task is None:
            raise Refused("unknown", f"there is no helper {name}")
        await end_all((task,))

    def open_step(self, step: StepUnits) -> ElasticStep:
        """Give out the units of a step."""
        self._step = ElasticStep(step, self._settings, self._clock)
        self._step_changed = _notify(self._step_changed)
        return self._step

    def use_weights(self, weights: Weights) -> None:
        """Send these weights to all helpers. They must not change until :meth:`freeze`."""
        self._weights = weights
        self._weights_changed = _notify(self._weights_changed)

    def freeze(self) -> None:
        """The step is over and the weights are about to change: from now on nobody sends them or computes at them."""
        self._step, self._weights = None, None
        self._weights_changed = _notify(self._weights_changed)

    async def close(self) -> None:
        """Let all helpers go."""
        await end_all(tuple(self._tasks.values()))

    async def _serve(self, helper: Helper) -> None:
        try:
            while True:
                working = asyncio.create_task(self._work(helper, self._weights), name=f"work of {helper.name}")
                changing = asyncio.create_task(self._weights_changed.wait(), name=f"change for {helper.name}")
                try:
                    await asyncio.wait((working, changing), return_when=asyncio.FIRST_COMPLETED)
                    if working.done():
                        working.result()
                        await changing
                finally:
                    await end_all((working, changing))
        except SteelyardError as error:
            self.num_dropped += 1
            logger.warning("helper %s is dropped: %s", helper.name, error)
        finally:
            self._forget(helper.name)
            await helper.close()

    def _forget(self, name: str) -> None:
        self._versions.pop(name, None)
        self._tasks.pop(name, None)
        if self._step is not None:
            self._step.gone(name)

    async def _work(self, helper: Helper, weights: Weights | None) -> None:
        """All that can be done for a helper with these weights; it ends by being cancelled when they change."""
        if weights is None:
            return
        if self._versions[helper.name] != weights.version:
            await self._load(helper, weights)
        while True:
            present = self._step_changed
            if self._step is not None:
                await self._compute(helper, self._step, weights)
            await present.wait()

    async def _load(self, helper: Helper, weights: Weights) -> None:
        self._versions[helper.name] = None
        sizes = {name: tensor.numel() for name, tensor in weights.tensors.items()}
        element_bytes = max(tensor.element_size() for tensor in weights.tensors.values())
        # The first waits until the helper has given up what it computed for the step before.
        deadline_s = self._settings.unit_deadline_s
        for slices in plan_chunks(sizes, element_bytes, self._settings.chunk_bytes):
            data = read_slices(weights.tensors, slices)
            await helper.put_weights(WeightSlices(version=weights.version, slices=slices, data=data), deadline_s)
            deadline_s = self._settings.pull_deadline_s
        proof = await helper.prove(ProveRequest(version=weights.version), self._settings.prove_deadline_s)
        digest = await weights.digest()
        if (proof.version, proof.digest) != (weights.version, digest):
            raise IntegrityError(
                f"helper {helper.name} must hold version {weights.version} with digest {digest}, got version "
                f"{proof.version} with {proof.digest}"
            )
        self._versions[helper.name] = weights.version
        self._on_ready(helper.name, weights.version)

    async def _compute(self, helper: Helper, step: ElasticStep, weights: Weights) -> None:
        """Compute units until the step is complete; one sum is pulled while the next is computed."""
        pulling: asyncio.Task[None] | None = None
        try:
            while (unit := await step.next_for(helper.name)) is not None:
                request = ComputeRequest(unit=unit, loss=self._loss)
                done = await helper.compute(request, self._settings.unit_deadline_s)
                if (done.step, done.unit) != (unit.step, unit.index):
                    raise IntegrityError(f"helper {helper.name} must compute unit {unit.index}, got {done.unit}")
                if pulling is not None:
                    await pulling
                pulling = asyncio.create_task(self._pull(helper, step, done, weights), name=f"pull of {helper.name}")
            if pulling is not None:
                await pulling
        finally:
            if pulling is not None:
                await end_all((pulling,))

    async def _pull(self, helper: Helper, step: ElasticStep, done: UnitDone, weights: Weights) -> None:
        unknown = set(done.names) - weights.tensors.keys()
        if unknown:
            raise IntegrityError(f"helper {helper.name}: gradients must be of parameters, got {sorted(unknown)[:4]}")
        gradients = {name: torch.empty_like(weights.tensors[name]) for name in done.names}
        sizes = {name: gradient.numel() for name, gradient in gradients.items()}
        element_bytes = max((gradient.element_size() for gradient in gradients.values()), default=1)
        for slices in plan_chunks(sizes, element_bytes, self._settings.chunk_bytes):
            request = PullRequest(step=done.step, unit=done.unit, slices=slices)
            pulled = await helper.pull(request, self._settings.pull_deadline_s)
            write_slices(gradients, slices, pulled.data)
        step.deliver(done.unit, helper.name, gradients, loss_of(done.figures))


def _notify(changed: asyncio.Event) -> asyncio.Event:
    """Wake whoever waits now; whoever waits later waits for the event that is returned."""
    changed.set()
    return asyncio.Event()
