"""The children of a run: trainer, replicas, scorers; started together, watched, ended together."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from steelyard.clock import Clock
from steelyard.config import Config
from steelyard.errors import ProcessDied, RunError
from steelyard.inference.client import ClientDeadlines, EngineClient
from steelyard.processes.channel import Client
from steelyard.processes.child import ChildProcess
from steelyard.processes.faults import FaultPlan
from steelyard.processes.supervision import end_all
from steelyard.run.children import ChildOptions, start_child
from steelyard.run.directory import RunDirectory
from steelyard.run.recovery import StartingPoint
from steelyard.run.replica_options import ReplicaOptions
from steelyard.run.scorer_process import ScorerOptions
from steelyard.run.tolerances import probe_tolerance
from steelyard.run.trainer_options import TrainerOptions
from steelyard.run.vllm_options import VllmReplicaOptions
from steelyard.scoring.process import ChildGrader
from steelyard.trainer.client import TrainerClient
from steelyard.trainer.records import LossSettings, OptimizerSettings, TrainerSettings

TRAINER = "trainer"


class _Common(TypedDict):
    """Arguments that the options of all children share."""

    name: str
    socket_path: str
    parent_pid: int
    core: int | None
    fault: FaultPlan | None


@dataclass
class Running:
    """A child with its connection."""

    child: ChildProcess
    client: Client

    async def stop(self, deadline_s: float) -> None:
        """End it and its connection."""
        await self.child.stop(deadline_s)
        await self.client.close()


@dataclass
class Children:
    """Starts the processes of one run and ends them.

    Args:
        sockets: a short path for sockets and options files; gone with the run.
        fault: which process is to die where, in a rehearsal.
    """

    config: Config
    directory: RunDirectory
    sockets: Path
    clock: Clock
    fault: FaultPlan | None = None
    _running: dict[str, Running] = field(default_factory=dict)
    _model_dirs: dict[str, Path] = field(default_factory=dict)
    _num_started: int = 0

    async def start_trainer(self, model_dir: Path, start: StartingPoint) -> TrainerClient:
        """A trainer at ``start``; takes the place of an earlier one.

        Raises:
            ProcessDied, DeadlineExceeded: it does not come up.
        """
        config = self.config
        settings = TrainerSettings(
            checkpoints_dir=str(self.directory.checkpoints),
            loss=LossSettings(
                clip_low=config.algorithm.clip_low,
                clip_high=config.algorithm.clip_high,
                kl_coef=config.algorithm.kl_coef,
                entropy_coef=config.algorithm.entropy_coef,
            ),
            optimizer=OptimizerSettings(
                learning_rate=config.train.learning_rate,
                warmup_steps=config.train.warmup_steps,
                decay_steps=config.train.max_steps,
                final_rate_frac=config.train.final_rate_frac,
                weight_decay=config.train.weight_decay,
                beta1=config.train.beta1,
                beta2=config.train.beta2,
                max_grad_norm=config.train.max_grad_norm,
            ),
            keep_checkpoints=config.train.keep_checkpoints,
            seed=config.run.seed,
        )
        options = TrainerOptions(
            **self._common(TRAINER, core=config.resources.rollout_gpus),
            settings=settings,
            model_dir=str(model_dir),
            weights_dir=str(self.directory.weights),
            probe_tolerance=probe_tolerance(config),
            weights_dtype=config.weights.dtype,
            max_shard_bytes=config.weights.max_shard_bytes,
            checkpoint=start.checkpoint,
            checkpoint_digest=start.digest,
        )
        await self._end(TRAINER)
        running = await self._start("steelyard.run.trainer_process", options)
        return TrainerClient(running.client, config.train.step_deadline_s)

    async def restart_replica(self, name: str) -> EngineClient:
        """End what is left of a replica and start it anew.

        Raises:
            ProcessDied, DeadlineExceeded: it does not come up.
        """
        await self._end(name)
        # The directory that it was started from first may have been deleted with its version.
        model_dir = self.directory.first_version() or self._model_dirs[name]
        return await self.start_replica(int(name.removeprefix("replica-")), model_dir)

    async def start_replica(self, index: int, model_dir: Path) -> EngineClient:
        """The engine of rollout device ``index``. ``model_dir``: any directory of the policy's architecture.

        Raises:
            ProcessDied, DeadlineExceeded: it does not come up.
        """
        self._model_dirs[f"replica-{index}"] = model_dir
        config = self.config
        if config.inference.engine == "vllm":
            running = await self._start(
                "steelyard.run.vllm_replica_process",
                self._vllm_options(index, model_dir),
                start_deadline_s=config.inference.vllm.start_deadline_s,
            )
        else:
            running = await self._start("steelyard.run.replica_process", self._local_options(index))
        return EngineClient(running.client, self.clock, ClientDeadlines(load_s=config.weights.load_deadline_s))

    def _local_options(self, index: int) -> ReplicaOptions:
        config = self.config
        return ReplicaOptions(
            **self._common(f"replica-{index}", core=index),
            max_running=config.inference.max_running,
            row_tokens=config.model.max_context_tokens,
            kv_tokens=config.inference.kv_tokens,
            prefill_chunk_tokens=config.inference.prefill_chunk_tokens,
            max_versions=config.admission.max_policy_lag + 2,
            probe_tolerance=probe_tolerance(config),
        )

    def _vllm_options(self, index: int, model_dir: Path) -> VllmReplicaOptions:
        config, vllm = self.config, self.config.inference.vllm
        return VllmReplicaOptions(
            **self._common(f"replica-{index}", core=index),
            python=str(Path(vllm.python).absolute()),
            url=vllm.url,
            model_dir=str(model_dir.absolute()),
            dtype=config.weights.dtype,
            log_path=str(self.directory.process_logs / f"replica-{index}.vllm.log"),
            max_model_len=config.model.max_context_tokens,
            max_running=config.inference.max_running,
            kv_cache_bytes=vllm.kv_cache_bytes,
            extra_args=vllm.extra_args,
            probe_tolerance=probe_tolerance(config),
            start_deadline_s=vllm.start_deadline_s,
            load_deadline_s=config.weights.load_deadline_s,
            stop_deadline_s=config.runtime.stop_deadline_s,
        )

    async def start_scorer(self, name: str) -> ChildGrader:
        """A grader process for the pool, which watches and kills it itself."""
        config = self.config
        options = ScorerOptions(
            **self._common(name, core=None),
            environment=config.environment.kind,
            environment_options=config.environment.options,
            sandbox=config.sandbox,
            registry_dir=str(self.directory.sandboxes / name),
        )
        child = await start_child("steelyard.run.scorer_process", options, log_folder=self.directory.process_logs)
        return await ChildGrader.start(child, Path(options.socket_path), config.runtime.start_deadline_s)

    def process_of(self, name: str) -> Running | None:
        """The present process of a child; None where it was ended."""
        return self._running.get(name)

    async def death_of(self, name: str) -> ProcessDied:
        """Wait until the present process of a child has ended, asked to or not; its calls have failed then.

        Raises:
            RunError: there is none.
        """
        running = self._running.get(name)
        if running is None:
            raise RunError(f"process {name} must be running to be watched, it was ended")
        try:
            await running.child.watch(running.client)
        except ProcessDied as death:
            return death

    async def find_death(self, within_s: float) -> ProcessDied | None:
        """The death of a child that ended by itself, or does so within ``within_s`` seconds."""
        watches = [asyncio.create_task(self.death_of(name)) for name in self._running]
        try:
            done, _ = await asyncio.wait(watches, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            return next((task.result() for task in done), None)
        finally:
            await end_all(watches)

    async def stop(self) -> None:
        """End all children, at once."""
        await asyncio.gather(*(self._end(name) for name in tuple(self._running)))

    async def _start(self, module: str, options: ChildOptions, start_deadline_s: float | None = None) -> Running:
        deadline_s = self.config.runtime.start_deadline_s if start_deadline_s is None else start_deadline_s
        child = await start_child(module, options, log_folder=self.directory.process_logs)
        try:
            client = await child.connect(Path(options.socket_path), deadline_s)
        except BaseException:
            await child.stop(self.config.runtime.stop_deadline_s)
            raise
        self._running[options.name] = Running(child, client)
        return self._running[options.name]

    async def _end(self, name: str) -> None:
        running = self._running.pop(name, None)
        if running is not None:
            await running.stop(self.config.runtime.stop_deadline_s)

    def _common(self, name: str, *, core: int | None) -> _Common:
        """Each start gets a socket of its own, so that nobody connects to a process that is going away.

        A fault is for one process: the next of its name has the plan that follows, or none.
        """
        self._num_started += 1
        fault = self.fault
        if fault is not None and fault.process == name:
            self.fault = fault.then
        return {
            "name": name,
            "socket_path": str(self.sockets / f"{name}-{self._num_started}.sock"),
            "parent_pid": os.getpid(),
            "core": core,
            "fault": fault,
        }


@asynccontextmanager
async def stopping(children: Children) -> AsyncIterator[Children]:
    """End all children when the block ends, however it ends."""
    try:
        yield children
    finally:
        await children.stop()
