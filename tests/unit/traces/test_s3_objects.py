"""What S3 does wrong: each is a typed error or is repeated, nothing is ever half there, and no secret is told."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from steelyard.config import BlobsConfig
from steelyard.errors import IntegrityError, StorageFailed
from steelyard.testing.s3_proxy import Answer, CutDownload, CutUpload, Fate, Hang, LoseAnswer, Pass, S3Proxy
from steelyard.testing.s3_server import CREDENTIALS, S3Server, s3_server
from steelyard.traces.blobs import BlobStore
from steelyard.traces.s3_objects import S3Objects

DATA = bytes(range(256)) * 1024


class Bench:
    """A store behind a proxy. Pauses between tries take no time and are noted in ``pauses``."""

    def __init__(self, s3: S3Server, bucket: str, proxy: S3Proxy, settings: BlobsConfig) -> None:
        self.s3 = s3
        self.bucket = bucket
        self.proxy = proxy
        self.pauses: list[float] = []
        self.store = S3Objects(f"s3://{bucket}/run", settings, sleep=self._sleep, draw=random.Random(0))

    async def fail(self, call: Awaitable[Any]) -> str:
        """The message of the StorageFailed that ``call`` must end with."""
        with pytest.raises(StorageFailed) as caught:
            await call
        message = str(caught.value)
        assert f"s3://{self.bucket}/run/key" in message
        assert not any(secret in message for secret in list(CREDENTIALS.values())[:2])
        return message

    async def _sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        await asyncio.sleep(0)


def play(s3: S3Server, bucket: str, scene: Callable[[Bench], Awaitable[None]], **changes: object) -> None:
    async def scenario() -> None:
        proxy = S3Proxy(s3.url)
        url = await proxy.start()
        bench = Bench(s3, bucket, proxy, s3.settings(url, **changes))
        try:
            await scene(bench)
        finally:
            await bench.store.close()
            await proxy.stop()

    asyncio.run(scenario())


def num_requests(num_tries: int, fate: Fate) -> int:
    """Where the connection ends the HTTP client sends a request a second time within a try."""
    return num_tries * (1 if isinstance(fate, Answer) else 2)


def first(num_tries: int, fate: Fate) -> Callable[[str, int], Fate]:
    return lambda _, number: fate if number < num_requests(num_tries, fate) else Pass()


def calls(bench: Bench) -> tuple[Callable[[], Awaitable[Any]], ...]:
    store = bench.store
    return (lambda: store.put("key", DATA)), (lambda: store.get("key")), (lambda: store.list("key"))


PASSING = [
    Answer(500, "InternalError"),
    Answer(503, "SlowDown"),
    Answer(503, "ServiceUnavailable"),
    Answer(429, "TooManyRequests"),
    Answer(400, "RequestTimeout"),
    CutUpload(0),
    CutUpload(len(DATA) // 2),
    LoseAnswer(),
]


@pytest.mark.parametrize("fate", PASSING, ids=str)
def test_an_upload_that_fails_is_repeated_until_it_is_whole(s3: S3Server, bucket: str, fate: Fate) -> None:
    async def scene(bench: Bench) -> None:
        bench.proxy.plan = first(2, fate)
        await bench.store.put("key", DATA)
        assert s3.read(bucket, "run/key") == DATA
        assert len(bench.proxy.requests) == num_requests(2, fate) + 1
        assert len(bench.pauses) == 2
        assert 0.05 <= bench.pauses[0] <= 0.1 <= bench.pauses[1] <= 0.2

    play(s3, bucket, scene)


@pytest.mark.parametrize("num_bytes", [0, 1, len(DATA) // 2, len(DATA) - 1])
def test_an_upload_that_is_cut_off_for_good_leaves_nothing_that_reads_as_a_blob(
    s3: S3Server, bucket: str, num_bytes: int
) -> None:
    async def scene(bench: Bench) -> None:
        bench.proxy.plan = first(5, CutUpload(num_bytes))
        blobs = BlobStore(bench.store, "key/")
        assert "cannot write" in await bench.fail(blobs.put(DATA))
        assert len(bench.proxy.requests) == 10
        for key in s3.keys(bucket):  # S3 itself keeps nothing of half a request; another server might
            with pytest.raises(IntegrityError):
                await blobs.get(key.rpartition("/")[2])
        digest = await blobs.put(DATA)
        assert await blobs.get(digest) == DATA

    play(s3, bucket, scene, max_tries=5)


@pytest.mark.parametrize("fate", PASSING, ids=str)
def test_tries_are_bounded_and_the_error_names_bucket_and_key(s3: S3Server, bucket: str, fate: Fate) -> None:
    async def scene(bench: Bench) -> None:
        bench.proxy.plan = lambda _, __: fate
        message = await bench.fail(bench.store.put("key", DATA))
        assert message.endswith("(3 tries)")
        if isinstance(fate, Answer):
            assert f"{fate.status} {fate.code}: as planned" in message
        assert len(bench.proxy.requests) == num_requests(3, fate)

    play(s3, bucket, scene, max_tries=3)


def test_a_download_that_is_cut_off_is_repeated_and_never_given_out_short(s3: S3Server, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.store.put("key", DATA)
        bench.proxy.plan = lambda _, number: CutDownload(len(DATA) // 2) if number < 3 else Pass()
        assert await bench.store.get("key") == DATA
        bench.proxy.plan = lambda _, __: CutDownload(len(DATA) - 1)
        assert "cannot read" in await bench.fail(bench.store.get("key"))

    play(s3, bucket, scene, max_tries=4)


def test_a_server_that_does_not_answer_costs_its_deadlines_and_no_more(s3: S3Server, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        bench.proxy.plan = lambda _, __: Hang()
        for call in calls(bench):
            assert "no answer within 0.2 s (2 tries)" in await bench.fail(call())
        assert s3.keys(bucket) == []

    play(s3, bucket, scene, call_deadline_s=0.2, max_tries=2)


def test_an_upload_with_all_its_tries_ends_within_its_limit(s3: S3Server, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        bench.proxy.plan = lambda _, __: Hang()
        assert "and 0.5 s are over" in await bench.fail(bench.store.put("key", DATA))

    play(s3, bucket, scene, call_deadline_s=0.2, max_upload_s=0.5, max_tries=1000)


@pytest.mark.parametrize(
    "answer", [Answer(403, "AccessDenied"), Answer(403, "InvalidAccessKeyId"), Answer(400, "InvalidRequest")], ids=str
)
def test_what_no_repetition_can_mend_is_not_repeated(s3: S3Server, bucket: str, answer: Answer) -> None:
    async def scene(bench: Bench) -> None:
        bench.proxy.plan = lambda _, __: answer
        for call in calls(bench):
            before = len(bench.proxy.requests)
            assert f"{answer.status} {answer.code}: as planned (1 try)" in await bench.fail(call())
            assert len(bench.proxy.requests) == before + 1
        assert str(answer.status) in await bench.fail(bench.store.exists("key"))  # a HEAD has no body to name a code

    play(s3, bucket, scene)


def test_a_bucket_that_is_missing_is_no_missing_object(s3: S3Server) -> None:
    async def scene(bench: Bench) -> None:
        for call in calls(bench):
            assert "404 NoSuchBucket" in await bench.fail(call())

    play(s3, "no-such-bucket", scene)


def test_a_server_that_is_not_there_is_said_to_be_out_of_reach(s3: S3Server, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        await bench.proxy.stop()
        assert "EndpointConnectionError" in await bench.fail(bench.store.put("key", DATA))

    play(s3, bucket, scene, max_tries=2)


def test_wrong_credentials_are_refused_by_the_server_and_not_told() -> None:
    with pytest.MonkeyPatch.context() as environment, s3_server() as server:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        server.make_bucket("locked")
        server.lock()

        async def scene(bench: Bench) -> None:
            assert "403 InvalidAccessKeyId" in await bench.fail(bench.store.put("key", DATA))

        play(server, "locked", scene)


def test_no_credentials_at_all_are_named_as_the_reason(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    async def scene(bench: Bench) -> None:
        assert "NoCredentialsError: Unable to locate credentials (1 try)" in await bench.fail(
            bench.store.put("key", DATA)
        )
        assert bench.proxy.requests == []

    play(s3, bucket, scene)


def test_a_profile_that_the_library_does_not_know_is_a_typed_error(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")

    async def scenario() -> None:
        store = S3Objects(f"s3://{bucket}/run", s3.settings())
        with pytest.raises(StorageFailed, match=rf"cannot open s3://{bucket}/run: ProfileNotFound.*nobody"):
            await store.put("key", DATA)
        await store.close()

    asyncio.run(scenario())


def test_a_listing_goes_on_behind_its_first_thousand_keys(s3: S3Server, bucket: str) -> None:
    names = [f"artifacts/{number:05d}" for number in range(1050)]

    async def scene(bench: Bench) -> None:
        direct = S3Objects(f"s3://{bucket}/run", s3.settings())
        await asyncio.gather(*(direct.put(name, b"x") for name in names))
        await direct.close()
        s3.write(bucket, "run-2/artifacts/00000", b"another run's")
        bench.proxy.plan = lambda _, number: Answer(503, "SlowDown") if number == 1 else Pass()
        assert [info.key for info in await bench.store.list("artifacts/")] == names
        assert len(bench.proxy.requests) == 3, "two pages, the second of them asked for twice"

    play(s3, bucket, scene)


def test_a_store_may_be_a_whole_bucket(s3: S3Server, bucket: str) -> None:
    async def scenario() -> None:
        store = S3Objects(f"s3://{bucket}", s3.settings())
        await store.put("traces/att_1", DATA)
        assert s3.keys(bucket) == ["traces/att_1"]
        assert [info.key for info in await store.list("traces/")] == ["traces/att_1"]
        await store.close()

    asyncio.run(scenario())


def test_more_callers_than_connections_are_all_served(s3: S3Server, bucket: str) -> None:
    async def scene(bench: Bench) -> None:
        names = [f"key{number}" for number in range(100)]
        await asyncio.gather(*(bench.store.put(name, name.encode()) for name in names))
        assert await asyncio.gather(*(bench.store.get(name) for name in names)) == [name.encode() for name in names]

    play(s3, bucket, scene)
