"""A trainer without a model: its weights are a digest of all batches before, so that a replay can be checked.

Batches, versions and checkpoints lie in the run directory as those of a real trainer do. Each life goes on from the
newest checkpoint and takes the steps behind it again; some compute other weights, and give up what they cannot repeat.
"""

import asyncio
import json
import shutil
from pathlib import Path

import msgspec

from steelyard.assembly.batch import build_step_batch, decode_step_batch, encode_step_batch
from steelyard.assembly.samples import trace_samples
from steelyard.coordinator.records import BatchPlan, PendingStep
from steelyard.coordinator.trainer_calls import RunProgress
from steelyard.coordinator.trainer_link import TrainerLink
from steelyard.digests import digest_bytes
from steelyard.durable import write_durably
from steelyard.errors import DeadlineExceeded, IllegalTransition, IntegrityError
from steelyard.run.directory import RunDirectory
from steelyard.testing.kills import acknowledged as told
from steelyard.testing.kills.rollout_programs import REPLICA, store
from steelyard.testing.run_rig import grpo_advantages, make_proof
from steelyard.traces.sealed import SealedTraces
from steelyard.types import FileDigest, Manifest, ParameterDigest, Probe, Sampling, TrainingSample
from steelyard.weights.manifest import MANIFEST_NAME, encode_manifest, file_digest, weights_digest
from steelyard.weights.shards import WEIGHTS_NAME
from steelyard.weights.stored import stored_parameters

FINISH_NAME = "finish"
"""The file in the run directory at whose sight the trainer ends the run."""

_START = b"starting policy"
_CHECKPOINT_EVERY = 2
_EVALUATE_EVERY = 4
_MICRO_BATCH_TOKENS = 4096
_WAIT_S = 60.0
_ROOM_S = 0.5


class DivergedError(Exception):
    """The replay gave other weights, which are given up now; the next life starts over."""


class TrainerProgram:
    """One life of the trainer.

    Args:
        salt: goes into the weights; another one makes a replay diverge.
    """

    def __init__(
        self, directory: RunDirectory, link: TrainerLink, notes: told.AcknowledgementFile, eval_task: str, salt: str
    ) -> None:
        self._directory = directory
        self._link = link
        self._notes = notes
        self._eval_task = eval_task
        self._salt = salt
        self._traces = SealedTraces(directory.traces)
        self._weights = _START

    async def run(self) -> None:
        """Go on from wherever the journal stands, until the run is to end.

        Raises:
            DivergedError: this life computes other weights than the one before.
        """
        progress = await self._link.progress()
        if not progress.is_finished:
            await self._catch_up(progress)
            progress = await self._link.progress()
            await self._ready_newest(progress)
            step = progress.next_step
            if step - _checkpointed(progress) >= _CHECKPOINT_EVERY:
                await self._checkpoint(step)
            while not (self._directory.path / FINISH_NAME).exists():
                await self._take_step(step)
                step += 1
            if step != _checkpointed(await self._link.progress()):
                await self._checkpoint(step)
            await self._link.finish("told to")
        self._notes.note(told.Finished())

    async def _catch_up(self, progress: RunProgress) -> None:
        start = _checkpointed(progress)
        if progress.checkpoints:
            self._weights = self._read_checkpoint(start, progress.checkpoints[-1].digest)
        if progress.newest is None:
            await self._load(await self._publish(0, None))
        for pending in await self._link.pending_steps_after(start):
            await self._replay(pending)

    async def _replay(self, pending: PendingStep) -> None:
        data = self._batch_path(pending.step).read_bytes()
        decode_step_batch(data, pending.batch_digest)
        self._step_weights(pending.batch_digest)
        if pending.published_version is None:
            await self._publish(pending.step + 1, pending.parent_version)
        elif weights_digest(_parameters(self._weights)) != pending.published_digest:
            await self._link.orphan(pending.published_version, "the replay gave other weights")
            raise DivergedError(f"step {pending.step}")

    async def _ready_newest(self, progress: RunProgress) -> None:
        newest, ready = progress.newest, progress.newest_ready
        if newest is not None and (ready is None or ready.version != newest.version):
            await self._load(newest.version)

    async def _take_step(self, step: int) -> None:
        plan, digest = await self._begin(step)
        self._notes.note(told.Begun(step=step, batch_digest=digest))
        self._step_weights(digest)
        version = await self._publish(step + 1, plan.parent_version)
        await self._load(version)
        if (step + 1) % _CHECKPOINT_EVERY == 0:
            await self._checkpoint(step + 1)
        if (step + 1) % _EVALUATE_EVERY == 0:
            await self._evaluate(version)

    async def _begin(self, step: int) -> tuple[BatchPlan, str]:
        """After a restart of the coordinator the batch that it handed out before may not be one any more."""
        while True:
            plan = await self._link.next_batch(step, _WAIT_S)
            batch = build_step_batch(step, plan.parent_version, self._samples(plan), _MICRO_BATCH_TOKENS)
            data, digest = encode_step_batch(batch)
            store(self._batch_path(step), data)
            try:
                await self._link.begin_step(
                    step=step,
                    parent_version=plan.parent_version,
                    group_ids=plan.group_ids,
                    sample_ids=tuple(f"{sample.attempt_id}/{sample.segment_index}" for sample in batch.samples),
                    batch_digest=digest,
                )
                return plan, digest
            except IllegalTransition:
                if (await self._link.progress()).next_step != step:
                    raise

    def _samples(self, plan: BatchPlan) -> list[TrainingSample]:
        advantages: dict[str, float] = {}
        for group_id in plan.group_ids:
            advantages.update(grpo_advantages([m.score for m in plan.members if m.group_id == group_id]))
        samples: list[TrainingSample] = []
        for member in plan.members:
            trace, digest = self._traces.read_now(member.attempt_id)
            if digest != member.trace.digest:
                raise IntegrityError(f"the trace of {member.attempt_id} must have digest {member.trace.digest}")
            samples.extend(trace_samples(trace, advantages[member.attempt_id]))
        return samples

    async def _publish(self, step: int, parent_version: int | None) -> int:
        await self._make_room()
        version = (await self._link.progress()).next_version
        manifest = _write_version(self._directory.version(version), version, step, parent_version, self._weights)
        await self._link.published(manifest)
        self._notes.note(told.Published(manifest=manifest))
        return version

    async def _make_room(self) -> None:
        ends_at_s = asyncio.get_running_loop().time() + _WAIT_S
        while True:
            for version in await self._link.deletable_versions():
                await self._link.version_deleted(version)
                shutil.rmtree(self._directory.version(version), ignore_errors=True)
            try:
                await self._link.wait_for_room(_ROOM_S)
                return
            except DeadlineExceeded:
                if asyncio.get_running_loop().time() > ends_at_s:
                    raise

    async def _load(self, version: int) -> None:
        path = self._directory.version(version)
        manifest = msgspec.json.decode((path / MANIFEST_NAME).read_bytes(), type=Manifest)
        await self._link.loaded(make_proof(manifest, REPLICA))
        await self._link.ready(version)

    async def _evaluate(self, version: int) -> None:
        label = f"of version {version}"
        await self._link.admit_evaluation((self._eval_task,), version=version, sampling=Sampling(seed=1), label=label)
        await self._link.evaluation_results(label, _WAIT_S)

    async def _checkpoint(self, step: int) -> None:
        digest = _write_checkpoint(self._checkpoint_path(step), self._weights)
        await self._link.checkpointed(step, digest)
        self._notes.note(told.Checkpointed(step=step, digest=digest))
        for covered in await self._link.deletable_batches():
            await self._link.batch_deleted(covered)
            self._batch_path(covered).unlink(missing_ok=True)

    def _read_checkpoint(self, step: int, digest: str) -> bytes:
        path = self._checkpoint_path(step)
        if digest_bytes((path / "checkpoint.json").read_bytes()) != digest:
            raise IntegrityError(f"the checkpoint of step {step} must have digest {digest}")
        return (path / "weights.bin").read_bytes()

    def _step_weights(self, batch_digest: str) -> None:
        self._weights = digest_bytes(self._weights + f"{batch_digest} {self._salt}".encode()).encode()

    def _batch_path(self, step: int) -> Path:
        return self._directory.batches / f"step-{step:06d}.msgpack"

    def _checkpoint_path(self, step: int) -> Path:
        return self._directory.checkpoints / f"step-{step:06d}"


def _checkpointed(progress: RunProgress) -> int:
    return progress.checkpoints[-1].step if progress.checkpoints else 0


def _parameters(weights: bytes) -> tuple[ParameterDigest, ...]:
    return (ParameterDigest(name="weights", shape=(len(weights),), dtype="uint8", digest=digest_bytes(weights)),)


def _safetensors(weights: bytes) -> bytes:
    """One tensor of bytes; see ``steelyard.weights.stored`` for the format."""
    tensor = {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}
    header = json.dumps({"weights": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + weights


def _write_version(path: Path, version: int, step: int, parent_version: int | None, weights: bytes) -> Manifest:
    """Files first, then the manifest, then the name; what a life before left under it was never published."""
    temporary = _fresh(path)
    write_durably(temporary / WEIGHTS_NAME, _safetensors(weights))
    manifest = Manifest(
        version=version,
        step=step,
        parent_version=parent_version,
        files=(file_digest(temporary / WEIGHTS_NAME),),
        parameters=stored_parameters(temporary),
        weights_digest=weights_digest(stored_parameters(temporary)),
        model_config_digest="config",
        tokenizer_digest="tokenizer",
        template_digest="template",
        dtype="uint8",
        probe=Probe(sequences=(), logprobs=(), separates_parent=True),
    )
    write_durably(temporary / MANIFEST_NAME, encode_manifest(manifest))
    temporary.rename(path)
    return manifest


def _write_checkpoint(path: Path, weights: bytes) -> str:
    temporary = _fresh(path)
    write_durably(temporary / "weights.bin", weights)
    file = FileDigest(name="weights.bin", num_bytes=len(weights), digest=digest_bytes(weights))
    data = msgspec.json.encode({"files": [file]})
    write_durably(temporary / "checkpoint.json", data)
    temporary.rename(path)
    return digest_bytes(data)


def _fresh(path: Path) -> Path:
    """A temporary folder beside ``path``, which is cleared of what was never acknowledged."""
    temporary = path.with_name(f"unfinished-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary
