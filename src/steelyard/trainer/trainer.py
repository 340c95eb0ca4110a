"""The trainer: holds the weights, takes optimizer steps, publishes and checkpoints. Records in, records out.

::

    consumes      TrainRequest: path and digest of a batch file that control has written
    waits for     its own arithmetic and disk, in one worker thread; helpers with units of the step, with deadlines
    unblocked by  the next request
    produces      StepReport, Manifest, CheckpointReport

The same batches from the same checkpoint give the same bits: a step is cut into units by its batch alone, arithmetic
runs in one thread of a fixed number of torch threads, from parameters in memory of their own, and the sums of units are
added in their order. So whoever helps, and comes or goes, the update is the same.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from steelyard.clock import Clock, SystemClock
from steelyard.digests import digest_bytes
from steelyard.durable import FaultHook, no_fault, sweep_temporary
from steelyard.errors import IntegrityError, Refused
from steelyard.trainer.checkpoint import (
    CheckpointManifest,
    checkpoint_dir_name,
    module_tensors,
    prune_checkpoints,
    random_state,
    read_checkpoint,
    read_companions,
    restore,
    write_checkpoint,
)
from steelyard.trainer.elastic import Helper, Helpers, Weights
from steelyard.trainer.elastic_step import CORE, ElasticStep
from steelyard.trainer.loss import LossSums
from steelyard.trainer.mismatch import log_ratio_figures
from steelyard.trainer.model import load_model
from steelyard.trainer.optim import apply_step, learning_rate, make_optimizer
from steelyard.trainer.records import (
    CheckpointReport,
    CheckpointRequest,
    HelperState,
    PublishRequest,
    TrainerSettings,
    TrainerState,
    TrainRequest,
)
from steelyard.trainer.step import set_gradients, unit_gradient, units_of
from steelyard.trainer.unit_sums import Gradients
from steelyard.trainer.units import LeaseUnit, StepUnits
from steelyard.types import Manifest, StepBatch, StepReport, WeightDigests

Result = TypeVar("Result")


class Publisher(Protocol):
    """Makes versions visible; :class:`steelyard.weights.publisher.VersionPublisher` is one."""

    def publish(
        self,
        module: torch.nn.Module,
        *,
        version: int,
        step: int,
        parent_version: int | None,
        digests: WeightDigests | None = None,
    ) -> Manifest:
        """Publish the module's weights, whose digests these are; repeating it with the same weights is no error."""
        ...

    def digests(self, module: torch.nn.Module) -> WeightDigests:
        """Digests of the weights in memory."""
        ...


class Trainer:
    """Made by :meth:`open`. Its methods may be called at any time; they run one after another."""

    def __init__(
        self,
        settings: TrainerSettings,
        module: torch.nn.Module,
        model_dir: Path,
        publisher: Publisher,
        fault: FaultHook,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._module = module
        self._companions = read_companions(model_dir)
        self._publisher = publisher
        self._fault = fault
        self._optimizer = make_optimizer(module, settings.optimizer)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._unfinished: set[asyncio.Task[Any]] = set()
        self._turn = asyncio.Lock()
        self._helpers = Helpers(settings.elastic, settings.loss, clock)
        self._step = 0
        self._version = 0
        self._digests = WeightDigests(weights="", parameters=())
        self._checkpoint_extra = b""

    @classmethod
    async def open(
        cls,
        settings: TrainerSettings,
        publisher: Publisher,
        *,
        model_dir: Path,
        checkpoint: Path | None = None,
        checkpoint_digest: str | None = None,
        fault: FaultHook = no_fault,
        clock: Clock | None = None,
    ) -> "Trainer":
        """Start from the policy in ``model_dir`` (step 0, version 0), or go on from ``checkpoint``.

        Raises:
            InputError: ``model_dir`` holds no decoder that can be trained.
            IntegrityError: the checkpoint is damaged.
        """
        clock = clock or SystemClock()
        torch.set_num_threads(settings.num_threads)
        torch.manual_seed(settings.seed)
        if checkpoint is None:
            trainer = cls(settings, load_model(model_dir), model_dir, publisher, fault, clock)
        else:
            restored = read_checkpoint(checkpoint, checkpoint_digest)
            trainer = cls(settings, restored.module, checkpoint, publisher, fault, clock)
            restore(restored, trainer._optimizer)
            trainer._step, trainer._version = restored.manifest.step, restored.manifest.version
            trainer._checkpoint_extra = restored.manifest.extra
        trainer._digests = publisher.digests(trainer._module)
        if checkpoint is not None and trainer._digests.weights != restored.manifest.weights_digest:
            raise IntegrityError(
                f"checkpoint {checkpoint.name} must load weights {restored.manifest.weights_digest}, "
                f"got {trainer._digests.weights}"
            )
        sweep_temporary(Path(settings.checkpoints_dir))
        trainer._show_weights()
        return trainer

    async def attach(self, helper: Helper) -> None:
        """Let a worker help with units of steps from now on. Returns at once; see :class:`Helpers`.

        Raises:
            Refused: a helper of this name is here (``double``).
        """
        self._helpers.attach(helper)

    async def detach(self, name: str) -> None:
        """Let a helper go; what it has not delivered is computed by others.

        Raises:
            Refused: there is none of this name (``unknown``).
        """
        await self._helpers.detach(name)

    async def train_step(self, request: TrainRequest) -> StepReport:
        """Take the optimizer step ``request.step``, which must be the next one.

        Raises:
            Refused: the step was taken before (``double``) or is not the next (``unknown``).
            IntegrityError: the batch file is not what was announced, or was assembled for other weights.
            RunError: the gradient is not finite; no parameter was changed.
        """
        return await self._in_turn(self._train_step(request))

    async def publish(self, request: PublishRequest) -> Manifest:
        """Publish the present weights as the version that they are.

        Raises:
            Refused: the weights held are of another version (``unknown``).
            IntegrityError: the version is already published with other weights.
            StorageFailed: the disk refused.
        """
        return await self._in_turn(self._in_thread(lambda: self._publish(request)))

    async def checkpoint(self, request: CheckpointRequest) -> CheckpointReport:
        """Write the state before ``request.step``, then delete checkpoints that are no longer kept.

        Raises:
            Refused: ``request.step`` is not the next step (``unknown``).
            IntegrityError: another checkpoint has this name.
            StorageFailed: the disk refused.
        """
        return await self._in_turn(self._in_thread(lambda: self._checkpoint(request)))

    async def state(self) -> TrainerState:
        """Where the trainer stands; answered at once, also during a step."""
        return TrainerState(
            step=self._step,
            version=self._version,
            weights_digest=self._digests.weights,
            is_busy=bool(self._unfinished),
            num_parameters=sum(parameter.numel() for parameter in self._module.parameters()),
            checkpoint_extra=self._checkpoint_extra,
            helpers=tuple(HelperState(name=name, version=at) for name, at in self._helpers.versions.items()),
        )

    async def close(self) -> None:
        """Wait for the work under way, let helpers go, and end the worker thread."""
        while self._unfinished:
            await asyncio.wait(self._unfinished)
        await self._helpers.close()
        await asyncio.to_thread(self._executor.shutdown)

    async def _in_turn(self, work: Coroutine[Any, Any, Result]) -> Result:
        """One after another, in the order of the calls. A caller that goes away does not stop the work."""
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        async def in_turn() -> Result:
            async with self._turn:
                return await work

        task = asyncio.create_task(in_turn(), name="work of the trainer")
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return task

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _train_step(self, request: TrainRequest) -> StepReport:
        started_s = time.perf_counter()
        units = await self._in_thread(lambda: self._read_units(request))
        step = self._helpers.open_step(units)
        try:
            await self._compute_units(step)
            # They are about to change.
            self._helpers.freeze()
            rate = learning_rate(self._step, self._settings.optimizer)
            grad_norm, loss = await self._in_thread(lambda: self._update(step, rate))
            self._step, self._version = self._step + 1, request.version
            self._digests = await self._in_thread(lambda: self._publisher.digests(self._module))
        finally:
            self._helpers.freeze()
            self._show_weights()
        return _report(
            units,
            loss,
            step=request.step,
            version=request.version,
            grad_norm=grad_norm,
            rate=rate,
            duration_s=time.perf_counter() - started_s,
            num_elsewhere=step.num_elsewhere,
            num_leased_again=step.table.num_leased_again,
        )

    def _read_units(self, request: TrainRequest) -> StepUnits:
        self._check_next(request.step, "train_step")
        batch = read_batch(Path(request.path), request.digest)
        if (batch.step, batch.parent_version) != (self._step, self._version):
            raise IntegrityError(
                f"the batch of step {self._step} must be assembled for it at version {self._version}, got one of step "
                f"{batch.step} at version {batch.parent_version}"
            )
        return units_of(batch, self._settings.loss, self._settings.seed)

    async def _compute_units(self, step: ElasticStep) -> None:
        """Compute units here until all are delivered, by whomever."""
        while not step.table.is_complete:
            unit = step.lease(CORE)
            if unit is None:
                await step.wait()
                await self._in_thread(step.advance)
            else:
                gradients, loss = await self._in_thread(functools.partial(self._compute_unit, step, unit))
                step.deliver(unit.index, CORE, gradients, loss)
            step.advanced()

    def _compute_unit(self, step: ElasticStep, unit: LeaseUnit) -> tuple[Gradients, LossSums]:
        step.advance()
        return unit_gradient(self._module, unit, self._settings.loss)

    def _update(self, step: ElasticStep, rate: float) -> tuple[float, LossSums]:
        gradients, loss = step.finish()
        set_gradients(self._module, gradients)
        self._fault("gradients_ready")
        max_norm = self._settings.optimizer.max_grad_norm
        grad_norm = apply_step(self._module, self._optimizer, rate, max_norm, f"step {self._step}")
        self._fault("stepped")
        return grad_norm, loss

    def _show_weights(self) -> None:
        """Helpers may have the weights: they stay as they are until the next step ends."""
        tensors = {name: tensor.detach() for name, tensor in module_tensors(self._module).items()}
        self._helpers.use_weights(Weights(self._version, tensors))

    def _publish(self, request: PublishRequest) -> Manifest:
        if request.version != self._version:
            raise Refused("unknown", f"publish: the weights held are version {self._version}, not {request.version}")
        return self._publisher.publish(
            self._module,
            version=request.version,
            step=self._step,
            parent_version=request.parent_version,
            digests=self._digests,
        )

    def _checkpoint(self, request: CheckpointRequest) -> CheckpointReport:
        if request.step != self._step:
            raise Refused("unknown", f"checkpoint: the next step is {self._step}, not {request.step}")
        root = Path(self._settings.checkpoints_dir)
        final = root / checkpoint_dir_name(request.step)
        manifest = CheckpointManifest(
            step=self._step,
            version=self._version,
            weights_digest=self._digests.weights,
            random_state=random_state(),
            extra=request.extra,
            files=(),
        )
        digest = write_checkpoint(
            final, self._module, self._optimizer, companions=self._companions, state=manifest, fault=self._fault
        )
        prune_checkpoints(root, self._settings.keep_checkpoints)
        return CheckpointReport(
            step=self._step,
            version=self._version,
            path=str(final),
            digest=digest,
            weights_digest=self._digests.weights,
        )

    def _check_next(self, step: int, method: str) -> None:
        if step != self._step:
            reason = "double" if step < self._step else "unknown"
            raise Refused(reason, f"{method}: the next step is {self._step}, not {step}")


def read_batch(path: Path, digest: str) -> StepBatch:
    """A step batch from its file.

    Raises:
        IntegrityError: the file is missing, has another digest, or holds no batch.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"the batch file {path} must be readable: {error}") from error
    if digest_bytes(data) != digest:
        raise IntegrityError(f"the batch file {path} must have digest {digest}, got {digest_bytes(data)}")
    try:
        return msgspec.msgpack.decode(data, type=StepBatch)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"the batch file {path} must hold a StepBatch: {error}") from error


def _report(
    units: StepUnits,
    loss: LossSums,
    *,
    step: int,
    version: int,
    grad_norm: float,
    rate: float,
    duration_s: float,
    num_elsewhere: int,
    num_leased_again: int,
) -> StepReport:
    computed = max(loss.num_tokens, 1)
    return StepReport(
        step=step,
        version=version,
        loss=loss.loss,
        grad_norm=grad_norm,
        kl=loss.kl / computed,
        ratio_mean=loss.ratio / computed,
        ratio_max=loss.ratio_max,
        clip_frac=loss.num_clipped / computed,
        entropy=loss.entropy / computed,
        learning_rate=rate,
        num_tokens=units.num_tokens,
        num_loss_tokens=units.num_loss_tokens,
        num_skipped_samples=units.num_skipped_rows,
        num_skipped_tokens=units.num_skipped_tokens,
        duration_s=duration_s,
        num_units=len(units.units),
        num_units_elsewhere=num_elsewhere,
        num_units_leased_again=num_leased_again,
        mismatch=log_ratio_figures(loss.current_log_ratios),
        policy_change=log_ratio_figures(loss.older_log_ratios),
    )
