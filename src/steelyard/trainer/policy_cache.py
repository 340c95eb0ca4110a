"""A cache of built policies: one directory per key, whole or absent, safe for several builders. Imports no torch."""

import asyncio
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from steelyard.digests import digest_file
from steelyard.durable import (
    new_temporary,
    publish_directory,
    remove_directory,
    storage_errors,
    sync_files,
    write_durably,
)
from steelyard.errors import DeadlineExceeded
from steelyard.types import FileDigest, Record

logger = logging.getLogger(__name__)

ENTRY_NAME = "cache_entry.json"
_POLL_S = 0.1

Build = Callable[[Path], Awaitable[None]]
"""Fills an empty directory."""


class CacheEntry(Record, frozen=True, kw_only=True):
    """What was built under which key; written last."""

    key: str
    files: tuple[FileDigest, ...]


class PolicyCache:
    """Directories under ``root``, by key.

    One builder works at a time for a key, under an flock that the kernel drops when its process dies, however it
    dies; whoever waits then finds the finished entry, or builds anew over what the dead one left.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    async def get_or_build(self, key: str, build: Build, deadline_s: float) -> Path:
        """The directory of ``key``, built by ``build`` if it is not there yet or was damaged.

        Raises:
            DeadlineExceeded: another process kept building for longer than ``deadline_s`` seconds.
            StorageFailed: the disk refused.
        """
        final = self._root / key
        if self._is_whole(final):
            return final
        with storage_errors(f"cache entry {key}"):
            self._root.mkdir(parents=True, exist_ok=True)
        with _lock_file(self._root / f"{key}.lock") as descriptor:
            await _lock(descriptor, final.name, deadline_s)
            if not self._is_whole(final):
                await self._build(final, build)
        return final

    async def _build(self, final: Path, build: Build) -> None:
        with storage_errors(f"cache entry {final.name}"):
            if final.exists():
                logger.warning("cache entry %s is damaged and is built again", final)
                remove_directory(final)
            temporary = new_temporary(final)
        await build(temporary)
        with storage_errors(f"cache entry {final.name}"):
            sync_files(temporary)
            entry = CacheEntry(key=final.name, files=_digests(temporary))
            write_durably(temporary / ENTRY_NAME, msgspec.json.encode(entry))
            publish_directory(temporary, final)

    def _is_whole(self, final: Path) -> bool:
        try:
            entry = msgspec.json.decode((final / ENTRY_NAME).read_bytes(), type=CacheEntry)
            return entry.key == final.name and entry.files == _digests(final)
        except (OSError, msgspec.MsgspecError):
            return False


def _digests(directory: Path) -> tuple[FileDigest, ...]:
    digests = []
    for path in sorted(directory.iterdir()):
        if path.name != ENTRY_NAME:
            digest, num_bytes = digest_file(path)
            digests.append(FileDigest(name=path.name, num_bytes=num_bytes, digest=digest))
    return tuple(digests)


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    with storage_errors(f"lock file {path.name}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # and with it the lock


async def _lock(descriptor: int, key: str, deadline_s: float) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited_s = loop.time() - started
            if waited_s > deadline_s:
                raise DeadlineExceeded(f"cache entry {key}", ("the process that builds it",), waited_s) from None
            # An flock cannot be awaited; the pause bounds the polling, nothing is ordered by it.
            await asyncio.sleep(_POLL_S)
