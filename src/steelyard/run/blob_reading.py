"""The blobs of a run as commands read them: blocking, one at a time, from the place that its configuration names."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from steelyard.config import BlobsConfig
from steelyard.digests import digest_bytes, digest_file
from steelyard.errors import IntegrityError
from steelyard.run.directory import RunDirectory
from steelyard.run.stores import ARTIFACT_PREFIX
from steelyard.traces.blobs import blob_key
from steelyard.traces.objects import ObjectStore
from steelyard.traces.opening import open_objects
from steelyard.traces.sealed import SealedTraces
from steelyard.traces.store import archive_key, read_archived
from steelyard.types import Trace

Value = TypeVar("Value")


class BlobReader(Protocol):
    """Sealed traces and artifacts of one run. All calls raise StorageFailed where the store cannot be reached."""

    def has_trace(self, attempt_id: str) -> bool:
        """Whether the attempt has a sealed trace."""
        ...

    def trace(self, attempt_id: str) -> tuple[Trace, str]:
        """A sealed trace, and the digest of its bytes as they are stored now.

        Raises:
            IntegrityError: it is missing, or is not what it says.
        """
        ...

    def artifact_digest(self, digest: str) -> str:
        """The digest of the bytes that are stored under this digest now.

        Raises:
            IntegrityError: nothing is stored under it.
        """
        ...


@contextmanager
def reading_blobs(directory: RunDirectory, blobs: BlobsConfig) -> Iterator[BlobReader]:
    """Open the blobs of a run for reading. Not inside a running event loop.

    Raises:
        ConfigError: a package is missing that the store needs.
    """
    if blobs.url is None:
        yield _FolderReader(directory)
        return
    with asyncio.Runner() as runner:
        objects = open_objects(blobs.url, blobs)
        try:
            yield _ObjectReader(objects, runner)
        finally:
            runner.run(objects.close())


class _FolderReader:
    def __init__(self, directory: RunDirectory) -> None:
        self._traces = SealedTraces(directory.traces)
        self._artifacts = directory.artifacts

    def has_trace(self, attempt_id: str) -> bool:
        return self._traces.is_sealed(attempt_id)

    def trace(self, attempt_id: str) -> tuple[Trace, str]:
        return self._traces.read_now(attempt_id)

    def artifact_digest(self, digest: str) -> str:
        path = self._artifacts / blob_key(digest)
        try:
            return digest_file(path)[0]
        except OSError as error:
            raise IntegrityError(f"artifact {digest} must be stored at {path}: {error}") from error


class _ObjectReader:
    def __init__(self, objects: ObjectStore, runner: asyncio.Runner) -> None:
        self._objects = objects
        self._runner = runner

    def has_trace(self, attempt_id: str) -> bool:
        return self._run(self._objects.exists(archive_key(attempt_id)))

    def trace(self, attempt_id: str) -> tuple[Trace, str]:
        return self._run(read_archived(self._objects, attempt_id))

    def artifact_digest(self, digest: str) -> str:
        return digest_bytes(self._run(self._objects.get(ARTIFACT_PREFIX + blob_key(digest))))

    def _run(self, call: Coroutine[Any, Any, Value]) -> Value:
        return self._runner.run(call)
