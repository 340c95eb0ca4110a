"""The real stores behind ``audit``: every file is read and hashed again, nothing is trusted."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from steelyard import config_file
from steelyard.config import Config
from steelyard.coordinator.audit import AuditReport, audit
from steelyard.coordinator.audit_deep import DeepAudit
from steelyard.coordinator.audit_evidence import AdvantageFunction, AuditStores, StoredVersion
from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError
from steelyard.run.blob_reading import BlobReader, reading_blobs
from steelyard.run.directory import RunDirectory
from steelyard.run.journals import open_journal_reader
from steelyard.run.recomputing import recomputing
from steelyard.run.tolerances import token_tolerance
from steelyard.run.training import advantages_of
from steelyard.traces.ledger import read_ledger
from steelyard.traces.shared_ledger import SharedLedger
from steelyard.types import FileDigest, Score, StepBatch, Trace
from steelyard.weights.manifest import file_digest, read_manifest, weights_digest
from steelyard.weights.stored import stored_parameters

_CHECKPOINT_MANIFEST = "checkpoint.json"


def audit_run(directory: RunDirectory) -> AuditReport:
    """Check every invariant of the run in ``directory``.

    Raises:
        IntegrityError: the journal cannot be opened at all.
        StorageFailed: the store of the blobs cannot be reached, which says nothing about the run.
    """
    config = config_file.load(directory.config)
    with reading_blobs(directory, config.blobs) as blobs:
        return audit(_stores(directory, config, blobs))


def audit_run_deeply(directory: RunDirectory, *, seed: int, num_attempts: int) -> AuditReport:
    """As ``audit_run``, and run the kept weights again over ``num_attempts`` attempts of each version.

    Raises:
        IntegrityError: the journal cannot be opened at all.
        ProcessDied, DeadlineExceeded: the process that computes does not come up, or ends.
    """
    config = config_file.load(directory.config)
    with recomputing(config, directory) as recompute, reading_blobs(directory, config.blobs) as blobs:
        deep = DeepAudit(
            recompute=recompute,
            rng=random.Random(seed),
            num_attempts=num_attempts,
            tolerance=token_tolerance(config),
        )
        return audit(_stores(directory, config, blobs), deep)


def _stores(directory: RunDirectory, config: Config, blobs: BlobReader) -> AuditStores:
    return AuditStores(
        journal=open_journal_reader(config, directory),
        traces=_Traces(blobs),
        batches=_Batches(directory.batches),
        artifacts=_Artifacts(blobs),
        weights=_Weights(directory),
        checkpoints=_Checkpoints(directory.checkpoints),
        recorded=_recorded(directory),
        advantages=_advantages(config),
    )


def _recorded(directory: RunDirectory) -> Mapping[str, int]:
    """What the control process counted, and what gateways elsewhere did; no attempt is in both."""
    elsewhere = SharedLedger(directory.recorded).by_attempt() if directory.recorded.is_dir() else {}
    return {**read_ledger(directory.traces / "recorded.log"), **elsewhere}


def _advantages(config: Config) -> AdvantageFunction:
    def compute(scores: Sequence[Score]) -> Mapping[str, float]:
        group = advantages_of(config, scores)
        return dict(zip(group.attempt_ids, group.advantages, strict=True))

    return compute


class _Traces:
    def __init__(self, blobs: BlobReader) -> None:
        self._blobs = blobs

    def read(self, attempt_id: str) -> tuple[Trace, str]:
        return self._blobs.trace(attempt_id)


class _Batches:
    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, step: int) -> tuple[StepBatch, str]:
        path = self._root / f"step-{step:06d}.msgpack"
        try:
            data = path.read_bytes()
            return msgspec.msgpack.decode(data, type=StepBatch), digest_bytes(data)
        except (OSError, msgspec.MsgspecError) as error:
            raise IntegrityError(f"the batch of step {step} must be readable at {path}: {error}") from error


class _Artifacts:
    def __init__(self, blobs: BlobReader) -> None:
        self._blobs = blobs

    def digest(self, artifact_digest: str) -> str:
        return self._blobs.artifact_digest(artifact_digest)


class _Weights:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def read(self, version: int) -> StoredVersion:
        path = self._directory.version(version)
        manifest = read_manifest(path)
        try:
            files = tuple(file_digest(path / file.name) for file in manifest.files)
        except OSError as error:
            raise IntegrityError(f"version {version} must hold the files of its manifest: {error}") from error
        return StoredVersion(manifest=manifest, files=files, weights_digest=weights_digest(stored_parameters(path)))


class _Checkpoints:
    def __init__(self, root: Path) -> None:
        self._root = root

    def digest(self, step: int) -> str | None:
        folder = self._root / f"step-{step:06d}"
        if not folder.is_dir():
            return None
        try:
            manifest = (folder / _CHECKPOINT_MANIFEST).read_bytes()
            files = msgspec.json.decode(manifest, type=_CheckpointFiles).files
            for file in files:
                if file_digest(folder / file.name) != file:
                    return f"{file.name} is damaged"
        except (OSError, msgspec.MsgspecError) as error:
            return f"unreadable: {error}"
        return digest_bytes(manifest)


class _CheckpointFiles(msgspec.Struct):
    """The part of a checkpoint's manifest that its reader here needs; reading the whole would load torch."""

    files: tuple[FileDigest, ...]
