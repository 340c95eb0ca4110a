"""Files and directories that are either wholly there or not there at all, also after a power cut.

A directory is published in one order: written under a temporary name beside its place, each file fsynced, its
manifest last, the directory fsynced, renamed, and the parent fsynced. Whatever dies in between leaves a temporary
name, which :func:`sweep_temporary` removes.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from steelyard.errors import StorageFailed

_TEMPORARY_PREFIX = ".tmp-"

FaultHook = Callable[[str], None]
"""Called with the name of each point at which a test may want the process to die."""


def no_fault(point: str) -> None:
    """The fault hook of real runs: nothing happens at any point."""


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn a refusal of the disk into one error that says what could not be written.

    Raises:
        StorageFailed: the block raised ``OSError`` (full, read-only, gone).
    """
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{what} could not be written: {error}") from error


def write_durably(path: Path, data: bytes | memoryview) -> None:
    """Write a new file and fsync it.

    Raises:
        OSError: the disk refused.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link ``source``, which must never change; copy and fsync it where the file system cannot link."""
    try:
        target.hardlink_to(source)
    except OSError:
        write_durably(target, source.read_bytes())


def sync_files(directory: Path) -> None:
    """Fsync every file in a directory that others have written."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_of(final: Path) -> Path:
    """Where :func:`new_temporary` makes the directory that is to become ``final``."""
    return final.parent / f"{_TEMPORARY_PREFIX}{final.name}"


def new_temporary(final: Path) -> Path:
    """An empty temporary directory beside ``final``; what an earlier attempt left there is removed."""
    temporary = temporary_of(final)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def publish_directory(temporary: Path, final: Path, fault: FaultHook = no_fault) -> None:
    """Give a finished temporary directory its name, durably. ``final`` must not exist."""
    sync_directory(temporary)
    fault("before_rename")
    temporary.rename(final)
    fault("renamed")
    sync_directory(final.parent)


def remove_directory(path: Path) -> None:
    """Delete a published directory so that no half of it ever stands under its name."""
    doomed = path.parent / f"{_TEMPORARY_PREFIX}removed-{path.name}"
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    shutil.rmtree(doomed)


def sweep_temporary(parent: Path) -> tuple[str, ...]:
    """Remove what killed processes left in ``parent``; returns the names. Only for the owner of ``parent``."""
    if not parent.is_dir():
        return ()
    left = sorted(path for path in parent.iterdir() if path.name.startswith(_TEMPORARY_PREFIX))
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return tuple(path.name for path in left)
