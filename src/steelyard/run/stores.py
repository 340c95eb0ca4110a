"""The stores of one run, opened together and closed together."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from steelyard.config import BlobsConfig
from steelyard.run.directory import RunDirectory
from steelyard.traces.blobs import BlobStore
from steelyard.traces.durable_writer import DurableWriter
from steelyard.traces.ledger import TokenLedger
from steelyard.traces.local_objects import LocalObjects
from steelyard.traces.objects import ObjectStore
from steelyard.traces.opening import open_objects
from steelyard.traces.store import TraceStore
from steelyard.weights.retention import VersionStore

_BATCH_SUFFIX = ".msgpack"

ARTIFACT_PREFIX = "artifacts/"
"""Of the keys of artifacts, where blobs are not in the run directory."""


class BatchStore:
    """Stored batches, one file a step, kept until every kept checkpoint covers the step."""

    def __init__(self, root: Path, fault: Callable[[str], None]) -> None:
        self._root = root
        self._writer = DurableWriter(root / "tmp", "batch", fault)

    def path(self, step: int) -> Path:
        """Where the batch of a step lies."""
        return self._root / f"step-{step:06d}{_BATCH_SUFFIX}"

    async def put(self, step: int, data: bytes) -> Path:
        """Store a batch durably, in place of one that was written but never begun.

        Raises:
            StorageFailed: the disk refused.
        """
        await self._writer.write(self.path(step), data)
        return self.path(step)

    async def steps(self) -> tuple[int, ...]:
        """The steps whose batch is stored, ascending."""
        paths = await self._writer.call(lambda: sorted(self._root.glob(f"step-*{_BATCH_SUFFIX}")))
        return tuple(int(path.name.removeprefix("step-").removesuffix(_BATCH_SUFFIX)) for path in paths)

    async def delete(self, step: int) -> None:
        """Remove a batch; one that is gone is no error."""
        await self._writer.call(lambda: self.path(step).unlink(missing_ok=True))

    async def close(self) -> None:
        """Finish what was begun."""
        await self._writer.close()


@dataclass(frozen=True)
class Stores:
    """Everything durable of a run beside its journal. ``objects``: where blobs are kept outside the run directory."""

    traces: TraceStore
    ledger: TokenLedger
    artifacts: BlobStore
    batches: BatchStore
    versions: VersionStore
    objects: ObjectStore | None

    @classmethod
    def open(cls, directory: RunDirectory, fault: Callable[[str], None], blobs: BlobsConfig | None = None) -> "Stores":
        """Open the stores of a run whose folders exist; ``blobs`` None is the run directory.

        Raises:
            StorageFailed: the disk refuses.
            ConfigError: a package is missing that ``blobs`` needs.
        """
        blobs = blobs or BlobsConfig()
        objects = None if blobs.url is None else open_objects(blobs.url, blobs)
        if isinstance(objects, LocalObjects):
            objects.make_folder(ARTIFACT_PREFIX)  # workers elsewhere look whether they share it
        artifacts = (
            BlobStore(LocalObjects(directory.artifacts, fault, spare_younger_s=blobs.max_upload_s))
            if objects is None
            else BlobStore(objects, ARTIFACT_PREFIX)
        )
        ledger = TokenLedger(directory.traces / "recorded.log")
        return cls(
            traces=TraceStore(directory.traces, fault, before_seal=ledger.sync, archive=objects),
            ledger=ledger,
            artifacts=artifacts,
            batches=BatchStore(directory.batches, fault),
            versions=VersionStore(directory.weights),
            objects=objects,
        )

    async def close(self) -> None:
        """Finish what was begun in each."""
        await self.traces.close()
        await self.artifacts.close()
        await self.batches.close()
        self.ledger.close()


def artifacts_url(directory: RunDirectory, blobs: BlobsConfig) -> str:
    """Where another process finds the run's artifacts, with :func:`steelyard.traces.opening.open_blob_store`."""
    if blobs.url is None:
        return f"file://{directory.artifacts}"
    return f"{blobs.url.rstrip('/')}/{ARTIFACT_PREFIX.rstrip('/')}"
