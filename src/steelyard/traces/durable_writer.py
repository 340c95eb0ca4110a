"""Durable files, many at a time.

A file is visible only once it is whole and on the disk: temporary file, fsync, rename, fsync of the
directory. One thread does this for several files at a time, whose flushes run together, so that a busy moment costs
little more than one file.

    write    consumes bytes; waits for the disk; unblocked by the group's directory fsync
"""

import asyncio
import functools
import itertools
import logging
import math
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from steelyard.durable import storage_errors
from steelyard.errors import StorageFailed

Value = TypeVar("Value")
_MAX_SYNCERS = 8
"""A disk takes several flushes at a time in little more time than one."""
_LOG = logging.getLogger(__name__)

FaultHook = Callable[[str], None]
"""Called at each named point of a durable write; a test kills the process there."""

_WRITERS = itertools.count()
"""Tells the writers of this process apart, which may share a directory."""

WRITE_POINTS = ("temporary_written", "fsynced", "before_rename", "renamed")


def no_fault(point: str) -> None:
    """The hook of real runs."""


class PendingWrite(msgspec.Struct):
    """One file on its way to the disk, and how far it got."""

    path: Path
    data: bytes
    done: asyncio.Future[None]
    temporary: Path | None = None
    descriptor: int | None = None
    error: StorageFailed | None = None


class DurableWriter:
    """Makes files durable in one thread, in groups: all that arrive during a flush form the next group.

    Args:
        temporary: directory for unfinished files, on the same file system as every target. Emptied here:
            whatever lies in it was cut short by a crash.
        name: what is written, the prefix of the points given to ``fault``.
        fault: called as ``fault("<name>:<point>")`` with each of ``WRITE_POINTS``, once a file. An OSError
            that it raises is treated as the disk's.
        deadline_s: how long a caller waits for the disk.
        before_group: blocking work that must be done before any file of a group has its name, such as another flush;
            it runs while the files are flushed. A ``StorageFailed`` of it fails the group.
        spare_younger_s: other processes may write here too: only what was left for so long is removed from
            ``temporary``, for it may be in the middle of its way.
    """

    def __init__(
        self,
        temporary: Path,
        name: str,
        fault: FaultHook = no_fault,
        deadline_s: float = 30.0,
        before_group: Callable[[], None] | None = None,
        spare_younger_s: float = 0.0,
    ) -> None:
        self._temporary = temporary
        self._name = name
        self._fault = fault
        self._deadline_s = deadline_s
        self._before_group = before_group
        self._pending: list[PendingWrite] = []
        self._flusher: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"durable-{name}")
        self._syncers = ThreadPoolExecutor(_MAX_SYNCERS, thread_name_prefix=f"sync-{name}")
        self._num_files = 0
        self._prefix = f"{socket.gethostname()}-{os.getpid()}-{next(_WRITERS)}"
        with storage_errors(f"{temporary}"):
            temporary.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(temporary, spare_younger_s, temporary / f"{self._prefix}-0")

    async def write(self, path: Path, data: bytes) -> None:
        """Return when ``path`` holds ``data`` and will do so after a power cut.

        An existing ``path`` is replaced. A cancelled caller does not stop the write.

        Raises:
            StorageFailed: the disk refused (full, read-only, gone) or did not answer; ``path`` is unchanged,
                or holds ``data`` without the promise.
        """
        entry = PendingWrite(path, data, asyncio.get_running_loop().create_future())
        self._pending.append(entry)
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush(), name=f"durable-{self._name}")
            self._flusher.add_done_callback(_log_failure)
        try:
            async with asyncio.timeout(self._deadline_s):
                await asyncio.shield(entry.done)
        except TimeoutError:
            raise StorageFailed(f"the disk must take {path} within {self._deadline_s:.0f} s, and has not") from None

    async def call(self, function: Callable[[], Value]) -> Value:
        """Run blocking file work in the same thread, after the group that is being written.

        Raises:
            StorageFailed: the disk did not answer in time.
        """
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except TimeoutError:
            raise StorageFailed(f"the disk must answer {self._name} within {self._deadline_s:.0f} s") from None

    async def close(self) -> None:
        """Wait for the writes that were begun, then end the thread."""
        if self._flusher is not None:
            await asyncio.wait([self._flusher], timeout=self._deadline_s)
        self._thread.shutdown(wait=False)
        self._syncers.shutdown(wait=False)

    async def _flush(self) -> None:
        """Consumes pending writes until none is left. Every entry gets its result, whatever happens."""
        group: list[PendingWrite] = []
        try:
            while self._pending:
                group, self._pending = self._pending, []
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write_group, group)
                for entry in group:
                    _settle(entry)
        except BaseException as error:
            for entry in (*group, *self._pending):
                entry.error = entry.error or StorageFailed(f"writing {entry.path} ended with {error!r}")
                _settle(entry)
            self._pending = []
            raise
        finally:
            self._flusher = None

    def _write_group(self, group: list[PendingWrite]) -> None:
        """In the thread: all temporary files first, then their flushes, then the renames, then the directories."""
        changed: dict[Path, list[PendingWrite]] = {}
        _run(self._stage, group)
        self._sync(group)
        _run(functools.partial(self._rename, changed), group)
        for directory, entries in changed.items():
            try:
                _fsync(directory)
            except OSError as error:
                for entry in entries:
                    entry.error = storage_failed(entry.path, error)
        for entry in group:
            if entry.error is not None and entry.temporary is not None:
                entry.temporary.unlink(missing_ok=True)

    def _stage(self, entry: PendingWrite) -> None:
        self._num_files += 1
        entry.temporary = self._temporary / f"{self._prefix}-{self._num_files}"
        entry.descriptor = os.open(entry.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        left = memoryview(entry.data)
        while left:
            left = left[os.write(entry.descriptor, left) :]
        self._fault(f"{self._name}:temporary_written")

    def _sync(self, group: list[PendingWrite]) -> None:
        """Flush and close what was staged, some at a time. Each thread takes every n-th file."""
        num_threads = min(_MAX_SYNCERS, len(group))
        shares = [group[place::num_threads] for place in range(num_threads)]
        running = [self._syncers.submit(_sync_all, share) for share in shares[1:]]
        before = None if self._before_group is None else self._syncers.submit(self._before_group)
        _sync_all(shares[0])
        for done in running:
            done.result()
        if before is not None:
            try:
                before.result()
            except StorageFailed as error:
                for entry in group:
                    entry.error = entry.error or error
        _run(lambda _: self._fault(f"{self._name}:fsynced"), group)

    def _rename(self, changed: dict[Path, list[PendingWrite]], entry: PendingWrite) -> None:
        assert entry.temporary is not None
        self._fault(f"{self._name}:before_rename")
        directories = [entry.path.parent]
        try:
            entry.temporary.rename(entry.path)
        except FileNotFoundError:
            directories = _make_parents(entry.path)
            entry.temporary.rename(entry.path)
        for directory in directories:
            changed.setdefault(directory, []).append(entry)
        self._fault(f"{self._name}:renamed")


def _remove_leftovers(temporary: Path, spare_younger_s: float, probe: Path) -> None:
    """Ages are by the clock of the file system, which need not be ours: the one that stamps ``probe``."""
    before_s = math.inf
    if spare_younger_s:
        probe.touch()
        before_s = probe.stat().st_mtime - spare_younger_s
        probe.unlink()
    for leftover in temporary.iterdir():
        try:
            if leftover.stat().st_mtime < before_s:
                leftover.unlink()
        except FileNotFoundError:
            pass  # another process was faster, or has just given the file its name


def _settle(entry: PendingWrite) -> None:
    if entry.done.done():
        return
    if entry.error is None:
        entry.done.set_result(None)
    else:
        entry.done.set_exception(entry.error)
        entry.done.exception()  # a cancelled caller never looks at it


def _log_failure(flusher: asyncio.Task[None]) -> None:
    if not flusher.cancelled() and (error := flusher.exception()) is not None:
        _LOG.error("durable writer ended", exc_info=error)


def _run(step: Callable[[PendingWrite], None], group: list[PendingWrite]) -> None:
    """Take a step with each entry that has not failed yet."""
    for entry in group:
        if entry.error is None:
            try:
                step(entry)
            except OSError as error:
                entry.error = storage_failed(entry.path, error)


def _sync_all(entries: list[PendingWrite]) -> None:
    """Flush and close the temporary files of ``entries``; only close those of failed ones."""
    for entry in entries:
        try:
            _sync_and_close(entry)
        except OSError as error:
            entry.error = entry.error or storage_failed(entry.path, error)


def _sync_and_close(entry: PendingWrite) -> None:
    if entry.descriptor is not None:
        try:
            if entry.error is None:
                os.fsync(entry.descriptor)
        finally:
            os.close(entry.descriptor)


def storage_failed(path: Path | str, error: OSError) -> StorageFailed:
    """The error for a refused write, with what the system said."""
    return StorageFailed(f"cannot write {path}: {error.strerror or error} (errno {error.errno})")


def _make_parents(target: Path) -> list[Path]:
    """Create missing parents; returns the directories whose entries this changes, innermost first."""
    changed = [target.parent]
    directory = target.parent
    while not directory.exists():
        directory = directory.parent
        changed.append(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    return changed


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
