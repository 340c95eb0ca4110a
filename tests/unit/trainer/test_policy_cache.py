"""The cache of policies: built once, whole, whoever dies or comes at the same time."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from steelyard.errors import DeadlineExceeded
from steelyard.trainer.policy_cache import ENTRY_NAME, PolicyCache

DYING_BUILDER = """
import asyncio, sys, pathlib
from steelyard.trainer.policy_cache import PolicyCache

async def build(directory):
    (directory / "half").write_bytes(b"half")
    print("building", flush=True)
    await asyncio.Event().wait()

asyncio.run(PolicyCache(pathlib.Path(sys.argv[1])).get_or_build("key", build, 10))
"""


class Builder:
    """Writes one file, after a gate opens; counts its builds."""

    def __init__(self) -> None:
        self.num_builds = 0
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, directory: Path) -> None:
        self.num_builds += 1
        self.started.set()
        await self.gate.wait()
        (directory / "model").write_bytes(b"weights")


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), 60)

    asyncio.run(main())


def test_an_entry_is_built_once_and_then_found(tmp_path: Path) -> None:
    async def work() -> None:
        build = Builder()
        cache = PolicyCache(tmp_path / "cache")
        first = await cache.get_or_build("key", build, 5)
        second = await cache.get_or_build("key", build, 5)
        assert first == second
        assert (first / "model").read_bytes() == b"weights"
        assert build.num_builds == 1

    run(work)


def test_two_at_once_build_once(tmp_path: Path) -> None:
    async def work() -> None:
        build = Builder()
        build.gate.clear()
        one = asyncio.create_task(PolicyCache(tmp_path).get_or_build("key", build, 30))
        await build.started.wait()
        other = asyncio.create_task(PolicyCache(tmp_path).get_or_build("key", build, 30))
        await asyncio.sleep(0)  # lets the other find the lock taken
        build.gate.set()
        assert await one == await other
        assert build.num_builds == 1

    run(work)


def test_who_waits_too_long_for_another_builder_learns_why(tmp_path: Path) -> None:
    async def work() -> None:
        build = Builder()
        build.gate.clear()
        one = asyncio.create_task(PolicyCache(tmp_path).get_or_build("key", build, 30))
        await build.started.wait()
        with pytest.raises(DeadlineExceeded, match="cache entry key; still missing: the process that builds it"):
            await PolicyCache(tmp_path).get_or_build("key", build, 0.0)
        build.gate.set()
        await one

    run(work)


def test_a_builder_that_is_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", DYING_BUILDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "building\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    assert not (tmp_path / "key").exists()

    async def work() -> None:
        path = await PolicyCache(tmp_path).get_or_build("key", Builder(), 5)
        assert sorted(file.name for file in path.iterdir()) == [ENTRY_NAME, "model"]

    run(work)


def test_a_build_that_fails_leaves_no_entry_and_can_be_tried_again(tmp_path: Path) -> None:
    async def fail(directory: Path) -> None:
        (directory / "half").write_bytes(b"")
        raise ValueError("no luck")

    async def work() -> None:
        with pytest.raises(ValueError, match="no luck"):
            await PolicyCache(tmp_path).get_or_build("key", fail, 5)
        path = await PolicyCache(tmp_path).get_or_build("key", Builder(), 5)
        assert not (path / "half").exists()

    run(work)


@pytest.mark.parametrize("damage", [b"other", None])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: bytes | None) -> None:
    async def work() -> None:
        build = Builder()
        path = await PolicyCache(tmp_path).get_or_build("key", build, 5)
        if damage is None:
            (path / "model").unlink()
        else:
            (path / "model").write_bytes(damage)
        again = await PolicyCache(tmp_path).get_or_build("key", build, 5)
        assert (again / "model").read_bytes() == b"weights"
        assert build.num_builds == 2

    run(work)


def test_keys_do_not_share_an_entry(tmp_path: Path) -> None:
    async def work() -> None:
        build = Builder()
        await PolicyCache(tmp_path).get_or_build("one", build, 5)
        await PolicyCache(tmp_path).get_or_build("two", build, 5)
        assert build.num_builds == 2

    run(work)
