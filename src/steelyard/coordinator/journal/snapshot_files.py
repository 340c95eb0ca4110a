"""Snapshots as files beside a journal: written under a temporary name, fsynced, renamed. Any of them may be deleted."""

import os
from pathlib import Path

from steelyard.coordinator.journal.base import KEPT_SNAPSHOTS, FaultPoint, no_fault
from steelyard.durable import storage_errors, sweep_temporary, sync_directory
from steelyard.errors import IntegrityError

_SUFFIX = ".snapshot"


class SnapshotFiles:
    """The snapshots in one folder, which holds nothing else. One writer at a time.

    Args:
        folder: made when the first snapshot is written.
    """

    def __init__(self, folder: Path, fault_point: FaultPoint = no_fault) -> None:
        self._folder = folder
        self._fault_point = fault_point

    def numbers(self) -> tuple[int, ...]:
        """Event numbers of the stored snapshots, newest first."""
        if not self._folder.is_dir():
            return ()
        stems = (path.stem for path in self._folder.iterdir() if path.suffix == _SUFFIX)
        return tuple(sorted((int(stem) for stem in stems if stem.isdecimal()), reverse=True))

    def read(self, number: int) -> bytes:
        """The bytes of one snapshot.

        Raises:
            IntegrityError: the file cannot be read.
        """
        try:
            return self._path(number).read_bytes()
        except OSError as error:
            raise IntegrityError(f"snapshot {number} cannot be read: {error}") from error

    def write(self, number: int, data: bytes) -> None:
        """Store one, then delete all but the newest few.

        Raises:
            StorageFailed: the disk refused; the older ones are as they were.
        """
        self._fault_point("snapshot.before_write")
        final = self._path(number)
        temporary = self._folder / f".tmp-{final.name}"
        with storage_errors(str(final)):
            self._folder.mkdir(exist_ok=True)
            sync_directory(self._folder.parent)
            sweep_temporary(self._folder)
            self._write_file(temporary, data)
            self._fault_point("snapshot.before_rename")
            temporary.replace(final)
            sync_directory(self._folder)
            self._fault_point("snapshot.written")
            for old in self.numbers()[KEPT_SNAPSHOTS:]:
                self._path(old).unlink()

    def _write_file(self, path: Path, data: bytes) -> None:
        """In two halves, so that a test can die with one of them written."""
        middle = len(data) // 2
        with path.open("xb") as file:
            file.write(data[:middle])
            file.flush()
            self._fault_point("snapshot.mid_write")
            file.write(memoryview(data)[middle:])
            file.flush()
            os.fsync(file.fileno())

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}{_SUFFIX}"
