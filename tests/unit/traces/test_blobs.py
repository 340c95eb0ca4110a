import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.digests import digest_bytes
from steelyard.errors import IntegrityError, StorageFailed
from steelyard.traces.blobs import BlobStore
from steelyard.traces.durable_writer import WRITE_POINTS
from steelyard.traces.local_objects import LocalObjects


def test_a_blob_is_read_back_under_its_digest(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BlobStore(LocalObjects(tmp_path))
        digest = await store.put(b"artifact")
        assert digest == digest_bytes(b"artifact")
        assert await store.get(digest) == b"artifact"
        assert await store.exists(digest)
        assert [(blob.digest, blob.num_bytes) for blob in await store.list()] == [(digest, 8)]
        await store.close()

    asyncio.run(scenario())


def test_putting_equal_bytes_twice_keeps_one_blob_and_makes_it_young_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BlobStore(LocalObjects(tmp_path))
        digest = await store.put(b"same")
        os.utime(tmp_path / digest[:2] / digest, (1.0, 1.0))
        await asyncio.gather(*(store.put(b"same") for _ in range(5)))
        (blob,) = await store.list()
        assert blob.modified_at_s > 1.0
        await store.close()

    asyncio.run(scenario())


def test_a_deleted_blob_is_gone_and_deleting_it_again_is_harmless(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BlobStore(LocalObjects(tmp_path))
        digest = await store.put(b"x")
        await store.delete(digest)
        await store.delete(digest)
        assert not await store.exists(digest)
        with pytest.raises(IntegrityError, match="must exist"):
            await store.get(digest)
        await store.close()

    asyncio.run(scenario())


def test_a_damaged_blob_is_an_error_that_names_both_digests(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BlobStore(LocalObjects(tmp_path))
        digest = await store.put(b"artifact")
        (tmp_path / digest[:2] / digest).write_bytes(b"artefact")
        with pytest.raises(IntegrityError, match=f"{digest}.*{digest_bytes(b'artefact')}"):
            await store.get(digest)
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["../../etc/passwd", "A" * 32, "", "0" * 31])
def test_what_is_no_digest_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        store = BlobStore(LocalObjects(tmp_path))
        with pytest.raises(IntegrityError, match="32 hex digits"):
            await store.get(name)
        await store.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("point", WRITE_POINTS[:3])
def test_a_full_disk_fails_the_write_and_leaves_nothing_behind(tmp_path: Path, point: str) -> None:
    def full(reached: str) -> None:
        if reached == f"blob:{point}":
            raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        store = BlobStore(LocalObjects(tmp_path, full))
        with pytest.raises(StorageFailed, match="No space left on device"):
            await store.put(b"artifact")
        assert not await store.exists(digest_bytes(b"artifact"))
        assert list((tmp_path / "tmp").iterdir()) == []
        await store.close()

    asyncio.run(scenario())


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from steelyard.traces.blobs import BlobStore
from steelyard.traces.local_objects import LocalObjects

def die(reached):
    if reached == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    await BlobStore(LocalObjects(Path(sys.argv[1]), die)).put(b"artifact")

asyncio.run(main())
"""


@pytest.mark.parametrize("point", WRITE_POINTS)
def test_a_kill_at_any_point_of_a_write_leaves_a_whole_blob_or_none(tmp_path: Path, point: str) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path), f"blob:{point}"]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    digest = digest_bytes(b"artifact")

    async def scenario() -> None:
        store = BlobStore(LocalObjects(tmp_path))
        assert list((tmp_path / "tmp").iterdir()) == [], "what a crash cut short is swept at the next start"
        assert await store.exists(digest) == (point == "renamed")
        assert await store.put(b"artifact") == digest
        assert await store.get(digest) == b"artifact"
        await store.close()

    asyncio.run(scenario())
