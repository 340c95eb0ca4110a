"""Whether a worker on another machine may and can work for a run, and that it has its folder for itself."""

import asyncio
import logging
import signal
from pathlib import Path

import msgspec
import pytest

from steelyard.config import BlobsConfig
from steelyard.coordinator.capability import CapabilityRing, Role
from steelyard.digests import digest_bytes
from steelyard.errors import InputError, Refused, StorageFailed
from steelyard.run import joining
from steelyard.sandbox.registry import Registry

RING = CapabilityRing(b"k" * 32)
KEY = RING.issue(Role.WORKER, "w1", 4e9)


def options(home: Path) -> joining.JoinOptions:
    return joining.JoinOptions(coordinators=("http://there:1/",), key_file="key", home=str(home))


def test_a_key_is_read_from_its_file_and_must_be_of_the_role(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"  {KEY}\n")
    assert joining.read_key(str(path), Role.WORKER) == KEY
    with pytest.raises(InputError, match="must hold the key of a scorer, got that of a worker"):
        joining.read_key(str(path), Role.SCORER)


@pytest.mark.parametrize("content", [None, b"", b"sk-something", b"stc-king.w1.9.x", b"\xff\xfe"])
def test_what_is_no_key_is_refused_without_showing_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="--key-file") as caught:
        joining.read_key(str(path), Role.WORKER)
    assert "something" not in str(caught.value)


def test_a_refused_key_is_bad_input() -> None:
    async def refusing() -> None:
        raise Refused("expired", "the key has expired")

    with pytest.raises(InputError, match=r"that has not expired, got: .*the key has expired"):
        asyncio.run(joining.accepted(refusing()))


def test_two_processes_with_one_key_do_not_work_in_one_folder_and_two_runs_do_not_share_one(tmp_path: Path) -> None:
    async def scene() -> None:
        async with joining.own_home(options(tmp_path), KEY) as home:
            with pytest.raises(InputError, match="used by one process at a time, but w1 works already"):
                async with joining.own_home(options(tmp_path), KEY):
                    pass
            other = msgspec.structs.replace(options(tmp_path), coordinators=("http://elsewhere:1",))
            async with joining.own_home(other, KEY) as second:
                assert second != home
            async with joining.own_home(options(tmp_path), RING.issue(Role.SCORER, "w1", 4e9)) as third:
                assert third not in (home, second)
        async with joining.own_home(options(tmp_path), KEY) as again:
            assert again == home

    asyncio.run(scene())


def test_what_a_dead_predecessor_noted_of_sandboxes_is_swept_first(tmp_path: Path) -> None:
    other = msgspec.structs.replace(options(tmp_path), coordinators=("http://elsewhere:1",))
    files = tmp_path / "left"
    files.mkdir()

    async def scene() -> None:
        async with joining.own_home(options(tmp_path), KEY) as home:
            registry = Registry(home / "sandboxes" / "rollout")
            registry.add(1, files)  # a process that is not ours: only the note and its files may go
            note = home / "sandboxes" / "rollout" / "1.json"
            note.write_bytes(note.read_bytes().replace(b'"created_at_s":', b'"created_at_s":9'))
            async with joining.own_home(other, KEY):
                assert note.exists(), "its owner lives"
        async with joining.own_home(other, KEY):
            assert not note.exists(), "whoever starts on the machine ends it"
            assert not files.exists()

    asyncio.run(scene())


def test_what_is_logged_goes_into_the_folder_while_the_worker_lives(tmp_path: Path) -> None:
    logger = logging.getLogger("steelyard.somewhere")
    with joining.own_log(tmp_path) as path:
        logger.warning("inside")
    logger.warning("outside")
    text = path.read_text(encoding="utf-8")
    assert "inside" in text
    assert "outside" not in text


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def scene() -> None:
        with pytest.raises(StorageFailed, match="--home must be writable"):
            async with joining.own_home(options(tmp_path / "file"), KEY):
                pass

    asyncio.run(scene())


def test_artifacts_must_be_in_a_folder_that_is_there(tmp_path: Path) -> None:
    async def scene() -> None:
        store = joining.open_artifacts(f"file://{tmp_path}", BlobsConfig())
        digest = await store.put(b"artifact")
        assert digest == digest_bytes(b"artifact")
        await store.close()
        with pytest.raises(InputError, match="--artifacts must be a folder that this machine shares"):
            joining.open_artifacts(f"file://{tmp_path}/nowhere", BlobsConfig())
        with pytest.raises(InputError, match="--artifacts"):
            joining.open_artifacts("ftp://somewhere", BlobsConfig())

    asyncio.run(scene())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_one_ends(number: signal.Signals) -> None:
    async def scene() -> None:
        stop = joining.watch_for_stop()
        assert not stop.is_set()
        signal.raise_signal(number)
        async with asyncio.timeout(20):
            await stop.wait()

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(scene())
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_stop_ends_a_wait_and_work_that_was_told_to_stop_ends_with_a_line() -> None:
    said: list[str] = []

    async def scene() -> None:
        stop = asyncio.Event()

        async def wait() -> int:
            stop.set()
            await asyncio.get_running_loop().create_future()
            return 1

        assert await joining.unless_stopped(wait(), stop) is None
        assert await joining.unless_stopped(_seven(), asyncio.Event()) == 7

        async def work() -> None:
            while not said:  # noqa: ASYNC110 (a line has no event of its own)
                await asyncio.sleep(0)

        await joining.work_with_news(work(), stop, said.append, lambda: "3 done")

    asyncio.run(scene())
    assert said == ["told to stop; 3 done"]


async def _seven() -> int:
    return 7
