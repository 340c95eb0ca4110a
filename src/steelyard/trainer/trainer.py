"""The trainer: holds the weights, takes optimizer steps, publishes and checkpoints. Records in, records out.

::

    consumes      TrainRequest: path and digest of a batch file that control has written
    waits for     nothing but its own arithmetic and disk, in one worker thread
    unblocked by  the next request
    produces      StepReport, Manifest, CheckpointReport

The same batches from the same checkpoint give the same bits: arithmetic runs in one thread of a fixed number of
torch threads, over micro-batches in their order, from parameters in memory of their own.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from steelyard.digests import digest_bytes
from steelyard.durable import FaultHook, no_fault, sweep_temporary
from steelyard.errors import IntegrityError, Refused
from steelyard.trainer.checkpoint import (
    CheckpointManifest,
    checkpoint_dir_name,
    prune_checkpoints,
    random_state,
    read_checkpoint,
    read_companions,
    restore,
    write_checkpoint,
)
from steelyard.trainer.mismatch import log_ratio_figures
from steelyard.trainer.model import load_model
from steelyard.trainer.optim import apply_step, learning_rate, make_optimizer
from steelyard.trainer.records import (
    CheckpointReport,
    CheckpointRequest,
    PublishRequest,
    TrainerSettings,
    TrainerState,
    TrainRequest,
)
from steelyard.trainer.step import StepSums, accumulate_gradients
from steelyard.types import Manifest, StepBatch, StepReport

Result = TypeVar("Result")


class Publisher(Protocol):
    """Makes versions visible; :class:`steelyard.weights.publisher.VersionPublisher` is one."""

    def publish(self, module: torch.nn.Module, *, version: int, step: int, parent_version: int | None) -> Manifest:
        """Publish the module's weights; repeating it with the same weights is no error."""
        ...

    def weights_digest(self, module: torch.nn.Module) -> str:
        """Digest of the weights in memory."""
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
    ) -> None:
        self._settings = settings
        self._module = module
        self._companions = read_companions(model_dir)
        self._publisher = publisher
        self._fault = fault
        self._optimizer = make_optimizer(module, settings.optimizer)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._unfinished: set[Future[Any]] = set()
        self._step = 0
        self._version = 0
        self._weights_digest = ""
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
    ) -> "Trainer":
        """Start from the policy in ``model_dir`` (step 0, version 0), or go on from ``checkpoint``.

        Raises:
            InputError: ``model_dir`` holds no decoder that can be trained.
            IntegrityError: the checkpoint is damaged.
        """
        torch.set_num_threads(settings.num_threads)
        torch.manual_seed(settings.seed)
        if checkpoint is None:
            trainer = cls(settings, load_model(model_dir), model_dir, publisher, fault)
        else:
            restored = read_checkpoint(checkpoint, checkpoint_digest)
            trainer = cls(settings, restored.module, checkpoint, publisher, fault)
            restore(restored, trainer._optimizer)
            trainer._step, trainer._version = restored.manifest.step, restored.manifest.version
            trainer._checkpoint_extra = restored.manifest.extra
        trainer._weights_digest = publisher.weights_digest(trainer._module)
        if checkpoint is not None and trainer._weights_digest != restored.manifest.weights_digest:
            raise IntegrityError(
                f"checkpoint {checkpoint.name} must load weights {restored.manifest.weights_digest}, "
                f"got {trainer._weights_digest}"
            )
        sweep_temporary(Path(settings.checkpoints_dir))
        return trainer

    async def train_step(self, request: TrainRequest) -> StepReport:
        """Take the optimizer step ``request.step``, which must be the next one.

        Raises:
            Refused: the step was taken before (``double``) or is not the next (``unknown``).
            IntegrityError: the batch file is not what was announced, or was assembled for other weights.
            RunError: the gradient is not finite; no parameter was changed.
        """
        return await self._in_thread(lambda: self._train_step(request))

    async def publish(self, request: PublishRequest) -> Manifest:
        """Publish the present weights as the version that they are.

        Raises:
            Refused: the weights held are of another version (``unknown``).
            IntegrityError: the version is already published with other weights.
            StorageFailed: the disk refused.
        """
        return await self._in_thread(lambda: self._publish(request))

    async def checkpoint(self, request: CheckpointRequest) -> CheckpointReport:
        """Write the state before ``request.step``, then delete checkpoints that are no longer kept.

        Raises:
            Refused: ``request.step`` is not the next step (``unknown``).
            IntegrityError: another checkpoint has this name.
            StorageFailed: the disk refused.
        """
        return await self._in_thread(lambda: self._checkpoint(request))

    async def state(self) -> TrainerState:
        """Where the trainer stands; answered at once, also during a step."""
        return TrainerState(
            step=self._step,
            version=self._version,
            weights_digest=self._weights_digest,
            is_busy=bool(self._unfinished),
            num_parameters=sum(parameter.numel() for parameter in self._module.parameters()),
            checkpoint_extra=self._checkpoint_extra,
        )

    async def close(self) -> None:
        """Wait for the work under way and end the worker thread."""
        await asyncio.to_thread(self._executor.shutdown)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """A caller that goes away does not stop the work, so busy is what the thread is, not what callers wait for."""
        future = self._executor.submit(work)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return await asyncio.wrap_future(future)

    def _train_step(self, request: TrainRequest) -> StepReport:
        started_s = time.perf_counter()
        self._check_next(request.step, "train_step")
        batch = read_batch(Path(request.path), request.digest)
        if (batch.step, batch.parent_version) != (self._step, self._version):
            raise IntegrityError(
                f"the batch of step {self._step} must be assembled for it at version {self._version}, got one of step "
                f"{batch.step} at version {batch.parent_version}"
            )
        rate = learning_rate(self._step, self._settings.optimizer)
        self._optimizer.zero_grad(set_to_none=False)
        sums = accumulate_gradients(self._module, batch, self._settings.loss)
        self._fault("gradients_ready")
        max_norm = self._settings.optimizer.max_grad_norm
        grad_norm = apply_step(self._module, self._optimizer, rate, max_norm, f"step {self._step}")
        self._fault("stepped")
        self._step, self._version = self._step + 1, request.version
        self._weights_digest = self._publisher.weights_digest(self._module)
        return _report(
            sums,
            step=batch.step,
            version=request.version,
            grad_norm=grad_norm,
            rate=rate,
            duration_s=time.perf_counter() - started_s,
        )

    def _publish(self, request: PublishRequest) -> Manifest:
        if request.version != self._version:
            raise Refused("unknown", f"publish: the weights held are version {self._version}, not {request.version}")
        return self._publisher.publish(
            self._module, version=request.version, step=self._step, parent_version=request.parent_version
        )

    def _checkpoint(self, request: CheckpointRequest) -> CheckpointReport:
        if request.step != self._step:
            raise Refused("unknown", f"checkpoint: the next step is {self._step}, not {request.step}")
        root = Path(self._settings.checkpoints_dir)
        final = root / checkpoint_dir_name(request.step)
        manifest = CheckpointManifest(
            step=self._step,
            version=self._version,
            weights_digest=self._weights_digest,
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
            weights_digest=self._weights_digest,
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


def _report(sums: StepSums, *, step: int, version: int, grad_norm: float, rate: float, duration_s: float) -> StepReport:
    computed = max(sums.loss.num_tokens, 1)
    return StepReport(
        step=step,
        version=version,
        loss=sums.loss.loss,
        grad_norm=grad_norm,
        kl=sums.loss.kl / computed,
        ratio_mean=sums.loss.ratio / computed,
        ratio_max=sums.loss.ratio_max,
        clip_frac=sums.loss.num_clipped / computed,
        entropy=sums.loss.entropy / computed,
        learning_rate=rate,
        num_tokens=sums.num_tokens,
        num_loss_tokens=sums.num_loss_tokens,
        num_skipped_samples=sums.num_skipped_rows,
        num_skipped_tokens=sums.num_skipped_tokens,
        duration_s=duration_s,
        mismatch=log_ratio_figures(sums.loss.current_log_ratios),
        policy_change=log_ratio_figures(sums.loss.older_log_ratios),
    )
