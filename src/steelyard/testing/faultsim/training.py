"""The trainer as a process: real batches, weights that are names, and a real replay after each of its deaths."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from steelyard.assembly.batch import build_step_batch, encode_step_batch
from steelyard.assembly.samples import trace_samples
from steelyard.coordinator.records import BatchPlan, PendingStep
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError, RunError
from steelyard.testing.faultsim.control import CONTROL, TrainerState
from steelyard.testing.faultsim.network import Caller, Network
from steelyard.testing.faultsim.processes import Life
from steelyard.testing.faultsim.stores import RunStores
from steelyard.testing.faultsim.witness import Witness
from steelyard.testing.faultsim.workers import GIVE_UP_S, RETRY_S
from steelyard.testing.run_rig import grpo_advantages, make_manifest, make_proof
from steelyard.types import Manifest, StepBatch, Trace, TrainingSample

_BATCH_WAIT_S = 20.0
_CHECKPOINT_EVERY = 2
_EVALUATED = ("task-0001", "task-0002")
_MICRO_BATCH_TOKENS = 4096

Build = Callable[[int, int, Sequence[TrainingSample]], StepBatch]
"""Makes the batch of a step, computed at a version, from samples."""


def build_batch(step: int, version: int, samples: Sequence[TrainingSample]) -> StepBatch:
    """By the real assembly."""
    return build_step_batch(step, version, samples, _MICRO_BATCH_TOKENS)


class TrainerProgram:
    """What runs in the trainer process.

    Args:
        diverge_frac: the fraction of lives that compute other weights than the ones before.
        build: makes a batch of samples; ``build_step_batch`` but for mutations.
    """

    def __init__(
        self,
        network: Network,
        stores: RunStores,
        witness: Witness,
        draw: random.Random,
        *,
        max_steps: int,
        diverge_frac: float,
        build: Build,
    ) -> None:
        self._diverge_frac = diverge_frac
        self._build = build
        self.finished = asyncio.Event()
        self._network = network
        self._stores = stores
        self._witness = witness
        self._draw = draw
        self._max_steps = max_steps

    async def __call__(self, life: Life) -> None:
        """One life: replay, train the steps that are left, finish the run."""
        caller = Caller(life, self._network, CONTROL, retry_s=RETRY_S, give_up_s=GIVE_UP_S)
        salt = f"of life {life.number}" if self._draw.random() < self._diverge_frac else ""
        await _Trainer(caller, self._stores, self._witness, self._draw, salt, self._max_steps, self._build).run()
        self.finished.set()
        await asyncio.Event().wait()  # ended with the world


class _Trainer:
    def __init__(
        self,
        caller: Caller,
        stores: RunStores,
        witness: Witness,
        draw: random.Random,
        salt: str,
        max_steps: int,
        build: Build,
    ) -> None:
        self._build = build
        self._call = caller.call
        self._stores = stores
        self._witness = witness
        self._draw = draw
        self._salt = salt
        self._max_steps = max_steps

    async def run(self) -> None:
        state: TrainerState = await self._call("trainer_state", (), TrainerState)
        if state.is_finished:
            return
        if 0 not in state.published:
            await self._publish(0, None)
        for pending in state.pending:
            await self._replay(pending)
        state = await self._call("trainer_state", (), TrainerState)
        for step, version in sorted(state.published.items()):
            if step > state.ready_step:
                await self._load(version)
        await self._make_up_checkpoint(state)
        for step in range(state.next_step, self._max_steps):
            await self._take_step(step)
        await self._evaluate()
        await self._call("finish", ("all steps are done",))

    async def _evaluate(self) -> None:
        state: TrainerState = await self._call("trainer_state", (), TrainerState)
        version = state.published[state.ready_step]
        arguments = (_EVALUATED, version, f"final of version {version}", _BATCH_WAIT_S)
        num_results: int = await self._call("evaluate", arguments, int, wait_s=_BATCH_WAIT_S)
        if num_results != len(_EVALUATED):
            raise IntegrityError(f"{len(_EVALUATED)} tasks must be evaluated, got {num_results} results")

    async def _take_step(self, step: int) -> None:
        plan: BatchPlan = await self._call("next_batch", (step, _BATCH_WAIT_S), BatchPlan, wait_s=_BATCH_WAIT_S)
        batch = self._assemble(plan)
        data, digest = encode_step_batch(batch)
        await self._stores.batches.put(step, data)
        sample_ids = tuple(f"{sample.attempt_id}/{sample.segment_index}" for sample in batch.samples)
        await self._call("begin_step", (plan, sample_ids, digest))
        self._witness.begun(step, digest)
        await asyncio.sleep(self._draw.expovariate(1.0))
        await self._load(await self._publish(step + 1, plan.parent_version))
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == self._max_steps:
            await self._checkpoint(step + 1)

    async def _replay(self, pending: PendingStep) -> None:
        """Take a step again from its stored batch; other weights than those published orphan these.

        Raises:
            RunError: they did; the next life starts over.
        """
        digest = digest_bytes(self._stores.batches.read(pending.step))
        if digest != pending.batch_digest:
            raise IntegrityError(f"the batch of step {pending.step} must be {pending.batch_digest}, is {digest}")
        await asyncio.sleep(self._draw.expovariate(1.0))
        if pending.published_version is None:
            await self._publish(pending.step + 1, pending.parent_version)
            return
        weights = make_manifest(0, pending.step + 1, None, self._salt).weights_digest
        if weights != pending.published_digest:
            await self._call("orphan", (pending.published_version, "the replay gave other weights"), Any)
            raise RunError(f"the replay of step {pending.step} diverged")

    def _assemble(self, plan: BatchPlan) -> StepBatch:
        advantages: dict[str, float] = {}
        for group_id in plan.group_ids:
            advantages.update(grpo_advantages([m.score for m in plan.members if m.group_id == group_id]))
        samples: list[TrainingSample] = []
        for member in plan.members:
            data = self._stores.sealed.read(member.attempt_id)
            if digest_bytes(data) != member.trace.digest:
                raise IntegrityError(f"the trace of {member.attempt_id} must have digest {member.trace.digest}")
            samples.extend(trace_samples(msgspec.msgpack.decode(data, type=Trace), advantages[member.attempt_id]))
        return self._build(plan.step, plan.parent_version, samples)

    async def _publish(self, step: int, parent_version: int | None) -> int:
        version: int = await self._call("next_version", (), int)
        manifest = make_manifest(version, step, parent_version, self._salt if step else "")
        await self._stores.versions.put(version, msgspec.msgpack.encode(manifest))
        await self._call("published", (manifest,))
        self._witness.published(manifest)
        return version

    async def _load(self, version: int) -> None:
        manifest = msgspec.msgpack.decode(self._stores.versions.read(version), type=Manifest)
        await asyncio.sleep(self._draw.expovariate(4.0))
        await self._call("loaded", (make_proof(manifest),))
        await self._call("ready", (version,))

    async def _checkpoint(self, step: int) -> None:
        data = f"checkpoint {step}".encode()
        await self._stores.checkpoints.put(step, data)
        await self._call("checkpointed", (step, digest_bytes(data)))
        self._witness.checkpointed(step, digest_bytes(data))
        for covered in await self._call("deletable_batches", (), tuple[int, ...]):
            await self._call("batch_deleted", (covered,))
            self._stores.batches.delete(covered)

    async def _make_up_checkpoint(self, state: TrainerState) -> None:
        is_last = state.next_step == self._max_steps
        if state.next_step - state.checkpoint_step >= _CHECKPOINT_EVERY or (is_last and state.pending):
            await self._checkpoint(state.next_step)
