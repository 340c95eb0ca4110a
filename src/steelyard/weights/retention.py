"""Deletion of version directories. What may go is the coordinator's decision alone, never a timer's. No torch."""

from collections.abc import Iterable
from pathlib import Path

from steelyard.durable import remove_directory, storage_errors, sweep_temporary
from steelyard.weights.manifest import MANIFEST_NAME, version_dir_name


class VersionStore:
    """The ``weights/`` directory of a run: which versions are on disk, and their removal when told."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, version: int) -> Path:
        """Where a version lies, whether or not it is there."""
        return self.root / version_dir_name(version)

    def versions(self) -> tuple[int, ...]:
        """The published versions on disk, ascending."""
        found = []
        for path in self.root.glob("v*"):
            if path.name[1:].isdecimal() and (path / MANIFEST_NAME).is_file():
                found.append(int(path.name[1:]))
        return tuple(sorted(found))

    def delete(self, versions: Iterable[int]) -> tuple[int, ...]:
        """Delete exactly these versions; one that is already gone is no error, so that a replay may ask again.

        A reader that has opened its files keeps them; one that has not yet gets a missing file, never half a version.

        Returns:
            The versions that were there.

        Raises:
            StorageFailed: the disk refused.
        """
        gone = []
        for version in sorted(set(versions)):
            path = self.path(version)
            if path.is_dir():
                with storage_errors(f"the removal of version {version}"):
                    remove_directory(path)
                gone.append(version)
        return tuple(gone)

    def sweep(self) -> tuple[str, ...]:
        """Remove what a killed publisher left; only while no publisher runs."""
        return sweep_temporary(self.root)
