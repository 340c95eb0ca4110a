"""Objects as files below a directory, durable by fsync."""

from pathlib import Path

from steelyard.durable import storage_errors
from steelyard.errors import IntegrityError, StorageFailed
from steelyard.traces.durable_writer import DurableWriter, FaultHook, no_fault
from steelyard.traces.objects import ObjectInfo, check_key

_TEMPORARY = "tmp"


class LocalObjects:
    """Objects in a directory: a key is a path below ``root``.

    Args:
        root: made where it is missing.
        fault: as of :class:`DurableWriter`.
        name: what is written, the prefix of the points given to ``fault``.
        spare_younger_s: as of :class:`DurableWriter`; above 0 where several processes open the same directory.

    Raises:
        StorageFailed: the disk refuses.
    """

    def __init__(
        self, root: Path, fault: FaultHook = no_fault, *, name: str = "blob", spare_younger_s: float = 0.0
    ) -> None:
        self._root = root
        self._writer = DurableWriter(root / _TEMPORARY, name, fault, spare_younger_s=spare_younger_s)

    @property
    def url(self) -> str:
        """``file://`` and the directory."""
        return f"file://{self._root.absolute()}"

    def make_folder(self, prefix: str) -> None:
        """Make the folder of the keys that start with ``prefix``, empty.

        Raises:
            StorageFailed: the disk refuses.
        """
        folder = self._path(prefix.rstrip("/"))
        with storage_errors(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)

    async def put(self, key: str, data: bytes) -> None:
        """Returns when the file is on the disk, under its name, after a power cut too."""
        await self._writer.write(self._path(key), data)

    async def get(self, key: str) -> bytes:
        """The file's bytes."""
        path = self._path(key)
        try:
            return await self._writer.call(path.read_bytes)
        except (FileNotFoundError, NotADirectoryError):
            raise IntegrityError(f"{self.url}/{key} must exist, and does not") from None
        except OSError as error:
            raise StorageFailed(f"cannot read {path}: {error.strerror} (errno {error.errno})") from error

    async def exists(self, key: str) -> bool:
        """Whether there is such a file."""
        return await self._writer.call(self._path(key).is_file)

    async def list(self, prefix: str = "") -> tuple[ObjectInfo, ...]:
        """All files but unfinished ones."""
        try:
            return await self._writer.call(lambda: self._list(prefix))
        except OSError as error:
            raise StorageFailed(f"cannot list {self._root}: {error.strerror} (errno {error.errno})") from error

    async def delete(self, key: str) -> None:
        """Unlink the file."""
        path = self._path(key)
        try:
            await self._writer.call(lambda: path.unlink(missing_ok=True))
        except OSError as error:
            raise StorageFailed(f"cannot delete {path}: {error.strerror} (errno {error.errno})") from error

    async def close(self) -> None:
        """Finish what was begun and end the thread."""
        await self._writer.close()

    def _path(self, key: str) -> Path:
        path = self._root / check_key(key)
        if key.split("/", maxsplit=1)[0] == _TEMPORARY:
            raise IntegrityError(f"the key of an object must not start with {_TEMPORARY}/, got {key!r}")
        return path

    def _list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        found = []
        # The folder part of the prefix saves walking through everything else.
        folder = self._root / prefix.rpartition("/")[0]
        for path in folder.rglob("*"):
            key = path.relative_to(self._root).as_posix()
            if not key.startswith(prefix) or key.split("/", maxsplit=1)[0] == _TEMPORARY:
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # deleted since it was seen
            if path.is_file():
                found.append(ObjectInfo(key=key, num_bytes=status.st_size, modified_at_s=status.st_mtime))
        return tuple(sorted(found, key=lambda info: info.key))
