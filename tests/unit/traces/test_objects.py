"""What holds of every store of objects, in a directory and in S3."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from steelyard.config import BlobsConfig
from steelyard.errors import IntegrityError
from steelyard.testing.s3_server import S3Server
from steelyard.traces.blobs import BlobStore
from steelyard.traces.objects import ObjectStore
from steelyard.traces.opening import open_objects

Scene = Callable[[ObjectStore], Awaitable[None]]
Play = Callable[[Scene], None]


@asynccontextmanager
async def opened(url: str, settings: BlobsConfig) -> AsyncIterator[ObjectStore]:
    store = open_objects(url, settings)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["file", "s3"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Plays a scene on an empty store of each kind."""
    url, settings = f"file://{tmp_path}/store", BlobsConfig()
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        url, settings = f"s3://{request.getfixturevalue('bucket')}/some/prefix", server.settings()

    def run(scene: Scene) -> None:
        async def scenario() -> None:
            async with opened(url, settings) as store:
                assert store.url == url
                await scene(store)

        asyncio.run(scenario())

    return run


def test_an_object_is_read_back_listed_replaced_and_deleted(play: Play) -> None:
    async def scene(store: ObjectStore) -> None:
        await store.put("logs/log.jsonl", b"first")
        await store.put("logs/log.jsonl", b"second")
        await store.put("traces/att_1", b"")
        assert await store.get("logs/log.jsonl") == b"second"
        assert await store.get("traces/att_1") == b""
        assert [(info.key, info.num_bytes) for info in await store.list()] == [
            ("logs/log.jsonl", 6),
            ("traces/att_1", 0),
        ]
        assert [info.key for info in await store.list("logs/")] == ["logs/log.jsonl"]
        assert await store.list("artifacts/") == ()
        assert await store.exists("traces/att_1")
        await store.delete("traces/att_1")
        await store.delete("traces/att_1")
        assert not await store.exists("traces/att_1")
        with pytest.raises(IntegrityError, match="traces/att_1 must exist"):
            await store.get("traces/att_1")

    play(scene)


def test_the_time_of_an_object_is_that_of_its_last_writing(play: Play) -> None:
    async def scene(store: ObjectStore) -> None:
        times = []
        for _ in range(2):
            await store.put("key", b"x")
            (info,) = await store.list()
            times.append(info.modified_at_s)
        assert times[0] <= times[1]
        assert times[0] > 1.6e9

    play(scene)


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a//b", "a/../b", "a/", ".hidden", "a b", "a/%2e"])
def test_what_is_no_key_reaches_no_store(play: Play, key: str) -> None:
    async def scene(store: ObjectStore) -> None:
        with pytest.raises(IntegrityError, match="key of an object"):
            await store.put(key, b"x")

    play(scene)


def test_many_writers_of_the_same_blob_leave_one(play: Play) -> None:
    async def scene(store: ObjectStore) -> None:
        blobs = BlobStore(store, "artifacts/")
        digests = await asyncio.gather(*(blobs.put(b"same answer") for _ in range(20)))
        assert len(set(digests)) == 1
        assert [blob.digest for blob in await blobs.list()] == [digests[0]]
        assert await blobs.get(digests[0]) == b"same answer"

    play(scene)


def test_a_blob_that_was_changed_is_never_given_out(play: Play) -> None:
    async def scene(store: ObjectStore) -> None:
        blobs = BlobStore(store, "artifacts/")
        digest = await blobs.put(b"answer")
        await store.put(f"artifacts/{digest[:2]}/{digest}", b"another answer")
        with pytest.raises(IntegrityError, match=f"blob {digest} must have its name as digest.*{store.url}"):
            await blobs.get(digest)

    play(scene)


def test_what_is_no_blob_is_not_listed_as_one(play: Play) -> None:
    async def scene(store: ObjectStore) -> None:
        blobs = BlobStore(store, "artifacts/")
        digest = await blobs.put(b"answer")
        await store.put(f"artifacts/00/{digest}", b"in the wrong folder")
        await store.put("artifacts/readme", b"left by a person")
        assert [blob.digest for blob in await blobs.list()] == [digest]

    play(scene)
